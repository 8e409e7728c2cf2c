"""Small transformers composed at random from embeddings, attention, MLPs and norms as they are often written."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 5, 19, 16, 4
SIZE = WIDTH // HEADS
Choice = dict[str, str]


# -- embeddings and positions ------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """Scales what it looks up."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids) * 3.0


class OffsetPositions(nn.Embedding):
    """Is called with a mask, and looks up places."""

    def __init__(self) -> None:
        super().__init__(LENGTH + 12, WIDTH)

    def forward(self, mask: Tensor) -> Any:
        return super().forward((mask.cumsum(1) * mask).long() + 2)


class ByParameter(nn.Module):
    """A table without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids: Tensor) -> Any:
        return F.embedding(ids, self.weight)


class Factorised(nn.Module):
    """Few features, and a projection to all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(VOCABULARY, 6), nn.Linear(6, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        return self.up(self.table(ids))


class NormedEmbedding(nn.Embedding):
    """Looks up in a table that it computes from its own."""

    def forward(self, ids: Tensor) -> Any:
        return F.embedding(ids, F.normalize(self.weight, dim=-1))


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(nn.Embedding, VOCABULARY, WIDTH),
    "padding": partial(nn.Embedding, VOCABULARY, WIDTH, padding_idx=1),
    "scaled": partial(Scaled, VOCABULARY, WIDTH, padding_idx=0),
    "parameter": ByParameter,
    "factorised": Factorised,
    "normed": partial(NormedEmbedding, VOCABULARY, WIDTH),
}


class Positions(nn.Module):
    """What is added for each place."""

    table: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "learned":
            self.table = nn.Embedding(LENGTH + 3, WIDTH)
        elif kind == "offset":
            self.table = OffsetPositions()
        elif kind == "parameter":
            self.table = nn.Parameter(torch.randn(1, LENGTH + 2, WIDTH))
        elif kind == "sinusoidal":
            angle = torch.arange(LENGTH)[:, None] / 10 ** (torch.arange(0, WIDTH, 2) / WIDTH)
            self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if self.kind == "learned":
            return x + self.table(torch.arange(x.shape[1], device=x.device))
        if self.kind == "offset":
            return x + self.table(mask)
        if self.kind == "parameter":
            return x + self.table[:, : x.shape[1]]
        return x + self.table if self.kind == "sinusoidal" else x


# -- norms -------------------------------------------------------------------------------------------------------------


class OwnRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Any:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class OneMore(nn.LayerNorm):
    """Its weight is added to one."""

    def forward(self, x: Tensor) -> Any:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class ByChannel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "own": OwnRMSNorm,
    "one more": OneMore,
    "group": ByChannel,
}


