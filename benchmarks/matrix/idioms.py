"""Networks in idioms of training scripts: models inside models, matching, rays, solvers, ragged rows, optimizer hooks.

Each function contains its whole network.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, jacfwd, jvp, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import manyhands as mh

from .classics import classify, rows_and_classes, tokens_and_classes
from .field import Samples
from .network import Network, Registry, mean_square, randint, randn

IDIOMS = Registry("idiom")


def _mlp(inputs: int = 6, hidden: int = 8, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


# Models inside models


@IDIOMS.add
def diffusion_with_average_inside() -> Network:
    class Diffusion(nn.Module):
        """Timestep sampling in forward, and an average of the denoiser that each training call updates."""

        def __init__(self) -> None:
            super().__init__()
            self.denoise = _mlp(7, 8, 6)
            self.average = copy.deepcopy(self.denoise).requires_grad_(False)
            betas = torch.linspace(1e-2, 0.2, 10)
            self.register_buffer("kept", torch.cumprod(1 - betas, 0))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        @torch.no_grad()
        def follow(self) -> None:
            self.seen += 1
            decay = min(0.9, (1 + self.seen.item()) / (10 + self.seen.item()))
            for ours, theirs in zip(self.average.parameters(), self.denoise.parameters(), strict=True):
                ours.copy_(decay * ours + (1 - decay) * theirs)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.follow()
            t = torch.randint(0, 10, (x.shape[0],), device=x.device)
            noise = torch.randn_like(x)
            kept = self.kept[t].view(-1, 1)
            noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
            weight = (kept / (1 - kept)).clamp(max=5.0).squeeze(1)
            aim = self.denoise(torch.cat([noisy, t.to(x.dtype).view(-1, 1) / 10], 1))
            return (weight * F.mse_loss(aim, noise, reduction="none").mean(1)).mean()

    return Network(
        model=Diffusion, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]), draws=True
    )


@IDIOMS.add
def teacher_copied_by_the_first_loss() -> Network:
    state: dict[str, Any] = {}

    def data(rows: int, g: Generator) -> Any:
        state.clear()
        return rows_and_classes(6)(rows, g)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if "teacher" not in state:
            state["teacher"] = copy.deepcopy(model).requires_grad_(False)
        logits = model(batch[0])
        aim = state["teacher"](batch[0]).softmax(-1)
        return F.cross_entropy(logits, batch[1]) + F.kl_div(logits.log_softmax(-1), aim, reduction="batchmean")

    return Network(model=_mlp, data=data, loss=loss)


@IDIOMS.add
def average_updated_by_the_optimizer() -> Network:
    class Teaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = _mlp()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                aim = self.teacher(x)
            return self.student(x), aim

    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.student.parameters(), lr=0.05, momentum=0.9)

        @torch.no_grad()
        def follow(*_: Any) -> None:
            for ours, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

        inner.register_step_post_hook(follow)
        return inner

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, aim = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.5 * (logits.softmax(-1) - aim.softmax(-1)).square().sum(1).mean()

    return Network(model=Teaching, data=rows_and_classes(6), loss=loss, optimizer=optimizer)


@IDIOMS.add
def meta_pseudo_labels() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        parameters = dict(model.named_parameters())

        def inner(values: dict[str, Tensor]) -> Tensor:
            return functional_call(model, values, (x,)).square().mean()

        gradients = grad(inner)(parameters)
        fast = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
        return F.cross_entropy(functional_call(model, fast, (x,)), labels)

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@IDIOMS.add
def hypernetwork_by_functional_call() -> Network:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.make = nn.Linear(2, 15)

        def forward(self, x: Tensor) -> Tensor:
            made = self.make(x[:, 4:])

            def one(row: Tensor, weights: Tensor) -> Tensor:
                values = {"weight": weights[:12].view(3, 4), "bias": weights[12:]}
                return functional_call(self.body, values, (row,))

            return vmap(one)(x[:, :4], made) + self.body(x[:, :4])

    return Network(model=Hyper, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def deep_ensemble_in_one_model() -> Network:
    class Members(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(3, 6, 8) / 3)
            self.second = nn.Parameter(torch.randn(3, 8, 3) / 3)
            self.register_buffer("mask", (torch.arange(8) % 3 != torch.arange(3)[:, None]).float(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.einsum("bi,mih->bmh", x, self.first).tanh() * self.mask
            return torch.einsum("bmh,mhc->bmc", hidden, self.second)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        nll = F.cross_entropy(out.flatten(0, 1), batch[1].repeat_interleave(3))
        return nll - 0.1 * out.softmax(-1).var(1).sum(-1).mean()

    return Network(model=Members, data=rows_and_classes(6), loss=loss)


# Contrast, ranking, metric learning


@IDIOMS.add
def queue_of_a_deque() -> Network:
    class Memory(nn.Module):
        """Negatives of earlier batches in a Python deque."""

        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp(6, 8, 4)
            self.keys: collections.deque[Tensor] = collections.deque(maxlen=2)

        def forward(self, x: Tensor) -> Tensor:
            q, k = F.normalize(self.body(x)), F.normalize(self.body(x.flip(1)))
            logits = [(q * k).sum(1, keepdim=True)]
            if self.keys:
                logits.append(q @ torch.cat(list(self.keys)).T)
            self.keys.append(k.detach())
            return F.cross_entropy(torch.cat(logits, 1) / 0.2, torch.zeros(len(x), dtype=torch.long))

    return Network(model=Memory, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]))


@IDIOMS.add
def listwise_ranking() -> Network:
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 5, 6), torch.rand(rows, 5, generator=g)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(batch[0]).squeeze(-1)
        order = batch[1].argsort(-1, descending=True)
        chosen = scores.gather(1, order)
        return (chosen.flip(-1).logcumsumexp(-1).flip(-1) - chosen).sum(-1).mean()

    return Network(model=lambda: _mlp(6, 8, 1), data=data, loss=loss)


@IDIOMS.add
def pairs_across_the_batch() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(batch[0]).squeeze(-1)
        better = batch[1][:, None] > batch[1][None, :]
        return F.softplus(-(scores[:, None] - scores[None, :]))[better].mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), torch.rand(rows, generator=g)

    return Network(model=lambda: _mlp(6, 8, 1), data=data, loss=loss)


@IDIOMS.add
def supervised_prototypes() -> Network:
    """Few-shot episodes: each row holds a support set and queries."""

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 3, 2, 6), randn(g, rows, 3, 6)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        support, query = batch
        prototypes = model(support).mean(2)
        distance = torch.cdist(model(query), prototypes).square()
        return F.cross_entropy(-distance.flatten(0, 1), torch.arange(3).repeat(len(support)))

    return Network(model=lambda: _mlp(6, 8, 4), data=data, loss=loss)


@IDIOMS.add
def mined_triplets_by_index() -> Network:
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 4, 6), torch.tensor([0, 0, 1, 1]).repeat(rows, 1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        out, labels = F.normalize(model(batch[0]), dim=-1), batch[1]
        distance = torch.cdist(out, out)
        total, count = out.new_zeros(()), 0
        for row, names in zip(distance, labels, strict=True):
            for a, p, n in itertools.permutations(range(4), 3):
                if names[a] == names[p] and names[a] != names[n]:
                    gap = row[a, p] - row[a, n] + 0.5
                    if gap.item() > 0:
                        total, count = total + gap, count + 1
        return mh.mean(total, count)

    return Network(model=lambda: _mlp(6, 8, 4), data=data, loss=loss)


@IDIOMS.add
def barlow_twins() -> Network:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bn = _mlp(6, 8, 4), nn.BatchNorm1d(4, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            c = self.bn(self.body(x)).T @ self.bn(self.body(x.flip(1))) / len(x)
            return (c.diagonal() - 1).square().sum() + 0.1 * (c - torch.diag(c.diagonal())).square().sum()

    return Network(model=Twins, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]))


# Graphs, sets, points


class Graph:
    """Nodes and edges of several graphs as one, as graph libraries batch them."""

    def __init__(self, x: Tensor, edges: Tensor, of: Tensor, y: Tensor) -> None:
        self.x, self.edges, self.of, self.y = x, edges, of, y

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        """Return the graphs elsewhere."""
        return Graph(self.x.to(*args, **kwargs), self.edges.to(*args), self.of.to(*args), self.y.to(*args))


@IDIOMS.add
def graphs_in_an_own_class() -> Network:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.message, self.update = nn.Linear(6, 8), nn.Linear(16, 8), nn.GRUCell(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, graph: Graph) -> Tensor:
            x = self.embed(graph.x.to(self.embed.weight.dtype))
            source, target = graph.edges
            for _ in range(2):
                messages = torch.relu(self.message(torch.cat([x[source], x[target]], 1)))
                x = self.update(torch.zeros_like(x).index_add_(0, target, messages), x)
            pooled = x.new_zeros(len(graph.y), 8).scatter_reduce(0, graph.of[:, None].expand_as(x), x, "amax")
            return self.head(pooled)

    def data(rows: int, g: Generator) -> Any:
        samples = []
        for _ in range(rows):
            n = 3 + int(randint(g, 3, 1))
            samples.append((randn(g, n, 6), randint(g, n, 2, 2 * n), int(randint(g, 3, 1))))
        return Samples(samples)

    def collate(samples: list[Any]) -> Graph:
        xs, edges, ys = zip(*samples, strict=True)
        sizes = [len(x) for x in xs]
        starts = [0, *itertools.accumulate(sizes)][:-1]
        moved = [e + s for e, s in zip(edges, starts, strict=True)]
        of = torch.arange(len(xs)).repeat_interleave(torch.tensor(sizes))
        return Graph(torch.cat(xs), torch.cat(moved, 1), of, torch.tensor(ys))

    def loss(model: Any, batch: Graph) -> Tensor:
        return F.cross_entropy(model(batch), batch.y)

    return Network(model=Convolution, data=data, collate=collate, loss=loss)


@IDIOMS.add
def sparse_adjacency() -> Network:
    class Propagate(nn.Module):
        """One fixed graph over the features, as a sparse buffer."""

        def __init__(self) -> None:
            super().__init__()
            index = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
            self.register_buffer("adjacency", torch.sparse_coo_tensor(index, torch.ones(7), (6, 6)), persistent=False)
            self.first, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            nodes = x.transpose(0, 1).flatten(1)
            mixed = torch.sparse.mm(self.adjacency.to(x.dtype), nodes).view(6, -1, 2).transpose(0, 1)
            return self.head(torch.relu(self.first(mixed)).mean(1))

    return Network(model=Propagate, data=rows_and_classes(6, 2), loss=classify)


@IDIOMS.add
def point_set_with_neighbours() -> Network:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge = nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            nearest = torch.cdist(x, x).topk(3, largest=False).indices
            near = x.gather(1, nearest.flatten(1)[..., None].expand(-1, -1, 3)).view(*nearest.shape, 3)
            pairs = torch.cat([near - x[:, :, None], x[:, :, None].expand_as(near)], -1).permute(0, 3, 1, 2)
            out = self.edge(pairs).amax(-1)
            return self.head(torch.cat([out.amax(-1), out.mean(-1)], 1))

    return Network(model=Points, data=rows_and_classes(7, 3), loss=classify)


@IDIOMS.add
def equivariant_updates() -> Network:
    class Equivariant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge, self.move, self.node = _mlp(5, 8, 4), nn.Linear(4, 1, bias=False), _mlp(6, 8, 2)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            i, j = torch.triu_indices(4, 4, offset=1)
            i, j = torch.cat([i, j]), torch.cat([j, i])
            for _ in range(2):
                away = x[:, i] - x[:, j]
                m = self.edge(torch.cat([h[:, i], h[:, j], away.square().sum(-1, keepdim=True)], -1))
                x = x.index_add(1, i, 0.1 * away * self.move(m))
                h = h + self.node(torch.cat([h, torch.zeros(*h.shape[:2], 4).to(m).index_add_(1, i, m)], -1))
            return x, h

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 4, 3), randn(g, rows, 4, 2), randn(g, rows, 4, 3)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, h = model(batch[0], batch[1])
        return F.mse_loss(x, batch[2]) + 0.01 * h.square().mean()

    return Network(model=Equivariant, data=data, loss=loss)


# Sequences


@IDIOMS.add
def scheduled_sampling() -> Network:
    class Decoder(nn.Module):
        """Feeds its own words back more often, the more training calls it has seen."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.out = nn.Embedding(9, 8), nn.LSTMCell(8, 8), nn.Linear(8, 9)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, words: Tensor) -> Tensor:
            self.calls += 1
            rate = 1 - 0.9 ** self.calls.item()
            h = c = torch.zeros(len(words), 8, dtype=self.out.weight.dtype)
            word, logits = words[:, 0], []
            for t in range(1, words.shape[1]):
                h, c = self.cell(self.embed(word), (h, c))
                logits.append(self.out(h))
                own = torch.rand(len(words)) < rate
                word = torch.where(own, logits[-1].argmax(-1), words[:, t])
            return torch.stack(logits, 1)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch[:, 1:].flatten())

    return Network(model=Decoder, data=lambda n, g: randint(g, 9, n, 5), loss=loss, draws=True)


