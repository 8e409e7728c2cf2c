"""How policies learn: the loss of each at the same number of samples, beside the exact sum's, on two replicas.

`python -m benchmarks.convergence [--quick]`. A CNN with batch statistics, a GPT and a recommender; the ratio is the
mean loss of the last tenth of the steps over the exact sum's. Curves are in results/convergence.svg.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

os.environ.setdefault("OMP_NUM_THREADS", "1")

import manyhands as mh
from manyhands.api.runtime import runtime

from .lessons import CNN, GPT, LIKES, Lesson
from .report import RESULTS, Check, arguments, machine

POLICIES = [
    "allreduce",
    "bf16",
    "fp16",
    "int8",
    "topk(0.01)",
    "powersgd(4)",
    "localsteps(8)",
    "localsteps(32,by=int8)",
    "diloco(50)",
]
NEAR = {"bf16": 1.05, "fp16": 1.05, "int8": 1.05, "topk": 1.3, "powersgd": 1.2, "localsteps": 1.3, "diloco": 1.3}
"""How many times the exact sum's loss a policy may end at, by its name."""
COLORS = ["#222222", "#4878a8", "#6aa84f", "#cc4125", "#e69138", "#8e63b8", "#45a8a0", "#a64d79", "#7f6000", "#3d85c6"]


def main() -> None:
    """Trains every lesson under every policy."""
    quick = arguments(__doc__).quick
    lessons = [CNN] if quick else [CNN, LIKES, GPT]
    policies = ["allreduce", "int8", "localsteps(8)"] if quick else POLICIES
    num_steps = 40 if quick else 240
    curves = {lesson.name: {policy: losses(lesson, policy, num_steps) for policy in policies} for lesson in lessons}
    runtime.engine.close()
    finish(curves, quick)


def losses(lesson: Lesson, policy: str, num_steps: int) -> list[float]:
    """The loss of every step."""
    task = mh.Task(
        model=lesson.model,
        loss=lesson.loss,
        optimizer=lesson.make_optimizer,
        data=lesson.data(lesson.batch_size * (num_steps + 1)),
        batch_size=lesson.batch_size,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = mh.fit(
            task,
            mh.Mirrored(2, sync=policy),
            on="cpu*2",
            steps=num_steps,
            folder=folder,
            options=mh.options.Display(progress=False),
        )
        return list(run.losses)


def end(values: Sequence[float]) -> float:
    """The mean of the last tenth."""
    last = values[-max(1, len(values) // 10) :]
    return sum(last) / len(last)


def finish(curves: dict[str, dict[str, list[float]]], quick: bool) -> None:
    """Writes and prints what came out."""
    rows = []
    checks: dict[str, Check] = {}
    for lesson, found in curves.items():
        exact = end(found["allreduce"])
        for policy, values in found.items():
            rows.append(
                {
                    "lesson": lesson,
                    "policy": policy,
                    "loss": round(end(values), 4),
                    "ratio": round(end(values) / exact, 3),
                }
            )
            print(f"{lesson:12s} {policy:24s} {end(values):8.4f} {end(values) / exact:6.3f}")
    for name, near in NEAR.items():
        worst = [row["ratio"] for row in rows if str(row["policy"]).startswith(name)]
        if worst and not quick:
            checks[f"{name}_loss"] = Check(value=float(max(map(float, worst))), at_most=near)
    result = {
        "benchmark": "convergence",
        "machine": machine(),
        "checks": {name: check.to_dict() for name, check in checks.items()},
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / ("convergence.quick" if quick else "convergence")
    Path(f"{stem}.json").write_text(json.dumps(result) + "\n")
    Path(f"{stem}.svg").write_text(draw(curves))
    print(json.dumps(result), flush=True)


def draw(curves: dict[str, dict[str, list[float]]]) -> str:
    """A field for each lesson, a line for each policy."""
    width, height, parts = 420, 300, []
    for index, (lesson, found) in enumerate(curves.items()):
        left, top = 20 + (index % 2) * (width + 20), 40 + (index // 2) * (height + 30)
        smooth = {policy: _smooth(values) for policy, values in found.items()}
        highest = max(max(values) for values in smooth.values())
        lowest = min(min(values) for values in smooth.values())
        parts.append(f'<text x="{left}" y="{top - 6}" font-size="13">{escape(lesson)}: loss by steps</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height - 20}" fill="none" stroke="#ccc"/>')
        for number, values in enumerate(smooth.values()):
            points = " ".join(
                f"{left + i * width / max(1, len(values) - 1):.1f},"
                f"{top + (highest - value) / max(1e-9, highest - lowest) * (height - 24) + 2:.1f}"
                for i, value in enumerate(values)
            )
            color = COLORS[number % len(COLORS)]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.3"/>')
    bottom = 40 + (-(-len(curves) // 2)) * (height + 30)
    for number, policy in enumerate(next(iter(curves.values()))):
        x, y = 20 + (number % 4) * 215, bottom + 16 * (number // 4)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{COLORS[number % len(COLORS)]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{escape(policy)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{bottom + 60}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="11">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _smooth(values: Sequence[float]) -> list[float]:
    """At a hundred places the mean of what is around."""
    size = max(1, len(values) // 100)
    return [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]


if __name__ == "__main__":
    main()
