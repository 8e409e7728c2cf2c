"""Call a function on many inputs, in processes on devices (`mh.map`)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..core import RunError
from ..distributed import Device, World
from ..launcher import Engine
from .pool import Pool

MAX_LOST = 2
"""Number of times that the process of an item dies until the item counts as failed."""


class ItemsFailed(RunError):
    """Raised if the function failed for some items.

    `results` has the results in the order of the items, with None for failed ones; `failures` has the errors by
    position.
    """

    def __init__(self, results: list[Any], failures: Mapping[int, BaseException], items: Sequence[Any]) -> None:
        self.results, self.failures, self.items = results, dict(failures), list(items)
        first = min(failures)
        shown = "\n".join(
            f"item {place} ({_brief(repr(items[place]))}): {_brief(_describe_error(failures[place]))}"
            for place in sorted(failures)
        )
        super().__init__(
            f"{len(failures)} of {len(items)} items failed; .results has the others\n{shown}\n\nthe first one:\n"
            f"{_describe_error(failures[first])}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.results, self.failures, self.items)


def map_items(
    fn: Callable[[Any], Any],
    items: Iterable[Any],
    engine: Engine,
    devices: Sequence[Device],
    *,
    per_device: int | None,
    on_output: Callable[[int, str, str], None],
) -> list[Any]:
    """Call `fn` on each item, in a pool of processes; return the results in the order of the items.

    Args:
        fn: The function.
        items: Its inputs.
        engine: Starts the processes.
        devices: The devices to use.
        per_device: Number of processes per device; None finds the fastest by measurement.
        on_output: Called with the rank, the text and the stream of each line that a process prints.

    Raises:
        ItemsFailed: The function failed for some items; raised after all items are done.
    """
    todo = list(items)
    results: list[Any] = [None] * len(todo)
    failures: dict[int, BaseException] = {}
    lost: Counter[int] = Counter()
    waiting = deque(range(len(todo)))
    pool: Pool[int] = Pool(engine, _FunctionCaller(fn), devices, per_device=per_device, on_output=on_output)
    try:
        while waiting or pool.is_busy:
            while waiting and pool.num_free:
                place = waiting.popleft()
                pool.start(place, "call", todo[place])
            for done in pool.wait():
                lost[done.key] += done.is_lost
                if done.error is None:
                    results[done.key] = done.result
                elif done.is_lost and lost[done.key] < MAX_LOST:
                    waiting.append(done.key)
                else:
                    failures[done.key] = done.error
    finally:
        pool.close()
    if failures:
        raise ItemsFailed(results, failures, todo)
    return results


class _FunctionCaller:
    """The object in a process of the pool whose method `call` calls the function on an item."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self._fn = fn

    def __call__(self, world: World) -> _FunctionCaller:
        return self

    def call(self, item: Any) -> Any:
        """Return the function's result for one item."""
        return self._fn(item)


def _describe_error(error: BaseException) -> str:
    """Return an error's message, or the name of its type if it has no message."""
    return str(error) or type(error).__name__


def _brief(text: str, length: int = 80) -> str:
    text = text.splitlines()[0]
    return text if len(text) <= length else text[: length - 1] + "…"
