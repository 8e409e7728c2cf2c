"""Event logs as `fit` writes them, for tests in which a real run would be slow or cannot produce the event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyhands.core import EVENTS, EventLog

RECORD = {"spec": {"replicas": 2}, "devices": ["cpu#0", "cpu#1"], "params": {"lr": 0.1}, "batch_size": 8, "task": "t"}
NOON = 1_800_000_000.0


class Written:
    """A run's folder that is written event by event; a second passes between two of them."""

    def __init__(self, path: Path, **record: Any) -> None:
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps({**RECORD, **record}))
        self.path, self.t = path, NOON
        self._log = EventLog(path / EVENTS)

    def say(self, kind: str, **values: Any) -> None:
        """One event."""
        self.t += 1.0
        self._log.write({"v": 1, "t": self.t, "kind": kind, **values})

    def start(self, step: int = 0, total: int = 100) -> None:
        self.say("start", total=total, epochs=1, parameters=10, step=step)

    def steps(self, losses: dict[int, float]) -> None:
        """Steps with their losses."""
        told = {"epoch": 0, "samples_per_second": 1.0, "lr": {"": 0.01}}
        self.say("steps", steps=list(losses), losses={"loss": list(losses.values())}, **told)

    def waits(self, rank: int, memory: int = 1 << 20, **seconds: float) -> None:
        where = {"rank": rank, "host": "host1", "device": f"cpu#{rank}"}
        self.say("waits", **where, seconds={"total": sum(seconds.values()), **seconds}, limit="", memory=memory)

    def close(self) -> None:
        self._log.close()


def a_run(path: Path, losses: dict[int, float] | None = None, **record: Any) -> None:
    """A run from its beginning to its end."""
    run = Written(path, **record)
    run.start()
    run.steps(losses or {1: 1.0, 2: 0.5})
    run.say("end", step=2, stopped=False, seconds={})
    run.close()
