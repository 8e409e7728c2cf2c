"""Layers: how several ranks compute a layer of each kind, each with a shard of its parameters.

The layer's own forward runs on this rank's local tensors; the classes here convert its inputs and outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from .axis import WHOLE, Axis, in_tensors, is_sharded
from .glue import OF_LAYER, SECTIONS

Call = Callable[..., Any]


class LayerSplit(ABC):
    """A way of computing a layer on several ranks."""

    name: ClassVar[str]
    is_sharded = True
    """Whether ranks hold shards of the layer's parameters."""

    def __init__(self, layer: nn.Module) -> None:
        self.sections: Sequence[int] | None = None
        """Sizes of the output sections that are sharded separately, such as queries, keys and values."""
        self.spreads = False
        """Whether a result that is a sum over the ranks may stay sharded along dim 1."""

    @abstractmethod
    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return how the layer's parameters and buffers are sharded; those not named are replicated."""

    def sections_of(self, layer: nn.Module) -> dict[str, Sequence[int]]:
        """Return the sections along the sharded dim, for parameters that are sharded section by section."""
        return dict.fromkeys(self.placements(layer), self.sections) if self.sections else {}

    @abstractmethod
    def run(self, axis: Axis, layer: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer's result; `call` is its own forward."""

    def target(self, axis: Axis, result: Tensor) -> Placement:
        """Return the placement of a result that is a sum over the ranks: sharded or replicated."""
        spreads = self.spreads and result.dim() == 3 and result.shape[1] % axis.size == 0
        return Shard(1) if spreads else WHOLE


class ColumnParallel(LayerSplit):
    """A matrix product of which each rank computes some output features."""

    name = "column"

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(_dims(layer)[1]), "bias": Shard(0)}

    def run(self, axis: Axis, layer: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        dim = _channel_dim(layer)
        with _holding(axis, layer), _narrow(layer):
            local = call(axis.whole(args[0], sums_gradient=True), *args[1:], **kwargs)
        result = axis.sharded(local, dim, _width(layer))
        if self.sections:
            setattr(result, SECTIONS, self.sections)
        elif dim == -1:
            setattr(result, OF_LAYER, layer)
        return result


class RowParallel(LayerSplit):
    """A matrix product of which each rank reads some input features; the results are summed."""

    name = "row"

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(_dims(layer)[0])}

    def run(self, axis: Axis, layer: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        # Each rank adds its share of the bias, so that the sum contains it once.
        bias = layer._parameters.get("bias")
        shares = {} if bias is None else {"bias": axis.local(bias, sums_gradient=True) / axis.size}
        with _holding(axis, layer, shares):
            local = call(axis.part(args[0], _channel_dim(layer)), *args[1:], **kwargs)
        return axis.summed(local, self.target(axis, local))


class Channels(LayerSplit):
    """A layer that works on every channel, or group of channels, independently."""

    name = "channels"

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), Shard(0))

    def run(self, axis: Axis, layer: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
        dim = _channel_dim(layer) if isinstance(layer, _ConvNd) else 1
        counts = {name: getattr(layer, name) for name in ("groups", "num_groups") if hasattr(layer, name)}
        try:
            for name, count in counts.items():
                setattr(layer, name, count // axis.size)
            with _holding(axis, layer):
                local = call(axis.part(args[0], dim), *args[1:], **kwargs)
        finally:
            for name, count in counts.items():
                setattr(layer, name, count)
        return axis.sharded(local, dim, args[0].shape[dim] if not isinstance(layer, _ConvNd) else layer.out_channels)


class Vocabulary(LayerSplit):
    """An embedding of which each rank holds some rows; `Glue.embedding` looks them up."""

    name = "vocabulary"

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(0)}

    def run(self, axis: Axis, layer: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
        # The layer's own forward may scale the rows, or look up other rows than its input names.
        return call(*args, **kwargs)


class Norm(LayerSplit):
    """A norm over the last dim; inputs sharded by sample or token stay sharded during the computation."""

    name, is_sharded = "sequence", False

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        return {}

    def run(self, axis: Axis, layer: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        inputs = args[0]
        if not is_sharded(inputs, 1) or inputs.dim() != 3:
            return Replicated.run_whole(axis, layer, call, *args, **kwargs)
        shares = {n: axis.local(p, sums_gradient=True) for n, p in layer._parameters.items() if p is not None}
        with _holding(axis, layer, shares):
            local = call(inputs.to_local(), *args[1:], **kwargs)
        # The following layers need the whole result, usually several times.
        return axis.sharded(local, 1, inputs.shape[1]).redistribute(placements=[WHOLE])


class Replicated(LayerSplit):
    """A layer that every rank computes completely."""

    name, is_sharded = "replicate", False

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        return {}

    def run(self, axis: Axis, layer: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        return self.run_whole(axis, layer, call, *args, **kwargs)

    @staticmethod
    def run_whole(axis: Axis, layer: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer with whole inputs, parameters and results on every rank."""
        with _holding_all(axis, layer):
            result = call(*in_tensors(axis.whole, args), **in_tensors(axis.whole, kwargs))
        return in_tensors(lambda t: axis.as_parted(t) if t.is_floating_point() else t, result)


def ways_for(layer: nn.Module, inputs: Any, axis: Axis) -> LayerSplit | None:
    """Return how to compute a layer with these inputs; None for a module of the user that is not a known layer."""
    if is_parametrized(layer) or _has_computed_weight(layer):
        # Tensors that the weight is computed from, such as spectral norm's vectors, belong to the whole weight.
        return Replicated(layer)
    if isinstance(layer, _BY_PARTS) and not is_as_in_torch(layer):
        # A custom forward may read all channels, or use other parameters.
        return Replicated(layer)
    if _is_matrix(layer):
        if is_sharded(inputs, _channel_dim(layer)) and _fits(_breadth(layer), axis):
            return RowParallel(layer)
        return ColumnParallel(layer) if _fits(_width(layer), axis) else Replicated(layer)
    if isinstance(layer, _ConvNd):
        divides = layer.groups % axis.size == 0 and not isinstance(layer, _ConvTransposeNd)
        return Channels(layer) if is_sharded(inputs, _channel_dim(layer)) and divides else Replicated(layer)
    if isinstance(layer, nn.Embedding):
        odd = layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
        is_table = layer.num_embeddings >= max(layer.embedding_dim, axis.size) and not odd
        return Vocabulary(layer) if is_table else Replicated(layer)
    if isinstance(layer, _NormBase):
        return Channels(layer) if is_sharded(inputs, 1) else Replicated(layer)
    if isinstance(layer, nn.GroupNorm):
        divides = layer.num_groups % axis.size == 0
        return Channels(layer) if is_sharded(inputs, 1) and divides else Replicated(layer)
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return Norm(layer) if _is_norm_of_one_dim(layer) else Replicated(layer)
    return Replicated(layer) if isinstance(layer, (nn.RNNBase, nn.Bilinear)) else None


_BY_PARTS = (_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""torch's layers that are computed on shards of their channels or tokens."""


def is_as_in_torch(layer: nn.Module) -> bool:
    """Return whether a layer runs torch's own forward, which the parallel versions are written for."""
    found = (getattr(type(layer), name, None) for name in ("forward", "_conv_forward"))
    return all(function is None or function.__module__.startswith("torch.") for function in found)


def _has_computed_weight(layer: nn.Module) -> bool:
    """Return whether a hook computes the weight before every call, as torch.nn.utils.weight_norm does."""
    return isinstance(getattr(layer, "weight", None), Tensor) and "weight" not in layer._parameters


def can_be(name: str, layer: nn.Module) -> bool:
    """Return whether a layer can be computed in the way of this name, which the user requested."""
    if name in (ColumnParallel.name, RowParallel.name):
        return _is_matrix(layer)
    if name == Norm.name:
        return _is_norm_of_one_dim(layer)
    return name == Replicated.name or (name == Vocabulary.name and isinstance(layer, nn.Embedding))


def way_named(name: str, layer: nn.Module) -> LayerSplit:
    """Return the `LayerSplit` of this name."""
    return {way.name: way for way in (ColumnParallel, RowParallel, Vocabulary, Norm, Replicated)}[name](layer)


@contextmanager
def _holding(axis: Axis, layer: nn.Module, instead: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Replace a layer's DTensors by this rank's local tensors inside this context."""
    own: list[dict[str, Any]] = [layer._parameters, layer._buffers]
    held = [dict(tensors) for tensors in own]
    try:
        for tensors in own:
            for name, tensor in tensors.items():
                if isinstance(tensor, DTensor):
                    tensors[name] = instead[name] if instead and name in instead else axis.local(tensor)
        yield
    finally:
        for tensors, before in zip(own, held, strict=True):
            tensors.update(before)


@contextmanager
def _holding_all(axis: Axis, module: nn.Module) -> Iterator[None]:
    """Replace the parameters of a module and its submodules by whole plain tensors inside this context."""
    owners: list[dict[str, Any]] = [own for part in module.modules() for own in (part._parameters, part._buffers)]
    held = [(own, name, tensor) for own in owners for name, tensor in own.items() if isinstance(tensor, DTensor)]
    same = {id(tensor): axis.whole(tensor) for _, _, tensor in held}
    try:
        for own, name, tensor in held:
            own[name] = same[id(tensor)]
        yield
    finally:
        for own, name, tensor in held:
            own[name] = tensor


@contextmanager
def _narrow(layer: Any) -> Iterator[None]:
    """Adjust the number of output features that GPT-2's Conv1D stores, inside this context."""
    if not _is_conv1d(layer):
        yield
        return
    width, layer.nf = layer.nf, layer.weight.shape[1]
    try:
        yield
    finally:
        layer.nf = width


def _is_matrix(layer: Any) -> bool:
    """Return whether a layer's matrix can be sharded both ways: Linear, ungrouped convolutions, GPT-2's Conv1D."""
    if isinstance(layer, nn.Linear):
        return type(layer).forward is nn.Linear.forward
    if isinstance(layer, _ConvNd):
        return layer.groups == 1
    return _is_conv1d(layer)


def _is_conv1d(layer: Any) -> bool:
    """Return whether a layer is the Conv1D of GPT-2 in the transformers library."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _dims(layer: nn.Module) -> tuple[int, int]:
    """Return the dims of a layer's weight for its inputs and its outputs."""
    return (0, 1) if _is_conv1d(layer) or isinstance(layer, _ConvTransposeNd) else (1, 0)


def _width(layer: Any) -> int:
    """Return the number of output features or channels."""
    return int(layer.out_channels if isinstance(layer, _ConvNd) else layer.weight.shape[_dims(layer)[1]])


def _breadth(layer: Any) -> int:
    """Return the number of input features or channels."""
    return int(layer.weight.shape[_dims(layer)[0]])


def _channel_dim(layer: Any) -> int:
    return -len(layer.kernel_size) - 1 if isinstance(layer, _ConvNd) else -1


def _fits(count: int, axis: Axis) -> bool:
    """Return whether every rank gets at least one of `count` features or channels."""
    return count > (axis.size - 1) * -(-count // axis.size)


def _is_norm_of_one_dim(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and len(layer.normalized_shape) == 1


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a custom norm, with a forward of its own."""
    kinds = (nn.LayerNorm, nn.RMSNorm, _NormBase, nn.GroupNorm)
    return "Norm" in type(module).__name__ and not isinstance(module, kinds)


def gathered(result: Any) -> Any:
    """Gather what is sharded along dim 1."""
    return in_tensors(lambda t: t.redistribute(placements=[WHOLE]) if is_sharded(t, 1) and t.dim() == 3 else t, result)
