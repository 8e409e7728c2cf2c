"""Leases: programs that wait for each other, with real processes, locks and kills."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.core import DeviceError, SettingsError
from manyhands.distributed import Device
from manyhands.launcher import leased, leases
from manyhands.launcher.process_identity import Listed, gpu_identity

FAKE, OTHER = Device("fake", 0), Device("fake", 1)
PROGRAM = """
import sys
from manyhands.distributed import Device
from manyhands.launcher import leased
names = sys.argv[1].split(",")
halves = [Device("fake", int(name), share=0.5, slot=slot) for name in names for slot in range(2)]
print("ready", flush=True)
sys.stdin.readline()
with leased(halves, "first-run", lambda text: print("said", text, flush=True)):
    with leased([Device("fake", int(names[0]))]):
        pass  # a second job of the same program, which ends before the first
    print("got", flush=True)
    sys.stdin.readline()
print("gone", flush=True)
"""


class Program:
    """Another program that leases fake devices on request."""

    def __init__(self, names: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, names], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, **environ},
        )  # fmt: skip
        self._is_ready = False

    def go(self) -> None:
        self._is_ready = self._is_ready or self.hear() == "ready"
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.02)


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(names: str, **environ: str) -> Program:
        started.append(Program(names, **environ))
        return started[-1]

    yield start
    for one in started:
        one.end()


def waiting(done: threading.Event, said: list[str], device: Device = FAKE) -> threading.Thread:
    """Waits for a device in a thread, as the main one would."""

    def wait() -> None:
        with leased([device], "second-run", said.append):
            done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_second_program_waits_and_reports_the_lease_holder(program: Callable[..., Program]) -> None:
    first = program("0")
    first.go()
    assert first.hear() == "got"
    done, said = threading.Event(), list[str]()
    thread = waiting(done, said)
    until(lambda: said)
    assert f"fake:0 is held by process {first.process.pid} (" in said[0]
    assert {name: holder.run for name, holder in leases.holders().items()} == {"fake:0": "first-run"}
    assert "for the run first-run: waiting" in said[0]
    assert not done.is_set()
    first.go()
    thread.join(120)
    assert done.is_set()
    assert [text[:24] for text in said[1:]] == ["fake:0 became free after"]
    assert first.hear() == "gone"
    assert leases.holders() == {}


def test_lease_of_a_killed_program_is_released(program: Callable[..., Program]) -> None:
    first = program("0")
    first.go()
    assert first.hear() == "got"
    done, said = threading.Event(), list[str]()
    thread = waiting(done, said)
    until(lambda: said)
    first.process.send_signal(signal.SIGKILL)
    thread.join(120)
    assert done.is_set()


def test_on_busy_refuse_raises_and_share_proceeds(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = program("0")
    first.go()
    assert first.hear() == "got"
    monkeypatch.setenv("MANYHANDS_ON_BUSY", "refuse")
    with pytest.raises(DeviceError, match=rf"fake:0, held by process {first.process.pid} .* for the run first-run"):
        leased([FAKE]).__enter__()
    with leased([OTHER]):
        pass
    monkeypatch.setenv("MANYHANDS_ON_BUSY", "share")
    with leased([FAKE]):
        pass
    monkeypatch.setenv("MANYHANDS_ON_BUSY", "perhaps")
    with pytest.raises(SettingsError, match="MANYHANDS_ON_BUSY must be wait, refuse or share, but got 'perhaps'"):
        leased([FAKE]).__enter__()


def test_waiting_program_holds_none_of_its_devices(program: Callable[..., Program]) -> None:
    both, later = program("0,1", MANYHANDS_ON_BUSY="wait"), program("0", MANYHANDS_ON_BUSY="refuse")
    with leased_by_another(program, "1"):
        both.go()
        assert both.hear().startswith("said fake:1 is held by process")
        later.go()
        assert later.hear() == "got"
        later.go()
        assert later.hear() == "gone"
    assert both.hear().startswith("said fake:0, fake:1 became free")
    assert both.hear() == "got"


class leased_by_another:
    """A device that another program holds for a while."""

    def __init__(self, program: Callable[..., Program], names: str) -> None:
        self._other = program(names)

    def __enter__(self) -> None:
        self._other.go()
        assert self._other.hear() == "got"

    def __exit__(self, *reason: object) -> None:
        self._other.go()
        assert self._other.hear() == "gone"


def test_nested_job_does_not_release_the_lease_of_the_outer_job(program: Callable[..., Program]) -> None:
    """The first one's inner job has ended and must not have freed the device that the outer one still holds."""
    first, second = program("0"), program("0", MANYHANDS_ON_BUSY="refuse")
    first.go()
    assert first.hear() == "got"
    second.go()
    assert second.hear() == ""
    assert f"held by process {first.process.pid}" in second.process.communicate()[1]


