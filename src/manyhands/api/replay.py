"""Public function `replay`: repeat a step of a run on one device."""

from __future__ import annotations

from collections.abc import Sequence

from .. import training
from ..distributed import Device, resolve
from ..training import Replay, Run
from .runtime import current_device, own_randomness


def replay(run: Run, step: int, *, on: str | Sequence[Device] | None = None) -> Replay:
    """Repeat a step of a run on one device and compare its losses, to find corrupt replicas and bad samples.

    The repetition starts from the nearest checkpoint before that step, or from the beginning of the run.

    Args:
        run: The run with its task, as in `mh.Run(path, task)`.
        step: Number of a step that the run has completed.
        on: The device, such as "cuda:0"; by default one of this machine.
    """
    devices, _ = resolve(on, 1)
    with own_randomness(), current_device(devices[0].torch):
        return training.replay(run, step, devices[0])
