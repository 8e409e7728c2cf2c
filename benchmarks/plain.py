"""Hand-written loops for one device and for DDP, against which the others are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .turns import Guest
from .works import Work, loss


def plain(work: Work, order: Tensor, losses: list[float], compute: Callable[..., Tensor] = loss) -> Guest:
    """Trains on one device; `order` holds the rows of all batches, one batch after the other."""
    model = work.model()
    optimizer = work.make_optimizer(model)
    inputs, classes = work.arrays()
    for rows in order.split(work.batch_size):
        value = compute(model, (inputs.index_select(0, rows), classes.index_select(0, rows)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())
        yield


def ddp(work: Work, order: Tensor, losses: list[float], *, static_graph: bool) -> Guest:
    """Trains on as many processes as there are; each takes its contiguous part of every global batch."""
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True, static_graph=static_graph)
    optimizer = work.make_optimizer(model)
    inputs, classes = work.arrays()
    for rows in parts(order, work.batch_size):
        value = loss(model, (inputs.index_select(0, rows), classes.index_select(0, rows)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())
        yield


def alone(work: Work, order: Tensor) -> Guest:
    """The plain loop on the first process while the others wait."""
    if torch.distributed.get_rank() == 0:
        yield from plain(work, order, [])
    while True:
        yield


def parts(order: Tensor, batch_size: int) -> Iterator[Tensor]:
    """This rank's rows of every global batch."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rows in order.split(batch_size * size):
        yield rows[rank * batch_size : (rank + 1) * batch_size]
