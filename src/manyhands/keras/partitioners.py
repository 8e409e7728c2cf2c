"""Variable partitioners of tf.distribute: accepted and ignored, because each server stores whole variables."""

from __future__ import annotations

from .options import KerasOption


class FixedShardsPartitioner(KerasOption):
    """Ignored: would split each variable into a fixed number of shards."""


class MinSizePartitioner(KerasOption):
    """Ignored: would split variables into shards of a minimum size in bytes."""


class MaxSizePartitioner(KerasOption):
    """Ignored: would split variables into shards of a maximum size in bytes."""
