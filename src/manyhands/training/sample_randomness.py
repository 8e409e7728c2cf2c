"""Which random numbers belong to single samples, found out on a few of them before work starts."""

from __future__ import annotations

from typing import Any

from ..core import LayoutFree, Task, UsageError, random_state, remember_buffers, restore_random_state
from ..data import first_dim, split
from .hand import Hand

MOST_ROWS = 5


def learn_draws(hand: Hand, task: Task, batch: Any) -> None:
    """Computes the loss in training mode with two numbers of rows, the same on every layout.

    Buffers and generators are put back. What cannot be computed so is left to the size of each draw, which is told.
    """
    if hand.randomness is None or task.loss is None:
        return
    hand.randomness.watch_anew()
    rows = first_dim(batch)
    more = min(MOST_ROWS, rows)
    few = max(1, more - 2)
    if few == more:
        return
    loss, states = task.loss, random_state(hand.device)
    put_back = remember_buffers(hand.model)

    def compute(count: int) -> None:
        failure: Exception | None = None
        try:
            with hand.replica.scope():
                hand.replica.loss(loss, split(batch, [count, rows - count])[0] if count < rows else batch)
        except UsageError:
            raise
        except Exception as error:
            failure = error
        # The loss may fail on one rank alone, the one that has the network's output: all ranks give up together.
        if any_rank(failure is not None):
            raise failure or RuntimeError("another rank could not compute the loss")

    def any_rank(flag: bool) -> bool:
        return any(hand.world.gather_objects(flag))

    try:
        hand.randomness.learn(compute, few, more, any_rank)
    except UsageError:
        raise
    except Exception:
        # A mistake of the user comes again in the first step; a loss that needs more rows than these does not.
        return
    finally:
        put_back()
        restore_random_state(states, hand.device)


def guess_notice(randomness: LayoutFree) -> str:
    """What to tell where only the size of a draw said what it is."""
    why = "only their size tells so, because it could not be tried beforehand"
    return f"{randomness.guess}: {why}, so they may differ from one number of replicas to another"
