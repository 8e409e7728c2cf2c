"""Mark modules with the device they are for, by the `place_on` block in which they are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_MARK = "_for_device"
_open: list[str] = []


@contextmanager
def place_on(device: str | int) -> Iterator[None]:
    """Place modules that are built inside this block on a device under `mh.Placed()`; no effect otherwise.

    >>> with place_on("cpu:1"):
    ...     tower = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    >>> marks_of(nn.Sequential(tower, nn.Linear(4, 1)))
    {'0.0': 'cpu:1', '0.1': 'cpu:1'}
    """
    _open.append(str(device))
    handles = [
        register_module_module_registration_hook(_mark_child),
        register_module_parameter_registration_hook(_mark_owner),
    ]
    try:
        yield
    finally:
        _open.pop()
        for handle in handles:
            handle.remove()


def marks_of(model: nn.Module) -> dict[str, str]:
    """Return the device of every module that was built in a `place_on` block, by name."""
    return {name: module.__dict__[_MARK] for name, module in model.named_modules() if _MARK in module.__dict__}


def _mark_child(parent: nn.Module, name: str, child: Any) -> None:
    if isinstance(child, nn.Module):
        child.__dict__.setdefault(_MARK, _open[-1])


def _mark_owner(owner: nn.Module, name: str, parameter: Any) -> None:
    owner.__dict__.setdefault(_MARK, _open[-1])
