"""Plans: the strategies for a workload ranked by predicted cost, the best one, and plans compared over clusters."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core import (
    SettingsError,
    StrategyError,
    StrategySpec,
    event,
    format_bytes,
    format_duration,
    keep_event,
)
from .clusters import Cluster
from .curve import Curve, Curves
from .estimate import estimate
from .many_networks import ManyNetworksEstimate, One, many
from .memory import USABLE_SHARE
from .search import PlanOption, Search
from .target import FACTORS, SAMPLES, BatchOption, batch_options, recommended, resources
from .workload import Workload, is_lossy, relative_steps, steps_needed

Measure = Callable[[StrategySpec], float | str]
"""Function that measures steps under a spec on the available hardware; returns their seconds, or why it failed."""
BANDS = {"measured": 0.05, "calibrated": 0.15, "catalogue": 0.3, "transferred": 1.0}
"""Relative error that nine of ten predicted times do not exceed, by the evidence for them.

"measured": the strategy was tried. "calibrated": constants were fitted to steps on this hardware. "catalogue": they
are from the catalogue. "transferred": steps were measured on other hardware.
"""
SUFFIX = ".toml"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The strategies for a workload on a cluster with their predicted costs, fastest first.

    `plan.best` is the recommended strategy, `plan.show()` prints the table and the saturation curve, and
    `plan.save_html(path)` writes both as a page.
    """

    name: str
    workload: Workload
    cluster: Cluster
    options: tuple[PlanOption, ...]
    control: PlanOption
    """Plain data parallel, the baseline with which the recommended strategy is compared."""
    alone: float
    """Seconds of a step on one device."""
    curve: Curve
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    num_networks: int = 1
    ways: tuple[ManyNetworksEstimate, ...] = ()
    """Ways to train `num_networks` such networks, fastest first; empty for a single network."""

    @property
    def best(self) -> Pick:
        """The recommended strategy: the fastest that fits and can run, among the measured ones if there are any."""
        able = [option for option in self.options if option.can_run]
        tried = [option for option in able if option.measured is not None]
        return Pick(option=min(tried or able, key=lambda option: option.seconds), plan=self)

    @property
    def band(self) -> float:
        """Relative error that nine of ten predicted times do not exceed."""
        return BANDS[self.evidence]

    @property
    def evidence(self) -> str:
        """The evidence for predicted times: "calibrated", "catalogue", or "transferred" from other hardware."""
        if self.cluster.measured:
            return "calibrated"
        return "transferred" if self.workload.network(self.best.spec.precision).is_measured else "catalogue"

    def close(self) -> list[PlanOption]:
        """Return strategies that may be as fast as the best: their predicted times differ by less than `band`.

        Empty if the best strategy was measured.
        """
        best = self.best.option
        if best.measured is not None:
            return []
        most = best.seconds * (1 + self.band)
        return [
            option for option in self.options if option.can_run and option.spec != best.spec and option.seconds < most
        ]

    def efficiency(self, option: PlanOption) -> float:
        """Return the speed-up of a strategy over one device, divided by its number of devices."""
        devices = 1 if self.cluster.shared else option.estimate.num_devices
        return self.alone / option.seconds / devices

    def hours(self, option: PlanOption, samples: float = SAMPLES) -> float:
        """Return the hours of training on `samples` samples under a strategy."""
        return option.seconds * samples / self.workload.batch_size / 3600

    def cost(self, option: PlanOption, samples: float = SAMPLES) -> float | None:
        """Return the price of training on `samples` samples under a strategy; None if the cluster has no price."""
        return resources(self.cluster, option.estimate.num_devices, self.hours(option, samples))[0]

    def energy(self, option: PlanOption, samples: float = SAMPLES) -> float | None:
        """Return the kilowatt-hours of training on `samples` samples under a strategy; None if they are unknown.

        It is the energy of the devices at their thermal design power, without hosts, network and cooling.
        """
        return resources(self.cluster, option.estimate.num_devices, self.hours(option, samples))[1]

    def steps_over_least(self) -> float | None:
        """Return the number of steps to a target loss, relative to an infinitely large batch.

        None if the gradient noise scale is unknown.
        """
        return None if self.workload.noise is None else steps_needed(self.workload.batch_size, self.workload.noise)

    def to_target(self) -> dict[int, float]:
        """Return the time to a target loss by batch size, on these devices and relative to the task's batch size.

        The number of steps is calculated from the gradient noise scale, and the seconds of a step are predicted. Empty
        if the noise scale is unknown.
        """
        if self.workload.noise is None:
            return {}
        spec, batch_size = self.best.spec, self.workload.batch_size
        found = {}
        for factor in FACTORS:
            size = round(factor * batch_size)
            if size < spec.num_parts * spec.accumulate * spec.microbatches:
                continue
            made = estimate(replace(self.workload, batch_size=size), self.cluster, spec)
            if made.fits:
                found[size] = relative_steps(size, batch_size, self.workload.noise) * made.seconds
        return {size: time / found[batch_size] for size, time in found.items()} if batch_size in found else {}

    def batches(self, samples: float = SAMPLES) -> list[BatchOption]:
        """Return the time, price and energy to a target loss for several batch sizes and numbers of devices.

        The target is the loss that `samples` samples reach with the task's batch size. Empty if the gradient noise
        scale is unknown; `with_noise` sets it.
        """
        best = self.best.option
        predicted = estimate(self.workload, self.cluster, best.spec).seconds
        return batch_options(self.workload, self.cluster, best.spec, factor=best.seconds / predicted, samples=samples)

    def recommended_batch(self) -> BatchOption | None:
        """Return the batch size and number of devices that reach a target soonest, among those that pay.

        None if nothing is worth a change, or if the gradient noise scale is unknown.
        """
        best = self.best.option
        return recommended(self.batches(), self.workload.batch_size, best.estimate.num_devices)

    def with_noise(self, noise: float) -> Plan:
        """Return the plan with a gradient noise scale in samples, for example from a plan for this machine.

        >>> import torch, manyhands as mh
        >>> task = mh.Task(
        ...     model=lambda: torch.nn.Linear(512, 512),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data=torch.ones(64, 512),
        ...     batch_size=64,
        ... )
        >>> plan = mh.plan(task, "2 A100, $2/h").with_noise(64)
        >>> plan.steps_over_least()
        2.0
        """
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not noise >= 0:
            raise SettingsError(
                "a gradient noise scale must be a number of samples, at least 0",
                got=repr(noise),
                remedy="pass for example 1000, or mh.plan(task).workload.noise, which is measured on this machine",
            )
        workload = replace(self.workload, noise=float(noise))
        return replace(self, workload=workload, curve=Curves(workload, self.cluster, self.best.spec).draw())

    def show(self, *, most: int = 12) -> None:
        """Print the table, with at most `most` strategies, and the saturation curve."""
        from .report import show

        show(self, most=most)

    def save_html(self, path: str | Path) -> None:
        """Write a standalone HTML page with the table and the saturation curve."""
        from .html_report import html

        Path(path).write_text(html(self), encoding="utf-8")

    def save_svg(self, path: str | Path) -> None:
        """Write the saturation curve as an SVG image."""
        from .html_report import svg

        Path(path).write_text(svg(self.curve, self.cluster.num_devices), encoding="utf-8")

    def log(self, folder: str | Path) -> None:
        """Append the plan to the event log in `folder`, which the dashboard shows."""
        keep_event(folder, event("plan", **self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "task": self.name,
            "cluster": str(self.cluster),
            "assumed": list(self.cluster.assumed),
            "band": self.band,
            "evidence": self.evidence,
            "close": [str(option.spec) for option in self.close()],
            "alone": self.alone,
            "batch_size": self.workload.batch_size,
            "best": str(self.best.spec),
            "control": str(self.control.spec),
            "options": [self._row(option) for option in self.options],
            "curve": {
                "devices": [point.num_devices for point in self.curve.points],
                "speedup": [round(point.speedup, 3) for point in self.curve.points],
                "saturates": self.curve.saturates,
                "reason": self.curve.reason,
                "remedies": [vars(remedy) for remedy in self.curve.remedies],
            },
            "noise": self.workload.noise,
            "to_target": self.to_target(),
            "batches": [_batch_row(one) for one in self.batches()],
            **self.summary(),
            "networks": [vars(way) for way in self.ways],
            "notes": list(self.notes),
        }

    def summary(self, samples: float = SAMPLES) -> dict[str, Any]:
        """Return devices, hours, price and energy of the recommended strategy, and the error of its time."""
        best = self.best.option
        return {
            "devices": best.estimate.num_devices,
            "samples_per_second": self.workload.batch_size / best.seconds,
            "hours_per_million_samples": self.hours(best, samples),
            "cost_per_million_samples": self.cost(best, samples),
            "currency": self.cluster.currency,
            "energy_per_million_samples": self.energy(best, samples),
            "error": BANDS["measured"] if best.measured is not None else self.band,
        }

    def _repr_html_(self) -> str:
        from .html_report import table

        return table(self)

    def _row(self, option: PlanOption) -> dict[str, Any]:
        made = option.estimate
        return {
            "strategy": str(option.spec),
            "devices": made.num_devices,
            "seconds": option.seconds,
            "measured": option.measured,
            "parts": made.parts(),
            "memory": made.memory.total,
            "fits": made.fits,
            "refused": option.refused,
            "samples_per_second": made.batch_size / option.seconds,
            "efficiency": self.efficiency(option),
            "hours_per_million_samples": self.hours(option),
            "cost_per_million_samples": self.cost(option),
            "energy_per_million_samples": self.energy(option),
        }


def _batch_row(one: BatchOption) -> dict[str, Any]:
    return {**vars(one), "spec": str(one.spec), "hours": one.hours}


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The recommended strategy of a plan.

    Train with it by `fit(task, plan.best.spec)`, or write it by `plan.best.save("plan.toml")`, edit the file, and train
    by `fit(task, "plan.toml")`.
    """

    option: PlanOption
    plan: Plan

    @property
    def spec(self) -> StrategySpec:
        """The spec of the recommended strategy, for `fit`."""
        return self.option.spec

    @property
    def seconds(self) -> float:
        """Seconds of a step under the strategy, measured if it was tried, else predicted."""
        return self.option.seconds

    @property
    def why(self) -> str:
        """Why the strategy is recommended, as one sentence."""
        control = self.plan.control
        how = "measured" if self.option.measured is not None else "predicted"
        if self.spec == control.spec:
            return f"plain data parallel is the fastest, {how}: {format_duration(self.seconds)} a step"
        if not control.can_run:
            return f"plain data parallel does not fit; this does: {format_duration(self.seconds)} a step, {how}"
        gain = control.seconds / self.seconds
        return f"{format_duration(self.seconds)} a step, {how}: {gain:.2f} times plain data parallel"

    def save(self, path: str | Path) -> Path:
        """Write the strategy as a TOML file, which can be edited and passed to `fit`; return its path."""
        plan = self.plan
        lines = [
            f"# {self.why}",
            f'strategy = "{self.spec}"',
            "",
            "[plan]",
            f'task = "{plan.name}"',
            f'cluster = "{plan.cluster}"',
            f'network = "{plan.fingerprint}"',
            f"batch_size = {plan.workload.batch_size}",
            f"milliseconds = {1e3 * self.seconds:.4g}",
        ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return Path(path)


def read_plan(path: str | Path) -> tuple[StrategySpec, str]:
    """Return the strategy in a plan file, and the fingerprint of the network for which it was made.

    The fingerprint is empty if the file has none.

    Raises:
        SettingsError: The file cannot be read, is not valid TOML, or has no strategy.
    """
    remedy = 'write one with mh.plan(task).best.save("plan.toml")'
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError("a plan file must be valid TOML", got=f"{path}: {error}", remedy=remedy) from None
    strategy = values.get("strategy")
    if not isinstance(strategy, str):
        raise SettingsError("a plan file must contain a strategy", got=f"{strategy!r} in {path}", remedy=remedy)
    about = values.get("plan", {})
    network = about.get("network", "") if isinstance(about, dict) else ""
    return StrategySpec.parse(strategy), str(network)


def require_same(path: str | Path, planned: str, network: str) -> None:
    """Raise SettingsError if a plan file was made for another network.

    `planned` and `network` are the fingerprints of the plan's network and of the given one; an empty `planned` matches.
    """
    if planned and planned != network:
        raise SettingsError(
            f"{path} must be used for the network for which it was made, of {planned}",
            got=f"a network of {network}",
            remedy="plan this network with mh.plan(task).best.save(...), or delete the line 'network' to use the "
            "plan nevertheless",
        )


def make_plan(
    workload: Workload,
    cluster: Cluster,
    search: Search,
    *,
    measure: Measure | None = None,
    tries: int = 3,
    fingerprint: str = "",
    notes: Sequence[str] = (),
    networks: int = 1,
) -> Plan:
    """Predict the cost of all strategies, measure the best few, and compute the saturation curve.

    Args:
        workload: The network and its batch size.
        cluster: The hardware.
        search: Constraints on the strategies.
        measure: Measures steps under a strategy; None if the hardware is not available.
        tries: Number of strategies to measure, in addition to plain data parallel.
        fingerprint: Text that identifies the network.
        notes: Texts to show with the plan.
        networks: Number of such networks to train.

    Raises:
        StrategyError: No strategy fits, or this version cannot run those that fit.
    """
    options = search.options(workload, cluster)
    if not any(option.can_run for option in options):
        raise _nothing_fits(workload, cluster, search, options)
    control = next(option for option in options if option.spec == search.control(workload, cluster))
    if measure is not None:
        options = _tried(options, control, measure, tries)
        control = next(option for option in options if option.spec == control.spec)
    alone = search.option(workload, cluster, StrategySpec(precision=search.precision)).estimate.seconds
    single = next((o.measured for o in options if o.estimate.num_devices == 1 and o.measured is not None), None)
    best = next(option for option in options if option.can_run)
    texts = list(notes)
    if cluster.network is None:
        texts.append(f"beyond this host the curve assumes {cluster.with_devices(2 * cluster.per_host)}")
    if is_lossy(best.spec.sync):
        texts.append(f"sync={best.spec.sync} changes the mathematics: results differ from one device's")
    return Plan(
        name=workload.name,
        workload=workload,
        cluster=cluster,
        options=tuple(options),
        control=control,
        alone=single or alone,
        curve=Curves(workload, cluster, best.spec).draw(),
        notes=tuple(texts),
        fingerprint=fingerprint,
        num_networks=networks,
        ways=tuple(_ways(workload, cluster, search, networks)),
    )


def _ways(workload: Workload, cluster: Cluster, search: Search, networks: int) -> list[ManyNetworksEstimate]:
    """Return ways to train `networks` such networks, fastest first; empty for one, or if it fits on no single device.

    Step times are fitted as `start + each * samples` to predictions for two batch sizes.
    """
    if networks == 1:
        return []
    each = replace(cluster, chip=cluster.chip_for(cluster.num_devices), shared=False)
    spec = StrategySpec(precision=search.precision)
    large = workload.batch_size
    small = max(1, large // 4)
    first, second = (estimate(replace(workload, batch_size=size), each, spec) for size in (small, large))
    slope = (second.seconds - first.seconds) / max(1, large - small) if large > small else second.seconds
    slope = min(max(slope, 0.0), second.seconds / large)
    one = One(start=second.seconds - slope * large, each=slope, batch_size=large, memory=min(second.memory.total, 1e18))
    if one.memory > USABLE_SHARE * each.chip.memory:
        return []
    return many(one, networks, each)


def _tried(options: list[PlanOption], control: PlanOption, measure: Measure, tries: int) -> list[PlanOption]:
    """Measure the best `tries` strategies and `control`; scale the other predictions by the median error."""
    able = [option for option in options if option.can_run]
    chosen = {option.spec: option for option in [*able[:tries], *([control] if control.can_run else [])]}
    found = {spec: measure(spec) for spec in chosen}
    seconds = {spec: one for spec, one in found.items() if isinstance(one, float)}
    factors = sorted(one / chosen[spec].estimate.seconds for spec, one in seconds.items())
    factor = factors[len(factors) // 2] if factors else 1.0
    result = []
    for option in options:
        one = found.get(option.spec)
        off = one / option.estimate.seconds if isinstance(one, float) else factor
        failed = f"failed here: {one}" if isinstance(one, str) else ""
        made = replace(option.estimate, factor=off)
        tried = seconds.get(option.spec)
        result.append(replace(option, estimate=made, measured=tried, refused=option.refused or failed))
    return sorted(result, key=lambda o: (not o.can_run, o.measured is None, o.seconds))


def _nothing_fits(workload: Workload, cluster: Cluster, search: Search, options: list[PlanOption]) -> StrategyError:
    """Return an error with what would fit: lower precision, more devices, or devices with more memory."""
    near = min(options, key=lambda option: option.estimate.memory.total)
    need, have = near.estimate.memory.total, USABLE_SHARE * cluster.chip.memory
    able = [option for option in options if option.estimate.fits]
    if able:
        return StrategyError(
            "a plan must be executable by this version",
            got=f"only {able[0].spec}: {able[0].refused}",
            remedy="choose another number of devices, or another batch size",
        )
    remedy = "use devices with more memory"
    if search.precision != "bf16" and "bf16" in workload.networks:
        narrow = replace(search, precision="bf16").options(workload, cluster)
        if any(option.estimate.fits for option in narrow):
            remedy = f'use precision="bf16", with which it fits: {next(o for o in narrow if o.estimate.fits).spec}'
    if remedy.startswith("use devices"):
        for factor in (2, 4, 8, 16, 32, 64):
            more = cluster.with_devices(factor * cluster.num_devices)
            fitting = [option for option in search.options(workload, more) if option.estimate.fits]
            if fitting:
                remedy = f"{more.num_devices} of these devices are enough, with {fitting[0].spec}"
                break
    return StrategyError(
        f"a step must fit into {format_bytes(have, 3)}, {USABLE_SHARE:.0%} of the memory of one {cluster.chip.name}",
        got=f"at least {format_bytes(need, 3)} with {near.spec}",
        remedy=remedy,
    )
