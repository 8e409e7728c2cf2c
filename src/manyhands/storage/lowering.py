"""Rewrite a traced graph with operators that every installation of torch has and that check their arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def lower(module: fx.GraphModule) -> None:
    """Replace the operators of a traced graph that are in `REWRITES` by equivalent operators."""
    for node in list(module.graph.nodes):
        rewrite = REWRITES.get(str(node.target))
        if rewrite is not None:
            with module.graph.inserting_before(node):
                made = rewrite(module.graph, node)
            made.meta = {**node.meta, **made.meta}
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)


def _grouped_product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Multiply rows, which are sorted by expert, by their expert's matrix; `ends` has where each expert's rows end."""
    rows, weight, ends = node.args
    call = graph.call_function
    # The index of each row, on the same device.
    ones = call(aten.new_ones.default, (ends, [call(aten.sym_size.int, (rows, 0))]), {"dtype": torch.int64})
    number = call(aten.sub.Tensor, (call(aten.cumsum.default, (ones, 0)), 1))
    last = weight.meta["val"].shape[0] - 1 if isinstance(weight, fx.Node) else 0
    group = call(aten.bucketize.Tensor, (number, ends), {"right": True})
    own = call(aten.index_select.default, (weight, 0, call(aten.clamp.default, (group, 0, last))))
    return call(aten.squeeze.dim, (call(aten.bmm.default, (call(aten.unsqueeze.default, (rows, 1)), own)), 1))


def _weight_norm(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Compute a weight from norm and direction; the fused kernel divides by the number of rows, which may be zero."""
    direction, length, *rest = node.args
    dim = rest[0] if rest else node.kwargs.get("dim", 0)
    shape = direction.meta["val"].shape if isinstance(direction, fx.Node) else ()
    others = [i for i in range(len(shape)) if i != dim] if isinstance(dim, int) and dim >= 0 else None
    norm = graph.call_function(aten.linalg_vector_norm.default, (direction, 2, others, True))
    return graph.call_function(aten.mul.Tensor, (direction, graph.call_function(aten.div.Tensor, (length, norm))))


def _embedding_bag(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Compute sums, means or maxima of table rows; the fused kernel does not check offsets and their shape."""
    names = ("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
    given: dict[str, Any] = (
        dict(zip((*names, "include_last_offset", "padding_idx"), node.args, strict=False)) | node.kwargs
    )
    weight, indices, starts, mode = given["weight"], given["indices"], given["offsets"], given.get("mode", 0)
    call = graph.call_function
    if given.get("include_last_offset"):
        starts = call(aten.slice.Tensor, (starts, 0, 0, -1))
    ones = call(aten.ones_like.default, (indices,), {"dtype": torch.int64})
    place = call(aten.sub.Tensor, (call(aten.cumsum.default, (ones, 0)), 1))
    bag = call(aten.sub.Tensor, (call(aten.bucketize.Tensor, (place, starts), {"right": True}), 1))
    rows = call(aten.index_select.default, (weight, 0, indices))
    shape = [call(aten.sym_size.int, (starts, 0)), call(aten.sym_size.int, (weight, 1))]
    kept = call(aten.ones_like.default, (indices,), {"dtype": weight.meta["val"].dtype})
    padding = given.get("padding_idx")
    if padding is not None and padding >= 0:
        kept = call(aten.mul.Tensor, (kept, call(aten.ne.Scalar, (indices, padding))))
    if given.get("per_sample_weights") is not None:
        rows = call(aten.mul.Tensor, (rows, call(aten.unsqueeze.default, (given["per_sample_weights"], 1))))
    kept = call(aten.unsqueeze.default, (kept, 1))
    empty = call(aten.new_zeros.default, (weight, shape))
    if mode == 2:
        rows = call(aten.masked_fill.Scalar, (rows, call(aten.eq.Scalar, (kept, 0)), -math.inf))
        where = call(aten.expand_as.default, (call(aten.unsqueeze.default, (bag, 1)), rows))
        largest = call(aten.scatter_reduce.two, (empty, 0, where, rows, "amax"), {"include_self": False})
        summed = call(aten.masked_fill.Scalar, (largest, call(aten.eq.Scalar, (largest, -math.inf)), 0.0))
    else:
        summed = call(aten.index_add.default, (empty, 0, bag, call(aten.mul.Tensor, (rows, kept))))
    if mode == 1:
        none = call(aten.new_zeros.default, (weight, [shape[0], 1]))
        count = call(aten.index_add.default, (none, 0, bag, kept))
        summed = call(aten.div.Tensor, (summed, call(aten.clamp_min.default, (count, 1))))
    return summed


def _first_of(rewrite: Callable[[fx.Graph, fx.Node], fx.Node]) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    """Wrap a rewrite for an operator with several results of which only the first is used."""

    def rewritten(graph: fx.Graph, node: fx.Node) -> fx.Node:
        made = rewrite(graph, node)
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == 0:
                made.meta = dict(user.meta)
                user.replace_all_uses_with(made)
            if not user.users:
                graph.erase_node(user)
        return made

    return rewritten


REWRITES: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "aten._weight_norm.default": _weight_norm,
    "aten.embedding_bag.default": _first_of(_embedding_bag),
    "aten.embedding_bag.padding_idx": _first_of(_embedding_bag),
    "transformers.grouped_mm_fallback.default": _grouped_product,
}
"""Functions that rewrite an operator, by its name; the last one is called by mixture-of-experts of `transformers`."""
