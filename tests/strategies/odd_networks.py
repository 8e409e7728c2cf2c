"""Networks, losses and optimizers that are hard to split: branches, buffers, hooks, attention, second gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

ROWS, WIDTH, CLASSES, LENGTH = 14, 12, 5, 4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(ROWS, WIDTH, generator=generator(0))
Y = torch.randint(0, CLASSES, (ROWS,), generator=generator(1))
Z = torch.randn(ROWS, LENGTH, 16, generator=generator(2))
IS_PADDING = torch.arange(LENGTH)[None] >= torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator(3))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch[:-1]), batch[-1])


def counted(model: nn.Module, batch: Any) -> mh.Mean:
    losses, counts = F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[1] > 0
    return mh.mean((losses * counts).sum(), counts.sum())


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return F.cross_entropy(y, batch[1]) + slope.square().sum(1).mean()


def distance(model: nn.Module, batch: Any) -> Tensor:
    """Numbers added to sums over features, and a value that Python reads of a weight."""
    y = model(batch[0])
    target, sign = F.one_hot(batch[1], CLASSES).to(y.dtype), batch[1].sign() * 2 - 1
    own = (1 - (y * target).sum(-1)).square().mean() / max(1.0, model[0].weight.norm().item())
    return own + F.cosine_embedding_loss(y, target, sign)


def own_step(hand: mh.Hand, batch: Any) -> None:
    hand.minimize(classify(hand.model, batch))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def task(model: Callable[[], nn.Module], loss: Any = classify, data: Any = (X, Y), optimizer: Any = sgd) -> mh.Task:
    return mh.Task(model=model, loss=loss, optimizer=optimizer, data=data, batch_size=6, seed=3)


def blocks(width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))


class Experts(nn.Module):
    """Blocks of equal size of which each batch uses some, and a number that the first of them uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Linear(WIDTH, 8), blocks(), nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden, which = self.first(x), (x[:, 0] * 7).long().abs() % 3
        mixed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows = (which == index).nonzero().flatten()
            if len(rows):
                found = expert(hidden[rows])
                mixed = mixed.index_add(0, rows, found if index else found * self.scale)
        return self.head(mixed)


class InPlace(nn.Module):
    """Changes the outputs of blocks in place, which are views, and parts of them through views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            y = block(hidden)
            y *= 2
            y[:, 0].add_(1)
            hidden = y.flatten(1).tanh()
        return self.head(hidden)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(16, CLASSES)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.view_as_real(self.first(x).to(self.weight.dtype) @ self.weight).flatten(1))


def subtract_half_the_mean(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.sub_(parameter.grad.mean() / 2)


class Hooked(nn.Module):
    """A mask, a clamp and a norm on gradients, a hook after accumulation, and hooks of modules on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(WIDTH, 8), blocks(), nn.Linear(8, CLASSES)
        mask = torch.rand(8, WIDTH, generator=generator(4)) > 0.5
        self.first.weight.register_hook(lambda gradient: gradient * mask)
        self.blocks[0][0].weight.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
        self.head.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
        self.blocks[1][0].weight.register_post_accumulate_grad_hook(subtract_half_the_mean)
        self.blocks[1].register_forward_hook(lambda _, inputs, output: output * 2 + inputs[0])
        self.blocks[2].register_forward_pre_hook(lambda _, inputs: (inputs[0].sin(),))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Remembering(nn.Module):
    """Means over samples in place and by assignment, sums with a decay, counters, with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 8), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)
        for name, shape in {"mean": (WIDTH,), "square": (8,), "sums": (8,), "seen": ()}.items():
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x - self.mean)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.steps += 1
        hidden = self.norm(hidden.view(-1, 2, 4)).flatten(1) + self.square * 0.1
        if self.training:
            self.square = 0.5 * self.square + 0.5 * hidden.detach().square().mean(0)
            self.sums.mul_(0.9).add_(hidden.detach().sum(0), alpha=0.1)
            self.seen += len(x)
        return self.head(self.second(hidden).tanh())


class Codebook(nn.Module):
    """Codes that are a quotient of two sums: neither a mean nor a sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.register_buffer("codes", torch.randn(4, 8, generator=generator(5)))
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, 4).to(hidden.dtype)
                self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hits.T @ hidden, alpha=0.1)
                self.codes.copy_(self.sums / (self.counts[:, None] + 1e-3))
        return self.head(hidden + (found - hidden).detach())


class OwnBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.batch_norm(self.first(x), self.mean, self.variance, training=self.training))


