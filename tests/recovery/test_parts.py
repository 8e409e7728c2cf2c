"""Ranks that hold a shard or stage are killed inside a step: all ranks drop the step and resume from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import manyhands as mh
from tests.recovery.test_local import assert_same, fit, kill, recoveries
from tests.training.problems import problem


class Trap(mh.Callback):
    """After some step, lays a trap on one rank that kills it inside the next step; a file remembers that it did."""

    def __init__(self, folder: Path, rank: int, step: int, lay: Callable[[mh.Hand, Callable[[], None]], None]) -> None:
        self.path, self.rank, self.step, self.lay = folder / "trap", rank, step, lay

    def on_step(self, hand: mh.Hand) -> None:
        if hand.world.rank == self.rank and hand.num_steps == self.step and not self.path.exists():
            self.lay(hand, self.spring)

    def spring(self) -> None:
        self.path.touch()
        kill()


def _leaf(hand: mh.Hand) -> nn.Module:
    return next(layer for layer in hand.model.modules() if isinstance(layer, nn.Linear))


def in_forward(hand: mh.Hand, spring: Callable[[], None]) -> None:
    _leaf(hand).register_forward_pre_hook(lambda *_: spring())


def in_backward(hand: mh.Hand, spring: Callable[[], None]) -> None:
    def after(layer: nn.Module, inputs: Any, output: Any) -> None:
        output.register_hook(lambda gradient: spring())

    _leaf(hand).register_forward_hook(after)


def in_a_microbatch(hand: mh.Hand, spring: Callable[[], None]) -> None:
    """When a stage has sent one of the things that it sends in a step, and begins with the second."""
    world = hand.replica.inner  # type: ignore[attr-defined]
    send, sent = world.start_send, []

    def count(*args: Any) -> Any:
        sent.append(args)
        if len(sent) == 2:
            spring()
        return send(*args)

    world.start_send = count


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    """Train on one device without faults, as the reference."""
    return fit(problem("mlp", "adamw"), tmp_path_factory.mktemp("calm"), size=1, strategy="single,precision=fp64")


@pytest.mark.parametrize(
    ("strategy", "rank", "lay", "copy_every", "step", "source"),
    [
        ("tensor=2", 1, in_forward, 7, 7, "copies"),
        ("stages=2,microbatches=4", 1, in_a_microbatch, 7, 7, "copies"),
        ("shards=2", 1, in_backward, 7, 7, "copies"),
        ("shards=2,sharding=optimizer", 0, in_forward, 7, 7, "copies"),
        ("shards=2,stages=2,microbatches=2", 3, in_a_microbatch, 7, 7, "copies"),
        ("tensor=2,stages=2,replicas=2,microbatches=2", 5, in_a_microbatch, 7, 8, "memory"),
    ],
)
def test_model_parallel_run_recovers_from_kill_inside_a_step(
    engine: Any,
    tmp_path: Path,
    calm: mh.Run,
    strategy: str,
    rank: int,
    lay: Any,
    copy_every: int,
    step: int,
    source: str,
) -> None:
    """Checkpoints are of steps 3 and 6, copies of the first step and every few; the kill is in the ninth."""
    trap = Trap(tmp_path, rank, 8, lay)
    split = f"{strategy},precision=fp64"
    size = mh.StrategySpec.parse(split).num_devices or 1
    run = fit(problem("mlp", "adamw"), tmp_path, trap, size=size, strategy=split, copy_every=copy_every)
    assert_same(run, calm)
    (found,) = recoveries(run)
    assert found["step"] == step
    assert source in found["source"]
