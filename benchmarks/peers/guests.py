"""What the peers' programs share: the request, the data in its fastest form for a DataLoader, and the guests."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..plain import ddp, plain
from ..turns import Guest, Plan, Turns
from ..works import NUM_ROWS, WORKS, Batch, Work


@dataclass(frozen=True)
class Request:
    """What a peer's program is asked to do."""

    work: Work
    plan: Plan
    size: int
    target: Path

    @classmethod
    def parse(cls, text: str) -> Request:
        """Reads the argument of the command line."""
        values = json.loads(text)
        return cls(WORKS[values["work"]], Plan(**values["plan"]), values["size"], Path(values["target"]))

    @property
    def num_samples(self) -> int:
        """Samples of one process, a step more than is taken."""
        return self.work.batch_size * (self.plan.num_steps + 1)


class WholeBatches(Dataset[Batch]):
    """Reads a whole batch at once, so that no sample is collated by itself."""

    def __init__(self, work: Work, num_samples: int) -> None:
        self._inputs, self._classes = work.arrays()
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, rows: list[int]) -> Batch:
        index = torch.tensor(rows) % NUM_ROWS
        return self._inputs.index_select(0, index), self._classes.index_select(0, index)


def loader(work: Work, num_samples: int) -> DataLoader[Batch]:
    """Shuffled batches."""
    dataset = WholeBatches(work, num_samples)
    return DataLoader(dataset, batch_size=work.batch_size, shuffle=True, collate_fn=_as_it_is)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def make_turns(peer: str, request: Request) -> Turns:
    """Turns of the peer and of the hand-written loop for as many processes."""
    order = _order(request)
    if request.size == 1:
        return Turns(peer, {"plain": plain(request.work, order, [])}, request.plan)
    guest: Guest = ddp(request.work, order, [], static_graph=False)
    return Turns(peer, {"ddp": guest}, request.plan, dist.barrier)


def settle(rank: int) -> None:
    """One thread, and a core for each process, as ours have; also for the threads that are there already.

    To be called once a process starts no other ranks any more, because those would inherit its core.
    """
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def _order(request: Request) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(request.num_samples * request.size, generator=generator) % NUM_ROWS
