"""Coding habits that a strategy may not expect: batches, names, counters, late changes, work in the collate.

Each function contains its whole network.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset, default_collate

import manyhands as mh

from .classics import classify, rows_and_classes, tokens_and_classes
from .field import Samples
from .network import Network, Registry, randint, randn

HABITS = Registry("habit")


def _mlp(inputs: int = 6, hidden: int = 8, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def _classified(rows: int, g: Generator) -> Samples:
    x, y = randn(g, rows, 6), randint(g, 3, rows)
    return Samples([(x[i], y[i]) for i in range(rows)])


# Batches


@HABITS.add
def time_before_rows() -> Network:
    """Batches have time first, and as many times as rows, so that the first size says nothing about rows."""

    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][-1])

    def collate(samples: list[Any]) -> Any:
        return torch.stack([s[0] for s in samples], 1), torch.stack([s[1] for s in samples])

    def data(rows: int, g: Generator) -> Any:
        x, y = randn(g, rows, 6, 4), randint(g, 3, rows)
        return Samples([(x[i], y[i]) for i in range(rows)])

    return Network(model=Series, data=data, collate=collate, loss=classify)


@HABITS.add
def time_before_rows_and_targets_flat() -> Network:
    """Time comes first in inputs and targets, and the targets are flattened, as in word language models."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(11, 8), nn.GRU(8, 8), nn.Linear(8, 11)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.embed(x))[0]).flatten(0, 1)

    def collate(samples: list[Any]) -> Any:
        tokens = torch.stack(samples, 1)
        return tokens[:-1], tokens[1:].flatten()

    return Network(
        model=Words,
        data=lambda n, g: Samples(list(randint(g, 11, n, 7))),
        collate=collate,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    )


@HABITS.add
def rolled_negatives_of_the_collate() -> Network:
    """The collate gives each sample the next one of the batch as its negative."""

    def collate(samples: list[Any]) -> Any:
        x = torch.stack([s[0] for s in samples])
        return x, torch.stack([s[1] for s in samples]), x.roll(1, 0)

    def loss(model: Any, batch: Any) -> Tensor:
        x, y, other = batch
        out = model(x)
        apart = F.relu(1 - (out - model(other)).square().sum(1)).mean()
        return F.cross_entropy(out, y) + apart

    return Network(model=_mlp, data=_classified, collate=collate, loss=loss)


@HABITS.add
def mixup_of_the_collate() -> Network:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        order, share = torch.randperm(len(x)), float(torch.distributions.Beta(0.4, 0.4).sample())
        hot = F.one_hot(y, 3).to(x.dtype)
        return share * x + (1 - share) * x[order], share * hot + (1 - share) * hot[order]

    return Network(model=_mlp, data=_classified, collate=collate, loss=classify, draws=True)


@HABITS.add
def lengths_grow_with_batches() -> Network:
    """The collate counts its calls and cuts sequences less and less."""

    class Curriculum:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, samples: list[Any]) -> Any:
            self.calls += 1
            return torch.stack([s[0][: 2 + self.calls] for s in samples]), torch.stack([s[1] for s in samples])

    curriculum = Curriculum()

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).mean(1).tanh())

    def data(rows: int, g: Generator) -> Any:
        # Every task starts with short sequences.
        curriculum.calls = 0
        x, y = randint(g, 11, rows, 8), randint(g, 3, rows)
        return Samples([(x[i], y[i]) for i in range(rows)])

    return Network(model=Tokens, data=data, collate=curriculum, loss=classify)


@HABITS.add
def normalised_by_the_collate() -> Network:
    """The collate standardizes the batch by its own mean and deviation."""

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5), y

    return Network(model=_mlp, data=_classified, collate=collate, loss=classify)


