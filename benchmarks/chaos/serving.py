"""Two servers behind two routers, and clients that retry a request once, at the other router."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from manyhands.storage import export
from manyhands.testing import NamespaceHost

from .programs import Program, until
from .system import START_SECONDS, Broken, Fault, System, Undo, damage

SERVERS, ROUTERS, CLIENT = (0, 1), (2, 3), 4
TOKEN, MANAGE_TOKEN = "a-token-for-requests", "a-token-for-management"
NUM_CLIENTS = 2
FIRST_SECONDS = 5.0
"""Seconds that a client waits for the first router."""
RETRY_SECONDS = 30.0
"""Seconds that a client waits for the other one; far above the expected time, even on a loaded machine."""
PAUSE = 0.05


class Doubler(nn.Module):
    """2x + k."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + self.k


class Clients:
    """Client threads on a host that send requests to the routers in turn until they are stopped."""

    def __init__(self, host: NamespaceHost, routers: list[str], draw: random.Random) -> None:
        self._host, self._routers, self._draw = host, routers, draw
        self._over = threading.Event()
        self.num_answered = 0
        self.num_retried = 0
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after the requests in flight."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        self._host.enter()
        turn = number
        while not self._over.wait(PAUSE):
            turn += 1
            rows = [[float(self._draw.randrange(1000)) for _ in range(4)]]
            first, second = (self._routers[(turn + i) % 2] for i in range(2))
            try:
                found = predict(first, rows, FIRST_SECONDS)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.num_retried += 1
                try:
                    found = predict(second, rows, RETRY_SECONDS)
                except (OSError, http.client.HTTPException, ValueError) as again:
                    self.lost.append(f"{time.strftime('%H:%M:%S')} {first}: {error!r}; then {second}: {again!r}")
                    continue
            if found != [[2 * value + 1 for value in row] for row in rows]:
                self.wrong.append(f"{rows} was answered with {found}")
            self.num_answered += 1


def predict(address: str, rows: list[list[float]], seconds: float) -> list[list[float]]:
    """Send a request over a new connection; raise ValueError unless the status is 200."""
    connection = http.client.HTTPConnection(address, 8501, timeout=seconds)
    try:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/models/doubler:predict", json.dumps({"instances": rows}), headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"{answer.status} {text[:200]!r}")
    predictions: list[list[float]] = json.loads(text)["predictions"]
    return predictions


