"""Sandbox of a replica's process: limits what code can do that runs in it after an attack by the model it serves.

Before a replica reads the first byte of an archive it gives up, for good and for every thread that it will have:
environment variables and descriptors that it does not need, capabilities (except reading files), every file but the
model and the libraries (Landlock), network and signals to other processes (Landlock and seccomp), and every system
call beyond a list of those that computing needs (seccomp). Its memory is limited by a cgroup where one can be made, by
RLIMIT_DATA on a CPU, and by the server, which ends a replica that grows beyond its limit. RLIMIT_AS is not used: CUDA
reserves more addresses than there is memory. The number of its threads and processes is limited by a cgroup too.

A model that may be compiled (`compiles=True`) starts a C++ compiler, so its replica may also execute programs that are
installed, and write files of limited size in a folder of its own. Processes that it starts are in the same sandbox and
in the same process group; the server kills them and removes the folder when the replica has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import secrets
import signal
import socket
import stat
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core import RunError
from ..launcher import life_descriptor
from .cgroups import join_cgroup, remove_cgroup
from .syscalls import ARCHITECTURES, COMPILING, COMPUTING, CUDA, Architecture

KEPT_VARIABLES = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH")
KEPT_PREFIXES = ("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_")
"""Prefixes of environment variables that a replica keeps: settings of libraries, nothing about the server."""
MIN_MEMORY = 1 << 30
MEMORY_SHARE = 0.75
"""Share of the free memory that a replica may use if no limit was set."""
MAX_TASKS = 256 + 4 * (os.cpu_count() or 1)
"""Threads and processes that a replica may have: pools of torch have a thread per core."""
MAX_FILE_BYTES = 512 << 20
"""Size of a file that a replica which compiles may write; precompiled headers take some hundred megabytes."""
THREAD_SECONDS = 5.0

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 4, 38, 24
_CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION_3 = 2, 0x20080522

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_READ = _READ_FILE | _READ_DIR
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights that each version of Landlock knows; 16 from the fifth on."""


@dataclass(frozen=True)
class Protection:
    """Layers of a sandbox that are active on this kernel, and those that the kernel lacks."""

    layers: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        held = ", ".join(self.layers) or "none"
        return held + (f" (the kernel lacks {', '.join(self.missing)})" if self.missing else "")


