"""The parts of a step that a recording is made of, run one by one on the CPU: the same sums, the same network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.cluster import World
from manyhands.data import as_source
from manyhands.training import Hand
from manyhands.training.recorder import Recorder
from manyhands.training.stepping import take_step
from manyhands.training.ways import Ways

from .problems import classify, generator, mlp

Ranks = Callable[[Callable[[World], Any], int], list[Any]]


class Sometimes(nn.Module):
    """A network with a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def work(model: Callable[[], nn.Module]) -> mh.Task:
    return mh.Task(
        model=model,
        loss=classify,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=(torch.randn(96, 12, generator=generator(0)), torch.randint(0, 5, (96,), generator=generator(1))),
        batch_size=8,
        clip=0.5,
    )


def in_parts(world: World, model: Callable[[], nn.Module], *, deferred: bool) -> tuple[list[float], list[str]]:
    task = work(model)
    hand = Hand(world, mh.StrategySpec(replicas=world.size))
    hand.build(task)
    assert task.loss is not None
    recorder = Recorder(hand, task.loss, Ways(hand, task.loss, None), None) if deferred else None
    losses = []
    for number, batch in enumerate(hand.one_epoch(hand.make_feed(as_source(task.data), 8, shuffle=True))):
        if recorder is not None:
            with recorder._in_parts(is_deferred=True, is_settled=number > 0):
                for phase in recorder._phases(batch, is_deferred=True):
                    phase.run()
        else:
            take_step(hand, task, batch)
        losses.append(float(hand.losses[""]))
    different = hand.replica.differences()
    hand.close()
    return losses, different


@pytest.mark.parametrize("model", [mlp, Sometimes])
def test_sums_after_backward_are_the_sums_during_it(model: Callable[[], nn.Module], run_ranks: Ranks) -> None:
    during = run_ranks(lambda world: in_parts(world, model, deferred=False), 2)
    after = run_ranks(lambda world: in_parts(world, model, deferred=True), 2)
    np.testing.assert_allclose(after[0][0], during[0][0], rtol=1e-6)
    assert [different for _, different in (*during, *after)] == [[], [], [], []]
