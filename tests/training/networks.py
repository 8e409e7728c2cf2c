"""More networks of the equality matrix, written without regard to how they will be split."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

from .problems import OPTIMIZERS, generator

VOCABULARY, LENGTH = 23, 9
"""Neither of them divides by two."""


class Attention(nn.Module):
    """Fused queries, keys and values, heads by view."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(2 * width, width)})
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        gate, up = self.mlp["up"](self.norm2(x)).chunk(2, dim=-1)
        return x + self.drop(self.mlp["down"](F.silu(gate) * up))


class OwnGpt(nn.Module):
    """A GPT as one writes it by hand, its head tied to its embeddings."""

    def __init__(self, width: int = 16, heads: int = 4, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch[:, 1:].reshape(-1), label_smoothing=0.1)


class Translator(nn.Module):
    """An encoder and a decoder, torch's own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.body = nn.Transformer(width, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        hidden = self.body(
            self.source(source), self.target(target), tgt_mask=mask, src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(hidden)


def translated(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0], batch[1][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten())


class Towers(nn.Module):
    """Two towers and what they have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv1d(8, 8, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        pooled = F.max_pool1d(self.right(right), 2).mean(-1)
        return self.scale * (F.normalize(self.left(left), dim=-1) * torch.tanh(pooled)).sum(-1)


def matched(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


def network(name: str, optimizer: str = "adamw", rows: int = 20) -> mh.Task:
    """A task of one of these networks."""
    make = OPTIMIZERS[optimizer]
    common: dict[str, Any] = {
        "optimizer": lambda model: make(model.parameters()), "batch_size": 8, "clip": 0.5, "seed": 3
    }  # fmt: skip
    tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator(0))
    if name in ("own", "dropout"):
        dropout = 0.2 if name == "dropout" else 0.0
        return mh.Task(model=lambda: OwnGpt(dropout=dropout), loss=next_tokens, data=tokens, **common)
    if name == "translator":
        others = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator(1)) * (torch.arange(LENGTH) < 6)
        return mh.Task(model=Translator, loss=translated, data=(others, tokens), **common)
    assert name == "towers"
    numbers = [torch.randn(rows, *shape, generator=generator(2)) for shape in ((6,), (2, 10), ())]
    return mh.Task(model=Towers, loss=matched, data=tuple(numbers), **common)