# -- attention ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Queries, keys and values, how they are compared, and what becomes of the result."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.qkv, self.score, self.extra = choice["qkv"], choice["score"], choice["extra"]
        self.dropout = 0.2 if choice["dropout"] == "yes" else 0.0
        bias = choice["bias"] == "yes"
        self.groups = {"grouped": 2, "one": 1, "fused grouped": 2}.get(self.qkv, HEADS)
        if self.qkv.startswith("fused"):
            self.inner = nn.Linear(WIDTH, WIDTH + 2 * self.groups * SIZE, bias=bias)
        else:
            self.query = nn.Linear(WIDTH, WIDTH, bias=bias)
            self.key = self.query if self.qkv == "shared" else nn.Linear(WIDTH, self.groups * SIZE, bias=bias)
            self.value = nn.Linear(WIDTH, self.groups * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        if self.extra == "normed":
            self.norm_q, self.norm_k = nn.LayerNorm(SIZE), OwnRMSNorm(SIZE)
        elif self.extra == "temperature":
            self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1))
        elif self.extra == "relative":
            self.relative = nn.Embedding(2 * LENGTH, HEADS)
        elif self.extra == "talking":
            self.talking = nn.Linear(HEADS, HEADS, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        rows, length, _ = x.shape
        q, k, v = self.projected(x)
        if self.extra == "normed":
            q, k = self.norm_q(q), self.norm_k(k)
        elif self.extra == "rotary":
            q, k = rotated(q), rotated(k)
        if self.score == "sdpa" or self.score.startswith("sdpa "):
            found = self.by_torch(q, k, v, mask)
        else:
            if self.groups < HEADS:
                k, v = (part.repeat_interleave(HEADS // self.groups, 1) for part in (k, v))
            found = self.by_hand(q, k, v, mask)
        found = found.transpose(1, 2)
        found = found.reshape(rows, length, WIDTH) if self.score != "einsum" else found.flatten(2)
        return self.out(found)

    def projected(self, x: Tensor) -> Any:
        rows, length, _ = x.shape
        if not self.qkv.startswith("fused"):
            q, k, v = self.query(x), self.key(x), self.value(x)
            return tuple(part.view(rows, length, -1, SIZE).transpose(1, 2) for part in (q, k, v))
        all_of = self.inner(x)
        if self.qkv == "fused view":
            q, k, v = all_of.view(rows, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            return q, k, v
        if self.qkv == "fused by head":
            q, k, v = all_of.view(rows, length, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1)
            return q, k, v
        if self.qkv == "fused inner":
            q, k, v = all_of.view(rows, length, HEADS, 3, SIZE).unbind(3)
        elif self.qkv == "fused chunk":
            q, k, v = all_of.chunk(3, -1)
        elif self.qkv == "fused slices":
            q, k, v = all_of[..., :WIDTH], all_of[..., WIDTH : 2 * WIDTH], all_of[..., 2 * WIDTH :]
        elif self.qkv == "fused weight":
            q, k, v = (F.linear(x, w) for w in self.inner.weight.split(WIDTH))
        else:
            q, k, v = all_of.split([WIDTH, self.groups * SIZE, self.groups * SIZE], dim=-1)
        return tuple(part.reshape(rows, length, -1, SIZE).transpose(1, 2) for part in (q, k, v))

    def bias(self, length: int) -> Any:
        if self.extra == "relative":
            places = torch.arange(length)
            found: Tensor = self.relative(places[:, None] - places[None] + LENGTH).permute(2, 0, 1)
            return found
        if self.extra == "alibi":
            slopes = 2.0 ** -torch.arange(1, HEADS + 1)
            return slopes[:, None, None] * -(torch.arange(length)[:, None] - torch.arange(length)[None]).abs()
        return None

    def by_torch(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        p = self.dropout if self.training else 0.0
        settings: dict[str, Any] = {"enable_gqa": True} if self.groups < HEADS else {}
        bias = self.bias(q.shape[2])
        if self.extra == "temperature":
            q = q * self.temperature
        if bias is not None or self.score == "sdpa added":
            allowed = mask[:, None, None, :].bool()
            added = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, -1e9)
            return F.scaled_dot_product_attention(q, k, v, added if bias is None else added + bias, p, **settings)
        if self.score == "sdpa mask":
            return F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :].bool(), p, **settings)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, **settings)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        rows, _, length, _ = q.shape
        if self.score == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k)
        elif self.score == "bmm":
            scores = torch.bmm(q.reshape(-1, length, SIZE), k.reshape(-1, length, SIZE).transpose(1, 2))
            scores = scores.view(rows, HEADS, length, length)
        elif self.score == "baddbmm":
            empty = torch.zeros(rows * HEADS, length, length, dtype=q.dtype)
            flat = (part.reshape(rows * HEADS, length, SIZE) for part in (q, k.transpose(2, 3).transpose(2, 3)))
            first, second = flat
            scores = empty.baddbmm(first, second.transpose(1, 2), beta=0.0, alpha=0.5).view(rows, HEADS, length, length)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(SIZE)
        bias = self.bias(length)
        if bias is not None:
            scores = scores + bias
        if self.extra == "temperature":
            scores = scores * self.temperature
        elif self.extra == "talking":
            scores = self.talking(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        weights = F.dropout(F.softmax(scores, -1), self.dropout, self.training)
        return torch.einsum("bhij,bhjd->bhid", weights, v) if self.score == "einsum" else weights @ v


def rotated(x: Tensor) -> Any:
    angle = torch.arange(x.shape[2])[:, None] / 10.0 ** torch.arange(0, SIZE // 2)
    angle = torch.cat([angle, angle], -1).to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


class Torchs(nn.Module):
    """torch's own attention: to itself, from learned queries, or sequence first."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=kind != "torch first", dropout=dropout)
        if kind == "torch queries":
            self.queries = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        ignored = mask == 0
        if self.kind == "torch first":
            y: Tensor = x.transpose(0, 1)
            return self.inner(y, y, y, key_padding_mask=ignored, need_weights=False)[0].transpose(0, 1)
        if self.kind == "torch queries":
            queries = self.queries.expand(x.shape[0], -1, -1)[:, : x.shape[1]]
            return self.inner(queries, x, x, key_padding_mask=ignored)[0]
        found, weights = self.inner(x, x, x, key_padding_mask=ignored)
        return found + weights.mean(-1, keepdim=True)


# -- MLPs --------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    up: Any
    down: Any

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        wide = 24
        twice = kind in ("fused", "glu", "interleaved")
        if kind == "convolution":
            self.up, self.down = nn.Conv1d(WIDTH, wide, 3, padding=1), nn.Conv1d(wide, WIDTH, 1)
        elif kind == "weight norm":
            self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, wide))
            self.down = nn.Linear(wide, WIDTH)
        elif kind == "old weight norm":
            self.up = nn.utils.weight_norm(nn.Linear(WIDTH, wide))
            self.down = nn.Linear(wide, WIDTH)
        elif kind == "experts":
            self.gate = nn.Linear(WIDTH, 3)
            self.up, self.down = (
                nn.Parameter(torch.randn(3, WIDTH, wide) / 4),
                nn.Parameter(torch.randn(3, wide, WIDTH) / 5),
            )
        else:
            self.up = nn.Linear(WIDTH, wide * (2 if twice else 1))
            self.down = nn.Linear(wide, WIDTH)
        if kind == "gated":
            self.gate = nn.Linear(WIDTH, wide, bias=False)
        elif kind == "sub-norm":
            self.norm = nn.LayerNorm(wide)
        elif kind == "own bias":
            self.bias = nn.Parameter(torch.randn(wide))
            self.scale = nn.Parameter(torch.rand(WIDTH))
        elif kind == "patched":
            plain = self.up.forward
            self.up.forward = lambda x: 2 * plain(x)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "convolution":
            return self.dropout(self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2))
        if self.kind == "experts":
            gate = F.softmax(self.gate(x), -1)
            inner = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
            return torch.einsum("bteh,ehd,bte->btd", inner, self.down, gate)
        if self.kind == "tied":
            return F.linear(F.relu(self.up(x)).square(), self.up.weight.t())
        up = self.up(x)
        if self.kind == "fused":
            a, b = up.chunk(2, -1)
            up = F.silu(a) * b
        elif self.kind == "glu":
            up = F.glu(up, -1)
        elif self.kind == "interleaved":
            up = up[..., ::2] * F.sigmoid(up[..., 1::2])
        elif self.kind == "gated":
            up = F.gelu(self.gate(x)) * up
        elif self.kind == "sub-norm":
            up = self.norm(F.gelu(up))
        elif self.kind == "own bias":
            return self.down(F.gelu(up + self.bias)) * self.scale
        else:
            up = F.gelu(up)
        return self.down(self.dropout(up))


# -- the network -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, choice: Choice) -> None:
        super().__init__()
        dropout = 0.1 if choice["dropout"] == "yes" else 0.0
        torchs = choice["qkv"].startswith("torch")
        self.attention: nn.Module = Torchs(choice["qkv"], dropout) if torchs else Attention(choice)
        self.mlp = MLP(choice["mlp"], dropout)
        self.first, self.second = NORMS[choice["norm"]](WIDTH), NORMS[choice["norm"]](WIDTH)
        self.order = choice["order"]
        self.weight = nn.Parameter(torch.tensor(0.7)) if self.order == "weighed" else None

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if self.order == "post":
            x = self.first(x + self.attention(x, mask))
            return self.second(x + self.mlp(x))
        if self.order == "parallel":
            y = self.first(x)
            return x + self.attention(y, mask) + self.mlp(y)
        weight = 1.0 if self.weight is None else self.weight
        x = x + weight * self.attention(self.first(x), mask)
        return x + weight * self.mlp(self.second(x))


class Network(nn.Module):
    embed: Any
    positions: Any
    blocks: Any
    head: Any

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.embed = EMBEDDINGS[choice["embedding"]]()
        self.positions = Positions(choice["positions"])
        first = Block(choice)
        others = {"once": [], "same": [first]}
        self.blocks = nn.ModuleList([first, *others.get(choice["repeat"], [Block(choice)])])
        if choice["repeat"] == "tied":
            # Two layers with one matrix.
            self.blocks[1].mlp.down.weight = first.mlp.down.weight
        self.norm = NORMS[choice["norm"]](WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=choice["head"] != "tied")
        if choice["head"] == "tied":
            self.head.weight = self.embed.weight
        if choice["hook"] == "yes":
            self.norm.register_forward_hook(lambda _, __, out: out * 1.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor) -> Any:
        mask = (ids > 2).long()
        mask[:, 0] = 1
        x = self.positions(self.embed(ids), mask)
        if self.choice["dropout"] == "yes":
            x = F.dropout(x, 0.1, self.training)
        for block in self.blocks:
            x = (
                checkpoint(block, x, mask, use_reentrant=False)
                if self.choice["checkpoint"] == "yes"
                else block(x, mask)
            )
        x = self.norm(x)
        if self.choice["head"] == "functional":
            return F.linear(x, self.embed.weight)
        if self.choice["head"] == "matmul":
            return x @ self.embed.weight.t() + self.head.bias
        return self.head(x)


def loss_of(kind: str, model: nn.Module, batch: Any) -> Any:
    (ids,) = batch
    logits, targets = model(ids)[:, :-1], ids[:, 1:]
    if kind == "ignoring":
        targets = torch.where(targets > 2, targets, -100)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return mh.mean(total, (targets >= 0).sum())
    if kind == "gather":
        return -F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).mean()
    if kind == "nll":
        return F.nll_loss(logits.log_softmax(-1).transpose(1, 2), targets)
    if kind == "smooth":
        return F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1)
    if kind == "pooled":
        return F.mse_loss(logits.mean(1), F.one_hot(targets[:, 0], VOCABULARY).to(logits.dtype))
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


OPTIONS: dict[str, list[str]] = {
    "embedding": list(EMBEDDINGS),
    "positions": ["learned", "offset", "parameter", "sinusoidal", "none"],
    "norm": list(NORMS),
    "qkv": [
        "apart", "apart", "shared", "grouped", "one", "fused chunk", "fused view", "fused by head", "fused inner",
        "fused slices", "fused grouped", "fused weight", "torch", "torch queries", "torch first",
    ],
    "score": ["matmul", "einsum", "bmm", "baddbmm", "sdpa", "sdpa mask", "sdpa added"],
    "extra": ["none", "none", "normed", "rotary", "temperature", "relative", "alibi", "talking"],
    "mlp": [
        "plain", "gated", "fused", "glu", "interleaved", "sub-norm", "own bias", "patched", "convolution", "experts",
        "tied", "weight norm", "old weight norm",
    ],
    "order": ["pre", "pre", "post", "parallel", "weighed"],
    "repeat": ["other", "other", "same", "tied"],
    "head": ["own", "tied", "functional", "matmul"],
    "hook": ["no", "no", "yes"],
    "bias": ["no", "yes"],
    "checkpoint": ["no", "no", "no", "yes"],
    "dropout": ["no", "yes"],
    "loss": ["plain", "ignoring", "gather", "nll", "smooth", "pooled"],
}  # fmt: skip


def choose(seed: int) -> Choice:
    """Return what a network is made of; the same for the same seed."""
    draw = random.Random(seed)
    choice = {name: draw.choice(options) for name, options in OPTIONS.items()}
    if choice["embedding"] == "factorised":
        choice["head"] = "own"
    if choice["repeat"] == "tied" and choice["mlp"] in ("tied", "experts"):
        choice["repeat"] = "other"
    return choice


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def task_of(choice: Choice) -> mh.Task:
    """Return a task that trains such a network to predict the next token."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return mh.Task(
        model=partial(Network, choice),
        loss=partial(loss_of, choice["loss"]),
        optimizer=optimizer,
        data=(ids,),
        batch_size=4,
        seed=3,
    )
