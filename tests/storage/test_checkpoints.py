"""Checkpoints: bit-exact round trips, and only committed checkpoints are visible."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.core import CheckpointError
from manyhands.storage import Checkpoint, CheckpointStore, check_matches, disk
from manyhands.storage.disk import Disk


def small(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        model={"w": torch.full((3, 2), float(step)), "n": torch.tensor(step)},
        optimizers={
            "main": {
                "state": {"w": {"step": torch.tensor(float(step)), "exp_avg": torch.full((3, 2), step / 7), "k": 3}},
                "groups": [{"params": ["w"], "lr": 0.1}],
            }
        },
        state={"cursor": {"epoch": 1, "at": step}, "best": float("inf")},
        random={"rank0.cpu": torch.arange(16, dtype=torch.uint8)},
    )


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        bits = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


def equal(left: Checkpoint, right: Checkpoint) -> bool:
    return all(
        same(getattr(left, name), getattr(right, name)) for name in ("step", "model", "optimizers", "state", "random")
    )


def raising(error: Exception) -> None:
    raise error


def stored(root: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(root, keep=keep, on_error=raising)
    for step in steps:
        store.save(small(step))
    store.wait()
    return store


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    odd = torch.tensor([-float("inf"), -0.0, float("inf"), 1e-45])
    model = {
        "bf16": base.to(torch.bfloat16),
        "f16": base.half(),
        "f64": base.double(),
        "odd": odd,
        "int": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "tied.a": base,
        "tied.b": base,
        "param": nn.Parameter(base),
        "complex": torch.randn(2, dtype=torch.complex64),
        "odd.ü/name": torch.tensor([1], dtype=torch.int8),
    }
    wanted = Checkpoint(7, model, state={"nested": [1, 2.5, None, "x", {"y": True}]})
    with CheckpointStore(tmp_path, on_error=raising) as store:
        store.save(wanted)
        store.wait()
        assert equal(store.load(), wanted)
        assert equal(CheckpointStore(tmp_path).load(7), wanted)


def test_whole_checkpoint_round_trips_with_slashes_in_parameter_names(tmp_path: Path) -> None:
    wanted = small(3)
    wanted.optimizers["main"]["state"]["a/b.c"] = {"exp_avg": torch.ones(2), "none": None}
    wanted.optimizers["main"]["state"]["bare"] = {}
    with CheckpointStore(tmp_path, on_error=raising) as store:
        store.save(wanted)
        store.wait()
        assert equal(store.load(), wanted)


def test_save_snapshots_the_tensors_at_call_time(tmp_path: Path) -> None:
    """The caller changes its tensors while the writing thread still waits for the disk."""
    go = threading.Event()

    class SlowDisk(Disk):
        def make_folder(self, path: Path) -> None:
            go.wait(10)
            super().make_folder(path)

    store = CheckpointStore(tmp_path, on_error=raising, disk=SlowDisk())
    checkpoint = small(5)
    store.save(checkpoint)
    checkpoint.model["w"].fill_(-1)
    checkpoint.state["cursor"]["at"] = -1
    go.set()
    store.wait()
    assert equal(store.load(), small(5))


@pytest.mark.gpu
def test_save_snapshots_gpu_tensors_at_call_time(tmp_path: Path) -> None:
    weight = torch.randn(512, 512, device="cuda")
    wanted = weight.cpu()
    with CheckpointStore(tmp_path, on_error=raising) as store:
        store.save(Checkpoint(1, {"w": weight}))
        weight.zero_()
        assert same(store.load().model["w"], wanted)


def test_second_save_blocks_until_the_first_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()

    class BusyDisk(Disk):
        def make_folder(self, path: Path) -> None:
            free.wait()
            super().make_folder(path)

    with CheckpointStore(tmp_path, on_error=raising, disk=BusyDisk()) as store:
        store.save(small(1))  # returns while the disk is busy
        before, wait = store.blocked_seconds, store.wait

        def wait_for_disk() -> None:
            threading.Timer(0.1, free.set).start()
            wait()

        monkeypatch.setattr(store, "wait", wait_for_disk)
        store.save(small(2))
        assert store.blocked_seconds - before >= 0.1
    assert store.steps() == [1, 2]


def test_pruning_keeps_the_newest_and_the_best_checkpoint(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=2, on_error=raising) as store:
        for step, score in enumerate([3.0, 0.5, float("nan"), None, 2.0, 0.7], start=1):
            store.save(small(step), score=score)
        store.wait()
        assert store.steps() == [2, 5, 6]
        assert store.best() == 2
        store.save(small(7), score=0.1)
        store.wait()
        assert (store.steps(), store.best()) == ([6, 7], 7)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000006", "step-000000007"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    store = stored(tmp_path, 1, 2)
    again = Checkpoint(2, {"w": torch.tensor([9.0])})
    store.save(again)
    store.wait()
    assert store.steps() == [1, 2]
    assert equal(store.load(), again)
    assert len(list(tmp_path.iterdir())) == 2


def test_just_written_checkpoint_is_never_pruned(tmp_path: Path) -> None:
    """After a fallback from a corrupt newer one, the older step being saved is the only good one."""
    store = stored(tmp_path, 1, 9, keep=1)
    (tmp_path / "step-000000009" / "model.safetensors").write_bytes(b"x")
    store.save(small(5))
    store.close()
    assert CheckpointStore(tmp_path, on_notice=lambda text: None).load().step == 5


class Crash(OSError):
    """The machine stopped here."""


class CrashDisk(Disk):
    """Stops at the n-th operation, also inside a file; what was never synced is lost, then nothing works."""

    def __init__(self, at: int = -1, *, lose: bool = False) -> None:
        self.at, self.lose = at, lose
        self.count = 0
        self.unsynced: set[Path] = set()
        self.dead = False

    def point(self) -> bool:
        if self.dead:
            raise Crash("dead")
        self.count += 1
        return self.count == self.at

    def crash(self) -> None:
        self.dead = True
        for path in self.unsynced if self.lose else ():
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        raise Crash(f"at {self.at}")

    def guarded(self) -> None:
        if self.point():
            self.crash()

    def make_folder(self, path: Path) -> None:
        self.guarded()
        super().make_folder(path)

    def write(self, path, parts):
        self.guarded()
        self.unsynced.add(path)
        return super().write(path, parts)

    def put(self, file: int, piece: memoryview) -> None:
        """Three cut points per piece: nothing, a part, all but one byte."""
        for cut in (0, len(piece) // 2, len(piece) - 1):
            if self.point():
                super().put(file, piece[:cut])
                self.crash()
        super().put(file, piece)

    def fsync(self, path: Path) -> None:
        """Only noted: the loss of what was not synced is simulated, and thousands of real ones take minutes."""
        self.guarded()
        self.unsynced.discard(path)

    def rename(self, source: Path, target: Path) -> None:
        self.guarded()
        super().rename(source, target)
        self.unsynced = {target / p.relative_to(source) if source in p.parents else p for p in self.unsynced}

    def remove(self, path: Path) -> None:
        self.guarded()
        super().remove(path)

    def remove_empty(self, path: Path) -> None:
        self.guarded()
        super().remove_empty(path)


def saves(root: Path, disk: Disk) -> int:
    """Six saves, with scores that make pruning remove; returns the last step known to be committed."""
    store = CheckpointStore(root, keep=1, on_error=lambda error: None, disk=disk)
    done = 0
    for step, score in zip(range(1, 7), (1.0, 0.5, 2.0, 0.4, 3.0, 2.5), strict=True):
        store.save(small(step), score=score)
        store.wait()
        if isinstance(disk, CrashDisk) and disk.dead:
            break
        done = step
    return done


@pytest.mark.parametrize("lose", [False, True])
def test_crash_at_any_operation_leaves_a_loadable_checkpoint(tmp_path: Path, lose: bool) -> None:
    whole = CrashDisk()
    assert saves(tmp_path / "whole", whole) == 6
    assert whole.count >= 200
    outcomes = set()
    for at in range(1, whole.count + 1):
        root = tmp_path / str(at)
        disk = CrashDisk(at, lose=lose)
        done = saves(root, disk)
        assert disk.dead
        store = CheckpointStore(root, keep=1, on_error=raising, on_notice=pytest.fail)
        if not store.steps():
            assert done == 0
            outcomes.add("none yet")
            continue
        found = store.load()
        assert found.step in (done, done + 1), f"crash at {at}"
        assert equal(found, small(found.step)), f"crash at {at}"
        outcomes.add("new" if found.step > done else "previous")
        if at % 7 == 0:
            store.save(small(50))
            store.close()
            assert store.load().step == 50
        shutil.rmtree(root)
    assert outcomes == {"none yet", "new", "previous"}


CHILD = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoints import CrashDisk, saves
class Exit(CrashDisk):
    def crash(self):
        os._exit(9)
for at in range(5, 300, 23):
    if os.fork() == 0:
        saves(Path(sys.argv[2]) / str(at), Exit(at))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9
"""


