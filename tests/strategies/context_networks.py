"""Transformers as they are written by hand, for tests of context parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 13, 16, 4, 11, 9
"""The length divides by no number of ranks."""


class Block(nn.Module):
    """Attention and an MLP, as in GPT-2: scores, a mask and a softmax by hand."""

    def __init__(self, bias: str = "causal") -> None:
        super().__init__()
        self.bias = bias
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        q, k, v = self.qkv(self.first(x)).split(width, dim=2)
        q, k, v = (t.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if self.bias == "alibi":
            distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
            slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)
            scores = scores + slopes[:, None, None] * distance
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(rows, length, width)
        x = x + self.out(y)
        return x + self.mlp(self.second(x))


class HandWritten(nn.Module):
    """A GPT with learned positions, or with ALiBi; the head is tied to the embedding."""

    def __init__(self, bias: str = "causal", dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.drop = nn.Dropout(dropout)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Root(nn.Module):
    """RMSNorm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Grouped(nn.Module):
    """Grouped-query attention with rotary positions, by torch's own attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.size = kind, WIDTH // HEADS
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), Root()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        one, two = x[..., : self.size // 2], x[..., self.size // 2 :]
        return x * angles.cos() + torch.cat((-two, one), dim=-1) * angles.sin()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, length = x.shape[:2]
        y = self.norm(x)
        q = self.q(y).view(rows, length, HEADS, self.size).transpose(1, 2)
        k, v = self.kv(y).view(rows, length, 2, 2, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        angles = torch.arange(length, dtype=x.dtype)[:, None] * 0.1 ** torch.arange(self.size // 2, dtype=x.dtype)
        angles = torch.cat((angles, angles), -1)
        q, k = self.rotated(q, angles), self.rotated(k, angles)
        causal = mask is None and self.kind != "both ways"
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, -1))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Rotary(nn.Module):
    """A Llama written by hand; `kind` is the mask: causal, both ways, window or documents."""

    def __init__(self, kind: str = "causal") -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Grouped(kind) for _ in range(2))

    def mask(self, tokens: Tensor) -> Tensor | None:
        length = tokens.shape[1]
        place = torch.arange(length)
        causal = place[:, None] >= place[None, :]
        if self.kind == "window":
            return causal & (place[:, None] - place[None, :] < 4)
        if self.kind == "documents":
            document = (tokens == 1).cumsum(1)
            return (causal & (document[:, :, None] == document[:, None, :]))[:, None]
        if self.kind == "left padding":
            return causal[None, None] & (tokens != 0)[:, None, None, :]
        return None

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.tokens(tokens), self.mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Encoder(nn.Module):
    """nn.TransformerEncoder over embedded inputs, with padding."""

    def __init__(self, batch_first: bool = True, weights: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 3)
        self.pool = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if weights else None

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=is_padding)
        x = x if self.batch_first else x.transpose(0, 1)
        if self.pool is not None:
            x = x + self.pool(x, x, x, key_padding_mask=is_padding)[0]
        kept = (~is_padding).unsqueeze(-1)
        return self.head((x * kept).sum(1) / kept.sum(1))


class Translator(nn.Module):
    """nn.Transformer: cross-attention between sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class Local(nn.Module):
    """A convolution and a recurrent layer along the sequence, which need whole sequences, beside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.block = Block()
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        x = self.block(x)
        return self.head(x + self.memory(x)[0].cumsum(1))


def shifted(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Predict the next token, by slices of the logits."""
    logits = model(batch[0])
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch[0][:, 1:].reshape(-1))


def counted(model: Any, batch: tuple[Tensor, ...]) -> Any:
    """A mean over the tokens that are not ignored."""
    targets = batch[0].roll(-1, 1).masked_fill(batch[0] < 3, -100)
    logits = model(batch[0])
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return mh.mean(total, (targets != -100).sum())


def classified(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[1], batch[0] == 0), batch[2])


def translated(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    target = batch[0][:, :7]
    return F.cross_entropy(model(batch[0], target).transpose(1, 2), target, label_smoothing=0.1)


def data() -> tuple[Tensor, ...]:
    """Tokens with padding (0) at the end, embedded inputs, and classes."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=generator)
    tokens = tokens.where(torch.arange(LENGTH) < lengths, 0)
    return (
        tokens,
        torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )


def task_of(model: Callable[[], nn.Module], loss: Callable[..., Any]) -> mh.Task:
    return mh.Task(
        model=model,
        data=data(),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        batch_size=6,
    )


NETWORKS: dict[str, Callable[[], mh.Task]] = {
    "learned positions": lambda: task_of(HandWritten, shifted),
    "alibi": lambda: task_of(lambda: HandWritten("alibi"), counted),
    "dropout": lambda: task_of(lambda: HandWritten(dropout=0.3), shifted),
    "rotary": lambda: task_of(Rotary, shifted),
    "both ways": lambda: task_of(lambda: Rotary("both ways"), counted),
    "window": lambda: task_of(lambda: Rotary("window"), shifted),
    "documents": lambda: task_of(lambda: Rotary("documents"), counted),
    "left padding": lambda: task_of(lambda: Rotary("left padding"), counted),
    "encoder": lambda: task_of(Encoder, classified),
    "encoder, sequence first": lambda: task_of(lambda: Encoder(batch_first=False), classified),
    "attention weights": lambda: task_of(lambda: Encoder(weights=True), classified),
    "translator": lambda: task_of(Translator, translated),
    "convolution and recurrence": lambda: task_of(Local, shifted),
}
