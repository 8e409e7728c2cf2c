"""Devices, links and exchanges: the catalogue's figures and what the formulas must give."""

from __future__ import annotations

import pytest

from manyhands.core import DeviceError
from manyhands.costs import ExchangeGroup, PassCost, Servers, all_gather, all_reduce, chip, link, make_chip


def group(size: int, per_host: int = 8, **more: object) -> ExchangeGroup:
    return ExchangeGroup(
        size=size, per_host=per_host, inside=link("NVLink 3"), network=link("InfiniBand", 12.5e9), **more
    )  # type: ignore[arg-type]


def test_chip_is_found_by_the_driver_name() -> None:
    assert chip("NVIDIA A100-SXM4-40GB").memory == 40e9
    assert chip("NVIDIA H100 80GB HBM3").name == "H100"
    assert chip("Tesla V100-SXM2-16GB").name == "V100"
    with pytest.raises(DeviceError, match="one of the catalogue .*got 'A1000'"):
        chip("A1000")


def test_custom_chip_is_defined_by_its_figures() -> None:
    made = make_chip("mine", {"flops": 1e12, "memory": 8e9, "bandwidth": 1e11})
    assert made.rate("bf16") == pytest.approx(0.6e12)
    with pytest.raises(DeviceError, match="without memory"):
        make_chip("mine", {"flops": 1e12, "bandwidth": 1e11})
    with pytest.raises(DeviceError, match="flopz"):
        make_chip("A100", {"flopz": 1})


def test_large_matmuls_are_compute_bound_and_small_ones_launch_bound() -> None:
    a100 = chip("A100")
    large = a100.seconds(PassCost(flops=1e14, operations=4), 1, "bf16")
    assert large == pytest.approx(1e14 / a100.rate("bf16"), rel=0.05)
    small = a100.seconds(PassCost(flops=1e6, operations=100), 1, "bf16")
    assert small == pytest.approx(100 * a100.operation, rel=0.05)
    assert a100.seconds(PassCost(flops=1e6, operations=100), 1, "bf16", captured=True) < small / 5


def test_all_reduce_estimate_matches_measurements_on_eight_a100() -> None:
    # A published fit: 79 microseconds and 227 GB/s of bus bandwidth, from 1 MB to 1 GB.
    for size in (64e6, 256e6, 1e9):
        measured = 79e-6 + 2 * 7 / 8 * size / 227e9
        assert all_reduce(size, group(8)) == pytest.approx(measured, rel=0.1)


def test_network_bandwidth_limits_collectives_between_hosts() -> None:
    assert all_reduce(1e9, group(16)) > 10 * all_reduce(1e9, group(8))
    assert all_reduce(1e9, group(16)) == pytest.approx(2 * 15 / 16 * 1e9 / 10e9, rel=0.01)
    assert all_reduce(1e9, group(2, per_host=1, sharing=8)) > 7 * all_reduce(1e9, group(2, per_host=1))
    assert all_gather(1e9, group(16)) == pytest.approx(all_reduce(1e9, group(16)) / 2, rel=0.01)
    assert all_reduce(1e9, group(1)) == 0


def test_small_all_reduce_on_many_ranks_uses_a_tree() -> None:
    ring_alone = 2 * 1023 * (link("NVLink 3").latency * 7 + link("InfiniBand", 1e9).latency) / 8
    assert all_reduce(1e3, group(1024)) < ring_alone / 10


def test_hottest_server_determines_the_round_time() -> None:
    even = Servers(count=4, hottest=0.25, way=link("RoCE", 3.125e9))
    hot = Servers(count=4, hottest=0.74, way=link("RoCE", 3.125e9))
    assert hot.rounds(553e6, 16)[0] == pytest.approx(0.74 / 0.25 * even.rounds(553e6, 16)[0], rel=1e-3)
