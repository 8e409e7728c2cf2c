"""Options of `mh.fit`; `mh.tune` and `mh.ensemble` take `Display` too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core import SettingsError, is_above_zero, option, require_positive


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints: the initial weights of a run, and what it saves."""

    start_from: str | Any | None = option(
        None,
        "Start with the weights of a run, a file, an exported model or a Hugging Face folder. Data order and optimizer "
        "start fresh. A resumed run uses its checkpoint instead.",
        metavar="PATH",
    )
    save_every: int | None = option(
        None,
        "Steps between checkpoints, in addition to those at epoch ends. By default checkpoints take at most 2% of the "
        "run's time, and at most five minutes of work are unsaved.",
    )
    keep: int = option(2, "Number of checkpoints to keep in addition to the best one; 2 by default.")

    def __post_init__(self) -> None:
        require_positive(save_every=self.save_every, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Logging: where a run's events are sent, which steps are profiled, and how the run is labelled.

    >>> Logging(tags="baseline, small", notes="wider layers").labels()
    {'tags': ['baseline', 'small'], 'notes': 'wider layers'}
    """

    log_to: str | Any | None = option(
        None,
        "Log to tensorboard, wandb, mlflow or csv; several separated by commas. In Python also an mh.monitoring.Sink, "
        "a function of an event, or a list.",
        metavar="NAMES",
    )
    profile: bool | int = option(
        False, "Profile one step in fifty (in Python also in another number); see manyhands profile RUN."
    )
    tags: str | Any | None = option(
        None,
        "Tags of the run, which the dashboard shows; several separated by commas. In Python also a list.",
        metavar="NAMES",
    )
    notes: str | None = option(None, "Notes about the run, which the dashboard shows.", metavar="TEXT")

    def labels(self) -> dict[str, Any]:
        """Return tags and notes for the record of a run."""
        words = self.tags.split(",") if isinstance(self.tags, str) else self.tags or []
        tags = [str(word).strip() for word in words if str(word).strip()]
        return {**({"tags": tags} if tags else {}), **({"notes": self.notes} if self.notes else {})}


@dataclass(frozen=True, kw_only=True)
class Display:
    """Display: what is printed while a function runs."""

    progress: bool | None = None
    """False displays nothing. By default, a terminal shows a live view, and any other output gets lines."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources: how much memory of the devices is used, and how batches are divided over unequal devices."""

    memory: str | int | None = option(None, "Memory limit of each replica on its device, such as 8GiB.")
    fit_in: str | int | None = option(
        None,
        "Memory such as 24GiB; recompute, accumulate, sharding and offload are chosen so that a step fits, at the "
        "least cost.",
    )
    balance: bool | None = option(
        None,
        "Give each replica a share of the batch that follows its measured speed. By default only if the devices are of "
        "different kinds.",
    )


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery: how failures are detected and survived."""

    timeout: float = option(
        300.0,
        "Seconds within which a healthy operation completes; a job in which one takes longer fails with a report. "
        "300 by default.",
        in_files=False,
    )

    copy_every: int = 100
    """Steps between copies of state that only one rank has to the memory of another rank."""

    def __post_init__(self) -> None:
        require_positive(copy_every=self.copy_every)
        if not is_above_zero(self.timeout):
            raise SettingsError("timeout must be above 0", got=repr(self.timeout), remedy="pass a number of seconds")


@dataclass(frozen=True, kw_only=True)
class Equality:
    """Equality: whether results are those of one device."""

    deterministic: bool = option(False, "Draw the same random numbers, including dropout, on any number of devices.")
    verify: bool = option(
        True,
        "Before training, compare the first two steps, in float64, with those of one device, if that takes at most a "
        "few seconds. A difference raises TaskError.",
    )
    allow_different: bool = option(
        False,
        "Let hosts have different code or data. By default, training on several hosts compares the source of the "
        "project's modules, the length of the data and some of its samples.",
    )
