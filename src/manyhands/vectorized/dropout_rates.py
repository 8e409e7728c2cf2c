"""Probabilities of dropout, which may differ between members although they stand in the network itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_ATTENTION = {
    nn.TransformerEncoderLayer: ("self_attn",),
    nn.TransformerDecoderLayer: ("self_attn", "multihead_attn"),
}
"""Attention whose weights are dropped inside; elsewhere it looks at its probability in Python."""


def chances(model: nn.Module) -> dict[str, float]:
    """The probabilities that each member may have of its own, by the layer's path and the attribute's name.

    One of 0 is no such number: nothing is drawn for it, and one of 1 drops everything.

    >>> chances(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0)))
    {'1.p': 0.1}
    """
    found: dict[str, float] = {}
    for path, layer in model.named_modules():
        start = f"{path}." if path else ""
        if type(layer) is nn.Dropout:
            found[f"{start}p"] = layer.p
        for name in _ATTENTION.get(type(layer), ()):
            found[f"{start}{name}.dropout"] = getattr(layer, name).dropout
    return {name: float(chance) for name, chance in found.items() if 0.0 < chance < 1.0}


@contextlib.contextmanager
def given_chances(model: nn.Module, numbers: Mapping[str, Tensor]) -> Iterator[None]:
    """The network with these probabilities, and its own ones afterwards."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in numbers]
    before = [getattr(layer, name) for layer, name in places]
    try:
        for (layer, name), number in zip(places, numbers.values(), strict=True):
            setattr(layer, name, number)
        yield
    finally:
        for (layer, name), own in zip(places, before, strict=True):
            setattr(layer, name, own)
