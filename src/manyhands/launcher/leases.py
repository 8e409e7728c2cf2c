"""Leases: keep two programs on one machine from using the same accelerator unless the user wants that.

A lease is a lock on a file of this user, so it ends with the program that holds it, in whatever way that program ends.
CPUs are never leased, because programs share them. MANYHANDS_ON_BUSY selects what a second program does: `wait`,
`refuse` or `share`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ..core import DeviceError, FileError, SettingsError, open_regular, resolve_settings
from ..distributed import Device
from .process_identity import gpu_identity

WAIT, REFUSE, SHARE = "wait", "refuse", "share"
UNLEASED = frozenset({"cpu"})
"""Kinds of devices that any number of programs use at once."""
POLL_SECONDS = 0.25
_MAX_COMMAND = 120


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """What a program does when another program holds a device: `wait`, `refuse` or `share`."""

    on_busy: str = WAIT

    def __post_init__(self) -> None:
        if self.on_busy not in (WAIT, REFUSE, SHARE):
            raise SettingsError(
                f"MANYHANDS_ON_BUSY must be {WAIT}, {REFUSE} or {SHARE}",
                got=repr(self.on_busy),
                remedy="set it to one of them",
            )


@dataclass(frozen=True)
class Holder:
    """The program that holds a device: its process, its command, its run, and since when."""

    pid: int = 0
    command: str = ""
    run: str = ""
    since: float = 0.0

    @classmethod
    def me(cls, run: str) -> Holder:
        """Return the holder record of this program."""
        command = " ".join(shlex.join(sys.orig_argv).split())
        return cls(os.getpid(), command[:_MAX_COMMAND], run, time.time())

    def __str__(self) -> str:
        if not self.pid:
            return "another program"
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} ({self.command}) since {since}" + (f" for the run {self.run}" if self.run else "")


class Busy(Exception):
    """Raised within this file when another program holds a device."""

    def __init__(self, device: str, holder: Holder) -> None:
        super().__init__(device)
        self.device, self.holder = device, holder


@contextlib.contextmanager
def leased(
    devices: Sequence[Device], run: str = "", notify: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Hold the devices within the context, so that no other program of this user uses them.

    If another program holds one of them, wait and report the holder; with MANYHANDS_ON_BUSY=refuse, raise DeviceError.
    Jobs of one program share its leases, and so do virtual devices that are parts of one real device.

    >>> with leased([Device("cpu")]):
    ...     pass
    """
    shown = {lease_name(one): f"{one.kind}:{one.index}" for one in devices if one.kind not in UNLEASED}
    names = sorted(shown)
    choice = resolve_settings(LeaseSettings, {}).values.on_busy
    if not names or choice == SHARE or not _take(shown, run, choice, notify):
        yield
        return
    try:
        yield
    finally:
        _table.give_back(names)


def lease_name(device: Device) -> str:
    """Return a name of a real device that is the same in every program, whichever devices are visible to it.

    >>> lease_name(Device("xpu", 1, share=0.5, slot=1))
    'xpu:1'
    """
    return f"{device.kind}:{gpu_identity(device.index) if device.kind == 'cuda' else device.index}"


def _take(shown: Mapping[str, str], run: str, choice: str, notify: Callable[[str], None]) -> bool:
    """Take the leases, waiting if necessary, and return True; return False if no file can be locked on this machine."""
    started, reported, names, listed = time.monotonic(), "", sorted(shown), ", ".join(shown.values())
    while True:
        try:
            _table.take(names, run)
        except Busy as busy:
            if choice == REFUSE:
                raise DeviceError(
                    "a device can be used by only one program at a time",
                    got=f"{shown[busy.device]}, held by {busy.holder}",
                    remedy="wait for it, choose another device, or set MANYHANDS_ON_BUSY to wait or share",
                ) from None
            text = f"{shown[busy.device]} is held by {busy.holder}: waiting for it (MANYHANDS_ON_BUSY=share would not)"
            if text != reported:
                notify(text)
            reported = text
            time.sleep(POLL_SECONDS)
        except (OSError, FileError) as error:
            notify(f"the leases of {listed} could not be checked, so other programs may use them too: {error}")
            return False
        else:
            if reported:
                notify(f"{listed} became free after {time.monotonic() - started:.0f} s")
            return True


class _Table:
    """The leases of this process, with the number of jobs that use each."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._files: dict[str, int] = {}
        self._jobs: dict[str, int] = {}
        os.register_at_fork(after_in_child=self.forget)

    def take(self, names: Sequence[str], run: str) -> None:
        """Take all leases, or none and raise `Busy`, so that no program holds one device while it waits for another."""
        with self._guard:
            taken: list[str] = []
            try:
                for name in names:
                    if name not in self._files:
                        self._open(name, run)
                    self._jobs[name] = self._jobs.get(name, 0) + 1
                    taken.append(name)
            except BaseException:
                self._release(taken)
                raise

    def give_back(self, names: Sequence[str]) -> None:
        """Release one job's use of the leases; the last job's release frees a device."""
        with self._guard:
            self._release(names)

    def forget(self) -> None:
        """Close the copies of the locks in a forked child, so that the leases end with the parent program."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                os.close(file)
        self._guard, self._files, self._jobs = threading.Lock(), {}, {}

    def _open(self, name: str, run: str) -> None:
        file = open_regular(lease_folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(file)
            if not _is_above(holder.pid):
                os.close(file)
                raise Busy(name, holder) from None
            # The holder is an ancestor, perhaps waiting for this process: a program started by a job uses the job's
            # devices.
        else:
            _write_holder(file, Holder.me(run))
        self._files[name] = file

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._files:
                continue  # taken before a fork, and closed in the child
            self._jobs[name] -= 1
            if self._jobs[name] == 0:
                del self._jobs[name]
                file = self._files.pop(name)
                if _read_holder(file).pid == os.getpid():
                    os.ftruncate(file, 0)
                # Unlock explicitly: close() alone would keep the lock while any copy of the descriptor is open.
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)


def holders() -> dict[str, Holder]:
    """Return the other programs that hold a device, by `lease_name`; only read the files, without a lock."""
    found: dict[str, Holder] = {}
    for path in sorted(lease_folder().glob("*.lock")):
        try:
            file = open_regular(path)
        except FileError:
            continue
        try:
            holder = _read_holder(file)
        finally:
            os.close(file)
        if holder.pid and holder.pid != os.getpid() and psutil.pid_exists(holder.pid):
            found[path.stem] = holder
    return found


def lease_folder() -> Path:
    """Return the folder of this user's leases, which only this user may write to."""
    user = os.getuid()
    # One folder for all programs of a user, whether they were started from a desktop, a shell or a timer.
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    folder = base / "manyhands" if os.access(base, os.W_OK) else Path(tempfile.gettempdir()) / f"manyhands-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # One call, so that no link of another user is followed between two checks.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} belongs to another user, or another user may write to it")
    return folder


def _write_holder(file: int, holder: Holder) -> None:
    data = json.dumps(asdict(holder)).encode()
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))


def _read_holder(file: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):
        return Holder()


def _is_above(pid: int) -> bool:
    """Return whether the process `pid` is an ancestor of this one."""
    return any(parent.pid == pid for parent in psutil.Process().parents())


_table = _Table()
