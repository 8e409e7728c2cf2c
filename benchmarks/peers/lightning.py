"""Lightning's Trainer as the host of turns, with everything off that is no part of a step."""

from __future__ import annotations

import json
import sys
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..works import Batch, Work, loss
from .guests import Request, loader, make_turns, settle


class Module(LightningModule):
    """The work as Lightning wants it."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.model = work, work.model()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a batch."""
        return loss(self.model, batch)

    def configure_optimizers(self) -> Optimizer:
        """The work's own."""
        return self.work.make_optimizer(self.model)


class Watch(Callback):
    """Lets the hand-written loop train between steps."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """The process group is there, and with it all ranks."""
        if self.request.size > 1:
            settle(trainer.local_rank)
        self.turns = make_turns("lightning", self.request)

    def on_train_batch_end(self, *_: Any) -> None:
        """A step was taken."""
        self.turns.tick()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """The first process says what was measured."""
        self.turns.close()
        if trainer.is_global_zero:
            self.request.target.write_text(json.dumps(self.turns.times))


def main() -> None:
    """Trains what the command line asks for."""
    request = Request.parse(sys.argv[1])
    trainer = Trainer(
        accelerator="cpu",
        devices=request.size,
        strategy="ddp" if request.size > 1 else "auto",
        max_steps=request.plan.num_steps,
        callbacks=[Watch(request)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(request.work), loader(request.work, request.num_samples))


if __name__ == "__main__":
    main()
