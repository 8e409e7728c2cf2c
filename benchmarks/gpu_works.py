"""Works for a GPU, with synthetic data on the device: an MLP, ResNet-18 on small pictures, a small GPT, GPT-2, Hugging
Face's BERT and Llama, a U-Net, and a mixture of experts whose routing depends on the data.
"""

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


class HuggingFace(nn.Module):
    """A network of transformers, from tokens to logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens).logits
        return logits


def hf_bert() -> nn.Module:
    """BERT with 6 layers and random weights, as transformers builds it."""
    from transformers import BertConfig, BertForMaskedLM

    return HuggingFace(BertForMaskedLM(BertConfig(num_hidden_layers=6)))


def hf_llama() -> nn.Module:
    """Llama with 12 layers of width 768 and random weights, as transformers builds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    return HuggingFace(LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes, use_cache=False)))


class UNet(nn.Module):
    """A U-Net of three resolutions that classifies pixels."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.enter = _convolutions(3, width)
        self.down = nn.ModuleList([_convolutions(width, 2 * width), _convolutions(2 * width, 4 * width)])
        self.up = nn.ModuleList([_convolutions(6 * width, 2 * width), _convolutions(3 * width, width)])
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.enter(x)]
        for layer in self.down:
            kept.append(layer(F.avg_pool2d(kept[-1], 2)))
        x = kept.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.leave(x).permute(0, 2, 3, 1)


def _convolutions(before: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
    return nn.Sequential(*layers)


class Experts(nn.Module):
    """A layer of experts; each computes the tokens that a mask selects, so that shapes depend on the data."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            y[mask] = (expert(x[mask]) * shares[mask].unsqueeze(-1)).to(y.dtype)
        return x + y


class MaskedExperts(nn.Module):
    """Tokens through layers of experts."""

    def __init__(self, vocabulary: int = 1000, width: int = 256, layers: int = 3, count: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*[Experts(width, count) for _ in range(layers)])
        self.leave = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.leave(self.layers(self.tokens(tokens)))
        return logits


def _pixels(rows: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    @cache
    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(rows, 3, size, size, generator=generator)
        return inputs, torch.randint(0, 10, (rows, size, size), generator=generator)

    return make


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
    "hf_bert": GpuWork(
        name="HF BERT L6 T128 b32, bf16",
        model=hf_bert,
        data=_texts(16_000, 128, 30_522),
        batch_size=32,
        bf16=True,
        steps=40,
    ),
    "hf_llama": GpuWork(
        name="HF Llama L12 d768 T512 b16, bf16",
        model=hf_llama,
        data=_texts(8_000, 512, 32_000),
        batch_size=16,
        bf16=True,
        steps=20,
    ),
    "unet": GpuWork(
        name="U-Net 64x64 b32, bf16", model=UNet, data=_pixels(6_400, 64), batch_size=32, bf16=True, steps=40
    ),
    "moe_masks": GpuWork(
        name="mixture of experts, mask routing, b32, bf16",
        model=MaskedExperts,
        data=_texts(16_000, 128, 1000),
        batch_size=32,
        bf16=True,
        steps=40,
    ),
}


def autocast(work: GpuWork) -> Any:
    """Where the network is computed."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=work.bf16)
