"""Plan: the ranked strategies for a workload on a cluster, the pick and the curve; and plans of several clusters."""

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
    format_number,
    keep_event,
)
from .clusters import Cluster
from .curve import Curve, Curves
from .estimate import estimate
from .many_networks import ManyNetworksEstimate, One, many
from .memory import USABLE_SHARE
from .search import PlanOption, Search
from .workload import Workload, is_lossy, steps_needed

Measure = Callable[[StrategySpec], float | str]
"""Returns the measured seconds of a step with this spec on the available hardware, or why it could not run."""
BANDS = {"measured": 0.05, "calibrated": 0.15, "catalogue": 0.3, "transferred": 1.0}
"""Relative error of a time that nine of ten stay within, by the evidence: tried here, fitted to steps of this hardware,
from the catalogue (published throughput), or from steps that were measured on other hardware."""
SUFFIX = ".toml"
TARGETS = (0.25, 0.5, 1, 2, 4, 8, 16)
"""Batch sizes, relative to the task's own, whose time to a target is reported."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted cost of every strategy, fastest first.

    `plan.best` is the pick, `plan.show()` prints the table and the curve, `plan.save_html(path)` writes a page.
    """

    name: str
    workload: Workload
    cluster: Cluster
    options: tuple[PlanOption, ...]
    control: PlanOption
    """Plain data parallel, the baseline that the pick must not be slower than."""
    alone: float
    """Seconds of a step on one device."""
    curve: Curve
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    num_networks: int = 1
    ways: tuple[ManyNetworksEstimate, ...] = ()
    """Ways to train several such networks, fastest first, if several were requested."""

    @property
    def best(self) -> Pick:
        """The fastest option that fits and can run; among measured ones if there are any."""
        able = [option for option in self.options if option.can_run]
        tried = [option for option in able if option.measured is not None]
        return Pick(option=min(tried or able, key=lambda option: option.seconds), plan=self)

    @property
    def band(self) -> float:
        """Expected relative error of predicted times."""
        return BANDS[self.evidence]

    @property
    def evidence(self) -> str:
        """What predicted times rest on: "calibrated", "catalogue", or "transferred" from steps on other hardware."""
        if self.cluster.measured:
            return "calibrated"
        return "transferred" if self.workload.network(self.best.spec.precision).is_measured else "catalogue"

    def close(self) -> list[PlanOption]:
        """Return options that may be as fast as the pick: predicted ones whose times differ by less than the band."""
        best = self.best.option
        if best.measured is not None:
            return []
        most = best.seconds * (1 + self.band)
        return [
            option for option in self.options if option.can_run and option.spec != best.spec and option.seconds < most
        ]

    def efficiency(self, option: PlanOption) -> float:
        """Return the speed-up over one device, divided by the number of devices."""
        devices = 1 if self.cluster.shared else option.estimate.num_devices
        return self.alone / option.seconds / devices

    def cost(self, option: PlanOption, samples: float = 1e6) -> float | None:
        """Return the cost of this many samples; None without a price."""
        if self.cluster.price is None:
            return None
        hours = option.seconds * samples / self.workload.batch_size / 3600
        return hours * option.estimate.num_devices * self.cluster.price

    def steps_over_least(self) -> float | None:
        """Return the ratio of steps to a target to those of an infinite batch; None if gradient noise is unknown."""
        return None if self.workload.noise is None else steps_needed(self.workload.batch_size, self.workload.noise)

    def to_target(self) -> dict[int, float]:
        """Return the time to a target with other batch sizes on these devices, relative to this one.

        Empty if the gradient noise is not known. Steps come from the noise, their seconds from the model.
        """
        if self.workload.noise is None:
            return {}
        spec, batch_size = self.best.spec, self.workload.batch_size
        found = {}
        for factor in TARGETS:
            size = round(factor * batch_size)
            if size < spec.num_parts * spec.accumulate * spec.microbatches:
                continue
            made = estimate(replace(self.workload, batch_size=size), self.cluster, spec)
            if made.fits:
                found[size] = steps_needed(size, self.workload.noise) * made.seconds
        return {size: time / found[batch_size] for size, time in found.items()} if batch_size in found else {}

    def show(self, *, most: int = 12) -> None:
        """Print the table and the curve."""
        from .report import show

        show(self, most=most)

    def save_html(self, path: str | Path) -> None:
        """Write an HTML page with the table and the curve; it needs no other file."""
        from .html_report import html

        Path(path).write_text(html(self), encoding="utf-8")

    def save_svg(self, path: str | Path) -> None:
        """Write the curve as SVG."""
        from .html_report import svg

        Path(path).write_text(svg(self.curve, self.cluster.num_devices), encoding="utf-8")

    def log(self, folder: str | Path) -> None:
        """Append the plan to the event log of a folder, for the dashboard."""
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
            "networks": [vars(way) for way in self.ways],
            "notes": list(self.notes),
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
            "cost_per_million_samples": self.cost(option),
        }


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The pick of a plan: `fit(task, plan.best.spec)`, or `save` it, edit it, and `fit(task, "plan.toml")`."""

    option: PlanOption
    plan: Plan

    @property
    def spec(self) -> StrategySpec:
        """The strategy."""
        return self.option.spec

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.option.seconds

    @property
    def why(self) -> str:
        """Reason for the pick, as one sentence."""
        control = self.plan.control
        how = "measured" if self.option.measured is not None else "predicted"
        if self.spec == control.spec:
            return f"plain data parallel is the fastest, {how}: {format_duration(self.seconds)} a step"
        if not control.can_run:
            return f"plain data parallel does not fit; this does: {format_duration(self.seconds)} a step, {how}"
        gain = control.seconds / self.seconds
        return f"{format_duration(self.seconds)} a step, {how}: {gain:.2f} times plain data parallel"

    def save(self, path: str | Path) -> Path:
        """Write the pick as TOML, to be edited and passed to `fit`."""
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
    """Return the strategy in a plan file, and the fingerprint of the network it was made for."""
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
    """Raise SettingsError if a plan was made for another network."""
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
    """Estimate all strategies, measure the best few if possible, and compute the curve of the pick."""
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
    """Return ways to train many networks of this kind, with step times fitted as t = start + each · samples."""
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
    """Measure the best few options and the control; scale the others by the median error."""
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
    """Return an error that names what would fit: more devices, lower precision, or a smaller batch."""
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans of one task for several clusters, fastest first."""

    plans: tuple[Plan, ...]

    @property
    def best(self) -> Pick:
        """The pick of the fastest plan."""
        return self.plans[0].best

    def why(self) -> str:
        """Return which cluster is fastest, and why."""
        first, *others = self.plans
        lines = []
        for other in others:
            ratio = other.best.seconds / first.best.seconds
            a, b = first.best.option.estimate.parts(), other.best.option.estimate.parts()
            cause = max(b, key=lambda name: b[name] - a[name])
            lines.append(
                f"{first.cluster} is {ratio:.2f} times as fast as {other.cluster}, which loses most in {cause}"
            )
        priced = [plan for plan in self.plans if plan.cluster.price is not None]
        if len(priced) > 1:
            cheap = min(priced, key=lambda plan: plan.cost(plan.best.option) or 0.0)
            money = [f"{format_number(plan.cost(plan.best.option) or 0.0)} on {plan.cluster}" for plan in priced]
            lines.append(f"a million samples cost {', '.join(money)}: {cheap.cluster} is the cheapest")
        return "; ".join(lines)

    def show(self) -> None:
        """Print all plans and the conclusion."""
        for plan in self.plans:
            plan.show(most=3)
        print(self.why())

    def log(self, folder: str | Path) -> None:
        """Append all plans to the event log of a folder, for the dashboard."""
        for plan in self.plans:
            plan.log(folder)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return {"why": self.why(), "plans": [plan.to_dict() for plan in self.plans]}


def compare(plans: Sequence[Plan]) -> Comparison:
    """Rank plans by the speed of their picks."""
    return Comparison(plans=tuple(sorted(plans, key=lambda plan: plan.best.seconds / plan.workload.batch_size)))
