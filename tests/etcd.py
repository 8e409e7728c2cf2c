"""A real etcd for tests: one member, on this machine or on a simulated host."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from manyhands.launcher.elections import Election, ElectionUnreachable
from manyhands.testing import NamespaceHost


class Etcd:
    """A member of etcd that is a cluster of its own."""

    def __init__(self, folder: Path, address: str, port: int, host: NamespaceHost | None = None) -> None:
        self.address = f"etcd://{address}:{port}"
        url = f"http://{address}:{port}"
        command = [
            "etcd", "--data-dir", str(folder), "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", "http://127.0.0.1:0", "--log-outputs", "stderr", "--logger", "zap",
        ]  # fmt: skip
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
