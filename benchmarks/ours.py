"""Ours: `mh.fit` as the host of turns, on one device or mirrored on two processes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import manyhands as mh
from manyhands.data import Order

from .plain import alone, ddp, plain
from .turns import Guest, Plan, Turns
from .works import NUM_ROWS, Batch, Work, loss

QUIET = mh.options.Display(progress=False)

TOLERANCE = 1e-4
"""Relative difference up to which two losses are of equal work."""

Losses = dict[str, list[float]]
MakeGuests = Callable[[torch.Tensor, Losses], dict[str, Guest]]


@dataclass(frozen=True)
class Timing:
    """What turns measured."""

    times: dict[str, list[float]]
    """Seconds per step of every turn, by contender."""
    of_rank: list[dict[str, list[float]]]
    """Data that is equal on every rank."""


class Watch(mh.Callback):
    """Lets guests train between the steps of `fit`, and leaves the times in a folder."""

    def __init__(self, host: str, guests: MakeGuests, order: torch.Tensor, plan: Plan, folder: Path) -> None:
        self.host, self.guests, self.order, self.plan, self.folder = host, guests, order, plan, folder

    def on_start(self, hand: mh.Hand) -> None:
        self.losses: Losses = {}
        barrier = dist.barrier if hand.size > 1 else lambda: None
        self.turns = Turns(self.host, self.guests(self.order, self.losses), self.plan, barrier)

    def on_step(self, hand: mh.Hand) -> None:
        self.turns.tick()

    def on_end(self, hand: mh.Hand) -> None:
        self.turns.close()
        means = {name: hand.mean(torch.tensor(values)).tolist() for name, values in self.losses.items()}
        found = {"times": self.turns.times, "losses": means}
        (self.folder / f"rank{hand.rank}.json").write_text(json.dumps(found))


def single_guests(order: torch.Tensor, losses: Losses, *, work: Work) -> dict[str, Guest]:
    """The plain loop, and once more to say how much it differs from itself."""
    return {name: plain(work, order, losses.setdefault(name, [])) for name in ("plain", "plain again")}


def mirrored_guests(order: torch.Tensor, losses: Losses, *, work: Work) -> dict[str, Guest]:
    """DDP with both of its good settings and once more; both processes without each other; one alone."""
    settings = {"ddp": False, "ddp static": True, "ddp again": False}
    return {
        **{
            name: ddp(work, order, losses.setdefault(name, []), static_graph=static)
            for name, static in settings.items()
        },
        "two apart": plain(work, order, []),
        "one": alone(work, order),
    }


def fit_single(work: Work, plan: Plan) -> Timing:
    """Turns of `fit` on one device and the plain loop."""
    guests = partial(single_guests, work=work)
    return _fit("fit", work, plan, guests, 1, strategy=mh.Single(), on="cpu")


def fit_mirrored(work: Work, plan: Plan) -> Timing:
    """Turns of `fit` mirrored on two processes, DDP, and what the two processes can do at all."""
    guests = partial(mirrored_guests, work=work)
    return _fit("mirrored", work, plan, guests, 2, strategy=mh.Mirrored(2), on="cpu*2")


def uneven_loss(model: Any, batch: Batch) -> torch.Tensor:
    """The loss, which costs twice as much on the second process."""
    if dist.is_initialized() and dist.get_rank() == 1:
        batch = (torch.cat([batch[0], batch[0]]), torch.cat([batch[1], batch[1]]))
    return loss(model, batch)


def unequal_guests(order: torch.Tensor, losses: Losses, *, work: Work) -> dict[str, Guest]:
    """Both processes without each other, the second at half speed."""
    return {"two apart": plain(work, order, [], uneven_loss)}


def fit_unequal(work: Work, plan: Plan) -> Timing:
    """Turns of `fit` mirrored on two processes, the second at half speed, and of both without each other."""
    options = [QUIET, mh.options.Resources(balance=True)]
    guests = partial(unequal_guests, work=work)
    return _fit("mirrored", work, plan, guests, 2, uneven_loss, strategy=mh.Mirrored(2), on="cpu*2", options=options)


class Clock(mh.Callback):
    """Leaves the time of every step in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: list[float] = []

    def on_step(self, hand: mh.Hand) -> None:
        self.times.append(perf_counter())

    def on_end(self, hand: mh.Hand) -> None:
        self.path.write_text(json.dumps([after - before for before, after in pairwise(self.times)]))


def step_seconds(work: Work, num_steps: int, *options: mh.options.Checkpoints) -> list[float]:
    """Seconds from each step of `fit` on one device to the next; number i is the one after step i + 1."""
    task = _task(work, work.batch_size, num_steps)
    with tempfile.TemporaryDirectory() as name:
        clock = Clock(Path(name) / "times.json")
        mh.fit(task, mh.Single(), on="cpu", steps=num_steps, callbacks=[clock], folder=name, options=[QUIET, *options])
        seconds: list[float] = json.loads(clock.path.read_text())
    return seconds[:1] + seconds


def order_of(num_samples: int) -> torch.Tensor:
    """The rows in the order in which `fit` reads them in its first epoch."""
    return torch.from_numpy(Order(num_samples, seed=0, epoch=0, shuffle=True)[:]) % NUM_ROWS


def _fit(
    host: str,
    work: Work,
    plan: Plan,
    guests: MakeGuests,
    size: int,
    compute: Callable[..., torch.Tensor] = loss,
    options: Any = QUIET,
    **settings: Any,
) -> Timing:
    batch_size = work.batch_size * size
    task = _task(work, batch_size, plan.num_steps).replace(loss=compute)
    num_samples = batch_size * (plan.num_steps + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch = Watch(host, guests, order_of(num_samples), plan, folder)
        run = mh.fit(task, steps=plan.num_steps, callbacks=[watch], folder=folder, options=options, **settings)
        found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
        require_equal_work(run.losses, found[0]["losses"])
    return Timing(found[0]["times"], [entry["times"] for entry in found])


def _task(work: Work, batch_size: int, num_steps: int) -> mh.Task:
    """One step more than is taken: the end of an epoch is no part of a steady state."""
    return mh.Task(
        model=work.model,
        loss=loss,
        optimizer=work.make_optimizer,
        data=partial(work.dataset, batch_size * (num_steps + 1)),
        batch_size=batch_size,
    )


def require_equal_work(ours: list[float], theirs: Losses) -> None:
    """Raises unless every contender had our losses, step by step."""
    for name, values in theirs.items():
        count = min(len(ours), len(values))
        torch.testing.assert_close(
            torch.tensor(values[:count]),
            torch.tensor(ours[:count]),
            rtol=TOLERANCE,
            atol=0.0,
            msg=lambda text, name=name: f"{name} and fit must have equal losses: {text}",
        )
