"""One network cut over two processes: Pipeline and Placed against what two processes can do at all, and by hand.

`python -m benchmarks.split [--quick]`. All contenders of a case train alternately in one pair of single-threaded
processes. The ceiling is what the two reach without each other: both train the whole network, each on batches of its
own. Compared with torch's own pipelining, `fully_shard` and DTensor, written by hand on the same work.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.data import as_source
from manyhands.distributed import NullWorld, World
from manyhands.training import take_step

from .report import Check, Report, arguments

WIDTH, LENGTH, NUM_BLOCKS, CLASSES = 128, 64, 8, 10
MICROS = 8
"""Fewer make the bubble longer, more of them small matrices that a core multiplies slowly."""
Steps = Generator[None, None, None]
Contenders = dict[str, Callable[[World], Steps]]


def block() -> nn.Module:
    """A transformer's block."""
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)


class Head(nn.Module):
    """Classes from the mean over a text's places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1))


class Towers(nn.Module):
    """Two equal towers, each with its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(*(block() for _ in range(NUM_BLOCKS // 2)), Head()) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.a(left) * self.b(right)


def deep() -> nn.Module:
    """A deep network."""
    torch.manual_seed(1)
    return nn.Sequential(*(block() for _ in range(NUM_BLOCKS)), Head())


def towers() -> nn.Module:
    """The two towers."""
    torch.manual_seed(1)
    return Towers()


def loss(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of what the network makes of all inputs."""
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def rows(count: int, num_inputs: int) -> tuple[Tensor, ...]:
    """Synthetic data."""
    torch.manual_seed(0)
    return (*(torch.randn(count, LENGTH, WIDTH) for _ in range(num_inputs)), torch.randint(0, CLASSES, (count,)))


# -- contenders -------------------------------------------------------------------------------------------------------


def ours(world: World, model: Callable[[], nn.Module], data: Any, spec: mh.StrategySpec, batch_size: int) -> Steps:
    """Steps as `fit` takes them."""
    task = mh.Task(model=model, loss=loss, optimizer=adamw, data=data, batch_size=batch_size)
    hand = mh.Hand(world, spec)
    hand.build(task)
    hand.model.train()
    feed = hand.reader.make_feed(as_source(data), batch_size, shuffle=False)
    try:
        while True:
            for batch in hand.reader.one_epoch(feed):
                take_step(hand, task, batch)
                yield
    finally:
        feed.close()
        hand.close()


def alone(world: World, model: Callable[[], nn.Module], data: Any, batch_size: int) -> Steps:
    """The plain loop, in each process by itself."""
    network = model()
    optimizer = adamw(network)
    while True:
        for batch in batches(data, batch_size):
            loss(network, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def batches(data: Any, batch_size: int) -> Iterator[tuple[Tensor, ...]]:
    """Consecutive rows."""
    for start in range(0, len(data[0]), batch_size):
        yield tuple(tensor[start : start + batch_size] for tensor in data)


def pipelining(world: World, data: Any, batch_size: int) -> Steps:
    """torch.distributed.pipelining by hand: both halves of the deep network, 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    network = deep()
    half = NUM_BLOCKS // 2
    part = network[:half] if world.rank == 0 else network[half:]
    optimizer = adamw(part)
    stage = PipelineStage(part, world.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROS, loss_fn=F.cross_entropy)
    while True:
        for inputs, labels in batches(data, batch_size):
            if world.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=labels, losses=[])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def fully_sharded(world: World, data: Any, batch_size: int) -> Steps:
    """FSDP2 by hand."""
    from torch.distributed.fsdp import fully_shard

    network = deep()
    for layer in network:
        fully_shard(layer)
    fully_shard(network)
    optimizer = adamw(network)
    mine = slice(world.rank * batch_size // 2, (world.rank + 1) * batch_size // 2)
    while True:
        for batch in batches(data, batch_size):
            loss(network, tuple(tensor[mine] for tensor in batch)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


class Together(nn.Module):
    """A block whose layers two ranks compute: heads of attention and features of the MLP, by DTensors."""

    def __init__(self, plain: Any, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()

        def cut(tensor: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(dim)], src_data_rank=None))

        attention = plain.self_attn
        self.norms = nn.ModuleList([plain.norm1, plain.norm2])
        self.projections = nn.ParameterList(cut(part, 0) for part in attention.in_proj_weight.chunk(3))
        self.shifts = nn.ParameterList(cut(part, 0) for part in attention.in_proj_bias.chunk(3))
        self.out, self.out_shift = cut(attention.out_proj.weight, 1), nn.Parameter(attention.out_proj.bias.detach())
        self.up, self.up_shift = cut(plain.linear1.weight, 0), cut(plain.linear1.bias, 0)
        self.down, self.down_shift = cut(plain.linear2.weight, 1), nn.Parameter(plain.linear2.bias.detach())
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        whole = self._shared(x)
        parts = [
            F.linear(whole, w.to_local(), b.to_local()) for w, b in zip(self.projections, self.shifts, strict=True)
        ]
        heads = [part.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for part in parts]
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self._summed(F.linear(found, self.out.to_local())) + self.out_shift)
        inner = F.relu(F.linear(self._shared(x), self.up.to_local(), self.up_shift.to_local()))
        return self.norms[1](x + self._summed(F.linear(inner, self.down.to_local())) + self.down_shift)

    def _shared(self, x: Tensor) -> Tensor:
        """Parameters that are equal on both ranks; each has a term of the gradient."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def _summed(self, term: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial

        return DTensor.from_local(term, self.mesh, [Partial()], run_check=False).full_tensor()


def tensor_parallel(world: World, data: Any, batch_size: int) -> Steps:
    """Tensor parallelism by hand, with torch.distributed.tensor."""
    mesh = dist.init_device_mesh("cpu", (2,))
    plain = deep()
    network = nn.Sequential(*(Together(layer, mesh) for layer in plain[:-1]), plain[-1])
    optimizer = adamw(network)
    while True:
        for batch in batches(data, batch_size):
            loss(network, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


# -- turns ------------------------------------------------------------------------------------------------------------


def by_turns(hand: mh.Hand, contenders: Contenders, rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of a step of each contender, one after another in a new random order in every round."""
    torch.set_num_threads(1)
    draw = random.Random(0)
    steps = {name: make(hand.world) for name, make in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name in draw.sample(list(steps), len(steps)):
            hand.barrier()
            began = perf_counter()
            next(steps[name])
            if number >= warm_up:
                times[name].append(perf_counter() - began)
    for generator in steps.values():
        hand.barrier()
        generator.close()
    return times


def measured(contenders: Contenders, size: int, rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """The slowest rank's time of every step."""
    found = mh.launch(
        partial(by_turns, contenders=contenders, rounds=rounds, warm_up=warm_up),
        mh.Mirrored(size),
        on="cpu" if size == 1 else f"cpu*{size}",
        progress=False,
    )
    return {name: [max(values) for values in zip(*(rank[name] for rank in found), strict=True)] for name in contenders}


def of_ceiling(times: dict[str, list[float]], name: str) -> float:
    """Samples per second of both together, over what the two reach without each other, round by round."""
    return median(apart / (2 * together) for together, apart in zip(times[name], times["two apart"], strict=True))


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("split", quick)
    batch_size, rounds = (32, 5) if quick else (64, 40)
    stages(report, batch_size, rounds)
    placed(report, batch_size, rounds)
    one_rank(report, batch_size // 4, rounds)
    if not quick:
        by_hand(report, batch_size, rounds)
    report.finish()


def stages(report: Report, batch_size: int, rounds: int) -> None:
    """A deep network in two stages."""
    data = rows(2 * batch_size, 1)
    spec = mh.Pipeline(2, microbatches=MICROS)
    contenders: Contenders = {
        "pipeline": partial(ours, model=deep, data=data, spec=spec, batch_size=batch_size),
        "two apart": partial(alone, model=deep, data=data, batch_size=batch_size),
        "torch pipelining": partial(pipelining, data=data, batch_size=batch_size),
    }
    times = measured(contenders, 2, rounds)
    found = report.add("a deep network in two stages", times, "torch pipelining")
    report.checks["pipeline2_of_ceiling"] = Check(value=of_ceiling(times, "pipeline"), at_least=0.85)
    report.checks["over_handwritten"] = Check(value=found["pipeline"].ratio, at_most=1.03)


def placed(report: Report, batch_size: int, rounds: int) -> None:
    """Two equal towers, one in each process."""
    data = rows(2 * batch_size, 2)
    spec = mh.Placed({"a": 0, "b": 1})
    contenders: Contenders = {
        "placed": partial(ours, model=towers, data=data, spec=spec, batch_size=batch_size),
        "two apart": partial(alone, model=towers, data=data, batch_size=batch_size),
    }
    times = measured(contenders, 2, rounds)
    report.add("two towers in two processes", times, "two apart")
    report.checks["placed2_of_ceiling"] = Check(value=of_ceiling(times, "placed"), at_least=0.88)


def one_rank(report: Report, batch_size: int, rounds: int) -> None:
    """Each strategy on one device, against the plain loop."""
    data = rows(2 * batch_size, 1)
    specs = {
        "sharded": mh.Sharded(1),
        "tensor parallel": mh.TensorParallel(1),
        "pipeline": mh.Pipeline(1),
        "placed": mh.Placed(devices=1),
    }
    contenders: Contenders = {
        name: partial(_alone_under, data=data, spec=spec, batch_size=batch_size) for name, spec in specs.items()
    }
    contenders["plain"] = partial(alone, model=deep, data=data, batch_size=batch_size)
    found = report.add("on one device", measured(contenders, 1, rounds), "plain")
    report.checks["one_rank_overhead"] = Check(value=max(found[name].ratio for name in specs), at_most=1.03)


def _alone_under(world: World, data: Any, spec: mh.StrategySpec, batch_size: int) -> Steps:
    return ours(NullWorld(), deep, data, spec, batch_size)


def by_hand(report: Report, batch_size: int, rounds: int) -> None:
    """Sharded and TensorParallel beside FSDP2 and DTensors that are written by hand."""
    data = rows(2 * batch_size, 1)
    cases: dict[str, tuple[mh.StrategySpec, str, Callable[..., Steps]]] = {
        "sharded": (mh.Sharded(2), "fully_shard", fully_sharded),
        "tensor parallel": (mh.TensorParallel(2), "DTensor", tensor_parallel),
    }
    for name, (spec, peer, steps) in cases.items():
        contenders: Contenders = {
            name: partial(ours, model=deep, data=data, spec=spec, batch_size=batch_size),
            peer: partial(steps, data=data, batch_size=batch_size),
        }
        found = report.add(f"a deep network, {name} on two", measured(contenders, 2, rounds), peer)
        worst = max(report.checks["over_handwritten"].value, found[name].ratio)
        report.checks["over_handwritten"] = Check(value=worst, at_most=1.03)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
