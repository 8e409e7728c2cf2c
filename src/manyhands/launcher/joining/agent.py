"""The agent: runs the ranks of a host for a coordinator on another host, also while that host is unreachable."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from typing import Any

from ...core import Event, RunError
from ...distributed import address_towards, interface_of, this_host
from ..engine import OnEvent, OnOutput, RunningJob
from ..processes import Process, ProcessListener, turn
from ..rendezvous import RendezvousInfo
from .channel import Channel, JoinTimeouts, Message, ProtocolError
from .handshake import JoinRefused
from .host_ranks import HostRanks
from .probing import answer
from .reachability import PeerBeats
from .token import JoinToken
from .waiting import Wait

RETRY_SECONDS = 0.5


class Agent(ProcessListener, RunningJob):
    """Runs the ranks of this host for the coordinator on the first host.

    While the coordinator is unreachable, the ranks keep their state in memory and wait.
    """

    def __init__(
        self,
        channel: Channel,
        join_again: Callable[[list[int], int], Channel],
        ranks: HostRanks,
        *,
        token: JoinToken,
        timeout: float,
        host: str,
        notify: Callable[[str], None],
    ) -> None:
        self._channel, self._join_again, self._token, self._timeout = channel, join_again, token, timeout
        self._notify = notify
        self._ranks, self._selector = ranks, ranks.selector
        ranks.role = self
        self._patience = JoinTimeouts(timeout).silence
        self._reason: str | None = None
        self._beats = PeerBeats(host, address_towards(channel.peer), token, self._selector)
        self._unheard: list[str] = []
        """The hosts from which this host received no datagrams any more at the last report to the coordinator."""
        self._listen()

    # -- for the caller -------------------------------------------------------------------------------------------

    def wait(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        """Return the results of this host's ranks; events and output are sent to the coordinator's host."""
        try:
            return self.follow()
        except BaseException as error:
            self.leave(error)
            raise
        finally:
            self.release()
            self._ranks.close()

    def follow(self) -> list[Any]:
        """Run this host's ranks for the coordinator until the job is over, and return their results."""
        while self._reason is None or (not self._reason and not self._ranks.is_over):
            turn(self._selector, 0.5)
            self._ranks.look()
            self._report_unheard()
            if self._reason is None and time.monotonic() - self._channel.received_at > self._patience:
                self._on_coordinator_lost(f"has sent nothing for {self._patience:.0f} s")
        if self._reason:
            raise RunError(f"the first host has ended the job: {self._reason}")
        return [self._ranks.results[slot] for slot in sorted(self._ranks.results)]

    def leave(self, error: BaseException) -> None:
        """Report to the coordinator that this host leaves the job because of an error."""
        self._channel.send("leave", reason=f"{type(error).__name__}: {error}")

    def release(self) -> None:
        """Release what belongs to the connection with the coordinator; the ranks stay."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._channel)
        self._channel.close()
        self._beats.close()

    def stop(self) -> None:
        self._channel.send("stop")

    def kill(self) -> None:
        self._ranks.kill()

    # -- from its ranks -------------------------------------------------------------------------------------------

    def handle_event(self, slot: int, entry: Event) -> None:
        self._channel.send("event", slot=slot, entry=entry)

    def handle_output(self, slot: int, text: str, stream: str) -> None:
        self._channel.send("output", slot=slot, text=text, stream=stream)

    def handle_lost_world(self, slot: int, report: dict[str, Any]) -> None:
        self._channel.send("lost_world", slot=slot, told=report)

    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        fields = {name: failure[name] for name in ("reason", "traceback", "echo", "is_ours")}
        self._channel.send("failure", slot=slot, **fields)

    def handle_exit(self, slot: int, process: Process) -> None:
        done = process.done and process.exit_code == 0
        self._channel.send("end", slot=slot, done=done, text=process.end)

    # -- from the coordinator -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._selector.register(self._channel, selectors.EVENT_READ, self._receive)
        # The other hosts may have to join again too, and must not be reported as silent before that.
        self._beats.introduce({}, "")
        self._unheard = []
        self._channel.send("peer", port=self._beats.port)

    def _report_unheard(self) -> None:
        """Report the hosts from which this host receives no datagrams any more, when they change."""
        self._beats.tick()
        if (unheard := self._beats.unheard()) != self._unheard:
            self._unheard = unheard
            self._channel.send("unheard", hosts=unheard)

    def _receive(self) -> None:
        try:
            for message in self._channel.receive():
                self._handle(message)
        except (OSError, ProtocolError) as error:
            if self._reason is None:
                self._on_coordinator_lost(f"has closed the connection ({error})")
            else:
                self._selector.unregister(self._channel)

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "start":
            info = self._with_own_key(message["rendezvous"])
            self._ranks.start(message["slot"], RendezvousInfo(**info))
        elif kind == "tell":
            report = message["message"]
            if "rendezvous" in report:
                report["rendezvous"] = self._with_own_key(report["rendezvous"])
            self._ranks.send_message(message["slot"], report)
        elif kind == "kill":
            self._ranks.kill(message["slot"])
        elif kind == "peers":
            self._beats.introduce(
                {str(name): (str(a), int(p)) for name, (a, p) in message["hosts"].items()}, message["salt"]
            )
        elif kind == "probe":
            answer(self._channel, message, this_host())
        elif kind == "over":
            self._reason = message["reason"]
        elif kind not in ("beat", "begin", "agreed"):
            raise ProtocolError(f"the first host sent the unexpected message {kind}")

    def _with_own_key(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return rendezvous info for this host's ranks, with their key and the interface towards the first host."""
        generation = int(info["generation"])
        key = self._token.rank_key(info["salt"], generation)
        return {**info, "interface": interface_of(address_towards(info["address"])), "key": key}

    def _on_coordinator_lost(self, why: str) -> None:
        """Abort the ranks' collectives, keep their state, and rejoin the coordinator when it is reachable again."""
        self._selector.unregister(self._channel)
        self._channel.close()
        self._ranks.interrupt(f"the first host {why}")
        reason = f"the first host {why}; the ranks of this host keep their state and wait until it answers"
        wait = Wait(lambda: reason, self._timeout, self._notify)
        while True:
            wait.report()
            turn(self._selector, RETRY_SECONDS)
            self._ranks.look()
            try:
                self._channel = self._join_again(sorted(self._ranks.running), self._ranks.generation)
                break
            except (OSError, RunError) as error:
                if wait.is_over:
                    raise RunError(
                        f"the first host {why}, and did not reconnect within {self._timeout:.0f} s"
                    ) from error
            except JoinRefused as error:
                # The first host may still list the old connection; that ends within seconds.
                if error.code != "present" or wait.is_over:
                    raise
        self._notify("the first host answers again; the job resumes")
        self._listen()
