"""Attacks by files: what an attacker with one model folder, one run or one checkpoint can do to all the others.

Every function writes hostile files below a folder of its own and says, for each of them, whether the program that reads
the folder still does its work for the honest files beside it, and which reason it gave for the hostile one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from manyhands.core import ManyhandsError

from .outcome import Outcome

DEEP = 200_000
PATIENCE = 15.0
"""Seconds for a program to notice what has changed in its folder."""
CONTENTS: dict[str, bytes] = {
    "deep_list": b"[" * DEEP,
    "deep_object": b'{"files":' * DEEP,
    "balanced_deep_list": b"[" * DEEP + b"]" * DEEP,
    "just_below_the_recursion_limit": b"[" * 900 + b"]" * 900,
    "invalid_utf8": b'{"files": "\xff\xfe\x00"}',
    "null_bytes": b"\0" * 100,
    "huge_integer": b'{"files": ' + b"9" * 5000 + b"}",
    "list": b"[]",
    "number": b"1e999",
    "wrong_types": b'{"format": [], "files": {"weights.safetensors": 7}, "step": "x", "spec": 3, "devices": {}}',
    "parent_folder": b'{"format": 1, "files": {"../../honest/1/manifest.json": {"size": 1, "sha256": ""}}}',
    "absolute_path": b'{"format": 1, "files": {"/etc/passwd": {"size": 1, "sha256": ""}}}',
    "too_large": b'{"files": "' + b"x" * (5 << 20) + b'"}',
}
"""JSON files that harm a careless reader."""
KINDS = ("fifo", "socket", "link", "link_to_device", "link_loop", "folder")
"""What can take the place of a regular file."""
LINES: dict[str, bytes] = {
    "infinite_time": b'{"v": 1, "t": Infinity, "kind": "notice", "text": ""}',
    "nan_time": b'{"v": 1, "t": NaN, "kind": "notice", "text": ""}',
    "far_future": b'{"v": 1, "t": 1e300, "kind": "notice", "text": ""}',
    "deep": b"[" * DEEP,
    "balanced_deep": b'{"v": 1, "t": 1, "kind": "plan", "options": ' + b"[" * 900 + b"]" * 900 + b"}",
    "invalid_utf8": b'{"v": 1, "t": 1, "kind": "\xff"}',
    "null_bytes": b"\0\0\0\0{\0",
    "huge_integer": b'{"v": 1, "t": 1, "kind": "end", "step": ' + b"9" * 4000 + b"}",
    "too_many_digits": b'{"v": 1, "t": 1, "kind": "end", "step": ' + b"9" * 5000 + b"}",
    "no_kind": b'{"v": 1, "t": 1}',
    "kind_of_another_type": b'{"v": 1, "t": 1, "kind": ["start"]}',
    "steps_of_another_type": b'{"v": 1, "t": 1, "kind": "steps", "steps": ["x"], "losses": {"a": [1]}, "epoch": 0}',
    "steps_of_other_lengths": b'{"v": 1, "t": 1, "kind": "steps", "steps": [1], "losses": {"a": [1, 2]}, "epoch": 0}',
    "step_beyond_memory": b'{"v": 1, "t": 1, "kind": "skipped", "step": 99999999999999}',
    "seconds_of_another_type": b'{"v": 1, "t": 1, "kind": "waits", "rank": 0, "seconds": 7}',
    "rank_of_another_type": b'{"v": 1, "t": 1, "kind": "pace", "rank": "0", "step": 1, "seconds": 1}',
    "rank_beyond_memory": b'{"v": 1, "t": 1, "kind": "pace", "rank": 999999999, "step": 1, "seconds": 1}',
    "metrics_of_another_type": b'{"v": 1, "t": 1, "kind": "epoch", "epoch": 0, "step": 1, "metrics": {"a": {}}}',
    "reason_of_another_type": b'{"v": 1, "t": 1, "kind": "failed", "reason": {"a": []}}',
    "plan_without_options": b'{"v": 1, "t": 1, "kind": "plan", "options": [7], "task": 1}',
    "partition_of_another_type": b'{"v": 1, "t": 1, "kind": "partition", "title": 3, "boxes": [], "arrows": []}',
}
"""Lines of a log that harm a careless reader."""


def plant(path: Path, kind: str) -> None:
    """Put something that is no regular file in the place of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        _plant_socket(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": "/etc/passwd", "link_to_device": "/dev/zero", "link_loop": path.name}[kind])


def _plant_socket(path: Path) -> None:
    """A path of a socket has at most 107 characters, so it is bound under a short name of its folder."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def attack_models(root: Path, answers: Callable[[], bool], reason_of: Callable[[str], str]) -> list[Outcome]:
    """Add hostile models to the folder of a running server.

    Args:
        root: The folder of the models that the server watches.
        answers: Ask an honest model; return whether it answered as always.
        reason_of: Return the error that the server reports for a model of this name; empty while it reports none.
    """
    outcomes = []
    for name, content in CONTENTS.items():
        outcomes.append(_attack_model(root, f"content_{name}", content, answers, reason_of))
    for kind in KINDS:
        outcomes.append(_attack_model(root, f"kind_{kind}", kind, answers, reason_of))
    return outcomes


def _attack_model(
    root: Path, name: str, what: bytes | str, answers: Callable[[], bool], reason_of: Callable[[str], str]
) -> Outcome:
    model = root / f"hostile-{name}"
    manifest = model / "1" / "manifest.json"
    if isinstance(what, str):
        plant(manifest, what)
    else:
        manifest.parent.mkdir(parents=True)
        manifest.write_bytes(what)
    reason = _until(lambda: reason_of(model.name))
    is_served = answers()
    shutil.rmtree(model)
    return Outcome(f"model_{name}", succeeded=not is_served, reason=reason)


def attack_dashboard(root: Path, url: str) -> list[Outcome]:
    """Add hostile runs to a folder that a dashboard shows; an honest run that grows at the same time must be followed.

    Args:
        root: The folder of runs.
        url: The dashboard's address.
    """
    honest = root / "honest"
    honest.mkdir(parents=True)
    (honest / "run.json").write_text(json.dumps({"spec": {}, "params": {}, "devices": ["cpu"]}))
    attacks: dict[str, bytes | str | tuple[str, bytes]] = {f"line_{name}": line for name, line in LINES.items()}
    attacks |= {f"kind_{kind}": kind for kind in KINDS}
    attacks |= {f"record_{name}": ("run.json", content) for name, content in CONTENTS.items()}
    attacks["line_of_5_mib"] = b"x" * (5 << 20)
    for name, what in attacks.items():
        _plant_run(root / f"hostile-{name}", what)
    ids = {name: f"{root.name}/hostile-{name}" for name in attacks}
    reasons = {name: str(_until(lambda one=one: _told(url, one, "unreadable"))) for name, one in ids.items()}
    # The honest run continues after everything hostile was read.
    with (honest / "events.jsonl").open("a") as log:
        log.write(json.dumps({"v": 1, "t": time.time(), "kind": "epoch", "epoch": 0, "step": 7, "metrics": {}}) + "\n")
    is_followed = _until(lambda: _told(url, f"{root.name}/honest", "step") == 7)
    listed = (_get(url, "overview") or {}).get("ids", [])
    outcomes = [
        Outcome(f"dashboard_{name}", succeeded=not (is_followed and one in listed), reason=reasons[name])
        for name, one in ids.items()
    ]
    since = _get(url, "overview", since="9" * 5000)
    outcomes.append(Outcome("dashboard_since_of_5000_digits", succeeded=since is None, reason="read as 0"))
    return outcomes


def _plant_run(run: Path, what: bytes | str | tuple[str, bytes]) -> None:
    run.mkdir(parents=True)
    if isinstance(what, tuple):
        (run / what[0]).write_bytes(what[1])
        return
    (run / "run.json").write_text(json.dumps({"spec": {}, "params": {}, "devices": ["cpu"]}))
    if isinstance(what, str):
        plant(run / "events.jsonl", what)
    else:
        (run / "events.jsonl").write_bytes(what + b"\n")


def _told(url: str, run: str, what: str) -> Any:
    return (_get(url, "run", id=run) or {}).get(what, "")


def _get(url: str, path: str, **query: str) -> Any:
    """The answer of a dashboard; None where there is none."""
    with (
        suppress(OSError, ValueError),
        urllib.request.urlopen(f"{url}api/{path}?{urllib.parse.urlencode(query)}", timeout=PATIENCE) as answer,
    ):
        return json.loads(answer.read())
    return None


def attack_checkpoints(root: Path) -> list[Outcome]:
    """Damage the newer of two checkpoints in every way; the older one must be loaded, and the reason given."""
    import torch

    from manyhands.storage import Checkpoint, CheckpointStore

    with CheckpointStore(root / "made") as store:
        for step in (1, 2):
            store.save(Checkpoint(step, {"w": torch.full((4,), float(step))}))
    outcomes = []
    for name, change in {**_damages(), **_committed_lies()}.items():
        folder = root / name
        shutil.copytree(root / "made", folder)
        change(folder / "step-000000002")
        notices: list[str] = []
        try:
            found = CheckpointStore(folder, on_notice=notices.append).load().step
        except Exception as error:  # anything but the older checkpoint is the attacker's success
            found, notices = -1, [f"{type(error).__name__}: {error}"]
        outcomes.append(Outcome(f"checkpoint_{name}", succeeded=found != 1, reason="; ".join(notices)[:300]))
    return [*outcomes, _attack_claims(root / "claims")]


def _damages() -> dict[str, Callable[[Path], None]]:
    """Changes of a committed checkpoint that digests show, or that replace a file by something else."""
    changes: dict[str, Callable[[Path], None]] = {}
    for file in ("manifest.json", "state.json", "model.safetensors"):
        for name, content in CONTENTS.items():
            changes[f"{file}_{name}"] = lambda folder, file=file, content=content: _rewrite(folder / file, content)
        for kind in KINDS:
            changes[f"{file}_{kind}"] = lambda folder, file=file, kind=kind: _replace(folder / file, kind)
    return changes


def _committed_lies() -> dict[str, Callable[[Path], None]]:
    """Checkpoints whose digests are right, and whose contents are not."""
    state = {"format": 1, "step": 2, "state": {}, "optimizers": {}}
    lies: dict[str, tuple[str, bytes]] = {
        f"lying_{name}": ("state.json", content) for name, content in CONTENTS.items() if name != "too_large"
    }
    for name, changed in {
        "step": {"step": "2"},
        "other_step": {"step": 7},
        "state": {"state": []},
        "optimizers": {"optimizers": {"main": 3}},
        "groups": {"optimizers": {"main": {"state": {"w": 1}, "groups": {}}}},
    }.items():
        lies[f"lying_{name}"] = ("state.json", json.dumps({**state, **changed}).encode())
    for name, header in {
        "offsets": {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}},
        "overlap": {n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in ("w", "v")},
        "negative": {"w": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
        "shape": {"w": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}},
        "dtype": {"w": {"dtype": "F640", "shape": [4], "data_offsets": [0, 16]}},
    }.items():
        text = json.dumps(header).encode()
        lies[f"tensors_{name}"] = ("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(16))
    changes = {name: lambda folder, lie=lie: _commit_again(folder, *lie) for name, lie in lies.items()}
    return {**changes, "files_elsewhere": lambda folder: _commit_again(folder, "../step-000000001/state.json", b"")}


def _commit_again(folder: Path, name: str, content: bytes) -> None:
    """Put a content into a checkpoint, with digests that fit."""
    from hashlib import sha256

    listed = json.loads((folder / "manifest.json").read_text())
    if not name.startswith(".."):
        (folder / name).write_bytes(content)
    found = (folder / name).read_bytes()
    listed["files"][name] = {"size": len(found), "sha256": sha256(found).hexdigest()}
    text = json.dumps(listed).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMITTED").write_text(f"{sha256(text).hexdigest()}\n")


def _rewrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _replace(path: Path, kind: str) -> None:
    path.unlink()
    plant(path, kind)


def _attack_claims(root: Path) -> Outcome:
    """Names at the end of what can be counted: claiming the folder must end, with a reason where it cannot."""
    from manyhands.storage import CheckpointStore

    root.mkdir()
    for name in ("CLAIM-999999999", "CLAIM-٣", f"CLAIM-{30 * '9'}", "CLAIM-00000000000000000000001", "CLAIM-x"):
        (root / name).touch()
    (root / "CLAIM-17").mkdir()
    CheckpointStore(root).claim()
    is_claimed = (root / "CLAIM-1000000000").exists()
    (root / f"CLAIM-{10**18 - 1}").touch()
    try:
        CheckpointStore(root).claim()
    except ManyhandsError as error:
        return Outcome("checkpoint_claims", succeeded=not is_claimed, reason=str(error))
    return Outcome("checkpoint_claims", succeeded=True)


def attack_journal(folder: Path, lines: Mapping[int, bytes]) -> list[Outcome]:
    """Damage single lines of a study's journal; every trial whose lines are whole must be read as before.

    Args:
        folder: A study's folder with a journal.
        lines: Numbers of lines that end a trial, and what to put there.
    """
    from manyhands.tuning import read_journal
    from manyhands.tuning.journal import JOURNAL

    whole = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    wanted = [trial.values for trial in read_journal(folder)[1]]
    outcomes = []
    for number, content in lines.items():
        (folder / JOURNAL).write_bytes(b"".join([*whole[: number - 1], content + b"\n", *whole[number:]]))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = [trial.values for trial in read_journal(folder)[1]]
            except Exception as error:  # a journal with one damaged line must be read
                found, reason = [], f"{type(error).__name__}: {error}"
            else:
                reason = "; ".join(str(one.message) for one in said)
        num_same = sum(values in found for values in wanted if values)
        num_wanted = sum(bool(values) for values in wanted)
        lost = num_wanted - num_same
        outcomes.append(Outcome(f"journal_line_{number}", lost > 1, reason[:300], {"lost": lost, "trials": num_wanted}))
    (folder / JOURNAL).write_bytes(b"".join(whole))
    return outcomes


def _until(look: Callable[[], Any]) -> Any:
    """What a look sees as soon as that is something; the last look's answer after a while."""
    end = time.monotonic() + PATIENCE
    while not (found := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return found