@IDIOMS.add
def transducer_lattice() -> Network:
    class Transducer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.predict = nn.GRU(4, 8, batch_first=True), nn.Embedding(5, 8)
            self.join = nn.Linear(8, 5)

        def forward(self, frames: Tensor, words: Tensor) -> Tensor:
            hidden, _ = self.encode(frames)
            told = self.predict(F.pad(words, (1, 0)))
            return self.join(torch.tanh(hidden[:, :, None] + told[:, None])).log_softmax(-1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 4, 4), 1 + randint(g, 4, rows, 3), 1 + randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        lattice, words, lengths = model(batch[0], batch[1]), batch[1], batch[2]
        blank = lattice[..., 0]
        emit = lattice[:, :, :-1].gather(-1, words[:, None, :, None].expand(-1, 4, -1, -1)).squeeze(-1)
        rows: list[list[Tensor]] = []
        for t in range(4):
            row: list[Tensor] = []
            for u in range(4):
                ways = []
                if t:
                    ways.append(rows[-1][u] + blank[:, t - 1, u])
                if u:
                    ways.append(row[-1] + emit[:, t, u - 1])
                row.append(torch.logsumexp(torch.stack(ways), 0) if ways else torch.zeros_like(blank[:, 0, 0]))
            rows.append(row)
        ends = torch.stack(rows[-1], 1) + blank[:, -1]
        return -ends.gather(1, lengths[:, None]).mean()

    return Network(model=Transducer, data=data, loss=loss)


