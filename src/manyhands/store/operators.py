"""Which operators a stored program may name: those that compute, none that reach files or code.

The only file that reads torch's private parts: an operator's schema has no public form.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from ..core import ArchiveError

ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "neg",
    "pow",
    "and_",
    "or_",
    "not_",
    "getitem",
)
COMPARISONS = ("lt", "le", "eq", "ne", "ge", "gt")
PYTHON: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (*ARITHMETIC, *COMPARISONS)},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_ite", "sym_sum")
        if hasattr(torch, name)
    },
}
"""Arithmetic on sizes and the choice of one of several outputs."""

UNDERSCORED = re.compile(
    r"__(and|or|xor|lshift|rshift)__"
    r"|_(softmax|log_softmax|masked_softmax|to_copy|reshape_alias|unsafe_view"
    r"|weight_norm|weight_norm_interface|convolution|convolution_mode|prelu_kernel|conj|neg_view|stack"
    r"|scaled_dot_product_\w+|native_batch_norm_legit\w*|batch_norm_\w+|adaptive_avg_pool[23]d"
    r"|cdist_forward|euclidean_dist|trilinear|embedding_bag|embedding_bag_forward_only"
    r"|transformer_encoder_layer_fwd|native_multi_head_attention|pack_padded_sequence|pad_packed_sequence"
    r"|fft_\w+|linalg_\w+|upsample_\w+|scaled_mm|grouped_mm|int_mm|weight_int[48]pack_mm\w*"
    r"|assert_scalar|assert_async|assert_tensor_metadata|local_scalar_dense)"
)
"""Private operators that ordinary networks are traced to; the rest of them are refused."""

REFUSED = re.compile(
    r"set_?|set_data|data|resize\w*|as_strided_|.*_out|requires_grad_|backward|grad|segment_reduce\w*|fbgemm\w*"
    r"|empty\w*|new_empty\w*"
)
"""Operators that swap or enlarge a tensor's memory, read it unwritten or unchecked, or belong to autograd."""

TEXTS = frozenset(
    (
        *("approximate", "rounding_mode", "reduce", "padding", "mode", "norm", "equation", "indexing", "side"),
        *("interpolation", "pad_mode", "padding_side", "UPLO", "driver", "ord", "p", "assert_msg", "activation"),
    )
)
"""Arguments that may be texts; a file name is not among them."""

PORTABLE = {"aten.view.default": "aten.reshape.default"}
"""What a trace names after the strides of its own device; another's may lay results out otherwise."""

FOREIGN_TYPES = re.compile(r"\b(Storage|Stream|Any|AnyEnumType|Dict|Future|RRef|Capsule|Quantizer|__torch__)\b|\bt\b")
NAME = re.compile(r"(aten|prims)\.([A-Za-z_]\w{0,99})\.([A-Za-z_]\w{0,99})", re.ASCII)


def name_of(target: object) -> str:
    """The stored name of a traced operator, or an error when programs may not use it."""
    for name, function in PYTHON.items():
        if function is target:
            return name
    name = PORTABLE.get(str(target), str(target))
    named(name)
    return name


@functools.cache
def named(name: str) -> Callable[..., Any]:
    """The operator of this name, or an error when programs may not use it."""
    if name in PYTHON:
        return PYTHON[name]
    match = NAME.fullmatch(name)
    if match is None:
        raise _refused(name, "is not of aten, prims or arithmetic")
    _require_plain_name(name, match[2])
    found = getattr(getattr(getattr(torch.ops, match[1]), match[2], None), match[3], None)
    if not isinstance(found, torch._ops.OpOverload) or str(found) != name:
        raise _refused(name, f"is not in torch {torch.__version__}")
    _require_plain_schema(name, found)
    return found


def arguments(function: Callable[..., Any]) -> list[tuple[str, bool]] | None:
    """Names of an operator's arguments and whether each may be a text; None for arithmetic."""
    if not isinstance(function, torch._ops.OpOverload):
        return None
    return [(argument.name, "str" in str(argument.type)) for argument in function._schema.arguments]


def _require_plain_name(name: str, operator_name: str) -> None:
    if operator_name.startswith("_") and not UNDERSCORED.fullmatch(operator_name):
        raise _refused(name, "is private")
    if REFUSED.fullmatch(operator_name):
        raise _refused(name, "changes a tensor's memory")


def _require_plain_schema(name: str, found: torch._ops.OpOverload[..., Any]) -> None:
    schema = found._schema
    # torch.ops also reaches TorchScript's own operators, some of which open files.
    if not torch._C._dispatch_has_kernel(found._name) and found._name not in _dispatched():
        raise _refused(name, "is not a tensor operator")
    for argument in schema.arguments:
        kind = str(argument.type)
        if FOREIGN_TYPES.search(kind) or ("str" in kind and argument.name not in TEXTS):
            raise _refused(name, f"takes {argument.name}: {kind}")


@functools.cache
def _dispatched() -> frozenset[str]:
    listing = getattr(torch._C, "_dispatch_get_all_op_names", list)
    return frozenset(listing())


def _refused(name: str, why: str) -> ArchiveError:
    return ArchiveError(
        "a program is made of tensor operators",
        got=f"{name[:120]!r}, which {why}",
        remedy="export a model without it",
    )
