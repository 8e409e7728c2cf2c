"""Clusters with several kinds of hosts, from a TOML file or a line of text.

Together, all hosts run at the speed of the slowest, so each kind is also planned separately.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core import SettingsError
from .cluster_text import has_devices, parse_cluster
from .clusters import Cluster, as_cluster, read_toml

KIND = "kind"
"""Key of the tables, one per kind of host, in a cluster file."""


def as_clusters(given: Cluster | str | Path) -> list[Cluster]:
    """Return the cluster that a user's argument describes, or several if it has several kinds of hosts.

    For several kinds, the first cluster has all hosts, and each of the others has the hosts of one kind.

    >>> [f"{one.num_devices} {one.chip.name}" for one in as_clusters("2 hosts x 8 H100 + 1 host x 8 A100, 9Gb/s")]
    ['24 H100 and A100', '16 H100', '8 A100']
    """
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml")):
        values = read_toml(given)
        if KIND in values:
            return mixed(values)
    elif isinstance(given, str):
        texts = _texts(given)
        if len(texts) > 1:
            return mixed({KIND: [parse_cluster(text) for text in texts]})
    return [as_cluster(given)]


def _texts(given: str) -> list[str]:
    """Return a line of text for each kind of host in a line such as "2 hosts x 8 H100 + 4 hosts x 8 A100, 400Gb/s".

    Kinds are separated by "+", "&", "and" or "plus". The text after the first comma of the last kind is appended to all
    kinds without a comma.

    >>> _texts("2 hosts x 8 H100 + 4 hosts x 8 A100, 400Gb/s")
    ['2 hosts x 8 H100, 400Gb/s', '4 hosts x 8 A100, 400Gb/s']
    """
    kinds = [text.strip() for text in re.split(r"\+|&|\b(?:and|plus)\b", given)]
    if "+" not in given and not all(map(has_devices, kinds)):
        return [given]
    rest = kinds[-1].partition(",")[2].strip()
    return [text if "," in text or not rest else f"{text}, {rest}" for text in kinds]


def mixed(values: Mapping[str, Any]) -> list[Cluster]:
    """Return the clusters of settings that have a table for each kind of host: all hosts together, then each kind.

    Settings outside of these tables apply to all kinds.

    >>> strong, weak = {"device": "A100", "hosts": 1, "per_host": 8}, {"device": "V100", "hosts": 2, "per_host": 8}
    >>> together, *apart = mixed({"gbits": 100, "kind": [strong, weak]})
    >>> together.num_devices, together.chip.name, [one.num_devices for one in apart]
    (24, 'A100 and V100', [8, 16])
    """
    kinds, shared = values[KIND], {key: value for key, value in values.items() if key != KIND}
    if not isinstance(kinds, list) or len(kinds) < 2 or not all(isinstance(kind, Mapping) for kind in kinds):
        raise SettingsError(
            "hosts of several kinds must be written as two or more tables [[kind]]",
            got=repr(kinds),
            remedy="write a table [[kind]] for each of at least two kinds, or none",
        )
    apart = [Cluster.from_dict({**shared, **kind}) for kind in kinds]
    if len({one.per_host for one in apart}) > 1:
        raise SettingsError(
            "hosts of all kinds must have the same number of devices",
            got=" and ".join(f"{one.per_host} {one.chip.name}" for one in apart),
            remedy="plan for each kind separately, or omit devices of the larger hosts",
        )
    return [_together(apart, shared, kinds[0]), *apart]


def _together(apart: Sequence[Cluster], shared: Mapping[str, Any], first: Mapping[str, Any]) -> Cluster:
    own = {key: value for key, value in first.items() if key != "devices"}
    hosts = sum(one.hosts for one in apart)
    whole = Cluster.from_dict({**shared, **own, "hosts": hosts, "per_host": apart[0].per_host})
    network = whole.network
    chips = [one.chip for one in apart]
    slowest = min(chips, key=lambda one: one.rate("fp32"))
    precisions = set.intersection(*(set(one.flops) for one in chips))
    chip = replace(
        slowest,
        name=" and ".join(one.name for one in chips),
        flops={precision: min(one.flops[precision] for one in chips) for precision in precisions},
        memory=min(one.memory for one in chips),
        bandwidth=min(one.bandwidth for one in chips),
    )
    if len({one.currency for one in apart if one.price is not None}) > 1:
        raise SettingsError(
            "prices of all kinds must be in the same currency",
            got=" and ".join(f"{one.currency}{one.price:g}" for one in apart if one.price is not None),
            remedy="convert them to one currency",
        )
    prices = [one.price * one.num_devices for one in apart if one.price is not None]
    assumption = (
        f"every device gets as many samples, so that all are as fast as a {slowest.name} and hold as much as the least"
    )
    return replace(
        whole,
        chip=chip,
        inside=min((one.inside for one in apart), key=lambda way: way.rate),
        network=min(
            (one.network for one in apart if one.network is not None), key=lambda way: way.rate, default=network
        ),
        price=sum(prices) / whole.num_devices if len(prices) == len(apart) else None,
        assumed=(*dict.fromkeys(text for one in apart for text in one.assumed), assumption),
    )
