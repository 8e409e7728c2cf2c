"""The process that runs cells: one after another, on ranks that the product's own engine forks from its zygote."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings

import torch

import manyhands as mh
from manyhands import verbs

from .cell import References, run_cell
from .networks import find

PRELOAD = ["transformers", "torch.export._trace", "sympy.physics.units", "benchmarks.matrix.networks"]


def serve() -> None:
    """Read cells as JSON lines from standard input and write their outcome as JSON lines to standard output."""
    # What networks and the product print must not get between the lines of results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    verbs._engine._preload += PRELOAD
    references = References()
    with contextlib.closing(verbs._engine):
        mh.launch(lambda hand: hand.rank, mh.Mirrored(2), on="cpu*2", progress=False, timeout=300)
        answers.write("ready\n")
        answers.flush()
        for line in sys.stdin:
            asked = json.loads(line)
            cell = run_cell(
                find(asked["network"]), asked["strategy"], asked["seed"], references, checks=asked["checks"]
            )
            answers.write(json.dumps(cell.to_dict()) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
