"""Folder of a study: its trials from the journal, and the ensemble if its trials are the members of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..core import EVENTS, fields, parse_json
from .log_source import MOST_VALUES, LogSource, num_values
from .log_tail import Tail

JOURNAL = "journal.log"
STATES = ("running", "finished", "stopped", "failed")
"""States of trials; their positions are the codes in the journal."""
MOST_READ, MOST_REPORTS = 100_000, 10_000
"""Maximum number of trials of a study, and of reports of a trial, that are kept."""
LONGEST_REASON = 1000
"""Maximum characters of the reason for which a trial is retried."""
MOST_TRIALS = 2000
"""Maximum number of trials that a page receives: the best and the latest ones; a summary counts all trials."""


class StudyFolder(LogSource):
    """Folder of a study that `mh.tune` or `mh.ensemble` has written, with a journal in Optuna's format."""

    kind, lock = "study", JOURNAL

    def __init__(self, name: str, path: Path) -> None:
        self.study: dict[str, Any] = {}
        """The study's settings: search space, objectives and search method."""
        self.trials: list[dict[str, Any]] = []
        self.ranges: dict[str, dict[str, Any]] = {}
        self.counts = dict.fromkeys(STATES, 0)
        self.best: int | None = None
        self.ensemble: dict[str, Any] | None = None
        self._described = ""
        super().__init__(name, path)

    def _open(self) -> list[tuple[Tail, Any]]:
        return [(Tail(self.path / JOURNAL), self.take_line), (Tail(self.path / EVENTS), self.take_event)]

    @property
    def state(self) -> str:
        """One of running, interrupted or finished; a study without running trials is running while its lock is held."""
        if self.counts[STATES[0]]:
            return STATES[0] if self.is_alive else "interrupted"
        return STATES[0] if self.is_held else "finished"

    @property
    def objectives(self) -> list[list[str]]:
        """The objectives, each as its name and "min" or "max"."""
        return list(self.study.get("objectives") or [])

    def on_ensemble(self, entry: dict[str, Any]) -> None:
        self.ensemble = {name: value for name, value in entry.items() if name not in ("v", "kind")}

    def refresh(self) -> bool:
        # Lines of a journal have no times, so the modification time of the files is used.
        seen = super().refresh()
        self.changed = max((changed for changed, _ in self.signature), default=0) / 1e9
        return seen

    def take_line(self, line: dict[str, Any]) -> None:
        """Process a line of the journal; raise ValueError if it is not an entry of one."""
        if not fields.is_journal_line(line):
            raise ValueError("the line is not an entry of a journal")
        code = line["op_code"]
        if code != fields.REPORT and num_values(line) > MOST_VALUES:
            raise ValueError("the line has too many values to keep them")
        if code == fields.STUDY_ATTRIBUTE:
            self.study = line["user_attr"].get("manyhands", self.study)
        elif code == fields.CREATE_TRIAL:
            self._create(line)
        elif code == fields.REPORT:
            trial = self.trials[line["trial_id"]]
            if len(trial["reports"]) < MOST_REPORTS:
                trial["reports"].append([line["step"], line["intermediate_value"]])
            trial["seconds"] = line["seconds"]
        elif code == fields.TRIAL_ATTRIBUTE and "lease" in line["user_attr"]:
            worker = line["user_attr"]["lease"]["worker"]
            self.trials[line["trial_id"]]["worker"] = worker if fields.count(worker) else None
        elif code == fields.TRIAL_ATTRIBUTE and fields.text(line["user_attr"].get("killed")):
            trial = self.trials[line["trial_id"]]
            trial["kills"] += 1
            trial["reason"] = f"retried after attempt {trial['kills']}: {line['user_attr']['killed']}"[:LONGEST_REASON]
        elif code == fields.END_TRIAL:
            self._end(line)

    def _create(self, line: dict[str, Any]) -> None:
        """Add the trial of a journal line, and update the ranges of parameters."""
        number = len(self.trials)
        if number >= MOST_READ:
            raise ValueError("the study has too many trials")
        trial = {"number": number, "params": line["given"], "state": STATES[0], "values": [], "metrics": {}}
        trial |= {"reports": [], "seconds": 0.0, "reason": "", "feasible": True, "worker": None, "kills": 0}
        self.trials.append(trial)
        self.counts[STATES[0]] += 1
        described = json.dumps(line.get("distributions") or {})
        if described != self._described:
            self._described = described
            found = {name: parse_json(text.encode()) for name, text in (line.get("distributions") or {}).items()}
            self.ranges = {name: one for name, one in found.items() if _is_range(one)}

    def _end(self, line: dict[str, Any]) -> None:
        """Record the end of a trial from a journal line, and update the best trial."""
        trial = self.trials[line["trial_id"]]
        self.counts[trial["state"]] -= 1
        trial["state"] = STATES[line["state"]]
        self.counts[trial["state"]] += 1
        trial["values"], trial["metrics"] = line["values"] or [], line["metrics"]
        trial["seconds"], trial["feasible"] = line["seconds"], line["feasible"]
        trial["reason"] = line["reason"] or trial["reason"]
        is_fit = trial["state"] == STATES[1] and trial["feasible"]
        if is_fit and (self.best is None or self._cost(trial) < self._cost(self.trials[self.best])):
            self.best = trial["number"]

    def _cost(self, trial: dict[str, Any]) -> float:
        """Return the trial's value of the first objective, negated if it is maximized; infinity without a value."""
        sign = -1.0 if self.objectives and self.objectives[0][1] == "max" else 1.0
        return sign * float(trial["values"][0]) if trial["values"] else float("inf")

    def summary(self) -> dict[str, Any]:
        best = None if self.best is None else self.trials[self.best]
        is_of_seeds = list(self.study.get("space") or {}) == ["seed"]  # an ensemble trains its members so
        counts = self.counts
        if self.state == "interrupted":
            counts = {**counts, STATES[0]: 0, "interrupted": counts[STATES[0]]}
        return {
            **self.about(),
            "counts": counts,
            "objectives": self.objectives,
            "search": self.study.get("search") or "",
            "stop": self.study.get("stop"),
            "best": best,
            "is_ensemble": self.ensemble is not None or is_of_seeds,
            "is_search": not is_of_seeds,
        }

    def detail(self) -> dict[str, Any]:
        trials = self.trials
        if len(trials) > MOST_TRIALS:
            by_cost = sorted(trials, key=self._cost)
            chosen = {trial["number"] for trial in (*by_cost[: MOST_TRIALS // 2], *trials[-MOST_TRIALS // 2 :])}
            trials = [trial for trial in trials if trial["number"] in chosen]
        about = {"about": self.study, "ranges": self.ranges, "ensemble": self.ensemble, "num_trials": len(self.trials)}
        if self.state == "interrupted":
            trials = [{**trial, "state": "interrupted"} if trial["state"] == STATES[0] else trial for trial in trials]
        return {**self.summary(), **about, "trials": trials}


def _is_range(value: Any) -> bool:
    """Return whether a value from the journal has the form of a parameter's distribution."""
    return isinstance(value, dict) and isinstance(value.get("attributes"), dict)