def test_killed_writer_keeps_previous_checkpoint_and_temporaries_are_removed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", CHILD, here, str(tmp_path)], check=True, timeout=60)
    roots = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(roots) == 13
    leftovers = 0
    for root in roots:
        leftovers += len(list(root.glob(".tmp-*")))
        store = CheckpointStore(root, on_error=raising, on_notice=pytest.fail)
        assert not list(root.glob(".tmp-*"))
        for step in store.steps():
            assert equal(store.load(step), small(step))
    assert leftovers > 3


def test_temporaries_of_running_processes_and_other_hosts_are_kept(tmp_path: Path) -> None:
    for name in (
        f".tmp-elsewhere.{2**22 + 1}.abc",
        ".tmp-junk",
        f".tmp-{os.uname().nodename}.{os.getpid()}.abc",
    ):
        (tmp_path / name).mkdir()
    CheckpointStore(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_temporary_is_stale_when_its_process_has_ended(tmp_path: Path) -> None:
    host, space, pid, started = disk.temporary_name().removeprefix(".tmp-").split(".")[:4]
    ended = str(2**22 + 1)
    stale = [f"{host}.{space}.{ended}.{started}", f"{host}.{space}.{pid}.1"]
    # The second one is of another container with the same host name, in which another process has that id.
    kept = [f"{host}.{space}.{pid}.{started}", f"{host}.0123456789ab.{ended}.{started}", f"{host}.{ended}"]
    for name in (*stale, *kept, "old"):
        (tmp_path / f".tmp-{name}.abc").mkdir()
    os.utime(tmp_path / ".tmp-old.abc", (0, 0))
    assert sorted(disk.remove_stale(Disk(), tmp_path)) == sorted(f".tmp-{name}.abc" for name in (*stale, "old"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f".tmp-{name}.abc" for name in kept)


def damage(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = chance.choice(["flip", "cut", "grow", "missing", "zero"])
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[chance.randrange(len(data)) :]
    elif kind == "grow":
        data += bytes(chance.randrange(1, 9))
    elif kind == "zero":
        start = chance.randrange(len(data))
        data[start : start + 16] = bytes(b ^ 255 for b in data[start : start + 16])
    path.unlink()
    if kind != "missing":
        path.write_bytes(data)
    return f"{kind} {path.name}"


def test_corrupted_checkpoint_files_are_detected(tmp_path: Path) -> None:
    stored(tmp_path / "good", 1, 2)
    files = sorted(path.name for path in (tmp_path / "good" / "step-000000002").iterdir())
    assert len(files) == 6
    chance = random.Random(0)
    bad = tmp_path / "bad"
    shutil.copytree(tmp_path / "good", bad)
    for case in range(1000):
        name = files[case % len(files)]
        kind = damage(bad / "step-000000002" / name, chance)
        notices: list[str] = []
        store = CheckpointStore(bad, on_notice=notices.append)
        assert equal(store.load(), small(1)), kind
        if (bad / "step-000000002" / "COMMITTED").exists():
            assert len(notices) == 1, kind
            assert "step-000000002" in notices[0]
        with pytest.raises(CheckpointError):
            store.load(2)
        (bad / "step-000000002" / name).unlink(missing_ok=True)
        shutil.copy(tmp_path / "good" / "step-000000002" / name, bad / "step-000000002" / name)
    assert CheckpointStore(bad, on_notice=pytest.fail).load().step == 2


def test_disk_error_does_not_stop_training(tmp_path: Path) -> None:
    class Failing(Disk):
        fail = False

        def put(self, file: int, piece: memoryview) -> None:
            if self.fail:
                raise OSError(5, "Input/output error")
            super().put(file, piece)

    disk, errors = Failing(), []
    with CheckpointStore(tmp_path, on_error=errors.append, disk=disk) as store:
        store.save(small(1))
        store.wait()
        disk.fail = True
        store.save(small(2))
        store.save(small(3))
        store.wait()
        disk.fail = False
        store.wait()
        assert [error.errno for error in errors] == [5, 5]
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
        assert equal(store.load(), small(1))
        store.save(small(4))
        store.wait()
        assert store.steps() == [1, 4]


def test_io_error_at_any_operation_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """EIO once, at any operation: the last good one stays, and the next save works."""

    class Once(CrashDisk):
        def crash(self) -> None:
            raise OSError(5, "Input/output error")

    for at in range(2, 45):
        root, errors = tmp_path / str(at), []
        disk = Once()
        store = CheckpointStore(root, keep=1, on_error=errors.append, disk=disk)
        store.save(small(1))
        store.wait()
        disk.at = disk.count + at
        store.save(small(2))
        store.wait()
        assert errors
        assert equal(store.load(), small(store.steps()[-1]))
        store.save(small(3))
        store.close()
        assert len(errors) == 1
        assert store.steps() == [3]
        assert [path.name for path in root.iterdir()] == ["step-000000003"]


def test_write_error_warns_by_default(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "below")
    store.save(small(1))
    with pytest.warns(RuntimeWarning, match="could not be written"):
        store.wait()


@pytest.mark.root
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], check=True)
    try:
        errors: list[Exception] = []
        store = CheckpointStore(mounted / "run", on_error=errors.append)
        store.save(small(1))
        store.save(Checkpoint(2, {"big": torch.zeros(1 << 19)}))
        store.wait()
        assert [getattr(error, "errno", None) for error in errors] == [28]
        assert equal(store.load(), small(1))
        assert [path.name for path in (mounted / "run").iterdir()] == ["step-000000001"]
        store.save(small(3))
        store.close()
        assert store.steps() == [1, 3]
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_foreign_folder_error_names_the_detected_format(tmp_path: Path) -> None:
    cases = {
        "dcp": (".metadata", "torch.distributed.checkpoint"),
        "torch": ("last.pt", "pickled files"),
        "hf": ("config.json", "Hugging Face"),
        "half": ("step-000000004/model.safetensors", "never finished"),
        "other": ("notes.txt", "notes.txt"),
    }
    for folder, (name, words) in cases.items():
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
        if folder == "hf":
            (tmp_path / folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match=words) as caught:
            CheckpointStore(tmp_path / folder).load()
        assert str(tmp_path / folder) in str(caught.value)
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointStore(tmp_path / "nowhere").load()
    assert not (tmp_path / "nowhere").exists()


def test_missing_step_error_lists_the_available_steps(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 5, but got steps 1, 2"):
        stored(tmp_path, 1, 2).load(5)


def test_symlinked_checkpoint_folder_is_not_listed(tmp_path: Path) -> None:
    stored(tmp_path / "real", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000000001").symlink_to(tmp_path / "real" / "step-000000001")
    assert CheckpointStore(tmp_path / "run").steps() == []


def test_checkpoint_of_another_model_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    check_matches(Checkpoint(1, dict(model.state_dict())), model)
    other = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(CheckpointError) as caught:
        check_matches(Checkpoint(1, dict(other.state_dict())), model)
    text = str(caught.value)
    assert "5 missing (1.weight, 1.bias, 1.running_mean" in text
    assert "2 unexpected (2.weight, 2.bias)" in text
    assert "2 of another shape (0.weight is (4, 2) and should be (3, 2)" in text


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (Checkpoint(-1, {}), "whole number"),
        (Checkpoint(1, {}, state={"x": torch.zeros(1)}), "JSON"),
        (Checkpoint(1, {"s": torch.zeros(2, 2).to_sparse()}), "dense"),
        (Checkpoint(1, {"m": torch.zeros(2, device="meta")}), "meta"),
        (Checkpoint(1, {"n": 3}), "must be a tensor"),  # type: ignore[dict-item]
        (Checkpoint(1, {}, {"a/b": {"state": {"w": {"s": 1}}, "groups": []}}), "slash"),
    ],
)
def test_unserializable_checkpoint_is_rejected_by_save(tmp_path: Path, checkpoint: Checkpoint, words: str) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        store.save(checkpoint)
    assert not list(tmp_path.iterdir())


def test_checkpoint_folder_contains_plain_safetensors_and_json(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stored(tmp_path, 1)
    folder = tmp_path / "step-000000001"
    assert same(load_file(folder / "model.safetensors"), small(1).model)
    assert set(load_file(folder / "optimizer.safetensors")) == {"main/w/step", "main/w/exp_avg"}
    assert json.loads((folder / "state.json").read_text())["optimizers"]["main"]["state"]["w"] == {"k": 3}


def test_checkpoint_with_nan_weights_is_not_written(tmp_path: Path) -> None:
    errors: list[Exception] = []
    store = CheckpointStore(tmp_path, on_error=errors.append)
    store.save(small(1))
    store.save(Checkpoint(2, {"w": torch.tensor([1.0, float("nan")])}))
    store.wait()
    assert "NaN in w" in str(errors[0])
    assert store.steps() == [1]


def test_concurrent_save_of_the_same_step_keeps_the_committed_checkpoint(tmp_path: Path) -> None:
    """Two programs save the same step: who comes second must not remove what the first has committed."""

    class Late(Disk):
        def rename(self, source: Path, target: Path) -> None:
            if source.name.startswith(".tmp"):
                winner = CheckpointStore(tmp_path)
                winner.save(small(5))
                winner.wait()
            super().rename(source, target)

    store = CheckpointStore(tmp_path, disk=Late(), on_error=lambda error: None)
    store.save(small(5))
    store.wait()
    assert CheckpointStore(tmp_path).steps() == [5]
    assert equal(CheckpointStore(tmp_path).load(), small(5))