class LearnedQueries(nn.Module):
    """Attention to a sequence by queries that are parameters; its weights are used as well."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 16, generator=generator(6)) * 0.3)
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, z: Tensor) -> Tensor:
        found, weights = self.attention(self.queries.expand(len(z), -1, -1), z, z)
        return self.head(found.mean(1)) * (1 + weights[:, :1, 0])


class CrossAttention(nn.Module):
    """Keys and values of other widths, both masks, sequence first, the weights of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(16, 16), nn.Linear(16, 6)
        self.attention, self.head = nn.MultiheadAttention(16, 2, kdim=16, vdim=6), nn.Linear(16, CLASSES)

    def forward(self, z: Tensor, is_padding: Tensor) -> Tensor:
        later = torch.zeros(LENGTH, LENGTH, dtype=z.dtype).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -9.0)
        inputs = [tensor.transpose(0, 1) for tensor in (self.query(z), z, self.value(z))]
        # Of the type of the other mask: torch warns of two different ones.
        padding = torch.zeros(is_padding.shape, dtype=z.dtype).masked_fill(is_padding, -torch.inf)
        found, weights = self.attention(*inputs, key_padding_mask=padding, attn_mask=later, average_attn_weights=False)
        return self.head(found.mean(0)) + weights.sum((1, 2))[:, :1]


class Translator(nn.Module):
    """torch's encoder with padding, and a decoder that attends to it."""

    def __init__(self) -> None:
        super().__init__()
        layers: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, **layers), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, **layers), 1)
        self.starts, self.head = nn.Embedding(3, 16), nn.Linear(16, CLASSES)

    def forward(self, z: Tensor, is_padding: Tensor) -> Tensor:
        memory = self.encoder(z, src_key_padding_mask=is_padding)
        starts = self.starts.weight[None].expand(len(z), -1, -1)
        return self.head(self.decoder(starts, memory, memory_key_padding_mask=is_padding).mean(1))


class DropoutBeforeHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(x)))


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Sign.apply(self.first(x)))


def with_backward_hook() -> nn.Module:
    net = plain()
    net[0].register_full_backward_hook(lambda _, inputs, __: inputs)
    return net


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 8, sparse=True), nn.Linear(8, CLASSES))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, CLASSES, bias=False))


class Noisy(torch.optim.SGD):
    """Adds random numbers to gradients, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)
        super().step()


class OwnRule(torch.optim.Optimizer):
    """A step along the gradient, divided by nothing, by a tensor's norm or by that of all of them."""

    def __init__(self, parameters: Any, norm: str) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.norm = norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            divisor = {"none": 1.0, "own": parameter.grad.norm(), "all": total}[self.norm]
            parameter.add_(parameter.grad / divisor, alpha=-self.param_groups[0]["lr"])


def optimizer_task(make: Callable[[Any], torch.optim.Optimizer]) -> mh.Task:
    return task(plain, optimizer=lambda model: make(model.parameters()))


class Router(nn.Module):
    """A mixture whose gate converts its weights to float32 in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(torch.float32)
        chances = self.gate(x.to(torch.float32)).softmax(-1).to(x.dtype)
        return sum(chances[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


class BalancedRouter(nn.Module):
    """A mixture balanced without an auxiliary loss: a bias follows the sign of each expert's missing load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = F.one_hot((scores + self.bias).argmax(1), 2).to(x.dtype)
        if self.training:
            load = chosen.sum(0)
            self.bias += 0.01 * (load.mean() - load).sign()
        return sum((chosen * scores)[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


TASKS = {
    "experts": task(Experts),
    "router": task(Router),
    "balanced_router": task(BalancedRouter),
    "penalty": task(plain, loss=penalised),
    "in_place": task(InPlace),
    "complex": task(Complex),
    "hooks": task(Hooked, loss=counted),
    "buffers": task(Remembering),
    "codebook": task(Codebook),
    "own_batch_norm": task(OwnBatchNorm),
    "queries": task(LearnedQueries, data=(Z, Y)),
    "cross": task(CrossAttention, data=(Z, IS_PADDING, Y)),
    "translator": task(Translator, data=(Z, IS_PADDING, Y)),
    "signs": task(Signs),
    "distance": task(plain, loss=distance),
    "adafactor": optimizer_task(lambda parameters: torch.optim.Adafactor(parameters, lr=0.05)),
    "noisy": optimizer_task(lambda parameters: Noisy(parameters, lr=0.05)),
    "by_element": optimizer_task(lambda parameters: OwnRule(parameters, "none")),
    "by_tensor": optimizer_task(lambda parameters: OwnRule(parameters, "own")),
    "by_all": optimizer_task(lambda parameters: OwnRule(parameters, "all")),
    "dropout": task(DropoutBeforeHead),
    "backward_hook": task(with_backward_hook),
    "own_step": task(Experts).replace(loss=None, step=own_step),
    "sparse": task(sparse, data=(Y, Y)),
}
