"""Find out on a few samples which random numbers are drawn per sample, before training starts."""

from __future__ import annotations

from typing import Any

from ..core import DataError, LayoutFree, Task, UsageError, random_state, remember_state, restore_random_state
from ..data import Feed, copied, first_dim, split
from .hand import Hand
from .restored_objects import left_alone

MOST_ROWS = 5


def learn_draws(hand: Hand, task: Task, feed: Feed, batch: Any) -> None:
    """Learn which draws are per sample by computing the loss in training mode with two numbers of rows of a batch.

    A batch that cannot be split, such as one with the labels of all samples in a row, is collated again from the feed.

    The result is the same on every layout; buffers and random states are restored. If the loss cannot be computed this
    way, the size of each draw decides, and a notice reports it.
    """
    if hand.randomness is None or task.loss is None:
        return
    hand.randomness.watch.restart()
    rows = first_dim(batch)
    more = min(MOST_ROWS, rows)
    few = max(1, more - 2)
    if few == more:
        return
    loss, states = task.loss, random_state(hand.device)
    put_back = remember_state(hand.model)

    def first(count: int) -> Any:
        if count == rows:
            return copied(batch)
        try:
            return split(batch, [count, rows - count])[0]
        except DataError:
            return feed.peek(count)

    def compute(count: int) -> None:
        failure: Exception | None = None
        try:
            with hand.replica.scope():
                hand.replica.loss(loss, first(count))
        except UsageError:
            raise
        except Exception as error:
            failure = error
        # The loss may fail only on the rank that has the network's output: all ranks give up together.
        if any_rank(failure is not None):
            raise failure or RuntimeError("another rank could not compute the loss")

    def any_rank(flag: bool) -> bool:
        return any(hand.world.gather_objects(flag))

    try:
        with left_alone(loss, task.model):
            hand.randomness.learn(compute, few, more, any_rank)
    except UsageError:
        raise
    except Exception:
        # A user error occurs again in the first step; a loss that only needs more rows does not fail there.
        return
    finally:
        put_back()
        restore_random_state(states, hand.device)


def guess_notice(randomness: LayoutFree) -> str:
    """Return the notice for draws that were classified by their size only."""
    why = "this was inferred from their size, because it could not be tried beforehand"
    return f"{randomness.guess}: {why}, so they may change with the number of replicas"
