"""Compile a step of stacked networks: forward, backward and update are traced as one graph and compiled as a whole.

The trace (make_fx) records the operations that run, so the network and its loss may use any code that can be captured
in a CUDA graph.
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
    """Raised if a step of stacked networks cannot be traced or compiled; the message says why."""


class Compiled:
    """Compiled steps of a program of stacked networks, one for every number of members and every batch size."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[Hashable, Step] = {}

    def close(self) -> None:
        """Drop the compiled steps, and end the compiler's worker processes if any step was compiled."""
        if self._made:
            self.forget()
            stop_compilers()

    def forget(self) -> None:
        """Drop the compiled steps, after settings that are constants in them have changed."""
        self._made.clear()

    def step(
        self, stack: Stack, batch: Any, ids: Tensor, factors: Sequence[dict[str, Tensor]], *, shared: bool
    ) -> Tensor:
        """Run `Program.step`, compiled at the first call, with the same arguments and result.

        Raises:
            CannotCompile: The step cannot be compiled; the stack is unchanged.
        """
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

        # Trace with copies, because tracing executes a step, which changes the tensors.
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
    """Return the first two lines of a compiler's error message, without its advice for debugging."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