@IDIOMS.add
def packed_by_the_collate() -> Network:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 6, bidirectional=True, batch_first=True), nn.Linear(12, 3)

        def forward(self, packed: PackedSequence) -> Tensor:
            packed = packed._replace(data=packed.data.to(self.head.weight.dtype))
            out, (h, _) = self.lstm(packed)
            hidden, lengths = pad_packed_sequence(out, batch_first=True)
            return self.head(hidden.sum(1) / lengths[:, None].to(hidden.dtype) + torch.cat(list(h), -1))

    def data(rows: int, g: Generator) -> Any:
        return Samples([(randn(g, 1 + int(randint(g, 5, 1)), 4), int(randint(g, 3, 1))) for _ in range(rows)])

    def collate(samples: list[Any]) -> tuple[PackedSequence, Tensor]:
        xs, ys = zip(*samples, strict=True)
        return pack_sequence(xs, enforce_sorted=False), torch.tensor(ys)

    return Network(model=Packed, data=data, collate=collate, loss=classify)


@IDIOMS.add
def nested_tensor_attention() -> Network:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            rows = [self.embed(row[:n]) for row, n in zip(x, lengths.tolist(), strict=True)]
            ragged = torch.nested.nested_tensor_from_jagged(
                torch.cat(rows), torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
            )
            return self.head(torch.stack([row.tanh().mean(0) for row in (2 * ragged).unbind()]))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 5, 4), 1 + randint(g, 5, rows), randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Ragged, data=data, loss=loss)


@IDIOMS.add
def key_value_sharing_and_cache() -> Network:
    class Layer(nn.Module):
        def __init__(self, owns: bool) -> None:
            super().__init__()
            self.q, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.kv = nn.Linear(8, 4, bias=False) if owns else None
            self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]), persistent=False)

        def forward(self, x: Tensor, cache: dict[str, Any], number: int) -> Tensor:
            b, t, _ = x.shape
            if self.kv is not None:
                cache["shared"] = self.kv(x).chunk(2, -1)
            k, v = cache["shared"]
            q = self.q(x).view(b, t, 4, 2).transpose(1, 2)
            scores = q @ k[:, None].transpose(-1, -2) / math.sqrt(2)
            gap = torch.arange(t)[None, :] - torch.arange(t)[:, None]
            scores = scores + self.slopes.to(x.dtype)[:, None, None] * gap
            seen = (gap <= 0) & (gap > -3)
            out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, None]
            cache["used"] = cache.get("used", 0) + number
            return x + self.out(out.transpose(1, 2).reshape(b, t, 8))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight
            self.layers = nn.ModuleList(Layer(i % 2 == 0) for i in range(4))
            self.norm = nn.RMSNorm(8)

        def forward(self, tokens: Tensor) -> Tensor:
            x, cache = self.embed(tokens), {}
            for number, layer in enumerate(self.layers):
                x = layer(x, cache=cache, number=number)
            assert cache["used"] == 6
            return self.head(self.norm(x))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    return Network(model=Decoder, data=lambda n, g: randint(g, 11, n, 6), loss=loss)


@IDIOMS.add
def delta_rule_memory() -> Network:
    class Delta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.beta = nn.Embedding(11, 6), nn.Linear(6, 18), nn.Linear(6, 1)
            self.decay, self.head = nn.Parameter(torch.tensor(2.0)), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            q, k, v = self.qkv(x).chunk(3, -1)
            k, beta = F.normalize(k, dim=-1), self.beta(x).sigmoid()
            memory, out = x.new_zeros(len(x), 6, 6), []
            for t in range(x.shape[1]):
                held = torch.einsum("bij,bj->bi", memory, k[:, t])
                write = beta[:, t] * (v[:, t] - held)
                memory = memory * self.decay.sigmoid() + torch.einsum("bi,bj->bij", write, k[:, t])
                out.append(torch.einsum("bij,bj->bi", memory, q[:, t]))
            return self.head(torch.stack(out, 1).mean(1))

    return Network(model=Delta, data=tokens_and_classes(), loss=classify)


@IDIOMS.add
def associative_scan() -> Network:
    class Scan(nn.Module):
        """A gated recurrence by doubling, with shifts by padding."""

        def __init__(self) -> None:
            super().__init__()
            self.inp, self.gate, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
            self.log_a = nn.Parameter(torch.log(torch.arange(1.0, 7.0)))

        def forward(self, x: Tensor) -> Tensor:
            a = torch.exp(-F.softplus(self.gate(x)) * self.log_a.exp() / 6)
            b = self.inp(x) * (1 - a)
            step = 1
            while step < x.shape[1]:
                b = b + a * F.pad(b, (0, 0, step, 0))[:, :-step]
                a = a * F.pad(a, (0, 0, step, 0), value=1.0)[:, :-step]
                step *= 2
            return self.out(b[:, -1])

    return Network(model=Scan, data=rows_and_classes(7, 4), loss=classify)


