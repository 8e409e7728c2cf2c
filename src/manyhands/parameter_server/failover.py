"""Failover: what happens when a worker, a server or a follower of a job exits, hangs or is restarted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core import NoProgress, RunError, WorkerFailed, event
from ..distributed import this_host
from ..launcher import RankFailure, RestartPolicy
from ..training import Hand
from .member_jobs import MemberConnections, MemberJobs, MemberRecord
from .messages import Heartbeat, JoinRequest, SetFollower, Unreachable, WorkerGone
from .server_group import ServerGroup
from .worker_group import WorkerGroup

ANSWER = 2.0
"""Seconds in which a server must answer after a worker has reported it as unreachable."""


class ServerFailed(RunError):
    """Raised when a server without an up-to-date follower fails: its state since the last checkpoint is lost."""


@dataclass
class ServerStats:
    """Counters of the traffic between workers and servers."""

    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by the staleness, in updates, of the values with which they were computed."""
    late: int = 0
    """Number of gradients that arrived after their step was closed."""
    lost_workers: int = 0
    lost_servers: int = 0
    lost_followers: int = 0
    applied: int = 0
    """Number of gradients in closed steps."""
    applied_counts: list[int] = field(default_factory=list)
    """By server: number of gradients that it has applied since it was last loaded, each counted once."""
    bytes: list[int] = field(default_factory=list)
    """By server: bytes exchanged with workers, through shared memory or sockets."""

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as JSON-ready data."""
        return {
            "staleness": {str(age): count for age, count in sorted(self.staleness.items())},
            "late": self.late,
            "lost_workers": self.lost_workers,
            "lost_servers": self.lost_servers,
            "lost_followers": self.lost_followers,
            "applied": self.applied,
            "ledger": self.applied_counts,
            "bytes": self.bytes,
        }


class Failover:
    """Replaces failed members, and hands out the samples of failed workers again."""

    def __init__(
        self,
        hand: Hand,
        stats: ServerStats,
        jobs: MemberJobs,
        connections: MemberConnections,
        servers: ServerGroup,
        workers: WorkerGroup,
        announce: Callable[[], None],
        timeout: float,
    ) -> None:
        """Watch the members of a job; `announce` sends the servers' addresses to the workers and the coordinator."""
        self._hand, self._stats, self._jobs, self._connections = hand, stats, jobs, connections
        self._servers, self._workers, self._announce, self._timeout = servers, workers, announce, timeout
        self._restart_policy = RestartPolicy()
        self._checked_at = 0.0
        jobs.on_exit = self._on_exit

    # -- signs of a failure ---------------------------------------------------------------------------------------

    def _on_exit(self, member: MemberRecord, error: BaseException | None) -> None:
        """Handle the unexpected exit of a member's process; re-raise an exception of the user's program."""
        if error is not None and not (isinstance(error, WorkerFailed) and not error.traceback):
            raise error
        reason = error.reason if isinstance(error, WorkerFailed) else "ended before its work was done"
        self._require_progress(member, reason)
        self._connections.forget(member)
        if member.role == "follower":
            self._replace_follower(member, reason)
        elif member.role == "server":
            self._replace_server(member, reason)
        else:
            outcome = "its samples are assigned again, and a new worker is started"
            self._remove(member, f"worker {member.number} {reason}: {outcome}")
            self._workers.start(member.place)

    def on_unreachable(self, member: MemberRecord, message: Unreachable) -> None:
        """Handle a report that a server cannot reach its follower, or that a worker cannot reach a server."""
        follower = self._servers.followers.get(message.number)
        if member.role == "server":
            if follower is not None and follower.address == message.address:
                self._end(follower)
        elif self._jobs.is_placed and 0 <= message.number < len(self._servers.servers):
            server = self._servers.servers[message.number]
            if server.peer is not None:
                server.received_at = min(server.received_at, time.monotonic() - self._timeout / 2 + ANSWER)
                self._connections.send(server, Heartbeat())

    def check_silence(self) -> None:
        """Treat members that have been silent for too long as failed: the process or its host may hang."""
        now = time.monotonic()
        for worker in self._workers.overdue(now - self._timeout):
            if worker.job is None:
                self.release(worker)
            else:
                worker.job.kill()
                worker.since = now
        away, self._checked_at = now - self._checked_at, now
        holders = [member for member in self._servers.members if member.peer is not None and member.job is None]
        for member in holders if self._jobs.is_placed else ():
            if away > self._timeout / 8:
                # The coordinator itself was not receiving messages since the last check.
                member.received_at = now
            if now - max(member.received_at, member.since) > self._timeout / 8:
                member.since = now
                self._connections.send(member, Heartbeat())
            if now - member.received_at > self._timeout / 2:
                self._on_placed_failure(member, f"was silent for {now - member.received_at:.0f} s")

    def replace_restarted(self, message: JoinRequest) -> MemberRecord | None:
        """Return a vacant record for an externally restarted server or follower that joins; None if there is none.

        A member whose record is still in use although its process was restarted is treated as failed.
        """
        server, follower = self._servers.find(message)
        if server is not None and server.peer is not None and message.address == server.address:
            self._on_placed_failure(server, "was restarted")
            server, follower = self._servers.find(message)
        if server is not None and message.role == "server" and server.peer is None:
            return server
        if follower is not None and follower.peer is not None:
            self._connections.forget(follower)
            self._replace_follower(follower, "was restarted")
        return self._servers.followers.get(message.number)

    def _on_placed_failure(self, member: MemberRecord, reason: str) -> None:
        """Handle the failure of an externally started server or follower, which may be restarted externally."""
        self._connections.forget(member)
        self._require_progress(member, reason)
        if member.role == "follower":
            self._replace_follower(member, reason)
            return
        try:
            self._replace_server(member, reason)
        except ServerFailed as lost:
            self._jobs.run_later(lambda lost=lost: _raise(lost))  # type: ignore[misc]

    def _end(self, member: MemberRecord) -> None:
        if member.job is not None:
            member.job.kill()
        else:
            self._on_placed_failure(member, "does not answer")

    # -- replacements ---------------------------------------------------------------------------------------------

    def _require_progress(self, member: MemberRecord, reason: str) -> None:
        """Report a failed member; raise `NoProgress` if the restart policy allows no further restart.

        Members that fail together count as one failure.
        """
        entry = event("member_lost", role=member.role, number=member.number, reason=reason)
        self._hand.world.channel.report(entry)
        if member.round != self._jobs.num_rounds:
            return
        self._jobs.num_rounds += 1
        loss = RankFailure(member.number, this_host(), f"{member.role} {member.number} {reason}")
        if not self._restart_policy.allows_restart([loss], size=self._jobs.num_places, step=self._hand.num_steps):
            raise NoProgress(
                member.number, loss.host, f"{loss.reason}, repeatedly, without completing a step in between"
            )

    def release(self, worker: MemberRecord) -> None:
        """Remove a failed worker that is restarted externally, and hand its work out again."""
        self._connections.forget(worker)
        self._remove(worker, f"worker {worker.number} has failed: its samples are assigned again")

    def _remove(self, worker: MemberRecord, notice: str) -> None:
        """Remove a failed worker; the servers free the memory that they share with it."""
        self._stats.lost_workers += 1
        self._hand.notice(notice)
        self._workers.remove(worker)
        self._connections.send_joined(self._servers.members, WorkerGone(worker.number))

    def _replace_server(self, member: MemberRecord, reason: str) -> None:
        """Promote the failed server's follower; if that lacks the server's state, restart the server and raise.

        The exception, `ServerFailed`, makes the coordinator load all servers again.
        """
        number, follower = member.number, self._servers.followers.get(member.number)
        self._stats.lost_servers += 1
        if follower is None or not follower.is_filled:
            self._servers.restart_server(number)
            raise ServerFailed(f"server {number} {reason}, so it is restarted")
        self._hand.notice(f"server {number} {reason}: its follower replaces it, and gets a new follower")
        self._servers.promote(follower)
        self._workers.take_all_back()
        if self._servers.announce_term():
            self._servers.resend(follower)
            self._announce()

    def _replace_follower(self, member: MemberRecord, reason: str) -> None:
        self._stats.lost_followers += 1
        self._hand.notice(f"the follower of server {member.number} {reason}: a new follower is started and filled")
        self._connections.send_joined([self._servers.servers[member.number]], SetFollower(""))
        self._servers.restart_follower(member.number)


def _raise(error: Exception) -> None:
    raise error
