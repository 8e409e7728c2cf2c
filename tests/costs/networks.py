"""Small networks of every kind whose costs are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, logits out; the head is the embedding."""

    def __init__(self, width: int = 32, layers: int = 4, heads: int = 4, words: int = 100, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy of the token after each."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def classes(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def cnn() -> nn.Module:
    """Convolutions, normalised, one in place."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def mlp() -> nn.Module:
    """Three layers."""
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two numbers of state per parameter."""
    return torch.optim.AdamW(model.parameters())


def task(model: Callable[[], nn.Module], loss: Callable[..., Any], data: Any) -> mh.Task:
    """A task of these."""
    return mh.Task(model=model, loss=loss, optimizer=adamw, data=data, batch_size=8)


def gpt_task(**sizes: int) -> mh.Task:
    """A small GPT and its tokens."""
    return task(lambda: GPT(**sizes), next_token, torch.zeros(64, sizes.get("length", 16) + 1, dtype=torch.long))


def mlp_task() -> mh.Task:
    """The three layers and their rows."""
    return task(mlp, classes, (torch.zeros(64, 12), torch.zeros(64, dtype=torch.long)))


def cnn_task() -> mh.Task:
    """The convolutions and their pictures."""
    return task(cnn, classes, (torch.zeros(64, 3, 8, 8), torch.zeros(64, dtype=torch.long)))