@IDIOMS.add
def trees_by_recursion() -> Network:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.join, self.forget = nn.Embedding(7, 5), nn.Linear(10, 15), nn.Linear(10, 5)
            self.head = nn.Linear(5, 3)

        def node(self, tree: Any) -> tuple[Tensor, Tensor]:
            if isinstance(tree, int):
                h = self.leaf(torch.tensor(tree))
                return h.tanh(), h
            (hl, cl), (hr, cr) = self.node(tree[0]), self.node(tree[1])
            both = torch.cat([hl, hr])
            i, o, u = self.join(both).chunk(3)
            c = i.sigmoid() * u.tanh() + self.forget(both).sigmoid() * (cl + cr)
            return o.sigmoid() * c.tanh(), c

        def forward(self, trees: list[Any]) -> Tensor:
            return self.head(torch.stack([self.node(tree)[0] for tree in trees]))

    def data(rows: int, g: Generator) -> Any:
        def tree(depth: int) -> Any:
            if depth == 0 or int(randint(g, 3, 1)) == 0:
                return int(randint(g, 7, 1))
            return (tree(depth - 1), tree(depth - 1))

        return Samples([(tree(3), int(randint(g, 3, 1))) for _ in range(rows)])

    def collate(samples: list[Any]) -> tuple[list[Any], Tensor]:
        trees, labels = zip(*samples, strict=True)
        return list(trees), torch.tensor(labels)

    return Network(model=Tree, data=data, collate=collate, loss=classify)


@IDIOMS.add
def tokens_counted_by_weights() -> Network:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(11, 8, padding_idx=0), nn.RNN(8, 8), nn.Linear(8, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(tokens).transpose(0, 1))[0].transpose(0, 1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        lengths = 1 + randint(g, 5, rows, 1)
        tokens = (1 + randint(g, 10, rows, 5)) * (torch.arange(5) < lengths)
        return tokens, randint(g, 4, rows, 5)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        tokens, tags = batch
        weight = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)[tags] * (tokens != 0)
        out = F.cross_entropy(model(tokens).transpose(1, 2), tags, reduction="none")
        return mh.mean((out * weight.to(out.dtype)).sum(), weight.sum())

    return Network(model=Tagger, data=data, loss=loss)


# Rays, solvers, flows


@IDIOMS.add
def rays_with_stratified_samples() -> Network:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bands", 2.0 ** torch.arange(3), persistent=False)
            self.trunk, self.colour = _mlp(21, 8, 9), nn.Linear(11, 3)

        def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
            edges = torch.linspace(0.1, 1.0, 6, dtype=origin.dtype)
            jitter = torch.rand(len(origin), 5, dtype=origin.dtype)
            depth = edges[:-1] + (edges[1:] - edges[:-1]) * jitter
            points = origin[:, None] + depth[..., None] * direction[:, None]
            angles = (points[..., None] * self.bands.to(origin.dtype)).flatten(-2)
            out = self.trunk(torch.cat([points, angles.sin(), angles.cos()], -1))
            density = F.softplus(out[..., 0])
            way = F.pad(depth.diff(dim=-1), (0, 1), value=1.0)
            alpha = 1 - torch.exp(-density * way)
            clear = torch.cumprod(F.pad(1 - alpha + 1e-10, (1, 0), value=1.0), -1)[:, :-1]
            told = torch.cat([out[..., 1:], direction[:, None].expand(-1, 5, -1)], -1)
            return ((alpha * clear)[..., None] * self.colour(told).sigmoid()).sum(1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 3), randn(g, rows, 3), torch.rand(rows, 3, generator=g)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return Network(model=Field, data=data, loss=loss, draws=True)


