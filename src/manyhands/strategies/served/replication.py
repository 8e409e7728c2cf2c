"""A server's chain to its follower: what changes the server goes there too, and only then it is acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from .messages import Apply, Close, Follow, Followed, Load, Push
from .sockets import Caller, Frame

Then = Callable[[], None]


class Chain:
    """Messages on their way to a follower, in the order in which its server takes them."""

    def __init__(self, context: zmq.Context[Any], token: bytes, address: str, timeout: float) -> None:
        self.caller = Caller(context, token, address, timeout)
        self._timeout = timeout
        self._owed: deque[tuple[float, Then]] = deque()

    def forward(self, message: Push | Close | Apply | Load, frames: Sequence[Frame], then: Then) -> None:
        """Sends what the server is about to take; `then` is done when the follower has it.

        Frames are copied: an update may change them in place.
        """
        self.caller.send(Follow(message), [bytes(frame) for frame in frames])
        self._owed.append((time.monotonic(), then))

    def hear(self) -> None:
        """Does what waited for the follower."""
        while (got := self.caller.receive()) is not None:
            if isinstance(got[0], Followed):
                self._owed.popleft()[1]()

    @property
    def is_silent(self) -> bool:
        """Whether the follower owes an answer for too long."""
        return bool(self._owed) and time.monotonic() - self._owed[0][0] > self._timeout / 2

    def close(self) -> None:
        """Goes on without the follower: nothing waits for it any more."""
        self.caller.close()
        while self._owed:
            self._owed.popleft()[1]()
