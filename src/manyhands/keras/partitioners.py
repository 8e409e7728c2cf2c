"""Ways to cut variables over servers: taken, and not needed, because whole variables are dealt out by their size."""

from __future__ import annotations

from .options import Option


class FixedShardsPartitioner(Option):
    """A number of parts."""


class MinSizePartitioner(Option):
    """Parts of at least some bytes."""


class MaxSizePartitioner(Option):
    """Parts of at most some bytes."""
