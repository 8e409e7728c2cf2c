"""State outside of buffers: equal to one device, or refused before training."""

from __future__ import annotations

import copy
import random
import re
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import Attributes, StrategySpec, TaskError, remember_state
from manyhands.training import left_alone

from ..grouped_options import fit_options

X = torch.randn(17, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (17,), generator=torch.Generator().manual_seed(1))


def task(model: Any, loss: Any = None) -> mh.Task:
    return mh.Task(
        model=model,
        loss=loss or (lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        data=(X, Y),
        batch_size=6,
        shuffle=False,
    )


def fit(model: Any, spec: StrategySpec, folder: Path, *, loss: Any = None, **options: Any) -> mh.Run:
    on = "cpu" if spec.num_devices == 1 else "cpu*2"
    return mh.fit(task(model, loss), spec, **fit_options(on=on, folder=folder, progress=False, timeout=60, **options))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x) * (2.0 if self.calls > 4 else 1.0)


def test_accumulation_counts_calls_of_forward_once_per_step(tmp_path: Path) -> None:
    alone = fit(Counting, mh.Single(precision="fp64"), tmp_path)
    parts = fit(Counting, mh.Single(precision="fp64", accumulate=2), tmp_path)
    assert parts.losses == pytest.approx(alone.losses, rel=1e-9)


class Carrying(nn.Module):
    """Keeps a running mean in an attribute, and scales with it if it is used."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.head, self.kept, self.is_used = nn.Linear(6, 3), {"mean": 1.0}, is_used

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x) * (self.kept["mean"] if self.is_used else 1.0)
        self.kept["mean"] = 0.5 * self.kept["mean"] + 0.5 * float(out.detach().square().mean())
        return out


def test_number_carried_between_steps_is_rejected_if_gradients_depend_on_it(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a step must be the same as on one device"):
        fit(lambda: Carrying(True), mh.Single(precision="fp64", accumulate=2), tmp_path)


def test_number_that_a_later_step_may_use_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the attribute kept.*later steps start from it.*verify=False"):
        fit(lambda: Carrying(False), mh.Single(precision="fp64", accumulate=2), tmp_path)


def test_number_that_is_only_recorded_may_differ_without_verification(tmp_path: Path) -> None:
    alone = fit(lambda: Carrying(False), mh.Single(precision="fp64"), tmp_path)
    parts = fit(lambda: Carrying(False), mh.Single(precision="fp64", accumulate=2), tmp_path, verify=False)
    assert parts.losses == pytest.approx(alone.losses, rel=1e-9)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_overridden_train_keeps_batch_norm_frozen(tmp_path: Path) -> None:
    state = fit(Frozen, mh.Single(precision="fp64"), tmp_path).state_dict()
    assert int(state["norm.num_batches_tracked"]) == 0


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.empty = nn.Parameter(torch.randn(3, 6).t()), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.empty.sum()


def test_sharding_takes_parameters_with_other_strides_and_empty_ones(tmp_path: Path) -> None:
    alone = fit(Strided, mh.Single(precision="fp64"), tmp_path)
    shards = fit(Strided, mh.Sharded(2, precision="fp64"), tmp_path)
    assert shards.losses == pytest.approx(alone.losses, rel=1e-9)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 0}


def test_extra_state_without_tensors_is_rejected_before_training(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="get_extra_state"):
        fit(lambda: Extra(6, 3), mh.Single(), tmp_path)


class CountingLoss(nn.Module):
    """A loss that is scaled after its fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) * (2.0 if self.calls > 4 else 1.0)


CRITERION = CountingLoss()
CALLS = 0


def global_criterion(net: Any, batch: Any) -> Tensor:
    loss: Tensor = CRITERION(net(batch[0]), batch[1])
    return loss


def global_number(net: Any, batch: Any) -> Tensor:
    global CALLS
    CALLS += 1
    return F.cross_entropy(net(batch[0]), batch[1]) * (2.0 if CALLS > 4 else 1.0)


def through_a_closure(net: Any, batch: Any) -> Tensor:
    def inner() -> Tensor:
        loss: Tensor = CRITERION(net(batch[0]), batch[1])
        return loss

    return inner()


