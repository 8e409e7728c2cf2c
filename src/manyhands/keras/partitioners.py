"""Ways to cut variables over servers: taken, and not needed, because whole variables are dealt out by their size."""

from __future__ import annotations

from .options import KerasOption


class FixedShardsPartitioner(KerasOption):
    """A number of parts."""


class MinSizePartitioner(KerasOption):
    """Parts of at least some bytes."""


class MaxSizePartitioner(KerasOption):
    """Parts of at most some bytes."""