class _Augmented(Dataset[Any]):
    """Draws from three generators in each sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index] + 0.1 * torch.randn(6)
        if random.random() < 0.5:
            x = -x
        return x * float(np.random.uniform(0.8, 1.2)), self.y[index]


@HABITS.add
def samples_augmented_by_three_generators() -> Network:
    return Network(
        model=_mlp, data=lambda n, g: _Augmented(randn(g, n, 6), randint(g, 3, n)), loss=classify, draws=True
    )


@HABITS.add
def two_views_stacked_by_the_collate() -> Network:
    """Two views of each sample lie behind each other in the batch: it has twice as many rows as samples."""

    def collate(samples: list[Any]) -> Any:
        return torch.stack([s[0] for s in samples] + [s[1] for s in samples])

    def loss(model: Any, batch: Tensor) -> Tensor:
        a, b = F.normalize(model(batch), dim=1).chunk(2)
        return 2 - 2 * (a * b).sum(1).mean() + 0.1 * model(batch).square().mean()

    def data(rows: int, g: Generator) -> Any:
        x, y = randn(g, rows, 6), randn(g, rows, 6)
        return Samples([(x[i], x[i] + 0.3 * y[i]) for i in range(rows)])

    return Network(model=_mlp, data=data, collate=collate, loss=loss)


@HABITS.add
def shared_table_in_every_batch() -> Network:
    """The collate adds a table that has no rows of samples."""

    table = torch.arange(24, dtype=torch.float32).reshape(6, 4).sin()

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.head((self.query(x) @ self.key(table).T).softmax(-1) @ table)

    def collate(samples: list[Any]) -> dict[str, Any]:
        x, y = default_collate(samples)
        return {"x": x, "y": y, "table": table}

    return Network(
        model=Lookup,
        data=_classified,
        collate=collate,
        loss=lambda m, b: F.cross_entropy(m(b["x"], b["table"]), b["y"]),
    )


@HABITS.add
def loss_of_one_number_in_a_vector() -> Network:
    return Network(
        model=_mlp,
        data=rows_and_classes(6),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]).reshape(1),
    )


@HABITS.add
def penalty_beside_counted_tokens() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        known = (y > 0).sum()
        total = F.cross_entropy(model(x), y, ignore_index=0, reduction="sum")
        penalty = sum(p.abs().sum() for p in model.parameters())
        return mh.mean(total + 1e-2 * known * penalty, known)

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@HABITS.add
def backward_of_a_part_in_the_loss() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        (0.1 * out.square().mean()).backward(retain_graph=True)
        return F.cross_entropy(out, batch[1])

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


# Names and forms of modules


@HABITS.add
def awkward_names() -> Network:
    class Step(nn.Module):
        """Its modules and parameters have names that wrappers and attributes of modules have too."""

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({"module": nn.Linear(6, 8), "_orig_mod": nn.Linear(8, 8)})
            self.loss, self.step = nn.Linear(8, 3), nn.Parameter(torch.zeros(8))
            self.parts = nn.ParameterDict({"a/b": torch.ones(8), "ü": torch.zeros(8), "grad": torch.zeros(3)})
            self.register_buffer("rank", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.module["module"](x).tanh() * self.parts["a/b"] + self.parts["ü"]
            return self.loss(self.module["_orig_mod"](h + self.step).tanh() * self.rank) + self.parts["grad"]

    return Network(model=Step, data=rows_and_classes(6), loss=classify)


@HABITS.add
def forward_of_the_instance() -> Network:
    class Chosen(nn.Module):
        """Chooses its forward when it is built, and has no length although it is a container."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
            self.forward = self._with_skip  # type: ignore[method-assign]

        def __len__(self) -> int:
            return 0

        def _with_skip(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h + h.tanh())

    return Network(model=Chosen, data=rows_and_classes(6), loss=classify)


