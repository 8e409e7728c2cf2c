"""Every optimizer of torch.optim, schedulers, and custom optimizers, on one small network."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import lr_scheduler

from .network import Network, Registry, randint, randn

OPTIMIZERS = Registry("optimizer")
OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Rprop": {"lr": 0.01},
    "Muon": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
}
NEEDS_CLOSURE, NEEDS_SPARSE = ("LBFGS",), ("SparseAdam",)


def small(
    optimizer: Callable[[Any], Any],
    *,
    biases: bool = True,
    sparse: bool = False,
    draws: bool = False,
    rounding: float = 0.0,
) -> Network:
    """Return a small classifier of tokens and numbers under an optimizer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6, sparse=sparse)
            if not sparse:
                self.first, self.head = nn.Linear(6, 8, bias=biases), nn.Linear(8, 3, bias=biases)

        def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
            hidden = self.embed(tokens).mean(dim=1) + numbers
            return hidden[:, :3] if sparse else self.head(torch.tanh(self.first(hidden)))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randint(g, 11, rows, 4), randn(g, rows, 6), randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Net, data=data, loss=loss, optimizer=optimizer, draws=draws, rounding=rounding)


def _of_torch(name: str) -> Network:
    kind = getattr(torch.optim, name)
    options = OPTIONS.get(name, {"lr": 0.01})
    # Muon orthogonalises in bfloat16, whatever the weights are.
    rounding = 0.3 if name == "Muon" else 0.0
    return small(
        lambda model: kind(model.parameters(), **options),
        biases=name != "Muon",
        sparse=name in NEEDS_SPARSE,
        rounding=rounding,
    )


def _add_torch() -> None:
    names = [
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and kind.__module__ != "torch.optim.optimizer"
    ]
    source = inspect.getsource(small) + inspect.getsource(_of_torch) + repr(OPTIONS)
    for name in names:
        OPTIMIZERS.add_as(name, lambda name=name: _of_torch(name), source)


_add_torch()


@OPTIMIZERS.add
def adam_amsgrad() -> Network:
    return small(lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1))


@OPTIMIZERS.add
def parameter_groups() -> Network:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
        return torch.optim.AdamW(
            [*groups, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.1}], lr=0.01
        )

    return small(optimizer)


@OPTIMIZERS.add
def parameters_left_out() -> Network:
    return small(lambda model: torch.optim.SGD(model.head.parameters(), lr=0.05))


@OPTIMIZERS.add
def muon_and_adamw() -> Network:
    class Orthogonal(torch.optim.Optimizer):
        """Muon without rounding: momentum, orthogonalised by five Newton-Schulz iterations."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    x = momentum.mul_(0.9).add_(p.grad) / momentum.norm()
                    for _ in range(5):
                        square = x @ x.T
                        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                    p.add_(x, alpha=-group["lr"])

    class Both(torch.optim.Optimizer):
        """Muon for matrices, AdamW for the rest, as one optimizer."""

        def __init__(self, model: nn.Module) -> None:
            matrices = [p for p in model.parameters() if p.dim() == 2]
            others = [p for p in model.parameters() if p.dim() != 2]
            super().__init__([*matrices, *others], {"lr": 0.01})
            self.parts = [Orthogonal(matrices, {"lr": 0.01}), torch.optim.AdamW(others, lr=0.01)]

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            for part in self.parts:
                part.zero_grad(set_to_none)

    return small(lambda model: Both(model))


@OPTIMIZERS.add
def noisy_sgd() -> Network:
    class Noisy(torch.optim.Optimizer):
        """SGD with noise of a generator of its own (Langevin dynamics)."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})
            self.generator = torch.Generator().manual_seed(7)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        noise = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
                        p.add_(p.grad + 0.1 * noise, alpha=-group["lr"])

    return small(lambda model: Noisy(model.parameters(), lr=0.05))


@OPTIMIZERS.add
def noisy_sgd_global_generator() -> Network:
    class Noisy(torch.optim.Optimizer):
        """SGD with noise of torch's own generator."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-group["lr"])

    return small(lambda model: Noisy(model.parameters(), lr=0.05), draws=True)


@OPTIMIZERS.add
def lookahead() -> Network:
    class Lookahead(torch.optim.Optimizer):
        """Lookahead around SGD: every second step the weights go half way back to the slow ones."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr, "alpha": 0.5, "every": 2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["count"], state["slow"] = 0, p.clone()
                    p.add_(p.grad, alpha=-group["lr"])
                    state["count"] += 1
                    if state["count"] % group["every"] == 0:
                        state["slow"].lerp_(p, group["alpha"])
                        p.copy_(state["slow"])

    return small(lambda model: Lookahead(model.parameters(), lr=0.05))


@OPTIMIZERS.add
def centralized_gradient() -> Network:
    class Centralized(torch.optim.SGD):
        """SGD that subtracts the mean of each row of a matrix's gradient, and clips by the norm of each tensor."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.dim() > 1:
                        p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
                        p.grad.div_(p.grad.norm().clamp(min=0.05))
            return super().step(closure)

    return small(lambda model: Centralized(model.parameters(), lr=0.05))


def _scheduled(name: str, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Register a scheduler that is made with its optimizer and steps after each of its updates."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        scheduler = make(made)
        made.register_step_post_hook(lambda *_: scheduler.step())
        return made

    OPTIMIZERS.add_as(f"scheduler_{name}", lambda: small(optimizer), inspect.getsource(_scheduled) + name)


_scheduled("StepLR", lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5))
_scheduled("CosineAnnealingLR", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3))
_scheduled("OneCycleLR", lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5))
_scheduled("LambdaLR", lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