@IDIOMS.add
def hashed_grid_features() -> Network:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ParameterList(0.1 * torch.randn(13, 2) for _ in range(3))
            self.head = _mlp(6, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            features = []
            for level, table in enumerate(self.tables):
                scaled = x * 2 ** (level + 1)
                low = scaled.floor().long()
                part, total = scaled - low, 0
                for corner in itertools.product((0, 1), repeat=2):
                    place = low + torch.tensor(corner)
                    row = (place[:, 0] * 1 ^ place[:, 1] * 2654435761) % 13
                    share = torch.where(torch.tensor(corner, dtype=torch.bool), part, 1 - part).prod(-1, keepdim=True)
                    total = total + share * table[row]
                features.append(total)
            return self.head(torch.cat(features, -1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return torch.rand(rows, 2, generator=g), randn(g, rows, 1)

    return Network(model=Grid, data=data, loss=lambda model, batch: F.huber_loss(model(batch[0]), batch[1]))


@IDIOMS.add
def continuous_flow_with_trace() -> Network:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = _mlp(4, 8, 3)

        def velocity(self, t: float, x: Tensor) -> Tensor:
            return self.field(torch.cat([x, x.new_full((*x.shape[:-1], 1), t)], -1))

        def forward(self, x: Tensor) -> Tensor:
            divergence = x.new_zeros(len(x))
            for k in range(3):
                speed = functools.partial(self.velocity, k / 3)
                divergence = divergence + vmap(lambda row, s=speed: jacfwd(s)(row).trace())(x) / 3
                middle = x + speed(x) / 6
                x = x + self.velocity((k + 0.5) / 3, middle) / 3
            return 0.5 * x.square().sum(-1) - divergence

    return Network(model=Flow, data=lambda n, g: (randn(g, n, 3),), loss=lambda model, batch: model(batch[0]).mean())


@IDIOMS.add
def autoregressive_flow() -> Network:
    class Masked(nn.Linear):
        def __init__(self, inputs: int, outputs: int, mask: Tensor) -> None:
            super().__init__(inputs, outputs)
            self.register_buffer("mask", mask.float())

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.mask * self.weight, self.bias)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            i, h = torch.arange(4), torch.arange(8) % 3
            self.layers = nn.ModuleList()
            for _ in range(2):
                first = Masked(4, 8, h[:, None] >= i)
                second = Masked(8, 8, i.repeat(2)[:, None] > h)
                self.layers.append(nn.Sequential(first, nn.Tanh(), second))
            self.register_buffer("order", torch.tensor([3, 2, 1, 0]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            log_det = torch.zeros_like(x[:, 0])
            for layer in self.layers:
                shift, scale = layer(x).chunk(2, -1)
                scale = scale.tanh()
                x = ((x - shift) * (-scale).exp())[:, self.order]
                log_det -= scale.sum(-1)
            return x, log_det

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        z, log_det = model(batch[0])
        base = torch.distributions.Normal(torch.zeros((), dtype=z.dtype), torch.ones((), dtype=z.dtype))
        return -(base.log_prob(z).sum(-1) + log_det).mean()

    return Network(model=Flow, data=lambda n, g: (randn(g, n, 4),), loss=loss)


@IDIOMS.add
def mixture_density_by_distributions() -> Network:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = _mlp(6, 8, 8), nn.ModuleDict({n: nn.Linear(8, 3) for n in ("pi", "mu", "log")})

        def forward(self, x: Tensor) -> torch.distributions.Distribution:
            h = self.body(x)
            parts = torch.distributions.Normal(self.heads["mu"](h), F.softplus(self.heads["log"](h)) + 0.1)
            chosen = torch.distributions.Categorical(logits=self.heads["pi"](h))
            return torch.distributions.MixtureSameFamily(chosen, parts)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randn(g, rows)

    return Network(model=Mixture, data=data, loss=lambda model, batch: -model(batch[0]).log_prob(batch[1]).mean())


@IDIOMS.add
def hamiltonian_by_autograd() -> Network:
    class Hamiltonian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            q, p = slope.chunk(2, -1)
            return torch.cat([p, -q], -1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 4), randn(g, rows, 4)

    return Network(model=Hamiltonian, data=data, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@IDIOMS.add
def tangent_features() -> Network:
    class Tangent(nn.Module):
        """A linearised network: its output and the product of its Jacobian with learned offsets."""

        def __init__(self) -> None:
            super().__init__()
            self.base = _mlp().requires_grad_(False)
            self.offsets = nn.ParameterDict(
                {n.replace(".", "_"): torch.zeros_like(p) for n, p in self.base.named_parameters()}
            )

        def forward(self, x: Tensor) -> Tensor:
            values = {n: p.detach() for n, p in self.base.named_parameters()}
            moves = {n: self.offsets[n.replace(".", "_")] for n in values}
            out, along = jvp(lambda v: functional_call(self.base, v, (x,)), (values,), (moves,))
            return out + along

    return Network(
        model=Tangent,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
    )


@IDIOMS.add
def spectral_autoencoder() -> Network:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Parameter(torch.view_as_real(torch.randn(3, 5, dtype=torch.cfloat)) / 2)
            self.register_buffer("window", torch.hann_window(8))
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            spectrum = torch.fft.rfft(x * self.window.to(x.dtype))
            mixed = (spectrum[:, None] * torch.view_as_complex(self.filters)).sum(1)
            return self.out(torch.fft.irfft(mixed, n=8)), mixed

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        wave, spectrum = model(batch[0])
        return F.l1_loss(wave, batch[0]) + 0.1 * (spectrum.abs() - torch.fft.rfft(batch[0]).abs()).square().mean()

    return Network(model=Spectral, data=lambda n, g: (randn(g, n, 8),), loss=loss)


# Layers, adapters, quantization


class _Round(torch.autograd.Function):
    """Rounds to so many levels and passes gradients inside a range, with arguments that are no tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, bounds: tuple[float, float], name: str) -> Tensor:
        ctx.bounds, ctx.name = bounds, name
        ctx.save_for_backward(x)
        low, high = bounds
        return ((x.clamp(low, high) - low) / (high - low) * levels).round() / levels * (high - low) + low

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        inside = (x >= ctx.bounds[0]) & (x <= ctx.bounds[1])
        return gradients[0] * inside, None, None, None


@IDIOMS.add
def learned_step_quantization() -> Network:
    class Quantized(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.step = nn.Parameter(torch.tensor(0.1))

        def forward(self, input: Tensor) -> Tensor:
            scaled = self.weight / self.step
            whole = scaled + (scaled.clamp(-4, 3).round() - scaled).detach()
            return F.linear(_Round.apply(input, 15, (-2.0, 2.0), "input"), whole * self.step, self.bias)

    def model() -> nn.Module:
        return nn.Sequential(Quantized(6, 8), nn.ReLU(inplace=True), Quantized(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def adapters_on_packed_weights() -> Network:
    class Packed(nn.Module):
        """Base weights as bytes with a scale for each row, and a low-rank correction that is trained."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            weight = torch.randn(outputs, inputs) / math.sqrt(inputs)
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("packed", (weight / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)
            self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            base = F.linear(x, self.packed.to(x.dtype) * self.scale.to(x.dtype))
            return base + 2.0 * self.up(self.down(x))

    def model() -> nn.Module:
        return nn.Sequential(Packed(6, 8), nn.GELU(), Packed(8, 8), nn.GELU(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def dora_parametrization() -> Network:
    class Directed(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Parameter(torch.randn(2, weight.shape[1]) / 3),
                nn.Parameter(weight.new_zeros(len(weight), 2)),
            )
            self.size = nn.Parameter(weight.detach().norm(dim=1, keepdim=True))

        def forward(self, weight: Tensor) -> Tensor:
            moved = weight + self.b @ self.a
            return self.size * moved / moved.norm(dim=1, keepdim=True)

    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        for layer in (net[0], net[2]):
            parametrize.register_parametrization(layer, "weight", Directed(layer.weight))
            layer.parametrizations.weight.original.requires_grad_(False)
        return net

    return Network(
        model=model,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
    )


@IDIOMS.add
def batch_renorm() -> Network:
    class Renorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
            self.register_buffer("mean", torch.zeros(width))
            self.register_buffer("deviation", torch.ones(width))
            self.register_buffer("count", torch.tensor(0, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return (x - self.mean) / self.deviation * self.weight + self.bias
            mean, deviation = x.mean(0), x.std(0, unbiased=False) + 1e-3
            with torch.no_grad():
                r = (deviation / self.deviation).clamp(1 / 3, 3)
                d = ((mean - self.mean) / self.deviation).clamp(-5, 5)
                self.mean += 0.1 * (mean - self.mean)
                self.deviation += 0.1 * (deviation - self.deviation)
                self.count += 1
            return ((x - mean) / deviation * r + d) * self.weight + self.bias

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Renorm(8), nn.ReLU(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def squeezed_experts_with_bias_update() -> Network:
    class Experts(nn.Module):
        """Routing biases that follow the load instead of an auxiliary loss."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.shared = nn.Linear(6, 4, bias=False), nn.Linear(6, 8)
            self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(4))
            self.register_buffer("bias", torch.zeros(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).sigmoid()
            chosen = (scores + self.bias).topk(2, -1).indices
            weight = scores.gather(1, chosen)
            weight = weight / weight.sum(-1, keepdim=True)
            out = self.shared(x)
            for number, expert in enumerate(self.experts):
                rows, slot = torch.where(chosen == number)
                if len(rows):
                    out = out.index_add(0, rows, weight[rows, slot, None] * expert(x[rows]))
            if self.training:
                load = torch.bincount(chosen.flatten(), minlength=4).to(x.dtype)
                self.bias += 0.01 * (load.mean() - load).sign()
            return self.head(out.relu())

    return Network(model=Experts, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def capsules_routed_by_agreement() -> Network:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.votes = nn.Parameter(torch.randn(3, 3, 2, 4) / 2)

        def forward(self, x: Tensor) -> Tensor:
            u = torch.einsum("bid,ijdk->bijk", x.view(-1, 3, 2), self.votes)
            logits = torch.zeros_like(u[..., 0])
            for turn in range(3):
                s = (logits.softmax(2)[..., None] * (u if turn == 2 else u.detach())).sum(1)
                size = s.square().sum(-1, keepdim=True)
                v = size / (1 + size) * s / (size + 1e-8).sqrt()
                if turn < 2:
                    logits.add_((u.detach() * v[:, None]).sum(-1))
            return v.norm(dim=-1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, told = model(batch[0]), F.one_hot(batch[1], 3).to(batch[0].dtype)
        return (told * F.relu(0.9 - out).square() + 0.5 * (1 - told) * F.relu(out - 0.1).square()).sum(1).mean()

    return Network(model=Routed, data=rows_and_classes(6), loss=loss)


@IDIOMS.add
def built_by_the_first_call() -> Network:
    class Late(nn.Module):
        """Builds a projection when it first sees an input; the model is called once before it is trained."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.project = nn.Linear(8, 3), None

        def forward(self, x: Tensor) -> Tensor:
            if self.project is None:
                self.project = nn.Linear(x.shape[-1], 8).to(x.dtype)
            return self.head(torch.relu(self.project(x)))

    def model() -> nn.Module:
        net = Late()
        net(torch.zeros(1, 6))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def scale_in_a_plain_tensor() -> Network:
    class Scaled(nn.Module):
        """Plain tensors as attributes: one fixed, one updated in place, one in a list."""

        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()
            self.means = torch.linspace(-0.2, 0.2, 6, dtype=torch.float64)
            self.counts = [torch.zeros((), dtype=torch.float64)]

        def forward(self, x: Tensor) -> Tensor:
            self.counts[0] += 1
            return self.body(x - self.means.to(x.dtype)) / self.counts[0].sqrt().to(x.dtype)

    return Network(model=Scaled, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def input_changed_in_place() -> Network:
    class Normalizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shift = _mlp(), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            x.sub_(x.mean(1, keepdim=True)).div_(x.std(1, keepdim=True) + 1e-5)
            hidden = x + self.shift
            hidden[:, 0] *= 2
            hidden[:, 1:3].clamp_(min=0)
            return self.body(hidden)

    return Network(model=Normalizes, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def pops_from_the_batch() -> Network:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number, self.flag, self.head = nn.Linear(4, 8), nn.Embedding(2, 8), nn.Linear(8, 3)

        def forward(self, *, number: Tensor, flag: Tensor, **ignored: Any) -> dict[str, Any]:
            hidden = (self.number(number) + self.flag(flag.long())).relu_()
            return {"logits": self.head(hidden), "hidden": (hidden,), "used": sorted(ignored)}

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        flags = randint(g, 2, rows).bool()
        return {"number": randn(g, rows, 4), "flag": flags, "label": randint(g, 3, rows), "id": torch.arange(rows)}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        label = batch.pop("label")
        batch["extra"] = batch["number"] * 2
        out = model(**batch)
        assert out["used"] == ["extra", "id"]
        return F.cross_entropy(out["logits"], label) + 0.01 * out["hidden"][0].square().mean()

    return Network(model=Keywords, data=data, loss=loss)


@IDIOMS.add
def bytes_as_pictures() -> Network:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), persistent=False)
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
            self.head = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.to(self.mean.dtype) / 255 - self.mean))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return torch.randint(256, (rows, 3, 5, 5), generator=g, dtype=torch.uint8), randint(g, 3, rows)

    return Network(model=Normalized, data=data, loss=classify)


@IDIOMS.add
def selective_and_sequential_checkpoints() -> Network:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)))
            self.middle, self.head = _mlp(6, 8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
            keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            x = checkpoint(self.middle, x, use_reentrant=False, context_fn=keep, preserve_rng_state=False)
            return self.head(x)

    return Network(model=Recomputed, data=rows_and_classes(6), loss=classify, draws=True)


@IDIOMS.add
def saved_tensors_packed() -> Network:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                x = self.first(x).square()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t), lambda packed: packed[1]):
                return self.second(x.exp().log1p())

    return Network(model=Packs, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def gradient_hooks_on_activations() -> Network:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.body.register_forward_hook(lambda module, args, out: out.tanh() * 2)
            self.head.register_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:]))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient * 0.5 + gradient.sign() * 1e-4)
            return self.head(hidden)

    return Network(model=Hooked, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def parents_by_weak_reference() -> Network:
    class Child(nn.Module):
        """Reads a parameter of the module that owns it."""

        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            object.__setattr__(self, "parent", weakref.proxy(parent))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * self.parent.gain

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))
            self.children_ = nn.ModuleList(Child(self) for _ in range(2))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children_:
                x = x + child(x)
            return self.head(x)

    return Network(model=Parent, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def registry_of_a_class() -> Network:
    class Cached(nn.Module):
        """Position codes in a cache that belongs to the class."""

        codes: ClassVar[dict[tuple[int, torch.dtype], Tensor]] = {}

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

        @classmethod
        def positions(cls, length: int, dtype: torch.dtype) -> Tensor:
            if (length, dtype) not in cls.codes:
                angle = torch.arange(length)[:, None] / 10 ** (torch.arange(4) / 4)
                cls.codes[length, dtype] = torch.cat([angle.sin(), angle.cos()], -1).to(dtype)
            return cls.codes[length, dtype]

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head((x + self.positions(x.shape[1], x.dtype)).relu().mean(1))

    return Network(model=Cached, data=tokens_and_classes(), loss=classify)


@IDIOMS.add
def delegating_wrapper() -> Network:
    class Wrapper(nn.Module):
        """Passes unknown attributes to the module inside, as fine-tuning libraries do."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.extra = nn.Linear(3, 3)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.extra(self.inner(*args, **kwargs))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bias_scale = _mlp(), 0.3

        def penalty(self) -> Tensor:
            return sum((p.square().sum() for p in self.body.parameters()), torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.bias_scale

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * model.penalty()

    return Network(model=lambda: Wrapper(Inner()), data=rows_and_classes(6), loss=loss)


@IDIOMS.add
def deep_supervision_by_stored_outputs() -> Network:
    class Supervised(nn.Module):
        """Keeps outputs of its stages in attributes that the loss reads, as torch.hooks-based extractors do."""

        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
            self.features: list[Tensor] = []
            for stage in self.stages:
                stage.register_forward_hook(lambda module, args, out: self.features.append(out))

        def forward(self, x: Tensor) -> Tensor:
            self.features.clear()
            for stage in self.stages:
                x = torch.relu(stage(x))
            return self.heads[2](x)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        total = F.cross_entropy(model(batch[0]), batch[1])
        for head, feature in zip(model.heads, model.features[:-1], strict=False):
            total = total + 0.3 * F.cross_entropy(head(feature.relu()), batch[1])
        return total

    return Network(model=Supervised, data=rows_and_classes(6), loss=loss)


@IDIOMS.add
def auxiliary_loss_in_attributes() -> Network:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(6, 6)
            self.aux_loss = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            share = self.gate(x).softmax(-1)
            self.aux_loss = (share * (share + 1e-9).log()).sum(-1).mean()
            return share[:, :1] * self.a(x) + share[:, 1:] * self.b(x)

    def model() -> nn.Module:
        return nn.Sequential(Layer(), nn.Tanh(), Layer(), nn.Tanh(), nn.Linear(6, 3))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        total = F.cross_entropy(model(batch[0]), batch[1])
        return total + 0.1 * sum(m.aux_loss for m in model.modules() if hasattr(m, "aux_loss"))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


@IDIOMS.add
def gumbel_codes_with_annealing() -> Network:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.codes, self.up = _mlp(6, 8, 10), nn.Parameter(torch.randn(2, 5, 3)), _mlp(6, 8, 6)
            self.register_buffer("temperature", torch.tensor(2.0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.down(x).view(-1, 2, 5)
            chosen = F.gumbel_softmax(logits, tau=self.temperature.item(), hard=True)
            if self.training:
                self.temperature.mul_(0.9).clamp_(min=0.5)
            code = torch.einsum("bgk,gkd->bgd", chosen, self.codes).flatten(1)
            return self.up(code), logits.softmax(-1)

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        out, share = model(batch[0])
        return F.mse_loss(out, batch[0]) + 0.1 * (share * (share.clamp(min=1e-9) * 5).log()).sum(-1).mean()

    return Network(model=Codes, data=lambda n, g: (randn(g, n, 6),), loss=loss, draws=True)


@IDIOMS.add
def cutmix_by_random_boxes() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        x = x.clone()
        order = torch.randperm(len(x))
        share = float(torch.distributions.Beta(1.0, 1.0).sample())
        size = max(1, int(4 * math.sqrt(1 - share)))
        x[:, :, :size, :size] = x[order, :, :size, :size]
        share = 1 - size * size / 16
        out = model(x)
        smooth = {"label_smoothing": 0.1}
        return share * F.cross_entropy(out, labels, **smooth) + (1 - share) * F.cross_entropy(
            out, labels[order], **smooth
        )

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))

    return Network(model=model, data=rows_and_classes(2, 4, 4), loss=loss, draws=True)


@IDIOMS.add
def mixup_by_each_row() -> Network:
    """Both parts of each mixture are in the row, so that no row depends on another one."""

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, other, labels = batch
        share = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample((len(x),)).to(x.dtype)
        out = model(share[:, None] * x + (1 - share[:, None]) * other)
        return (share * F.cross_entropy(out, labels[:, 0], reduction="none")).mean() + (
            (1 - share) * F.cross_entropy(out, labels[:, 1], reduction="none")
        ).mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), randn(g, rows, 6), randint(g, 3, rows, 2)

    return Network(model=_mlp, data=data, loss=loss, draws=True)


# Losses that couple, count or match


@IDIOMS.add
def set_matching_by_permutations() -> Network:
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randn(g, rows, 3, 2)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0]).view(-1, 3, 2)
        cost = torch.cdist(out, batch[1], p=1)
        ways = torch.tensor(list(itertools.permutations(range(3))))
        totals = cost[:, torch.arange(3), ways].sum(-1)
        return totals.amin(1).mean()

    return Network(model=lambda: _mlp(6, 8, 6), data=data, loss=loss)


@IDIOMS.add
def optimal_transport_between_sets() -> Network:
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 4, 3), randn(g, rows, 4, 2)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        cost = torch.cdist(model(batch[0]), batch[1]).square()
        f = torch.zeros_like(cost[:, :, 0])
        g = torch.zeros_like(cost[:, 0])
        for _ in range(5):
            f = -0.5 * torch.logsumexp((g[:, None] - cost) / 0.5, 2)
            g = -0.5 * torch.logsumexp((f[:, :, None] - cost) / 0.5, 1)
        plan = torch.exp((f[:, :, None] + g[:, None] - cost) / 0.5)
        return (plan * cost).sum((1, 2)).mean()

    return Network(model=lambda: _mlp(3, 8, 2), data=data, loss=loss)


@IDIOMS.add
def kernel_discrepancy() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = model(batch[0]), batch[1]

        def kernel(u: Tensor, v: Tensor) -> Tensor:
            return torch.exp(-torch.cdist(u, v).square() / 2).mean()

        return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randn(g, rows, 3)

    return Network(model=_mlp, data=data, loss=loss)


@IDIOMS.add
def targets_normalised_by_the_batch() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        scale = batch[1].abs().mean() + 1e-6
        return F.mse_loss(model(batch[0]).squeeze(-1), batch[1] / scale)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randn(g, rows)

    return Network(model=lambda: _mlp(6, 8, 1), data=data, loss=loss)


@IDIOMS.add
def nothing_to_learn_from_some_batches() -> Network:
    """Returns a zero that needs no gradient when no row of the batch is labelled."""

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        labels = randint(g, 3, rows)
        labels[6:12] = -1
        return randn(g, rows, 6), labels

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        known = batch[1] >= 0
        out = model(batch[0])
        if not known.any():
            return mh.mean(0 * out.sum(), 1)
        return mh.mean(F.cross_entropy(out[known], batch[1][known], reduction="sum"), known.sum())

    return Network(model=_mlp, data=data, loss=loss)


@IDIOMS.add
def survival_by_risk_sets() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, times, events = batch
        order = times.argsort(descending=True)
        risk = model(x).squeeze(-1)[order]
        partial = risk - risk.logcumsumexp(0)
        return -(partial * events[order]).sum() / events.sum().clamp(min=1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), torch.rand(rows, generator=g), (torch.rand(rows, generator=g) > 0.3).float()

    return Network(model=lambda: _mlp(6, 8, 1), data=data, loss=loss)


@IDIOMS.add
def multi_task_by_present_labels() -> Network:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})
            self.log_vars = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x).relu()
            return {name: head(hidden) for name, head in self.heads.items()}

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        b = randn(g, rows)
        b[randint(g, 2, rows).bool()] = math.nan
        return {"x": randn(g, rows, 6), "a": randint(g, 3, rows), "b": b}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        known = ~batch["b"].isnan()
        a = F.cross_entropy(out["a"], batch["a"])
        b = torch.where(known, out["b"].squeeze(-1) - batch["b"].nan_to_num(), 0.0).square().mean()
        logs = model.log_vars
        return (-logs["a"]).exp() * a + (-logs["b"]).exp() * b + logs["a"] + logs["b"]

    return Network(model=Tasks, data=data, loss=loss)


# Optimizers


@IDIOMS.add
def clips_inside_the_optimizer() -> Network:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.3)

        inner.register_step_pre_hook(clip)
        return inner

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


class _Centralized(torch.optim.SGD):
    """SGD that takes the mean out of each row of a gradient, clips by unit, and decays towards the first weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.anchors = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))
                    size = p.grad.norm(dim=1, keepdim=True)
                    p.grad.mul_((0.5 * p.norm(dim=1, keepdim=True) / (size + 1e-6)).clamp(max=1.0))
                p.grad.add_(p - self.anchors[p], alpha=0.01)
        return super().step(closure)