def test_forked_child_does_not_inherit_the_lease(program: Callable[..., Program]) -> None:
    """Workers that read data are forked and may outlive a job, or a program that was killed."""
    forks = """
import os, sys, time
from manyhands.distributed import Device
from manyhands.launcher import leased
lease = leased([Device("fake", 0)])
lease.__enter__()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", forks], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        done, said = threading.Event(), list[str]()
        thread = waiting(done, said)
        until(lambda: said)
        parent.kill()
        thread.join(120)
        assert done.is_set()
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_subprocess_of_a_job_can_use_its_leased_device(program: Callable[..., Program]) -> None:
    """A callback may start a program that trains on the same device: waiting for it would never end."""
    child = program("0", MANYHANDS_ON_BUSY="refuse")
    with leased([FAKE], "outer"):
        child.go()
        assert child.hear() == "got"
        child.go()
        assert child.hear() == "gone"
        assert leases._read_holder(leases._table._files["fake:0"]).run == "outer"


def test_the_cpu_is_never_leased(tmp_path: Path) -> None:
    with leased([Device("cpu"), Device("cpu", share=0.5)]):
        assert list(tmp_path.iterdir()) == []


def test_lease_name_maps_through_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "gpu_identity", lambda index: gpu_identity(index, list, lambda index: ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert leases.lease_name(Device("cuda", 1)) == "cuda:5"
    assert leases.lease_name(Device("xpu", 1)) == "xpu:1"


ALIKE = [Listed("GPU-aa1", "H200"), Listed("GPU-bb2", "H200")]
MIXED = [Listed("GPU-aa1", "T4"), Listed("GPU-bb2", "H200")]


@pytest.mark.parametrize(
    ("visible", "order", "gpus", "index", "name"),
    [
        ("", "", ALIKE, 1, "GPU-bb2"),
        ("1", "", ALIKE, 0, "GPU-bb2"),
        ("GPU-bb2", "", ALIKE, 0, "GPU-bb2"),
        ("1, GPU-a", "", ALIKE, 1, "GPU-aa1"),
        ("MIG-cc3", "", ALIKE, 0, "MIG-cc3"),
        # Another job's group of processes sees its own GPU alone, and calls it 0 too.
        ("", "", ALIKE[1:], 0, "GPU-bb2"),
        # CUDA lists the fastest first; only with CUDA_DEVICE_ORDER=PCI_BUS_ID are its numbers those of the driver.
        ("", "", MIXED, 0, "GPU-from-cuda-0"),
        ("", "PCI_BUS_ID", MIXED, 0, "GPU-aa1"),
        ("GPU-a", "", MIXED, 0, "GPU-aa1"),
        ("7", "", [], 0, "GPU-from-cuda-0"),
    ],
)
def test_gpu_identity_is_independent_of_visibility_and_order(
    visible: str, order: str, gpus: list[Listed], index: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert gpu_identity(index, lambda: gpus, lambda number: f"GPU-from-cuda-{number}") == name


def test_busy_device_error_uses_the_requested_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "gpu_identity", lambda index: "GPU-aa1")
    monkeypatch.setenv("MANYHANDS_ON_BUSY", "refuse")
    path = leases.lease_folder() / "cuda:GPU-aa1.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeviceError, match="got cuda:3, held by another program"), leased([Device("cuda", 3)]):
            pass


def test_unavailable_lock_folder_prints_a_notice_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manyhands").write_text("in the way")
    said: list[str] = []
    with leased([FAKE], notify=said.append):
        pass
    assert said[0].startswith("the leases of fake:0 could not be checked")


def test_lock_file_that_is_a_link_is_neither_followed_nor_truncated(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (leases.lease_folder() / "fake:0.lock").symlink_to(victim)
    said: list[str] = []
    with leased([FAKE], notify=said.append):
        assert leases.holders() == {}
    assert victim.read_text() == "mine"
    assert "a symbolic link" in said[0]


@pytest.mark.parametrize("kind", ["link", "writable by others"])
def test_lease_folder_that_others_can_change_is_not_used(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "manyhands"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PermissionError, match="another user"):
        leases.lease_folder()
