"""Two hosts with a slow network between them: time to the same training loss, against plain DDP on the same links.

`python -m benchmarks.slow_link [--quick]` (needs root). The hosts are network namespaces; `tc tbf` limits what each of
them sends. All contenders train the same network on the same samples in the same order; the loss to reach is DDP's
after its last step, and a contender's time is that of the first step at which its loss, as a mean of the last steps, is
as low. What sync="auto" measures at its start is within its time.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from manyhands.api.runtime import runtime
from manyhands.data import Order
from manyhands.distributed import World, enter_world, resolve
from manyhands.testing import NamespaceHosts

from .lessons import WIDE, Lesson
from .report import Check, Report, arguments

RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "unlimited": None}
BARS = {
    "100 Mbit/s": ("speedup_100mbit", 10.0),
    "1 Gbit/s": ("speedup_1gbit", 2.0),
    "unlimited": ("speedup_unlimited", 0.98),
}
POLICIES = {
    "auto": "auto",
    "auto, lossy": "auto(lossy=True)",
    "bf16": "bf16",
    "int8": "int8",
    "top-k 1%": "topk(0.01)",
    "PowerSGD 4": "powersgd(4)",
    "local steps 16": "localsteps(16)",
    "DiLoCo 50": "diloco(50)",
}
SHARE = {"ddp": 1.0, "auto": 1.0, "bf16": 1.1, "int8": 1.1}
"""How many times DDP's steps a contender may take, LONGEST where nothing is named."""
LONGEST = 1.6
WINDOW = 10
"""Steps over which a loss is averaged."""

LossCurve = tuple[list[float], list[float]]
"""Of every step its end, in seconds from the beginning, and its loss."""


def main() -> None:
    """Measures all links."""
    quick = arguments(__doc__).quick
    report = Report("slow_link", quick)
    if quick:
        add(report, "1 Gbit/s", race("1gbit", 24, ["auto, lossy"], 1))
    else:
        for link, num_steps in (("100 Mbit/s", 160), ("1 Gbit/s", 240)):
            add(report, link, race(RATES[link], num_steps, list(POLICIES), 1))
        # Here nothing waits for long, so contenders take turns, and the middle of some rounds counts.
        add(report, "unlimited", race(None, 200, list(POLICIES), 13))
    report.finish()
    runtime.engine.close()


def add(report: Report, link: str, rounds: list[dict[str, LossCurve]]) -> None:
    """The rows of a link and its check."""
    goal = means(rounds[0]["ddp"][1])[-1]
    times: dict[str, list[float]] = {}
    for name in rounds[0]:
        curves = [by_name[name] for by_name in rounds if name in by_name]
        steps = [steps_to(curve, goal) for curve in curves]
        report.notes[f"{link}: {name}: steps"] = float(steps[0])
        if all(steps):
            times[name] = [curve[0][count - 1] for curve, count in zip(curves, steps, strict=True)]
    rows = report.add(link, times, "ddp")
    report.notes[f"{link}: loss"] = round(goal, 4)
    name, bar = BARS[link]
    # Without a limit neither of the two may lose.
    which = ("auto", "auto, lossy") if link == "unlimited" else ("auto, lossy",)
    if not report.quick and all(contender in rows for contender in which):
        report.checks[name] = Check(value=min(1 / rows[contender].ratio for contender in which), at_least=bar)


