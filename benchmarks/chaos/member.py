"""A member of the cluster under test: `python -m benchmarks.chaos.member FOLDER STEPS STALENESS`.

Its role is in the environment variable TF_CONFIG. With `alone` as staleness it trains the same on one device.
"""

from __future__ import annotations

import sys

import manyhands as mh

from .work import task

TIMEOUT = 30.0
ALONE = "alone"


def main() -> None:
    """Run the member until the run ends."""
    folder, steps, staleness = sys.argv[1:]
    if staleness == ALONE:
        spec = mh.Single(precision="fp64")
    else:
        spec = mh.ParameterServer(staleness=None if staleness == "none" else int(staleness), precision="fp64")
    mh.fit(
        task(norm=False, workers=0),
        spec,
        on="cpu",
        epochs=100_000,
        steps=int(steps),
        folder=folder,
        name="ps",
        resume="auto",
        options=[mh.options.Recovery(timeout=TIMEOUT), mh.options.Checkpoints(save_every=25)],
    )


if __name__ == "__main__":
    main()
