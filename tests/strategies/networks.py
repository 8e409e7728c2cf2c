"""Networks to partition: skips over several stages, tied weights, two towers, an encoder and a decoder."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from tests.training.problems import OPTIMIZERS, generator, problem


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Deep(nn.Module):
    """Several blocks, and dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(block(16), nn.Dropout(dropout)) for _ in range(4)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)))


class Shifting(nn.Module):
    """Layers that are frozen at first, a head for training only and one for evaluation only, a buffer that is replaced.

    Its loss reads a parameter that its forward does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(5))
        self.first = nn.Linear(12, 16).requires_grad_(False)
        self.side, self.middle = nn.Linear(16, 5), block(16)
        self.head, self.check = nn.Linear(16, 5), nn.Linear(5, 5)
        self.register_buffer("last", torch.zeros(16))
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x) / self.temperature + self.shift.detach()
        out = self.head(self.middle(start) + start)
        if not self.training:
            return out + self.check(out) + self.last.sum()
        self.last = self.last * 0 + self.head.weight.detach().mean(0)
        return out + self.side(start)


def shifted(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]) * model.scale, batch[1])


class Residual(nn.Module):
    """Convolutions with batch statistics, changes in place, and a skip over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.first(x)
        for layer in self.blocks:
            x = layer(x) + x
        x += start
        return self.head(x.mean((2, 3)))


class Towers(nn.Module):
    """Two towers that need nothing of each other, and a number beside the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tower_a = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
        self.tower_b = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, left: Tensor, *, right: Tensor) -> dict[str, Any]:
        a, b = self.tower_a(left), self.tower_b(right)
        return {"pair": (a, b), "score": (a * b).sum(1) * self.scale, "rows": left.shape[0]}


def towers_loss(model: Any, batch: Any) -> Tensor:
    answer = model(batch[0], right=batch[1])
    assert answer["rows"] == len(batch[0])
    return F.binary_cross_entropy_with_logits(answer["score"], (batch[2] > 2).to(answer["score"].dtype))


class Translator(nn.Module):
    """An encoder whose result every block of the decoder reads; embeddings are tied to the output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        layer = {"nhead": 2, "dim_feedforward": 24, "dropout": dropout, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, **layer), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, **layer), 2)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(self.tokens(target), self.encoder(self.tokens(source))))


def translate(model: Any, batch: Tensor) -> Any:
    logits = model(batch[:, :5], batch[:, 4:-1])
    wanted = batch[:, 5:]
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
    return mh.mean(losses, (wanted != 0).sum())


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(name: str, rows: int = 21, batch_size: int = 8, dropout: float = 0.0) -> mh.Task:
    """A task whose last batch is partial."""
    numbers = torch.randn(rows, 12, generator=generator(0))
    labels = torch.randint(0, 5, (rows,), generator=generator(1))
    others: dict[str, tuple[Any, Any, Any]] = {
        "deep": (lambda: Deep(dropout), classify, (numbers, labels)),
        "shifting": (Shifting, shifted, (numbers, labels)),
        "residual": (Residual, classify, (torch.randn(rows, 1, 6, 6, generator=generator(0)), labels)),
        "towers": (Towers, towers_loss, (numbers, torch.randn(rows, 6, generator=generator(2)), labels)),
        "translator": (
            lambda: Translator(dropout), translate, torch.randint(0, 20, (rows, 10), generator=generator(3))
        ),
    }  # fmt: skip
    if name not in others:
        return problem(name, "adamw", rows=rows, batch_size=batch_size)
    model, loss, data = others[name]
    return mh.Task(
        model=model,
        loss=loss,
        optimizer=lambda network: OPTIMIZERS["adamw"](network.parameters()),
        data=data,
        batch_size=batch_size,
        clip=0.5,
        seed=3,
    )


class Scribble(nn.Module):
    """A random graph of small layers: every one reads a few results before it."""

    def __init__(self, seed: int, size: int = 7) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(size))
        self.reads = [draw.sample(range(n + 1), draw.randint(1, min(3, n + 1))) for n in range(size)]
        self.kinds = [draw.choice(["tanh", "relu_", "mul", "chunk", "fill"]) for _ in range(size)]
        self.ends = sorted({size, *draw.sample(range(1, size + 1), 2)})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [x]
        for layer, reads, kind in zip(self.layers, self.reads, self.kinds, strict=True):
            y = layer(torch.stack([made[n] for n in reads]).sum(0))
            if kind == "relu_":
                y = F.relu(y, inplace=True)
            elif kind == "mul":
                y = y * made[reads[0]]
            elif kind == "fill":
                filled = torch.zeros_like(y)
                filled[:, :2], filled[:, 2:] = y[:, 2:], y[:, :2].tanh()
                y = filled
            elif kind == "chunk":
                a, b = y.chunk(2, 1)
                y = torch.cat([b, a], 1)
            else:
                y = torch.tanh(y)
            made.append(y)
        return tuple(made[n] for n in self.ends)