@dataclass(frozen=True)
class Sandbox:
    """What one replica may still do.

    Attributes:
        reads: Files and folders that it may read beside the libraries.
        memory: Bytes that it may use.
        group: Name of its cgroup, unique on this machine; empty for none.
        cuda_index: The GPU that it computes on, whose driver needs more; None for the CPU.
        compiles: Whether it may start a compiler and write in a temporary folder of its own.
        folder: That folder, which `clean_up` removes; empty to make one that stays.
        environ: All environment variables that it gets.
    """

    reads: tuple[str, ...] = ()
    memory: int = MIN_MEMORY
    group: str = ""
    cuda_index: int | None = None
    compiles: bool = False
    folder: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: kept_environment(os.environ))

    @property
    def uses_cuda(self) -> bool:
        """Whether it computes on a GPU."""
        return self.cuda_index is not None

    def enter(self, keep: Collection[int] = ()) -> Protection:
        """Give up everything but this, irrevocably; descriptors in `keep` and the standard ones stay open.

        Raises:
            RunError: The process has other threads, which Landlock would leave out.
        """
        protection = Protection()
        _close_all(keep)
        _require_one_thread()
        folder = (self.folder or make_folder()) if self.compiles else ""
        _forget_environment(self.environ, folder)
        limited = self._limit_memory(protection)
        os.umask(0o077)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _drop_capabilities()
        if self.compiles:
            self._limit_processes(protection, is_limited="pids" in limited)
        self._enter_landlock(protection, folder)
        if self.uses_cuda:
            # The driver starts threads: after Landlock, which they inherit, and before seccomp, which covers all
            # threads and blocks sockets that the driver opens now.
            torch.cuda.set_device(self.cuda_index)
            torch.ones(1, device="cuda").item()
        _prctl(_PR_SET_DUMPABLE, 0)
        self._enter_seccomp(protection)
        return protection

    def clean_up(self, pid: int) -> None:
        """Kill what the replica with this process id left when it ended, and remove its cgroup and folder."""
        # If a process has this id now, the group of the replica had no members, and its number was given away.
        if self.compiles and pid > 1 and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        remove_cgroup(self.group, THREAD_SECONDS)
        if self.folder:
            remove_folder(Path(self.folder))

    def _limit_processes(self, protection: Protection, *, is_limited: bool) -> None:
        """Enter a process group that the server can kill, and limit the number of processes."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        if is_limited:
            return
        if _limit_tasks_of_user(MAX_TASKS):
            protection.layers.append("RLIMIT_NPROC")
        else:
            protection.missing.append("a cgroup that limits processes")

    def _limit_memory(self, protection: Protection) -> set[str]:
        """Limit memory, threads and sizes of files; return the names of the cgroup controllers that hold."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            # If the machine still runs out of memory, the kernel kills replicas first.
            Path("/proc/self/oom_score_adj").write_text("1000")
        size = MAX_FILE_BYTES if self.compiles else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        limited = join_cgroup(self.group, {"memory": self.memory, "pids": MAX_TASKS}) if self.group else set()
        protection.layers.extend(f"cgroup {controller}" for controller in sorted(limited))
        if not self.uses_cuda:
            size = self.memory + _data_bytes()
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))
            protection.layers.append("RLIMIT_DATA")
        return limited

    def _enter_landlock(self, protection: Protection, folder: str) -> None:
        version = landlock_version()
        if version < 1:
            protection.missing.append("landlock")
            return
        every = (1 << _LANDLOCK_RIGHTS.get(version, 16)) - 1
        rights = dict.fromkeys(_libraries(), _READ | (_EXECUTE if self.compiles else 0))
        rights |= dict.fromkeys((*self.reads, *_FACTS), _READ)
        rights |= dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)
        if self.uses_cuda:
            rights |= dict.fromkeys(_cuda_devices(), _READ | _WRITE_FILE | _IOCTL_DEV)
            rights |= dict.fromkeys(_CUDA_FACTS, _READ)
            # The driver sets the names of its threads.
            rights["/proc/self"] = _READ | _WRITE_FILE | _TRUNCATE
        if self.compiles:
            # Inductor loads what it compiled for a first time in another interpreter.
            rights |= dict.fromkeys((*_PROGRAMS, os.path.realpath(sys.executable)), _READ | _EXECUTE)
            rights |= dict.fromkeys((f"{sys.prefix}/pyvenv.cfg", sysconfig.get_paths()["include"]), _READ)
            rights[folder] = every & ~_IOCTL_DEV
        _restrict(version, every, rights, self.reads)
        protection.layers.append(f"landlock {version}")

    def _enter_seccomp(self, protection: Protection) -> None:
        architecture = ARCHITECTURES.get(platform.machine())
        names = COMPUTING | (CUDA if self.uses_cuda else set()) | (COMPILING if self.compiles else set())
        program = architecture.program(names, os.getpid(), compiles=self.compiles) if architecture is not None else []
        if architecture is None or not _filter(architecture, program):
            protection.missing.append("seccomp")
        else:
            protection.layers.append("seccomp")


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a sandboxed process keeps.

    >>> kept_environment({"OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": "x"})
    {'OMP_NUM_THREADS': '1'}
    """
    return {name: value for name, value in environ.items() if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)}


def default_memory() -> int:
    """Return the bytes that a replica may use if no limit was set: a share of the free memory."""
    with contextlib.suppress(OSError, ValueError):
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return max(MIN_MEMORY, int(MEMORY_SHARE * 1024 * int(facts["MemAvailable"].split()[0])))
    return MIN_MEMORY


def landlock_version() -> int:
    """Return the version of Landlock that this kernel supports, 0 if none."""
    return max(0, _syscall(444, None, 0, 1))


def make_folder() -> str:
    """Create a folder for a replica that compiles."""
    return tempfile.mkdtemp(prefix="manyhands-compile-")


def remove_folder(folder: Path) -> None:
    """Remove a folder that a hostile process may have filled: folders of any depth, links are not followed.

    Folders inside are moved to the top before they are emptied, so that no path becomes long.
    """
    with contextlib.suppress(OSError):
        while inside := list(os.scandir(folder)):
            for entry in inside:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for child in list(os.scandir(entry.path)):
                    if child.is_dir(follow_symlinks=False):
                        os.chmod(child.path, 0o700)
                        os.rename(child.path, folder / secrets.token_hex(16))
                    else:
                        os.unlink(child.path)
                os.rmdir(entry.path)
        folder.rmdir()


def _limit_tasks_of_user(more: int) -> bool:
    """Limit the threads and processes of this user to those that it has now and `more`; return whether that holds.

    The kernel applies the limit to what this process starts. It counts tasks of this user that are not visible here,
    for example in other containers, so that number is found by trying. It exempts root.
    """
    if os.getuid() == 0:
        return False
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 22
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_NPROC, (middle, hard))
        low, high = (low, middle) if _can_start_thread() else (middle, high)
    limit = min(low + more, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    return True


def _can_start_thread() -> bool:
    thread = threading.Thread(target=lambda: None)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def _close_all(keep: Collection[int]) -> None:
    """Close inherited descriptors; sockets are shut down first, so that threads reading them end."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2 or fd in keep or fd == life_descriptor():
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
            os.close(fd)


