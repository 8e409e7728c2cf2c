"""Terminal report of a plan: the table of strategies, the saturation curve, its reason, and what would help."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..core import counted, format_bytes, format_duration, format_number, format_rough_duration
from .curve import WORTH
from .target import LEAST_SAVED, recommended

if TYPE_CHECKING:
    from rich.console import Console

    from .curve import Curve
    from .many_networks import ManyNetworksEstimate
    from .plan import Plan
    from .search import PlanOption

COLUMNS = ("strategy", "devices", "step", "compute", "exchange", "bubble", "stragglers", "input", "memory", "samples/s")
BAR = 48
NUM_REMEDIES = 5
NUM_CLOSE = 3
EVIDENCE = {
    "calibrated": "constants fitted to measured steps",
    "catalogue": "constants from the catalogue",
    "transferred": "from steps measured on other hardware, because the network cannot be traced",
}
BATCH_TITLE = "to the loss that 1,000,000 samples reach with the task's batch size"
BATCH_COLUMNS = ("batch", "devices", "strategy", "step", "steps", "time", "price", "energy", "efficiency")


def show(plan: Plan, *, most: int = 12, console: Console | None = None) -> None:
    """Print a plan, with at most `most` strategies and plain data parallel."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = console or Console()
    if not out.is_terminal and console is None:
        out = Console(width=160)
    title = f"{plan.name}: {counted(plan.workload.batch_size, 'sample')} a step on {plan.cluster}"
    table = Table(title=title, title_justify="left")
    for column in header(plan):
        table.add_column(column, justify="left" if column == "strategy" else "right", overflow="fold")
    shown = list(plan.options[:most])
    if plan.control not in shown:
        shown.append(plan.control)
    best = plan.best.option
    for option in shown:
        style = "bold green" if option is best else "" if option.can_run else "dim"
        table.add_row(*map(Text, cells(plan, option)), style=style)
    out.print(table)
    for line in lines(plan):
        out.print(line, markup=False, highlight=False)
    batches = batch_rows(plan)
    if batches:
        table = Table(title=BATCH_TITLE, title_justify="left")
        for column in BATCH_COLUMNS:
            table.add_column(column, justify="left" if column == "strategy" else "right", overflow="fold")
        for row in batches:
            table.add_row(*map(Text, row))
        out.print(table)
    for line in draw(plan.curve, plan.cluster.num_devices):
        out.print(line, markup=False, highlight=False)
    for line in closing(plan.curve):
        out.print(line, markup=False, highlight=False)


def header(plan: Plan) -> tuple[str, ...]:
    """Return the names of the table's columns; the column of costs only if the cluster has a price."""
    return (*COLUMNS, "efficiency", *(["per 1M samples"] if plan.cluster.price is not None else []))


def cells(plan: Plan, option: PlanOption) -> list[str]:
    """Return the texts in the table's row for one strategy."""
    made = option.estimate
    parts = made.parts()
    sign = "" if option.measured is not None else "~"
    mark = f" ({option.refused.split(':')[0]})" if option.refused else "" if made.fits else " (does not fit)"
    control = " (control)" if option.spec == plan.control.spec else ""
    money = plan.cost(option)
    return [
        f"{option.spec}{control}{mark}",
        str(made.num_devices),
        f"{sign}{format_duration(option.seconds)}",
        *(format_duration(parts[name]) if parts[name] else "-" for name in ("compute", "communication", "bubble")),
        *(format_duration(parts[name]) if parts[name] else "-" for name in ("stragglers", "input")),
        format_bytes(made.memory.total, 3),
        format_number(made.batch_size / option.seconds, 4),
        f"{plan.efficiency(option):.0%}",
        *([] if money is None else [format_number(money)]),
    ]


def lines(plan: Plan) -> list[str]:
    """Return lines of text about a plan: the pick, the expected error, assumptions, notes and the batch size."""
    texts = [f"pick: {plan.best.spec} ({plan.best.why})"]
    texts.append(f"times with ~ are predicted, {EVIDENCE[plan.evidence]}: they may be off by {plan.band:.0%}")
    close = plan.close()
    if close:
        others = ", ".join(str(option.spec) for option in close[:NUM_CLOSE])
        more = f" and {len(close) - NUM_CLOSE} more" if len(close) > NUM_CLOSE else ""
        texts.append(f"not distinguishable from the pick within that: {others}{more}; measure them where they will run")
    texts += [f"assumed: {text}" for text in plan.cluster.assumed]
    texts += plan.notes
    least = plan.steps_over_least()
    if least is not None:
        noise = plan.workload.noise or 0.0
        scale = f"gradient noise scale {format_number(noise)} samples"
        texts.append(f"{scale}: this batch needs {least:.2f} times the fewest steps")
        times = plan.to_target()
        size = min(times, key=lambda one: times[one], default=plan.workload.batch_size)
        if times and times[size] < LEAST_SAVED:
            texts.append(f"a batch of {size} would reach a target in {times[size]:.2f} of the time on these devices")
        texts.append(_batch_advice(plan))
    if plan.ways:
        texts.append(f"{plan.num_networks} such networks: " + "; ".join(map(_way, plan.ways)))
    return texts


