"""Killed drivers and workers, full disks: finished trials are kept, and nothing runs twice."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import CheckpointError, RunError, WorkerFailed
from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine
from manyhands.storage import CheckpointStore
from manyhands.tuning import trial_work
from manyhands.tuning.journal import JOURNAL, read_journal

from . import networks

SPACE = {"x": mh.tuning.uniform(-5.0, 5.0), "y": mh.tuning.loguniform(1e-3, 10.0)}
TRIALS = 40


def slow_bowl(x: float = 0.0, y: float = 1.0) -> float:
    time.sleep(0.02)
    return (x - 2) ** 2 + (y - 0.1) ** 2


class Driver:
    """A program that tunes, in a process that can be killed."""

    def __init__(self, world: World) -> None:
        pass

    def process(self) -> int:
        return os.getpid()

    def tune(self, folder: str) -> int:
        study = mh.tune(
            slow_bowl,
            SPACE,
            trials=TRIALS,
            name="study",
            folder=folder,
            on="cpu",
            resume=(Path(folder) / "study").exists(),
            options=mh.options.Display(progress=False),
        )
        return len(study.trials)


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


def test_study_resumes_after_driver_is_killed_repeatedly(tmp_path: Path, engine: LocalEngine) -> None:
    """Real processes and real SIGKILLs: every finished trial is kept, none is run again, the sequence is the same."""
    device = resolve("cpu")[0][0]
    undisturbed = mh.tune(
        slow_bowl, SPACE, trials=TRIALS, folder=tmp_path / "whole", on="cpu", options=mh.options.Display(progress=False)
    )
    dice = random.Random(1)
    finished: dict[int, tuple[Any, ...]] = {}
    num_kills, done = 0, 0
    while not done:
        service = engine.start_service(Driver, device)
        try:
            pid = service.call("process").result(60)
            study = service.call("tune", str(tmp_path))
            if num_kills < 20:
                time.sleep(dice.uniform(0.0, 0.15))
                os.kill(pid, signal.SIGKILL)
                num_kills += 1
            done = study.result(60)
        except WorkerFailed:
            with contextlib.suppress(CheckpointError):  # killed before there was a study
                now = {t.number: (t.params, t.values) for t in mh.tuning.Study(tmp_path / "study").trials if t.is_over}
                assert all(now.get(number) == kept for number, kept in finished.items())
                finished = now
        finally:
            service.kill()
    assert num_kills == 20
    study = mh.tuning.Study(tmp_path / "study")
    assert done == len(study.trials) == TRIALS
    assert [(t.params, t.values) for t in study.trials] == [(t.params, t.values) for t in undisturbed.trials]
    over: set[int] = set()
    for fact in facts(study.path):
        if fact["op_code"] == 6:
            assert fact["trial_id"] not in over
            over.add(fact["trial_id"])
        elif fact["op_code"] == 8:
            assert fact["trial_id"] not in over
    assert over == set(range(TRIALS))


RATES = [0.01, 0.02]


def dying(folder: str = "", lr: float = 1e-2) -> mh.Task:
    """Its process is killed once, when the third epoch of a trial is measured; the first one takes long."""

    def accuracy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        counter = Path(folder) / f"{lr}"
        counter.open("a").write(".")
        if len(counter.read_text()) == 1:
            time.sleep(trial_work.SAVE_SECONDS)
        if len(counter.read_text()) == 6:
            run = next(Path(folder).glob(f"s/*/trials/{RATES.index(lr):05d}"))
            end = time.monotonic() + 120
            while not CheckpointStore(run / "checkpoints").steps() and time.monotonic() < end:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return (outputs.argmax(1) == batch[1]).float().mean()

    return networks.task(lr=lr).replace(metrics={"accuracy": accuracy})


def test_trial_of_a_killed_worker_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    study = mh.tune(
        functools.partial(dying, folder=str(tmp_path)),
        {"lr": RATES},
        epochs=5,
        on="cpu*2",
        folder=tmp_path / "s",
        options=[mh.options.Algorithm(search="grid"), mh.options.Selection(keep=2), mh.options.Display(progress=False)],
    )
    assert [trial.state for trial in study.trials] == ["finished"] * 2
    for trial in study.trials:
        alone = mh.fit(
            networks.task(**trial.params),
            "single",
            epochs=5,
            on="cpu",
            folder=tmp_path / "a",
            options=mh.options.Display(progress=False),
        )
        assert trial.value == pytest.approx(alone.metrics["valid_loss"], rel=1e-6)
        events = (study.path / "trials" / f"{trial.number:05d}" / "events.jsonl").read_text().splitlines()
        starts = [entry["step"] for entry in map(json.loads, events) if entry["kind"] == "start"]
        assert len(starts) == 2
        assert starts[1] > 0


def test_trial_that_kills_its_process_does_not_fail_other_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def deadly(x: float = 0.0) -> float:
        if x == 1.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    study = mh.tune(
        deadly,
        {"x": [0.0, 1.0, 2.0]},
        on="cpu*2",
        folder=tmp_path,
        options=mh.options.Algorithm(search="grid"),
    )
    assert [trial.state for trial in study.trials] == ["finished", "failed", "finished"]
    assert "killed by signal 9" in study.trials[1].reason
    # Every attempt is reported with its reason, and the journal has all three.
    shown = [line for line in capsys.readouterr().err.splitlines() if "killed by signal 9 (SIGKILL" in line]
    assert [line.partition(":")[0] for line in shown] == [
        "trial 1 is retried (attempt 2)",
        "trial 1 is retried (attempt 3)",
        "trial 1 failed",
    ]
    _, trials = read_journal(study.path)
    assert [len(trial.kills) for trial in trials] == [0, 3, 0]


@pytest.mark.root
def test_study_stopped_by_a_full_disk_resumes_when_space_is_free(small_disk: Path) -> None:
    stuffing = small_disk / "stuffing"
    stuffing.write_bytes(b"\0" * (440 << 10))

    def study(resume: bool) -> mh.tuning.Study:
        return mh.tune(
            lambda x=0.0: x,
            {"x": mh.tuning.uniform(0, 1)},
            trials=200,
            folder=small_disk,
            name="s",
            resume=resume,
            on="cpu",
            options=[mh.options.Algorithm(search="random"), mh.options.Display(progress=False)],
        )

    with pytest.raises(RunError, match="journal .* cannot be written: No space left on device"):
        study(resume=False)
    kept = {t.number: t.params for t in mh.tuning.Study(small_disk / "s").trials if t.is_over}
    assert kept
    stuffing.unlink()
    whole = study(resume=True)
    assert len(whole.finished) == 200
    assert all(whole.trials[number].params == params for number, params in kept.items())
