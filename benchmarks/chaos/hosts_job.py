"""HostsJob: a training job on simulated hosts, started by the command that a user runs on each of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.launcher import write_token
from manyhands.testing import NamespaceHosts

from . import work
from .programs import Events, Program


class HostsJob:
    """The commands of all hosts, and the run that the first one writes."""

    def __init__(self, hosts: NamespaceHosts, folder: Path, *, steps: int, runs: Path | None = None) -> None:
        self.hosts, self.folder, self.hurry = hosts, folder, folder / "hurry"
        self.runs = folder / "runs" if runs is None else runs
        self.run = self.runs / "run"
        self.programs: list[Program] = []
        self._events = Events(self.run / "events.jsonl")
        write_token(folder / "token")
        self._words = [
            sys.executable, "-m", "manyhands", "fit", str(Path(work.__file__)), "--hosts", str(len(hosts)),
            "--join", "host1:7777", "--token-file", str(folder / "token"), "--on", "cpu", "--epochs", "100000",
            "--steps", str(steps), "--strategy", "mirrored,precision=fp64", "--save-every", "50",
            "--folder", str(self.runs), "--name", "run",
        ]  # fmt: skip

    def start(self, *more: str) -> None:
        """Start the command on all hosts, with additional options."""
        for index, host in enumerate(self.hosts):
            command, env = [*self._words, *more], {"HURRY": str(self.hurry), "MANYHANDS_TEST": "1"}
            program = Program(host.name, command, self.folder / f"output-{index}", host=host, env=env)
            program.start()
            self.programs.append(program)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind."""
        return self._events.of(kind)

    @property
    def step(self) -> int:
        """The last step that was reported."""
        return max((entry["steps"][-1] for entry in self.events("steps")), default=0)

    @property
    def num_steps(self) -> int:
        """The number of steps that were reported, including repeated ones."""
        return self._events.num_steps

    @property
    def size(self) -> int:
        """The number of ranks since the last recovery; before any, one on every host."""
        last = max([*self.events("recovered"), *self.events("start")], key=lambda entry: entry["t"], default={})
        return int(last.get("size", len(self.hosts)))

    def until(self, what: Callable[[], Any], seconds: float = 90) -> None:
        """Wait for a condition; fail with all output on a timeout, or if the first command ends."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.said()
            assert self.programs[0].code is None, self.said()
            time.sleep(0.05)

    def end(self) -> None:
        """Remove the delay of each step, and wait until the job ends."""
        self.hurry.touch()
        for program in self.programs:
            assert program.process.wait(600) == 0, self.said()

    def said(self) -> str:
        """Return what all commands have printed."""
        return "\n".join(f"-- {one.name}\n{one.output.read_text(errors='replace')}" for one in self.programs)

    def close(self) -> None:
        """Kill all commands that still run."""
        for program in self.programs:
            program.close()
