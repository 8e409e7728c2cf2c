"""Advice: four programs that are slow on purpose are reported with the remedy; every rule, on recorded numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import manyhands as mh
from manyhands.profiling import Larger, Largest, MemoryProfile, OperationTable, Profile, RankProfile, ReadingLine
from manyhands.profiling.memory import KINDS
from manyhands.training import Breakdown

from . import programs


def named(profile: Profile) -> dict[str, str]:
    return {one.name: str(one) for one in profile.advice}


# -- real programs -----------------------------------------------------------------------------------------------------


def test_starved_input_is_diagnosed() -> None:
    found = mh.profile(programs.starved(), mh.Single(), on="cpu", steps=6)
    assert found.advice[0].name == "starved input"
    assert "the training process itself reads" in found.advice[0].evidence
    assert "workers=" in found.advice[0].remedy
    assert found.advice[0].gain > 1.5


@pytest.mark.parametrize("workers", [0, 1])
def test_slow_line_of_a_dataset_is_named(workers: int) -> None:
    found = mh.profile(programs.uneven(workers), mh.Single(), on="cpu", steps=6)
    text = named(found)["starved input"]
    assert re.search(r"programs\.py:\d+ in decoded: (sample\.add_\(1\.0\)|while time\.perf_counter\(\) < end)", text), (
        text
    )
    assert re.search(r"make programs\.py:\d+ faster", text)
    lines = found.ranks[0].reading
    assert sum(line.share for line in lines if line.function == "decoded") > 0.8
    assert found.to_dict()["ranks"][0]["reading"][0]["function"] == "decoded"


@pytest.mark.parametrize("workers", [0, 1])
def test_slow_collate_is_named(workers: int) -> None:
    found = mh.profile(programs.collated(workers), mh.Single(), on="cpu", steps=6)
    assert "in slow_collate: time.sleep(0.02)" in named(found)["starved input"]


def test_tiny_batch_is_diagnosed() -> None:
    found = mh.profile(programs.tiny(), mh.Single(), on="cpu", steps=20)
    assert "batch_size=4 or more" in named(found)["tiny batch"]


def test_slow_rank_is_diagnosed() -> None:
    found = mh.profile(programs.lame(), "mirrored", on="cpu*2", steps=10)
    assert [one.rank for one in found.stragglers] == [1]
    assert found.advice[0].name == "slow rank"
    assert "rank 1" in found.advice[0].evidence
    assert "in forward" in found.advice[0].evidence
    assert "backup=1" in found.advice[0].remedy


def test_hot_parameter_is_diagnosed() -> None:
    found = mh.profile(programs.hot(), "mirrored", on="cpu*2", steps=6)
    text = named(found)["hot parameter"]
    assert "table.weight has 100% of the bytes" in text
    assert "of its rows" in text
    assert "mh.strategies.Embedding(rows, dim)" in text


def test_oversubscribed_threads_are_measured() -> None:
    task = programs.healthy(64).replace(model=programs.Crowd)
    found = mh.profile(task, "mirrored", on="cpu*2", steps=4)
    assert found.ranks[0].threads == 16
    assert found.ranks[0].with_fewer_threads is not None


def test_healthy_program_gets_no_advice() -> None:
    found = mh.profile(programs.healthy(1024), mh.Single(), on="cpu", steps=6)
    assert not {"starved input", "tiny batch", "slow copy", "too many threads", "tight memory"} & set(named(found))


# -- rules on numbers --------------------------------------------------------------------------------------------------


def rank(number: int = 0, **more: Any) -> RankProfile:
    seconds = {"forward": 0.01, "backward": 0.02, **more.pop("seconds", {})}
    total = sum(seconds.values())
    return RankProfile(
        breakdown=Breakdown(rank=number, host="host1", seconds=seconds, total=total, steps=(1, 2)), **more
    )


def profile(*ranks: RankProfile, **more: Any) -> Profile:
    return Profile(**{"name": "task", "strategy": "replicas=1", "batch_size": 32, "ranks": ranks, **more})


READ = ReadingLine(place="digits.py:3", function="__getitem__", text="image = decode(path)", share=0.8)


def held(**kinds: int) -> MemoryProfile:
    sizes = {kind: (kinds.get(kind.replace(" ", "_"), 0),) for kind in KINDS}
    return MemoryProfile(moments=(0.0,), bytes=sizes, phases=("backward",))


@pytest.mark.parametrize(
    ("found", "name", "words", "gain"),
    [
        (profile(rank(seconds={"input": 0.03})), "starved input", "50% of a step, 30 ms", 2.0),
        (profile(rank(seconds={"input": 0.03}, workers=2)), "starved input", "2 worker processes read", 2.0),
        (profile(rank(seconds={"input": 0.03}, workers=1)), "starved input", "1 worker process reads", 2.0),
        (
            profile(rank(seconds={"input": 0.03}, reading=(READ, replace(READ, place="other.py:1", share=0.1)))),
            "starved input",
            "80% of the reading is digits.py:3 in __getitem__: image = decode(path)",
            2.0,
        ),
        (
            profile(rank(seconds={"input": 0.03}, reading=(replace(READ, share=0.1),))),
            "starved input",
            "make a sample cheaper to read",
            2.0,
        ),
        (profile(rank(seconds={"copy": 0.01})), "slow copy", "smaller type", 1.14),
        # As on an H200: a plain step of 128 rows takes 1.2 ms, of which 0.1 ms is work.
        (
            profile(
                rank(
                    seconds={"forward": 0.0004, "backward": 0.0008},
                    larger=Larger(rows=512, seconds=0.0013, usual=0.0012),
                    watched=OperationTable(operations=(), modules=(), bars=(), busy=0.09),
                ),
                batch_size=128,
            ),
            "tiny batch",
            "the device is busy 9% of the time",
            3.69,
        ),
        (
            profile(rank(0, seconds={"communication": 0.07}), rank(1, seconds={"forward": 0.08})),
            "slow rank",
            "rank 1 on host1 needs 100 ms for its own work in a step, the others 30 ms",
            3.33,
        ),
        (
            profile(
                *(
                    rank(
                        n,
                        seconds={"communication": 0.03},
                        largest=Largest(name="emb.weight", bytes=90 << 20, total=100 << 20, rows=0.01),
                    )
                    for n in range(2)
                )
            ),
            "hot parameter",
            "emb.weight has 90% of the bytes that replicas exchange (90 MiB of 100 MiB)",
            1.80,
        ),
        (
            profile(*(rank(n, seconds={"communication": 0.03}, sent=10 << 20) for n in range(2))),
            "exposed communication",
            "50% of a step, 30 ms, is waiting for exchanges, 10 MiB a rank",
            1.33,
        ),
        (
            profile(*(rank(n, seconds={"communication": 0.03}) for n in range(2)), spec={"servers": 2}),
            "exposed communication",
            "waiting for pulls, pushes and other workers; more servers share the work, servers=4",
            1.33,
        ),
        (
            profile(rank(memory=held(parameters=1 << 30, activations=13 << 30), device_memory=16 << 30)),
            "tight memory",
            'recompute="blocks"',
            1.0,
        ),
        (
            profile(rank(memory=held(parameters=4 << 30, optimizer_state=10 << 30), device_memory=16 << 30)),
            "tight memory",
            'sharding="optimizer"',
            1.0,
        ),
        (
            profile(rank(threads=16, cores=2, with_fewer_threads=0.015)),
            "too many threads",
            "16 threads on 2 cores",
            2.0,
        ),
        (profile(rank(), epoch_steps=10, valid_steps=30), "frequent validation", "50% of an epoch will be", 1.6),
        (profile(rank(), upkeep={"validation": 0.4, "save": 0.0}), "frequent validation", "40% of the run", 1.43),
        (profile(rank(), upkeep={"validation": 0.0, "save": 0.2}), "costly checkpoints", "save_every", 1.25),
        (profile(rank(seconds={"optimizer": 0.03})), "costly update", "fused=True", 1.33),
        (profile(rank(seconds={"idle": 0.03})), "idle between steps", "callbacks", 2.0),
    ],
)
def test_advice_rules_report_name_and_gain(found: Profile, name: str, words: str, gain: float) -> None:
    said = {one.name: one for one in found.advice}
    assert name in said
    assert words in str(said[name])
    assert said[name].gain == pytest.approx(gain, rel=0.02)


def test_advice_rules_are_silent_without_a_problem() -> None:
    assert profile(rank()).advice == []
    fine = [rank(n, seconds={"communication": 0.003}) for n in range(4)]
    assert profile(*fine).advice == []
    assert profile(rank(larger=Larger(rows=128, seconds=0.11, usual=0.03))).advice == []
    # Asynchronous updates do not wait for a slow worker.
    uneven = (rank(0), rank(1, seconds={"forward": 0.08}))
    assert profile(*uneven, spec={"servers": 1, "staleness": None}).advice == []


def test_advice_is_sorted_by_gain() -> None:
    found = profile(rank(seconds={"input": 0.03, "idle": 0.03}), upkeep={"save": 0.1, "validation": 0.0})
    gains = [one.gain for one in found.advice]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) > 2