@pytest.mark.parametrize("loss", [global_criterion, global_number, through_a_closure])
def test_trials_leave_no_calls_in_a_loss_that_counts_them(loss: Any, tmp_path: Path) -> None:
    global CALLS
    found = []
    for spec in (mh.Single(precision="fp64"), mh.Single(precision="fp64", accumulate=2)):
        CALLS = CRITERION.calls = 0
        found.append(fit(lambda: nn.Linear(6, 3), spec, tmp_path, loss=loss).losses)
        assert CALLS + CRITERION.calls == 3
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_pipeline_rejects_a_loss_that_counts_calls_by_its_attribute(tmp_path: Path) -> None:
    CRITERION.calls = 0
    model, pipeline = lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), mh.Pipeline(2, microbatches=3)
    with pytest.raises(TaskError, match="the attribute CRITERION.calls of the loss: it is 0 instead of 2"):
        fit(model, pipeline, tmp_path, loss=global_criterion)


class Remembering(nn.Module):
    """Keeps the last output in an attribute, and the centre of all in another."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.kept, self.centre = nn.Linear(6, 3), [], torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x)
        past = torch.stack([out.mean(0).detach(), *self.kept]).mean(0)
        self.kept = [out.mean(0).detach()]
        self.centre = 0.9 * self.centre.to(out.dtype) + 0.1 * out.mean(0).detach()
        return out + past - self.centre


def test_tensor_parallelism_leaves_no_tensors_of_its_trials_in_attributes(tmp_path: Path) -> None:
    alone = fit(Remembering, mh.Single(precision="fp64"), tmp_path)
    split = fit(Remembering, mh.TensorParallel(2, precision="fp64"), tmp_path)
    assert split.losses == pytest.approx(alone.losses, rel=1e-9)
    assert mh.check(task(Remembering), mh.TensorParallel(2), on="cpu*2", timeout=60)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 6, max_norm=0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.argmax(1) % 3))


class Unfreezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.body.requires_grad_(bool(self.calls > 2))
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Renormed, r"forward changes table.weight by embedding at test_carried_state.py:\d+ \(return self.head"),
        (Unfreezing, r"sets requires_grad of body.weight at test_carried_state.py:\d+ \(self.body.requires_grad_"),
    ],
)
def test_servers_reject_a_forward_that_changes_parameters_by_its_line(model: Any, text: str, tmp_path: Path) -> None:
    servers = mh.ParameterServer(servers=1, workers=2, precision="fp64")
    with pytest.raises(TaskError, match=text):
        fit(model, servers, tmp_path)
    assert re.search(text, str(mh.check(task(model), servers, on="cpu*2", timeout=60)))


def clamping() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-1e-3, 1e-3),))
    return model


def test_servers_reject_a_backward_that_does_not_scale_with_the_loss(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="its backward is not proportional to the loss"):
        fit(clamping, mh.ParameterServer(servers=1, workers=2, precision="fp64"), tmp_path)


class History:
    """An object of the user's, with a list in an attribute."""

    def __init__(self) -> None:
        self.losses: list[float] = []


