"""Networks written for other frameworks' runs: process groups, and state in classes, defaults and iterators."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategyError, TaskError
from manyhands.core.iterators import copied_iterator, iterator_state
from manyhands.launcher.pickles import pack, unpack
from manyhands.strategies import is_by_element
from manyhands.strategies.deferred import CannotDefer, defer
from manyhands.vectorized import Population

from .test_idioms import X, Y, fit, plain_losses, task


class Reducing(nn.Linear):
    """Sums its output over all ranks if there are some, as code for distributed runs does."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.gain = 2.0 if dist.is_initialized() else 1.0

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input) * self.gain
        if dist.is_initialized():
            dist.all_reduce(out)
        return out


def synchronized() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (Reducing, mh.Mirrored(2)),
        (Reducing, mh.Sharded(2)),
        (synchronized, mh.TensorParallel(2)),
        (synchronized, mh.Mirrored(2)),
    ],
)
def test_networks_see_no_process_group(model: Callable[[], nn.Module], spec: Any, tmp_path: Path) -> None:
    made = task(model)
    assert fit(made, tmp_path, spec).losses == pytest.approx(plain_losses(made), rel=1e-5)


class CountedByClass(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        CountedByClass.calls += 1
        return super().forward(input) * CountedByClass.calls


class CountedByDefault(nn.Linear):
    def forward(self, input: Tensor, kept: dict[str, int] = {"calls": 0}) -> Tensor:  # noqa: B006
        kept["calls"] += 1
        return super().forward(input) * kept["calls"]


class CountedByIterator(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = itertools.count(1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * next(self.calls)


class TakesTurns(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.turns = itertools.cycle([1.0, 2.0])

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * next(self.turns)


def forget() -> None:
    CountedByClass.calls = 0
    CountedByDefault.forward.__defaults__[0].update(calls=0)  # type: ignore[index]


@pytest.mark.parametrize("model", [CountedByClass, CountedByDefault, CountedByIterator, TakesTurns])
@pytest.mark.parametrize("spec", [mh.Single(), mh.Single(accumulate=2)])
def test_trials_leave_state_outside_of_attributes_alone(model: Any, spec: Any, tmp_path: Path) -> None:
    made = task(lambda: model(6, 3))
    forget()
    expected = plain_losses(made)
    forget()
    if model is TakesTurns and spec.accumulate > 1:
        with pytest.raises(TaskError, match="must be the same as on one device"):
            mh.fit(made, spec, on="cpu", folder=tmp_path, options=[mh.options.Display(progress=False)])
        return
    run = mh.fit(made, spec, on="cpu", folder=tmp_path, options=[mh.options.Display(progress=False)])
    assert run.losses == pytest.approx(expected, rel=1e-5)


class Curriculum:
    """Collates sequences that grow with every batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return torch.stack([x[: 1 + self.calls] for x, _ in samples]), torch.stack([y for _, y in samples])


def test_trials_leave_counts_of_a_collate_alone(tmp_path: Path) -> None:
    data = list(zip(X, Y, strict=True))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mean(1, keepdim=True))

    made = task(Mean).replace(data=data)
    one = fit(made.replace(collate=Curriculum()), tmp_path / "one")
    two = fit(made.replace(collate=Curriculum()), tmp_path / "two", mh.Mirrored(2))
    assert two.losses == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.parametrize("model", [CountedByIterator, TakesTurns])
def test_iterators_are_refused_where_a_network_is_traced(model: Any) -> None:
    with pytest.raises(StrategyError, match="the trace does not contain attributes"):
        mh.check(task(lambda: nn.Sequential(model(6, 8), nn.Linear(8, 3))), mh.Pipeline(2), on="cpu*2")


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.cycle(range(3)),
        lambda: itertools.count(2, 3),
        lambda: enumerate(zip("abcdef", range(9), strict=False)),
        lambda: itertools.chain([1, 2], [3, 4, 5, 6]),
        lambda: itertools.islice(itertools.count(), 10),
    ],
)
@pytest.mark.parametrize("advance", range(4))
def test_copies_of_iterators_continue_alike(make: Callable[[], Any], advance: int) -> None:
    first = make()
    list(itertools.islice(first, advance))
    second = copied_iterator(copied_iterator(first))
    assert iterator_state(first) == iterator_state(second)
    assert list(itertools.islice(first, 4)) == list(itertools.islice(second, 4))


def test_a_term_that_starts_after_many_calls_of_a_class_is_a_difference() -> None:
    class Late(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            Late.calls += 1
            out = super().forward(input)
            return out - out.mean(0) if Late.calls > 50 else out

    verdict = mh.check(task(lambda: Late(6, 3)), mh.Single(accumulate=2), on="cpu")
    assert verdict.outcome == "different"
    assert Late.calls == 0


def test_random_steps_of_a_large_counter_are_counted() -> None:
    class Counting(nn.Linear):
        """Has seen many samples before, so that a batch changes its counts by less than a relative tolerance."""

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("seen", torch.tensor(600_000))
            self.register_buffer("weight_seen", torch.tensor(600_000.0))

        def forward(self, input: Tensor) -> Tensor:
            self.seen += len(input)
            self.weight_seen += len(input)
            return super().forward(input)

    assert mh.check(task(Counting), mh.Single(accumulate=2), on="cpu").outcome == "equal"


def test_rows_chosen_by_a_moving_threshold_are_a_difference() -> None:
    class Thresholds(nn.Module):
        """Learns from rows whose confidence exceeds a moving average that the same batch has moved."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            self.register_buffer("level", torch.tensor(0.1))

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            with torch.no_grad():
                best = out.softmax(-1).amax(1)
                self.level.lerp_(best.mean(), 0.4)
                mask = (best >= self.level).to(out.dtype)
            each: Tensor = F.cross_entropy(out, out.detach().argmax(1), reduction="none")
            return each * mask

    data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    made = task(Thresholds, data=data, loss=lambda net, batch: net(batch).mean())
    verdict = mh.check(made, mh.Single(accumulate=2), on="cpu")
    assert verdict.outcome == "different"


class Moved(nn.Module):
    """Converts a plain tensor in its own `_apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.anchors = nn.Linear(6, 3), torch.linspace(-1, 1, 6)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.anchors = fn(self.anchors)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - self.anchors)


class Seeded(nn.Linear):
    """Seeds torch's generator when it is built."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(6, 3)


class Classes(nn.Linear):
    """Uses the name of a module of torch, as `self.classes`."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("classes", torch.ones(3))

    def forward(self, input: Tensor) -> Tensor:
        return torch.mul(super().forward(input), self.classes)


@pytest.mark.parametrize("model", [Moved, Seeded])
def test_shards_of_unusual_model_functions_are_those_of_one_device(model: Any, tmp_path: Path) -> None:
    made = task(model)
    assert fit(made, tmp_path, mh.Sharded(2)).losses == pytest.approx(plain_losses(made), rel=1e-5)


def test_classes_with_an_attribute_named_classes_can_be_sent() -> None:
    class Local(Classes):
        def forward(self, input: Tensor) -> Tensor:
            return torch.neg(super().forward(input)) * self.classes

    file = pack(Local)
    try:
        assert unpack(file)()(X).shape == (12, 3)
    finally:
        os.close(file)


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_parameters_with_the_same_memory_are_refused_where_they_are_split() -> None:
    with pytest.raises(TaskError, match="but got first.weight and second.weight"):
        mh.check(task(SharesMemory), mh.Sharded(2), on="cpu*2")
    with pytest.raises(CannotDefer, match="first.weight and second.weight may have the same memory"):
        defer(SharesMemory)
    assert mh.check(task(SharesMemory), mh.Single(accumulate=2), on="cpu")


def test_trials_of_an_optimizer_leave_gradients_of_its_layers_alone() -> None:
    class Scaling(torch.optim.SGD):
        """Scales the gradients of layers that it refers to."""

        def __init__(self, layers: list[Any]) -> None:
            super().__init__([p for layer in layers for p in layer.parameters()], lr=0.1)
            self.layers = layers

        def step(self, closure: Any = None) -> Any:
            for layer in self.layers:
                layer.weight.grad.mul_(2)
                layer.bias.data.add_(1)
            return super().step(closure)

    layer = nn.Linear(6, 3)
    layer(X).square().mean().backward()
    before = layer.weight.grad, layer.weight.grad.clone(), layer.bias.detach().clone()  # type: ignore[union-attr]
    assert not is_by_element(Scaling([layer]))
    assert layer.weight.grad is before[0]
    assert torch.equal(before[0], before[1])  # type: ignore[arg-type]
    assert torch.equal(layer.bias, before[2])


class Skips(nn.Module):
    """Skips a layer by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.random = nn.Linear(6, 6), nn.Linear(6, 3), random.Random(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x) if self.random.random() < 0.5 else x)


class SavesSome(nn.Module):
    """Leaves frozen weights out of its state and of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)

    def parameters(self, recurse: bool = True) -> Any:
        return (parameter for parameter in super().parameters(recurse) if parameter.requires_grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "frozen" not in name}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x).tanh())


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
def test_networks_that_list_some_parameters_are_sharded(sharding: str, tmp_path: Path) -> None:
    made = task(SavesSome)
    run = fit(made, tmp_path, mh.Sharded(2, sharding=sharding))
    assert run.losses == pytest.approx(fit(made, tmp_path / "alone").losses, rel=1e-5)


@pytest.mark.parametrize("model", [Skips, SavesSome, SharesMemory])
def test_members_of_a_population_learn_as_alone(model: Any, tmp_path: Path) -> None:
    made = task(model, data=(X.repeat(3, 1), Y.repeat(3)))
    population = Population([made, made.replace(seed=1)], device="cpu", epochs=1)
    losses = population.step(population.total)[:, 0].tolist()
    alone = fit(made, tmp_path)
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    found = population.model(0).state_dict()
    assert all(torch.allclose(value, found[name], atol=1e-5) for name, value in alone.state_dict().items())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        is_wide = self.first.weight.sum() > self.second.weight.sum()
        found: Tensor = torch.cond(is_wide, lambda x: self.first(x).tanh(), lambda x: self.second(x).tanh(), (x,))
        return found


def test_a_refused_operator_with_branches_runs_afterwards(tmp_path: Path) -> None:
    made = task(Branches)
    with pytest.raises(StrategyError, match="can be computed in parts"):
        mh.fit(made, mh.TensorParallel(2), on="cpu*2", folder=tmp_path / "parts")
    with pytest.raises(StrategyError, match="traceable"):
        mh.fit(made, mh.Placed(devices=2), on="cpu*2", folder=tmp_path / "placed")
    assert len(fit(made, tmp_path / "whole").losses) == 2