@HABITS.add
def forward_patched_from_outside() -> Network:
    """A layer's forward is replaced by a function that calls the former one, as adapters and profilers do."""

    def model() -> nn.Module:
        net = _mlp()
        down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        net.add_module("adapter", nn.ModuleList([down, up]))
        before = net[0].forward

        def patched(x: Tensor) -> Tensor:
            return before(x) + up(down(x))

        net[0].forward = patched  # type: ignore[assignment]
        whole = nn.Sequential(net[0], net[1], net[2])
        whole.adapter = net.adapter
        whole.forward = lambda x: whole[2](whole[1](whole[0](x)))  # type: ignore[assignment]
        return whole

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@HABITS.add
def odd_buffers() -> Network:
    class Odd(nn.Module):
        """Buffers that are expanded, empty, of bits, shared by two modules, or None."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.tail = _mlp(), nn.Linear(3, 3)
            self.register_buffer("wide", torch.full((1,), 0.5).expand(6))
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("bits", torch.tensor([True, False, True, True, False, True]))
            self.register_buffer("nothing", None)
            self.register_buffer("mean", torch.zeros(3))
            self.tail.register_buffer("mean", self.mean)

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(torch.where(self.bits, x, self.wide))
            if self.training:
                self.mean.lerp_(out.detach().mean(0), 0.2)
            return self.tail(out) - self.tail.mean

    return Network(model=Odd, data=rows_and_classes(6), loss=classify)


@HABITS.add
def attention_pool_by_function() -> Network:
    class Pool(nn.Module):
        """Pools a picture by the functional form of attention with separate projections."""

        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.stem, self.place = nn.Conv2d(3, width, 2, 2), nn.Parameter(0.3 * torch.randn(5, width))
            self.k, self.q, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
            self.c = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).flatten(2).permute(2, 0, 1)
            x = torch.cat([x.mean(0, keepdim=True), x]) + self.place[:, None]
            out, _ = F.multi_head_attention_forward(
                query=x[:1],
                key=x,
                value=x,
                embed_dim_to_check=x.shape[-1],
                num_heads=2,
                q_proj_weight=self.q.weight,
                k_proj_weight=self.k.weight,
                v_proj_weight=self.v.weight,
                in_proj_weight=None,
                in_proj_bias=torch.cat([self.q.bias, self.k.bias, self.v.bias]),
                bias_k=None,
                bias_v=None,
                add_zero_attn=False,
                dropout_p=0.0,
                out_proj_weight=self.c.weight.T @ self.c.weight / 8,
                out_proj_bias=self.k.bias,
                use_separate_proj_weight=True,
                training=self.training,
                need_weights=False,
            )
            return self.c(out[0])

    return Network(model=Pool, data=rows_and_classes(3, 4, 4), loss=classify)


@HABITS.add
def masks_for_each_head() -> Network:
    class Masked(nn.Module):
        def __init__(self, width: int = 8, heads: int = 2) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, width)
            self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
            self.slopes, self.head = nn.Parameter(torch.linspace(0.1, 0.5, heads)), nn.Linear(width, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            b, length = tokens.shape
            places = torch.arange(length, device=tokens.device)
            distance = -(places[:, None] - places[None]).abs().to(self.slopes.dtype)
            mask = (self.slopes[:, None, None] * distance).repeat(b, 1, 1)
            x = self.embed(tokens)
            padding = torch.zeros_like(tokens, dtype=x.dtype).masked_fill(tokens == 0, -1e9)
            return self.head(self.attend(x, x, x, attn_mask=mask, key_padding_mask=padding)[0].mean(1))

    return Network(model=Masked, data=tokens_and_classes(), loss=classify)


@HABITS.add
def heads_as_one_tensor() -> Network:
    class Heads(nn.Module):
        """Attention whose weights have a dimension of heads and are used by einsum."""

        def __init__(self, width: int = 8, heads: int = 2) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, width)
            self.qkv = nn.Parameter(0.3 * torch.randn(3, heads, width, width // heads))
            self.out = nn.Parameter(0.3 * torch.randn(heads, width // heads, width))
            self.head = nn.Linear(width, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            q, k, v = torch.einsum("bld,shde->sbhle", x, self.qkv)
            weights = torch.einsum("bhie,bhje->bhij", q, k).softmax(-1)
            x = x + torch.einsum("bhij,bhje,hed->bid", weights, v, self.out)
            return self.head(x[:, 0])

    return Network(model=Heads, data=tokens_and_classes(), loss=classify)


@HABITS.add
def learned_initial_state() -> Network:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)
            self.h, self.c = nn.Parameter(torch.zeros(4, 1, 3)), nn.Parameter(torch.zeros(4, 1, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.cell.flatten_parameters()
            state = self.h.expand(-1, len(x), -1).contiguous(), self.c.expand(-1, len(x), -1).contiguous()
            out, (h, _) = self.cell(x, state)
            return self.head(out[:, -1] + torch.cat([h[-2], h[-1]], -1))

    return Network(model=Recurrent, data=rows_and_classes(5, 4), loss=classify)


@HABITS.add
def dueling_critics_in_one_loss() -> Network:
    class Agent(nn.Module):
        """Freezes the critic by requires_grad while the policy's loss is computed, in each call."""

        def __init__(self) -> None:
            super().__init__()
            self.policy, self.critic = _mlp(6, 8, 2), _mlp(8, 8, 1)
            self.target = copy.deepcopy(self.critic)
            for p in self.target.parameters():
                p.requires_grad = False

        def forward(self, s: Tensor, a: Tensor, r: Tensor) -> Tensor:
            with torch.no_grad():
                for p, t in zip(self.critic.parameters(), self.target.parameters(), strict=True):
                    t.mul_(0.9).add_(p, alpha=0.1)
                goal = r + 0.9 * self.target(torch.cat([s, self.policy(s).tanh()], 1)).squeeze(1)
            value = F.mse_loss(self.critic(torch.cat([s, a], 1)).squeeze(1), goal)
            for p in self.critic.parameters():
                p.requires_grad_(False)
            policy = -self.critic(torch.cat([s, self.policy(s).tanh()], 1)).mean()
            for p in self.critic.parameters():
                p.requires_grad_(True)
            return value + policy

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        return randn(g, rows, 6), randn(g, rows, 2), randn(g, rows)

    return Network(model=Agent, data=data, loss=lambda m, b: m(*b))


