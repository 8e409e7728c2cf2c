"""Replication of a server to its follower: a change is acknowledged only after the follower has it too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from .messages import Apply, Close, Load, MessageReplicated, Push, ReplicateMessage
from .sockets import Caller, Frame

Then = Callable[[], None]


class FollowerLink:
    """Messages in flight to a follower, in the order in which its server applies them."""

    def __init__(self, context: zmq.Context[Any], token: bytes, address: str, timeout: float) -> None:
        self.caller = Caller(context, token, address, timeout)
        self._timeout = timeout
        self._unacknowledged: deque[tuple[float, Then]] = deque()

    def forward(self, message: Push | Close | Apply | Load, frames: Sequence[Frame], then: Then) -> None:
        """Send a message that the server is about to apply; `then` is called when the follower has acknowledged it.

        Frames are copied, because an update may change them in place.
        """
        self.caller.send(ReplicateMessage(message), [bytes(frame) for frame in frames])
        self._unacknowledged.append((time.monotonic(), then))

    def process_acks(self) -> None:
        """Process the follower's acknowledgements and run the callbacks that waited for them."""
        while (got := self.caller.receive()) is not None:
            if isinstance(got[0], MessageReplicated):
                self._unacknowledged.popleft()[1]()

    @property
    def is_silent(self) -> bool:
        """Whether an acknowledgement of the follower is overdue."""
        return bool(self._unacknowledged) and time.monotonic() - self._unacknowledged[0][0] > self._timeout / 2

    def close(self) -> None:
        """Continue without the follower: run the callbacks that wait for it."""
        self.caller.close()
        while self._unacknowledged:
            self._unacknowledged.popleft()[1]()
