"""Context parallelism: what four ranks keep of a long sequence, a step beside a ring by hand, and architectures.

`python -m benchmarks.context [--quick]`. Saved bytes are those of the storages that forward leaves for backward,
without parameters. The hand-written step has the same GPT, with ring attention over point-to-point messages of gloo,
causal halves of the sequence balanced over the ranks, and one all-reduce of all gradients; both train alternately in
one pair of single-threaded processes. Architectures of `transformers` take two steps on two ranks, in float64 as far as
they compute in it, and are compared with one device.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

import manyhands as mh
from manyhands.api.runtime import runtime
from manyhands.core import StrategyError
from manyhands.data import as_source
from manyhands.distributed import NullWorld, World, resolve
from manyhands.training import take_step
from manyhands.training.step_comparison import compare
from manyhands.training.trial_steps import plan_of, take_steps

from .context_by_hand import Gpt, adamw, by_hand, loss, tokens
from .matrix.architectures import ARCHITECTURES
from .report import Check, Report, arguments
from .split import Steps, measured

NAMES = [
    "gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "llama", "mistral", "qwen2", "qwen3", "gemma",
    "gemma2", "phi3", "stablelm", "starcoder2", "olmo", "granite", "mixtral", "bert", "roberta", "albert",
    "distilbert", "electra", "modernbert", "t5", "bart",
]  # fmt: skip


def task(length: int, rows: int) -> mh.Task:
    return mh.Task(
        model=partial(Gpt, length), loss=loss, optimizer=adamw, data=tokens(2 * rows, length), batch_size=rows
    )


def ours(world: World, data: tuple[Tensor, Tensor], batch_size: int) -> Steps:
    """Steps as `fit` takes them."""
    made = task(data[0].shape[1], batch_size).replace(data=data)
    hand = mh.Hand(world, mh.ContextParallel(world.size))
    hand.build(made)
    hand.model.train()
    feed = hand.reader.make_feed(as_source(data), batch_size, shuffle=False)
    try:
        while True:
            for batch in hand.reader.one_epoch(feed):
                take_step(hand, made, batch)
                yield
    finally:
        feed.close()
        hand.close()


# -- measurements -----------------------------------------------------------------------------------------------------


def saved(world: World, spec: mh.StrategySpec, length: int) -> int:
    """Bytes of the storages that forward of one sample leaves for backward, without parameters."""
    hand = mh.Hand(world, spec)
    made = task(length, 2)
    hand.build(made)
    own = {p.untyped_storage().data_ptr() for p in hand.model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    for batch in hand.batches(made.data, 2):
        for part in hand.accumulate(batch):
            with hand.scope(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                value = hand.replica.loss(loss, part)
            hand.backward(value)
        hand.step()
        break
    hand.close()
    return sum(sizes.values())


def on_ranks(function: Any, size: int) -> list[Any]:
    """Run a function on processes of this machine."""
    devices, _ = resolve(f"cpu*{size}")
    job = runtime.engine.start(function, devices, timeout=300)
    return job.wait(lambda rank, entry: None, lambda *line: print(*line))


def memory(report: Report) -> None:
    """Saved bytes of one sequence, and the longest one that a limit allows."""
    length = 1024 if report.quick else 4096
    alone = saved(NullWorld(), mh.Single(), length)
    four = max(on_ranks(partial(saved, spec=mh.ContextParallel(4), length=length), 4))
    report.notes |= {"saved_bytes_1": alone, "saved_bytes_4": four, "sequence": length}
    report.checks["saved_bytes_ratio_4"] = Check(value=four / alone, at_most=0.30)
    # Saved bytes grow linearly in the length, which a second length on four ranks shows.
    longer = max(on_ranks(partial(saved, spec=mh.ContextParallel(4), length=2 * length), 4))
    slope = (longer - four) / length
    report.notes["saved_bytes_4_twice_as_long"] = longer
    report.checks["longest_sequence_ratio_4"] = Check(value=(length + (alone - four) / slope) / length, at_least=3.2)


def steps(report: Report) -> None:
    """A step on two ranks beside the same by hand."""
    length, batch_size, rounds = (512, 2, 5) if report.quick else (2048, 2, 30)
    data = tokens(2 * batch_size, length)
    contenders = {
        "context parallel": partial(ours, data=data, batch_size=batch_size),
        "ring by hand": partial(by_hand, data=data, batch_size=batch_size),
    }
    found = report.add("a GPT on two ranks", measured(contenders, 2, rounds), "ring by hand")
    report.checks["ring_over_handwritten"] = Check(value=found["context parallel"].ratio, at_most=1.05)


def outcomes(world: World, names: list[str]) -> dict[str, str]:
    """Return the first tensor of each architecture that differs from one device; empty where none does."""
    spec, found = mh.ContextParallel(world.size), {}
    for name in names:
        made = ARCHITECTURES[f"transformers.{name}"].network.task(0)
        plan = plan_of(made, spec)
        try:
            parts = take_steps(world, made, spec, plan)
            whole = take_steps(NullWorld(), made, mh.Single(), plan) if world.is_first else None
        except StrategyError as error:
            found[name] = f"refused: {error}"
            continue
        finally:
            world.barrier()
        if whole is not None:
            # Norms, rotary embeddings, softmax and losses of the library compute in single precision.
            whole.unit = 1.2e-7
            found[name] = next((f"{d.what} {d.error:.1e}" for d in compare(whole, parts) if d.is_real), "")
    return found


def architectures(report: Report) -> None:
    """Architectures that give the steps of one device."""
    names = NAMES[:3] if report.quick else NAMES
    found = on_ranks(partial(outcomes, names=names), 2)[0]
    equal = [name for name, difference in found.items() if not difference]
    report.notes["not_equal"] = {name: difference for name, difference in found.items() if difference}
    report.checks["equal_architectures"] = Check(value=len(equal), at_least=3 if report.quick else 16)


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("context", quick)
    memory(report)
    steps(report)
    architectures(report)
    report.finish()
    runtime.engine.close()


if __name__ == "__main__":
    main()
