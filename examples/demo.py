"""The demo: plan, lose a process, train a hundred networks at once, serve, and look at all of it, in five acts.

    python examples/demo.py [--quick]

It takes at most three minutes on two cores and needs nothing but this machine. Every act prints what was predicted or
promised next to what was measured here. All files are written to a folder under runs/; Ctrl-C ends the demo at any
time, and no process is left.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from demo_pictures import curves, screenshots
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh
from manyhands.core import RequestRefused
from manyhands.dashboard import Dashboard
from manyhands.storage import export
from manyhands.vectorized import Population, gain

QUIET = mh.options.Display(progress=False)
GPUS = "8 hosts x 8 H100, 400Gb/s"
NUM_GPUS = 64
NUM_NETWORKS = 100
NUM_CLIENTS = 2


@dataclass
class Stage:
    """What the acts share: where they print and write, how long they train, and what they found."""

    console: Console
    folder: Path
    quick: bool = False
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """A row of the final table for each figure: what it is, what was predicted or promised, what was measured."""
    undisturbed: mh.Run | None = None
    best: list[nn.Module] = field(default_factory=list)
    """The second best and the best of the hundred networks."""

    @property
    def epochs(self):
        return 2 if self.quick else 6

    def title(self, text, why):
        self.console.print()
        self.console.print(Rule(f"[bold]{text}[/]", align="left"))
        self.console.print(why, style="italic")

    def say(self, text):
        self.console.print(text)

    def figure(self, what, expected, measured):
        self.rows.append((what, expected, measured))


# -- the networks: a convolutional one that is worth two processes, and a small one that is worth stacking ---------


class Net(nn.Module):
    def __init__(self, width, depth=4):
        super().__init__()
        layers = [nn.Upsample(scale_factor=2, mode="bilinear")]
        for index in range(depth):
            convolution = nn.Conv2d(width if index else 1, width, 3, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(4, width), nn.SiLU()]
        self.features = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten())
        self.classify = nn.Linear(16 * width, 10)

    def forward(self, images):
        return self.classify(self.features(images))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(outputs, batch):
    return (outputs.argmax(1) == batch[1]).float().mean()


def predict(model, images):
    return model(images).softmax(dim=1)


def digits():
    """1,797 images of 8 x 8 pixels; the last 297 are held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def task(lr: float = 2e-3, width: int = 24, batch_size: int = 100) -> mh.Task:
    train_set, valid_set = digits()
    return mh.Task(
        model=lambda: Net(width),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=train_set,
        valid=valid_set,
        metrics={"accuracy": accuracy},
        predict=predict,
        batch_size=batch_size,
    )


def small_task(lr: float = 1e-2, seed: int = 0) -> mh.Task:
    train_set, valid_set = digits()
    return mh.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=train_set,
        valid=valid_set,
        metrics={"accuracy": accuracy},
        predict=predict,
        batch_size=50,
        seed=seed,
    )


