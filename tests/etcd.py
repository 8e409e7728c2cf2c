"""A real etcd for tests, on this machine or on simulated hosts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from manyhands.launcher.elections import Election, ElectionUnreachable
from manyhands.testing import NamespaceHost

PORT, PEER_PORT = 2379, 2380


class Etcd:
    """A member of etcd, which is a cluster of its own unless other members are named."""

    def __init__(
        self,
        folder: Path,
        address: str,
        port: int = PORT,
        *,
        host: NamespaceHost | None = None,
        members: Sequence[str] = (),
    ) -> None:
        self.endpoint = f"{address}:{port}"
        url = f"http://{self.endpoint}"
        command = [
            "etcd", "--data-dir", str(folder), "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", f"http://{address}:{PEER_PORT}" if members else "http://127.0.0.1:0",
            "--log-outputs", "stderr", "--logger", "zap",
        ]  # fmt: skip
        if members:
            cluster = ",".join(f"{one}=http://{one}:{PEER_PORT}" for one in members)
            command += ["--name", address, "--initial-cluster", cluster]
            command += ["--initial-advertise-peer-urls", f"http://{address}:{PEER_PORT}"]
        popen = subprocess.Popen if host is None else host.popen
        folder.mkdir()
        with (folder / "output").open("wb") as output:
            self.process = popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def until_it_answers(election: Election, seconds: float = 30.0) -> None:
    """Wait until etcd has started."""
    end = time.monotonic() + seconds
    while True:
        try:
            election.leader()
            return
        except ElectionUnreachable:
            assert time.monotonic() < end
            time.sleep(0.1)
