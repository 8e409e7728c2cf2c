"""The networks of the equality matrix: an MLP, a CNN with BatchNorm, a GPT with padded tokens, a GAN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # An eps far above rounding: a bias before a BatchNorm, or of an attention's keys, has a gradient of nothing else,
    # and the usual eps makes steps of it that differ between processors.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-5),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))


class Sometimes(nn.Module):
    """A network with an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.norm2(self.second(x))).mean((2, 3)))


class Gpt(nn.Module):
    """Two causal blocks with tied embeddings."""

    def __init__(self, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(12, width)
        block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.tokens.weight.dtype)
        x = self.tokens(tokens) + self.places(torch.arange(length))
        return self.blocks(x, mask=mask, is_causal=True) @ self.tokens.weight.T


def token_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Any:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return mh.mean(losses, (targets != 0).sum())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def gan_step(hand: mh.Hand, batch: Any) -> None:
    def critic(part: Any) -> Tensor:
        noise, real = part
        fake = hand.model.generator(noise).detach()
        return F.softplus(-hand.model.critic(real)).mean() + F.softplus(hand.model.critic(fake)).mean()

    def forge(part: Any) -> Tensor:
        return F.softplus(-hand.model.critic(hand.model.generator(part[0]))).mean()

    hand.minimize(critic, "critic")
    hand.minimize(forge, "generator")


def padded_tokens(rows: int) -> Tensor:
    tokens = torch.randint(1, 20, (rows, 9), generator=generator(3))
    lengths = torch.randint(3, 10, (rows,), generator=generator(4))
    return tokens * (torch.arange(9) < lengths[:, None])


def problem(name: str, optimizer: str = "sgd", rows: int = 41, batch_size: int = 16) -> mh.Task:
    """A task whose last batch is partial and whose batches do not divide by 3."""
    make = OPTIMIZERS[optimizer]
    common: dict[str, Any] = {"batch_size": batch_size, "clip": 0.5, "seed": 3}
    single = {"optimizer": lambda model: make(model.parameters()), **common}
    labels = torch.randint(0, 5, (rows,), generator=generator(1))
    if name == "mlp":
        data = (torch.randn(rows, 12, generator=generator(0)), labels)
        return mh.Task(model=mlp, loss=classify, data=data, **single)
    if name == "cnn":
        data = (torch.randn(rows, 1, 6, 6, generator=generator(0)) * 2 + 1, labels)
        return mh.Task(model=Cnn, loss=classify, data=data, **single)
    if name == "gpt":
        return mh.Task(model=Gpt, loss=token_loss, data=padded_tokens(rows), **single)
    assert name == "gan"
    noise, real = torch.randn(rows, 4, generator=generator(0)), torch.randn(rows, 3, generator=generator(5))
    return mh.Task(
        model=Gan,
        step=gan_step,
        optimizer=lambda model: {key: make(getattr(model, key).parameters()) for key in ("critic", "generator")},
        data=(noise, real),
        **common,
    )