@IDIOMS.add
def centralizes_gradients() -> Network:
    return Network(
        model=_mlp,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: _Centralized(m.parameters(), lr=0.05, momentum=0.9),
    )


@IDIOMS.add
def freezes_and_thaws_by_steps() -> Network:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        head = torch.optim.SGD(
            [{"params": model[2].parameters()}, {"params": model[0].parameters(), "lr": 0.0}], lr=0.05, momentum=0.9
        )
        head.taken = 0  # type: ignore[attr-defined]

        def thaw(optimizer: Any, *_: Any) -> None:
            optimizer.taken += 1
            if optimizer.taken >= 2:
                optimizer.param_groups[1]["lr"] = 0.02

        head.register_step_post_hook(thaw)
        return head

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@IDIOMS.add
def averages_weights_in_the_optimizer() -> Network:
    class Averaging(torch.optim.SGD):
        """Every second step sets the weights to the mean of the weights that it has seen."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            value = super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["seen"] = state.get("seen", 0) + 1
                    if "average" not in state:
                        state["average"] = p.detach().clone()
                    state["average"].lerp_(p, 1 / state["seen"])
                    if state["seen"] % 2 == 0:
                        p.copy_(state["average"])
            return value

    return Network(
        model=_mlp,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: Averaging(m.parameters(), lr=0.05, momentum=0.9),
    )


@IDIOMS.add
def rate_follows_the_gradient_norm() -> Network:
    class Normalised(torch.optim.Optimizer):
        """Divides by the norm over all gradients of a group."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                gradients = [p.grad for p in group["params"] if p.grad is not None]
                norm = torch.stack([g.norm() for g in gradients]).norm()
                torch._foreach_add_(
                    [p for p in group["params"] if p.grad is not None], gradients, alpha=-group["lr"] / float(norm)
                )

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Normalised(m.parameters(), lr=0.05)
    )