def _require_one_thread() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(THREAD_SECONDS)
    until = time.monotonic() + THREAD_SECONDS
    while (num := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > until:
            raise RunError(f"a replica must have only one thread when it enters its sandbox, but got {num}")
        time.sleep(0.001)


def _forget_environment(environ: Mapping[str, str], folder: str) -> None:
    """Keep only these environment variables, and wipe all others from memory."""
    kept = dict(environ)
    _wipe_environment()
    os.environ.clear()
    os.environ.update(kept)
    if folder:
        os.environ |= {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "HOME": folder}
        os.environ["USER"] = "replica"
        # Inductor then compiles in this process instead of starting interpreters, which it may not execute.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        tempfile.tempdir = folder
    else:
        # Without a writable folder the CUDA cache cannot work.
        os.environ["CUDA_CACHE_DISABLE"] = "1"


def _wipe_environment() -> None:
    """Overwrite Python's copies and the block that the kernel filled when the program was started."""
    held: dict[bytes, bytes] = getattr(os.environ, "_data", {})
    header = bytes.__basicsize__ - 1
    texts = [text for pair in held.items() for text in pair if len(text) > 1]
    for name in list(os.environ):
        with contextlib.suppress(OSError):
            os.unsetenv(name)
    held.clear()
    for text in texts:
        ctypes.memset(id(text) + header, 0, len(text))
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)


def _data_bytes() -> int:
    """Return the bytes that already count against RLIMIT_DATA of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    return 0


def _drop_capabilities() -> None:
    """Drop every capability but reading files, which a server running as root may need for another user's model."""
    kept = 1 << _CAP_DAC_READ_SEARCH
    for capability in range(64):
        if not kept >> capability & 1:
            _prctl(_PR_CAPBSET_DROP, capability)
    head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None or _syscall(architecture.numbers["capget"], head, data) != 0:
        return
    allowed = [data[1] & kept, data[1] & kept, 0, 0, 0, 0]
    _syscall(architecture.numbers["capset"], head, (ctypes.c_uint32 * 6)(*allowed))


_FACTS = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_CUDA_FACTS = ("/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/sys/bus", "/sys/devices", "/sys/module")
_PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/opt")


def _libraries() -> set[str]:
    """Return the folders of Python, of installed packages and of shared libraries."""
    ours = Path(__file__).resolve().parents[1]
    named = sysconfig.get_paths()
    python = {named[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    prefixes = {f"{prefix}/lib" for prefix in (sys.prefix, sys.base_prefix, "/usr", "/usr/local", "")}
    more = {"/usr/lib64", "/lib64", "/usr/local/cuda", *os.environ.get("LD_LIBRARY_PATH", "").split(":")}
    return {*python, *prefixes, *more, str(ours), str(Path(torch.__file__).resolve().parents[1])} - {"", "/"}


def _cuda_devices() -> list[str]:
    return [str(path) for path in Path("/dev").glob("nvidia*")]


def _restrict(version: int, every: int, rights: Mapping[str, int], plain: Collection[str]) -> None:
    """Restrict this thread and its descendants to these paths, without TCP ports or signals to other processes.

    A link among the paths in `plain` is not followed: a model's author may replace its folder by a link to "/".
    """
    attributes = struct.pack("=QQQ", every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    ruleset = _checked(_syscall(444, attributes, 8 if version < 4 else 16 if version < 6 else 24, 0), "landlock")
    try:
        for path, allowed in rights.items():
            _allow(ruleset, path, allowed & every, os.O_NOFOLLOW if path in plain else 0)
        _checked(_syscall(446, ruleset, 0), "landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int, flags: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    except OSError:
        return
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISLNK(mode):
            return
        is_folder = stat.S_ISDIR(mode)
        rule = struct.pack("=Qi", allowed if is_folder else allowed & _FOR_FILES, fd)
        _checked(_syscall(445, ruleset, 1, rule, 0), "landlock")
    finally:
        os.close(fd)


class _SeccompProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _filter(architecture: Architecture, instructions: Iterable[bytes]) -> bool:
    """Install a seccomp filter on all threads; return whether the kernel supports it."""
    code = b"".join(instructions)
    program = _SeccompProgram(len(code) // 8, code)
    set_filter, all_threads = 1, 1
    return _syscall(architecture.numbers["seccomp"], set_filter, all_threads, ctypes.byref(program)) == 0


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise RunError(f"{what}: {errno.errorcode.get(ctypes.get_errno(), 'unknown error')}")
    return result


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _syscall(number: int, *arguments: object) -> int:
    """Make a system call; integers are passed as longs."""
    plain = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *plain))
