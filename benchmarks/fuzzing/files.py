"""Fuzz targets of the readers of files: a function per decoder that takes any bytes and raises only on a defect.

A reader may refuse with an error of the project (`ManyhandsError`); pages of the dashboard may not even do that.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import lzma
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.core import FileError, ManyhandsError, read_events, resolve_options
from manyhands.core.event_parts import compact_parts
from manyhands.dashboard.log_source import dump
from manyhands.dashboard.metrics import Metrics, MetricsSample
from manyhands.dashboard.run_library import Library
from manyhands.serving.folder import VersionPolicy, Versions, complete_versions, models_in
from manyhands.storage import Checkpoint, CheckpointStore, archives, export
from manyhands.storage.weights import open_weights
from manyhands.training import Run
from manyhands.tuning import Journal, Objective, Trial, read_journal
from manyhands.tuning.journal import JOURNAL

SPACE = {"lr": mh.tuning.loguniform(1e-4, 1.0)}
EVENTS = (
    {"kind": "start", "total": 4, "parameters": 3, "step": 0},
    {"kind": "steps", "steps": [1, 2], "losses": {"loss": [1.0, 0.5]}, "epoch": 0, "lr": {"": 0.1}},
    {"kind": "waits", "rank": 0, "host": "a", "device": "cpu", "seconds": {"compute": 1.0}, "memory": 7},
    {"kind": "epoch", "epoch": 0, "step": 2, "metrics": {"valid_loss": 0.5}},
    {"kind": "recovered", "step": 1, "size": 1, "source": "memory"},
    {"kind": "serving", "devices": ["cpu"], "host": "a"},
    {"kind": "version_available", "model": "m", "version": 1},
    {"kind": "split", "model": "m", "shares": [{"model": "m", "version": 1, "weight": 1.0}]},
    {"kind": "end", "step": 2, "stopped": False},
)


@cache
def folder(name: str) -> Path:
    """Return a folder for a target, which is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="manyhands-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def journal(data: bytes) -> None:
    """Read bytes as a study's journal, before and after a program has opened it for writing."""
    path = folder("journal")
    (path / JOURNAL).write_bytes(data)
    (path / "journal.damaged").unlink(missing_ok=True)
    with warnings.catch_warnings(), contextlib.suppress(ManyhandsError):
        warnings.simplefilter("ignore")
        before = read_journal(path)
        Journal(path, SPACE).close()
        if repr(read_journal(path)) != repr(before):
            raise AssertionError("opening a journal changes what it says")
        study = mh.tuning.Study(path)
        study._repr_html_()
        json.dumps(study.to_dict(), default=str)


def manifest(data: bytes) -> None:
    """Read bytes as the manifest of a model's version; the folder is looked at while others are served."""
    version = folder("manifest") / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    for name in archives.FILES:
        (version / name).write_bytes(b"12345")
    (version / "manifest.json").write_bytes(data)
    for policy in (None, VersionPolicy.parse("latest")):
        found = complete_versions(models_in(version.parents[1])["m"], policy)
        if not isinstance(found, Versions) or len(found.complete) + len(found.refused) > 1:
            raise AssertionError(f"one folder is several versions: {found}")


@cache
def _checkpoint() -> Path:
    root = folder("checkpoint")
    with CheckpointStore(root) as store:
        slots = {"main": {"state": {"w": {"step": torch.tensor(1.0)}}, "groups": [{"params": ["w"], "lr": 0.1}]}}
        store.save(Checkpoint(2, {"w": torch.ones(2)}, slots, {"epoch": 1}), score=0.5)
    return root / "step-000000002"


def checkpoint_index(data: bytes) -> None:
    """Read bytes as a part of a checkpoint whose digests fit; the first byte says which part."""
    path = _checkpoint()
    made = folder("checkpoint_made")
    if not (made / "step").exists():
        shutil.copytree(path, made / "step")
    name = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")[(data[:1] or b"\0")[0] % 4]
    for file in path.iterdir():
        file.write_bytes((made / "step" / file.name).read_bytes())
    listed = json.loads((made / "step" / "manifest.json").read_text())
    listed["files"][name] = {"size": len(data[1:]), "sha256": hashlib.sha256(data[1:]).hexdigest()}
    text = data[1:] if name == "manifest.json" else json.dumps(listed).encode()
    (path / name).write_bytes(data[1:])
    (path / "manifest.json").write_bytes(text)
    (path / "COMMITTED").write_text(f"{hashlib.sha256(text).hexdigest()}\n")
    store = CheckpointStore(path.parent, on_notice=lambda text: None)
    store.best()
    with contextlib.suppress(ManyhandsError):
        found = store.load()
        if found.step != 2 or not isinstance(found.state, dict):
            raise AssertionError(f"a checkpoint of another step: {found.step}")


