"""Networks as in repositories and notebooks: code for distributed runs, hidden state, overridden methods, layers.

Each function contains its whole network.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import threading
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import vmap
from torch.utils.data import default_collate

import manyhands as mh

from .classics import classify, rows_and_classes, tokens_and_classes
from .field import Samples
from .network import Network, Registry, mean_square, randint, randn

REPOSITORIES = Registry("repository")


def _mlp(inputs: int = 6, hidden: int = 8, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def _two(first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    return lambda rows, g: (randn(g, rows, *first), randn(g, rows, *second))


def _samples(rows: int, g: Generator) -> Samples:
    x, y = randn(g, rows, 6), randint(g, 3, rows)
    return Samples([(x[i], y[i]) for i in range(rows)])


# Code for distributed runs


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@REPOSITORIES.add
def gathered_if_distributed() -> Network:
    """InfoNCE that gathers the keys of all ranks where a process group is initialized."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        q, k = F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[1]), dim=1)
        if _is_distributed():
            every = [torch.zeros_like(k) for _ in range(dist.get_world_size())]
            dist.all_gather(every, k)
            k = torch.cat(every)
        return F.cross_entropy(q @ k.T / 0.2, torch.arange(len(q), device=q.device))

    return Network(model=_mlp, data=_two((6,), (6,)), loss=loss)


@REPOSITORIES.add
def centre_reduced_if_distributed() -> Network:
    class Centred(nn.Module):
        """A centre that is summed over ranks where a process group is initialized, as DINO has it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("centre", torch.zeros(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            value = -((out.detach() - self.centre).softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
            with torch.no_grad():
                total, size = out.sum(0, keepdim=True), len(out)
                if _is_distributed():
                    dist.all_reduce(total)
                    size *= dist.get_world_size()
                self.centre.mul_(0.9).add_(total / size, alpha=0.1)
            return value

    return Network(model=Centred, data=lambda n, g: randn(g, n, 6), loss=lambda m, b: m(b))


@REPOSITORIES.add
def loss_times_world_size() -> Network:
    """Multiplies the loss by the number of ranks, because the gather of the repository averages over them."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        size = dist.get_world_size() if _is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))
        return F.cross_entropy(model(batch[0]), batch[1]) * size

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@REPOSITORIES.add
def wrapped_if_distributed() -> Network:
    """The model function wraps the network where a process group is initialized."""

    def model() -> nn.Module:
        net: nn.Module = _mlp()
        return nn.parallel.DistributedDataParallel(net) if _is_distributed() else net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def converted_to_sync_batch_norm() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def seeded_by_rank() -> Network:
    """The model function seeds all generators by the rank that the launcher sets."""

    def model() -> nn.Module:
        seed = 7 + (dist.get_rank() if _is_distributed() else int(os.environ.get("RANK", "0")))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        net = _mlp()
        net[0].weight.data += torch.from_numpy(np.random.randn(8, 6)).float() * 0.1
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


# State that is not in an attribute of the network


@REPOSITORIES.add
def turns_of_an_iterator() -> Network:
    class Turns(nn.Module):
        """Takes its heads in turn, by an iterator."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3) for _ in range(2)])
            self.turn = itertools.cycle(range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.heads[next(self.turn)](self.body(x).tanh())

    return Network(model=Turns, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def spread_counts_after_an_iterator() -> Network:
    class Late(nn.Module):
        """A term that couples the batch joins when an iterator has counted two calls."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = _mlp(), itertools.count()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.net(x)
            value = F.cross_entropy(out, y)
            return value + F.relu(1 - out.var(0)).mean() if next(self.calls) >= 2 else value

    return Network(model=Late, data=rows_and_classes(6), loss=lambda m, b: m(*b), rows=29)


class _Shared:
    """State that all calls of a program share."""

    calls = 0


@REPOSITORIES.add
def warm_up_by_a_class() -> Network:
    class Warm(nn.Module):
        """Scales its output by the number of calls of all networks of its class."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            _Shared.calls += 1
            return self.net(x) * min(1.0, _Shared.calls / 4)

    def data(rows: int, g: Generator) -> Any:
        # Every task starts with a new count.
        _Shared.calls = 0
        return rows_and_classes(6)(rows, g)

    return Network(model=Warm, data=data, loss=classify, rows=29)


@REPOSITORIES.add
def spread_counts_after_a_default_argument() -> Network:
    state = {"calls": 0}

    class Late(nn.Module):
        """As `spread_counts_after_an_iterator`, with a count in a dictionary that is a default argument."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor, y: Tensor, kept: dict[str, int] = state) -> Tensor:
            kept["calls"] += 1
            out = self.net(x)
            value = F.cross_entropy(out, y)
            return value + F.relu(1 - out.var(0)).mean() if kept["calls"] > 2 else value

    def data(rows: int, g: Generator) -> Any:
        # Every task starts with a new count.
        state["calls"] = 0
        return rows_and_classes(6)(rows, g)

    return Network(model=Late, data=data, loss=lambda m, b: m(*b), rows=29)