def means(losses: list[float]) -> list[float]:
    """Of every step the mean of the last losses."""
    return [sum(losses[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in range(1, len(losses) + 1)]


def steps_to(curve: LossCurve, goal: float) -> int:
    """Steps to a loss; 0 if it was not reached."""
    found = (i + 1 for i, mean in enumerate(means(curve[1])) if i >= WINDOW and mean <= goal * (1 + 1e-4))
    return next(found, 0)


def race(rate: str | None, num_steps: int, policies: list[str], num_rounds: int) -> list[dict[str, LossCurve]]:
    """Lets all contenders train over one link, one after another in the same two processes."""
    with NamespaceHosts(2, rate=rate) as hosts, tempfile.TemporaryDirectory() as folder:
        work = partial(contend, num_steps=num_steps, policies=policies, num_rounds=num_rounds, folder=folder)
        job = runtime.engine.start(hosts.joined(work, timeout=300), resolve("cpu*2")[0], timeout=300)
        found: list[dict[str, LossCurve]] = job.wait(lambda rank, entry: None, _show)[0]
    return found


def _show(*line: object) -> None:
    if "c10d" not in str(line):
        print(*line, flush=True)


def contend(
    world: World, num_steps: int, policies: list[str], num_rounds: int, folder: str
) -> list[dict[str, LossCurve]]:
    """All contenders on one rank, by rounds; from the second on only those that a check is about."""
    enter_world(world)
    torch.set_num_threads(1)
    rounds = []
    # As many samples for all, or the order of the samples would not be the same.
    count = WIDE.batch_size * (int(LONGEST * num_steps) + 1)
    for number in range(num_rounds):
        names = ["ddp", *(name for name in policies if number == 0 or name.startswith("auto"))]
        curves: dict[str, LossCurve] = {}
        # The machine changes during a round, so the first place rotates among the contenders.
        for name in names if number % 2 == 0 else reversed(names):
            world.barrier()
            allowed = int(SHARE.get(name, LONGEST) * num_steps)
            if name == "ddp":
                curves[name] = ddp(WIDE, allowed, count)
            else:
                curves[name] = ours(WIDE, allowed, count, POLICIES[name], folder)
            if world.is_first:
                print(f"{name}: {curves[name][0][-1]:.1f} s for {allowed} steps", flush=True)
        rounds.append({name: curves[name] for name in names})
    return rounds


def ddp(lesson: Lesson, num_steps: int, count: int) -> LossCurve:
    """Plain DDP, as one would write it."""
    model = DistributedDataParallel(lesson.model(), gradient_as_bucket_view=True)
    optimizer = lesson.make_optimizer(model)
    data, order = lesson.data(count), torch.from_numpy(Order(count, seed=0, epoch=0, shuffle=True)[:])
    half = lesson.batch_size // 2
    ends, losses = [], []
    dist.barrier()
    began = perf_counter()
    for step in range(num_steps):
        first = step * lesson.batch_size + dist.get_rank() * half
        rows = order[first : first + half]
        value = lesson.loss(model, tuple(part[rows] for part in data))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())
        ends.append(perf_counter() - began)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return ends, (mean / dist.get_world_size()).tolist()


class Clock(mh.Callback):
    """Leaves the end of every step in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ends: list[float] = []

    def on_start(self, hand: mh.Hand) -> None:
        hand.barrier()
        self.began = perf_counter()

    def on_step(self, hand: mh.Hand) -> None:
        self.ends.append(perf_counter() - self.began)

    def on_end(self, hand: mh.Hand) -> None:
        if hand.is_first:
            self.path.write_text(json.dumps(self.ends))


def ours(lesson: Lesson, num_steps: int, count: int, sync: str, folder: str) -> LossCurve:
    """`fit` under a policy."""
    clock = Clock(Path(folder) / "ends.json")
    task = mh.Task(
        model=lesson.model,
        loss=lesson.loss,
        optimizer=lesson.make_optimizer,
        data=lesson.data(count),
        batch_size=lesson.batch_size,
    )
    run = mh.fit(
        task,
        mh.Mirrored(2, sync=sync),
        steps=num_steps,
        callbacks=[clock],
        folder=folder,
        options=mh.options.Display(progress=False),
    )
    for entry in map(json.loads, (run.path / "events.jsonl").read_text().splitlines()):
        if entry["kind"] == "notice" and dist.get_rank() == 0 and "auto" in sync:
            print("  ", entry["text"], flush=True)
    dist.barrier()
    return json.loads(clock.path.read_text()), list(run.losses)


if __name__ == "__main__":
    main()
