"""What a rank holds: Sharded on four ranks against replicas, recomputed blocks against kept ones, measured.

`python -m benchmarks.memory [--quick]`. Bytes are those of tensors: parameters, gradients and optimizer state as a rank
really holds them after a backward, beside what the formula says; activations as the storages that a forward leaves for
its backward. With a GPU, the largest GPT that trains in 24 GiB by `fit_in`, against plain PyTorch in the same memory
with micro-batches of one and activation checkpointing.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.api.runtime import runtime
from manyhands.core import OutOfMemory
from manyhands.distributed import Device, NullWorld, World, resolve
from manyhands.graph import kept_bytes, lives
from manyhands.strategies import keep_all, recompute
from manyhands.training import Hand, fit_in, host_bytes
from manyhands.training.memory_limit import limited

from .gpu_works import Block
from .report import Check, Report, arguments, interleaved

VOCABULARY, LENGTH = 1024, 128


class Gpt(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, width: int = 256, depth: int = 8, length: int = LENGTH, checkpoints: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def task(width: int, depth: int, rows: int, length: int = LENGTH) -> mh.Task:
    """Training of a GPT of this size."""
    return mh.Task(
        model=lambda: Gpt(width, depth, length),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
        data=torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(0)),
        batch_size=rows,
    )


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("memory", quick)
    state(report)
    activations(report)
    if torch.cuda.is_available():
        largest(report)
    report.finish()
    runtime.engine.close()


# -- parameters, gradients, optimizer state ----------------------------------------------------------------------------


def held(world: World, spec: mh.StrategySpec, width: int, depth: int) -> int:
    """Bytes of parameters, gradients and optimizer state that a rank holds in the middle of its second step."""
    hand = Hand(world, spec)
    hand.build(task(width, depth, 8))
    batches = hand.batches(torch.randint(0, VOCABULARY, (16, 17)), 8)
    total = 0
    for batch in batches:
        for part in hand.accumulate(batch):
            with hand.scope():
                value = loss(hand.model, part)
            hand.backward(value)
        if hand.num_steps:
            total = _bytes(hand)
        hand.step()
    hand.close()
    return total


def _bytes(hand: Hand) -> int:
    parameters = list(hand.model.parameters())
    tensors: list[Any] = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    for optimizer in hand.optimizers.values():
        tensors += [v for slots in optimizer.state.values() for v in slots.values() if isinstance(v, Tensor)]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def state(report: Report) -> None:
    """Four ranks, replicated and sharded."""
    width, depth = (128, 2) if report.quick else (256, 8)
    devices, _ = resolve("cpu*4")
    found: dict[str, list[int]] = {}
    for name, spec in (("replicated", mh.Mirrored(4)), ("sharded", mh.Sharded(4))):
        job = runtime.engine.start(_measuring(spec, width, depth), devices, timeout=120)
        found[name] = job.wait(lambda rank, entry: None, lambda *line: print(*line))
        table = mh.explain(task(width, depth, 8), spec)
        report.notes[f"{name}_bytes"] = max(found[name])
        report.notes[f"{name}_formula_bytes"] = table.parameters + table.gradients + table.optimizer
    ratio = max(found["sharded"]) / max(found["replicated"])
    report.checks["sharded4_state_ratio"] = Check(value=ratio, at_most=0.30)


def _measuring(spec: mh.StrategySpec, width: int, depth: int) -> Callable[[World], int]:
    return lambda world: held(world, spec, width, depth)


# -- activations -------------------------------------------------------------------------------------------------------


def activations(report: Report) -> None:
    """Blocks kept and computed again: bytes that forward leaves for backward, and the time of both."""
    width, depth, rows = (128, 4, 4) if report.quick else (256, 8, 8)
    model = Gpt(width, depth)
    batch = torch.randint(0, VOCABULARY, (rows, LENGTH + 1))

    def kept() -> int:
        return sum(kept_bytes(lives(model, lambda: loss(model, batch))).values())

    def step() -> float:
        began = time.perf_counter()
        loss(model, batch).backward()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    def step_again() -> float:
        recompute(model, "blocks")
        try:
            return step()
        finally:
            keep_all(model)

    plain = kept()
    recompute(model, "blocks")
    again = kept()
    keep_all(model)
    step(), step_again()
    rows_ = report.add(
        "forward and backward", interleaved({"kept": step, "recomputed": step_again}, 5 if report.quick else 40), "kept"
    )
    report.notes |= {"kept_activation_bytes": plain, "recomputed_activation_bytes": again}
    report.checks["recompute_activation_ratio"] = Check(value=again / plain, at_most=0.34)
    report.checks["recompute_time_ratio"] = Check(value=rows_["recomputed"].ratio, at_most=1.4)


# -- the largest network in 24 GiB of a GPU ----------------------------------------------------------------------------


GIB24 = 24 << 30
GPU_LENGTH, GPU_ROWS, NUM_STEPS = 1024, 8, 3


def largest(report: Report) -> None:
    """The most parameters that train, of GPTs that grow by their depth at one width; both sides in the same memory."""
    torch.set_num_threads(os.cpu_count() or 1)
    width = 1024 if report.quick else 2048
    device = Device("cuda", 0)
    plain, plain_seconds = _deepest(_depth_of(width, GIB24 / 16), lambda depth: _plain_seconds(width, depth))
    report.notes |= {"plain_params": _parameters(width, plain), "plain_step_seconds": plain_seconds}

    def fitted(depth: int) -> mh.StrategySpec:
        made = task(width, depth, GPU_ROWS, GPU_LENGTH)
        return fit_in(made, mh.Single(precision="bf16"), GIB24, 1, host_bytes([device]))[0]

    # More is not tried than twice and a half: beyond that the host's memory ends.
    ours, seconds = _deepest(
        _depth_of(width, 2.5 * _parameters(width, plain)),
        lambda depth: _fitted_seconds(device, width, depth, fitted),
    )
    report.notes |= {"fit_in_params": _parameters(width, ours), "fit_in_step_seconds": seconds}
    report.notes["fit_in_spec"] = str(fitted(ours))
    ratio = _parameters(width, ours) / max(1, _parameters(width, plain))
    report.checks["fit_in_24gib_params_ratio"] = Check(value=ratio, at_least=2.0)


def _parameters(width: int, depth: int) -> int:
    return depth * 12 * width * width + (VOCABULARY + GPU_LENGTH) * width


def _depth_of(width: int, parameters: float) -> int:
    return max(1, int(parameters / (12 * width * width)))


def _deepest(first: int, seconds: Callable[[int], float | None]) -> tuple[int, float]:
    """The largest depth from `first` down, in steps of 6%, that trains, and how long a step takes there."""
    depth = first
    while depth > 1:
        taken = seconds(depth)
        _free()
        if taken is not None:
            return depth, taken
        depth = min(depth - 1, int(depth * 0.94))
    raise RuntimeError("not even one block trains")


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _fitted_seconds(device: Device, width: int, depth: int, fitted: Callable[[int], mh.StrategySpec]) -> float | None:
    """A step's seconds by what `fit_in` chooses; None where nothing fits, or it does not."""
    made = task(width, depth, GPU_ROWS, GPU_LENGTH)
    hand: Hand | None = None
    try:
        spec = fitted(depth)
        with limited(device.torch, GIB24):
            hand = Hand(NullWorld(device), spec)
            hand.build(made)
            batches = iter(hand.batches(made.data.repeat(NUM_STEPS, 1), GPU_ROWS))
            return _seconds(partial(_step, hand, batches))
    except (OutOfMemory, torch.OutOfMemoryError):
        return None
    finally:
        if hand is not None:
            hand.close()


def _step(hand: Hand, batches: Iterator[Any]) -> None:
    for micro in hand.accumulate(next(batches)):
        with hand.scope():
            value = loss(hand.model, micro)
        hand.backward(value)
    hand.step()


def _seconds(step: Callable[[], None]) -> float:
    """The last of a few steps."""
    taken = 0.0
    for _ in range(NUM_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken = time.perf_counter() - begin
    return taken


def _plain_seconds(width: int, depth: int) -> float | None:
    """PyTorch as one writes it: bf16 autocast, micro-batches of one, activation checkpointing."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(GIB24 / total)
    try:
        with torch.device("cuda"):
            model = Gpt(width, depth, GPU_LENGTH, checkpoints=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        batch = torch.randint(0, VOCABULARY, (GPU_ROWS, GPU_LENGTH + 1), device="cuda")

        def step() -> None:
            for row in batch.split(1):
                with torch.autocast("cuda", torch.bfloat16):
                    value = loss(model, row) / GPU_ROWS
                value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return _seconds(step)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
