"""Options of `mh.tune` and `mh.ensemble`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import SettingsError, is_above_zero, option, require_positive

EXECUTIONS = ("stacked", "processes")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Search: how parameters are proposed, and when a trial is stopped early."""

    search: str = option("tpe", "Search algorithm: tpe (default), random, grid or cma.")
    stop: str | Any | None = option(
        None,
        "Stop bad trials early: asha, hyperband or median; in Python also a policy such as mh.tuning.ASHA(factor=4).",
    )
    seed: int = option(0, "Seed of the search; 0 by default. The seed of a trial is that of its task.")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget: limits of the time and cost of a study."""

    seconds: float | None = option(None, "Stop the study after this many seconds.")
    cost: float | None = option(None, "Stop the study at this cost; needs a price.")
    price: float | None = option(None, "Price of one device per hour.")

    def __post_init__(self) -> None:
        for name in ("seconds", "cost", "price"):
            value = getattr(self, name)
            if value is not None and not is_above_zero(value):
                raise SettingsError(f"{name} must be above 0", got=repr(value), remedy=f"pass {name}=..., or omit it")
        if self.cost is not None and self.price is None:
            raise SettingsError(
                "a cost limit needs the price of a device per hour", remedy="pass for example price=2.5"
            )

    def seconds_for(self, num_devices: int) -> float | None:
        """Return the seconds that a study may take on `num_devices` devices by its limits; None if there are none."""
        limits = [] if self.seconds is None else [self.seconds]
        if self.cost is not None and self.price is not None:
            limits.append(3600 * self.cost / (self.price * num_devices))
        return min(limits, default=None)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection: which trials may run, which of them can be the best, and which are kept."""

    constraint: Callable[[Mapping[str, Any]], bool] | None = None
    """Function of a trial's parameters that returns whether they may be tried; None allows all."""
    limits: Mapping[str, float] | None = None
    """Upper limits of metrics by name; a trial that exceeds one cannot be the best."""
    keep: int = option(
        1, "Number of best trials whose networks are kept, and which are trained to the end; 1 by default."
    )

    def __post_init__(self) -> None:
        require_positive(keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Execution: how networks are trained on the devices."""

    execution: str | None = option(
        None,
        "'stacked' trains many networks as one program on one device, 'processes' each in its own process; by default "
        "the faster one, by measurement.",
    )
    per_device: int | None = option(None, "Processes per device; by default measured.")

    def __post_init__(self) -> None:
        require_positive(per_device=self.per_device)
        if self.execution is not None and self.execution not in EXECUTIONS:
            raise SettingsError(
                f"execution must be {' or '.join(EXECUTIONS)}", got=repr(self.execution), remedy="choose one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Combining:
    """Outputs: what the members of an ensemble return together."""

    uncertainty: bool = option(
        False, "Add the members' spread and mutual information as additional outputs of predictions."
    )
    data: Any = None
    """Inputs and labels to which the combinations "weighted" and "stacked" are fitted; by default validation data."""
