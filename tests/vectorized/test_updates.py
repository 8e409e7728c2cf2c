"""Every stacked update does what torch's optimizer does to each member alone, of real and of complex parameters."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn, optim

import manyhands as mh
from manyhands.core import LayoutFree, StrategySpec
from manyhands.vectorized import Population
from manyhands.vectorized.build import CPU, build, build_model, row_of
from manyhands.vectorized.program import Program
from manyhands.vectorized.stack import PARAMETERS, Stack

from .test_equality import Lion

FLAGS: dict[str, dict[str, list[Any]]] = {
    "SGD": {
        "momentum": [0.0, 0.9],
        "nesterov": [False, True],
        "dampening": [0.0, 0.3],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
        "foreach": [None, True],
    },
    "Adam": {
        "amsgrad": [False, True],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
        "betas": [(0.9, 0.999), (0.5, 0.7)],
        "how": ["", "foreach", "fused"],
    },
    "RMSprop": {
        "centered": [False, True],
        "momentum": [0.0, 0.5],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
        "alpha": [0.9],
        "foreach": [None, True],
    },
    "Lion": {"weight_decay": [0.0, 0.1], "betas": [(0.9, 0.99), (0.5, 0.7)]},
}
FLAGS["AdamW"] = FLAGS["Adam"]
KINDS: dict[str, Any] = {name: getattr(optim, name, Lion) for name in FLAGS}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Every pair of an optimizer and its settings that torch takes together."""
    found = []
    for name, flags in FLAGS.items():
        for values in product(*flags.values()):
            settings = dict(zip(flags, values, strict=True))
            how = settings.pop("how", "")
            settings |= {how: True} if how else {}
            is_nesterov = settings.get("nesterov") and (not settings["momentum"] or settings["dampening"])
            if not is_nesterov:
                found.append((name, settings))
    return found


class Weights(nn.Module):
    """Two tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 3, dtype=dtype)), nn.Parameter(torch.randn(3, dtype=dtype))


def member(name: str, settings: dict[str, Any], lr: float, dtype: torch.dtype) -> mh.Task:
    return mh.Task(
        model=lambda: Weights(dtype),
        loss=lambda model, batch: model.a.abs().sum(),
        optimizer=lambda model: KINDS[name](model.parameters(), lr=lr, **settings),
        data=torch.zeros(2, 1),
        batch_size=2,
        seed=int(lr * 100),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("name", FLAGS)
def test_stacked_optimizer_updates_equal_torch_updates(name: str, dtype: torch.dtype) -> None:
    for _, settings in (case for case in cases() if case[0] == name):
        if dtype.is_complex and (settings.get("fused") or name == "Lion"):
            continue  # torch has none of these: no fused update, and no sign of a complex number
        built = [build(member(name, settings, lr, dtype)) for lr in (0.01, 0.02)]
        alone = [(b.model, b.task.optimizer(b.model)) for b in built]
        stack = Stack.of([row_of(b) for b in built])
        program = Program(built[0], StrategySpec(), CPU, LayoutFree(CPU))
        program.decays = any(b.decays for b in built)
        for _ in range(3):
            slopes = {n: torch.randn(2, *p.shape, dtype=dtype) for n, p in alone[0][0].named_parameters()}
            with torch.no_grad():
                program._update(stack, slopes, {}, program.factors(stack, torch.ones(2, dtype=torch.float64)))
            for number, (model, optimizer) in enumerate(alone):
                for key, parameter in model.named_parameters():
                    parameter.grad = slopes[key][number]
                optimizer.step()
        for number, (model, optimizer) in enumerate(alone):
            for key, parameter in model.named_parameters():
                found = stack[PARAMETERS, key][number]
                torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-12, msg=f"{settings} {key}")
                for slot in built[0].updates[0].slots:
                    state = optimizer.state[parameter][slot]
                    torch.testing.assert_close(stack[slot, key][number], state, rtol=1e-12, atol=1e-12)


class Filters(nn.Module):
    """Complex weights before real ones, as layers in the frequency domain have them."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.linear = nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.filters, n=4)


def distance(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_complex_weights_train_like_a_plain_loop(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(8, 4, dtype=torch.float64, generator=draws), torch.randn(8, 4, dtype=torch.float64)
    tasks = [
        mh.Task(
            model=Filters,
            loss=distance,
            optimizer=lambda model, lr=lr: KINDS[name](model.parameters(), lr=lr),  # type: ignore[misc]
            data=data,
            batch_size=8,
            shuffle=False,
            seed=seed,
            clip=0.5,
        )
        for seed, lr in enumerate((0.01, 0.05))
    ]
    notices: list[str] = []
    population = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=4, notice=notices.append)
    population.train()
    assert not notices
    for number, one in enumerate(tasks):
        model = build_model(one, torch.float64)
        optimizer = one.optimizer(model)
        for _ in range(4):
            optimizer.zero_grad()
            distance(model, data).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found = population.state(number)["model"]
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=key)
