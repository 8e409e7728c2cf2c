"""Serving from a GPU: requests per second and latencies, against bare PyTorch that computes full batches in a loop.

`python -m benchmarks.serve_gpu [--quick] [--cpu]`. ResNet-50 on pictures of bytes and GPT-2 on 1,024 tokens, both in
bf16, a row a request, over HTTP with binary tensors. Bare PyTorch has its batches ready in pinned memory: all that it
does is copy, compute, and copy back. Everybody takes turns in rounds. `--cpu` takes tiny networks: the form only.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.storage import export

from .gpu_works import Gpt
from .load import Ask, Outcome, measuring
from .report import Check, Report, interleaved
from .serve import serving

NUM_LOADERS = 4
"""Processes that ask: one alone could not."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network, what one request of it holds, and rows of a batch."""

    title: str
    model: Callable[[], nn.Module]
    row: Tensor
    max_rows: int


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *_convolution(before, width, 1, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, after, 1, 1),
        )  # fmt: skip
        same = stride == 1 and before == after
        self.short = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Pictures(nn.Module):
    """ResNet-50, or a small one, which takes pictures as cameras give them."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        before = width
        for number, depth in enumerate(depths):
            for place in range(depth):
                layers.append(Bottleneck(before, width << number, 2 if number and not place else 1))
                before = 4 * (width << number)
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures / 127.5 - 1)  # type: ignore[no-any-return]


class NextToken(Gpt):
    """A GPT that tells how likely each token comes next."""

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return F.linear(self.norm(x[:, -1]), self.tokens.weight)


def works(*, small: bool) -> list[Work]:
    """Those of the check; tiny ones for a CPU."""
    draw = torch.Generator().manual_seed(0)

    def whole(most: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, most, shape, generator=draw, dtype=dtype)

    if small:
        return [
            Work(title="a tiny ResNet", model=lambda: Pictures((1, 1), 4), max_rows=4,
                 row=whole(256, 3, 32, 32, dtype=torch.uint8)),
            Work(title="a tiny GPT", model=lambda: NextToken(64, 16, 1, 2, 8), max_rows=4,
                 row=whole(64, 8, dtype=torch.int64)),
        ]  # fmt: skip
    return [
        Work(title="ResNet-50, 224x224, batches of 64, bf16", model=Pictures, max_rows=64,
             row=whole(256, 3, 224, 224, dtype=torch.uint8)),
        Work(title="GPT-2 124M, 1,024 tokens, batches of 32, bf16", model=lambda: NextToken(50304, 768, 12, 12, 1024),
             max_rows=32, row=whole(50257, 1024, dtype=torch.int64)),
    ]  # fmt: skip


def main() -> None:
    """Measures all works."""
    asked = _arguments()
    device = torch.device("cpu" if asked.cpu else "cuda")
    if not asked.cpu:
        torch.cuda.init()
    report = Report("serve_gpu", asked.quick or asked.cpu)
    seconds, rounds = (0.5, 1) if asked.cpu else (2.0, 3) if asked.quick else (5.0, 5)
    shares = []
    for work in works(small=asked.cpu):
        shares.append(add(report, work, device, seconds, rounds))
        report.checks["gpu_over_bare"] = Check(value=min(shares), at_least=0.9)
        report.save()
    report.finish()


def add(report: Report, work: Work, device: torch.device, seconds: float, rounds: int) -> float:
    """Measures a work; returns our throughput over the bare one's."""
    torch.manual_seed(0)
    model = work.model().eval()
    with tempfile.TemporaryDirectory() as name:
        models = Path(name) / "models"
        export(model, lambda model, x: model(x), {"x": work.row.unsqueeze(0)}, models / "net")
        with serving(models, str(device), precision="bf16", max_rows=work.max_rows, timeout=60.0) as server:
            ask = as_bytes(server.http, work)
            bare = Bare(model, work, device)
            contenders: dict[str, Callable[[], float]] = {
                "bare PyTorch": lambda: bare.seconds_per_row(seconds),
                "manyhands": lambda: 1 / load(ask, work.max_rows, seconds).rate,
            }
            load(ask, work.max_rows, min(1.0, seconds))
            bare.seconds_per_row(min(1.0, seconds))
            times = interleaved(contenders, rounds)
            rate = 1 / median(times["manyhands"])
            loaded = load(ask, work.max_rows, seconds)
            half = load(ask, work.max_rows, seconds, rate / 2)
    report.add(work.title, times, "bare PyTorch")
    share = median(times["bare PyTorch"]) * rate
    report.notes.update(
        {
            f"{work.title}: bare rows/s": round(1 / median(times["bare PyTorch"]), 1),
            f"{work.title}: requests/s": round(rate, 1),
            f"{work.title}: over bare": round(share, 4),
            f"{work.title}: a bare batch, ms": round(1000 * work.max_rows * median(times["bare PyTorch"]), 2),
            f"{work.title}: p50 ms, all connections busy": round(1000 * loaded.percentile(0.5), 2),
            f"{work.title}: p99 ms, all connections busy": round(1000 * loaded.percentile(0.99), 2),
            f"{work.title}: p50 ms at half load": round(1000 * half.percentile(0.5), 2),
            f"{work.title}: p99 ms at half load": round(1000 * half.percentile(0.99), 2),
        }
    )
    print({name: value for name, value in report.notes.items() if name.startswith(work.title)}, flush=True)
    return share


class Bare:
    """Full batches in a loop, in torch's own mixed precision, with kernels that it has tried."""

    def __init__(self, model: nn.Module, work: Work, device: torch.device) -> None:
        self._model, self._device = model.to(device), device
        torch.backends.cudnn.benchmark = True
        batch = work.row.expand(work.max_rows, *work.row.shape).contiguous()
        self._batch = batch.pin_memory() if device.type == "cuda" else batch

    def seconds_per_row(self, seconds: float) -> float:
        """Computes for so long."""
        num, began = 0, time.perf_counter()
        with torch.inference_mode():
            while time.perf_counter() < began + seconds:
                with torch.autocast(self._device.type, torch.bfloat16):
                    answers = self._model(self._batch.to(self._device, non_blocking=True))
                answers.float().cpu()
                num += len(self._batch)
        return (time.perf_counter() - began) / num


def load(ask: Ask, max_rows: int, seconds: float, rate: float | None = None) -> Outcome:
    """Several generators at once, with connections for some batches; every answer must be a good one."""
    each = 4 * max_rows // NUM_LOADERS
    running = [
        measuring(ask, seconds=seconds, connections=each, rate=rate and rate / NUM_LOADERS) for _ in range(NUM_LOADERS)
    ]
    found = [one.outcome() for one in running]
    codes = {code: sum(one.codes.get(code, 0) for one in found) for one in found for code in one.codes}
    if set(codes) != {200}:
        raise RuntimeError(f"answers of {ask.path}: {codes}")
    latencies = sorted(latency for one in found for latency in one.latencies)
    return Outcome(max(one.seconds for one in found), codes, latencies, [])


def as_bytes(port: int, work: Work) -> Ask:
    """The Open Inference Protocol with binary tensors."""
    blob = work.row.numpy().tobytes()
    kind = {torch.uint8: "UINT8", torch.int64: "INT64"}[work.row.dtype]
    one = {"name": "x", "shape": [1, *work.row.shape], "datatype": kind, "parameters": {"binary_data_size": len(blob)}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    return Ask(port=port, path="/v2/models/net/infer", body=text + blob, headers=headers)


def _convolution(before: int, after: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--cpu", action="store_true", help="tiny networks on the CPU: the form, not the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
