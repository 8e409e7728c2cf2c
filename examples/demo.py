"""The demo: train one network on one device and on two, and compare them. It takes about a minute on two cores.

    python examples/demo.py [--quick]

Act 1 trains with `mh.Single()` and with `mh.Mirrored()`. Expect two loss curves on top of each other, a table with the
largest difference of the losses, the throughput and where the time went, and the speed-up that two independent
processes reach on this machine. Act 2 exports the network, loads it as a server would, and shows its predictions for
two digits that it has not seen. All files are written to runs/.
"""

import argparse
import dataclasses
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_pictures import answer, curves, share_bar
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

PARTS = {
    "compute": "green",
    "sync": "red",
    "input": "yellow",
    "optimizer": "blue",
    "validation": "cyan",
    "save": "magenta",
}


@dataclasses.dataclass
class Stage:
    """State that the acts share: where to print, whether to be quick, and the run of the first act."""

    console: Console
    folder: Path
    quick: bool = False
    run: mh.Run | None = None

    def title(self, text):
        self.console.print()
        self.console.print(Rule(f"[bold]{text}[/]", align="left"))


# -- the network: few parameters and much arithmetic, so that data parallelism pays ----------------------------


class Net(nn.Module):
    def __init__(self, width, depth=4):
        super().__init__()
        layers = [nn.Upsample(scale_factor=2, mode="bilinear")]
        for index in range(depth):
            convolution = nn.Conv2d(width if index else 1, width, 3, padding=1, bias=False)
            # One layer with batch statistics shows that they are synchronized; each such layer costs a collective.
            norm = nn.BatchNorm2d(width) if index == 0 else nn.GroupNorm(4, width)
            layers += [convolution, norm, nn.SiLU()]
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


# -- act 1: one device, then two -----------------------------------------------------------------------------


def one_and_two(stage):
    """Train on one device and on two, and compare the two runs."""
    one_on, two_on = places()
    epochs = 2 if stage.quick else 6
    # Each of two processes gets half of the cores, so one gets half of them too: two devices against one.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))

    stage.title("1  The same network on one device, then on two")
    stage.console.print(f'mh.fit(task, [bold]mh.Single()[/],   on="{one_on}", epochs={epochs})')
    one = mh.fit(task, mh.Single(), on=one_on, epochs=epochs, folder=stage.folder, name="one")
    stage.console.print(f'\nmh.fit(task, [bold]mh.Mirrored()[/], on="{two_on}", epochs={epochs})')
    two = mh.fit(task, mh.Mirrored(), on=two_on, epochs=epochs, folder=stage.folder, name="two")

    stage.console.print()
    width = min(96, stage.console.width) - 12
    stage.console.print(curves(one.losses, two.losses, ("one device", "two devices"), width))
    stage.console.print()
    stage.console.print(comparison(one, two))
    most = ceiling(one_on, two_on, rounds=1 if stage.quick else 3)
    stage.console.print(verdict(one, two, most))
    stage.run = two


