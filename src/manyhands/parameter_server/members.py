"""Members of a job with parameter servers: workers, which compute the tickets of the coordinator, and servers."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import StrategySpec, Task, mix, seed_all
from ..data import check_source, source_of
from ..distributed import World
from ..monitoring import PHASES, Spans, by_phase
from ..strategies import MAIN, declaring
from ..training import NUM_SAMPLES, Hand, Sample, compute, learn_draws, profile_event
from .client import ParameterClient, ServersMoved, ServerUnreachable, WorkEnded
from .layout import Share, cut
from .loop import single_member_spec
from .messages import Delivered, EndOfWork, JoinRequest, ServerList, Unreachable, WorkPart, WorkRequest
from .server import ParameterShardServer
from .shard import ServerShard
from .sockets import Caller, ConnectionLost, call_until_reached, new_context
from .update import needs_whole

OVERLAP_FROM = 0.1
"""Share of a worker's time spent waiting for values above which it prefetches the next ones."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The data with which a process joins a job as a server, a follower or a worker."""

    task: Task
    spec: StrategySpec
    role: str
    number: int
    coordinator: str
    token: bytes = field(repr=False)
    timeout: float
    every: int = 0
    """Number of steps after which a worker profiles one; 0 for no profiles."""
    listens: tuple[str, int] | None = None
    """Host and port on which a server listens; None for any loopback port."""

    def run(self, world: World) -> dict[str, Any]:
        """Join the job, work until the coordinator ends it, and return statistics."""
        with contextlib.suppress(OSError):
            # The process name that `ps` and `top` show.
            Path("/proc/self/comm").write_text(f"mh-{self.role}-{self.number}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, cores // max(1, self.spec.replicas or 1)))
        hand = Hand(world, single_member_spec(self.spec))
        try:
            with declaring():
                hand.build(self.task)
            return _TicketWorker(self, hand).run() if self.role == "worker" else serve(self, hand)
        finally:
            hand.close()
            # The calling program may continue afterwards.
            torch.set_num_threads(threads)


def shares_of(hand: Hand) -> list[Share]:
    """Return the share of each server in a hand's network."""
    optimizer = hand.optimizers[MAIN]
    return cut(hand.model, hand.spec.servers, whole=needs_whole(optimizer))


def serve(member: Membership, hand: Hand) -> dict[str, Any]:
    """Run a server or follower, which holds one share of the network, and return its statistics."""
    shard = ServerShard(member.number, shares_of(hand)[member.number], hand.model, hand.optimizers[MAIN])
    listens, leads = member.listens or ("127.0.0.1", 0), member.role == "server"
    served_by = ParameterShardServer(
        shard,
        member.spec,
        member.coordinator,
        member.token,
        member.timeout,
        listens,
        leads=leads,
        on_wait=hand.notice,
    )
    return served_by.run()


class _TicketWorker:
    def __init__(self, member: Membership, hand: Hand) -> None:
        self.member, self.hand, self.task = member, hand, member.task
        # Workers must draw different numbers; layout-free ones are derived from the step and the samples.
        hand.reader.seed(self.task.seed)
        seed_all(mix(self.task.seed, 1 + member.number))
        source = source_of(self.task)
        self.feed = hand.reader.make_feed(
            source,
            check_source(source, self.task.batch_size),
            shuffle=self.task.shuffle,
            seed=self.task.seed,
            workers=0,
        )
        if hand.randomness is not None:
            learn_draws(hand, self.task, self.feed, self.feed.peek(NUM_SAMPLES))
        self._context = new_context()
        self.coordinator = self._join()
        self.client = ParameterClient(
            hand.model, shares_of(hand), member.number, self.coordinator, member.token, member.timeout
        )
        self.client.waiting = partial(hand.times.during, "communication")
        self.waited = 0.0
        self.computed = 1e-9
        self._num_delivered = 0

    def _join(self) -> Caller:
        """Connect to the coordinator, waiting for it up to the job's timeout."""
        member = self.member
        coordinator = call_until_reached(
            self._context, member.token, member.coordinator, member.timeout, self.hand.notice
        )
        coordinator.send(JoinRequest("worker", member.number))
        return coordinator

    def run(self) -> dict[str, Any]:
        """Compute the tickets that the coordinator hands out until the job ends; return the seconds spent."""
        try:
            with contextlib.suppress(WorkEnded):
                server_list = None
                while True:
                    try:
                        server_list = self._wait_for_servers(None) if server_list is None else server_list
                        self.client.connect(server_list)
                        self._work(server_list)
                    except ServersMoved as moved:
                        server_list = moved.server_list
                    except ServerUnreachable as lost:
                        server_list = self._report_unreachable(lost.number)
                    except ConnectionLost:
                        self._join_again()
                        server_list = None
                    self.hand.current.forget()
            return {"waited": self.waited, "computed": self.computed}
        finally:
            self.client.close()
            self.coordinator.close()
            self._context.term()

    def _report_unreachable(self, number: int) -> ServerList | None:
        """Report an unreachable server; return the coordinator's new server list, or None after joining again."""
        try:
            self.coordinator.send(Unreachable(number))
            return self._wait_for_servers(self.member.timeout / 4)
        except ConnectionLost:
            self._join_again()
            return None

    def _join_again(self) -> None:
        self.client.disconnect()
        self.coordinator.close()
        self.coordinator = self.client.coordinator = self._join()

    def _wait_for_servers(self, timeout: float | None) -> ServerList:
        while True:
            message, _ = self.coordinator.expect(timeout)
            if isinstance(message, ServerList):
                return message
            if isinstance(message, EndOfWork):
                raise WorkEnded

    def _work(self, server_list: ServerList) -> None:
        self.coordinator.send(WorkRequest(server_list.term))
        while True:
            with self.hand.times.during("communication"):
                message, frames = self.coordinator.expect(None)
            if isinstance(message, WorkPart) and message.term == server_list.term:
                self.coordinator.send(self._deliver(message, np.frombuffer(frames[0], np.int64).copy()))
                self._sample(message.step)
            elif isinstance(message, ServerList):
                raise ServersMoved(message)
            elif isinstance(message, EndOfWork):
                raise WorkEnded

    def _sample(self, step: int) -> None:
        """Report the profile of the step since the last delivery, and start the next profile if it is due."""
        hand, every = self.hand, self.member.every
        if hand.times.spans is not None:
            spans, hand.times.spans = hand.times.spans.end(), None
            sample = Sample(step, dict.fromkeys(PHASES, 0.0) | by_phase(spans), tuple(spans))
            hand.world.channel.report({**profile_event(hand.world, sample), "rank": self.member.number})
        self._num_delivered += 1
        if every and self._num_delivered % every == 0:
            hand.times.spans = Spans(hand.device)

    def _deliver(self, part: WorkPart, ids: Any) -> Delivered:
        """Compute one ticket, with the samples `ids`, and push its gradient to the servers."""
        hand, client = self.hand, self.client
        hand.num_steps = part.step
        if not client.is_pulling:
            client.begin_pull(part.version)
        with hand.times.during("input"):
            batch = self.feed.read(ids, part.epoch)
        began = time.perf_counter()
        if client.receive_values() < part.version:
            client.begin_pull(part.version)
            client.receive_values()
        with hand.times.during("copy"):
            client.put_values()
        self.waited += time.perf_counter() - began
        began = time.perf_counter()
        hand.reader.take(batch)
        assert self.task.loss is not None
        compute(hand, self.task.loss, batch)
        self.computed += time.perf_counter() - began
        tally = hand.current.captured_tally()
        count = float(tally.count) if tally.count is not None else float(batch.num_samples)
        # A part with count 0 has no mean, and adds nothing to the sum.
        total = float(tally.loss) * count if count else 0.0
        weight = 1.0 if tally.counts_tokens else float(batch.num_samples)
        scale, is_skipped = self._limit(weight / max(count, 1.0)) if part.rates else (1.0, False)
        with hand.times.during("communication"):
            staleness = client.push(part.ticket, scale, part.rates)
        if not part.rates:
            staleness = max(0, part.step - client.version)
        elif self.waited > OVERLAP_FROM * self.computed:
            # Prefetch values while the worker asks for work and reads the next samples.
            client.begin_pull(0)
        hand.current.forget()
        return Delivered(part.term, part.ticket, total, count, weight, staleness, skipped=is_skipped)

    def _limit(self, scale: float) -> tuple[float, bool]:
        """Return the factor of a gradient that is a separate update, and whether the servers must skip it.

        The factor combines `scale`, which makes the sum of losses a mean, and clipping.
        """
        if self.task.clip is None and not self.hand.current.skips:
            return scale, False
        gradients = [p.grad for p in self.hand.model.parameters() if p.grad is not None]
        norm = scale * total_norm([*gradients, *self.client.row_gradients])
        if self.hand.current.skips and not norm < float("inf"):
            return 0.0, True
        return scale * clip_factor(norm, self.task.clip), False


def total_norm(gradients: list[Tensor]) -> float:
    """Return the L2 norm of all gradients together."""
    norms = torch._foreach_norm(gradients) if gradients else []
    return float(torch.stack([norm.double().cpu() for norm in norms]).norm()) if norms else 0.0


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor that clips a gradient of norm `norm` to `limit`, by torch's formula; 1 if `limit` is None.

    >>> clip_factor(2.0, 1.0) < 0.5 < clip_factor(2.0, 1.001)
    True
    """
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
