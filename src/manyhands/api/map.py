"""Public function `map`: call a function on many inputs, in processes on all devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import tuning
from ..core import SettingsError, require_positive
from ..monitoring import make_view
from .runtime import On, runtime


def map(
    fn: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    on: On = None,
    per_device: int | None = None,
    progress: bool | None = None,
) -> list[Any]:
    """Call a function on many inputs, in processes on all devices, and return the results in the order of the inputs.

    With one device and `per_device=1` the function is called in this process. Ctrl-C stops all processes. In a process
    on a GPU, that GPU is the current device.

    Args:
        fn: Function of one input. The function and its results are sent to other processes, so they must be picklable.
        items: Inputs, which must be picklable too.
        on: Devices, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default those of this machine.
        per_device: Processes per device; by default the number with the highest throughput, by measurement.
        progress: False to display nothing.

    Raises:
        ItemsFailed: The function failed for some inputs; raised after all others are done. An input whose process dies
            is retried once.

    >>> import manyhands as mh
    >>> mh.map(lambda n: n * n, [1, 2, 3], on="cpu", per_device=1)
    [1, 4, 9]
    """
    if not callable(fn):
        raise SettingsError("mh.map needs a function", got=type(fn).__name__, remedy="pass a function of one input")
    require_positive(per_device=per_device)
    todo = list(items)
    if not todo:
        return []
    engine, devices, _ = runtime.find_devices(on)
    if len(devices) == 1 and per_device == 1 and engine is runtime.engine:
        return _mapped_here(fn, todo)
    view = make_view("map", progress, live=False)
    try:
        return tuning.map_items(fn, todo, engine, devices, per_device=per_device, on_output=view.output)
    finally:
        view.close()


def _mapped_here(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Call the function on the items in this process, so that a debugger works."""
    results: list[Any] = []
    failures: dict[int, BaseException] = {}
    for place, item in enumerate(items):
        try:
            results.append(fn(item))
        except (Exception, SystemExit) as error:
            results.append(None)
            failures[place] = error
    if failures:
        raise tuning.ItemsFailed(results, failures, items) from failures[min(failures)]
    return results
