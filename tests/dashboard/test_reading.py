"""Reading of logs: each line is read once, memory is bounded, and any line is tolerated."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.core import event, keep_event
from manyhands.dashboard.log import NUM_BUCKETS, Log
from manyhands.dashboard.log_source import SILENT_SECONDS
from manyhands.dashboard.log_tail import Tail
from manyhands.dashboard.metrics import Metrics, MetricsSample
from manyhands.dashboard.run import RunFolder
from manyhands.dashboard.run_library import Library
from manyhands.dashboard.series import MOST, Series
from manyhands.dashboard.study import StudyFolder

from .logs import Written, a_run


def read_all(library: Library) -> None:
    library._scanned_at = float("-inf")
    while library.refresh():
        pass


def test_tail_reads_each_byte_once_and_waits_for_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path, without=(b'"parts"',))
    assert tail.read() == []
    path.write_bytes(b'{"a": 1}\n{"b": "parts"}\nnot json\n[1]\n{"a": 2')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b"}\n")
    assert tail.read() == [{"a": 2}]
    read = tail.num_read
    assert tail.read() == []
    assert tail.num_read == read
    assert not tail.was_replaced


def test_replaced_log_is_read_from_the_start(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "first", {1: 3.0, 2: 2.0})
    library = Library([tmp_path / "runs"])
    read_all(library)
    run = library.sources["runs/first"]
    assert run.summary()["loss"] == 2.0
    a_run(tmp_path / "runs" / "second", {1: 9.0})
    os.replace(tmp_path / "runs" / "second" / "events.jsonl", tmp_path / "runs" / "first" / "events.jsonl")
    read_all(library)
    read_all(library)
    assert library.sources["runs/first"].summary()["loss"] == 9.0


def test_series_is_exact_when_short_and_downsampled_when_long() -> None:
    series = Series()
    series.extend(range(10), [float(step) for step in range(10)])
    assert series.to_dict() == {"x": list(range(10)), "mean": list(range(10))}
    series.extend(range(10, 100_000), [float(step % 10) for step in range(10, 100_000)])
    columns = series.to_dict()
    assert len(columns["x"]) <= MOST
    assert columns["x"][-1] == 99_999
    assert columns["x"] == sorted(columns["x"])
    assert columns["low"][-1] >= 0
    assert columns["high"][-1] == 9
    weights = [series.stride] * (len(columns["x"]) - 1)
    weights.append(100_000 - sum(weights))
    mean = sum(w * m for w, m in zip(weights, columns["mean"], strict=True)) / 100_000
    assert mean == pytest.approx((45 + sum(step % 10 for step in range(10, 100_000))) / 100_000)


def test_series_add_and_extend_give_the_same_points() -> None:
    one, together = Series(most=50), Series(most=50)
    values = [math.sin(step) for step in range(777)]
    for step, value in enumerate(values):
        one.add(step, value)
    for start in range(0, 777, 10):
        together.extend(range(start, min(777, start + 10)), values[start : start + 10])
    assert one.to_dict()["x"] == together.to_dict()["x"]
    assert one.to_dict()["mean"] == pytest.approx(together.to_dict()["mean"])
    assert one.to_dict()["high"] == together.to_dict()["high"]


def test_non_finite_values_are_omitted_from_a_series() -> None:
    series = Series()
    series.extend([1, 2, 3, 4], [1.0, math.nan, None, 2.0])
    series.add(5, math.inf)
    assert series.to_dict() == {"x": [1, 4], "mean": [1.0, 2.0]}


def test_run_detail_matches_a_real_run(tmp_path: Path) -> None:
    task = mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=(torch.randn(64, 4), torch.ones(64, 1)),
        valid=(torch.randn(16, 4), torch.ones(16, 1)),
        batch_size=8,
    )
    folder = tmp_path / "runs"
    placed = mh.Placed({"0": 0, "2": 1})
    run = mh.fit(
        task,
        placed,
        on="cpu*2",
        epochs=8,
        name="first",
        folder=folder,
        options=[mh.options.Display(progress=False), mh.options.Logging(profile=True)],
    )
    library = Library([folder])
    read_all(library)
    told = library.sources["runs/first"].detail()
    assert told["state"] == "finished"
    assert told["step"] == told["total"] == run.num_steps == 64
    assert told["series"]["losses"]["loss"]["mean"] == pytest.approx(run.losses)
    assert told["metrics"]["valid_loss"] == pytest.approx(run.metrics["valid_loss"])
    assert told["devices"] == ["cpu#0", "cpu#1"]
    assert [rank["device"] for rank in told["ranks"].values()] == ["cpu#0", "cpu#1"]
    assert all(rank["memory"] > 1 << 20 for rank in told["ranks"].values())
    assert all(rank["phases"]["forward"] > 0 for rank in told["ranks"].values())
    assert [box["parts"] for box in told["partition"]["boxes"]] == [["0", "1"], ["2"]]
    assert told["partition"]["arrows"][0]["num_bytes"] > 0
    where = {(one["device"], one["rank"]) for one in library.cluster()}
    assert where == {("cpu#0", 0), ("cpu#1", 1)}


def test_rank_failures_are_listed_and_repeated_steps_count_once(tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    run.steps({1: 4.0, 2: 3.0, 3: 2.0})
    run.waits(0, compute=1.0)
    run.waits(1, compute=1.0)
    run.say("lost", rank=1, host="host1", reason="was killed (SIGKILL)")
    run.say("recovered", step=2, generation=1, size=1, source="the memory of rank 0")
    run.steps({3: 2.5, 4: 1.5})
    run.say("straggler", rank=0, host="host1", step=4, seconds=1.0, text="rank 0 on host1 is slow: ...")
    run.say("servers", step=4, staleness={"0": 4}, late=1, applied=4)
    library = Library([tmp_path / "runs"])
    read_all(library)
    told = library.sources["runs/first"].detail()
    assert told["servers"] == {"staleness": {"0": 4}, "late": 1, "applied": 4}
    assert told["series"]["losses"]["loss"] == {"x": [1, 2, 3, 4], "mean": [4.0, 3.0, 2.5, 1.5]}
    assert [one["kind"] for one in told["news"]] == ["start", "lost", "recovered", "straggler"]
    assert told["news"][1]["text"] == "rank 1 on host1 was lost: was killed (SIGKILL)"
    assert list(told["ranks"]) == [0]
    assert told["ranks"][0]["slow"]
    assert (told["faults"], told["recovered"]) == (2, 1)
    run.close()


def test_error_that_ended_a_run_is_shown_and_is_not_a_fault(tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    run.say("failed", reason="ValueError: a mistake in the loss")
    library = Library([tmp_path / "runs"])
    read_all(library)
    told = library.sources["runs/first"].detail()
    assert (told["state"], told["faults"]) == ("failed", 0)
    assert (told["news"][-1]["text"], told["news"][-1]["fault"]) == ("ValueError: a mistake in the loss", True)
    run.close()


def test_silent_run_without_a_lock_is_interrupted(tmp_path: Path) -> None:
    import fcntl
    import time

    run = Written(tmp_path / "runs" / "first")
    run.t = time.time() - 2 * SILENT_SECONDS
    run.start()
    run.close()
    library = Library([tmp_path / "runs"])
    read_all(library)
    assert library.sources["runs/first"].summary()["state"] == "interrupted"
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = library.stamp
        read_all(library)
        assert library.sources["runs/first"].summary()["state"] == "running"
        assert library.stamp > before


def test_events_of_an_unknown_format_are_ignored(tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    run.say("steps", steps="none", losses=7)
    run.say("waits", rank="first")
    run.say("epoch")
    run.say("tomorrow's news", text=3)
    run.steps({1: 2.0})
    library = Library([tmp_path / "runs"])
    read_all(library)
    assert library.sources["runs/first"].detail()["loss"] == 2.0
    run.close()


def test_only_new_events_are_read_and_reported(tmp_path: Path) -> None:
    for number in range(200):
        a_run(tmp_path / "runs" / f"run-{number:03d}")
    live = Written(tmp_path / "runs" / "live")
    live.start()
    library = Library([tmp_path / "runs"])
    read_all(library)
    overview = library.overview()
    assert len(overview["runs"]) == 201
    read = {name: source._tails[0][0].num_read for name, source in library.sources.items()}
    live.steps({1: 2.0})
    read_all(library)
    now = library.overview(overview["stamp"])
    assert [run["id"] for run in now["runs"]] == ["runs/live"]
    assert len(now["ids"]) == 201
    again = {name for name, source in library.sources.items() if source._tails[0][0].num_read != read[name]}
    assert again == {"runs/live"}
    live.close()


def test_detail_of_a_long_log_has_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "long"
    a_run(path)
    lines = []
    for number in range(60_000):
        step = 10 * number
        losses = [1 / (1 + step + i) for i in range(10)]
        told = {"steps": list(range(step, step + 10)), "losses": {"loss": losses}, "epoch": 0, "lr": {"": 0.1}}
        lines.append(json.dumps({"v": 1, "t": 1.8e9 + number, "kind": "steps", **told}))
    with (path / "events.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    library = Library([tmp_path / "runs"])
    read_all(library)
    run = library.sources["runs/long"]
    assert isinstance(run, RunFolder)
    assert run.progress.step == 599_999
    assert run.curves.losses["loss"].num == 600_002
    assert len(json.dumps(run.detail())) < 500_000


def test_real_study_and_ensemble_are_read(tmp_path: Path) -> None:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(1) > 0).long()

    def task(lr: float = 0.1) -> mh.Task:
        return mh.Task(
            model=lambda: torch.nn.Linear(4, 2),
            loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
            data=(inputs, labels),
            valid=(inputs, labels),
            batch_size=8,
        )

    folder, options = tmp_path / "studies", {"on": "cpu", "folder": tmp_path / "studies"}
    study = mh.tune(task, {"lr": mh.tuning.loguniform(1e-3, 1.0)}, trials=4, epochs=1, name="first", **options)
    ensemble = mh.ensemble(task, members=2, epochs=1, name="ensemble", **options)
    library = Library([folder])
    read_all(library)
    read_all(library)
    told = library.sources["studies/first"].detail()
    assert told["best"]["number"] == study.best.number
    assert told["best"]["values"][0] == study.best.value
    assert [trial["params"] for trial in told["trials"]] == [trial.params for trial in study.trials]
    assert told["ranges"]["lr"]["attributes"]["log"] is True
    assert told["counts"] == {"running": 0, "finished": 4, "stopped": 0, "failed": 0}
    assert (told["is_ensemble"], told["is_search"]) == (False, True)
    joined = library.sources["studies/ensemble"]
    assert isinstance(joined, StudyFolder)
    assert (joined.summary()["is_ensemble"], joined.summary()["is_search"]) == (True, False)
    assert joined.ensemble is not None
    assert joined.ensemble["calibration"]["accuracy"] == pytest.approx(ensemble.calibration()[0].accuracy)
    assert len(joined.ensemble["alone"]) == 2
    trials = [
        source.summary() for name, source in library.sources.items() if name.startswith("studies/ensemble/trials")
    ]
    assert [trial["state"] for trial in trials] == ["finished", "finished"]
    mh.ensemble(study, members=1, options=mh.options.Display(progress=False))
    read_all(library)
    again = library.sources["studies/first"].detail()
    assert (again["is_ensemble"], again["is_search"]) == (True, True)
    assert again["ensemble"]["members"] == [f"{study.best.number:05d}"]


def test_measured_runs_appear_on_the_scaling_curve_of_the_plan(tmp_path: Path) -> None:
    task = mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=torch.ones(64, 4),
        batch_size=8,
    )
    plan = mh.plan(task, "4 hosts x 8 A100, 100Gb/s")
    plan.log(tmp_path / "plans" / "first")
    run = Written(tmp_path / "runs" / "first", task=plan.name, devices=["cuda:0", "cuda:1"])
    other = Written(tmp_path / "runs" / "on-cpu", task=plan.name)  # which says nothing about GPUs
    for one in (run, other):
        one.start()
        one.steps({1: 1.0, 2: 1.0})
        one.waits(0, compute=0.25, save=5.0)
        one.close()
    library = Library([tmp_path / "plans", tmp_path / "runs"])
    read_all(library)
    (found,) = library.plans()
    assert found["curve"]["saturates"] == plan.curve.saturates
    (point,) = found["points"]
    assert point["devices"] == 2
    assert point["speedup"] == pytest.approx(plan.alone / 0.125)


def test_access_log_requests_are_aggregated_into_buckets(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "first"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(
        '{"v": 1, "t": 1.0, "kind": "serving", "devices": ["cpu"]}\n'
        '{"v": 1, "t": 1.1, "kind": "version_available", "model": "m", "version": 2}\n'
    )
    seconds = 3 * NUM_BUCKETS
    lines = [{"t": t + 0.5, "status": 200 if t % 2 else 503, "ms": 4.0} for t in range(seconds) for _ in range(5)]
    (folder / "access.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    library = Library([tmp_path / "logs"])
    read_all(library)
    log = library.sources["logs/first"]
    assert isinstance(log, Log)
    told = log.detail()
    assert told["state"] == "interrupted"  # it did not say that it ended, and no program is there
    assert told["versions"] == {"m": {"2": "available"}}
    assert len(told["requests"]["x"]) <= NUM_BUCKETS
    assert set(told["requests"]["rate"]) == {5.0}
    assert set(told["requests"]["refused"]) == {2.5}
    assert told["requests"]["p99"][0] == pytest.approx(0.004, rel=0.25)


def test_server_restart_resets_versions_and_idle_time_has_zero_rate(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "first"
    shares = [{"model": "m", "version": 1, "weight": 3.0}, {"model": "m", "version": 2, "weight": 1.0}]
    for number in (1, 2):
        keep_event(folder, event("starting"))
        keep_event(folder, event("version_available", model="m", version=number))
        keep_event(folder, event("serving", host="another", devices=["cpu"]))
        keep_event(folder, event("split", model="m", shares=shares[:number]))
        keep_event(folder, event("label", model="m", label=f"stable{number}", version=number))
    keep_event(folder, event("version_failed", model="m", version=3, reason="weights are missing"))
    lines = [{"t": t, "status": 200, "ms": 4.0} for t in (100.5, 101.5, 200.5)]
    (folder / "access.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    library = Library([tmp_path / "logs"])
    read_all(library)
    told = library.sources["logs/first"].detail()
    assert told["versions"] == {"m": {"2": "available", "3": "failed: weights are missing"}}
    assert (told["current"], told["labels"]) == ({"m": "2"}, {"m": {"stable2": "2"}})
    assert told["splits"] == {"m": "75% m 1, 25% m 2"}
    assert told["news"][-3]["text"] == "split: model m, shares 75% m 1, 25% m 2"
    assert told["state"] == "serving"  # whether a program on another host is alive cannot be seen from here
    x, rate = told["requests"]["x"], told["requests"]["rate"]
    assert list(zip(x, rate, strict=True))[:6] == [(100, 1), (101, 1), (102, 0), (199, 0), (200, 1), (201, 0)]
    assert rate[-1] == 0
    keep_event(folder, event("split", model="m", shares=[]))
    keep_event(folder, event("stopped"))
    read_all(library)
    told = library.sources["logs/first"].detail()
    assert (told["state"], told["splits"], told["requests"]["x"][-1]) == ("stopped", {}, 200)
    assert [place["host"] for place in library.cluster()] == ["another"]


def test_unlocked_stale_study_is_interrupted(tmp_path: Path) -> None:
    journal = tmp_path / "studies" / "first" / "journal.log"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"op_code": 4, "study_id": 0, "state": 0, "distributions": {}, "given": {"lr": 0.1}}\n')
    library = Library([tmp_path / "studies"])
    read_all(library)
    assert library.sources["studies/first"].detail()["state"] == "running"
    os.utime(journal, (1.0, 1.0))
    with journal.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        read_all(library)
        assert library.sources["studies/first"].detail()["state"] == "running"
    stamp = library.stamp
    read_all(library)
    told = library.overview(stamp)["studies"][0]
    assert told["state"] == "interrupted"
    assert (told["counts"]["running"], told["counts"]["interrupted"]) == (0, 1)
    (trial,) = library.sources["studies/first"].detail()["trials"]
    assert trial["state"] == "interrupted"


def test_finished_run_rate_covers_all_steps(tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first", spec={"staleness": None})
    run.start()
    run.steps({1: 1.0, 2: 0.5})
    run.waits(0, compute=1.0)
    library = Library([tmp_path / "runs"])
    read_all(library)
    assert library.overview()["runs"][0]["steps_per_second"] == 2.0
    run.say("end", step=2, stopped=False, seconds={})
    run.close()
    read_all(library)
    told = library.overview()["runs"][0]
    assert told["steps_per_second"] == pytest.approx(2 / 3)
    assert told["strategy"] == "staleness=none"
    assert [place["host"] for place in library.cluster()] == ["host1", "host1"]


def test_two_metrics_samples_give_rates_and_percentiles() -> None:
    def text(num: int, slow: int) -> str:
        labels = 'model="m",version="1"'
        return (
            f'manyhands_requests_total{{{labels},code="OK"}} {num}\n'
            f'manyhands_request_seconds_bucket{{{labels},le="0.001"}} {num - slow}\n'
            f'manyhands_request_seconds_bucket{{{labels},le="0.1"}} {num}\n'
            f'manyhands_request_seconds_bucket{{{labels},le="+Inf"}} {num}\n'
            f"manyhands_queue_rows{{{labels}}} 3\n"
            f'manyhands_backend_up{{backend="a:1"}} 1\n'
            f'manyhands_backend_answered_total{{backend="a:1"}} {num}\n'
        )

    metrics = Metrics("http://127.0.0.1:1/")
    metrics._looks += [MetricsSample.parse(text(100, 10), 10.0), MetricsSample.parse(text(300, 20), 12.0)]
    (version,) = metrics.to_dict()["versions"]
    assert version["series"] == {"x": [12.0], "rate": [100.0], "p50": [0.001], "p99": [0.1]}
    assert version["queue_rows"] == 3
    (backend,) = metrics.to_dict()["backends"]
    assert backend == {"backend": "a:1", "up": 1, "answered": 300, "series": {"x": [12.0], "rate": [100.0]}}
    metrics.look()
    assert "does not answer" in metrics.error
