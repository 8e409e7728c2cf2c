"""The process that runs cells: one after another, on ranks that the product's own engine forks from its zygote."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import warnings
from typing import TextIO

import torch

import manyhands as mh
from manyhands.api.runtime import runtime

from .cell import References, run_cell
from .networks import find

PRELOAD = [
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "torch.export._trace",
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._inductor.sizevars",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch.fx.experimental.validator",
    "sympy.physics.units",
    "manyhands.core.random_operations",
    "manyhands.strategies.by_block",
    "manyhands.strategies.sharded",
    "manyhands.strategies.tensor",
    "benchmarks.matrix.architectures",
    "benchmarks.matrix.classics",
    "benchmarks.matrix.field",
    "benchmarks.matrix.frontier",
    "benchmarks.matrix.habits",
    "benchmarks.matrix.idioms",
    "benchmarks.matrix.modules",
    "benchmarks.matrix.networks",
    "benchmarks.matrix.repositories",
    "benchmarks.matrix.research",
    "benchmarks.matrix.scripts",
    "benchmarks.matrix.stages",
]


def serve() -> None:
    """Read cells as JSON lines from standard input and write their outcome as JSON lines to standard output."""
    # What networks and the product print must not get between the lines of results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    runtime.engine._preload += PRELOAD
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    references = References()
    mh.launch(lambda hand: hand.rank, mh.Mirrored(2), on="cpu*2", progress=False, timeout=300)
    _answer(answers, "ready")
    while True:
        asked = json.loads(lines.get())
        entry = find(asked["network"])
        cell = run_cell(entry, asked["strategy"], asked["seed"], references, checks=asked["checks"])
        _answer(answers, json.dumps(cell.to_dict()))


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Hand lines on; when the runner is gone, end this process, even in the middle of a cell that hangs."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _answer(answers: TextIO, line: str) -> None:
    answers.write(f"{line}\n")
    answers.flush()


if __name__ == "__main__":
    serve()