class Serving(System):
    """`manyhands serve` on two hosts, `manyhands serve --router` on two others, clients on the last one."""

    name = "serving"
    least_progress = 20

    def open(self) -> None:
        hosts, self.disk = self.use_hosts(5), self.use_disk("logs", "4m")
        self.model = self.folder / "models" / "doubler"
        export(Doubler(), lambda model, x: model(x), {"x": torch.ones(2, 4)}, self.model)
        self._version = 1
        backends = ",".join(f"{hosts[i].address}:8500" for i in SERVERS)
        for index in (*SERVERS, *ROUTERS):
            host, log = hosts[index], self.disk.path / f"log-{index}"
            what = [str(self.model.parent), "--on", "cpu"] if index in SERVERS else ["--router", "--backends", backends]
            where = ["--host", host.address, "--manage-host", host.address, "--log", str(log)]
            env = {"MANYHANDS_TOKEN": TOKEN, "MANYHANDS_MANAGE_TOKEN": MANAGE_TOKEN}
            command = [sys.executable, "-m", "manyhands", "serve", *what, *where]
            self.programs.append(
                Program(f"serve on {host.name}", command, self.folder / f"output-{index}", host=host, env=env)
            )
            self.programs[-1].start()
        self._look_from(hosts[CLIENT])
        if not until(self.is_whole, START_SECONDS, self.tend):
            raise Broken(f"serving did not start: {self.said()}")
        self.clients = Clients(hosts[CLIENT], [hosts[i].address for i in ROUTERS], random.Random(self.draw.random()))

    def faults(self) -> list[Fault]:
        servers, routers = ([self.programs[i] for i in which] for which in (SERVERS, ROUTERS))
        down = r"backend down"
        return [
            Fault("kill a replica", self.killed(self._replicas), r"replica lost"),
            Fault("stop a replica", self.stopped(self._replicas), r"replica hung|replica lost", lasts=20.0),
            Fault("kill a front end", self.killed(self._front_ends)),
            Fault("kill a zygote", self.killed(self._zygotes), r"process that starts ranks has died"),
            Fault("kill a server", lambda: self.draw.choice(servers).kill(), down),
            Fault("stop a server", self.stopped(lambda: [one for p in servers for one in self.of(p)]), down, 8.0),
            Fault("kill a router", lambda: self.draw.choice(routers).kill()),
            Fault("stop a router", self.stopped(lambda: [one for p in routers for one in self.of(p)]), lasts=5.0),
            Fault("a server off the network", self.cut(*SERVERS), down, 8.0),
            Fault("a router off the network", self.cut(*ROUTERS), down, 8.0),
            Fault("one-way loss", self.muted((0, 2), (1, 3), (2, 1), (3, 0)), down, 8.0),
            Fault("slow link", self.slowed(*SERVERS, *ROUTERS), lasts=6.0),
            Fault("full disk", self.disk.fill, r"No space left", lasts=6.0),
            Fault("corrupt version", self._publish_damaged, r"version failed", lasts=5.0),
        ]

    def _replicas(self) -> list[psutil.Process]:
        """Return the sandboxed processes of both servers; their other processes read requests."""
        forks = [one for index in SERVERS for one in self.programs[index].forks()]
        return [one for one in forks if "Seccomp:\t2" in Path(f"/proc/{one.pid}/status").read_text()]

    def _zygotes(self) -> list[psutil.Process]:
        return [one for index in SERVERS for one in self.programs[index].zygotes()]

    def _front_ends(self) -> list[psutil.Process]:
        """Return the processes of both servers that read requests."""
        replicas = self._replicas()
        return [one for index in SERVERS for one in self.programs[index].forks() if one not in replicas]

    def progress(self) -> int:
        return self.clients.num_answered

    def is_whole(self) -> bool:
        return super().is_whole() and self._ready

    def _look_from(self, host: NamespaceHost) -> None:
        """Poll the readiness of all servers and routers."""
        self._ready, over = False, threading.Event()

        def look() -> None:
            host.enter()
            while not over.wait(0.1):
                self._ready = all(is_ready(self.hosts[index].address) for index in (*SERVERS, *ROUTERS))

        thread = threading.Thread(target=look)
        thread.start()
        self._held.callback(thread.join)
        self._held.callback(over.set)

    def _publish_damaged(self) -> Undo:
        """Publish a new version with a damaged file; it must not be served."""
        self._version += 1
        aside, place = self.folder / f".{self._version}", self.model / str(self._version)
        shutil.copytree(self.model / "1", aside)
        damage(aside / "weights.safetensors", self.draw)
        aside.rename(place)
        return lambda: shutil.rmtree(place)

    def finish(self) -> None:
        self.clients.close()
        for check, texts in (("wrong_answers", self.clients.wrong), ("lost_requests", self.clients.lost)):
            for text in texts:
                self.found(check, text)
        if codes := {program.name: program.stop() for program in reversed(self.programs)}:
            for name, code in codes.items():
                if code != 0:
                    self.found("left_behind", f"{name} ended with {code} after SIGTERM")

    def close(self) -> None:
        if hasattr(self, "clients"):
            self.clients.close()
        super().close()


def is_ready(address: str) -> bool:
    """Return whether a server or router reports that it is ready."""
    connection = http.client.HTTPConnection(address, 8501, timeout=3)
    try:
        connection.request("GET", "/v2/health/ready", headers={"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
