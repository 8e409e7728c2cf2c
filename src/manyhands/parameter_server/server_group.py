"""The servers of a job and their followers: their records, the current term, and the requests that are pending."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .member_jobs import MemberConnections, MemberJobs, MemberRecord
from .messages import Apply, Close, JoinRequest, Loaded, NewTerm, ServerList, SetFollower, Summed

Request = Callable[[int], tuple[Any, Sequence[Any]]]
"""Function that maps a server's number to the request for it: a message and its frames."""


class ServerGroup:
    """The servers, with a common term that changes whenever a server is replaced or all servers are loaded again.

    A follower is filled when it has everything that its server acknowledges, so that it can replace the server.
    """

    def __init__(
        self,
        jobs: MemberJobs,
        connections: MemberConnections,
        wait: Callable[[Callable[[], bool], str], None],
        num_closes: int,
    ) -> None:
        """Create a group without members.

        Args:
            jobs: Starts the members.
            connections: Sends messages to them.
            wait: Processes messages until a condition holds; the text names the condition.
            num_closes: Number of closed steps that a promoted follower may lack.
        """
        self._jobs, self._connections, self._wait = jobs, connections, wait
        self.servers: list[MemberRecord] = []
        self.followers: dict[int, MemberRecord] = {}
        # Random, so that the state of a server from another coordinator's run does not match this run's term.
        self.term = secrets.randbelow(1 << 30)
        self.is_open = False
        """Whether the servers hold values and workers know their addresses."""
        self._closes: deque[tuple[Close, float | None]] = deque(maxlen=num_closes)
        """The last closed steps with their scale factors: a promoted follower may lack unacknowledged ones."""
        self._asked: dict[type[Any], tuple[Request, dict[int, tuple[Any, list[Any]]]]] = {}
        """Pending requests to servers by type of the answer, with the answers received so far."""

    def start(self, num_servers: int, *, with_followers: bool) -> None:
        """Start all servers, each with a follower if `with_followers`."""
        for number in range(num_servers):
            self.servers.append(self._jobs.start("server", number, number))
            if with_followers:
                self.restart_follower(number)

    def restart_server(self, number: int) -> None:
        """Start a server, which has no values yet, in place of a failed one that no follower can replace."""
        if number in self.followers:
            self.followers[number].is_led = False
        self.servers[number] = self._jobs.start("server", number, number)

    def restart_follower(self, number: int) -> None:
        """Start the follower of a server, in place of the previous one."""
        self.followers[number] = self._jobs.start("follower", number, number)

    @property
    def members(self) -> list[MemberRecord]:
        """All servers and followers."""
        return [*self.servers, *self.followers.values()]

    @property
    def addresses(self) -> ServerList:
        """The message that sends workers the current term and the addresses of the servers."""
        return ServerList(self.term, [server.address for server in self.servers])

    def find(self, message: JoinRequest) -> tuple[MemberRecord | None, MemberRecord | None]:
        """Return the current server and follower with the number in a join request; None for a missing one."""
        server = self.servers[message.number] if 0 <= message.number < len(self.servers) else None
        return server, self.followers.get(message.number)

    # -- terms ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Begin a new term, in which the caller loads all servers again, and wait until all servers have joined."""
        self._begin_term()
        self._closes.clear()
        for follower in self.followers.values():
            follower.is_filled = False
        self._wait(lambda: all(server.peer is not None for server in self.servers), "servers to join")

    def promote(self, follower: MemberRecord) -> None:
        """Begin a new term in which `follower` is the server, and start a new follower for it."""
        follower.role, follower.is_filled = "server", False
        self.servers[follower.number] = follower
        self.restart_follower(follower.number)
        self._begin_term()

    def _begin_term(self) -> None:
        self.is_open = False
        self.term += 1

    def announce_term(self) -> bool:
        """Send the new term to the servers and wait for their answers; return whether it is still the current term."""
        term = self.term
        self.ask(lambda _: (NewTerm(term), ()), Loaded, "servers to continue")
        return self.term == term

    # -- followers ------------------------------------------------------------------------------------------------

    def pair(self, follower: MemberRecord) -> None:
        """Let a server replicate to `follower`, if both have joined and the server has values."""
        server = self.servers[follower.number]
        if self.is_open and follower.peer is not None and server.peer is not None and not follower.is_led:
            follower.is_led = True
            self._connections.send(server, SetFollower(follower.address))

    def has_filled(self, server: MemberRecord, address: str) -> bool:
        """Record that the follower at this address has the server's state; return False if it is not its follower."""
        follower = self.followers.get(server.number)
        is_pair = follower is not None and follower.address == address and self.servers[server.number] is server
        if follower is not None and is_pair:
            follower.is_filled = True
        return is_pair

    @property
    def are_followers_filled(self) -> bool:
        """Whether every follower can replace its server."""
        return all(follower.is_filled for follower in self.followers.values())

    # -- steps and requests ---------------------------------------------------------------------------------------

    def close_step(self, close: Close) -> list[Summed]:
        """Close a step on all servers, which apply its update.

        If the step is measured, return the squared norms of the servers instead; `apply_step` then applies the update.
        """
        self._closes.append((close, None))
        if not close.is_measured:
            self._send_all(close)
            return []
        request: Request = lambda _: (msgspec.structs.replace(close, term=self.term), ())  # noqa: E731
        return [message for message, _ in self.ask(request, Summed, "servers to sum gradients")]

    def apply_step(self, scale: float) -> None:
        """Apply the update of the last closed step with its gradients multiplied by `scale`; 0 skips it."""
        close, _ = self._closes[-1]
        self._closes[-1] = close, scale
        self._send_all(Apply(self.term, close.step, scale))

    def _send_all(self, message: Any) -> None:
        for server in self.servers:
            self._connections.send(server, message)

    def ask(self, request: Request, kind: type[Any], waiting_for: str) -> list[tuple[Any, list[Any]]]:
        """Send a request to all servers, and to replacements of failed ones; return the answers in server order."""
        answers: dict[int, tuple[Any, list[Any]]] = {}
        before, term = self._asked.get(kind), self.term
        self._asked[kind] = request, answers
        try:
            for server in self.servers:
                if server.peer is not None:
                    self._connections.send(server, *request(server.number))
            # If another server fails while this waits, the term changes and a request for the new term replaces it.
            self._wait(lambda: len(answers) == len(self.servers) or (kind is Loaded and self.term != term), waiting_for)
        finally:
            del self._asked[kind]
            if before is not None:
                self._asked[kind] = before
        return [answers[number] for number in sorted(answers)]

    def take_answer(self, server: MemberRecord, message: Any, frames: list[Any]) -> None:
        """Keep a message if it answers a pending request; ignore it otherwise."""
        if type(message) in self._asked and self._is_answer(message):
            self._asked[type(message)][1][server.number] = message, frames

    def _is_answer(self, message: Any) -> bool:
        if isinstance(message, Summed):
            # A server's sum stays valid when another server fails and the term changes.
            return message.step == self._closes[-1][0].step
        return bool(getattr(message, "term", self.term) == self.term)

    def resend(self, server: MemberRecord) -> None:
        """Resend the messages that a server may have missed: closed steps and unanswered requests."""
        for close, scale in list(self._closes):
            self._connections.send(server, msgspec.structs.replace(close, term=self.term))
            if close.is_measured and scale is not None:
                self._connections.send(server, Apply(self.term, close.step, scale))
        for request, answers in list(self._asked.values()):
            if server.number not in answers:
                self._connections.send(server, *request(server.number))
