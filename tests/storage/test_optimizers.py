"""Optimizer state by parameter name: training resumes bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.core import CheckpointError
from manyhands.storage import Checkpoint, CheckpointStore, load_optimizer_state, optimizer_state, save_state_dict
from manyhands.storage.tensors import load_state_dict


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def named(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": model[2].parameters(), "lr": 0.03},  # type: ignore[index]
        {"params": model[0].parameters(), "weight_decay": 0.1},  # type: ignore[index]
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "groups": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
    "named": lambda m: torch.optim.Adagrad(m.named_parameters(), lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_optimizer_continues_bit_exactly(tmp_path: Path, kind: str) -> None:
    make = OPTIMIZERS[kind]
    model = network()
    optimizer = make(model)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] *= 0.5
    with CheckpointStore(tmp_path) as store:
        store.save(Checkpoint(3, dict(model.state_dict()), {"main": optimizer_state(optimizer, named(model))}))
        store.wait()
        found = store.load()
    again = network()
    resumed = make(again)
    again.load_state_dict(found.model)
    load_optimizer_state(resumed, named(again), found.optimizers["main"])
    train(model, optimizer, 4)
    train(again, resumed, 4)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    assert float(resumed.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


def test_loaded_state_is_cast_to_parameter_dtype_except_the_step_counter() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    data = optimizer_state(optimizer, named(model))
    half = network().to(torch.bfloat16)
    other = torch.optim.AdamW(half.parameters())
    load_optimizer_state(other, named(half), data)
    slots = other.state[half[0].weight]  # type: ignore[index]
    assert slots["exp_avg"].dtype == torch.bfloat16
    assert slots["step"].dtype == torch.float32
    assert slots["step"].item() == 2


def test_optimizer_state_is_matched_by_parameter_name() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    data = optimizer_state(optimizer, named(model))
    turned = torch.optim.AdamW(list(model.parameters())[::-1])
    load_optimizer_state(turned, named(model), data)
    for parameter in model.parameters():
        assert torch.equal(turned.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert turned.state[parameter]["exp_avg"] is not optimizer.state[parameter]["exp_avg"]


def test_param_group_options_are_json_serializable() -> None:
    model = network()
    data = optimizer_state(torch.optim.AdamW(groups(model), lr=torch.tensor(0.5)), named(model))
    assert json.loads(json.dumps(data["groups"]))[1]["lr"] == 0.5


def test_mismatched_parameter_groups_are_rejected_by_name() -> None:
    model = network()
    data = optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), named(model))
    with pytest.raises(CheckpointError, match="2 parameter groups"):
        load_optimizer_state(torch.optim.SGD(groups(model), lr=0.1), named(model), data)
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"2 that differ: 2\.bias, 2\.weight"):
        load_optimizer_state(part, named(model), data)
    with pytest.raises(CheckpointError, match="must belong to the model"):
        optimizer_state(torch.optim.SGD(network().parameters(), lr=0.1), named(model))


def test_state_dict_file_round_trip(tmp_path: Path) -> None:
    state = dict(network().state_dict())
    state["tied"] = state["0.weight"]
    state["turned"] = state["0.weight"].t()
    path = tmp_path / "deep" / "weights.safetensors"
    save_state_dict(state, path)
    save_state_dict(state, path)
    found = load_state_dict(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert [entry.name for entry in path.parent.iterdir()] == ["weights.safetensors"]


def test_pickled_and_corrupted_state_dicts_are_rejected(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="pickle"):
        load_state_dict(tmp_path / "a.pt")
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="complete safetensors"):
        load_state_dict(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"Name it a\.safetensors"):
        save_state_dict({}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"one \.safetensors file"):
        load_state_dict(tmp_path)
