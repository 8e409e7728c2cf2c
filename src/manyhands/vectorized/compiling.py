"""Compile a stacked step: forward, backward and update are traced as one graph and compiled as a whole.

The trace records the operations that run, so the network, its loss and layout-free randomness may use any code that can
be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..capture import stop_compilers
from .program import Program
from .stack import Stack

BACKEND = "inductor"
Step = Callable[[list[Tensor], list[Any], Tensor], Tensor]


class CannotCompile(Exception):
    """Raised when the step cannot be compiled; the message says why."""


class Compiled:
    """Compiled steps of a program, one for every number of members and batch size."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[Hashable, Step] = {}

    def close(self) -> None:
        """End the compiler's worker processes."""
        if self._made:
            self.forget()
            stop_compilers()

    def forget(self) -> None:
        """Drop compiled steps, because settings built into them have changed."""
        self._made.clear()

    def step(
        self, stack: Stack, batch: Any, ids: Tensor, factors: Sequence[dict[str, Tensor]], *, shared: bool
    ) -> Tensor:
        """Run `Program.step` as a compiled step; the first call compiles it and changes nothing if that fails."""
        leaves, shape = pytree.tree_flatten((batch, list(factors)))
        key = (ids.shape, shared, self._program.unfolds)
        tensors = list(stack.tensors.values())
        if key not in self._made:
            self._made[key] = self._compile(stack, leaves, shape, ids, shared)
        try:
            return self._made[key](tensors, leaves, ids)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx")):
                raise
            del self._made[key]
            raise CannotCompile(_first_line(error)) from error

    def _compile(self, stack: Stack, leaves: list[Any], shape: Any, ids: Tensor, shared: bool) -> Step:
        names = list(stack.tensors)

        def run(tensors: list[Tensor], leaves: list[Any], ids: Tensor) -> Tensor:
            held = Stack(dict(zip(names, tensors, strict=True)))
            batch, factors = pytree.tree_unflatten(leaves, shape)
            return self._program.step(held, batch, ids, factors, shared=shared)

        # Tracing executes a step, so it gets copies to modify.
        copies = [tensor.clone() for tensor in stack.tensors.values()]
        try:
            with torch.autograd.set_multithreading_enabled(False):
                traced = make_fx(run)(copies, leaves, ids)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotCompile(_first_line(error)) from error
        return torch.compile(traced, fullgraph=True, dynamic=False, backend=BACKEND)


def _first_line(error: Exception) -> str:
    """Return a compiler's error message without its debugging advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
