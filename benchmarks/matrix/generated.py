"""Random networks: hypothesis composes layers, hooks, losses and optimizers, and draws a strategy for each."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations

import manyhands as mh

from .cell import LEFT_OUT, REFUSED, SAME, Cell
from .network import Entry, Network, randint, randn
from .runner import CACHE, Asked, Worker
from .strategies import SPECS

WIDTH, LENGTH, CLASSES = 8, 4, 3
FAILURES = CACHE.with_name("generated.jsonl")


class Residual(nn.Module):
    """Adds what a layer gives to its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Attention(nn.Module):
    """Self-attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer that gives all its outputs."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x)[0]
        return out


class Channels(nn.Module):
    """Applies a layer of channels, which are the last dimension here."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return out


class RunningMean(nn.Module):
    """Subtracts a moving average over the batch, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(dim=(0, 1)), 0.1)
        return x - self.mean


class LargestSeen(nn.Module):
    """Divides by the largest number seen so far, which no mean over samples gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x / self.largest


class Calls(nn.Module):
    """Counts its calls and uses the number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 - 0.5 ** (self.calls + 1.0))


class Experts(nn.Module):
    """One of three layers by row, chosen by a gate; those that are not chosen are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        odds, chosen = self.gate(x.mean(dim=1)).softmax(-1).max(-1)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, odds[rows, None, None] * expert(x[rows]))
        return out