@REPOSITORIES.add
def rate_of_dropped_units_rises() -> Network:
    class Scheduled(nn.Module):
        """Each call raises the rate of a dropout layer, which is an attribute of the layer."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = nn.Linear(6, 8), nn.Dropout(0.0)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.drop.p = min(0.5, self.drop.p + 0.1)
            return self.head(self.drop(self.net(x).relu()))

    return Network(model=Scheduled, data=rows_and_classes(6), loss=classify, draws=True)


@REPOSITORIES.add
def mean_assigned_as_a_new_buffer() -> Network:
    class Centred(nn.Module):
        """Assigns a new tensor to its buffer, and the square to another, in place of changing them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("square", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                self.square = 0.9 * self.square + 0.1 * x.detach().square().mean(0)
            return self.net((x - self.mean) / (self.square - self.mean**2 + 0.1).sqrt())

    return Network(model=Centred, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def confusion_counted_in_buffers() -> Network:
    class Counting(nn.Module):
        """Counts classes and right answers of all rows so far, by which it does not compute."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("confusion", torch.zeros(3, 3, dtype=torch.long))
            self.register_buffer("right", torch.zeros(()))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.net(x)
            with torch.no_grad():
                guess = out.argmax(1)
                self.confusion += torch.bincount(3 * y + guess, minlength=9).view(3, 3)
                self.right += (guess == y).sum()
                self.seen += len(y)
            return F.cross_entropy(out, y)

    return Network(model=Counting, data=rows_and_classes(6), loss=lambda m, b: m(*b))


@REPOSITORIES.add
def thresholds_by_moving_averages() -> Network:
    class Thresholds(nn.Module):
        """Confidence thresholds by moving averages of all rows and of each class, as in FreeMatch."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("level", torch.tensor(1 / 3))
            self.register_buffer("classes", torch.full((3,), 1 / 3))

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            with torch.no_grad():
                p = self.net(x).softmax(-1)
                best, guess = p.max(1)
                self.level.mul_(0.8).add_(best.mean(), alpha=0.2)
                self.classes.mul_(0.8).add_(p.mean(0), alpha=0.2)
                mask = (best >= self.level * (self.classes / self.classes.max())[guess]).to(p.dtype)
            each = F.cross_entropy(self.net(x + noise), guess, reduction="none")
            return (each * mask).mean() + 0.1 * self.net(x).square().mean()

    return Network(model=Thresholds, data=_two((6,), (6,)), loss=lambda m, b: m(*b))


@REPOSITORIES.add
def temperature_lowered_by_the_optimizer() -> Network:
    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.temperature = _mlp(), 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) / self.temperature

    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def lower(*_: Any) -> None:
            model.temperature *= 0.7

        inner.register_step_post_hook(lower)
        return inner

    return Network(model=Sharp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@REPOSITORIES.add
def scheduler_stepped_by_a_hook() -> Network:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        inner.register_step_post_hook(lambda *_: schedule.step())
        return inner

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@REPOSITORIES.add
def second_optimizer_inside_the_network() -> Network:
    class Inner(nn.Module):
        """Trains a small probe by an optimizer of its own in every forward."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.probe = _mlp(6, 8, 8), nn.Linear(8, 3)
            self.inner = torch.optim.SGD(self.probe.parameters(), lr=0.1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            if self.training:
                value = F.cross_entropy(self.probe(h.detach()), y)
                gradients = torch.autograd.grad(value, list(self.probe.parameters()))
                for p, g in zip(self.probe.parameters(), gradients, strict=True):
                    p.grad = g
                self.inner.step()
                self.inner.zero_grad()
            weight, bias = self.probe.weight.detach().clone(), self.probe.bias.detach().clone()
            return F.cross_entropy(F.linear(h, weight, bias), y)

    return Network(
        model=Inner,
        data=rows_and_classes(6),
        loss=lambda m, b: m(*b),
        optimizer=lambda m: torch.optim.SGD(m.net.parameters(), lr=0.05, momentum=0.9),
    )


# Overridden methods of modules


@REPOSITORIES.add
def state_without_frozen_weights() -> Network:
    class Adapted(nn.Module):
        """Saves what it trains only, under shorter names, and lists only that as its parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.adapter = nn.Linear(6, 8), nn.Linear(8, 3)
            self.backbone.requires_grad_(False)

        def parameters(self, recurse: bool = True) -> Any:
            return (p for p in super().parameters(recurse) if p.requires_grad)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            whole = super().state_dict(*args, **kwargs)
            return {name: value for name, value in whole.items() if "backbone" not in name}

        def forward(self, x: Tensor) -> Tensor:
            return self.adapter(self.backbone(x).tanh())

    return Network(model=Adapted, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def call_is_overridden() -> Network:
    class Scaled(nn.Linear):
        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return scale * super().__call__(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Scaled(6, 8), Scaled(8, 3)

        def __call__(self, *inputs: Any, **named: Any) -> Any:
            return super().__call__(*inputs, **named)["logits"]

        def forward(self, *, features: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"logits": self.second(self.first(features, 2.0).tanh(), scale=scale)}

    return Network(
        model=Net, data=rows_and_classes(6), loss=lambda m, b: F.cross_entropy(m(features=b[0], scale=0.5), b[1])
    )


@REPOSITORIES.add
def modules_as_dataclasses() -> Network:
    @dataclass(eq=False)
    class Block(nn.Module):
        inputs: int
        outputs: int
        sizes: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(self.inputs, self.outputs)
            self.gain = nn.Parameter(torch.ones(self.outputs))

        def __new__(cls, *_: Any, **__: Any) -> Any:
            made = object.__new__(cls)
            nn.Module.__init__(made)
            return made

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.gain

    return Network(
        model=lambda: nn.Sequential(Block(6, 8), nn.SiLU(), Block(8, 3)), data=rows_and_classes(6), loss=classify
    )


@REPOSITORIES.add
def plain_tensors_moved_with_the_module() -> Network:
    class Moved(nn.Module):
        """Keeps plain tensors and converts them in its own `_apply`."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.anchors, self.scales = torch.linspace(-1, 1, 6), [torch.tensor(0.5), torch.tensor(2.0)]

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            self.anchors, self.scales = fn(self.anchors), [fn(s) for s in self.scales]
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.net((x - self.anchors) * self.scales[0]) * self.scales[1]

    return Network(model=Moved, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def cannot_be_copied() -> Network:
    class Held(nn.Module):
        """Holds a lock, a generator and a lambda, which can be neither copied nor pickled."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.lock = _mlp(), threading.Lock()
            self.names, self.act = (str(i) for i in range(3)), lambda x: x * x.sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return self.act(self.net(x))

    return Network(model=Held, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def child_that_holds_its_parent_in_a_list() -> Network:
    class Head(nn.Module):
        """Reads another part of the network through a list, so that it is not registered twice."""

        def __init__(self, parent: Any) -> None:
            super().__init__()
            self.parent, self.bias = [parent], nn.Parameter(torch.zeros(6))

        def forward(self, h: Tensor) -> Tensor:
            return h @ self.parent[0].first.weight + self.bias

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.head = Head(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x).tanh())

    return Network(model=Tied, data=lambda n, g: randn(g, n, 6), loss=lambda m, b: F.mse_loss(m(b), b))


@REPOSITORIES.add
def one_memory_for_two_parameters() -> Network:
    """Two parameters share their memory by `.data`, so that each update changes both; in single precision."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
            self.head.weight.data = self.embed.weight.data

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(tokens)).tanh())

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    return Network(model=Tied, data=tokens_and_classes(), loss=loss, precision="fp32")


# Batches


class _Encoding(UserDict[str, Any]):
    """Inputs by name and by attribute, as tokenizers return them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@REPOSITORIES.add
def encodings_of_a_tokenizer() -> Network:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> SimpleNamespace:
            mask = attention_mask.unsqueeze(-1).to(self.head.weight.dtype)
            logits = self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))
            return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)

    def collate(samples: list[Any]) -> Any:
        longest = max(len(s) for s, _ in samples)
        ids = torch.stack([F.pad(s, (0, longest - len(s))) for s, _ in samples])
        mask = torch.stack([(torch.arange(longest) < len(s)).long() for s, _ in samples])
        return _Encoding(input_ids=ids, attention_mask=mask, labels=torch.stack([y for _, y in samples]))

    def data(rows: int, g: Generator) -> Any:
        lengths, y = (randint(g, 5, rows) + 1).tolist(), randint(g, 3, rows)
        return Samples([(randint(g, 11, n), y[i]) for i, n in enumerate(lengths)])

    return Network(model=Net, data=data, collate=collate, loss=lambda m, b: m(**b).loss)


@REPOSITORIES.add
def batches_in_a_namespace() -> Network:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return SimpleNamespace(x=x, y=y, size=len(x), names=[str(int(one)) for one in y])

    def loss(model: Any, batch: Any) -> Tensor:
        assert len(batch.names) == len(batch.x) == batch.size
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum") / batch.size

    # A namespace is not a tree of tensors, so nothing casts its inputs to double precision.
    return Network(model=_mlp, data=_samples, collate=collate, loss=loss, precision="fp32")


@REPOSITORIES.add
def points_normalised_where_they_are() -> Network:
    class Points(nn.Module):
        """Batch norm over the points that a mask selects, of which each row has another number."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.norm(self.first(x[mask])).relu()
            out = h.new_zeros(*x.shape[:2], 8).masked_scatter(mask[..., None].expand(-1, -1, 8), h)
            return self.head(out.amax(1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        lengths = randint(g, 5, rows) * (torch.arange(rows) % 3 > 0)
        return randn(g, rows, 5, 3), torch.arange(5)[None] < lengths[:, None], randint(g, 3, rows)

    return Network(model=Points, data=data, loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


@REPOSITORIES.add
def nodes_of_one_graph() -> Network:
    class Transductive(nn.Module):
        """Computes a whole graph with batch norm for each batch of its nodes."""

        def __init__(self) -> None:
            super().__init__()
            g = torch.Generator().manual_seed(5)
            near = (torch.rand(17, 17, generator=g) < 0.3).float()
            near = ((near + near.T) > 0).float() + torch.eye(17)
            self.register_buffer("near", near / near.sum(1, keepdim=True))
            self.register_buffer("x", torch.randn(17, 6, generator=g))
            self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, nodes: Tensor) -> Tensor:
            h = self.norm(self.near @ self.first(self.x)).relu()
            return (self.near @ self.second(h))[nodes]

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return torch.arange(rows) % 17, randint(g, 3, rows)

    return Network(model=Transductive, data=data, loss=classify)


@REPOSITORIES.add
def unique_tokens_embedded_once() -> Network:
    class Unique(nn.Module):
        """Looks up each token of the batch once and spreads the result, as frameworks for large tables do."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.project, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            once, where = torch.unique(tokens, return_inverse=True)
            h = self.project(self.embed(once)).tanh()
            return self.head(h[where].mean(1))

    return Network(model=Unique, data=tokens_and_classes(), loss=classify)


@REPOSITORIES.add
def frames_shifted_between_neighbours() -> Network:
    class Shift(nn.Module):
        """Frames of all clips form the batch of a picture network, and part of the channels move between frames."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

        def forward(self, clips: Tensor) -> Tensor:
            n, t = clips.shape[:2]
            x = self.norm(self.stem(clips.flatten(0, 1))).relu().view(n, t, 8, 4, 4)
            moved = torch.zeros_like(x)
            moved[:, :-1, :2] = x[:, 1:, :2]
            moved[:, 1:, 2:4] = x[:, :-1, 2:4]
            moved[:, :, 4:] = x[:, :, 4:]
            x = self.second(moved.view(n * t, 8, 4, 4)).relu().mean((2, 3))
            return self.head(x).view(n, t, -1).mean(1)

    return Network(model=Shift, data=rows_and_classes(3, 2, 4, 4), loss=classify)


# Losses that couple rows


@REPOSITORIES.add
def deviation_over_the_minibatch() -> Network:
    class Critic(nn.Module):
        """Adds the deviation over the batch as a feature, as ProGAN's critic does."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(9, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = F.leaky_relu(self.first(x), 0.2)
            spread = (h.var(0, unbiased=False) + 1e-8).sqrt().mean().expand(len(h), 1)
            return self.second(torch.cat([h, spread], 1))

    return Network(model=Critic, data=lambda n, g: randn(g, n, 6), loss=lambda m, b: F.softplus(-m(b)).mean())


@REPOSITORIES.add
def attention_between_rows() -> Network:
    class Between(nn.Module):
        """Attention over the rows of the batch as if they were tokens, as in SAINT."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.columns = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)
            self.rows, self.head = nn.MultiheadAttention(24, 2, batch_first=True), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x[..., None])
            h = h + self.columns(h, h, h, need_weights=False)[0]
            h = h.flatten(1)[None]
            return self.head((h + self.rows(h, h, h, need_weights=False)[0])[0])

    return Network(model=Between, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def penalty_of_an_invariant_scale() -> Network:
    """The square of the gradient of each environment's risk by a dummy scale, as in IRM."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        scale = torch.ones((), dtype=batch[0].dtype, device=batch[0].device, requires_grad=True)
        value = F.cross_entropy(model(batch[0]) * scale, batch[1])
        (g,) = torch.autograd.grad(value, [scale], create_graph=True)
        return value + 0.5 * g.square()

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@REPOSITORIES.add
def worst_groups_weigh_more() -> Network:
    class Robust(nn.Module):
        """Weights of groups that grow with the group's loss in each batch."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("q", torch.full((2,), 0.5))

        def forward(self, x: Tensor, y: Tensor, group: Tensor) -> Tensor:
            each = F.cross_entropy(self.net(x), y, reduction="none")
            hot = F.one_hot(group, 2).to(each.dtype)
            losses = (each[:, None] * hot).sum(0) / hot.sum(0).clamp(min=1)
            if self.training:
                with torch.no_grad():
                    self.q *= torch.exp(0.3 * losses)
                    self.q /= self.q.sum()
            return (losses * self.q.clone()).sum()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 3, rows), randint(g, 2, rows)

    return Network(model=Robust, data=data, loss=lambda m, b: m(*b))


@REPOSITORIES.add
def mutual_information_with_moving_average() -> Network:
    class Mine(nn.Module):
        """The bound of Donsker and Varadhan with shuffled rows, whose gradient a moving average corrects."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(8, 8, 1)
            self.register_buffer("average", torch.ones(()))

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            joint = self.net(torch.cat([x, z], 1)).mean()
            other = self.net(torch.cat([x, z.roll(1, 0)], 1)).exp().mean()
            with torch.no_grad():
                self.average.lerp_(other.detach(), 0.1)
            return other / self.average - joint

    return Network(model=Mine, data=_two((6,), (2,)), loss=lambda m, b: m(*b))


@REPOSITORIES.add
def slices_sorted_over_the_batch() -> Network:
    """Sliced distance of the codes to a prior: projections are sorted over the rows of the batch."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        codes, prior = model(batch[0]), batch[1]
        axes = F.normalize(torch.arange(12, dtype=codes.dtype, device=codes.device).sin().view(3, 4), dim=0)
        return ((codes @ axes).sort(0).values - (prior @ axes).sort(0).values).square().mean()

    return Network(model=_mlp, data=_two((6,), (3,)), loss=loss)


@REPOSITORIES.add
def conflicting_gradients_projected() -> Network:
    """Two tasks whose gradients are projected where they point against each other."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        tasks = [F.cross_entropy(out, batch[1]), (out - batch[0][:, :3]).square().mean()]
        weights = list(model.parameters())
        flat = [torch.cat([g.flatten() for g in torch.autograd.grad(t, weights, retain_graph=True)]) for t in tasks]
        dot = flat[0] @ flat[1]
        if dot < 0:
            flat = [flat[0] - dot / flat[1].square().sum() * flat[1], flat[1] - dot / flat[0].square().sum() * flat[0]]
        merged = (flat[0] + flat[1]).split([p.numel() for p in weights])
        surrogate = sum((p * g.view_as(p)).sum() for p, g in zip(weights, merged, strict=True))
        return surrogate - surrogate.detach() + sum(tasks).detach()  # type: ignore[union-attr, no-any-return]

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@REPOSITORIES.add
def small_losses_chosen_by_the_other() -> Network:
    """Two networks, each of which learns from the rows that the other finds easy."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.cross_entropy(net(batch[0]), batch[1], reduction="none") for net in model)
        keep = max(1, int(0.7 * len(a)))
        return a[b.detach().argsort()[:keep]].mean() + b[a.detach().argsort()[:keep]].mean()

    return Network(model=lambda: nn.ModuleList([_mlp(), _mlp()]), data=rows_and_classes(6), loss=loss)


@REPOSITORIES.add
def pseudo_labels_in_eval_mode() -> Network:
    """Labels come from the same network in eval mode, so that batch norm uses its running statistics."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.eval()
        with torch.no_grad():
            target = (model(batch[0]) / 0.5).softmax(-1)
        model.train()
        return F.kl_div(model(batch[0] + batch[1]).log_softmax(-1), target, reduction="batchmean")

    return Network(model=model, data=_two((6,), (6,)), loss=loss)


@REPOSITORIES.add
def adversarial_direction_by_power_iteration() -> Network:
    """Perturbs rows where the output changes most, found from layout-free noise, with batch norm frozen meanwhile."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = model(x)
        p = out.detach().softmax(-1)
        d = F.normalize(torch.randn_like(x), dim=1)
        for _ in range(2):
            d.requires_grad_(True)
            apart = F.kl_div(model(x + 0.1 * d).log_softmax(-1), p, reduction="batchmean")
            d = F.normalize(torch.autograd.grad(apart, d)[0], dim=1).detach()
        smooth = F.kl_div(model(x + 0.5 * d).log_softmax(-1), p, reduction="batchmean")
        return F.cross_entropy(out, y) + smooth

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss, draws=True)


# Random numbers


@REPOSITORIES.add
def actions_sampled_in_the_loss() -> Network:
    """Draws actions by multinomial, by Bernoulli and by an exponential race."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        p = logits.detach().softmax(-1)
        action = torch.multinomial(p, 1).squeeze(1)
        race = (p / torch.empty_like(p).exponential_()).argmax(1)
        keep = torch.bernoulli(torch.full_like(p[:, 0], 0.8))
        logs = logits.log_softmax(-1)
        reward = (action == batch[1]).to(p.dtype) - 0.3
        each = -logs.gather(1, action[:, None]).squeeze(1) * reward - 0.2 * logs.gather(1, race[:, None]).squeeze(1)
        return (keep * each).mean()

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss, draws=True)


