"""Cache of parsed JSON headers before binary tensors. Clients repeat the same text, so it is parsed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..dtypes import Array, from_raw
from ..version import Version

MAX_BYTES = 4096
"""Maximum bytes of a text that is cached."""
_MAX_HEADS, _MAX_TEXTS = 64, 16
"""Maximum cached headers per version, and response texts per header."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RequestedOutputs:
    """Requested outputs, each as binary data or JSON, with the timeout and the priority."""

    id: str | None
    outputs: Mapping[str, bool]
    timeout: float | None
    priority: int
    classes: Mapping[str, int] = field(default_factory=dict)
    """Number of classes of outputs that are requested as such."""
    texts: dict[Shapes, bytes] = field(default_factory=dict, compare=False)
    """JSON of responses whose outputs are all binary, by their shapes."""

    def keep(self, shapes: Shapes, text: bytes) -> None:
        """Cache a response's JSON."""
        if len(self.texts) < _MAX_TEXTS:
            self.texts[shapes] = text


@dataclass(frozen=True)
class TensorSpan:
    """Position of an input's data in the bytes after the text, and its type."""

    name: str
    start: int
    stop: int
    kind: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """A parsed and validated header."""

    wanted: RequestedOutputs
    spans: Sequence[TensorSpan]

    def inputs(self, raw: memoryview) -> dict[str, Array]:
        """Return the arrays of a request, without copying."""
        return {span.name: from_raw(raw[span.start : span.stop], span.kind).reshape(span.shape) for span in self.spans}


class RequestHeads:
    """Cached headers of each version."""

    def __init__(self) -> None:
        self._heads: WeakKeyDictionary[Version, dict[tuple[bytes, int], Head]] = WeakKeyDictionary()

    def find(self, version: Version, text: bytes, num_raw: int) -> Head | None:
        """Return the cached header of a text followed by this many bytes, or None."""
        heads = self._heads.get(version)
        return None if heads is None else heads.get((text, num_raw))

    def keep(
        self, version: Version, text: bytes, order: Iterable[str], inputs: Mapping[str, Array], wanted: RequestedOutputs
    ) -> None:
        """Cache a text whose inputs all follow it as binary data in this order."""
        if wanted.id:
            # A request with an ID is unique.
            return
        spans, start = {}, 0
        for name in order:
            array = inputs[name]
            spans[name] = TensorSpan(name, start, start + array.nbytes, array.dtype, array.shape)
            start += array.nbytes
        heads = self._heads.setdefault(version, {})
        if len(heads) < _MAX_HEADS:
            heads[text, start] = Head(wanted, [spans[name] for name in inputs])