class InPlace(nn.Module):
    """Changes a view of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        out[:, 0].mul_(2)
        return out.relu_()


class Spectrum(nn.Module):
    """Multiplies by learned complex numbers in the frequency domain; they are kept as pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=WIDTH)


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Rounded(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Quantised(nn.Module):
    """A layer whose output is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = Rounded.apply(self.layer(x))
        return rounded


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "residual": lambda: Residual(nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "group_norm": lambda: Channels(nn.GroupNorm(2, WIDTH)),
    "instance_norm": lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "convolution": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "attention": Attention,
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: nn.Dropout(0.2),
    "running_mean": RunningMean,
    "largest_seen": LargestSeen,
    "calls": Calls,
    "experts": Experts,
    "in_place": InPlace,
    "spectrum": Spectrum,
    "twice": Twice,
    "quantised": Quantised,
}


def _mask(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()).reshape(gradient.shape) % 3 > 0)


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "": lambda model: None,
    "mask": lambda model: [p.register_hook(_mask) for p in model.parameters() if p.dim() > 1] and None,
    "clamp": lambda model: [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()] and None,
    "forward": lambda model: [m.register_forward_hook(lambda m, i, o: 1.5 * o) for m in model.body] and None,
    "frozen": lambda model: next(iter(model.body)).requires_grad_(False) and None,
}


def _each(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _counted(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
    counts = batch[1] != 0
    return mh.mean((_each(model, batch) * counts).sum(), counts.sum())


def _hardest(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    each = _each(model, batch)
    return each.topk(max(1, len(each) // 2)).values.mean()


def _penalised(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return _each(model, batch).mean() + 0.01 * sum(p.square().sum() for p in model.parameters())


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda model, batch: _each(model, batch).mean(),
    "counted": _counted,
    "masked_mean": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], ignore_index=0),
    "hardest": _hardest,
    "penalised": _penalised,
    "smoothed": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(_trained(model), lr=0.05, momentum=0.9),
    "decay": lambda model: torch.optim.SGD(_trained(model), lr=0.05, weight_decay=0.1),
    "adamw": lambda model: torch.optim.AdamW(_trained(model), lr=0.01, eps=1e-5),
    "rmsprop": lambda model: torch.optim.RMSprop(_trained(model), lr=0.01, eps=1e-5),
}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Net(nn.Module):
    """An embedding or a projection, a row of layers, and a head on the mean over positions."""

    def __init__(self, layers: tuple[str, ...], reads_tokens: bool) -> None:
        super().__init__()
        self.reads_tokens = reads_tokens
        self.first = nn.Embedding(11, WIDTH) if reads_tokens else nn.Linear(5, WIDTH)
        self.body = nn.Sequential(*(LAYERS[name]() for name in layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.first(x)).mean(dim=1))
        return out


@dataclass(frozen=True)
class Generated:
    """A random network; its text is the Python expression that makes it again."""

    layers: tuple[str, ...]
    hook: str = ""
    loss: str = "mean"
    optimizer: str = "sgd"
    reads_tokens: bool = False

    def network(self) -> Network:
        """Return the network."""

        def model() -> nn.Module:
            made = Net(self.layers, self.reads_tokens)
            HOOKS[self.hook](made)
            return made

        def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
            inputs = randint(g, 11, rows, LENGTH) if self.reads_tokens else randn(g, rows, LENGTH, 5)
            return inputs, randint(g, CLASSES, rows)

        draws = "dropout" in self.layers
        return Network(
            model=model, data=data, loss=LOSSES[self.loss], optimizer=OPTIMIZERS[self.optimizer], rows=11, draws=draws
        )

    def simpler(self) -> Iterator[Generated]:
        """Yield networks with one part less."""
        for number in range(len(self.layers)):
            if len(self.layers) > 1:
                yield dataclasses.replace(self, layers=self.layers[:number] + self.layers[number + 1 :])
        plain = Generated(self.layers)
        for name in ("hook", "loss", "optimizer", "reads_tokens"):
            if getattr(self, name) != getattr(plain, name):
                yield dataclasses.replace(self, **{name: getattr(plain, name)})


def entry_of(text: str) -> Entry:
    """Return the network that an expression makes.

    >>> entry_of("Generated(layers=('linear',))").kind
    'generated'
    """
    made = eval(text, {"Generated": Generated})  # noqa: S307 (an expression that this program printed)
    assert isinstance(made, Generated)
    return Entry(text, "generated", made.network, text)


generated_networks = st.builds(
    Generated,
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4).map(tuple),
    hook=st.sampled_from(["", *HOOKS]),
    loss=st.sampled_from(["mean", *LOSSES]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    reads_tokens=st.booleans(),
)


def search(seconds: float, first: int, limit: float) -> list[tuple[Generated, Cell]]:
    """Try random networks under random strategies for so long; print, save and return the failures, made small."""
    worker, end, tried, failures = Worker(limit), time.monotonic() + seconds, [0], []
    known: set[tuple[str, str, str]] = set()

    @seed(first)
    @settings(
        max_examples=100_000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(network=generated_networks, strategy=st.sampled_from(sorted(SPECS)))
    def attempt(network: Generated, strategy: str) -> None:
        if time.monotonic() > end:
            raise TimeoutError
        cell = _run(worker, network, strategy, first)
        tried[0] += cell.outcome != LEFT_OUT
        if not _fails(cell):
            return
        small, shown = _shrunk(worker, network, cell, end)
        key = strategy, shown.outcome, repr(small)
        if key not in known:
            known.add(key)
            failures.append((small, shown))
            _tell(small, shown)

    try:
        attempt()
    except TimeoutError:
        pass
    finally:
        worker.close()
    print(json.dumps({"generated": tried[0], "failures": len(failures), "seed": first}), flush=True)
    return failures


def _run(worker: Worker, network: Generated, strategy: str, first: int) -> Cell:
    return worker.run(Asked(entry_of(repr(network)), strategy, first, False))


def _fails(cell: Cell) -> bool:
    return cell.outcome not in (SAME, REFUSED, LEFT_OUT)


def _shrunk(worker: Worker, network: Generated, cell: Cell, end: float) -> tuple[Generated, Cell]:
    """Return the smallest network that fails in the same way, found by leaving out one part after another."""
    for smaller in network.simpler():
        if time.monotonic() > end:
            break
        found = _run(worker, smaller, cell.strategy, cell.seed)
        if found.outcome == cell.outcome:
            return _shrunk(worker, smaller, found, end)
    return network, cell


def _tell(network: Generated, cell: Cell) -> None:
    print(f"{cell.outcome} under {cell.strategy}: {network!r}\n    {cell.text[-300:]!r}", flush=True)
    FAILURES.parent.mkdir(parents=True, exist_ok=True)
    with FAILURES.open("a") as file:
        file.write(json.dumps(cell.to_dict()) + "\n")
