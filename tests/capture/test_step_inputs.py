"""Checks before a step is captured: Python values, shapes, optimizers, and the line of an error."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands.capture import StaticInputs, ValueWatch, has_convolutions, lay_out, make_capturable, shape_of
from manyhands.core import LayoutFree
from manyhands.data import map_leaves, tensors
from manyhands.data.collate import Fields
from manyhands.distributed import culprit

counter = {"steps": 0}


class Config:
    scale = 1.0
    clip = 1.0


config = Config()


def counting() -> int:
    counter["steps"] += 1
    return counter["steps"]


def plain(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).sum()


def with_counter(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).sum() * counting()


def with_config(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).sum() * config.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature, self.seen = nn.Linear(2, 2), 1.0, []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.temperature


def watch(loss: Any = plain, net: Net | None = None) -> tuple[Net, torch.optim.Optimizer, ValueWatch]:
    net = net or Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    plain(net, torch.zeros(1, 2)).backward()
    optimizer.step()
    return net, optimizer, ValueWatch(net, loss, [optimizer], lambda: {"clip": config.clip})


def test_unchanged_inputs_are_reported_as_same() -> None:
    net, optimizer, seen = watch()
    plain(net, torch.zeros(1, 2)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    assert seen.is_same()
    assert seen.changed() == seen.drew() == seen.hooked() == ""


def test_changed_module_attribute_is_detected() -> None:
    net, _, seen = watch()
    net.temperature = 2.0
    assert not seen.is_same()
    assert seen.changed() == "Net.temperature"
    assert seen.is_same()


def test_changed_modes_flags_and_hyperparameters_are_detected() -> None:
    net, optimizer, seen = watch()
    net.layer.eval()
    assert not seen.is_same()
    assert seen.changed() == "Linear 'layer'.training"
    net.layer.weight.requires_grad_(False)
    assert not seen.is_same()
    assert seen.changed() == "layer.weight.requires_grad"
    optimizer.param_groups[0]["momentum"] = 0.9
    assert not seen.is_same()
    assert seen.changed() == "optimizer 0, group 0: momentum"


def test_changed_lists_closure_counters_and_objects_are_detected() -> None:
    net, _, seen = watch()
    net.seen.append(1)
    assert seen.changed() == "Net.seen (its length)"
    net, _, seen = watch(with_counter)
    with_counter(net, torch.zeros(1, 2))
    assert seen.changed() == "counter['steps']"
    _, _, seen = watch(with_config)
    config.scale = 3.0
    assert seen.changed() == "config.scale"


def test_changed_private_and_nested_attributes_are_detected() -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self._t, self.inner, self.number = 0, Config(), np.int64(3)

    for change, name in (
        (lambda net: setattr(net, "_t", 1), "Deep._t"),
        (lambda net: setattr(net.inner, "scale", 9.0), "Deep.inner.scale"),
        (lambda net: setattr(net, "number", np.int64(4)), "Deep.number"),
    ):
        net, _, seen = watch(net=Deep())
        change(net)
        assert seen.changed() == name


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.weight


class Called:
    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        return model(batch).sum()


def test_changed_state_of_any_loss_callable_is_detected() -> None:
    criterion = Criterion()
    net, _, seen = watch(lambda model, batch: criterion(model(batch)))
    criterion.weight = 2.0
    assert not seen.is_same()
    assert seen.changed() == "Criterion.weight"
    called = Called()
    net, _, seen = watch(called)
    called(net, torch.zeros(1, 2))
    assert seen.changed() == "Called.steps"
    settings = {"beta": 1.0}
    _, _, seen = watch(partial(plain_with, settings=settings))
    settings["beta"] = 2.0
    assert seen.changed() == "settings['beta']"
    temperature = torch.tensor(1.0)
    _, _, seen = watch(lambda model, batch: model(batch).sum() * float(temperature))
    temperature.fill_(2.0)
    assert seen.changed() == "temperature"


def plain_with(model: nn.Module, batch: Any, settings: dict[str, float]) -> Tensor:
    return model(batch).sum() * settings["beta"]


def test_replaced_tensors_are_detected() -> None:
    net, optimizer, seen = watch()
    net.layer.weight.data = net.layer.weight.data.clamp(-1, 1)
    assert not seen.is_same()
    assert seen.changed() == "layer.weight (its place in memory)"
    optimizer.state.clear()
    assert not seen.is_same()
    assert "optimizer 0: momentum_buffer" in seen.changed()
    net, _, seen = watch()
    net.register_buffer("table", torch.zeros(3))
    seen.changed()
    net.table = torch.zeros(5)
    assert not seen.is_same()
    assert seen.changed() == "table (its place in memory)"


def test_changed_setting_of_another_module_is_detected() -> None:
    _, _, seen = watch()
    config.clip = 0.5
    assert not seen.is_same()
    assert seen.changed() == "clip"


def test_parameter_and_global_module_hooks_are_detected() -> None:
    net, _, seen = watch()
    handle = net.layer.weight.register_hook(lambda gradient: gradient)
    assert seen.hooked() == "layer.weight"
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert seen.hooked() == "every module"
    handle.remove()
    assert seen.hooked() == ""


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "random"), (np.random.rand, "numpy.random"), (lambda: torch.rand(1), "torch's generator")],
)
def test_random_draws_on_the_host_are_detected(draw: Any, name: str) -> None:
    _, _, seen = watch()
    draw()
    assert seen.drew().startswith(name)


def test_module_hooks_are_detected() -> None:
    net, _, seen = watch()
    handle = net.layer.register_forward_hook(lambda *_: None)
    assert seen.hooked() == "layer"
    handle.remove()
    assert seen.hooked() == ""
    LayoutFree(torch.device("cpu")).cover(net)
    assert seen.hooked() == ""


def test_batch_shapes_distinguish_batches() -> None:
    first = {"x": torch.zeros(4, 2), "y": (torch.zeros(4), 3)}
    assert shape_of(first) == shape_of({"x": torch.ones(4, 2), "y": (torch.ones(4), 3)})
    assert shape_of(first) != shape_of({"x": torch.zeros(3, 2), "y": (torch.zeros(4), 3)})
    assert shape_of(first) != shape_of({"x": torch.zeros(4, 2), "y": (torch.zeros(4), 4)})
    assert shape_of(first) != shape_of({"x": torch.zeros(4, 2).double(), "y": (torch.zeros(4), 3)})
    assert shape_of({"a": torch.zeros(1)}) != shape_of({"b": torch.zeros(1)})
    assert "neither a tensor nor a number" in str(shape_of([{1}]))
    assert shape_of((torch.zeros(2, 2).to_sparse(),)) == "the batch is sparse"


def test_static_inputs_are_overwritten_in_place() -> None:
    first = {"x": torch.zeros(2), "rest": [torch.zeros(1), 5]}
    statics = StaticInputs(first, map_leaves, tensors)
    held = statics.data["x"]
    statics.load({"x": torch.ones(2), "rest": [torch.full((1,), 7.0), 5]})
    assert held is statics.data["x"]
    assert held.tolist() == [1.0, 1.0]
    assert statics.data["rest"][0].item() == 7.0
    assert first["x"].tolist() == [0.0, 0.0]


def test_lengths_of_padded_samples_are_static_inputs() -> None:
    first = Fields({"x": torch.zeros(2, 3)}, padded={"x": torch.tensor([3, 1])})
    other = Fields({"x": torch.ones(2, 3)}, padded={"x": torch.tensor([2, 3])})
    assert shape_of(first) == shape_of(other)
    assert shape_of(first) != shape_of(Fields({"x": torch.ones(2, 3)}))
    statics = StaticInputs(first, map_leaves, tensors)
    lengths = statics.data.lengths("x")
    statics.load(other)
    assert lengths.tolist() == [2, 3]
    assert first.lengths("x").tolist() == [3, 1]


def test_uncapturable_optimizers_are_reported_with_a_reason() -> None:
    class Own(torch.optim.SGD):
        pass

    parameters = [nn.Parameter(torch.zeros(2))]
    assert "Own is not known" in make_capturable(Own(parameters, lr=0.1))
    assert "Adagrad is not known" in make_capturable(torch.optim.Adagrad(parameters))
    assert make_capturable(torch.optim.AdamW(parameters)) == "a parameter is not on the GPU"
    hooked = torch.optim.AdamW(parameters)
    hooked.register_step_post_hook(lambda *_: None)
    assert "hooks" in make_capturable(hooked)


def test_memory_format_change_keeps_values_and_optimizer_state() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    assert has_convolutions(net)
    for channels_last in (True, False):
        lay_out(net, [optimizer], channels_last=channels_last)
        weight = net[0].weight
        assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
        for p, value, moment in zip(net.parameters(), before, moments, strict=True):
            assert torch.equal(p, value)
            assert torch.equal(optimizer.state[p]["exp_avg"], moment)


def test_error_location_is_the_users_own_line() -> None:
    def theirs() -> None:
        torch.zeros(2).view(3)

    with pytest.raises(RuntimeError) as caught:
        theirs()
    assert culprit(caught.value) == f"test_step_inputs.py:{theirs.__code__.co_firstlineno + 1}: torch.zeros(2).view(3)"
