"""Works for a GPU: an MLP, ResNet-18 on small pictures, a small GPT and GPT-2, with synthetic data on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GpuWork:
    """A network, its data and how it is trained."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    batch_size: int
    bf16: bool
    steps: int
    """Steps that are measured in a block."""
    settle: int = 200
    """Steps in which `fit` has tried all ways of executing a step."""
    flops: float = 0.0
    """Floating-point operations of a step, where a share of the device's peak is wanted."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW as most people write it."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy over classes or tokens."""
    outputs = model(batch[0])
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


class Residual(nn.Module):
    """A basic block of ResNet."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        same = stride == 1 and before == width
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


def resnet18(*, small_stem: bool = False) -> nn.Module:
    """ResNet-18 as it is; or with a stem that keeps all 32x32 pixels, which is 16 times the work."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False)] if small_stem else [nn.Conv2d(3, 64, 7, 2, 3, bias=False)]
    layers: list[nn.Module] = [*stem, nn.BatchNorm2d(64), nn.ReLU()]
    layers += [] if small_stem else [nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(before, width, stride), Residual(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return F.linear(self.norm(x), self.tokens.weight)


def mlp() -> nn.Module:
    """784-512-512-10."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def _classes(rows: int, *shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    @cache
    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(rows, *shape, generator=generator)
        return inputs, torch.randint(0, 10, (rows,), generator=generator)

    return make


def _texts(rows: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    @cache
    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return make


def gpt_flops(batch: int, length: int, width: int, layers: int, vocabulary: int) -> float:
    """Operations of a training step: 6 for each parameter that multiplies and token, and attention's own products."""
    parameters = 12 * layers * width**2 + vocabulary * width
    return 6.0 * parameters * batch * length + 12.0 * layers * width * length**2 * batch


WORKS: dict[str, GpuWork] = {
    "mlp": GpuWork(name="MLP, b128", model=mlp, data=_classes(400_000, 784), batch_size=128, bf16=False, steps=400),
    "resnet18": GpuWork(
        name="ResNet-18, 32x32, b128, bf16",
        model=resnet18,
        data=_classes(50_000, 3, 32, 32),
        batch_size=128,
        bf16=True,
        steps=60,
    ),
    "gpt_small": GpuWork(
        name="GPT d256 L4 T128 b32, bf16",
        model=lambda: Gpt(256, 256, 4, 4, 128),
        data=_texts(20_000, 128, 256),
        batch_size=32,
        bf16=True,
        steps=80,
    ),
    "gpt2": GpuWork(
        name="GPT-2 124M T1024 b32, bf16",
        model=lambda: Gpt(50304, 768, 12, 12, 1024),
        data=_texts(8_000, 1024, 50257),
        batch_size=32,
        bf16=True,
        steps=12,
        settle=130,
        flops=gpt_flops(32, 1024, 768, 12, 50304),
    ),
    "resnet18_small_stem": GpuWork(
        name="ResNet-18 with a small stem, 32x32, b128, bf16",
        model=partial(resnet18, small_stem=True),
        data=_classes(50_000, 3, 32, 32),
        batch_size=128,
        bf16=True,
        steps=40,
    ),
}


def autocast(work: GpuWork) -> Any:
    """Where the network is computed."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=work.bf16)
