"""Staleness: what every mode of parameter servers costs in loss, at the same number of samples as synchronous steps.

`python -m benchmarks.staleness [--quick]`. A convolutional network, a small GPT and a recommender with a table are
trained in each mode with four workers; the curves are in results/staleness.svg. The figure is the mean loss of the
last tenth over that of synchronous steps, as a share of what synchronous steps learned.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

from .report import RESULTS, Check, Report, arguments

WORKERS = 4
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one backup worker": {"backup": 1},
    "two steps ahead": {"staleness": 2},
    "asynchronous": {"staleness": None},
    "asynchronous, corrected": {"staleness": None, "correction": True},
}
COLOURS = ("#000000", "#4878a8", "#59a14f", "#e15759", "#b07aa1")
WITHIN = 0.1
"""How far a mode may stay behind, as a share of what synchronous steps learned."""


def main() -> None:
    """Trains every network in every mode."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("staleness", quick)
    curves: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in TASKS.items():
            task = make()
            steps = 40 if quick else 300
            curves[name] = {mode: losses(task, spec, steps, Path(folder)) for mode, spec in MODES.items()}
            ends = {mode: tail(curve) for mode, curve in curves[name].items()}
            learned = curves[name]["synchronous"][0] - ends["synchronous"]
            report.notes.update({f"last loss of {name}, {mode}": round(end, 4) for mode, end in ends.items()})
            for mode in list(MODES)[1:]:
                behind = (ends[mode] - ends["synchronous"]) / learned
                report.notes[f"behind: {name}, {mode}"] = round(behind, 4)
                if not quick and mode != "asynchronous, corrected":
                    report.checks[f"{name.lower()}_{mode.replace(' ', '_')}"] = Check(value=behind, at_most=WITHIN)
    report.finish()
    stem = "staleness.quick" if quick else "staleness"
    (RESULTS / f"{stem}.svg").write_text(plot(curves))


def losses(task: mh.Task, settings: Mapping[str, Any], steps: int, folder: Path) -> list[float]:
    """The loss of every step."""
    spec = mh.ParameterServer(servers=2, workers=WORKERS, **settings)
    run = mh.fit(
        task,
        spec,
        on=f"cpu*{WORKERS}",
        epochs=1000,
        steps=steps,
        folder=folder,
        options=mh.options.Display(progress=False),
    )
    return run.losses


def tail(curve: Sequence[float]) -> float:
    """The mean of the last tenth."""
    last = curve[-max(1, len(curve) // 10) :]
    return sum(last) / len(last)


def cnn() -> mh.Task:
    """Images whose class is where their bright patch is."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (2048,), generator=generator)
    images = torch.randn(2048, 1, 12, 12, generator=generator)
    for index, label in enumerate(labels.tolist()):
        images[index, 0, 6 * (label // 2) : 6 * (label // 2) + 6, 6 * (label % 2) : 6 * (label % 2) + 6] += 0.7
    return mh.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 4)
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=(images, labels),
        batch_size=64,
    )


class Gpt(nn.Module):
    """One block over a short context."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 32), nn.Embedding(16, 32)
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at every place."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.places(torch.arange(length))
        return self.head(self.blocks(x, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def gpt() -> mh.Task:
    """Sequences in which the next token is the last one plus a step of the sequence's own."""
    generator = torch.Generator().manual_seed(0)
    start, step = (torch.randint(0, high, (2048, 1), generator=generator) for high in (32, 5))
    tokens = (start + step * torch.arange(13)) % 32
    return mh.Task(
        model=Gpt,
        loss=lambda model, batch: F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        data=tokens,
        batch_size=64,
    )


class Recommender(nn.Module):
    """How much a user likes an item, from a table of rows on the servers."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = mh.strategies.Embedding(2000, 8, std=0.3), mh.strategies.Embedding(1000, 8, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        """The product of both rows."""
        return (self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1)


def recommender() -> mh.Task:
    """Ratings that come from hidden tastes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(0, rows, (8192,), generator=generator) for rows in (2000, 1000)], 1)
    tastes = [torch.randn(rows, 3, generator=generator) for rows in (2000, 1000)]
    ratings = (tastes[0][ids[:, 0]] * tastes[1][ids[:, 1]]).sum(1)
    return mh.Task(
        model=Recommender,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.2),
        data=(ids, ratings),
        batch_size=256,
    )


TASKS: dict[str, Callable[[], mh.Task]] = {"CNN": cnn, "GPT": gpt, "recommender": recommender}


def plot(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The curves of every network side by side, smoothed over some steps."""
    wide, high = 300, 200
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide * len(curves)}" height="{high + 60}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (name, modes) in enumerate(curves.items()):
        left = wide * number + 30
        top = max(max(smooth(curve)) for curve in modes.values())
        parts.append(f'<text x="{left}" y="16" font-size="13">{escape(name)}: loss by step, from {top:.2f}</text>')
        for colour, curve in zip(COLOURS, modes.values(), strict=True):
            values = smooth(curve)
            points = " ".join(
                f"{left + (wide - 50) * i / max(1, len(values) - 1):.1f},{24 + high - high * value / top:.1f}"
                for i, value in enumerate(values)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    for number, (colour, mode) in enumerate(zip(COLOURS, MODES, strict=True)):
        x, y = 30 + 165 * number, high + 48
        parts.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{escape(mode)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def smooth(curve: Sequence[float], over: int = 10) -> list[float]:
    """Means of some steps in a row."""
    return [sum(curve[i : i + over]) / len(curve[i : i + over]) for i in range(0, len(curve), max(1, over // 2))]


if __name__ == "__main__":
    main()
