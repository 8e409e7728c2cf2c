"""Load generator: closed loop (a fixed number of clients that wait for answers) and open loop (a fixed rate).

In the open loop a request's time counts from the moment at which it was due, whether or not a connection was free, so
that a server which stalls cannot hide the requests that would have arrived during the stall. `measure(...)` starts the
generator in a separate process, `python -m benchmarks.load`, which reads its job from standard input.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked, again and again."""

    port: int
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def message(self) -> bytes:
        """The request as it goes over the wire."""
        lines = [f"POST {self.path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in {"Content-Type": "application/json", **self.headers}.items()]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


@dataclass
class Outcome:
    """What came of it."""

    seconds: float
    codes: dict[int, int]
    """Answers by status; 0 are connections that were lost."""
    latencies: list[float]
    """Of good answers, ascending, in seconds; a thousand of them where there are more."""
    refusals: list[float]
    """Of the others."""
    mixed: int = 0
    """Answers whose numbers were not all the same, where that was looked at."""
    late: list[float] = field(default_factory=list)
    """By how many seconds requests were sent after they were due although a connection was free, ascending."""

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return self.codes.get(200, 0) / self.seconds

    def percentile(self, share: float) -> float:
        """Of the good answers' times."""
        return at_share(self.latencies, share)


def at_share(ordered: list[float], share: float) -> float:
    """The value below which this share lies; 0 where there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Measuring:
    """A generator that runs beside this program."""

    def __init__(self, ask: Ask, *, seconds: float, connections: int, rate: float | None, alike: bool) -> None:
        job = {
            "port": ask.port, "message": base64.b64encode(ask.message()).decode(), "seconds": seconds,
            "connections": connections, "rate": rate, "alike": alike,
        }  # fmt: skip
        command, pipe = [sys.executable, "-m", "benchmarks.load"], subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job))
        self._process.stdin.close()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def outcome(self) -> Outcome:
        """Waits for the end."""
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        if self._process.wait() != 0:
            raise RuntimeError("the generator of load failed; see above")
        found = json.loads(text)
        found["codes"] = {int(code): num for code, num in found["codes"].items()}
        return Outcome(**found)


def measuring(
    ask: Ask, *, seconds: float, connections: int = 32, rate: float | None = None, alike: bool = False
) -> Measuring:
    """Starts a generator; `alike` looks whether all numbers of an answer are the same."""
    return Measuring(ask, seconds=seconds, connections=connections, rate=rate, alike=alike)


def thinned(values: list[float], num: int = 1000) -> list[float]:
    """At most so many of the values, evenly over their order."""
    ordered = sorted(values)
    if len(ordered) > num:
        ordered = [ordered[i * (len(ordered) - 1) // (num - 1)] for i in range(num)]
    return [round(value, 6) for value in ordered]


def measure(ask: Ask, *, seconds: float, connections: int = 32, rate: float | None = None) -> Outcome:
    """Runs a generator to its end."""
    return measuring(ask, seconds=seconds, connections=connections, rate=rate).outcome()


class Generator:
    """Connections, the requests that wait for one, and what came back."""

    def __init__(self, message: bytes, rate: float, alike: bool) -> None:
        self.message, self.rate, self.alike = message, rate, alike
        self.mixed = 0
        self.codes: Counter[int] = Counter()
        self.good: list[float] = []
        self.bad: list[float] = []
        self.late: list[float] = []
        self.free: deque[Client] = deque()
        """They take turns: a server may close a connection that is not used for long."""
        self.due: deque[float] = deque()
        self.is_over = False

    def answered(self, client: Client, status: int, began: float, body: bytes) -> None:
        """Notes an answer and gives the connection its next request."""
        now = time.perf_counter()
        if self.alike and status == 200:
            self.mixed += len({number for row in json.loads(body)["predictions"] for number in row}) != 1
        self.codes[status] += 1
        (self.good if status == 200 else self.bad).append(now - began)
        if self.is_over:
            return
        if self.due:
            client.ask(self.due.popleft())
        else:
            self.free.append(client)

    async def arrive(self, end: float) -> None:
        """Lets requests come at random, so many a second on average."""
        draw, due = random.Random(0), time.perf_counter()
        while due < end:
            due += draw.expovariate(self.rate)
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            if self.free:
                self.late.append(time.perf_counter() - due)
                self.free.popleft().ask(due)
            else:
                self.due.append(due)


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._data = bytearray()
        self._began = 0.0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._began and not self._generator.is_over:
            self._generator.codes[0] += 1
        if self in self._generator.free:
            self._generator.free.remove(self)

    def ask(self, began: float) -> None:
        """Sends the request, whose time counts from then."""
        self._began = began
        self._transport.write(self._generator.message)

    def data_received(self, data: bytes) -> None:
        self._data += data
        size = answer_size(self._data)
        if not size or len(self._data) < size:
            return
        status = int(self._data[9:12])
        body = bytes(self._data[self._data.find(b"\r\n\r\n") + 4 :]) if self._generator.alike else b""
        self._data.clear()
        began, self._began = self._began, 0.0
        self._generator.answered(self, status, began, body)


def run_closed(port: int, message: bytes, seconds: float, connections: int) -> dict[str, Any]:
    """Clients that wait for their answers, in a loop as bare as it can be: it shares the cores with the server."""
    poll = select.epoll()
    sockets = {}
    for _ in range(connections):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[sock.fileno()] = sock
        poll.register(sock, select.EPOLLIN)
    codes: Counter[int] = Counter()
    good: list[float] = []
    bad: list[float] = []
    clock, size, partial = time.perf_counter, 0, dict.fromkeys(sockets, b"")
    began = clock()
    end, asked = began + seconds, dict.fromkeys(sockets, began)
    for sock in sockets.values():
        sock.sendall(message)
    while (now := clock()) < end and sockets:
        for fd, _ in poll.poll(end - now):
            data = partial[fd] + sockets[fd].recv(1 << 18)
            if len(data) != size or partial[fd]:
                size = answer_size(data)
                if data and (size == 0 or len(data) < size):
                    partial[fd] = data
                    continue
                partial[fd] = b""
            if not data:
                codes[0] += 1
                poll.unregister(fd)
                sockets.pop(fd).close()
                continue
            now = clock()
            status = int(data[9:12])
            codes[status] += 1
            (good if status == 200 else bad).append(now - asked[fd])
            asked[fd] = now
            sockets[fd].sendall(message)
    return {
        "seconds": clock() - began,
        "codes": dict(codes),
        "latencies": thinned(good),
        "refusals": thinned(bad),
    }


def answer_size(data: bytes | bytearray) -> int:
    """Bytes of a whole answer, from its head; 0 where that is not complete, or the last of its chunks is not there.

    >>> answer_size(b"HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\nab")
    41
    >>> answer_size(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n2\\r\\nab\\r\\n")
    0
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    head = data[:end].lower()
    if b"transfer-encoding: chunked" in head:
        last = data.find(b"\r\n0\r\n\r\n", end)
        return last + 7 if last >= 0 else 0
    at = head.find(b"content-length:")
    return end + 4 + (int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)


async def run_open(
    port: int, message: bytes, seconds: float, connections: int, rate: float, alike: bool
) -> dict[str, Any]:
    """Requests that come whether or not others were answered."""
    generator = Generator(message, rate, alike)
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: Client(generator), "127.0.0.1", port)
        clients.append(client)
    began = time.perf_counter()
    generator.free = deque(clients)
    await generator.arrive(began + seconds)
    took = time.perf_counter() - began
    generator.is_over = True
    return {
        "seconds": took,
        "codes": dict(generator.codes),
        "latencies": thinned(generator.good),
        "refusals": thinned(generator.bad),
        "mixed": generator.mixed,
        "late": thinned(generator.late),
    }


def main() -> None:
    """Takes the job from the command line and prints what came of it."""
    import uvloop

    from manyhands.serving.scheduling import shorten_slice

    # A generator that is late measures other processes of its core instead of the server.
    shorten_slice()
    job = json.load(sys.stdin)
    message = base64.b64decode(job.pop("message"))
    if job["rate"] is None:
        found = run_closed(job["port"], message, job["seconds"], job["connections"])
    else:
        found = uvloop.run(run_open(message=message, **job))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