@IDIOMS.add
def clips_as_gradients_arrive() -> Network:
    def model() -> nn.Module:
        net = _mlp()

        def clip(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.02, 0.02)

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def weights_projected_after_steps() -> Network:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)

        @torch.no_grad()
        def project(*_: Any) -> None:
            for name, p in model.named_parameters():
                if name.endswith("weight"):
                    p.div_(p.norm(dim=1, keepdim=True).clamp(min=1.0))

        inner.register_step_post_hook(project)
        return inner

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


# Other dtypes and empty things


@IDIOMS.add
def experts_of_empty_batches() -> Network:
    class Split(nn.Module):
        """Sends rows by sign to two layers, each of which may get none."""

        def __init__(self) -> None:
            super().__init__()
            self.low, self.high, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            is_high = x[:, 0] > 0.8
            hidden = x.new_empty(len(x), 8)
            hidden[is_high] = self.high(x[is_high]).to(hidden.dtype)
            hidden[~is_high] = self.low(x[~is_high]).to(hidden.dtype)
            return self.head(hidden.tanh())

    return Network(model=Split, data=rows_and_classes(6), loss=classify)


@IDIOMS.add
def reduced_precision_head() -> Network:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.body(x)
            return self.head(hidden.to(self.head.weight.dtype).tanh())

    return Network(model=Mixed, data=rows_and_classes(6), loss=classify, precision="fp32", rounding=5e-2)


