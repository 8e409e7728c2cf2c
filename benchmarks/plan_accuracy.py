"""The planner's scorecard: predicted against measured, on published data and on this machine.

`python -m benchmarks.plan_accuracy [--quick] [--without-local] [--published FILE.csv]`. With a file, its points are
tried by the same code as those in `benchmarks/data/published_scaling.csv`, nothing else is, and no result is written.
What needs a GPU is measured where there is one, or by `python -m benchmarks.plan_gpu` alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import resource
import time
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

import manyhands as mh
from manyhands.distributed import Device

from . import plan_gpu, plan_known, plan_profile, plan_published, plan_texts, plan_vtrain
from .plan_famous import POINTS
from .report import RESULTS, Check, Report, Row

LOCAL = ("local_step_error", "local_memory_error")


def main() -> None:
    """Scores all there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out what measures on this machine")
    parser.add_argument("--without-local", action="store_true", help="leave out what needs a quiet machine")
    parser.add_argument("--published", type=Path, help="other published points, in the same columns")
    asked = parser.parse_args()
    report = Report("plan_accuracy", asked.quick, is_part=asked.published is not None)
    published(report, asked.published or plan_published.DATA)
    if asked.published is None:
        famous(report)
        plan_known.score(report)
        report.checks["text_understood"] = Check(value=plan_texts.share_understood(), at_least=1.0)
        vtrain(report, asked.quick)
        profiled(report, asked.quick)
        large(report)
        if not asked.quick:
            (kept if asked.without_local else local)(report)
            if torch.cuda.is_available():
                plan_gpu.score(report, Device("cuda"))
    report.finish()


def vtrain(report: Report, quick: bool) -> None:
    """vTrain's iterations; other draws of the twenty rows are notes."""
    found = plan_vtrain.observations()
    score = plan_vtrain.score(found, plan_vtrain.chosen(found))
    report.checks["vtrain_median_error"] = Check(value=score.median_error, at_most=0.08)
    for count, bar in ((1, 0.06), (3, 0.02), (5, 0.01)):
        report.checks[f"vtrain_regret_top{count}"] = Check(value=score.regret[count], at_most=bar)
    report.checks["fitted_parameters_above_datasheet"] = Check(value=score.above, at_most=0)
    report.notes["vtrain_mean_error"] = round(score.mean_error, 4)
    report.notes["vtrain_rank_correlation"] = round(score.rank_correlation, 4)
    if quick:
        return
    others = [plan_vtrain.score(found, plan_vtrain.chosen(found, seed)) for seed in range(1, 6)]
    report.notes["vtrain_median_error_of_other_draws_at_most"] = round(max(o.median_error for o in others), 4)
    report.notes["vtrain_regret_top1_of_other_draws_at_most"] = round(max(o.regret[1] for o in others), 4)


def published(report: Report, path: Path) -> None:
    """Speed-ups of public reports."""
    read = plan_published.read(path)
    found = read.points
    rows = plan_published.predicted(found)
    table = Table("system", "mode", "network", "devices", "measured", "predicted", "error", title="published speed-ups")
    by_series: dict[tuple[str, ...], list[float]] = {}
    for point, measured, guess in rows:
        row = point.row
        figures = (str(point.num_devices), f"{measured:.2f}", f"{guess:.2f}", f"{guess / measured - 1:+.1%}")
        table.add_row(row["system"], row["mode"], row["model"], *figures)
        by_series.setdefault(point.series, []).append(abs(guess / measured - 1))
        case = f"{row['model']} on {point.num_devices} {row['gpu'].split()[0]}, {row['system']}"
        report.add(case, {"measured": [1 / measured], "predicted": [1 / guess]}, "measured")
    Console(width=130).print(table)
    errors = [error for series in by_series.values() for error in series]
    report.checks["published_speedup_error"] = Check(value=fmean(errors), at_most=0.10)
    report.notes["published_points"] = len(errors)
    report.notes["published_worst_error"] = round(max(errors), 4)
    report.notes["published_mean_of_series_errors"] = round(fmean(map(fmean, by_series.values())), 4)

    for reason, count in sorted(read.left_out.items()):
        report.notes[f"published_rows_left_out: {reason}"] = count
    for word, overlaps in (("with", True), ("without", False)):
        pairs = plan_published.predicted(found, overlaps=overlaps)
        error = fmean(abs(guess / measured - 1) for _, measured, guess in pairs)
        report.notes[f"published_speedup_error_{word}_overlap"] = round(error, 4)
    held, fitted = plan_published.left_out(found, plan_published.source_of)
    report.checks["published_leave_one_source_out_error"] = Check(value=held, at_most=0.08)
    report.notes["published_fitted_error"] = round(fitted, 4)
    every = plan_published.read(path, withdrawn=True)
    if len(every.points) > len(found):
        held, _ = plan_published.left_out(every.points, plan_published.source_of)
        report.notes["published_leave_one_source_out_error_with_withdrawn_rows"] = round(held, 4)


def famous(report: Report) -> None:
    """The three points that everybody quotes."""
    table = Table("point", "devices", "published", "predicted", "today", "assumed", title="famous points")
    for point in POINTS:
        then, now = point.predicted(), point.nowadays()
        figures = (str(point.num_devices), f"{point.speedup:g}", f"{then:.1f}", f"{now:.1f}")
        table.add_row(point.name, *figures, point.assumed)
        report.notes[f"famous_{point.name}_error"] = round(abs(then / point.speedup - 1), 4)
    Console(width=130).print(table)


def large(report: Report) -> None:
    """A GPT of a billion parameters on 512 devices: how long planning takes, and the memory of this process.

    The time is the processor's, of one thread, so that what else the machine does does not count.
    """
    began = time.process_time()
    found = mh.plan(plan_vtrain.gpt_task(2048, 20, batch_size=2048), "64 hosts x 8 H100, 400Gb/s", precision="bf16")
    report.checks["plan_seconds_1b_512"] = Check(value=time.process_time() - began, at_most=10)
    report.notes["plan_parameters"] = found.best.plan.workload.network("bf16").params
    report.notes["plan_gibibytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)


def profiled(report: Report, quick: bool) -> None:
    """What it costs a run to be profiled."""
    rows = report.add("a run, profiled", plan_profile.times(quick), "off")
    report.checks["profile_overhead"] = Check(value=rows["on"].ratio, at_most=1.02)


def kept(report: Report) -> None:
    """What the last result says of steps on this machine, which need a quiet one."""
    from .plan_local import TASKS

    last = json.loads((RESULTS / "plan_accuracy.json").read_text(encoding="utf-8"))
    for name in LOCAL:
        report.checks[name] = Check(**last["checks"][name])
    rows = [Row(**row) for row in last["rows"] if row["case"].startswith(tuple(f"{task}, " for task in TASKS))]
    report.rows += rows
    report.notes["kept_from_the_last_result"] = f"{', '.join(LOCAL)}: they need a quiet machine"


def local(report: Report) -> None:
    """This machine: step times and peak memory."""
    from . import plan_local  # needs root for its hosts

    for name, bar, unit, found in (
        ("local_step_error", 0.15, 1.0, plan_local.cases()),
        ("local_memory_error", 0.10, 1e-9, plan_local.peaks()),
    ):
        errors = []
        for case, pairs in found.items():
            guesses, measured = ([unit * pair[which] for pair in pairs] for which in (0, 1))
            rows = report.add(case, {"measured": measured, "predicted": guesses}, "measured")
            errors.append(abs(rows["predicted"].ratio - 1))
        report.checks[name] = Check(value=fmean(errors), at_most=bar)


if __name__ == "__main__":
    main()
