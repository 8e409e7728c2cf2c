"""Operators without a sharding strategy in torch, such as backwards of rare activations, run on whole tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding

_MISSING = re.compile(r"Operator (\w+\.\w+\.\w+) does not have a sharding strategy registered")
registered: set[str] = set()
"""Operators that run on whole tensors in this process."""


def missing_operator(error: Exception) -> str:
    """Return the operator that an error names, if it can run on whole tensors instead; else an empty string.

    An operator that changes its inputs or draws random numbers cannot.

    >>> text = "Operator aten.special_airy_ai.default does not have a sharding strategy registered."
    >>> missing_operator(NotImplementedError(text))
    'aten.special_airy_ai.default'
    """
    found = _MISSING.search(str(error))
    if found is None or found[1] in registered:
        return ""
    operator = _operator(found[1])
    is_changed = operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags
    return "" if is_changed else found[1]


def run_whole(names: Iterable[str]) -> None:
    """Let operators run on whole tensors on every rank: torch gathers sharded inputs first."""
    for name in set(names) - registered:
        operator = _operator(name)
        outputs = [Replicate() if "Tensor" in str(result.type) else None for result in operator._schema.returns]

        def whole(*args: Any, outputs: list[Any] = outputs, **kwargs: Any) -> Any:
            inputs = [Replicate() if isinstance(arg, DTensorSpec) else None for arg in (*args, *kwargs.values())]
            return [(outputs, inputs)]

        register_sharding(operator)(whole)
        # Only now: a process that is forked in between registers it again.
        registered.add(name)


def _operator(name: str) -> Any:
    namespace, operation, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operation), overload)
