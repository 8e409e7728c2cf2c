"""Networks whose result depends on how a batch is split, and ordinary ones whose result does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import manyhands as mh

from .problems import classify, generator, mlp, padded_tokens

ROWS, BATCH = 44, 12


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 12, generator=generator(seed)), torch.randint(0, 5, (ROWS,), generator=generator(seed + 1))


def task(model: Callable[[], nn.Module] = mlp, loss: Any = classify, **changes: Any) -> mh.Task:
    return mh.Task(
        model=model,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data=data(),
        batch_size=BATCH,
    ).replace(**changes)


# -- what a split changes -------------------------------------------------------------------------------------------


class Router(nn.Module):
    """A mixture of experts with a balance loss, whose gradient is small."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 3)
        self.experts = nn.ModuleList(nn.Linear(12, 5) for _ in range(3))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), 3).to(x.dtype)
        if self.training:
            self.balance = 1e-3 * (chosen.mean(0) * weights.mean(0)).sum()
        return torch.stack([expert(x) for expert in self.experts], -1) @ (weights * chosen)[..., None]


def routed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).squeeze(-1), batch[1]) + model.balance


class TrainingTerm(nn.Module):
    """A penalty over the batch that exists in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y + y.std(0) if self.training else y


def ignoring(model: nn.Module, batch: Tensor) -> Tensor:
    """Tokens, of which padding is ignored by a plain mean."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def late_padding() -> Tensor:
    """Rows of which only the last ones are padded."""
    tokens = torch.randint(1, 20, (200, 9), generator=generator(3))
    tokens[150:] = padded_tokens(50)
    return tokens


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def hardest(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none").topk(3).values.mean()


def weighted(model: nn.Module, batch: Any) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=batch[0].dtype)
    return F.cross_entropy(model(batch[0]), batch[1], weight=weight)


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    y = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(y @ y.T / 0.1, torch.arange(len(y)))


class OwnStatistics(nn.Module):
    """Batch statistics by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.batch_norm(x, None, None, training=True) if self.training else x)


class Codebook(nn.Module):
    """Codes that follow the sums of what is next to them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("size", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(F.one_hot(y.argmax(-1), 5).sum(0), alpha=0.1)
        return y


class Clamped(nn.Module):
    """A hook that is not linear in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.net[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


SILENT: dict[str, tuple[mh.Task, str]] = {
    "a router's balance loss": (task(Router, routed), r"mul of the network \(Router\) at silent.py:\d+"),
    "a term of training mode": (task(TrainingTerm), r"std of the network \(TrainingTerm\) at silent.py:\d+"),
    "padding in late rows": (task(Tokens, ignoring, data=late_padding()), r"cross_entropy at silent.py:\d+"),
    "hard examples": (task(loss=hardest), r"topk at silent.py:\d+"),
    "weights of classes": (task(loss=weighted), r"cross_entropy at silent.py:\d+"),
    "a contrastive loss": (task(loss=contrastive), r"matmul at silent.py:\d+"),
    "statistics by hand": (task(OwnStatistics), r"batch_norm of the network \(OwnStatistics\) at silent.py:\d+"),
}
"""Tasks that splitting a batch changes, and the operation that is named."""


# -- what it does not -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 6, 2, batch_first=True, dropout=0.2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.view(len(x), 4, 3))[0][:, -1])


class Autoencoder(nn.Module):
    """Draws noise in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.randn(len(x), 4) * (spread / 2).exp()), mean, spread


def elbo(model: nn.Module, batch: Any) -> Tensor:
    y, mean, spread = model(batch[0])
    divergence = (mean.square() + spread.exp() - 1 - spread).sum(-1).mean() / 2
    return (y - batch[0]).square().sum(-1).mean() + divergence


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))[:, :5]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(12, 8).requires_grad_(False), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x).relu())


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Own(nn.Module):
    """A function of its own, a mask of gradients, float32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.net[0].weight.register_hook(lambda grad: grad * (torch.arange(12) > 3))

    def forward(self, x: Tensor) -> Tensor:
        y = Sine.apply(self.net(x))
        return y * y.float().square().mean(-1, keepdim=True).rsqrt().to(y.dtype)


def rowwise(model: nn.Module, batch: Any) -> Any:
    """Stable by the largest value of the batch, which cancels out; counted by hand."""
    y = model(batch[0])
    y = y - y.max().detach()
    losses = F.cross_entropy(y, batch[1], reduction="none")
    return mh.mean((losses * (batch[1] > 0)).sum(), (batch[1] > 0).sum())


def noise() -> Any:
    source = torch.Generator().manual_seed(5)
    for _ in range(30):
        yield torch.randn(12, generator=source), int(torch.randint(0, 5, (), generator=source))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x.view(len(x), 3, 4)).flatten(1))


def norms() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(12, 8)), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 5))


def spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(12, 8)), nn.Tanh(), nn.Linear(8, 5))


def optimizer(name: str, **settings: Any) -> Any:
    return lambda model: getattr(torch.optim, name)(model.parameters(), **settings)


ORDINARY: dict[str, mh.Task] = {
    "adam": task(optimizer=optimizer("AdamW", lr=0.01)),
    "recurrent": task(Recurrent),
    "noise": task(Autoencoder, elbo, optimizer=optimizer("Adam", lr=1e-3)),
    "tied": task(Tied, optimizer=optimizer("Adagrad", lr=0.1)),
    "frozen": task(Frozen),
    "own functions": task(Own),
    "counted": task(loss=rowwise, optimizer=optimizer("RMSprop", lr=0.01)),
    "attention": task(Attentive, optimizer=optimizer("AdamW", lr=0.01)),
    "a clamp of gradients": task(Clamped),
    "a codebook": task(Codebook),
    "norms and dropout": task(norms, optimizer=optimizer("Rprop", lr=0.01), clip=0.5),
}
