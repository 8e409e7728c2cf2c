"""Dropout probabilities, which may differ between stacked networks although they are Python attributes of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_ATTENTION = {
    nn.TransformerEncoderLayer: ("self_attn",),
    nn.TransformerDecoderLayer: ("self_attn", "multihead_attn"),
}
"""By type of layer, its attention modules whose dropout may differ between members.

Other attention modules read the probability as a Python number, which all members must share.
"""


def chances(model: nn.Module) -> dict[str, float]:
    """Return the dropout probabilities of a network that may differ between members, by layer path and attribute.

    Probabilities of 0 (nothing is drawn) and 1 (everything is dropped) are omitted.

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
    """Context in which the network has the dropout probabilities in `numbers`, by the names that `chances` returns."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in numbers]
    before = [getattr(layer, name) for layer, name in places]
    try:
        for (layer, name), number in zip(places, numbers.values(), strict=True):
            setattr(layer, name, number)
        yield
    finally:
        for (layer, name), own in zip(places, before, strict=True):
            setattr(layer, name, own)