def batch_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the cells of a table of the fastest number of devices that pays for each batch size.

    Empty if the gradient noise scale is unknown.
    """
    rows: list[tuple[str, ...]] = []
    options = plan.batches()
    for size in sorted({one.batch_size for one in options}):
        same = [one for one in options if one.batch_size == size]
        paying = [one for one in same if one.efficiency >= WORTH]
        least = min(one.num_devices for one in same)
        best = min(paying or [one for one in same if one.num_devices == least], key=lambda one: one.hours)
        rows.append(
            (
                f"{size:,}",
                f"{best.num_devices:,}",
                str(best.spec),
                f"~{format_duration(best.seconds)}",
                format_number(best.steps),
                format_rough_duration(3600 * best.hours),
                "-" if best.cost is None else f"{plan.cluster.currency}{format_number(best.cost)}",
                "-" if best.energy is None else f"{format_number(best.energy)} kWh",
                f"{best.efficiency:.0%}",
            )
        )
    return rows


def _batch_advice(plan: Plan) -> str:
    """Return a recommendation about another batch size on another number of devices, as a sentence."""
    options, here = plan.batches(), plan.best.option.estimate.num_devices
    best = recommended(options, plan.workload.batch_size, here)
    if best is None:
        return "no larger batch is recommended: on more devices the efficiency is below 50%, or little time is saved"
    now = next(one for one in options if (one.batch_size, one.num_devices) == (plan.workload.batch_size, here))
    where = "these devices" if best.num_devices == here else _devices(best.num_devices)
    spent = f", at {best.cost / now.cost:.2f} times the price" if best.cost is not None and now.cost else ""
    return (
        f"a batch of {best.batch_size} on {where} reaches a target in {best.hours / now.hours:.2f} of the time{spent}, "
        "if its learning rate is tuned"
    )


def _way(way: ManyNetworksEstimate) -> str:
    together = f", {way.together} on a device at a time" if way.together > 1 else ""
    return f"{way.name}{together}: {format_number(way.gain)} times one after another"


def draw(curve: Curve, here: int) -> list[str]:
    """Return lines with a bar of the speed-up for each doubling of the devices, and for `here`, the cluster's number.

    The scale is logarithmic, so that the bars of perfect speed-up form straight stairs.
    """
    top = max(1.0, math.log2(curve.points[-1].num_devices))
    result = ["", "devices  speed-up"]
    for point in curve.points:
        if point.num_devices & (point.num_devices - 1) and point.num_devices != here:
            continue
        length = round(BAR * max(0.0, math.log2(max(1.0, point.speedup))) / top)
        ideal = round(BAR * math.log2(point.num_devices) / top)
        bar = "█" * length + "·" * max(0, ideal - length)
        mark = "  <- this cluster" if point.num_devices == here else ""
        result.append(f"{point.num_devices:7}  {bar:<{BAR}} {point.speedup:8.1f}  {point.efficiency:4.0%}{mark}")
    return result


def closing(curve: Curve) -> list[str]:
    """Return lines of text about a curve: where the speed-up saturates, why, and what would help."""
    if curve.never:
        first = f"it scales to at least {_devices(curve.saturates)}; the largest loss there: {curve.reason}"
    else:
        first = f"it saturates at {_devices(curve.saturates)} (with more, the efficiency is below 50%): {curve.reason}"
    result = ["", first]
    for remedy in curve.remedies[:NUM_REMEDIES]:
        lossy = " (changes the mathematics)" if remedy.is_lossy else ""
        moved = f"moves it from {curve.saturates} to {_devices(remedy.saturates)}, "
        moved = moved if remedy.saturates != curve.saturates else ""
        result.append(f"  {remedy.text}{lossy}: {moved}{remedy.gain:.2f} times the speed here")
    return result


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"