# What starts late


@HABITS.add
def spread_counts_after_calls() -> Network:
    class Late(nn.Module):
        """A term that couples the batch joins after two calls, which an attribute counts."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = _mlp(), 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.net(x)
            value = F.cross_entropy(out, y)
            if self.calls >= 2:
                value = value + F.relu(1 - out.var(0)).mean()
            self.calls += 1
            return value

    return Network(model=Late, data=rows_and_classes(6), loss=lambda m, b: m(*b), rows=29)


@HABITS.add
def spread_counts_after_a_buffer() -> Network:
    class Late(nn.Module):
        """As `spread_counts_after_calls`, with a buffer that counts and a weight that grows."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.net(x)
            weight = (self.step - 2).clamp(min=0)
            if self.training:
                self.step += 1
            return F.cross_entropy(out, y) + weight * F.relu(1 - out.var(0)).mean()

    return Network(model=Late, data=rows_and_classes(6), loss=lambda m, b: m(*b), rows=29)


@HABITS.add
def sum_counts_after_calls_of_the_loss() -> Network:
    class Late:
        """A loss that is summed in place of averaged from its third call on."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            self.calls += 1
            return F.cross_entropy(model(batch[0]), batch[1], reduction="mean" if self.calls <= 2 else "sum")

    late = Late()

    def data(rows: int, g: Generator) -> Any:
        # Every task starts with a new count.
        late.calls = 0
        return rows_and_classes(6)(rows, g)

    return Network(model=_mlp, data=data, loss=late, rows=29)


@HABITS.add
def queue_used_when_full() -> Network:
    class Queue(nn.Module):
        """Keys of earlier rows are negatives as soon as there are twelve of them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(6, 8, 4)
            self.register_buffer("keys", torch.zeros(12, 4))
            self.register_buffer("filled", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            q = F.normalize(self.net(x), dim=1)
            value = (q[:, 0] - 0.5).square().mean()
            if int(self.filled) >= 12:
                value = value + (q @ self.keys.clone().T).logsumexp(1).mean()
            with torch.no_grad():
                self.keys.copy_(torch.cat([q.detach(), self.keys])[:12])
                self.filled += len(x)
            return value

    return Network(model=Queue, data=lambda n, g: randn(g, n, 6), loss=lambda m, b: m(b), rows=29)


@HABITS.add
def norm_of_all_weights_after_steps() -> Network:
    class Late(torch.optim.SGD):
        """From the eighth step on, all weights together are scaled to a norm."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.taken = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            value = super().step(closure)
            self.taken += 1
            if self.taken >= 8:
                every = [p for group in self.param_groups for p in group["params"]]
                norm = torch.stack([p.norm() for p in every]).norm()
                torch._foreach_mul_(every, float(3 / norm))
            return value

    return Network(
        model=_mlp,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: Late(m.parameters(), lr=0.05, momentum=0.9),
        rows=53,
    )


@HABITS.add
def direction_of_rows_every_tenth_step() -> Network:
    class Late(torch.optim.SGD):
        """Every tenth step, the rows of matrices are made to have the same length."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            value = super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["taken"] = state.get("taken", 0) + 1
                    if p.ndim == 2 and state["taken"] % 10 == 0:
                        p.mul_(p.norm() / math.sqrt(len(p)) / p.norm(dim=1, keepdim=True))
            return value

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Late(m.parameters(), lr=0.05), rows=65
    )


@HABITS.add
def named_parameters_and_maximum() -> Network:
    return Network(
        model=_mlp,
        data=rows_and_classes(6),
        loss=lambda m, b: -classify(m, b),
        optimizer=lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-2, eps=1e-3, maximize=True, foreach=True),
    )