def weights(data: bytes) -> None:
    """Read bytes as weights: a safetensors file, or the index of a Hugging Face folder."""
    path = folder("weights")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (path / name).write_bytes(data)
        with contextlib.suppress(ManyhandsError):
            open_weights(path).load()
        (path / name).unlink()


def event_log(data: bytes) -> None:
    """Read bytes as a run's events, a server's log and a study's journal, as runs and as the dashboard do."""
    path = folder("event_log")
    for name, files in {
        "run": ("events.jsonl",),
        "log": ("events.jsonl", "access.jsonl"),
        "study": ("events.jsonl", JOURNAL),
    }.items():
        (path / name).mkdir(exist_ok=True)
        for file in files:
            (path / name / file).write_bytes(data)
    (path / "run" / "run.json").write_text('{"spec": {}, "params": {}, "devices": ["cpu"], "batch_size": 4}')
    _read_run(path / "run")
    _show(path)


def event_parts(data: bytes) -> None:
    """Read bytes as older parts of a run's log: compressed here if the first byte is below 128, else as they are."""
    path = folder("event_parts") / "run"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    lines = data[1:]
    (path / "events-000001.jsonl.xz").write_bytes(lzma.compress(lines, preset=0) if data[:1] < b"\x80" else lines)
    for name in ("events-000002.jsonl", "events-000003.jsonl", "events.jsonl"):
        (path / name).write_bytes(lines)
    (path / "run.json").write_text('{"spec": {}, "params": {}, "devices": ["cpu"], "batch_size": 4}')
    for _ in range(2):
        _read_run(path)
        _show(path.parent)
        compact_parts(path / "events.jsonl")
    if (path / "events-000002.jsonl").exists():
        raise AssertionError("a part was not compacted")


def run_record(data: bytes) -> None:
    """Read bytes as a run.json, as runs and as the dashboard do."""
    path = folder("run_record")
    (path / "run").mkdir(exist_ok=True)
    (path / "run" / "run.json").write_bytes(data)
    with contextlib.suppress(ManyhandsError):
        repr(Run(path / "run"))
    _show(path)


def _read_run(path: Path) -> None:
    """Read a run as programs do; a log of a newer version of manyhands is refused."""
    with warnings.catch_warnings(), contextlib.suppress(FileError):
        warnings.simplefilter("ignore")
        for _ in read_events(path / "events.jsonl"):
            pass
        repr(Run(path))


def _show(path: Path) -> None:
    """Everything that pages ask for; no source may fail."""
    library = Library([path])
    end = time.monotonic() + 30
    while library.refresh() and time.monotonic() < end:
        pass
    answers: list[Any] = [library.overview(), library.plans(), library.cluster()]
    answers += [library.detail(name, source.kind) for name, source in list(library.sources.items())]
    for answer in answers:
        json.loads(dump(answer))
    failures = [source.failure for source in library.sources.values() if source.failure]
    if failures or library.error:
        raise AssertionError(f"a source failed: {failures or library.error}")


def metrics(data: bytes) -> None:
    """Read bytes as the answer of a server's /metrics; ValueError is what its caller expects."""
    shown = Metrics("http://127.0.0.1:1")
    for moment in (1.0, 2.0):
        with contextlib.suppress(ValueError):
            shown._looks.append(MetricsSample.parse(data.decode("utf-8", "replace"), moment))
    dump(shown.to_dict())


def settings_toml(data: bytes) -> None:
    """Read bytes as a file of settings."""
    from manyhands.serving import Batching, Listen, Replicas, Rollout, ServingLog

    file = folder("settings") / "manyhands.toml"
    file.write_bytes(data)
    with contextlib.suppress(ManyhandsError):
        resolve_options((Listen, Batching, Rollout, Replicas, ServingLog), {}, file=file, environ={})


@cache
def _program() -> tuple[bytes, bytes]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    made = export(model, lambda model, x: model(x), {"x": torch.ones(2, 2)}, folder("program") / "m")
    return (made / "program.json").read_bytes(), (made / "signature.json").read_bytes()


def program(data: bytes) -> None:
    """Read bytes as the program and as the signature of an exported model; it is built, not run."""
    tensors = {"model.0.weight": torch.ones(2, 2), "model.0.bias": torch.ones(2)}
    with contextlib.suppress(ManyhandsError):
        archives.build(archives._parsed("program.json", data), tensors, torch.device("cpu"))
    with contextlib.suppress(ManyhandsError):
        archives._read_signature(archives._parsed("signature.json", data))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "journal": journal,
    "manifest": manifest,
    "checkpoint_index": checkpoint_index,
    "weights": weights,
    "event_log": event_log,
    "event_parts": event_parts,
    "run_record": run_record,
    "metrics": metrics,
    "settings_toml": settings_toml,
    "program": program,
}


def _journal() -> tuple[bytes, ...]:
    path = folder("journal_made")
    (path / JOURNAL).unlink(missing_ok=True)
    made = Journal(path, SPACE)
    made.begin("s", (Objective("loss", "min"),), {"objectives": [["loss", "min"]]})
    for number in range(2):
        trial = Trial(number, {"lr": 0.1})
        made.propose(trial)
        made.lease(trial, 0, 1)
        trial.reports[1] = 0.5
        made.report(trial, 1, 0.1)
        trial.state, trial.values = "finished", (1.0,)
        made.end(trial)
    made.close()
    return ((path / JOURNAL).read_bytes(),)


def _index() -> tuple[bytes, ...]:
    path = _checkpoint()
    names = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
    return tuple(bytes([number]) + (path / name).read_bytes() for number, name in enumerate(names))


def _parts() -> tuple[bytes, ...]:
    where = {"rank": 0, "curve": "pace", "first": [1, 3], "x": [2, 3], "total": [2.0, 1.0], "count": [2, 1]}
    points = {"kind": "points", **where, "low": [1.0, 1.0], "high": [1.0, 1.0], "last": 1.0}
    head = {"kind": "compacted", "counts": {"pace 0": 3, "memory 0": 1}}
    pace = {"kind": "pace", "rank": 0, "host": "a", "step": 2, "seconds": 0.5}
    lines = b"".join(json.dumps({"v": 1, "t": 1.0, **one}).encode() + b"\n" for one in (head, points, pace, *EVENTS))
    return b"\0" + lines, b"\xff" + lzma.compress(lines, preset=0)


SEEDS: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "journal": _journal,
    "manifest": lambda: (
        json.dumps({"format": 1, "files": {n: {"size": 5, "sha256": "0"} for n in archives.FILES}}).encode(),
    ),
    "checkpoint_index": _index,
    "weights": lambda: (_index()[2][1:], b'{"weight_map": {"w": "model.safetensors"}}'),
    "event_log": lambda: (
        b"".join(json.dumps({"v": 1, "t": 1.0, **one}).encode() + b"\n" for one in EVENTS),
        b'{"t": 1.5, "status": 200, "ms": 4.0}\n',
        *_journal(),
    ),
    "event_parts": _parts,
    "run_record": lambda: (
        b'{"spec": {"replicas": 2}, "params": {"lr": 0.1}, "devices": ["cpu"], "batch_size": 8, "task": "t"}',
    ),
    "metrics": lambda: (
        b'manyhands_requests_total{model="m",version="1",code="OK"} 3\n'
        b'manyhands_request_seconds_bucket{model="m",version="1",le="+Inf"} 3\n'
        b'manyhands_backend_up{backend="127.0.0.1:1"} 1\nmanyhands_queue_rows{model="m",version="1"} 0\n',
    ),
    "settings_toml": lambda: (b'http = 8501\nversions = "latest"\n[params]\nlr = 0.1\n',),
    "program": _program,
}
"""Good inputs to begin with, by target; made when they are asked for."""