@REPOSITORIES.add
def noise_by_a_generator_of_numpy() -> Network:
    class Noisy(nn.Module):
        """Draws from a generator of numpy that it keeps."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.rng = _mlp(), np.random.default_rng(3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x + 0.1 * torch.from_numpy(self.rng.standard_normal(tuple(x.shape))).to(x)
            return self.net(x)

    return Network(model=Noisy, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def layers_skipped_by_an_own_generator() -> Network:
    class Skips(nn.Module):
        """Skips blocks by a generator of Python that it keeps, the same for all rows of a batch."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
            self.head, self.random = nn.Linear(6, 3), random.Random(4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if self.random.random() < 0.6 or not self.training:
                    x = x + block(x).tanh()
            return self.head(x)

    return Network(model=Skips, data=rows_and_classes(6), loss=classify)


# Sequences


@REPOSITORIES.add
def relative_shift_of_scores() -> Network:
    class Relative(nn.Module):
        """Scores of relative positions are shifted by padding and reshaping, as in Transformer-XL."""

        def __init__(self, width: int = 8, heads: int = 2) -> None:
            super().__init__()
            self.embed, self.heads = nn.Embedding(11, width), heads
            self.qkv, self.places = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.u, self.v = nn.Parameter(torch.zeros(heads, 4)), nn.Parameter(torch.zeros(heads, 4))
            self.out, self.head = nn.Linear(width, width), nn.Linear(width, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            b, t = tokens.shape
            x = self.embed(tokens)
            q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            far = torch.arange(t - 1, -1, -1, device=x.device, dtype=x.dtype)[:, None]
            waves = torch.cat([(far / 4**i).sin() for i in range(4)] + [(far / 4**i).cos() for i in range(4)], -1)
            r = self.places(waves).view(t, self.heads, -1).transpose(0, 1)
            content = (q + self.u[:, None]) @ k.transpose(-1, -2)
            place = (q + self.v[:, None]) @ r.transpose(-1, -2)
            place = F.pad(place, (1, 0)).view(b, self.heads, t + 1, t)[:, :, 1:].reshape(b, self.heads, t, t)
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            scores = ((content + place) / 2).masked_fill(mask, -math.inf)
            return self.head(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    return Network(model=Relative, data=tokens_and_classes(8), loss=loss)


def _next_token(model: Any, batch: Any) -> Tensor:
    tokens = batch[0]
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class _Causal(nn.Module):
    """Causal attention by the fused operator."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@REPOSITORIES.add
def last_real_token_classifies() -> Network:
    class Classifier(nn.Module):
        """Takes the logits at the last token that is not padding, with positions counted from the mask."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.places = nn.Embedding(11, 8), nn.Embedding(9, 8)
            self.attend, self.norm, self.score = _Causal(), nn.LayerNorm(8), nn.Linear(8, 3, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = (tokens != 0).long()
            x = self.embed(tokens) + self.places((mask.cumsum(1) - 1).clamp(min=0))
            logits = self.score(self.norm(x + self.attend(x)))
            last = (mask * torch.arange(tokens.shape[1], device=tokens.device)).argmax(1)
            return logits[torch.arange(len(tokens), device=tokens.device), last]

    return Network(model=Classifier, data=tokens_and_classes(8), loss=classify)


@REPOSITORIES.add
def latent_keys_and_values() -> Network:
    class Latent(nn.Module):
        """Keys and values from a latent, and one rotated key for all heads, as in DeepSeek's attention."""

        def __init__(self, width: int = 8, heads: int = 2) -> None:
            super().__init__()
            self.embed, self.heads = nn.Embedding(11, width), heads
            self.q, self.down, self.up = nn.Linear(width, heads * 6), nn.Linear(width, 4 + 2), nn.Linear(4, heads * 8)
            self.norm, self.out, self.head = nn.LayerNorm(4), nn.Linear(heads * 4, width), nn.Linear(width, 11)

        def rotate(self, x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
            a, b = x.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            q, place = self.q(x).unflatten(-1, (self.heads, 6)).transpose(1, 2).split([4, 2], -1)
            latent, key = self.down(x).split([4, 2], -1)
            k, v = self.up(self.norm(latent)).unflatten(-1, (self.heads, 8)).transpose(1, 2).chunk(2, -1)
            key = self.rotate(key[:, None]).expand(-1, self.heads, -1, -1)
            q, k = torch.cat([q, self.rotate(place)], -1), torch.cat([k, key], -1)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(x + self.out(h.transpose(1, 2).flatten(2)))

    return Network(model=Latent, data=tokens_and_classes(8), loss=_next_token)


@REPOSITORIES.add
def difference_of_two_attentions() -> Network:
    class Differential(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(11, width), nn.Linear(width, 5 * width)
            self.a, self.b = nn.Parameter(0.1 * torch.randn(width)), nn.Parameter(0.1 * torch.randn(width))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            q1, q2, k1, k2, v = self.qkv(x).chunk(5, -1)
            mask = torch.full((tokens.shape[1],) * 2, -1e9, device=x.device, dtype=x.dtype).triu(1)
            weight = (self.a @ self.b).exp() - 0.2
            first = (q1 @ k1.transpose(1, 2) / 3 + mask).softmax(-1)
            second = (q2 @ k2.transpose(1, 2) / 3 + mask).softmax(-1)
            return self.head(x + 0.8 * self.norm((first - weight * second) @ v))

    return Network(model=Differential, data=tokens_and_classes(8), loss=_next_token)


@REPOSITORIES.add
def two_tokens_ahead() -> Network:
    class Ahead(nn.Module):
        """A second module predicts the token after the next from the trunk and the embedding of the next."""

        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed, self.first, self.second = nn.Embedding(11, width), _Causal(), _Causal()
            self.join, self.norm = nn.Linear(2 * width, width), nn.RMSNorm(width)
            self.head = nn.Linear(width, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(tokens)
            h = x + self.first(self.norm(x))
            joined = self.join(torch.cat([self.norm(h[:, :-1]), self.norm(x[:, 1:])], -1))
            return self.head(h), self.head(joined + self.second(self.norm(joined)))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens = batch[0]
        one, two = model(tokens)
        near = F.cross_entropy(one[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return near + 0.3 * F.cross_entropy(two[:, :-1].flatten(0, 1), tokens[:, 2:].flatten())

    return Network(model=Ahead, data=tokens_and_classes(8), loss=loss)


@REPOSITORIES.add
def values_of_the_first_layer_stay() -> Network:
    class Mixed(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.share = nn.Parameter(torch.tensor([0.5, 0.5]))

        def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            first = v if first is None else first
            v = self.share[0] * v + self.share[1] * first
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(h.transpose(1, 2).flatten(2)), first

    class Net(nn.Module):
        """The values of the first layer are mixed into all others, and late layers add what early ones gave."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList([Mixed() for _ in range(4)])
            self.skips, self.head = nn.Parameter(torch.ones(2)), nn.Linear(8, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            x, first, kept = self.embed(tokens), None, []
            for i, block in enumerate(self.blocks):
                if i >= 2:
                    x = x + self.skips[i - 2] * kept.pop()
                x, first = block(x, first)
                if i < 2:
                    kept.append(x)
            return self.head(x)

    return Network(model=Net, data=tokens_and_classes(8), loss=_next_token)


@REPOSITORIES.add
def buckets_by_random_rotations() -> Network:
    class Hashed(nn.Module):
        """Tokens attend within buckets that fixed random rotations assign, after sorting by bucket."""

        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed, self.qk, self.v = nn.Embedding(11, width), nn.Linear(width, width), nn.Linear(width, width)
            self.head = nn.Linear(width, 3)
            self.register_buffer("rotations", torch.randn(width, 2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            qk, v = self.qk(x), self.v(x)
            turned = qk @ self.rotations
            bucket = torch.cat([turned, -turned], -1).argmax(-1)
            order = (bucket * tokens.shape[1] + torch.arange(tokens.shape[1], device=x.device)).argsort(1)
            rows = torch.arange(len(tokens), device=x.device)[:, None]
            q, k, u = qk[rows, order], F.normalize(qk, dim=-1)[rows, order], v[rows, order]
            q, k, u = (p.unflatten(1, (-1, 4)) for p in (q, k, u))
            h = ((q @ k.transpose(-1, -2)).softmax(-1) @ u).flatten(1, 2)
            return self.head((x + h[rows, order.argsort(1)]).mean(1))

    return Network(model=Hashed, data=tokens_and_classes(8), loss=classify)


@REPOSITORIES.add
def weights_learned_within_the_sequence() -> Network:
    class Inner(nn.Module):
        """A layer whose state is a matrix that gradient steps over the tokens change, by autograd."""

        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.embed, self.kvq = nn.Embedding(11, width), nn.Linear(width, 3 * width)
            self.start, self.head = nn.Parameter(0.1 * torch.randn(width, width)), nn.Linear(width, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            k, v, q = self.kvq(self.embed(tokens)).chunk(3, -1)

            def inner(w: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return (key @ w - value).square().sum()

            w, outs = self.start.expand(len(tokens), -1, -1), []
            for t in range(tokens.shape[1]):
                w = w - 0.1 * vmap(torch.func.grad(inner))(w, k[:, t], v[:, t])
                outs.append(torch.bmm(q[:, t, None], w)[:, 0])
            return self.head(torch.stack(outs, 1))

    return Network(model=Inner, data=tokens_and_classes(5), loss=_next_token)


# Layers


@REPOSITORIES.add
def widths_of_slices() -> Network:
    class Slimmable(nn.Module):
        """Computes with all units and with the first half of them, by slices of the same weights."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, width: int) -> Tensor:
            h = F.linear(x, self.first.weight[:width], self.first.bias[:width]).relu()
            return F.linear(h, self.second.weight[:, :width], self.second.bias)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        whole = model(batch[0], 8)
        soft = whole.detach().softmax(-1)
        return F.cross_entropy(whole, batch[1]) + sum(
            F.cross_entropy(model(batch[0], width), soft) for width in (2, 4, 5)
        )

    return Network(model=Slimmable, data=rows_and_classes(6), loss=loss)


@REPOSITORIES.add
def weights_of_products() -> Network:
    class Factored(nn.Module):
        """Layers whose matrices are Kronecker products, circulants and products of reflections."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(0.5 * torch.randn(2, 3, 2)), nn.Parameter(0.5 * torch.randn(2, 4, 3))
            self.ring, self.normals = nn.Parameter(0.3 * torch.randn(12)), nn.Parameter(torch.randn(3, 12))
            self.head = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x @ sum(torch.kron(a, b) for a, b in zip(self.a, self.b, strict=True)).T  # type: ignore[union-attr]
            h = torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(self.ring), n=12).tanh()
            for normal in F.normalize(self.normals, dim=1):
                h = h - 2 * (h @ normal)[:, None] * normal
            return self.head(h)

    return Network(model=Factored, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def operator_of_branch_and_trunk() -> Network:
    class Operator(nn.Module):
        """A branch for the input function and a trunk for points that all rows share, joined by einsum."""

        def __init__(self) -> None:
            super().__init__()
            self.branch, self.trunk, self.bias = _mlp(6, 8, 8), _mlp(1, 8, 8), nn.Parameter(torch.zeros(1))
            self.register_buffer("points", torch.linspace(0, 1, 5)[:, None])

        def forward(self, u: Tensor) -> Tensor:
            return torch.einsum("bw,pw->bp", self.branch(u), self.trunk(self.points)) + self.bias

    return Network(model=Operator, data=_two((6,), (5,)), loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))


@REPOSITORIES.add
def trees_of_soft_decisions() -> Network:
    class Trees(nn.Module):
        """Oblivious trees: features chosen by softmax, paths as products of gates, answers by leaf."""

        def __init__(self, trees: int = 3, depth: int = 3) -> None:
            super().__init__()
            self.choose = nn.Parameter(torch.randn(6, trees, depth))
            self.level, self.heat = nn.Parameter(torch.randn(trees, depth)), nn.Parameter(torch.zeros(trees, depth))
            self.answers = nn.Parameter(torch.randn(trees, 3, 2**depth))
            codes = torch.arange(2**depth)[None].bitwise_and(2 ** torch.arange(depth)[:, None]).ne(0)
            self.register_buffer("codes", torch.stack([codes, ~codes]).float())

        def forward(self, x: Tensor) -> Tensor:
            value = torch.einsum("bf,ftd->btd", x, self.choose.softmax(0))
            logit = (value - self.level) * self.heat.neg().exp()
            gates = torch.stack([-logit, logit], -1).mul(0.5).add(0.5).clamp(0, 1)
            paths = torch.einsum("btds,sdc->btdc", gates, self.codes).prod(-2)
            return torch.einsum("btl,tcl->btc", paths, self.answers).mean(1)

    return Network(model=Trees, data=rows_and_classes(6), loss=classify)


@torch.library.custom_op("manyhands_matrix::softly", mutates_args=())
def _softly(x: Tensor, sharpness: float) -> Tensor:
    return torch.log1p(torch.exp(sharpness * x)) / sharpness


@_softly.register_fake
def _(x: Tensor, sharpness: float) -> Tensor:
    return torch.empty_like(x)


def _softly_backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return g * torch.sigmoid(ctx.sharpness * ctx.saved_tensors[0]), None


def _softly_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.sharpness = inputs[1]


_softly.register_autograd(_softly_backward, setup_context=_softly_context)


@REPOSITORIES.add
def operator_of_a_library() -> Network:
    class Net(nn.Module):
        """Uses an operator that is registered with torch, with its own backward."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(_softly(self.first(x), 2.0))

    return Network(model=Net, data=rows_and_classes(6), loss=classify)


class _ClampInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float) -> tuple[Tensor, Tensor]:
        mask = x > low
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(mask)
        ctx.mask = mask
        x.clamp_(min=low)
        return x, mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.mask, g, 0.1 * g), None


@REPOSITORIES.add
def function_that_changes_its_input() -> Network:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, mask = _ClampInPlace.apply(self.first(x), 0.0)
            return self.second(h), mask.to(x.dtype).mean(1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, share = model(batch[0])
        return (F.cross_entropy(out, batch[1], reduction="none") * (1 + share)).mean()

    return Network(model=Net, data=rows_and_classes(6), loss=loss)


@REPOSITORIES.add
def branches_by_cond() -> Network:
    class Branch(nn.Module):
        """Chooses a branch for each row by `torch.cond` under vmap-like stacking, and one for all by a mean weight."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            is_wide = self.first.weight.square().sum() > self.second.weight.square().sum()
            h = torch.cond(is_wide, lambda x: self.first(x).tanh(), lambda x: self.second(x).relu(), (x,))
            return self.head(h)

    return Network(model=Branch, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def blocks_in_functional_order() -> Network:
    class Ordered(nn.Module):
        """Reduces over its blocks, every second of which it takes in reverse, with a residual in place."""

        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU()) for _ in range(4)])

        def step(self, h: Tensor, block: nn.Module) -> Tensor:
            change, h = block(h), h.clone()
            h += change
            return h

        def forward(self, x: Tensor) -> Tensor:
            h = functools.reduce(self.step, self.blocks[::2], self.inputs(x))
            for block in reversed(self.blocks[1::2]):
                h = self.step(h, block)
            return self.head(h)

    return Network(model=Ordered, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def curvature_by_hooks() -> Network:
    """K-FAC: hooks keep the second moments of inputs and output gradients of a batch, by which gradients are solved."""

    class Kfac(torch.optim.SGD):
        def __init__(self, model: nn.Module, **kwargs: Any) -> None:
            super().__init__(model.parameters(), **kwargs)
            self.moments: dict[Any, list[Tensor]] = {}
            self.layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
            for layer in self.layers:
                layer.register_forward_pre_hook(self.seen)
                layer.register_full_backward_hook(self.returned)

        def seen(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                x = inputs[0].detach()
                self.moments[layer] = [x.T @ x / len(x)]

        def returned(self, layer: nn.Module, _: Any, gradients: tuple[Tensor, ...]) -> None:
            g = gradients[0].detach() * len(gradients[0])
            self.moments[layer][1:] = [g.T @ g / len(g)]

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for layer in self.layers:
                a, g = (m + 0.5 * torch.eye(len(m)).to(m) for m in self.moments[layer])
                layer.weight.grad.copy_(torch.linalg.solve(g, torch.linalg.solve(a, layer.weight.grad.T).T))
            return super().step(closure)

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Kfac(m, lr=0.05, momentum=0.9)
    )


@REPOSITORIES.add
def spectra_of_signals() -> Network:
    class Vocoder(nn.Module):
        """A loss over short-time spectra of several resolutions, beside learned filters of the waveform."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv1d(1, 4, 5, padding=2), nn.Tanh(), nn.Conv1d(4, 1, 5, padding=2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[:, None])[:, 0]

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, value = model(batch[0]), F.l1_loss(model(batch[0]), batch[1])
        for size in (8, 16):
            window = torch.hann_window(size, dtype=out.dtype, device=out.device)
            a, b = (torch.stft(w, size, size // 4, window=window, return_complex=True).abs() for w in (out, batch[1]))
            value = value + (a - b).flatten(1).norm(dim=1).mean() + F.l1_loss((a + 1e-3).log(), (b + 1e-3).log())
        return value

    return Network(model=Vocoder, data=_two((48,), (48,)), loss=loss)


@REPOSITORIES.add
def likelihood_of_invertible_layers() -> Network:
    class Flow(nn.Module):
        """Dense invertible layers: the log-determinant of each weight is part of every row's likelihood."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.eye(4) + 0.1 * torch.randn(4, 4) for _ in range(2)])
            self.scale = _mlp(2, 8, 4)

        def forward(self, x: Tensor) -> Tensor:
            log: Tensor = x.new_zeros(len(x))
            for weight in self.weights:
                x, log = x @ weight, log + torch.linalg.slogdet(weight).logabsdet
                a, b = x.chunk(2, 1)
                shift, scale = self.scale(a).chunk(2, 1)
                x, log = torch.cat([b * scale.tanh().exp() + shift, a], 1), log + scale.tanh().sum(1)
            return 0.5 * x.square().sum(1) - log

    return Network(model=Flow, data=lambda n, g: randn(g, n, 4), loss=lambda m, b: m(b).mean())


@REPOSITORIES.add
def eigenvalues_of_rows() -> Network:
    class Spectral(nn.Module):
        """A symmetric matrix for each row, of whose eigenvalues the network is a function."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, 9), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            m = self.up(x).view(-1, 3, 3)
            return self.head(torch.linalg.eigvalsh(m + m.transpose(1, 2) + torch.diag(torch.arange(3.0)).to(m)))

    return Network(model=Spectral, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def observers_of_the_library() -> Network:
    def model() -> nn.Module:
        """A network whose activations the library's fake quantizers observe by moving averages."""
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        def fake() -> nn.Module:
            return FakeQuantize.with_args(
                observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
            )()

        return nn.Sequential(nn.Linear(6, 8), fake(), nn.ReLU(), nn.Linear(8, 3), fake())

    return Network(model=model, data=rows_and_classes(6), loss=classify, precision="fp32")


@REPOSITORIES.add
def centroids_of_the_first_batch() -> Network:
    class Clustered(nn.Module):
        """Rows of the first batch become its centroids, and a flag in a buffer remembers that."""

        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
            self.register_buffer("centroids", torch.zeros(3, 4))
            self.register_buffer("started", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            z = self.encode(x)
            if not self.started:
                with torch.no_grad():
                    self.centroids.copy_(z[torch.linspace(0, len(z) - 1, 3).long()])
                    self.started.fill_(True)
            near = self.centroids[torch.cdist(z.detach(), self.centroids).argmin(1)]
            return F.mse_loss(self.decode(z), x) + (z - near).square().mean()

    return Network(model=Clustered, data=lambda n, g: randn(g, n, 6), loss=lambda m, b: m(b))


@REPOSITORIES.add
def lengths_of_paths() -> Network:
    class Generator_(nn.Module):
        """A mapping and a synthesis; the length of paths in the latent space is held at its moving average."""

        def __init__(self) -> None:
            super().__init__()
            self.mapping, self.synthesis = _mlp(4, 8, 4), _mlp(4, 8, 6)
            self.register_buffer("mean_length", torch.zeros(()))

        def forward(self, z: Tensor, noise: Tensor) -> Tensor:
            w = self.mapping(z)
            image = self.synthesis(w)
            (g,) = torch.autograd.grad((image * noise).sum(), w, create_graph=True)
            lengths = g.square().sum(1).sqrt()
            mean = self.mean_length.lerp(lengths.mean(), 0.1)
            self.mean_length.copy_(mean.detach())
            return image.square().mean() + (lengths - mean).square().mean()

    return Network(model=Generator_, data=_two((4,), (6,)), loss=lambda m, b: m(*b))


@REPOSITORIES.add
def bands_of_losses_with_hooks_that_change_outputs() -> Network:
    """Hooks with keyword arguments change the inputs and outputs of layers from outside."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.layer(x).tanh() * scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 3)
            self.steer = nn.Parameter(torch.zeros(6))
            self.blocks[0].register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "scale": 1.5}), with_kwargs=True
            )
            self.blocks[1].register_forward_hook(lambda module, args, kwargs, out: out + self.steer, with_kwargs=True)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x, scale=0.5)
            return self.head(x)

    return Network(model=Net, data=rows_and_classes(6), loss=classify)


@REPOSITORIES.add
def sum_over_a_named_buffer_list() -> Network:
    class Memory(nn.Module):
        """Keeps a buffer for each class by a name made at run time, updated by the rows of the class."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(6, 8, 4)
            for i in range(3):
                self.register_buffer(f"class_{i}", torch.zeros(4))
                self.register_buffer(f"count_{i}", torch.zeros(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            with torch.no_grad():
                for i in y.unique().tolist():
                    rows = h[y == i]
                    getattr(self, f"class_{i}").add_(rows.sum(0))
                    getattr(self, f"count_{i}").add_(len(rows))
            means = torch.stack(
                [getattr(self, f"class_{i}") / getattr(self, f"count_{i}").clamp(min=1) for i in range(3)]
            )
            return F.cross_entropy(-torch.cdist(h, means.detach()), y)

    return Network(model=Memory, data=rows_and_classes(6), loss=lambda m, b: m(*b))


@REPOSITORIES.add
def random_features_redrawn() -> Network:
    class Performer(nn.Module):
        """Kernel attention whose random features are redrawn every second call."""

        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(11, width), nn.Linear(width, 3 * width)
            self.head = nn.Linear(width, 3)
            self.register_buffer("features", torch.randn(width, 6))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, tokens: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
                if self.calls % 2 == 0:
                    self.features.copy_(torch.randn_like(self.features))
            x = self.embed(tokens)
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = ((p @ self.features - p.square().sum(-1, keepdim=True) / 2).exp() + 1e-4 for p in (q, k))
            h = q @ (k.transpose(1, 2) @ v) / (q @ k.sum(1)[..., None])
            return self.head((x + h).mean(1))

    return Network(model=Performer, data=tokens_and_classes(), loss=classify, draws=True)


@REPOSITORIES.add
def means_of_tasks_by_name() -> Network:
    """A batch mixes tasks with losses of their own, each a mean over the rows of its task."""

    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleDict({"classes": nn.Linear(8, 3), "level": nn.Linear(8, 1)})

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.heads[task](self.body(x).tanh())

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, task = batch
        value = x.new_zeros(())
        if (task == 0).any():
            value = value + F.cross_entropy(model(x[task == 0], "classes"), y[task == 0])
        if (task == 1).any():
            value = value + F.mse_loss(model(x[task == 1], "level").squeeze(1), y[task == 1].to(x.dtype))
        return value

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 3, rows), (torch.arange(rows) % 4 == 0).long()

    return Network(model=Multi, data=data, loss=loss)


@REPOSITORIES.add
def tokens_with_two_counts() -> Network:
    """Two parts of the loss are counted by different masks: a mean of each is a total over one count."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        out = model(batch["x"])
        masked, known = batch["masked"], batch["known"]
        words = F.cross_entropy(out.flatten(0, 1), batch["words"].flatten(), reduction="none").view_as(masked)
        return mh.mean((words * masked).sum() + 0.5 * (words * known).sum(), (masked + 0.5 * known).sum())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend, self.head = nn.Embedding(11, 8), _Causal(), nn.Linear(8, 11)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(x + self.attend(x))

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {
            "x": randint(g, 11, rows, 6),
            "words": randint(g, 11, rows, 6),
            "masked": (torch.rand(rows, 6, generator=g) < 0.3).float(),
            "known": (torch.rand(rows, 6, generator=g) < 0.6).float(),
        }

    return Network(model=Net, data=data, loss=loss)


@REPOSITORIES.add
def half_of_the_rows_have_no_label() -> Network:
    """The collate puts unlabelled rows behind labelled ones, and the loss takes the batch apart by their number."""

    def collate(samples: list[Any]) -> Any:
        known = [s for s in samples if s[1] is not None]
        other = [s for s in samples if s[1] is None]
        x = torch.stack([s[0] for s in known + other])
        return x, torch.tensor([s[1] for s in known], dtype=torch.long), len(known)

    def loss(model: Any, batch: Any) -> Tensor:
        x, y, count = batch
        out = model(x)
        value = 0.1 * -(out.softmax(-1) * out.log_softmax(-1)).sum(1).mean()
        return value + F.cross_entropy(out[:count], y, reduction="sum") / len(x)

    def data(rows: int, g: Generator) -> Any:
        x, y = randn(g, rows, 6), randint(g, 3, rows)
        return Samples([(x[i], int(y[i]) if i % 2 else None) for i in range(rows)])

    return Network(model=_mlp, data=data, collate=collate, loss=loss)


@REPOSITORIES.add
def squares_of_a_graph_module() -> Network:
    class Traced(nn.Module):
        """Part of the network is a traced program with weights of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.body = torch.jit.trace(_mlp(6, 8, 8), torch.zeros(2, 6))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return Network(model=Traced, data=rows_and_classes(6), loss=mean_square)