def places():
    """Return one device and two: GPUs if there are two, else one GPU or the CPU split in half."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= 2:
        return "cuda:0", "cuda:0,1"
    return ("cuda:0", "cuda:0*2") if num_gpus else ("cpu", "cpu*2")


def fit(name, stage, strategy, on, callbacks=()):
    """Train the convolutional network; a Ctrl-C, after which `mh.fit` returns what it has, ends the demo."""
    run = mh.fit(
        task,
        strategy,
        on=on,
        epochs=stage.epochs,
        folder=stage.folder,
        name=name,
        callbacks=callbacks,
        options=QUIET,
    )
    if run.stopped:
        raise KeyboardInterrupt
    return run


# -- act 1: plan -----------------------------------------------------------------------------------------------


def plan(stage):
    stage.title("1  Plan before you rent", "More devices are not always faster; a plan predicts how many are worth it.")
    one_on, two_on = places()
    with stage.console.status("Planning ..."):
        here = mh.plan(task, on=two_on, tries=0)
        there = mh.plan(task, GPUS)
    for found, name in ((here, "here"), (there, "64-gpus")):
        found.log(stage.folder / f"plan-{name}")
    predicted = here.alone / here.control.estimate.seconds
    with stage.console.status("Training on one process, then on two ..."):
        one = fit("one-process", stage, mh.Single(), one_on)
        stage.undisturbed = fit("two-processes", stage, mh.Mirrored(), two_on)
    measured = rate(stage.undisturbed) / rate(one)
    stage.say(
        f"Two processes, predicted before training: [bold]{predicted:.2f}[/] times as fast as one; "
        f"measured: [bold]{measured:.2f}[/] times."
    )
    pays = min(there.curve.saturates, NUM_GPUS)
    stage.say(f"Of {NUM_GPUS} H100, this network can use [bold]{pays}[/]. With more, the efficiency is below 50%:")
    stage.say(f"{there.curve.reason}.")
    if there.curve.remedies:
        remedy = max(there.curve.remedies, key=lambda one: (not one.is_lossy, one.saturates))
        stage.say(f"What would help most: {remedy.text}; then {min(remedy.saturates, NUM_GPUS)} GPUs pay.")
    stage.figure("speed of two processes", f"{predicted:.2f} x", f"{measured:.2f} x")
    stage.figure(f"H100 worth using, of {NUM_GPUS}", f"{pays}", "none here")


def rate(run):
    """Return samples per second, without validation and checkpoints."""
    return run.outcome.num_samples / (run.seconds["total"] - run.seconds["validation"] - run.seconds["save"])


# -- act 2: lose a process -------------------------------------------------------------------------------------


class KillOnce(mh.Callback):
    """Kills one of the processes with SIGKILL after a step, and writes down when that and the next step happened."""

    def __init__(self, folder, step):
        self.killed, self.resumed, self.step = folder / "kill.txt", folder / "next-step.txt", step

    def on_step(self, hand):
        if hand.rank == 1 and hand.num_steps == self.step and not self.killed.exists():
            self.killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if hand.rank == 0 and hand.num_steps == self.step + 1:
            self.resumed.write_text(str(time.time()))

    def seconds(self):
        return float(self.resumed.read_text()) - float(self.killed.read_text())


def kill(stage):
    stage.title(
        "2  Kill a process in the middle of training",
        "A machine that fails in a long run should cost seconds: no lost work, and no other result.",
    )
    total = len(stage.undisturbed.losses)
    killer = KillOnce(stage.folder, total // 2)
    with stage.console.status("Training on two processes, one of which is killed ..."):
        run = fit("with-a-kill", stage, mh.Mirrored(), places()[1], [killer])
    for entry in map(json.loads, (run.path / "events.jsonl").read_text().splitlines()):
        if entry["kind"] == "lost":
            stage.say(f"reported: process {entry['rank']} {entry['reason']}")
        elif entry["kind"] == "recovered":
            stage.say(f"reported: resumed after step {entry['step']} of {total} with {entry['size']} processes")
    undisturbed, killed = stage.undisturbed.losses, run.losses
    stage.console.print(curves(undisturbed, killed, ("undisturbed", "with the kill"), stage.console.width - 12))
    difference = max(abs(a - b) for a, b in zip(undisturbed, killed, strict=True))
    stage.say(
        f"From the kill to the next step: [bold]{killer.seconds():.2f} s[/]. Largest difference between the "
        f"{total} losses of the two runs: [bold]{difference:.1g}[/]."
    )
    stage.figure("from a kill to the next step", "no restart", f"{killer.seconds():.2f} s")
    stage.figure("difference of the two losses", "rounding", f"{difference:.1g}")


# -- act 3: a hundred networks ---------------------------------------------------------------------------------


def hundred(stage):
    stage.title(
        "3  Train a hundred networks as one program",
        "A search over small networks leaves a device idle if it trains them one after another.",
    )
    rates = [10 ** (-3.5 + 2 * number / NUM_NETWORKS) for number in range(NUM_NETWORKS)]
    tasks = [small_task(lr, seed) for seed, lr in enumerate(rates)]
    with stage.console.status("Measuring pairs and groups of eight, for a prediction ..."):
        predicted = median(gain(tasks[0])(NUM_NETWORKS) for _ in range(3))
    with stage.console.status(f"Training {NUM_NETWORKS} networks ..."):
        start = time.perf_counter()
        with Population(tasks, epochs=stage.epochs) as population:
            population.train(every=population.total)
            together = time.perf_counter() - start
            ranked = sorted(range(NUM_NETWORKS), key=lambda n: population.members[n].metrics["valid_loss"])
            stage.best = [population.model(number) for number in reversed(ranked[:2])]
    sample = tasks[:: NUM_NETWORKS // (2 if stage.quick else 10)]
    with stage.console.status(f"Training {len(sample)} of them in a plain PyTorch loop ..."):
        apart = in_a_loop(sample, population.device, stage.epochs) * NUM_NETWORKS / len(sample)
    best = population.members[ranked[0]].metrics["valid_accuracy"]
    stage.say(
        f"{NUM_NETWORKS} networks with their own learning rates and seeds: [bold]{together:.1f} s[/] as one program; "
        f"[bold]{apart:.1f} s[/] one after another in plain PyTorch (extrapolated from {len(sample)} of them)."
    )
    stage.say(
        f"Predicted: {predicted:.1f} times as fast, from groups of two and of eight; measured: {apart / together:.1f} "
        f"times. The best network, with a learning rate of {rates[ranked[0]]:.1e}, reads {best:.1%} of held-out digits."
    )
    stage.figure(f"{NUM_NETWORKS} networks as one program", f"{predicted:.1f} x", f"{apart / together:.1f} x")


def num_cores():
    return len(os.sched_getaffinity(0))


def in_a_loop(tasks, device, epochs):
    """Train tasks one after another as one would by hand; return the seconds."""
    start = time.perf_counter()
    for made in tasks:
        torch.manual_seed(made.seed)
        model = made.model().to(device)
        optimizer = made.optimizer(model)
        images, labels = (tensor.to(device) for tensor in made.data)
        for _ in range(epochs):
            for ids in torch.randperm(len(images)).to(device).split(made.batch_size):
                made.loss(model, (images[ids], labels[ids])).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            float(made.loss(model, [tensor.to(device) for tensor in made.valid]))
    return time.perf_counter() - start


# -- act 4: serve ----------------------------------------------------------------------------------------------


class Load:
    """Clients that ask the server for digits all the time, and compare each answer with those of both versions."""

    def __init__(self, url, images, right):
        self._url, self._images, self._right = url, images, right
        self._is_ending = threading.Event()
        self._lock = threading.Lock()
        self.answered, self.failed = [0, 0], 0
        """Requests answered by the first and by the second version; and others."""
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_ending.set()
        for thread in self._threads:
            thread.join()

    def _ask(self):
        client = mh.serving.Client(self._url)
        for at in itertools.cycle(range(len(self._images))):
            if self._is_ending.is_set():
                return
            try:
                found = torch.as_tensor(client("digits", self._images[at : at + 1]))
                distances = [float((found - right[at]).abs().max()) for right in self._right]
                version = distances.index(min(distances)) if min(distances) < 1e-4 else None
            except (RequestRefused, OSError):
                version = None
            with self._lock:
                if version is None:
                    self.failed += 1
                else:
                    self.answered[version] += 1


def serve(stage):
    stage.title(
        "4  Serve the best network, and swap versions under load",
        "A new version should reach users without a failed request or a maintenance window.",
    )
    images = digits()[1][0]
    models = stage.folder / "models"
    first, second = stage.best
    with torch.no_grad():
        right = [predict(model.eval(), images) for model in stage.best]
    export(first, predict, {"images": images[:3]}, models / "digits")
    listen = mh.serving.Listen(http=0, grpc=0, manage=0)
    with contextlib.ExitStack() as opened:
        with stage.console.status("Starting a server ..."):
            server = opened.enter_context(mh.serve(models, on="cpu", listen=listen, log=stage.folder / "serving"))
        load = opened.enter_context(Load(server.url, images, right))
        with stage.console.status("Serving the second best network, then the best one ..."):
            time.sleep(1.0 if stage.quick else 3.0)
            start = time.perf_counter()
            export(second, predict, {"images": images[:3]}, models / "digits")
            mh.serving.Client(server.url, manage=server.manage_url).load("digits")
            seconds = time.perf_counter() - start
            time.sleep(1.0 if stage.quick else 3.0)
    stage.say(
        f"{sum(load.answered):,} requests over HTTP from {NUM_CLIENTS} clients: {load.answered[0]:,} answered by "
        f"version 1 and {load.answered[1]:,} by version 2, [bold]{load.failed} failed[/]. Export and swap took "
        f"{seconds:.1f} s. Every answer was compared with what the network itself computes."
    )
    total = sum(load.answered) + load.failed
    stage.figure("requests failed in a swap", "0", f"{load.failed} of {total:,}")


# -- act 5: look at it -----------------------------------------------------------------------------------------


def look(stage):
    stage.title(
        "5  Look at all of it",
        "Logs are plain files; one page shows runs, plans and servers, now or in a year, without an account.",
    )
    with Dashboard([stage.folder]) as dashboard, stage.console.status("Reading the logs ..."):
        start = time.perf_counter()
        found = overview(dashboard.url)
        seconds = time.perf_counter() - start
        name = stage.folder.name
        pages = {"dashboard": "#/runs", "dashboard-kill": f"#/run?id={name}/with-a-kill"}
        pictures = screenshots({stage.folder / f"{one}.png": dashboard.url + page for one, page in pages.items()})
    plans, servers = (sum(one[what] for one in found["logs"]) for what in ("plans", "serves"))
    counts = f"{len(found['runs'])} runs, {plans} plans, {servers} server"
    stage.say(f"The page has {counts}, read in {seconds:.1f} s. This command opens it:")
    stage.console.print(f"  {command()} dashboard {shlex.quote(str(stage.folder))}", soft_wrap=True, style="bold")
    stage.say("at http://127.0.0.1:8600/ (add --port to use another one).")
    for path in pictures:
        stage.console.print(f"  picture of a page: {path}", soft_wrap=True)
    if not pictures:
        stage.say("For pictures of the pages here, install Chromium and run the demo again.")
    stage.figure("on the dashboard", "all of it", counts)


def overview(url, patience=30.0):
    """Return what the dashboard lists, as soon as it has read everything."""
    end = time.monotonic() + patience
    while True:
        with urllib.request.urlopen(f"{url}api/overview", timeout=patience) as answer:  # noqa: S310
            found = json.load(answer)
        is_read = found["logs"] and all(one["plans"] or one["serves"] for one in found["logs"])
        if (found["runs"] and is_read and not found["pending"]) or time.monotonic() > end:
            return found
        time.sleep(0.05)


ACTS = [plan, kill, hundred, serve, look]


def summary(stage):
    table = Table("", "expected", "measured here", box=None, pad_edge=False, header_style="bold")
    for row in stage.rows:
        table.add_row(*row)
    return table


def command() -> str:
    """Return the command as it can be typed here, with its path if the environment is not active."""
    if shutil.which("manyhands"):
        return "manyhands"
    path = Path(sys.executable).with_name("manyhands")
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Five things that manyhands does, with a figure each.")
    parser.add_argument("--quick", action="store_true", help="train for two epochs only")
    console = Console(highlight=False)
    stage = Stage(console, Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}", parser.parse_args().quick)
    if os.getloadavg()[0] > 0.4 * num_cores():
        console.print("[yellow]Other programs keep this machine busy: the times below are rough.[/]")
    # Each of two processes gets half of the cores, so one gets half of them too: two devices against one.
    torch.set_num_threads(max(1, num_cores() // 2))
    start = time.perf_counter()
    try:
        for act in ACTS:
            act(stage)
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. What was finished is in {stage.folder}; run the demo again at any time.")
        return 130
    console.print()
    console.print(Rule("[bold]All figures[/]", align="left"))
    console.print(summary(stage))
    console.print(f"\n{time.perf_counter() - start:.0f} s in all; everything is in {stage.folder}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
