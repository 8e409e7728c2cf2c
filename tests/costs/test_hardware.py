"""Devices, links and exchanges: the catalogue's figures, and the results of the formulas."""

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
    assert made.rate("bf16") == pytest.approx(0.75e12)
    with pytest.raises(DeviceError, match="without memory"):
        make_chip("mine", {"flops": 1e12, "bandwidth": 1e11})
    with pytest.raises(DeviceError, match="flopz"):
        make_chip("A100", {"flopz": 1})


def test_large_products_are_compute_bound_and_small_operations_launch_bound() -> None:
    a100 = chip("A100")
    large = a100.computing(PassCost(flops=1e14, operations=4, products=4), 1, "bf16")
    assert large == pytest.approx(1e14 / a100.rate("bf16"), rel=0.05)
    small = PassCost(flops=1e6, operations=100, products=4)
    assert a100.computing(small, 1, "bf16") < a100.starting(small.operations) / 5
    assert a100.starting(small.operations, captured=True) < a100.starting(small.operations) / 5


def test_products_move_bytes_while_they_compute_and_fused_operations_move_fewer() -> None:
    a100 = chip("A100")
    alone = PassCost(flops=1e12, operations=2, products=1)
    feeding = PassCost(flops=1e12, moved=1e9, product_moved=1e9, operations=2, products=1)
    beside = PassCost(flops=1e12, moved=1e9, fused=2e8, operations=2, products=1)
    first, second = (a100.computing(work, 1, "bf16") for work in (alone, feeding))
    assert second < 1.1 * first
    third, fourth = (a100.computing(beside, 1, "bf16", fused=fused) for fused in (False, True))
    assert third - first == pytest.approx(1e9 / (a100.bandwidth * a100.streaming))
    assert fourth - first == pytest.approx(2e8 / (a100.bandwidth * a100.streaming))


def test_rings_in_a_directly_wired_host_use_the_links_between_their_devices() -> None:
    mesh = link("NVLink 2")
    pair, whole = (ExchangeGroup(size=size, per_host=8, inside=mesh) for size in (2, 8))
    assert all_reduce(1e9, pair) > 3 * all_reduce(1e9, whole) * (1 / 2) / (7 / 8)
    assert link("NVLink 3").within(2) == link("NVLink 3").within(8)


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


def test_fp32_products_on_tensor_cores_are_faster_where_a_device_has_them() -> None:
    plain, narrow = PassCost(flops=1e13, products=1), PassCost(flops=1e13, tf32=1e13, products=1)
    for name, least, most in (("A100", 6, 8), ("V100", 1, 1), ("RTX-3090", 1, 1)):
        device = chip(name)
        gain = device.computing(plain, 1, "fp32") / device.computing(narrow, 1, "fp32")
        assert least <= round(gain, 3) <= most, name
    a100 = chip("A100")
    assert a100.computing(plain, 1, "bf16") == a100.computing(narrow, 1, "bf16")


def test_faster_ethernet_is_never_slower() -> None:
    rates = [link("Ethernet", gbits * 1e9 / 8).rate for gbits in (1, 9, 10, 11, 25, 40, 49, 100, 200)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(0.9 * 0.125e9)
    assert rates[4] == pytest.approx(1.72e9, rel=0.01)
