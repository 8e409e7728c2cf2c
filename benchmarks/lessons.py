"""Small tasks that can be learned, for benchmarks that compare losses and not only times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

Data = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A network, and data that a teacher has made."""

    name: str
    build: Callable[[], nn.Module]
    make_data: Callable[[], Data]
    loss: Callable[[Any, Data], Tensor]
    lr: float
    batch_size: int
    """Over all processes."""

    def model(self) -> nn.Module:
        """The network, with the same first values everywhere."""
        torch.manual_seed(1)
        return self.build()

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, as most would take."""
        return AdamW(model.parameters(), lr=self.lr)

    def data(self, num_samples: int) -> Data:
        """So many samples, over and over the same rows, in one long epoch."""
        rows = _made(self)
        return tuple(part[torch.arange(num_samples) % len(part)] for part in rows)


@cache
def _made(lesson: Lesson) -> Data:
    torch.manual_seed(7)
    return lesson.make_data()


def classify(model: Any, batch: Data) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def _wide() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise((784, 1024, 896, 200, 10)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _taught_vectors() -> Data:
    inputs = torch.randn(16384, 784)
    teacher = nn.Sequential(nn.Linear(784, 24), nn.Tanh(), nn.Linear(24, 10))
    with torch.no_grad():
        classes = (8 * teacher(inputs)).argmax(1)
    return inputs, classes


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )


def _taught_pictures() -> Data:
    classes = torch.randint(10, (4096,))
    patterns = F.interpolate(torch.randn(10, 3, 4, 4), size=(12, 12), mode="bilinear")
    pictures = patterns[classes] + 3 * torch.randn(4096, 3, 12, 12)
    # Some are named wrongly, so that the loss has a floor that is not zero.
    return pictures, torch.where(torch.rand(4096) < 0.15, torch.randint(10, (4096,)), classes)


class Gpt(nn.Module):
    """Two causal blocks over a small alphabet."""

    def __init__(self, alphabet: int = 32, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(alphabet, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, alphabet)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def next_token(model: Any, batch: Data) -> Tensor:
    """Cross-entropy of each next token."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _taught_text() -> Data:
    """Each token depends on the two before it."""
    table = torch.softmax(3 * torch.randn(32, 32, 32), -1)
    tokens = torch.randint(32, (4096, 33))
    for place in range(2, 33):
        tokens[:, place] = torch.multinomial(table[tokens[:, place - 2], tokens[:, place - 1]], 1).squeeze(1)
    return (tokens,)


class Recommender(nn.Module):
    """The rating of an item by a user, from a vector of each."""

    def __init__(self, people: int = 300, things: int = 400, width: int = 16) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(people, width), nn.Embedding(things, width)
        self.top = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, people: Tensor, things: Tensor) -> Tensor:
        one, other = self.people(people), self.things(things)
        return self.top(torch.cat([one, other, one * other], 1)).squeeze(1)  # type: ignore[no-any-return]


def liking(model: Any, batch: Data) -> Tensor:
    """Mean square error."""
    people, things, likes = batch
    return F.mse_loss(model(people, things), likes)


def _taught_likes() -> Data:
    people, things = torch.randint(300, (32768,)), torch.randint(400, (32768,))
    tastes, kinds = torch.randn(300, 2), torch.randn(400, 2)
    likes = tastes[people, 0] + kinds[things, 0] + tastes[people, 1] * kinds[things, 1]
    return people, things, likes + 0.3 * torch.randn(32768)


WIDE = Lesson(name="mlp", build=_wide, make_data=_taught_vectors, loss=classify, lr=3e-4, batch_size=128)
"""1.9 million parameters and little work for each: what a slow network feels most."""
CNN = Lesson(name="cnn", build=_cnn, make_data=_taught_pictures, loss=classify, lr=2e-3, batch_size=64)
GPT = Lesson(name="gpt", build=Gpt, make_data=_taught_text, loss=next_token, lr=2e-3, batch_size=64)
LIKES = Lesson(name="recommender", build=Recommender, make_data=_taught_likes, loss=liking, lr=1e-2, batch_size=256)
