"""Accelerate's loop as the host of turns."""

from __future__ import annotations

import json
import os
import sys

from accelerate import Accelerator

from ..works import loss
from .guests import Request, loader, make_turns, settle


def main() -> None:
    """Trains what the command line asks for."""
    request = Request.parse(sys.argv[1])
    if request.size > 1:
        settle(int(os.environ["LOCAL_RANK"]))
    accelerator = Accelerator(cpu=True)
    made = request.work.model()
    batches = loader(request.work, request.num_samples * request.size)
    model, optimizer, feed = accelerator.prepare(made, request.work.make_optimizer(made), batches)
    turns = make_turns("accelerate", request)
    for batch, _ in zip(feed, range(request.plan.num_steps), strict=False):
        value = loss(model, batch)
        accelerator.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        value.item()
        turns.tick()
    turns.close()
    if accelerator.is_main_process:
        request.target.write_text(json.dumps(turns.times))
    accelerator.end_training()


if __name__ == "__main__":
    main()
