"""Small tasks of several kinds, each a function of the hyperparameters that a search varies."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

NUM_ROWS = 44
"""Not a multiple of the batch, so that every pass ends with a smaller one."""
BATCH = 8


@cache
def pictures() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM_ROWS, 2, 6, 6, generator=generator), torch.randint(0, 3, (NUM_ROWS,), generator=generator)


@cache
def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(NUM_ROWS, 5, generator=generator)
    return inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()


@cache
def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 9, (NUM_ROWS, 7), generator=generator)
    return tokens, tokens[:, 0] % 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4, 3),
    )


class Transformer(nn.Module):
    """Two encoder layers with dropout everywhere, and a block written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.tokens(tokens))
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        return self.out(F.dropout(x + y, 0.1, self.training).mean(1))


KINDS: dict[str, tuple[Any, Any]] = {"mlp": (mlp, vectors), "cnn": (cnn, pictures), "transformer": (Transformer, texts)}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs.argmax(1) == batch[1]).double().mean()


def adamw(lr: float = 1e-2, eps: float = 1e-5, **more: Any) -> Any:
    """AdamW, with an `eps` far above rounding: the gradient of a bias before a BatchNorm is nothing but rounding,
    and the usual `eps` would make steps of it that differ between any two ways of summing."""
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, eps=eps, **more)


def task(kind: str = "mlp", optimizer: Any = None, **changes: Any) -> mh.Task:
    model, data = KINDS[kind]
    whole = {"data": data(), "valid": data(), "metrics": {"accuracy": accuracy}, "batch_size": BATCH, **changes}
    return mh.Task(model=model, loss=cross_entropy, optimizer=optimizer or adamw(), **whole)
