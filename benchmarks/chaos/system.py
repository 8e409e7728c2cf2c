"""System: base class of the systems under test, which start programs, inject faults and find leaked resources."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from manyhands.testing import NamespaceHost, NamespaceHosts, ResourceSnapshot

from .programs import Program, SmallDisk, until

START_SECONDS = 300.0
"""Seconds within which a system must work after its start, on a loaded machine."""
RECOVER_SECONDS = 240.0
"""Seconds within which a system must work again after a fault has ended; far above what is expected."""
PATIENCE = 30.0
"""Seconds that processes, ports and shared memory of a system that was ended may still exist."""
SLOW = "256kbit"
CORRUPT = r"skipped a corrupt checkpoint"
"""What is reported once all programs of a job were restarted and read the checkpoint."""

Undo = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """A fault that can be injected into a system again and again."""

    name: str
    strike: Callable[[], Undo | None]
    """Injects the fault; returns a function that ends it, or None if it ends by itself."""
    report: str | None = None
    """Regular expression of what the system must print; None for a fault that the system hides, or that the supervisor
    of a killed program sees."""
    lasts: float = 0.0
    """Seconds until it is ended."""
    within: float = 90.0
    """Seconds within which it must be reported."""


@dataclass(frozen=True)
class Trial:
    """The result of one fault."""

    fault: str
    seconds: float
    """Until the system worked again, from the moment at which the fault ended."""
    reported: float | None
    """Seconds until it was reported."""


class Broken(Exception):
    """The system does not work: it did not start, or did not recover."""


class System(ABC):
    """A system under test, in its own folder. The runner draws the faults, and `draw` draws their targets."""

    name: str

    def __init__(self, folder: Path, seconds: float, draw: random.Random) -> None:
        self.folder, self.seconds, self.draw = folder, seconds, draw
        self.programs: list[Program] = []
        self.counts: Counter[str] = Counter()
        """What was wrong, by the name of its check."""
        self.problems: list[str] = []
        """Descriptions of what was wrong."""
        self._held = contextlib.ExitStack()
        folder.mkdir(parents=True)
        self._before = ResourceSnapshot.now()
        self.hosts: Sequence[NamespaceHost] = ()

    @abstractmethod
    def open(self) -> None:
        """Start all programs; return when the system works."""

    @abstractmethod
    def faults(self) -> list[Fault]:
        """Return the catalogue of this system."""

    @abstractmethod
    def progress(self) -> int:
        """Return a counter, such as completed steps, that grows only while the system works."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the work and compare its results with those of an undisturbed one."""

    least_progress = 3

    def is_whole(self) -> bool:
        """Return whether every member takes part again."""
        return all(program.code is None for program in self.programs)

    def tend(self) -> None:
        """Restart programs that have failed, as a supervisor does."""
        for program in self.programs:
            program.supervise()

    # -- faults ---------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> Trial:
        """Inject a fault, end it, and wait until the system works again and has reported it."""
        marks, began = self._sizes(), time.monotonic()
        reported: list[float] = []

        def watch() -> None:
            self.tend()
            if fault.report is not None and not reported and re.search(fault.report, self.said(marks)):
                reported.append(time.monotonic() - began)

        undo = fault.strike()
        until(lambda: False, fault.lasts, watch)
        if undo is not None:
            undo()
        ended = time.monotonic()
        if fault.report is not None:
            # What the system does before it has noticed the fault does not show that it works.
            until(lambda: bool(reported), max(0.0, began + fault.within - ended), watch)
            if not reported:
                self.found("silent_faults", f"{fault.name}: nothing matches {fault.report!r} in {self.said(marks)!r}")
        before = self.progress()
        works = until(
            lambda: self.is_whole() and self.progress() >= before + self.least_progress, RECOVER_SECONDS, watch
        )
        seconds = time.monotonic() - ended
        if not works:
            raise Broken(f"{self.name} did not recover from: {fault.name}")
        return Trial(fault.name, seconds, reported[0] if reported else None)

    def found(self, check: str, text: str, number: int = 1) -> None:
        """Record that an invariant does not hold."""
        self.counts[check] += number
        self.problems.append(f"{check}: {text}")

    def said(self, marks: dict[Path, int] | None = None) -> str:
        """Return what the programs have printed since their start, or after these sizes of their outputs."""
        texts = []
        for program in self.programs:
            with contextlib.suppress(FileNotFoundError), program.output.open("rb") as file:
                file.seek((marks or {}).get(program.output, 0))
                texts.append(file.read().decode(errors="replace"))
        return "\n".join(texts)

    def _sizes(self) -> dict[Path, int]:
        return {one.output: one.output.stat().st_size for one in self.programs if one.output.exists()}

    def killed(self, processes: Callable[[], Sequence[psutil.Process]]) -> Callable[[], None]:
        """Return a function that kills one of these processes, drawn at random."""

        def strike() -> None:
            self._signal(self.drawn(processes), signal.SIGKILL)

        return strike

    def _signal(self, victim: psutil.Process, number: signal.Signals) -> None:
        """Send a signal, and log its target beside the logs of the programs."""
        with (self.folder / "signals").open("a") as log, contextlib.suppress(psutil.NoSuchProcess):
            who = f"{victim.pid} of {victim.ppid()}, {victim.name()}, {' '.join(victim.cmdline())[:150]}"
            log.write(f"{time.strftime('%H:%M:%S')} {number.name} to {who}\n")
        victim.send_signal(number)

    def stopped(self, processes: Callable[[], Sequence[psutil.Process]]) -> Callable[[], Undo]:
        """Return a function that stops one of these processes (SIGSTOP); its result resumes it."""

        def strike() -> Undo:
            victim = self.drawn(processes)
            self._signal(victim, signal.SIGSTOP)
            return lambda: _resume(victim)

        return strike

    def drawn(self, processes: Callable[[], Sequence[psutil.Process]]) -> psutil.Process:
        """Return one of these processes at random; wait if there is none for a moment."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = processes()
            return bool(found)

        if not until(look, START_SECONDS, self.tend):
            raise Broken(f"{self.name}: there is no process to choose from")
        return self.draw.choice(found)

    def of(self, program: Program) -> list[psutil.Process]:
        """Return the process of a command."""
        return [psutil.Process(program.pid)] if program.code is None else []

    def cut(self, *indices: int) -> Callable[[], Undo]:
        """Return a function that takes one of these hosts off the network; its result restores the link."""

        def strike() -> Undo:
            host = self.hosts[self.draw.choice(indices)]
            host.link_down()
            return host.link_up

        return strike

    def muted(self, *pairs: tuple[int, int]) -> Callable[[], Undo]:
        """Return a function that drops the packets from one host of a pair to the other; its result ends that."""

        def strike() -> Undo:
            sender, receiver = self.draw.choice(pairs)
            host, address = self.hosts[sender], self.hosts[receiver].address
            host.mute(address)
            return lambda: host.unmute(address)

        return strike

    def slowed(self, *indices: int) -> Callable[[], Undo]:
        """Return a function that limits the bandwidth of one of these hosts; its result removes the limit."""

        def strike() -> Undo:
            host = self.hosts[self.draw.choice(indices)]
            host.limit_rate(SLOW)
            return lambda: host.limit_rate(None)

        return strike

    def wait_for_checkpoints(self, run: Path) -> None:
        """Wait until there are two checkpoints."""
        if not until(lambda: len(list(run.glob("checkpoints/step-*/COMMITTED"))) > 1, RECOVER_SECONDS, self.tend):
            raise Broken(f"{self.name}: there are no checkpoints: {self.said()}")

    # -- resources ------------------------------------------------------------------------------------------------

    def use_hosts(self, count: int) -> NamespaceHosts:
        """Create hosts that exist until the system is closed."""
        hosts = self._held.enter_context(NamespaceHosts(count))
        self.hosts = list(hosts)
        return hosts

    def use_disk(self, name: str, size: str = "32m") -> SmallDisk:
        """Create a small disk that exists until the system is closed."""
        return self._held.enter_context(contextlib.closing(SmallDisk(self.folder / name, size)))

    def close(self) -> None:
        """End everything; report resources that programs left behind, if they ended by themselves."""
        left = self._leftovers() if all(program.code == 0 for program in self.programs) else []
        for text in left:
            self.found("left_behind", text)
        for program in self.programs:
            program.close()
        self._held.close()
        if left := ResourceSnapshot.now().beyond(self._before):
            until(lambda: not ResourceSnapshot.now().beyond(self._before), PATIENCE)
        for text in ResourceSnapshot.now().beyond(self._before):
            self.found("left_behind", text)

    def _leftovers(self) -> list[str]:
        until(lambda: not list(self._left()), PATIENCE)
        return list(self._left())

    def _left(self) -> Iterator[str]:
        for program in self.programs:
            for process in program.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield f"process {process.pid} of {program.name}: {' '.join(process.cmdline())[:200]}"
        for host in self.hosts:
            tables = host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], stdout=subprocess.PIPE, text=True).stdout
            for words in map(str.split, tables.splitlines()):
                if len(words) > 3 and words[3] == "0A":
                    yield f"port {int(words[1].rpartition(':')[2], 16)} on {host.name}"


def damage_newest(run: Path, draw: random.Random) -> None:
    """Damage a file of the newest checkpoint of a run."""
    newest = max(run.glob("checkpoints/step-*/COMMITTED")).parent
    damage(max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size), draw)


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file, or truncate it."""
    data = bytearray(path.read_bytes())
    if draw.random() < 0.5:
        del data[len(data) // 2 :]
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
