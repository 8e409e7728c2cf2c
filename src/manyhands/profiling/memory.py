"""Memory of a step over time, by kind, measured on the storages that the step's operations create."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..distributed import message
from ..monitoring import Spans
from ..training import Hand

KINDS = ("parameters", "gradients", "optimizer state", "activations", "other")
MAX_POINTS = 300


@message
@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Bytes of memory by kind over a step.

    Moments are positions in the sequence of the step's allocations, releases and phase changes, from 0 to 1.
    """

    moments: tuple[float, ...]
    bytes: dict[str, tuple[int, ...]]
    phases: tuple[str, ...]
    """Phase of the rank at each moment, such as "forward"."""

    @property
    def totals(self) -> list[int]:
        """Bytes of all kinds together, at each moment."""
        return [sum(column) for column in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind at the moment with the most bytes."""
        totals = self.totals
        at = totals.index(max(totals))
        return {kind: sizes[at] for kind, sizes in self.bytes.items()}

    @property
    def peak_phase(self) -> str:
        """Phase of the rank at the moment with the most bytes."""
        totals = self.totals
        return self.phases[totals.index(max(totals))]


@dataclass
class _StorageLife:
    size: int
    born: int
    phase: str
    died: int | None = None
    is_kept: bool = False


class MemoryWatch(TorchDispatchMode):
    """Tracks every tensor storage that one step creates, from its creation to its release."""

    def __init__(self, hand: Hand) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hand = hand
        self._spans = _Following(self)
        self._phase = "idle"
        self._time = 0
        self._phases: list[str] = [self._phase]
        self._made: dict[int, tuple[StorageWeakRef, _StorageLife]] = {}
        self._lives: list[tuple[int, _StorageLife]] = []
        self._standing: dict[int, int] = {}
        """Bytes of gradient storages that existed before the step (communication buffers), by storage."""
        model = hand.model
        self._held = _storages([*model.parameters(), *model.buffers()])
        self._state = _storages(_state(hand))
        self._hooks = [o.register_step_pre_hook(self._look_at_gradients) for o in hand.optimizers.values()]

    def __enter__(self) -> MemoryWatch:
        self._hand.times.spans = self._spans
        return super().__enter__()  # type: ignore[no-untyped-call,no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hand.times.spans = None
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._let_go()
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def enter_phase(self, phase: str) -> None:
        """Record that the rank enters a phase; storages that outlive the forward phase are activations."""
        if self._phase == "forward" and phase != "forward":
            self._let_go()
            for _, life in self._made.values():
                life.is_kept = life.is_kept or life.phase == "forward"
        self._phase = phase
        self._tick()

    def _tick(self) -> None:
        self._time += 1
        self._phases.append(self._phase)

    def _note(self, tensor: Tensor) -> None:
        key = _key(tensor)
        known = self._made.get(key)
        if not key or (known is not None and not known[0].expired()) or key in self._held or key in self._state:
            return
        self._tick()
        storage = tensor.untyped_storage()
        life = _StorageLife(storage.nbytes(), self._time, self._phase)
        self._made[key] = (StorageWeakRef(storage), life)
        self._lives.append((key, life))

    def _let_go(self) -> None:
        freed = [key for key, (reference, _) in self._made.items() if reference.expired()]
        if freed:
            self._tick()
        for key in freed:
            life = self._made.pop(key)[1]
            life.died = self._time

    def _look_at_gradients(self, *_: Any) -> None:
        for parameter in self._hand.model.parameters():
            gradient = _local(parameter.grad)
            if gradient is None:
                continue
            key = _key(gradient)
            if key in self._made:
                self._made[key][1].phase = "gradients"
            elif key:
                self._standing[key] = gradient.untyped_storage().nbytes()

    def found(self) -> MemoryProfile:
        """Return the memory profile of the step that was tracked."""
        self._tick()
        held, state = self._held, self._state
        steps = [dict.fromkeys(KINDS, 0) for _ in range(self._time + 1)]
        for _, life in self._lives:
            kind = "gradients" if life.phase == "gradients" else "activations" if life.is_kept else "other"
            if life.phase == "optimizer" and life.died is None:
                kind = "optimizer state"
            steps[life.born][kind] += life.size
            if life.died is not None:
                steps[life.died][kind] -= life.size
        now = {
            "parameters": sum(held.values()),
            "gradients": sum(self._standing.values()),
            "optimizer state": sum(size for key, size in state.items() if key not in held),
            "activations": 0,
            "other": 0,
        }
        rows = []
        for change in steps:
            now = {kind: now[kind] + change[kind] for kind in KINDS}
            rows.append(now)
        return _thinned(rows, self._phases)


class _Following(Spans):
    """Spans that only notify a MemoryWatch of every change of phase."""

    def __init__(self, watch: MemoryWatch) -> None:
        self._watch = watch
        self._open = []

    def _mark(self, name: str) -> None:
        self._watch.enter_phase(name)


def _thinned(rows: list[dict[str, int]], phases: list[str]) -> MemoryProfile:
    """Return a profile of at most MAX_POINTS moments: of each interval, the moment with the most memory."""
    stretch = max(1, -(-len(rows) // MAX_POINTS))
    picked = []
    for start in range(0, len(rows), stretch):
        part = range(start, min(len(rows), start + stretch))
        picked.append(max(part, key=lambda at: sum(rows[at].values())))
    return MemoryProfile(
        moments=tuple(round(at / max(1, len(rows) - 1), 5) for at in picked),
        bytes={kind: tuple(rows[at][kind] for at in picked) for kind in KINDS},
        phases=tuple(phases[min(at, len(phases) - 1)] for at in picked),
    )


def _state(hand: Hand) -> Iterable[Any]:
    for optimizer in hand.optimizers.values():
        for values in optimizer.state.values():
            yield from values.values()


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, each once, by an identifier of the storage."""
    plain = [_local(tensor) for tensor in tensors]
    return {_key(t): t.untyped_storage().nbytes() for t in plain if t is not None and _key(t)}


def _local(tensor: Any) -> Tensor | None:
    """Return a tensor, or this rank's part of a DTensor; None if it is no tensor."""
    if not isinstance(tensor, Tensor):
        return None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _key(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage; 0 for tensors without a storage of their own."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
        return 0
    return int(tensor.untyped_storage()._cdata)
