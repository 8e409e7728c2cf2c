"""Clusters as users write them: understood, or refused with a remedy."""

from __future__ import annotations

import re

import pytest
from benchmarks.plan_texts import PRICES, REFUSED, UNDERSTOOD, share_understood

from manyhands.core import UsageError
from manyhands.planning import as_cluster, as_clusters


def test_all_texts_of_the_benchmark_are_understood() -> None:
    assert share_understood() == 1.0


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_cluster_text_gives_hosts_devices_and_network(text: str) -> None:
    made = as_cluster(text)
    gbits = made.network.bandwidth * 8 / 1e9 if made.network is not None else 0
    assert (made.hosts, made.per_host, made.chip.name) == UNDERSTOOD[text][:3]
    assert gbits == pytest.approx(UNDERSTOOD[text][3])


@pytest.mark.parametrize("text", PRICES)
def test_price_is_that_of_one_device_in_its_currency(text: str) -> None:
    made = as_cluster(text)
    assert (made.price, made.currency) == PRICES[text]


@pytest.mark.parametrize("text", REFUSED)
def test_unclear_cluster_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(REFUSED[text])) as refused:
        as_clusters(text)
    assert refused.value.remedy


def test_number_of_devices_in_a_host_is_listed_as_assumed() -> None:
    assert "8 devices in a host" in " ".join(as_cluster("64 H100, 400Gb/s").assumed)


def test_hosts_of_several_kinds_run_over_the_slowest_network() -> None:
    together, *_ = as_clusters("2 hosts x 8 H100, 400Gb/s + 4 hosts x 8 A100, 100Gb/s")
    assert together.network is not None
    assert together.network.bandwidth == pytest.approx(12.5e9)
