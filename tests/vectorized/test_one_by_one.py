"""Networks that cannot be stacked are trained one after another, with the result of each task alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.vectorized import Population

from .test_equality import EPOCHS, alone
from .works import adamw, task, texts, vectors


class Sign(torch.autograd.Function):
    """The sign, with a gradient that passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0]


class Network(nn.Module):
    """A classifier whose middle is something that vmap has no rule for."""

    def __init__(self, middle: Any = None) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 8), nn.Linear(8, 3)
        self.middle = middle if isinstance(middle, nn.Module) else None
        self._function = None if isinstance(middle, nn.Module) else middle

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.out((self.middle or self._function)(hidden))
        return out


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x - 1


def reading(x: Tensor) -> Tensor:
    return x * x.abs().max().item()


def masked(x: Tensor) -> Tensor:
    return x + x[x > 0.5].sum()


def listed(x: Tensor) -> Tensor:
    return x + len(torch.unique(x.detach().round()))


def rewritten(x: Tensor) -> Tensor:
    room = torch.zeros(len(x), 8, dtype=x.dtype)
    room[:, :4] = x[:, 4:]
    return room


def again(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(torch.sin, x, use_reentrant=False)
    return out


class Checkpointed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda y: F.dropout(self.linear(y), 0.3, self.training), x, use_reentrant=False)
        return out


class Recurrent(nn.Module):
    """Words of different lengths, through a recurrent layer of torch."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.cells = kind(4, 5, batch_first=True, **settings)
        self.out = nn.Linear(self._width(settings), 3)

    @staticmethod
    def _width(settings: dict[str, Any]) -> int:
        return int(settings.get("proj_size") or 5) * (2 if settings.get("bidirectional") else 1)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(self.tokens(tokens))[0].mean(1))
        return out


class Packed(Recurrent):
    def forward(self, tokens: Tensor) -> Tensor:
        lengths = 1 + tokens[:, 0] % 7
        given = nn.utils.rnn.pack_padded_sequence(self.tokens(tokens), lengths, True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.cells(given)[0], batch_first=True)
        out: Tensor = self.out(states.sum(1))
        return out


def hooked() -> nn.Module:
    net = Network(torch.sin)
    net.first.weight.register_hook(lambda slope: slope * 0.5)
    return net


class Rotation(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.view(-1, 4, 2)) * self.turn).flatten(1)


MODELS: dict[str, tuple[Any, Any, str]] = {
    "a network of torch.jit": (
        lambda: torch.jit.trace(Network(torch.sin), torch.zeros(2, 5)),
        vectors,
        "the network, which is TorchScript",
    ),
    "a branch": (lambda: Network(branching), vectors, r"one after another.*return x \* 2 if x.sum\(\) > 0"),
    "a value in Python": (lambda: Network(reading), vectors, r"x.abs\(\).max\(\).item\(\)"),
    "a mask": (lambda: Network(masked), vectors, "x > 0.5"),
    "unique values": (lambda: Network(listed), vectors, "torch.unique"),
    "writing into a new tensor": (lambda: Network(rewritten), vectors, r"room\[:, :4\] = x"),
    "a function of autograd": (lambda: Network(Sign.apply), vectors, "setup_context"),
    "a checkpoint": (lambda: Network(again), vectors, "escaped from inside a function|does not have vmap support"),
    "a layer that is computed again": (lambda: Network(Checkpointed()), vectors, r"out: Tensor = checkpoint\("),
    "a hook on a gradient": (hooked, vectors, "a hook on first.weight"),
    "weight norm": (lambda: Network(parametrizations.weight_norm(nn.Linear(8, 8))), vectors, ""),
    "spectral norm": (lambda: Network(parametrizations.spectral_norm(nn.Linear(8, 8))), vectors, "aten::div.out"),
    "orthogonal weights": (lambda: Network(parametrizations.orthogonal(nn.Linear(8, 8))), vectors, ""),
    "weight norm by hooks": (lambda: Network(nn.utils.weight_norm(nn.Linear(8, 8))), vectors, "must be copyable"),
    "LSTM": (lambda: Recurrent(nn.LSTM), texts, ""),
    "LSTM with all it has": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3),
        texts,
        "",
    ),
    "GRU without biases": (lambda: Recurrent(nn.GRU, bias=False), texts, ""),
    "LSTM with dropout": (
        lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2),
        texts,
        "",
    ),
    "GRU": (lambda: Recurrent(nn.GRU, bidirectional=True), texts, ""),
    "RNN": (lambda: Recurrent(nn.RNN, num_layers=2, nonlinearity="relu"), texts, ""),
    "packed sequences": (lambda: Packed(nn.GRU), texts, "pad_packed_sequence"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated", "ignore:.*torch.jit.trace")
def test_unstackable_networks_train_sequentially_like_separate_runs(name: str, tmp_path: Path) -> None:
    model, data, words = MODELS[name]
    makes = [adamw(1e-2), adamw(3e-2, weight_decay=0.1)]
    members = [
        task("mlp", make, seed=seed, data=data(), valid=data(), ema=0.9).replace(model=model)
        for seed, make in enumerate(makes)
    ]
    notices: list[str] = []
    population = Population(members, mh.Single(precision="fp64"), device="cpu", epochs=1, notice=notices.append)
    curves = population.step(population.total)
    assert bool(notices) is bool(words)
    assert not words or re.search(words, notices[0]), notices
    run = same_as_alone(members[1], population, curves[:, 1], tmp_path, epochs=1)
    measured = population.evaluate()[1]
    assert measured == pytest.approx({name: run.metrics[name] for name in measured}, rel=1e-9)


def muon_and_the_rest(lr: float) -> Any:
    def make(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return [getattr(torch.optim, "Muon", torch.optim.NAdam)(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr)]

    return make


def scheduled(lr: float) -> Any:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


OPTIMIZERS: dict[str, Any] = {
    "Adagrad": lambda lr: lambda model: torch.optim.Adagrad(model.parameters(), lr=lr),
    "several": muon_and_the_rest,
    "a scheduler in a hook": scheduled,
}


def same_as_alone(second: mh.Task, population: Population, curve: Tensor, folder: Path, epochs: int) -> Any:
    """Compares the second member with its task alone."""
    run = alone(second, folder, epochs=epochs)
    torch.testing.assert_close(curve, torch.tensor(run.losses, dtype=torch.float64), rtol=1e-9, atol=0)
    found = population.model(1).state_dict()
    for key, tensor in run.model().state_dict().items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-9, msg=key)
    return run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_members_may_use_any_optimizer(name: str, tmp_path: Path) -> None:
    members = [task("mlp", OPTIMIZERS[name](lr), seed=seed) for seed, lr in enumerate((1e-2, 3e-2))]
    population = Population(members, mh.Single(precision="fp64"), device="cpu", epochs=2)
    same_as_alone(members[1], population, population.step(population.total)[:, 1], tmp_path, epochs=2)


def late(rows: int) -> Any:
    """A loss that looks at a value only in batches of some size, as the last one of a pass has."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        return value * 2 if len(batch[0]) == rows and value > 0 else value

    return loss