class Collecting(nn.Module):
    """Keeps tensors of earlier calls in a deque, in a list of tensors, in an array and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.earlier: deque[Tensor] = deque(maxlen=2)
        self.counts, self.sums, self.history = {"calls": [torch.zeros(())]}, np.zeros(2), History()

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"][0] += 1
        self.sums += 1
        self.earlier.append(x.detach())
        self.history.losses.append(1.0)
        return self.head(x) * len(self.earlier)


def test_state_in_containers_arrays_and_objects_of_a_network_is_restored() -> None:
    net = Collecting()
    net(X)
    put_back = remember_state(net)
    net(X)
    put_back()
    assert (len(net.earlier), float(net.counts["calls"][0])) == (1, 1.0)
    assert (net.sums.tolist(), net.history.losses) == ([1.0, 1.0], [1.0])


def test_parameters_that_a_forward_unfreezes_are_frozen_again() -> None:
    net = Unfreezing()
    put_back = remember_state(net)
    for _ in range(4):
        net(X)
    assert net.body.weight.requires_grad
    put_back()
    assert not net.body.weight.requires_grad
    assert net.head.weight.requires_grad
    assert int(net.calls) == 0


def test_parameters_in_plain_lists_are_not_attributes_to_restore() -> None:
    net = nn.Linear(6, 3)
    net.again = [net.weight]  # type: ignore[assignment]
    before = Attributes(net)
    with torch.no_grad():
        net.weight.fill_(2.0)
    before.put_back()
    assert net.weight.mean() == 2.0


def test_modules_in_containers_of_a_loss_are_restored() -> None:
    held = {"teacher": nn.BatchNorm1d(6)}

    def loss(net: Any, batch: Any) -> Any:
        held["calls"] = nn.Identity()
        return held["teacher"](batch)

    with left_alone(loss):
        loss(None, X)
    assert list(held) == ["teacher"]
    assert int(held["teacher"].num_batches_tracked) == 0


def test_servers_reject_a_loss_whose_calls_read_what_the_first_one_left(tmp_path: Path) -> None:
    held: dict[str, nn.Module] = {}

    def loss(net: Any, batch: Any) -> Tensor:
        teacher = held.setdefault("teacher", copy.deepcopy(net).requires_grad_(False))
        return F.cross_entropy(net(batch[0]), batch[1]) + (net(batch[0]) - teacher(batch[0])).square().mean()

    with pytest.raises(TaskError, match="read what earlier calls left in what the loss refers to; every worker"):
        fit(lambda: nn.Linear(6, 3), mh.ParameterServer(servers=1, workers=2), tmp_path, loss=loss)


DRAWS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (torch.Generator().manual_seed(3), lambda g: torch.randn(36, generator=g).tolist()),
    "numpy": (np.random.default_rng(3), lambda g: g.standard_normal(36).tolist()),
    "numpy, Mersenne Twister": (np.random.RandomState(3), lambda g: g.randn(36).tolist()),
    "Python": (random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(36)]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_trial_restores_generators_that_a_network_holds(name: str) -> None:
    """The states of large generators differ in a few of many numbers only."""
    generator, draw = DRAWS[name]
    net = nn.Linear(6, 3)
    net.generator = generator  # type: ignore[assignment]
    before, put_back = Attributes(net), remember_state(net)
    assert before.changed() == []
    first = draw(generator)
    assert before.changed() == ["generator"]
    put_back()
    assert before.changed() == []
    assert draw(generator) == first


class WithTeacher(nn.Module):
    """Keeps a network in a plain list, so that it is not saved with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.teacher = [nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).requires_grad_(False)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self.teacher[0].to(self.head.weight.dtype)
        return self.head(self.embed(x)), teacher(x)


def test_tensor_parallelism_computes_networks_kept_in_a_list(tmp_path: Path) -> None:
    def distil(net: Any, batch: tuple[Tensor]) -> Tensor:
        student, teacher = net(batch[0])
        picked = torch.masked_select(teacher, student > 0)
        return (torch.masked_select(student, student > 0) - picked).square().sum() / len(batch[0])

    task = mh.Task(
        model=WithTeacher,
        loss=distil,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        data=(torch.arange(102).view(17, 6) % 9,),
        batch_size=6,
        shuffle=False,
    )
    options = fit_options(folder=tmp_path, progress=False, timeout=60)
    alone = mh.fit(task, mh.Single(precision="fp64"), on="cpu", **options)
    split = mh.fit(task, mh.TensorParallel(2, precision="fp64"), on="cpu*2", **options)
    assert split.losses == pytest.approx(alone.losses, rel=1e-9)


class Gate(nn.Module):
    """A part that refers to the module that contains it by a weak proxy, since a reference would be a cycle."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.__dict__["owner"] = weakref.proxy(owner)  # not a part: the owner contains this module

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.owner.temperature


class WithProxy(nn.Module):
    """A network whose part reads a number of its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 0.7
        self.gate, self.head = Gate(self), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(x))


def test_parts_may_hold_weak_proxies_of_their_owner(tmp_path: Path) -> None:
    net = WithProxy()
    before, put_back = Attributes(net), remember_state(net)
    net.temperature = 0.9
    assert before.changed() == ["temperature"]
    put_back()
    assert net.gate.owner.temperature == 0.7
    alone = fit(WithProxy, mh.Single(precision="fp64"), tmp_path)
    split = fit(WithProxy, mh.Mirrored(2, precision="fp64"), tmp_path)
    assert split.losses == pytest.approx(alone.losses, rel=1e-9)
