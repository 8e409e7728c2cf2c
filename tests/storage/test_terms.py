"""Claims of elected coordinators: whatever is written under an earlier term is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhands.core import CheckpointError
from manyhands.storage import CheckpointStore, TermClaim
from manyhands.storage.checkpoint_format import Checkpoint


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step=step, model={"w": torch.ones(2)})


def test_coordinator_of_an_earlier_term_cannot_claim_and_its_ranks_cannot_write(tmp_path: Path) -> None:
    errors: list[Exception] = []
    old = TermClaim(tmp_path, 7)
    old.take()
    stale = CheckpointStore(tmp_path, on_error=errors.append)
    stale.claim(7)
    stale.save(checkpoint(1))
    stale.wait()
    assert stale.steps() == [1]
    assert not errors
    assert old.is_latest

    new = TermClaim(tmp_path, 8)
    new.take()
    assert (old.is_latest, new.is_latest) == (False, True)
    stale.save(checkpoint(2))
    stale.wait()
    assert "only the latest writer" in str(errors.pop())
    with pytest.raises(CheckpointError, match="coordinator of term 7, after one of term 8"):
        stale.claim(7)
    for term in (7, 8):
        with pytest.raises(CheckpointError, match="only the latest elected coordinator"):
            TermClaim(tmp_path, term).take()

    fresh = CheckpointStore(tmp_path, on_error=errors.append)
    fresh.claim(8)
    fresh.save(checkpoint(3))
    fresh.close()
    assert fresh.steps() == [1, 3]
    assert new.is_latest
    assert not errors
    stale.close()


def test_writer_without_a_term_continues_a_run_that_had_coordinators(tmp_path: Path) -> None:
    TermClaim(tmp_path, 3).take()
    with CheckpointStore(tmp_path) as store:
        store.claim()
        store.save(checkpoint(1))
    assert store.steps() == [1]
