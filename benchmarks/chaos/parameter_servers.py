"""Parameter servers: a coordinator, two servers and two workers, each on a host of its own."""

from __future__ import annotations

import json
import random
import secrets
import sys
from pathlib import Path

import torch
from torch import Tensor

import manyhands as mh

from .member import ALONE, TIMEOUT
from .programs import Events, Program, until
from .system import CORRUPT, RECOVER_SECONDS, START_SECONDS, Broken, Fault, System, damage_newest
from .work import PACE, wrong_samples

PORT = 7077
SILENT = TIMEOUT / 2 + 3
"""Seconds without a message after which a member counts as failed."""
ROLES = (("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1))
SERVERS, WORKERS = (1, 2), (3, 4)
FINISH_SECONDS = 600.0
MEMBER = (sys.executable, "-m", "benchmarks.chaos.member")


class ParameterServers(System):
    """Asynchronous or synchronous training, chosen at random; a supervisor restarts every member."""

    name = "parameter servers"

    def __init__(self, folder: Path, seconds: float, draw: random.Random) -> None:
        super().__init__(folder, seconds, draw)
        self.staleness = draw.choice(("none", "0"))
        self.steps = max(60, int((2 if self.staleness == "none" else 1) * seconds / PACE))

    def open(self) -> None:
        hosts, self.disk, self.hurry = self.use_hosts(len(ROLES)), self.use_disk("runs"), self.folder / "hurry"
        cluster: dict[str, list[str]] = {}
        for (role, _), host in zip(ROLES, hosts, strict=True):
            cluster.setdefault(role, []).append(f"{host.address}:{PORT}")
        token = secrets.token_hex(16)
        for (role, index), host in zip(ROLES, hosts, strict=True):
            env = {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
                "MANYHANDS_TOKEN": token,
                "HURRY": str(self.hurry),
            }
            command = [*MEMBER, str(self.disk.path), str(self.steps), self.staleness]
            output = self.folder / f"output-{role}-{index}"
            self.programs.append(Program(f"{role} {index}", command, output, host=host, env=env))
            self.programs[-1].start()
        self.run = self.disk.path / "ps"
        self._events = Events(self.run / "events.jsonl")
        if not until(lambda: self.progress() > 3, START_SECONDS, self.tend):
            raise Broken(f"parameter servers did not start: {self.said()}")

    def faults(self) -> list[Fault]:
        chief, *_ = self.programs
        servers, workers = ([self.programs[i] for i in which] for which in (SERVERS, WORKERS))
        lost = r"(server|worker|host).*(failed|silent|lost|restarted|does not answer|closed)"
        return [
            Fault("kill a server", lambda: self.draw.choice(servers).kill(), lost),
            Fault("kill a worker", lambda: self.draw.choice(workers).kill(), lost),
            Fault("kill the coordinator", chief.kill),
            Fault("stop a server", self.stopped(lambda: [one for p in servers for one in self.of(p)]), lost, SILENT),
            Fault("stop a worker", self.stopped(lambda: [one for p in workers for one in self.of(p)]), lost, SILENT),
            Fault("a server off the network", self.cut(*SERVERS), lost, SILENT),
            Fault("a worker off the network", self.cut(*WORKERS), lost, SILENT),
            Fault("one-way loss", self.muted((3, 1), (1, 3), (4, 0), (2, 0), (0, 3)), lost, SILENT),
            Fault("slow link", self.slowed(*SERVERS, *WORKERS), lasts=6.0),
            Fault("full disk", self.disk.fill, r"(No space left|cannot be written|could not be written)", 7.0),
            Fault("corrupt checkpoint", self._corrupt, CORRUPT, within=RECOVER_SECONDS),
        ]

    def progress(self) -> int:
        return self._events.num_steps

    def _corrupt(self) -> None:
        """Damage the newest checkpoint, and kill the coordinator and the servers, which have a newer state."""
        self.wait_for_checkpoints(self.run)
        for program in self.programs[:3]:
            program.kill()
        for program in self.programs[:3]:
            program.process.wait()
        damage_newest(self.run, self.draw)

    def finish(self) -> None:
        self.hurry.touch()
        if not until(lambda: self.programs[0].code == 0, FINISH_SECONDS, self.tend):
            raise Broken(f"training with parameter servers did not end: {self.said()}")
        for program in self.programs[1:]:
            if program.process.wait(60):
                self.found("left_behind", f"{program.name} ended with {program.code} after the run")
        weights = mh.Run(self.run).state_dict()
        if num := wrong_samples(weights, self.steps):
            self.found("wrong_samples", f"{num} samples were not visited as often as in an undisturbed run", num)
        if self.staleness == "0":
            control = self._alone()
            far = [name for name in control if not torch.allclose(weights[name], control[name], rtol=0, atol=1e-9)]
            if far:
                self.found("wrong_samples", f"{', '.join(far)} differ from one device (more than 1e-9)")

    def _alone(self) -> dict[str, Tensor]:
        """Return the weights of one device after the same number of steps."""
        folder = self.folder / "control"
        program = Program("control", [*MEMBER, str(folder), str(self.steps), ALONE], self.folder / "output-control")
        program.start()
        try:
            if program.process.wait(FINISH_SECONDS):
                raise Broken(f"the control run failed: {program.output.read_text()}")
        finally:
            program.close()
        return mh.Run(folder / "ps").state_dict()