def places():
    """Return one device and two: GPUs if there are two, else one GPU or the CPU split in half."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= 2:
        return "cuda:0", "cuda:0,1"
    return ("cuda:0", "cuda:0*2") if num_gpus else ("cpu", "cpu*2")


def rate(run):
    """Return samples per second, without validation and checkpoints."""
    return run.outcome.num_samples / (run.seconds["total"] - run.seconds["validation"] - run.seconds["save"])


def comparison(one, two):
    table = Table("", "one device", "two devices", "", box=None, pad_edge=False, header_style="bold")
    difference = max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True))
    final = (one.losses[-1], two.losses[-1])
    right = (one.metrics["valid_accuracy"], two.metrics["valid_accuracy"])
    table.add_row("final loss", *(f"{value:.6f}" for value in final), f"apart by {difference:.0e} at most")
    table.add_row("held-out accuracy", *(f"{value:.1%}" for value in right), f"of {len(digits()[1][0])} digits")
    table.add_row("samples/s", *(f"{rate(run):,.0f}" for run in (one, two)), f"[bold]{rate(two) / rate(one):.2f}x[/]")
    table.add_row("where time went", *(share_bar(run.seconds, PARTS, width=14) for run in (one, two)), "")
    for name, colour in PARTS.items():
        shares = [run.seconds[name] / run.seconds["total"] for run in (one, two)]
        if max(shares) >= 0.01:
            table.add_row(f"  [{colour}]{name}[/]", *(f"{run.seconds[name]:.2f} s" for run in (one, two)), "")
    return table


def ceiling(one_on, two_on, rounds):
    """Return the speed-up of two devices without communication, from the best of some rounds each."""
    alone, apart = [], []
    for _ in range(rounds):
        alone.append(sum(mh.launch(samples_per_second, on=one_on, progress=False)))
        apart.append(sum(mh.launch(samples_per_second, on=two_on, progress=False)))
    return max(apart) / max(alone)


def samples_per_second(hand, seconds=0.6):
    made = task()
    share = made.batch_size // hand.size
    model = made.model().to(hand.device)
    optimizer = made.optimizer(model)
    batch = [tensor[:share].to(hand.device) for tensor in made.data]
    hand.barrier()
    start, num_steps = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        if hand.device.type == "cuda":
            torch.cuda.synchronize()
    return num_steps * share / (time.perf_counter() - start)


def verdict(one, two, most):
    pairs = zip(one.losses, two.losses, strict=True)
    same = all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in pairs)
    judged = "[green]The same curve.[/]" if same else "[red]The curves differ: please report it.[/]"
    reached = rate(two) / rate(one)
    return (
        f"\n{judged} Two processes that never talk to each other reach [bold]{most:.2f}x[/] here; "
        f"training together reached {reached:.2f}x, {reached / most:.0%} of that."
    )


# -- act 2: ask it -------------------------------------------------------------------------------------------


def ask(stage):
    """Export the network, load it as a server would, and show its predictions for digits that it has not seen."""
    stage.title("2  Export it, load it, ask it")
    path = stage.run.export(stage.folder / "models" / "digits")
    stage.console.print(f'run.export("{path.parent}")  ->  version {path.name}')
    model = mh.load(path)
    images, labels = digits()[1]
    probabilities = model(images)
    doubts = probabilities.max(dim=1).values
    grid = Table.grid(padding=(0, 4))
    shown = [("the first held-out digit", 0), ("the one it is least sure of", int(doubts.argmin()))]
    grid.add_row(*(f"[italic]{words}[/]" for words, _ in shown))
    grid.add_row(*(answer(images[i], probabilities[i], int(labels[i])) for _, i in shown))
    stage.console.print(grid)


ACTS = [one_and_two, ask]


def command() -> str:
    """Return the command as it can be typed here, with its path if the environment is not active."""
    if shutil.which("manyhands"):
        return "manyhands"
    path = Path(sys.executable).with_name("manyhands")
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main():
    parser = argparse.ArgumentParser(description="What changes when one word changes, and what does not.")
    parser.add_argument("--quick", action="store_true", help="train for two epochs only")
    console = Console(highlight=False)
    stage = Stage(console, Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}", parser.parse_args().quick)
    if os.getloadavg()[0] > 0.4 * len(os.sched_getaffinity(0)):
        console.print("[yellow]Other programs keep this machine busy: the times below are rough.[/]")
    start = time.perf_counter()
    for act in ACTS:
        act(stage)
    console.print(f"\n{time.perf_counter() - start:.0f} s in all; everything is in {stage.folder}")
    console.print("Change one word next: [bold]mh.Mirrored()[/] -> [bold]mh.Mirrored(accumulate=4)[/], or:")
    console.print(
        f"  {command()} fit examples/image_classifier_manyhands.py --strategy mirrored --on 'cpu*2'",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
