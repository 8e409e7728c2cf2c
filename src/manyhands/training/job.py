"""Job: the description of a training run as plain data, and the result of one replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import StrategySpec, Task
from ..storage import Weights
from .callbacks import Callback
from .partial_state import COPY_EVERY
from .patience import Patience

if TYPE_CHECKING:
    from ..strategies import Layout

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in the folder of the run."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The description of a training run: plain data, the same on every replica."""

    task: Task
    spec: StrategySpec
    folder: Path
    epochs: int = 1
    steps: int | None = None
    """Ends the run after this many steps, even in mid-epoch."""
    resume: bool = False
    save_every: int | None = None
    """Steps between two checkpoints, in addition to those at epoch ends."""
    save_seconds: float = 0.0
    """Minimum seconds between checkpoints at epoch ends; 0 to follow what they cost. The run's end is always saved."""
    keep: int = 2
    copy_every: int = COPY_EVERY
    """Steps between two copies of a rank's exclusive shards into the memory of another rank."""
    callbacks: Sequence[Callback] = ()
    stop: Sequence[Patience] = ()
    """Ends the run when a metric that one of these watches stops improving."""
    start_from: Weights | None = None
    """Initial weights of a run that is not resumed."""
    layout: Layout | None = None
    """How layers are sharded, where that was found before any rank was started."""
    memory: int | None = None
    """Bytes that a replica may use on its device; None for all of it."""
    profile: int = 0
    """Every how many steps one step is profiled; 0 for none."""
    verify: bool = True
    """Whether the first steps are compared with those of one device before training."""
    sources: Mapping[str, str] | None = None
    """Digests of this host's modules, to compare them with those of the other hosts; None if there are none."""
    balance: bool | None = None
    """Whether the shares of a batch follow the replicas' speed; None for only where devices are of different kinds."""
    allow_different: bool = False
    """Whether hosts may have different code or data."""


@dataclass
class ReplicaResult:
    """The result of one replica's training."""

    num_steps: int
    metrics: dict[str, float]
    stopped: bool
    seconds: dict[str, float] = field(default_factory=dict)
    num_samples: int = 0
    servers: dict[str, Any] = field(default_factory=dict)
    """Under parameter servers: staleness of gradients, late gradients, and failed members."""
