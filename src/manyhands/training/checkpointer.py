"""Checkpointer: saves the state of a replica's training, and restores it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..storage import CheckpointStore, term_file
from .snapshot import restore_snapshot, share, take_snapshot

if TYPE_CHECKING:
    from .hand import Hand


class Checkpointer:
    """Writes checkpoints in the background, from the first rank, and restores the newest intact one on all ranks."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._stores: dict[Path, CheckpointStore] = {}
        self._has_copies = False
        """Whether this rank saves copies of the checkpoints, on another host than the first rank."""

    def save(self, path: str | Path, *, score: float | None = None, **state: Any) -> None:
        """Write a checkpoint in the background: network, optimizers, data position, random states, and `state`."""
        hand = self._hand
        with hand.times.timed("save"):
            hand.current.unsynchronized.agree()
            checkpoint = take_snapshot(hand, state)
            if hand.is_first or self._has_copies:
                self.store(path).save(checkpoint, score=score)

    def claim(self, path: str | Path) -> None:
        """Make the first rank the only writer.

        If the coordinator is elected, and hosts do not share a disk, a rank of another host saves copies on its disk.
        """
        hand, store, term = self._hand, self.store(path), self._hand.world.rank_info.term
        if hand.is_first:
            store.claim(term)
        if not term or hand.spec.num_devices != (hand.spec.replicas or 1) * hand.spec.context:
            return
        # The coordinator has claimed the folder on its disk for the term before it started the ranks.
        own = hand.world.rank_info.host, term_file(Path(path), term).exists()
        found = hand.world.gather_objects(own)
        without = (rank for rank, (host, is_shared) in enumerate(found) if host != found[0][0] and not is_shared)
        self._has_copies = next(without, None) == hand.rank
        if self._has_copies:
            store.claim()

    def restore(self, path: str | Path, *, before: int | None = None) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint, if given of a step before `before`.

        Returns the `state` that was saved; None if there is no checkpoint.
        """
        hand, store = self._hand, self.store(path)
        seen = hand.world.gather_objects([step for step in store.steps() if before is None or step < before])
        if not seen[0]:
            return None
        hand.num_restores += 1
        hand.current.unsynchronized.forget()
        if all(steps == seen[0] for steps in seen):
            return restore_snapshot(hand, store.load(before=before))
        # The checkpoints are on the disk of the first rank's host.
        return restore_snapshot(hand, share(hand.world, store.load(before=before) if hand.is_first else None, 0))

    def store(self, path: str | Path, *, keep: int = 2) -> CheckpointStore:
        """Return the checkpoint store at this path, opened once."""
        root = Path(path)
        if root not in self._stores:
            self._stores[root] = CheckpointStore(
                root,
                keep=keep,
                on_error=lambda error: self._hand.notice(
                    f"a checkpoint could not be written, but training continues: {error}"
                ),
                on_notice=self._hand.notice,
            )
        return self._stores[root]

    def close(self) -> None:
        """Wait for pending checkpoint writes."""
        for store in self._stores.values():
            store.close()
