"""Find out which random numbers belong to single samples, from a few samples before training starts."""

from __future__ import annotations

import torch

from ..core import LayoutFree, UsageError, random_state, remember_buffers, restore_random_state
from ..data import Resident, map_leaves
from .program import Program

MOST_ROWS = 5


def learn_draws(draws: LayoutFree, program: Program, data: Resident, batch_size: int) -> None:
    """Compute the loss in training mode with two batch sizes, as `fit` does; buffers and generators are restored."""
    loss, model = program.task.loss, program.model
    assert loss is not None
    more = min(MOST_ROWS, batch_size)
    few = max(1, more - 2)
    if few == more:
        return
    batch = data.fetch(torch.arange(more, device=program.device))
    put_back = remember_buffers(model)
    states, before, is_random = random_state(program.device), draws.num_draws, False

    def compute(count: int) -> None:
        nonlocal is_random
        with program.scope():
            loss(model, map_leaves(lambda leaf: leaf[:count], batch))
        is_random = is_random or draws.num_draws > before

    try:
        draws.learn(compute, few, more)
        program.is_random = is_random or draws.strayed or bool(draws.drew_on_host())
    except UsageError:
        raise
    except Exception:
        return  # an error in the user's code is raised again in the first step
    finally:
        put_back()
        restore_random_state(states, program.device)
