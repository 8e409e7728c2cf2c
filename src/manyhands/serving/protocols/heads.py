"""What the JSON before binary tensors says. Clients send the same text again and again, so it is read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..dtypes import Array
from ..version import Version

MAX_BYTES = 4096
"""Of a text that is remembered."""
_MAX_HEADS, _MAX_TEXTS = 64, 16
"""Of a version, and of a wish; beyond that clients do not ask alike."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RequestedOutputs:
    """How an answer is wished for: which outputs, each as bytes or as JSON; by when, and how urgently."""

    id: str | None
    outputs: Mapping[str, bool]
    timeout: float | None
    priority: int
    texts: dict[Shapes, bytes] = field(default_factory=dict, compare=False)
    """The JSON of answers whose numbers are all bytes, by their shapes."""

    def keep(self, shapes: Shapes, text: bytes) -> None:
        """Remembers an answer's JSON."""
        if len(self.texts) < _MAX_TEXTS:
            self.texts[shapes] = text


@dataclass(frozen=True)
class TensorSpan:
    """Where an input's numbers lie in the bytes behind the text, and what they are."""

    name: str
    start: int
    stop: int
    kind: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """A text that was read and found good."""

    wanted: RequestedOutputs
    spans: Sequence[TensorSpan]

    def inputs(self, raw: memoryview) -> dict[str, Array]:
        """The arrays of a request, not copied."""
        return {
            span.name: np.frombuffer(raw[span.start : span.stop], span.kind).reshape(span.shape) for span in self.spans
        }


class RequestHeads:
    """The heads of each version."""

    def __init__(self) -> None:
        self._heads: WeakKeyDictionary[Version, dict[tuple[bytes, int], Head]] = WeakKeyDictionary()

    def find(self, version: Version, text: bytes, num_raw: int) -> Head | None:
        """What a text says with so many bytes behind it, where that is known."""
        heads = self._heads.get(version)
        return None if heads is None else heads.get((text, num_raw))

    def keep(
        self, version: Version, text: bytes, order: Iterable[str], inputs: Mapping[str, Array], wanted: RequestedOutputs
    ) -> None:
        """Remembers a text, with inputs that all lie behind it in this order."""
        if wanted.id:
            # It will not come again.
            return
        spans, start = {}, 0
        for name in order:
            array = inputs[name]
            spans[name] = TensorSpan(name, start, start + array.nbytes, array.dtype, array.shape)
            start += array.nbytes
        heads = self._heads.setdefault(version, {})
        if len(heads) < _MAX_HEADS:
            heads[text, start] = Head(wanted, [spans[name] for name in inputs])
