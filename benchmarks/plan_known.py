"""Published throughput: tokens, images or sequences per second predicted from the network and the catalogue alone.

`python -m benchmarks.plan_known`; `benchmarks.plan_accuracy` has the same checks. Its result depends on no machine.

`benchmarks/data/known_throughput.csv` has the points; nothing in the planner is fitted to them. Each row says what ran:
the network, the cluster, the strategy, the rows of a micro-batch, the precision of weights (`bf16` as large models are
trained, `amp` for autocast, `nhwc` for autocast in `channels_last` layout), the share of forward's products that are
computed again beside what the strategy says (torchtitan's selective checkpointing keeps every second one), and whether
operations ran one by one (`eager`), were compiled, or came from a system with fused kernels.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategySpec
from manyhands.costs import Network, NetworkPart, PassCost, chip, link, trace
from manyhands.planning import Cluster, Workload, estimate

from .report import Check, Report

DATA = Path(__file__).parent / "data" / "known_throughput.csv"
SOURCES = {
    "llm-foundry": "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md",
    "torchtitan": "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan TP": "github.com/pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
    "torchtitan A100": "github.com/pytorch/torchtitan docs/performance.md of 2024, which does not state the network",
    "sequence parallelism": "Korthikanti et al., Reducing Activation Recomputation in Large Transformers, table 5",
    "DeepLearningExamples BERT": "github.com/NVIDIA/DeepLearningExamples LanguageModeling/BERT/README.md (19.07)",
    "DeepLearningExamples ResNet": "github.com/NVIDIA/DeepLearningExamples resnet50v1.5/README.md (21.03), configs.yml",
    "DeepLearningExamples ResNeXt": "github.com/NVIDIA/DeepLearningExamples resnext101-32x4d/README.md (20.06)",
    "TensorFlow 2017": "TensorFlow's benchmarks page of 2017, as in published_scaling.csv",
    "llm.c": "github.com/karpathy/llm.c discussion 481: 19,560 steps of 524,288 tokens in 90 minutes on eight A100; "
    "github.com/KellerJordan/modded-nanogpt: 45 minutes on eight H100",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer."""

    width: int
    layers: int
    heads: int
    words: int
    inner: int = 0
    """Width inside of its perceptrons; four times the width if 0."""
    groups: int = 0
    """Heads of keys and values; as many as heads if 0."""
    is_causal: bool = True
    is_gated: bool = False
    """Llama's kind: gated perceptrons, root-mean-square norms and rotated positions."""
    is_written_out: bool = False
    """Whether attention is written out in products."""
    dropout: float = 0.0


def _mpt(width: int, layers: int, heads: int) -> Shape:
    return Shape(width=width, layers=layers, heads=heads, words=50368)


SHAPES = {
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    "llama-8b": Shape(width=4096, layers=32, heads=32, groups=8, inner=14336, words=128256, is_gated=True),
    "llama2-13b": Shape(width=5120, layers=40, heads=40, inner=13824, words=32000, is_gated=True),
    "llama2-70b": Shape(width=8192, layers=80, heads=64, groups=8, inner=28672, words=32000, is_gated=True),
    "llama-70b": Shape(width=8192, layers=80, heads=64, groups=8, inner=28672, words=128256, is_gated=True),
    "gpt-22b": Shape(width=6144, layers=48, heads=64, words=51200, is_written_out=True, dropout=0.1),
    "gpt-175b": Shape(width=12288, layers=96, heads=96, words=51200, is_written_out=True, dropout=0.1),
    "gpt-530b": Shape(width=20480, layers=105, heads=128, words=51200, is_written_out=True, dropout=0.1),
    "gpt-1t": Shape(width=25600, layers=128, heads=160, words=51200, is_written_out=True, dropout=0.1),
    "bert-large": Shape(
        width=1024, layers=24, heads=16, words=30528, is_causal=False, is_written_out=True, dropout=0.1
    ),
    "gpt2-124m": Shape(width=768, layers=12, heads=12, words=50304),
}


