"""ReplicaComparison: periodic comparison of the replicas' parameters and buffers."""

from __future__ import annotations

from ..core import ReplicasDiffer
from .hand import Hand

COMPARE_EVERY = 1000
"""Steps between two comparisons of the replicas."""


class ReplicaComparison:
    """Compares the replicas every `COMPARE_EVERY` steps; a difference of parameters ends the run."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.next_step = 0
        """The step from which on the replicas are compared, as soon as they agree."""
        self.differing_buffers: set[str] = set()
        """Buffers that have differed between the replicas; those of the first replica are used."""

    def run(self) -> None:
        """Raise if parameters differ between replicas; report differing buffers. A collective on all replicas."""
        hand = self._hand
        self.next_step = (hand.num_steps // COMPARE_EVERY + 1) * COMPARE_EVERY
        different = hand.replica.differences()
        buffers = dict(hand.model.named_buffers())
        for text in [text for text in different if text.split(" ")[0] in buffers]:
            different.remove(text)
            name = text.split(" ")[0]
            if name not in self.differing_buffers:
                hand.notice(
                    f"the buffer {name} is not synchronized over the replicas: that of the first replica is used"
                )
            self.differing_buffers.add(name)
        if different:
            raise ReplicasDiffer(
                f"after step {hand.num_steps} the replicas differ in {', '.join(different[:5])}: a parameter was "
                "changed outside of the optimizer, a buffer is not synchronized, or memory was corrupted"
            )
