"""Compute all members of an ensemble in one process: stacked (vmap), one after another, or on several devices."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Predict = Callable[..., Any]
Named = Callable[[Any], dict[str, Tensor]]
TRIES = 5
"""Number of runs of which the fastest counts when stacked and separate computation are compared."""


class StackedMembers(nn.Module):
    """Module that computes all members of an ensemble on the same inputs.

    Its outputs are a dict of tensors by output, with the dimensions member and row first.

    Args:
        models: The members' networks.
        predicts: The predict function of each member.
        named: Converts what a predict function returns to a dict of tensors by output.
    """

    def __init__(self, models: Sequence[nn.Module], predicts: Sequence[Predict], named: Named) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self._predicts, self._named = list(predicts), named
        self._stack: tuple[nn.Module, dict[str, Tensor]] | None = None
        self._devices: list[torch.device] | None = None

    def place(self, devices: Sequence[torch.device]) -> None:
        """Put a copy of every member on one of `devices`, in turn; outputs are copied to the device of the inputs."""
        self._devices = [devices[number % len(devices)] for number in range(len(self.models))]
        placed = zip(self.models, self._devices, strict=True)
        self.models = nn.ModuleList(copy.deepcopy(model).to(device) for model, device in placed)

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the predictions of all members, computed one after another, each on its device."""
        home = inputs[0].device
        found = []
        for number, (model, predict) in enumerate(zip(self.models, self._predicts, strict=True)):
            there = inputs if self._devices is None else [one.to(self._devices[number]) for one in inputs]
            found.append(self._named(predict(model, *there)))
        return {name: torch.stack([one[name].to(home) for one in found]) for name in found[0]}

    @torch.no_grad()
    def answer(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the predictions of all members, by the stacked program if `settle` has found that it is faster."""
        if self._stack is None:
            return self(*inputs)  # type: ignore[no-any-return]
        return self._stacked(*inputs)

    @torch.no_grad()
    def settle(self, example: Sequence[Tensor]) -> bool:
        """Use one stacked program (vmap) for all members, if its results on `example` are equal and it is faster.

        Return whether it is used.
        """
        if len(set(self._devices or ())) > 1 or not self._alike():
            return False
        self._stack = self.stacked_parts()
        try:
            plain, stacked = self(*example), self._stacked(*example)
            alike = all(torch.allclose(plain[name], stacked[name], rtol=1e-5, atol=1e-6) for name in plain)
            if alike and _seconds(self._stacked, example) < _seconds(self, example):
                return True
        except Exception:  # some operations have no vmap rule
            pass
        self._stack = None
        return False

    def stacked_parts(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the first member's network on the meta device, and the tensors of all members, stacked, by name."""
        base = copy.deepcopy(self.models[0]).to("meta")
        tensors = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in self.models]
        return base, {name: torch.stack([one[name].detach() for one in tensors]) for name in tensors[0]}

    def _stacked(self, *inputs: Tensor) -> dict[str, Tensor]:
        assert self._stack is not None
        base, tensors = self._stack
        there = inputs if self._devices is None else [one.to(self._devices[0]) for one in inputs]

        def one(own: dict[str, Tensor]) -> dict[str, Tensor]:
            def call(*args: Any) -> Any:
                return torch.func.functional_call(base, own, args)

            return self._named(self._predicts[0](call, *there))

        found: dict[str, Tensor] = torch.func.vmap(one, randomness="error")(tensors)
        return {name: answer.to(inputs[0].device) for name, answer in found.items()}

    def _alike(self) -> bool:
        """Return whether all members have layers that print equally, and tensors of the same names and shapes."""
        first = self.models[0]
        shapes = [[(name, t.shape, t.dtype) for name, t in model.state_dict().items()] for model in self.models]
        return all(shape == shapes[0] for shape in shapes) and all(str(model) == str(first) for model in self.models)


def _seconds(call: Callable[..., Any], example: Sequence[Tensor]) -> float:
    """Return the seconds of the fastest of several calls with the tensors of `example`."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call(*example)
        if example[0].device.type == "cuda":
            torch.cuda.synchronize(example[0].device)
        times.append(time.perf_counter() - began)
    return min(times)