@dataclass
class _State:
    """Hidden state that is passed from call to call."""

    value: Tensor
    steps: int = 0


@IDIOMS.add
def halting_by_rows() -> Network:
    class Ponder(nn.Module):
        """Adaptive computation: every row stops by itself; the cost of steps is part of the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.cell, self.halt, self.head = nn.GRUCell(6, 8), nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            state = _State(x.new_zeros(len(x), 8))
            left, out, cost = x.new_ones(len(x)), x.new_zeros(len(x), 8), x.new_zeros(len(x))
            while state.steps < 4 and bool((left > 1e-3).any()):
                state = _State(self.cell(x, state.value), state.steps + 1)
                share = left * self.halt(state.value).sigmoid().squeeze(-1) if state.steps < 4 else left
                out = out + share[:, None] * state.value
                cost, left = cost + share * state.steps, left - share
            return self.head(out), cost

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, cost = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.01 * cost.mean()

    return Network(model=Ponder, data=rows_and_classes(6), loss=loss)


@IDIOMS.add
def weights_tied_by_transposing() -> Network:
    class Tied(nn.Module):
        """A decoder that uses the encoder's weights transposed, and one bias registered twice."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4)])
            self.bias = nn.Parameter(torch.zeros(5))
            self.layers[0].bias = self.bias

        def forward(self, x: Tensor) -> Tensor:
            code = self.layers[1](self.layers[0](x).tanh())
            back = F.linear(code, self.layers[1].weight.T, self.bias).tanh()
            return back @ self.layers[0].weight

    return Network(
        model=Tied, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[0])
    )


@IDIOMS.add
def sine_of_integer_inputs() -> Network:
    def model() -> nn.Module:
        class Sines(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(2, 16), nn.Linear(16, 2)

            def forward(self, places: Tensor) -> Tensor:
                x = places.to(self.first.weight.dtype).div(8).sub(0.5).mul(2)
                return self.second(torch.sin(5 * self.first(x)))

        return Sines()

    return Network(model=model, data=lambda n, g: (randint(g, 8, n, 2),), loss=mean_square)
