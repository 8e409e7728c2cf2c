"""Public function `launch`: run a training function once per replica."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

from .. import training
from ..core import StrategySpec
from ..distributed import DEFAULT_TIMEOUT, World
from ..monitoring import make_view
from ..training import Hand
from .recording import describe_devices, launch_names
from .runtime import Where, lease, runtime


def launch(
    fn: Callable[[Hand], Any],
    strategy: StrategySpec | str | None = None,
    *,
    on: Where = None,
    progress: bool | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    deterministic: bool = False,
) -> list[Any]:
    """Run `fn(hand)` once per rank, and return the results in rank order.

    If a rank or its host fails, all ranks restart `fn`. In it `hand.restore` resumes from the last `hand.save`, and
    `mh.fit` resumes its run. After three restarts without a new step the job fails. An exception that `fn` raises ends
    the job.

    Args:
        fn: Function of a Hand, the handle of the rank's replica.
        strategy: Strategy, as for `mh.fit`.
        on: Devices, as for `mh.fit`.
        progress: False to display nothing.
        timeout: Seconds within which a healthy operation completes.
        deterministic: Whether the network, code in `with hand.scope():`, and functions passed to `hand.minimize` draw
            the same random numbers on any number of replicas.

    >>> launch(lambda hand: hand.rank, "single", on="cpu")
    [0]
    """
    with runtime.joined(on, strategy, timeout, progress) as on:
        spec, devices, notices = runtime.settle(strategy, on, deterministic=deterministic, timeout=timeout)
        view = make_view(f"{spec} on {describe_devices(devices)}", progress, live=False)
        for text in notices:
            view.line(text)
        try:
            with lease(on, devices, getattr(fn, "__name__", ""), view.line):
                work = functools.partial(_with_hand, fn=fn, spec=spec, launch=secrets.token_hex(8))
                return runtime.start(work, devices, timeout, view.show, view, on=on, after_loss="restart")
        finally:
            view.close()


def _with_hand(world: World, fn: Callable[[Hand], Any], spec: StrategySpec, launch: str) -> Any:
    """Call a training function on this rank with a new `Hand`, and close the hand at the end."""
    hand = Hand(world, spec)
    hand.progress.is_on = True
    launch_names[:] = [launch]
    try:
        with training.holding(hand):
            return fn(hand)
    finally:
        launch_names.clear()
        hand.close()
