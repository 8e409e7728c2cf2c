"""Dropout probabilities, which may differ between members although they are attributes of the network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_ATTENTION = {
    nn.TransformerEncoderLayer: ("self_attn",),
    nn.TransformerDecoderLayer: ("self_attn", "multihead_attn"),
}
"""Attention submodules whose dropout may differ by member; elsewhere attention reads its probability in Python."""


def chances(model: nn.Module) -> dict[str, float]:
    """Return the dropout probabilities that may differ by member, by layer path and attribute name.

    Probabilities of 0, which draw nothing, and of 1, which drop everything, are not among them.

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
    """Set these probabilities on the network inside this context, and restore its own afterwards."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in numbers]
    before = [getattr(layer, name) for layer, name in places]
    try:
        for (layer, name), number in zip(places, numbers.values(), strict=True):
            setattr(layer, name, number)
        yield
    finally:
        for (layer, name), own in zip(places, before, strict=True):
            setattr(layer, name, own)