class Attention(nn.Module):
    """Attention, as one call or written out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.each = shape, shape.width // shape.heads
        self.groups = shape.groups or shape.heads
        bias = not shape.is_gated
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * self.groups) * self.each, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads, groups = self.shape.heads, self.groups
        parts = self.qkv(x).view(rows, length, heads + 2 * groups, self.each).transpose(1, 2)
        q, k, v = parts.split((heads, groups, groups), dim=1)
        if self.shape.is_gated:
            q, k = rotated(q), rotated(k)
        if self.shape.is_written_out:
            mixed = self.weights(q @ k.transpose(-1, -2) / self.each**0.5) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.is_causal, enable_gqa=groups < heads)
        return F.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)), self.shape.dropout)

    def weights(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool)
        scores = scores.masked_fill(mask.triu(1) if self.shape.is_causal else mask, -1e4)
        return F.dropout(F.softmax(scores, -1, dtype=scores.dtype), self.shape.dropout)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, in fp32."""
    angles = torch.ones(x.shape[-2], x.shape[-1] // 2)
    even, odd = x.float().chunk(2, -1)
    return torch.cat((even * angles - odd * angles, even * angles + odd * angles), -1).to(x.dtype)


class Gated(nn.Module):
    """Llama's perceptron."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer's block, its norms first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner or 4 * shape.width
        norm: Callable[[int], nn.Module] = nn.RMSNorm if shape.is_gated else nn.LayerNorm
        self.norm1, self.norm2, self.attention = norm(width), norm(width), Attention(shape)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        if shape.is_gated:
            self.mlp = Gated(width, inner)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout)


class Transformer(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(shape.words, shape.width), nn.Embedding(length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        if not shape.is_gated:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class FusedLoss(torch.autograd.Function):
    """The bytes of a fused cross-entropy: logits are read forward, and read and overwritten backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(-1).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return logits * gradient  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """The block of a ResNet, or with groups of a ResNeXt."""

    def __init__(self, before: int, inner: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv(before, inner, 1, 1),
            nn.ReLU(),
            *conv(inner, inner, 3, stride, groups),
            nn.ReLU(),
            *conv(inner, after, 1, 1),
        )
        self.around = nn.Sequential(*(conv(before, after, 1, stride) if before != after else ()))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def conv(before: int, after: int, size: int, stride: int, groups: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution and its norm."""
    return nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(after)


def residual(counts: tuple[int, ...], width: int = 1, groups: int = 1) -> nn.Module:
    """A ResNet v1.5, with strides in its 3x3 convolutions, or a ResNeXt."""
    blocks: list[nn.Module] = []
    before = 64
    for inner, count, stride in zip((64, 128, 256, 512), counts, (1, 2, 2, 2), strict=True):
        for index in range(count):
            blocks.append(Bottleneck(before, width * inner, 4 * inner, stride if index == 0 else 1, groups))
            before = 4 * inner
    stem = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def vgg16() -> nn.Module:
    """VGG-16."""
    layers: list[nn.Module] = []
    before = 3
    for count, after in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(before, after, 3, 1, 1), nn.ReLU()]
            before = after
        layers.append(nn.MaxPool2d(2))
    for first, after in ((25088, 4096), (4096, 4096)):
        layers += [nn.Flatten(), nn.Linear(first, after), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "resnet-50": partial(residual, (3, 4, 6, 3)),
    "resnet-152": partial(residual, (3, 8, 36, 3)),
    "resnext-101": partial(residual, (3, 4, 23, 3), 2, 32),
    "vgg-16": vgg16,
}


def classes(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of the token after each, one operation after the other."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def fused_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy in one kernel."""
    return FusedLoss.apply(model(ids[:, :-1]))  # type: ignore[no-untyped-call, no-any-return]


@cache
def network_of(model: str, length: int, weights: str, fused_cross_entropy: bool) -> Network:
    """The costs of a model for one sequence, or for eight pictures."""
    if model in CONVOLUTIONS:
        batch: Any = (torch.zeros(1, 3, length, length), torch.zeros(1, dtype=torch.long))
        return traced(CONVOLUTIONS[model], classes, batch, 8, weights)
    loss = fused_loss if fused_cross_entropy else next_token
    ids = torch.zeros(1, length + 1, dtype=torch.long)
    return traced(partial(Transformer, SHAPES[model], length), loss, ids, 1, weights)


def traced(make: Callable[[], nn.Module], loss: Callable[..., Tensor], batch: Any, rows: int, weights: str) -> Network:
    """The costs of a network whose weights are fp32, fp32 under autocast, or bf16 beside the optimizer's fp32 ones.

    "nhwc" is autocast with weights in `channels_last` layout.
    """

    def model() -> nn.Module:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16 if weights == "bf16" else before)
            made = make()
            return made.to(memory_format=torch.channels_last) if weights == "nhwc" else made  # type: ignore[call-overload, no-any-return]
        finally:
            torch.set_default_dtype(before)

    task = mh.Task(model=model, loss=loss, optimizer=lambda m: torch.optim.AdamW(m.parameters()), data=[0])
    network = trace(task, batch, rows=rows, precision="bf16" if weights in ("amp", "nhwc") else "fp32")
    return replace(network, state_bytes=12 * network.params) if weights == "bf16" else network


def repeated(network: Network, share: float) -> Network:
    """The network whose blocks compute a part of forward's products again in backward."""

    def again(piece: NetworkPart) -> NetworkPart:
        forward = piece.forward
        more = PassCost(
            flops=share * (forward.flops - forward.attention),
            fill=share * forward.fill,
            moved=share * forward.product_moved,
            product_moved=share * forward.product_moved,
            products=round(share * forward.products),
            operations=round(share * forward.products),
            fused=0.0,
        )
        return replace(piece, backward=piece.backward + more)

    return replace(network, pieces=tuple(again(p) if p.is_repeated else p for p in network.pieces))


@dataclass(frozen=True)
class Known:
    """A published throughput."""

    row: dict[str, str]

    @property
    def name(self) -> str:
        """What ran on what."""
        row = self.row
        return f"{row['name']} {row['weights']} on {int(row['hosts']) * int(row['per_host'])} {row['device']}"

    @property
    def seconds(self) -> float:
        """Seconds of a step, as published."""
        row, value = self.row, float(self.row["value"])
        samples = float(row["batch"])
        devices = int(row["hosts"]) * int(row["per_host"])
        return {
            "s/step": value,
            "steps/h": 3600 / value,
            "img/s": samples / value,
            "seq/s": samples / value,
            "tok/s/device": samples * float(row["length"]) / (value * devices),
        }[row["unit"]]

    def cluster(self) -> Cluster:
        """The hardware."""
        row = self.row
        hosts, per_host = int(row["hosts"]), int(row["per_host"])
        made = chip(row["device"])
        for change in row["changes"].split():
            name, value = change.split("=")
            new = {"flops": {**made.flops, name: float(value)}} if name in made.flops else {name: float(value)}
            made = replace(made, **new)
        network = link("InfiniBand", float(row["gbits_per_device"]) * 1e9 / 8 * per_host) if hosts > 1 else None
        return Cluster(hosts=hosts, per_host=per_host, chip=made, inside=link(made.inside), network=network)

    def predicted(self) -> float:
        """Seconds of a step, from the catalogue."""
        row = self.row
        batch, rows = int(row["batch"]), int(row["rows"])
        given = StrategySpec.parse(row["spec"])
        precision = "fp32" if row["weights"] == "fp32" else "bf16"
        parts = given.num_parts * (given.microbatches if given.stages > 1 else 1)
        spec = replace(given, precision=precision, accumulate=max(1, round(batch / parts / rows)))
        fused_cross_entropy = row["source"] in ("llm-foundry", "llm.c")
        network = network_of(row["model"], int(row["length"]), row["weights"], fused_cross_entropy)
        network = repeated(network, float(row["again"] or 0))
        work = Workload(
            networks={precision: network},
            batch_size=batch,
            captured=False,
            fused=row["runs"] != "eager",
            wire=0.5 if row["weights"] == "amp" and "DeepLearning" in row["source"] else 1.0,
        )
        return estimate(work, self.cluster(), spec).seconds


def points(path: Path = DATA) -> list[Known]:
    """All of them."""
    with path.open() as file:
        return [Known(row) for row in csv.DictReader(file)]


def errors(found: Iterable[Known]) -> list[tuple[Known, float]]:
    """Predicted over published throughput, less one, of each."""
    return [(known, known.seconds / known.predicted() - 1) for known in found]


def score(report: Report) -> None:
    """Rows, the checks, and notes."""
    found = errors(points())
    table = Table(
        "what", "strategy", "published", "predicted", "error", title="published throughput, samples per second"
    )
    for known, error in found:
        speed = float(known.row["batch"]) / known.seconds
        table.add_row(known.name, known.row["spec"], f"{speed:.4g}", f"{speed * (1 + error):.4g}", f"{error:+.1%}")
        case = f"{known.name}, {known.row['spec']}, {known.row['length']}, {known.row['runs']}"
        report.add(case, {"measured": [known.seconds], "predicted": [known.seconds / (1 + error)]}, "measured")
    Console(width=150).print(table)
    sizes = sorted(abs(error) for _, error in found)
    report.checks["known_throughput_error"] = Check(value=median(sizes), at_most=0.15)
    report.checks["known_throughput_p90"] = Check(value=sizes[round(0.9 * (len(sizes) - 1))], at_most=0.35)
    report.notes["known_throughput_points"] = len(sizes)
    report.notes["known_throughput_worst_error"] = round(sizes[-1], 4)
    report.notes["known_throughput_too_fast"] = sum(error > 0 for _, error in found)
    for source in SOURCES:
        own = [error for known, error in found if known.row["source"] == source]
        report.notes[f"known_throughput_median_error, {source}"] = round(median(own), 4)


def main() -> None:
    """Scores all points."""
    report = Report("plan_known", quick=False)
    score(report)
    report.finish()


if __name__ == "__main__":
    main()
