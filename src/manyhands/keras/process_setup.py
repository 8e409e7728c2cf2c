"""Find a script's replicas: those of its launch or cluster, or one per local device by restarting the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from keras.src.backend.torch import core as keras_torch

from ..core import DeviceError
from ..distributed import current_world, resolve
from ..launcher import whole_host
from ..training import Hand, hand, joined_world


def hand_of_all(devices: Sequence[str] | str | None, name: str) -> Hand:
    """Return the `Hand` (handle) of this process's replica on `devices`.

    A script that runs as one process although there are several devices is restarted by `manyhands launch`, with one
    process per device. Messages about that begin with `name`, the name of the strategy.
    """
    on = named(devices)
    if devices is not None:
        _require_one_choice(str(on))
    if current_world() is None:
        if whole_host(on) is not None:
            _start_again(on, name, "every device of this host")
        elif joined_world(on) is None:
            found, _ = resolve(on)
            if len(found) > 1:
                _start_again(on, name, ", ".join(map(str, found)))
    return settled(hand(on))


_chosen: list[str] = []
"""Devices that the first strategy of this program has named, if the program is one of several ranks."""


def _require_one_choice(on: str) -> None:
    """Raise DeviceError if `on` differs from the devices of an earlier strategy, whose replicas already exist."""
    world = current_world()
    if world is None or world.size == 1:
        return
    if not _chosen:
        _chosen.append(on)
    if on != _chosen[0]:
        raise DeviceError(
            "all strategies of a program must have the same replicas",
            got=f"{on} after {_chosen[0]}",
            remedy="choose one set of devices, use OneDeviceStrategy for training on one device, or write two programs",
        )


def settled(hand: Hand) -> Hand:
    """Make the device of `hand` Keras' default in all threads, also after `clear_session`, and return `hand`."""
    keras_torch.DEFAULT_DEVICE = str(hand.device)
    return hand


def named(devices: Sequence[str] | str | None) -> str | None:
    """Return TensorFlow's device names in manyhands' notation; the value of MANYHANDS_ON if `devices` is None.

    >>> named(["/gpu:0", "GPU:1"]), named(["cpu:0", "cpu:1"]), named("cpu*2")
    ('cuda:0,1', 'cpu*2', 'cpu*2')
    """
    if devices is None:
        return os.environ.get("MANYHANDS_ON") or None
    if isinstance(devices, str):
        return devices
    kinds, numbers = zip(*(_kind_and_number(text) for text in devices), strict=True) if devices else ((), ())
    if len(set(kinds)) != 1:
        raise DeviceError(
            "all devices of a strategy must be of one type",
            got=repr(list(devices)),
            remedy='write for example ["gpu:0", "gpu:1"]',
        )
    return f"cpu*{len(devices)}" if kinds[0] == "cpu" else f"{kinds[0]}:{','.join(numbers)}"


def _kind_and_number(text: str) -> tuple[str, str]:
    last = text.lower().removeprefix("/").replace("device:", "").rpartition("/")[2]
    kind, _, number = last.partition(":")
    return {"gpu": "cuda"}.get(kind, kind), number or "0"


def _start_again(on: str | None, name: str, where: str) -> None:
    """Replace this process by `manyhands launch SCRIPT`; if the program is not a script file, only print a message."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or getattr(sys.modules["__main__"], "__spec__", None) is not None:
        print(
            f"{name}: this program is not a script file that can be restarted on {where}, so it has one replica; "
            "write it to a file, or use manyhands launch",
            file=sys.stderr,
        )
        return
    print(f"{name}: restarting {Path(script).name} on {where}, one replica each", file=sys.stderr, flush=True)
    sys.stdout.flush()
    chosen = [] if on is None else ["--on", on]
    command = [sys.executable, "-m", "manyhands", "launch", *chosen, script, "--", *sys.argv[1:]]
    os.execv(sys.executable, command)
