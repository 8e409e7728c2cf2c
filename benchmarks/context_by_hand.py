"""A GPT, and its training with ring attention on two ranks as one writes it by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from manyhands.distributed import World

from .split import Steps

VOCABULARY, WIDTH, HEADS, DEPTH = 256, 128, 4, 4


class Layer(nn.Module):
    """A block whose attention is a function that may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A GPT with learned positions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1]) if places is None else places
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next tokens."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and those that follow."""
    found = torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Ring(Function):
    """Causal ring attention over two ranks, each with a quarter from the front and one from the back, or the middle."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank = dist.get_rank()
        theirs = torch.empty(2, *k.shape)
        ours = torch.stack([k, v])
        works = [dist.isend(ours, 1 - rank), dist.irecv(theirs, 1 - rank)]
        half = q.shape[2] // 2
        out, total = torch.empty_like(q), q.new_empty(q.shape[:-1])
        parts: list[list[tuple[Tensor, Tensor]]] = [[], []]
        for part, rows in enumerate((slice(0, half), slice(half, None))):
            parts[part].append(_forward(q[:, :, rows], k[:, :, rows], v[:, :, rows], True))
        parts[1].append(_forward(q[:, :, half:], k[:, :, :half], v[:, :, :half], False))
        for work in works:
            work.wait()
        for part, columns in _others(rank, half):
            rows = slice(0, half) if part == 0 else slice(half, None)
            parts[part].append(_forward(q[:, :, rows], theirs[0][:, :, columns], theirs[1][:, :, columns], False))
        for part, rows in enumerate((slice(0, half), slice(half, None))):
            sums = torch.stack([each for _, each in parts[part]])
            total[:, :, rows] = sums.logsumexp(0)
            weights = (sums - total[:, :, rows]).exp().unsqueeze(-1)
            out[:, :, rows] = sum(weight * each for weight, (each, _) in zip(weights, parts[part], strict=True))
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, total = ctx.saved_tensors
        gradient, rank, half = gradient.contiguous(), dist.get_rank(), q.shape[2] // 2
        theirs, ours = torch.empty(2, *k.shape), torch.stack([k, v])
        works = [dist.isend(ours, 1 - rank), dist.irecv(theirs, 1 - rank)]
        d_q, own, other = torch.zeros_like(q), torch.zeros_like(ours), torch.zeros_like(ours)

        def add(rows: slice, columns: slice, held: Tensor, into: Tensor, causal: bool) -> None:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, rows], q[:, :, rows], held[0][:, :, columns], held[1][:, :, columns], out[:, :, rows],
                total[:, :, rows], 0.0, causal,
            )  # fmt: skip
            d_q[:, :, rows] += parts[0]
            into[0][:, :, columns] += parts[1]
            into[1][:, :, columns] += parts[2]

        front, back = slice(0, half), slice(half, None)
        for work in works:
            work.wait()
        for part, columns in _others(rank, half):
            add(front if part == 0 else back, columns, theirs, other, False)
        arrived = torch.empty_like(ours)
        works = [dist.isend(other, 1 - rank), dist.irecv(arrived, 1 - rank)]
        for rows in (front, back):
            add(rows, rows, ours, own, True)
        add(back, front, ours, own, False)
        for work in works:
            work.wait()
        own += arrived
        return d_q, own[0], own[1]


def _others(rank: int, half: int) -> list[tuple[int, slice]]:
    """Which of a rank's halves attends to which tokens of the other rank: quarters 0 and 3, and 1 and 2."""
    return [(1, slice(None))] if rank == 0 else [(0, slice(0, half)), (1, slice(0, half))]


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)  # type: ignore[no-any-return]


def by_hand(world: World, data: tuple[Tensor, Tensor], batch_size: int) -> Steps:
    """The step as one writes it for two ranks."""
    length = data[0].shape[1]
    network = Gpt(length)
    for layer in network.layers:
        layer.attend = Ring.apply  # type: ignore[assignment]
    optimizer = adamw(network)
    quarters = torch.arange(length).chunk(4)
    places = torch.cat([quarters[0], quarters[3]] if world.rank == 0 else [quarters[1], quarters[2]])
    parameters = list(network.parameters())
    while True:
        for start in range(0, len(data[0]), batch_size):
            inputs, targets = (tensor[start : start + batch_size, places] for tensor in data)
            total = F.cross_entropy(network(inputs, places).flatten(0, 1), targets.flatten(), reduction="sum")
            (total / (batch_size * length)).backward()
            flat = torch.cat([p.grad.flatten() for p in parameters])
            dist.all_reduce(flat)
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield
