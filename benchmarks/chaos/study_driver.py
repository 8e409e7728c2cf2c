"""The program of the study under test: `python -m benchmarks.chaos.study_driver FOLDER TRIALS`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import manyhands as mh

SPACE = {"x": mh.tuning.uniform(-5.0, 5.0), "y": mh.tuning.loguniform(1e-3, 10.0)}
PACE = 0.4
"""Seconds of a trial, until the file named by the environment variable HURRY exists."""


def bowl(x: float = 0.0, y: float = 1.0) -> float:
    """Return the value to minimize, and append a line to a file for each call."""
    if not Path(os.environ["HURRY"]).exists():
        time.sleep(PACE)
    return (x - 2) ** 2 + (y - 0.1) ** 2


def main() -> None:
    """Run the study, or resume it."""
    folder, trials = sys.argv[1:]
    mh.tune(
        bowl,
        SPACE,
        trials=int(trials),
        name="study",
        folder=folder,
        on="cpu*2",
        resume="auto",
        options=mh.options.Algorithm(search="random"),
    )


if __name__ == "__main__":
    main()
