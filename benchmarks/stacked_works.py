"""Small networks, of which many fit into one program: an MLP, a transformer and a CNN, with data on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

from .gpu_works import Gpt, mlp


@dataclass(frozen=True, kw_only=True)
class StackedWork:
    """A network, its data, and how steps are counted."""

    name: str
    model: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    batch_size: int
    bf16: bool
    steps: int
    """Steps of a block that is timed."""
    sizes: tuple[int, ...]
    """Numbers of networks that show how it grows."""

    def task(self, number: int = 0) -> mh.Task:
        """One of many: its own learning rate, first weights and order of samples."""
        rate = 1e-4 * (1 + number % 10)
        return mh.Task(
            model=self.model,
            loss=loss,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=rate),
            data=self.data,
            batch_size=self.batch_size,
            seed=number,
        )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy over classes or tokens."""
    outputs = model(batch[0])
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def cnn(widths: tuple[int, ...] = (32, 64, 128)) -> nn.Module:
    """Three convolutions, each with a pool behind it."""
    layers: list[nn.Module] = []
    for before, width in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def works(*, small: bool) -> dict[str, StackedWork]:
    """Those of the checks; small ones for a CPU, which show the form and not the figures."""
    if small:
        narrow = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))  # noqa: E731
        return {
            "mlp": _work("MLP, small", narrow, _classes(512, 16), 16, False, 10, (1, 4)),
            "transformer": _work(
                "transformer, small", lambda: Gpt(16, 8, 1, 2, 8), _texts(256, 8, 16), 4, False, 5, (1, 4)
            ),
            "cnn": _work("CNN, small", lambda: cnn((4, 8)), _classes(256, 3, 8, 8), 8, False, 5, (1, 4)),
        }
    transformer = lambda: Gpt(256, 128, 2, 4, 64)  # noqa: E731
    return {
        "mlp": _work("MLP 784-512-512-10, b128", mlp, _classes(400_000, 784), 128, False, 128, (1, 10, 300, 1000)),
        "transformer": _work(
            "transformer d128 L2 T64 b32, bf16", transformer, _texts(20_000, 64, 256), 32, True, 64, (1, 10, 300)
        ),
        "cnn": _work(
            "CNN 32-64-128 on 32x32, b128, bf16", cnn, _classes(50_000, 3, 32, 32), 128, True, 64, (1, 10, 300)
        ),
    }


def _work(
    name: str,
    model: Callable[[], nn.Module],
    data: tuple[Tensor, Tensor],
    batch_size: int,
    bf16: bool,
    steps: int,
    sizes: tuple[int, ...],
) -> StackedWork:
    return StackedWork(name=name, model=model, data=data, batch_size=batch_size, bf16=bf16, steps=steps, sizes=sizes)


def _classes(rows: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, *shape, generator=generator), torch.randint(0, 10, (rows,), generator=generator)


def _texts(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