def test_members_fall_back_to_sequential_steps_when_vmap_fails_mid_run(tmp_path: Path) -> None:
    members = [task("mlp", adamw(lr), seed=seed, ema=0.9) for seed, lr in enumerate((1e-2, 3e-2))]
    some = tuple(tensor[:43] for tensor in vectors())
    members = [member.replace(loss=late(3), data=some) for member in members]
    notices: list[str] = []
    population = Population(members, mh.Single(precision="fp64"), device="cpu", epochs=2, notice=notices.append)
    assert not notices
    curves = population.step(population.total)
    assert len(notices) == 1
    assert "test_one_by_one.py" in notices[0]
    assert "value > 0" in notices[0]
    same_as_alone(members[1], population, curves[:, 1], tmp_path, epochs=2)


def test_sequential_members_can_be_added_stopped_and_resumed(tmp_path: Path) -> None:
    def recurrent(lr: float, seed: int) -> mh.Task:
        changes: Any = {
            "data": texts(),
            "valid": texts(),
            "seed": seed,
            "schedule": lambda step, total: 1 - step / total,
        }
        return task("mlp", adamw(lr), **changes).replace(model=lambda: Packed(nn.GRU))

    spec = mh.Single(precision="fp64")
    members = [recurrent(1e-2, 0), recurrent(2e-2, 1)]
    population = Population(members, spec, device="cpu", epochs=EPOCHS)
    first = population.step(7)
    state = population.state(1)
    population.stop(0)
    population.replace(0, recurrent(3e-2, 2))
    heard: list[tuple[int, int]] = []
    population.train(report=lambda number, step, metrics: heard.append((number, step)))
    assert [member.status for member in population.members] == ["done", "done"]
    assert heard.count((0, 6)) == 1
    again = Population(members, spec, device="cpu", epochs=EPOCHS)
    again.load(1, state)
    again.stop(0)
    rest = again.step(again.total)
    run = alone(members[1], tmp_path)
    curve = torch.cat([first[:, 1], rest[: len(run.losses) - 7, 1]])
    torch.testing.assert_close(curve, torch.tensor(run.losses, dtype=torch.float64), rtol=1e-9, atol=0)
    for key, tensor in run.model().state_dict().items():
        for one in (population, again):
            torch.testing.assert_close(one.model(1).state_dict()[key], tensor, rtol=0, atol=1e-9)


def test_user_error_is_raised_unchanged() -> None:
    def broken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1] + 100)

    with pytest.raises(IndexError, match="Target 1.. is out of bounds"):
        Population([task().replace(loss=broken)], device="cpu", epochs=1).train()


class Annealed(nn.Module):
    """A loss that is smoothed after four calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels, label_smoothing=0.2 if self.calls > 4 else 0.0)


def test_members_that_share_a_loss_count_its_calls_separately(tmp_path: Path) -> None:
    def made(criterion: Annealed, seed: int) -> mh.Task:
        return task(valid=None, metrics={}, seed=seed).replace(
            loss=lambda model, batch: criterion(model(batch[0]), batch[1])
        )

    shared = Annealed()
    population = Population([made(shared, seed) for seed in (0, 1)], "precision=fp64", device="cpu", epochs=EPOCHS)
    curves = population.step(population.total)
    for seed in (0, 1):
        run = alone(made(Annealed(), seed), tmp_path / str(seed))
        torch.testing.assert_close(curves[:, seed], torch.tensor(run.losses, dtype=torch.float64), rtol=1e-9, atol=0.0)
