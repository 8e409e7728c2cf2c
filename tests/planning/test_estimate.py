"""Estimates: each part of a step follows its formula, and published figures are met."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyhands.core import SettingsError, StrategySpec
from manyhands.costs import Chip, Network, NetworkPart, PassCost, Servers, chip, link, trace
from manyhands.planning import Cluster, Workload, as_cluster, as_clusters, estimate
from manyhands.planning.estimate import Estimate, waiting, waiting_for
from manyhands.planning.memory import footprint
from manyhands.planning.schedules import Turn, makespan, run, split_stages

from ..costs.networks import gpt_task

CLOCK = Chip(name="clock", flops={"fp32": 1.0}, memory=1e12, bandwidth=1e30, reach=1.0, ramp=0.0, operation=0.0)


def timed(seconds: float, params: float, pieces: int = 8, **more: Any) -> Workload:
    """A network whose forward and backward of one sample take so long on a clock."""
    made = tuple(
        NetworkPart(
            name=str(index),
            forward=PassCost(flops=seconds / 3 / pieces),
            backward=PassCost(flops=2 * seconds / 3 / pieces),
            param_bytes=int(4 * params / pieces),
            params=int(params / pieces),
            output=1e6,
            kept=1e6,
            is_repeated=True,
        )
        for index in range(pieces)
    )
    network = Network(rows=1, pieces=made, state_bytes=int(8 * params))
    return Workload(networks={"fp32": network}, **{"batch_size": 64, **more})


def cluster(devices: int, per_host: int = 8, gbits: float = 100.0, **more: Any) -> Cluster:
    hosts = -(-devices // per_host)
    made = Cluster(
        hosts=hosts,
        per_host=min(devices, per_host),
        chip=CLOCK,
        inside=link("NVLink 3"),
        network=link("InfiniBand", gbits * 1e9 / 8) if hosts > 1 else None,
        spread=0.0,
    )
    return replace(made, **more)


def step(workload: Workload, where: Cluster, **spec: Any) -> Estimate:
    return estimate(workload, where, StrategySpec(**spec))


def test_split_sequences_divide_computation_and_activations_and_send_keys_and_values() -> None:
    workload = timed(8.0, 1e6, batch_size=1)
    alone, split = step(workload, cluster(4)), step(workload, cluster(4), context=4)
    assert split.compute == pytest.approx(alone.compute / 4)
    assert split.memory.activations == pytest.approx(alone.memory.activations / 4)
    assert split.memory.parameters == alone.memory.parameters
    assert split.communication > step(workload, cluster(4), context=2).communication > 0


def test_single_device_step_is_compute_only() -> None:
    one = step(timed(0.01, 1e6), cluster(1))
    assert one.seconds == pytest.approx(0.64)
    assert (one.communication, one.bubble, one.stragglers, one.input) == (0, 0, 0, 0)


def test_all_reduce_overlaps_backward_until_the_network_is_too_slow() -> None:
    work = timed(0.1, 1e8, batch_size=16)
    fast, slow = (step(work, cluster(16, gbits=gbits), replicas=16) for gbits in (400, 10))
    assert fast.communication < 0.15 * fast.compute
    assert slow.communication == pytest.approx(2 * 15 / 16 * 4e8 / 1e9 - fast.compute * 2 / 3, rel=0.15)
    apart = step(replace(work, overlaps=False), cluster(16, gbits=400), replicas=16)
    assert apart.communication > fast.communication


def test_compressed_gradients_reduce_communication_time() -> None:
    work = timed(0.1, 1e9, batch_size=16)
    exact, half = (step(work, cluster(16, gbits=10), replicas=16, sync=sync) for sync in ("allreduce", "bf16"))
    assert half.communication < 0.55 * exact.communication


def test_pipeline_bubble_matches_the_formula() -> None:
    work = timed(0.1, 1e6, batch_size=8)
    staged = step(work, cluster(4), stages=4, microbatches=8)
    assert staged.compute == pytest.approx(8 * 0.1 / 4, rel=0.01)
    assert staged.bubble == pytest.approx(3 / 8 * staged.compute, rel=0.02)
    assert step(work, cluster(4), stages=4).bubble > 5 * staged.bubble / 2


def test_pipeline_schedule_makespans() -> None:
    assert makespan([1, 1, 1], [2, 2, 2], 0.0, 6, "gpipe") == pytest.approx(3 * 6 + 2 * 3)
    assert makespan([1, 1, 1], [2, 2, 2], 0.0, 6, "1f1b") == pytest.approx(3 * 6 + 2 * 3)
    uneven = makespan([1, 2, 1], [2, 4, 2], 0.0, 5)
    assert 5 * 6 + 3 < uneven <= (3 + 6 + 3) + 4 * 6  # the closed form is its bound
    closed = makespan([1.0] * 4, [2.0] * 4, 0.0, 1000)
    assert closed == pytest.approx(12 + 999 * 3)
    assert makespan([1, 1], [2, 2], 0.5, 2) > makespan([1, 1], [2, 2], 0.0, 2)


def test_other_schedules_trade_memory_for_a_smaller_bubble() -> None:
    work = timed(0.1, 1e6, batch_size=16)
    usual, interleaved, zero = (
        step(work, cluster(4), stages=4, microbatches=16, schedule=name)
        for name in ("1f1b", "interleaved", "zero-bubble")
    )
    assert interleaved.bubble == pytest.approx(usual.bubble / 2, rel=1e-3)
    assert zero.bubble == pytest.approx(usual.bubble / 3, rel=1e-3)
    assert usual.memory.activations < interleaved.memory.activations < zero.memory.activations


def test_simulation_of_a_thousand_devices_is_deterministic() -> None:
    turns = [Turn(("step", device, 0), device, 1 + device % 7) for device in range(1000)]
    turns += [Turn(("sum", 0), "network", 2.0, tuple(turn.name for turn in turns))]
    assert run(turns)["sum", 0] == 9.0
    assert run(turns) == run(turns)


def test_pipeline_stages_are_balanced() -> None:
    assert split_stages([3, 1, 1, 1, 3], 3) == [0, 1, 4]
    assert split_stages([1] * 8, 4) == [0, 2, 4, 6]
    assert len(split_stages([5, 0, 0, 0], 3)) == 3


def test_straggler_delay_grows_with_the_device_count() -> None:
    # Published order statistics.
    for count, expected in ((8, 1.42), (50, 2.25), (100, 2.50), (200, 2.75), (512, 3.04)):
        assert waiting(count) == pytest.approx(expected, abs=0.02)
    late = step(timed(0.1, 1.0, batch_size=50), cluster(50, spread=0.1), replicas=50)
    assert late.stragglers == pytest.approx(0.1 * 0.1 * 2.25, rel=0.02)
    # 50 machines: with some as backups the step is shorter, and beyond a few each costs more than it gives.
    best = min(range(12), key=lambda backups: (1 + 0.1 * waiting_for(50 - backups, backups)) / (50 - backups))
    assert 1 <= best <= 5


def test_slow_input_limits_the_step_time() -> None:
    starved = step(timed(0.001, 1e3, feed=100.0), cluster(1))
    assert starved.input == pytest.approx(0.64 - 0.064)
    assert starved.seconds == pytest.approx(0.64)


def test_hottest_parameter_server_limits_the_step_time() -> None:
    work = timed(0.5, 138e6, batch_size=16)
    even, hot = (
        estimate(
            work,
            cluster(16, per_host=4, gbits=25),
            StrategySpec(replicas=16),
            servers=Servers(count=4, hottest=share, way=link("RoCE", 25e9 / 8)),
        )
        for share in (0.25, 0.74)
    )
    assert hot.communication > 2.5 * even.communication
    # VGG-16 on 16 devices was published as slower than one device: 0.6 times its speed.
    assert 0.4 < 16 * 0.5 / hot.seconds / 1 / 1 < 1.0


def test_sharding_reduces_memory_and_increases_communication() -> None:
    work = timed(0.01, 1e9, batch_size=8)
    whole, parts = step(work, cluster(8), replicas=8), step(work, cluster(8), shards=8)
    assert parts.memory.total < 0.5 * whole.memory.total
    assert parts.communication > whole.communication
    gradients = step(work, cluster(8), shards=8, sharding="gradients")
    assert parts.memory.total < gradients.memory.total < whole.memory.total


def test_faster_devices_are_never_slower_where_two_groups_exchange_gradients() -> None:
    for pieces in (1, 8):
        work = timed(0.1, 1e9, pieces=pieces, batch_size=64)
        seconds = [
            step(work, cluster(16, gbits=800, chip=replace(CLOCK, flops={"fp32": speed})), shards=8, replicas=2).seconds
            for speed in (0.5, 1, 2, 3, 5, 10, 100)
        ]
        assert seconds == sorted(seconds, reverse=True)


def test_gathered_parameters_and_gradients_are_copied_through_buffers() -> None:
    work, where = timed(10.0, 1e9, batch_size=8), cluster(8)
    slow = replace(where, chip=replace(CLOCK, bandwidth=1e12, streaming=1.0))
    fast, copied = (step(work, one, shards=8).communication for one in (where, slow))
    assert copied - fast == pytest.approx(2 * 3 * 4e9 / 1e12)


def test_recompute_trades_time_for_memory() -> None:
    network = trace(gpt_task(layers=8), gpt_task().data, rows=8)
    work = Workload(networks={"fp32": network}, batch_size=8)
    here = Cluster.parse("1 A100")
    plain, again = (estimate(work, here, StrategySpec(recompute=what)) for what in ("", "blocks"))
    assert again.compute > plain.compute
    assert again.memory.activations + again.memory.working < 0.6 * (plain.memory.activations + plain.memory.working)


def test_accumulation_reduces_activation_memory() -> None:
    network = trace(gpt_task(), gpt_task().data, rows=8)
    spec = [StrategySpec(accumulate=count) for count in (1, 8)]
    few, many = (footprint(network, network.pieces, one, 64 / one.accumulate) for one in spec)
    assert many.activations == pytest.approx(few.activations / 8, rel=0.01)


def test_memory_matches_the_published_zero_formulas() -> None:
    # Mixed-precision training with Adam holds about 16 bytes per parameter, and a d-th of them where all is cut.
    work = timed(0.01, 1e9, batch_size=8)
    network = work.network("fp32")
    plain = footprint(network, network.pieces, StrategySpec(accumulate=2), 0)
    assert plain.total == pytest.approx(16e9, rel=0.01)
    parts = footprint(network, network.pieces, StrategySpec(shards=8), 0)
    gathered = 2 * network.pieces[0].param_bytes
    assert parts.total == pytest.approx(16e9 / 8 + gathered, rel=0.01)


def test_tensor_parallelism_speeds_up_only_within_a_host() -> None:
    made = gpt_task(width=1024, layers=4, heads=16, length=512)
    network = trace(made, torch.zeros(1, 513).long(), rows=8)
    work = Workload(networks={"fp32": network}, batch_size=8)
    here, wide = Cluster.parse("8 A100"), Cluster.parse("8 hosts x 1 A100, 10Gb/s")
    one, eight, far = (
        estimate(work, where, StrategySpec(tensor=count)) for where, count in ((here, 1), (here, 8), (wide, 8))
    )
    assert one.seconds / 8 < eight.seconds < one.seconds
    assert far.communication > 10 * eight.communication


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "name", "rate"),
    [
        ("8 hosts x 8 H100, 400Gb/s", 8, 8, "H100", 50e9),
        ("2 x 4 V100, 100Gb/s InfiniBand", 2, 4, "V100", 12.5e9),
        ("64 A100, 8 per host, 200 Gbit/s RoCE per device", 8, 8, "A100", 200e9),
        ("4 nodes x 8 K80, 10GbE", 4, 8, "K80", 1.25e9),
        ("16 CPU", 1, 16, "CPU", 0),
        ("8 H100 PCIe 5, $2.5/h", 1, 8, "H100-PCIe", 0),
    ],
)
def test_cluster_text_is_parsed(text: str, hosts: int, per_host: int, name: str, rate: float) -> None:
    made = as_cluster(text)
    assert (made.hosts, made.per_host, made.chip.name) == (hosts, per_host, name)
    assert (made.network.bandwidth if made.network else 0) == pytest.approx(rate)
    if "$" in text:
        assert made.price == 2.5
        assert made.inside.name == "PCIe 5"


def test_cluster_lists_its_assumptions() -> None:
    assumed = " ".join(as_cluster("8 hosts x 8 H100, 400Gb/s").assumed)
    assert "InfiniBand between hosts" in assumed
    assert "as a whole" in assumed
    assert "datasheet" in assumed


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("eight of them", "hosts times devices"),
        ("2 hosts x 8 H100", "the speed of its network"),
        ("8 hosts x 8 H900, 10Gb/s", "one of the catalogue"),
        ("8 H100, 7 per host", "devices must be hosts times"),
        ("8 H100, warp drive", "'warp'"),
        ("0 hosts x 8 H100, 10Gb/s", "at least 1"),
    ],
)
def test_invalid_clusters_are_rejected(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        as_cluster(text)


def test_cluster_files_are_parsed_and_validated(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'hosts = 2\nper_host = 4\ndevice = "mine"\ngbits = 25\nnetwork = "RoCE"\nprice = 1.5\n'
        "[chip]\nflops = 1e14\nmemory = 24e9\nbandwidth = 1e12\n"
    )
    made = as_cluster(str(path))
    assert (made.num_devices, made.chip.memory, made.price) == (8, 24e9, 1.5)
    path.write_text('hosts = 2\nper_host = 4\ndevices = 9\ndevice = "H100"\ngbits = 25\n')
    with pytest.raises(SettingsError, match="9 devices, 2 hosts of 4"):
        as_cluster(path)
    path.write_text("hosts = = 2")
    with pytest.raises(SettingsError, match="must be valid TOML"):
        as_cluster(path)
    path.write_text('hosts = 2\nwheels = 4\ndevice = "H100"\n')
    with pytest.raises(SettingsError, match="wheels"):
        as_cluster(path)


def test_mixed_host_kinds_yield_a_combined_and_separate_clusters(tmp_path: Any) -> None:
    path = tmp_path / "two.toml"
    kinds = '[[kind]]\ndevice = "H100"\nhosts = 2\nper_host = 8\n[[kind]]\ndevice = "V100"\nper_host = {}\n'
    path.write_text("gbits = 100\nprice = 2\n" + kinds.format(8))
    together, strong, weak = as_clusters(path)
    assert (together.num_devices, strong.num_devices, weak.num_devices) == (24, 16, 8)
    assert together.chip.memory == weak.chip.memory
    assert together.inside == weak.inside
    assert together.price == 2
    assert any("as fast as a V100" in text for text in together.assumed)
    work = timed(0.1, 1e6)
    assert step(work, together, replicas=16).seconds > step(work, strong, replicas=16).seconds
    path.write_text("gbits = 100\n" + kinds.format(4))
    with pytest.raises(SettingsError, match="same number of devices, but got 8 H100 and 4 V100"):
        as_clusters(path)
    path.write_text('gbits = 100\n[kind]\ndevice = "H100"\n')
    with pytest.raises(SettingsError, match=r"tables \[\[kind\]\]"):
        as_clusters(path)


def test_estimates_are_finite_for_any_reasonable_spec() -> None:
    work = timed(0.1, 1e7)
    for spec in (StrategySpec(replicas=4, tensor=2, stages=4, microbatches=4), StrategySpec(shards=4, replicas=8)):
        assert math.isfinite(estimate(work, cluster(32), spec).seconds)


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    made = gpt_task(width=1024, layers=4, heads=16, words=1000, length=1024)
    network = trace(made, torch.zeros(1, 1025).long(), rows=1)
    work = Workload(networks={"fp32": network}, batch_size=8)
    where = Cluster.parse("8 A100")
    whole, split = (estimate(work, where, StrategySpec(tensor=8, layout=layout)) for layout in ("", "*norm*:sequence"))
    assert split.compute < whole.compute
    assert split.memory.activations < 0.7 * whole.memory.activations
    alone, halved = (
        estimate(work, where, StrategySpec(tensor=size, layout="*norm*:sequence", recompute="selective"))
        for size in (1, 8)
    )
    assert halved.memory.activations < 0.2 * alone.memory.activations


def test_loss_of_many_classes_is_split_by_tensor_parallelism() -> None:
    made = gpt_task(width=64, layers=2, heads=4, words=50000, length=64)
    network = trace(made, torch.zeros(1, 65).long(), rows=1)
    assert network.pieces[-1].is_split
    work = Workload(networks={"fp32": network}, batch_size=64)
    alone, split = (estimate(work, Cluster.parse("8 A100"), StrategySpec(tensor=size)) for size in (1, 8))
    assert split.memory.activations < 0.2 * alone.memory.activations


def test_small_products_leave_more_multiprocessors_idle() -> None:
    gpu, cpu = chip("A100"), chip("CPU")

    def seconds(device: Chip, width: float) -> float:
        flops = 2 * 8192 * width**2
        work = PassCost(flops=flops, depth=width, products=1)
        return device.computing(work, 1, "bf16") / (flops / device.rate("bf16"))

    assert seconds(gpu, 1024) > seconds(gpu, 4096) > seconds(gpu, 16384) > 1
    assert seconds(gpu, 1024) < 1.25 + 0.2
    assert seconds(cpu, 1024) == pytest.approx(1, abs=1e-3)


def test_several_kinds_of_hosts_in_a_line_share_the_network_that_follows_them() -> None:
    together, first, second = as_clusters("2 hosts x 8 H100 + 4 hosts x 8 A100, 400Gb/s")
    assert (together.num_devices, first.num_devices, second.num_devices) == (48, 16, 32)
    assert {one.network.bandwidth for one in (together, first, second)} == {50e9}
