"""A training job on three hosts: faults of processes, after which weights are bit-equal, and faults of hosts."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

import manyhands as mh
from manyhands.testing import NamespaceHosts

from . import work
from .hosts_job import HostsJob
from .programs import Program, until
from .system import CORRUPT, RECOVER_SECONDS, START_SECONDS, Broken, Fault, System, Undo, damage_newest
from .work import PACE, wrong_samples

NUM_HOSTS = 3
FINISH_SECONDS = 600.0


class Control:
    """The weights of an undisturbed job on the same hosts, computed once for any number of steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weights: dict[int, dict[str, Tensor]] = {}

    def weights(self, steps: int) -> dict[str, Tensor]:
        """Return the weights after this number of steps."""
        if steps not in self._weights:
            folder = self._folder / f"control-{steps}"
            folder.mkdir(parents=True)
            with NamespaceHosts(NUM_HOSTS) as hosts:
                job = HostsJob(hosts, folder, steps=steps)
                job.hurry.touch()
                try:
                    job.start()
                    job.end()
                finally:
                    job.close()
            self._weights[steps] = mh.Run(job.run).state_dict()
        return self._weights[steps]

    def weights_alone(self, steps: int) -> dict[str, Tensor]:
        """Return the weights of one device after this number of steps."""
        folder = self._folder / f"alone-{steps}"
        folder.mkdir(parents=True)
        command = [
            sys.executable, "-m", "manyhands", "fit", str(Path(work.__file__)), "--strategy", "single,precision=fp64",
            "--on", "cpu", "--epochs", "100000", "--steps", str(steps), "--folder", str(folder), "--name", "run",
        ]  # fmt: skip
        program = Program("control", command, folder / "output")
        try:
            program.start()
            if program.process.wait(FINISH_SECONDS):
                raise Broken(f"the control run failed: {program.output.read_text()}")
        finally:
            program.close()
        return mh.Run(folder / "run").state_dict()


class Training(System):
    """`manyhands fit` on three hosts, each command restarted by a supervisor."""

    name = "training"

    def __init__(self, folder: Path, seconds: float, draw: random.Random, control: Control) -> None:
        super().__init__(folder, seconds, draw)
        self.steps = max(60, int(seconds / PACE))
        self._control = control

    def open(self) -> None:
        self.disk = self.use_disk("runs")
        self.job = HostsJob(self.use_hosts(NUM_HOSTS), self.folder, steps=self.steps, runs=self.disk.path)
        self.job.start("--resume", "auto")
        self.programs = self.job.programs
        if not until(lambda: self.job.step > 3, START_SECONDS, self.tend):
            raise Broken(f"training did not start: {self.job.said()}")

    def faults(self) -> list[Fault]:
        forks = self._of_all("forks")
        return [
            Fault("kill a rank", self.killed(forks), r"was killed by signal 9|its exit code is unknown"),
            Fault("stop a rank", self.stopped(forks), r"was frozen", lasts=6.0),
            Fault("kill a data worker", self.killed(self._of_all("data_workers")), r"worker processes that read"),
            Fault("kill a zygote", self.killed(self._of_all("zygotes")), r"process that starts ranks has died"),
        ]

    def progress(self) -> int:
        return self.job.num_steps

    def is_whole(self) -> bool:
        return super().is_whole() and self.job.size == NUM_HOSTS

    def finish(self) -> None:
        self.job.hurry.touch()
        if not until(lambda: all(one.code == 0 for one in self.programs), FINISH_SECONDS, self.tend):
            raise Broken(f"training did not end: {self.job.said()}")
        weights = mh.Run(self.job.run).state_dict()
        self.require_equal(weights)
        if num := wrong_samples(weights, self.steps):
            self.found("wrong_samples", f"{num} samples were not visited as often as in an undisturbed run", num)

    def require_equal(self, weights: dict[str, Tensor]) -> None:
        """Compare the bits of the weights with those of an undisturbed job: all generations had the same ranks."""
        control = self._control.weights(self.steps)
        self._compare([name for name in control if not torch.equal(weights[name], control[name])], "bits")

    def _compare(self, different: Sequence[str], how: str) -> None:
        if different:
            self.found("wrong_samples", f"{', '.join(different)} differ from the undisturbed run ({how})")

    def _of_all(self, which: str) -> Callable[[], list[psutil.Process]]:
        """Return a function that finds the processes of one kind on all hosts."""
        return lambda: [one for program in self.programs for one in getattr(program, which)()]


class HostFaults(Training):
    """The same job with faults that change the set of ranks, or their order."""

    name = "hosts"

    def faults(self) -> list[Fault]:
        first, *others = self.programs
        lost = r"(has sent nothing|closed the connection|does not answer|no heartbeat|not reach)"
        return [
            Fault("kill the coordinator", self._kills(first), r"the first host"),
            Fault("kill a joined host's program", self._kills(*others), r"host[23] .*"),
            Fault("stop the coordinator", self.stopped(lambda: self.of(first)), r"the first host", lasts=7.0),
            Fault(
                "stop a joined host's program",
                self.stopped(lambda: [one for program in others for one in self.of(program)]),
                lost,
                lasts=7.0,
            ),
            Fault("a host off the network", self.cut(1, 2), lost, lasts=9.0),
            Fault("the first host off the network", self.cut(0), lost, lasts=9.0),
            Fault("partition", self._partition, lost, lasts=9.0),
            Fault("one-way loss", self.muted((1, 0), (2, 0), (0, 1), (1, 2), (2, 1)), lost, lasts=9.0),
            Fault("slow link", self.slowed(0, 1, 2), lasts=6.0),
            Fault("full disk", self.disk.fill, r"(No space left|cannot be written|could not be written)", lasts=7.0),
            Fault("corrupt checkpoint", self._corrupt, CORRUPT, within=RECOVER_SECONDS),
        ]

    def require_equal(self, weights: dict[str, Tensor]) -> None:
        control = self._control.weights_alone(self.steps)
        far = [name for name in control if not torch.allclose(weights[name], control[name], rtol=0, atol=1e-9)]
        self._compare(far, "more than 1e-9")

    def _kills(self, *programs: Program) -> Callable[[], None]:
        return lambda: self.draw.choice(programs).kill()

    def _partition(self) -> Undo:
        self.job.hosts.partition(self.draw.choice((1, 2)))
        return self.job.hosts.heal

    def _corrupt(self) -> None:
        """Damage the newest checkpoint, and kill all processes with a newer state in memory."""
        self.wait_for_checkpoints(self.job.run)
        for program in self.programs:
            program.kill()
        for program in self.programs:
            program.process.wait()
        damage_newest(self.job.run, self.draw)
