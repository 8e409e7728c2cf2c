"""Profiles of real ranks: phases, modules, memory, page and trace; and sampled steps of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import SettingsError, UsageError, read_events
from manyhands.monitoring import PHASES
from manyhands.profiling import Profile, load_notes
from manyhands.profiling.other_load import CpuTime, others_share

from . import programs


@pytest.fixture(scope="module")
def alone() -> Profile:
    return mh.profile(programs.healthy(), mh.Single(), on="cpu", steps=6)


@pytest.fixture(scope="module")
def together() -> Profile:
    return mh.profile(programs.healthy(), mh.Mirrored(), on="cpu*2", steps=6)


def test_step_phases_sum_to_the_step_time(alone: Profile) -> None:
    for sample in alone.ranks[0].samples:
        assert set(PHASES) <= set(sample.seconds)
        assert sample.spans[0].start == 0.0
        assert all(a.end == b.start for a, b in zip(sample.spans, sample.spans[1:], strict=False))
        assert sample.spans[-1].end == pytest.approx(sample.total, rel=1e-6)
    assert alone.phases["forward"] > 0
    assert alone.phases["backward"] > 0
    assert alone.phases["communication"] == 0
    assert sum(map(alone.share, alone.phases)) == pytest.approx(1)


def test_every_rank_is_profiled_and_wait_is_separate_from_transfer(together: Profile) -> None:
    assert [one.rank for one in together.ranks] == [0, 1]
    assert all(one.parts.seconds["communication"] > 0 for one in together.ranks)
    assert together.transfer <= min(one.breakdown.seconds["communication"] for one in together.ranks)
    parameters = sum(p.numel() for p in programs.mlp().parameters())
    assert together.ranks[0].sent >= 4 * parameters


def test_all_ranks_of_a_launch_receive_the_whole_profile(engine: object) -> None:
    def work(_: mh.Hand) -> list[int]:
        return [one.rank for one in mh.profile(programs.healthy(), steps=1).ranks]

    assert mh.launch(work, on="cpu*2") == [[0, 1], [0, 1]]


def test_modules_have_forward_and_backward_times(alone: Profile) -> None:
    watched = alone.ranks[0].watched
    assert watched is not None
    found = {module.name: module for module in watched.modules}
    assert {"0", "2", "4"} <= set(found)
    assert found["2"].forward > 0
    assert found["2"].backward > 0
    assert found["2"].seconds > found["4"].seconds  # 512 x 512 against 512 x 10
    assert any(one.name == "aten::addmm" and one.count == 3 for one in watched.operations)


def test_memory_is_reported_by_kind(alone: Profile) -> None:
    memory = alone.ranks[0].memory
    assert memory is not None
    parameters = 4 * sum(p.numel() for p in programs.mlp().parameters())
    assert set(memory.bytes["parameters"]) == {parameters}
    assert max(memory.bytes["gradients"]) == parameters
    assert max(memory.bytes["optimizer state"]) == 0
    rows = 4 * 512 * 512
    # Two hidden layers' outputs are needed by backward.
    assert 2 * rows <= max(memory.bytes["activations"]) <= 5 * rows
    assert memory.bytes["activations"][-1] < rows


def test_optimizer_state_memory_is_reported() -> None:
    task = programs.healthy(32).replace(optimizer=programs.adamw)
    memory = mh.profile(task, mh.Single(), on="cpu", steps=1).ranks[0].memory
    assert memory is not None
    parameters = memory.bytes["parameters"][0]
    assert 2 * parameters <= memory.bytes["optimizer state"][0] <= 2 * parameters + 100


def test_flops_and_mfu_are_measured(alone: Profile) -> None:
    layers = 64 * 512 + 512 * 512 + 512 * 10
    assert alone.flops == pytest.approx(512 * (2 * 3 * layers - 2 * 64 * 512), rel=0.02)
    assert alone.mfu is not None
    assert 0 < alone.mfu < 1.2


def test_html_report_has_no_external_resources(together: Profile, tmp_path: Path) -> None:
    text = together.save(tmp_path / "profile.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert {track["name"] for track in data["tracks"]} >= {"rank 0, phases", "rank 1, phases", "rank 0, operations"}
    assert "forward" in data["names"]


def test_module_names_are_escaped_in_the_html_report(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("</script><b>", nn.Linear(64, 10))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.get_submodule("</script><b>")(inputs)  # type: ignore[no-any-return]

    task = programs.healthy(16).replace(model=Odd)
    text = mh.profile(task, mh.Single(), on="cpu", steps=1).save(tmp_path / "p.html").read_text()
    assert "</script><b>" not in text


def test_chrome_trace_has_a_process_for_every_rank(together: Profile, tmp_path: Path) -> None:
    events = json.loads(together.trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    bars = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0 for event in bars)
    assert {"forward", "backward", "communication", "aten::addmm"} <= {event["name"] for event in bars}
    assert any(event["ph"] == "C" and event["args"]["activations"] > 0 for event in events)


def test_report_is_printed_and_json_serializable(together: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    together.show()
    shown = capsys.readouterr()
    assert "where a step's time goes" in shown.out
    assert "aten::addmm" in shown.out
    assert shown.err == ""
    told = json.loads(json.dumps(together.to_dict()))
    assert told["ranks"][1]["phases"]["forward"] > 0
    assert told["strategy"] == "replicas=2"


@pytest.mark.parametrize("strategy", ["shards=2", "tensor=2", "stages=2,microbatches=2", "replicas=2,accumulate=2"])
def test_other_strategies_can_be_profiled(strategy: str) -> None:
    found = mh.profile(programs.healthy(64), strategy, on="cpu*2", steps=2)
    assert len(found.ranks) == 2
    assert all(one.parts.seconds["backward"] + one.parts.seconds["communication"] > 0 for one in found.ranks)
    assert all(one.parts.seconds["communication"] > 0.02 * one.parts.total for one in found.ranks)
    assert all(one.memory is not None and max(one.memory.totals) > 0 for one in found.ranks)


def test_parameter_server_workers_are_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    found = mh.profile(programs.healthy(64), mh.ParameterServer(servers=2, workers=2), on="cpu*2", steps=3)
    assert [one.rank for one in found.ranks] == [0, 1]
    assert len(found.ranks[0].breakdown.steps) >= 3
    for one in found.ranks:
        assert all(one.parts.seconds[name] > 0 for name in ("input", "copy", "forward", "backward", "communication"))
    assert found.flops is not None
    found.show()
    assert re.search(r"server \d of 2 is the hottest: \d+% of all bytes", capsys.readouterr().out)


def test_custom_step_is_profiled() -> None:
    def step(hand: mh.Hand, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        hand.minimize(programs.classes(hand.model, batch))

    task = programs.healthy(64).replace(loss=None, step=step)
    found = mh.profile(task, mh.Single(), on="cpu", steps=2)
    assert all(found.phases[name] > 0 for name in ("forward", "backward", "optimizer"))


def test_profiling_keeps_the_random_state() -> None:
    task = programs.healthy(16)
    before = torch.get_rng_state()
    mh.profile(task, mh.Single(), on="cpu", steps=1)
    assert torch.equal(before, torch.get_rng_state())


def test_strategy_from_a_plan_file_is_profiled(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('strategy = "accumulate=2"')
    found = mh.profile(programs.healthy(64), str(tmp_path / "plan.toml"), on="cpu", steps=1)
    assert "accumulate=2" in found.strategy


def test_profile_of_zero_steps_is_rejected() -> None:
    with pytest.raises(SettingsError, match="steps must be a whole number of at least 1, but got 0"):
        mh.profile(programs.healthy(), steps=0)


# -- in a run ----------------------------------------------------------------------------------------------------------


def test_sampling_profiles_one_step_in_fifty(tmp_path: Path) -> None:
    task = programs.healthy(8).replace(data=programs.pairs(8 * 120))
    run = mh.fit(
        task,
        "mirrored",
        on="cpu*2",
        folder=tmp_path,
        options=[mh.options.Display(progress=False), mh.options.Logging(profile=True)],
    )
    assert [one.rank for one in run.profile] == [0, 1]
    assert run.profile[0].steps == (50, 100)
    assert run.profile[0].seconds["forward"] > 0
    found = mh.profile(run)
    assert found.seconds == max(one.total for one in run.profile)
    assert found.to_dict()["ranks"][1]["rank"] == 1
    found.save(tmp_path / "run.html")
    same = mh.profile(run.path)
    assert same.phases == found.phases


def test_sampling_does_not_change_the_training_result(tmp_path: Path) -> None:
    task = programs.healthy(8).replace(data=programs.pairs(8 * 60))
    plain, sampled = (
        mh.fit(
            task,
            "single",
            on="cpu",
            folder=tmp_path,
            name=f"run{on}",
            options=[mh.options.Display(progress=False), mh.options.Logging(profile=on)],
        )
        for on in (False, True)
    )
    assert plain.losses == sampled.losses
    assert plain.profile == ()
    assert not [entry for entry in read_events(plain.path / "events.jsonl") if entry["kind"] == "profile"]
    with pytest.raises(UsageError, match="must have profiled steps"):
        mh.profile(plain)


def test_validation_and_checkpoints_are_not_part_of_a_step(tmp_path: Path) -> None:
    task = programs.healthy(8).replace(data=programs.pairs(8 * 50), valid=programs.pairs(800))
    run = mh.fit(
        task,
        "single",
        on="cpu",
        folder=tmp_path,
        epochs=2,
        options=[
            mh.options.Checkpoints(save_every=49),
            mh.options.Display(progress=False),
            mh.options.Logging(profile=True),
        ],
    )
    # Step 50 comes after a checkpoint and ends an epoch, step 100 too.
    assert all(one.total < 1.0 for one in run.profile)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_captured_steps_are_timed_separately_from_eager_ones() -> None:
    found = mh.profile(programs.tiny(), mh.Single(), on="cuda:0", steps=20)
    first = found.ranks[0]
    assert first.breakdown.seconds["captured"] > 0
    assert first.plain is not None
    assert first.plain.seconds["backward"] > 0
    assert first.watched is not None
    assert first.watched.busy is not None
    assert 0 < first.watched.busy <= 1
    assert {"device", "operations"} <= {bar.track for bar in first.watched.bars}
    assert "tiny batch" in {one.name for one in found.advice}


@pytest.mark.gpu
def test_captured_run_is_sampled(tmp_path: Path) -> None:
    task = programs.healthy(8).replace(data=programs.pairs(8 * 120))
    run = mh.fit(
        task,
        "single",
        on="cuda:0",
        folder=tmp_path,
        options=[mh.options.Display(progress=False), mh.options.Logging(profile=True)],
    )
    assert run.profile[0].steps == (50, 100)
    assert run.profile[0].seconds["captured"] > 0
    assert run.profile[0].peak > 0


def test_machine_loaded_by_other_programs_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that spins on each core takes about half of the time."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in os.sched_getaffinity(0)]
    try:
        found = mh.profile(programs.healthy(), mh.Mirrored(), on="cpu*2", steps=200)
    finally:
        for other in others:
            other.kill()
            other.wait()
    shares = [one.other_load for one in found.ranks]
    assert all(share is not None and share > 0.15 for share in shares), shares
    assert re.match(r"other programs used \d+% of the CPU cores of .* while steps were timed", found.notes[0])
    found.show()
    assert "end those programs and profile again" in " ".join(capsys.readouterr().out.split())


def test_ranks_do_not_count_as_other_programs() -> None:
    mine = CpuTime(host="host1", cores=(0, 1), seconds=2.0, busy=3.9, own=1.9)
    elsewhere = [replace(mine, host="host2"), replace(mine, cores=(2, 3))]
    assert others_share(mine, [mine, mine, *elsewhere]) == pytest.approx(0.025)
    assert others_share(mine, [mine]) == pytest.approx(0.5)
    assert others_share(replace(mine, seconds=0.1), [mine]) is None
    assert load_notes([("host1", 0.1), ("host2", None)]) == []


def test_mfu_is_reported_under_its_name(alone: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    alone.show()
    assert re.search(r"MFU \d+% \(of the rate in large matrix products here\)", capsys.readouterr().out)
