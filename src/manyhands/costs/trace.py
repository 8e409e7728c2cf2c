"""Cost tracing: finds the FLOPs, bytes and memory of a network without allocating its memory or computing anything.

The network and a batch consist of fake tensors. A piece is a block or layer of the network; pieces are of one kind if
their structure and the shapes of their inputs are equal. The first piece of a kind is traced, forward and backward. For
other pieces of that kind, only outputs with the right shapes are made. So tracing a network of a hundred equal blocks
takes as long as tracing one.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

from ..core import Mean, Task, TaskError
from ..distributed import culprit
from ..graph import Life, StorageWatch
from .network import Network, NetworkPart, PassCost

OWN_LINES = "(own lines and loss)"
"""The name of the piece that has the operations outside of the traced modules, such as those of the loss."""
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_ATEN = torch.ops.aten
_ATTENTION = {
    # torch has no FLOP formula for the CPU's attention, which computes the same as flash attention on GPUs.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_CAUSAL = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: 4,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: 7,
}
"""Attention operations, with the position of their argument `is_causal`."""
_GATHERS = (_ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward, _ATEN.gather)
"""Operations that read a few elements of their first input."""
_FILLS = (_ATEN.nll_loss_backward, _ATEN.nll_loss2d_backward)
"""Operations that write their whole output and read a few elements."""
_UNFUSED = (_ATEN.embedding, _ATEN.embedding_dense_backward, _ATEN.max_pool2d_with_indices)
_CONVOLUTIONS = {_ATEN.convolution: 1, _ATEN._convolution: 1, _ATEN.convolution_backward: 2}
"""Convolutions, with the position of their argument `weight`."""
_TWO_PASSES = (
    _ATEN.native_batch_norm,
    _ATEN.native_batch_norm_backward,
    _ATEN.native_group_norm,
    _ATEN.native_group_norm_backward,
    _ATEN.native_layer_norm_backward,
)
"""Operations that read their inputs twice: for sums over all rows, and for results that need these sums."""
_WIDE = {
    "softmax",
    "log_softmax",
    "layer_norm",
    "group_norm",
    "norm",
    "normalize",
    "pow",
    "exp",
    "log",
    "rsqrt",
    "reciprocal",
    "sum",
    "prod",
    "cumsum",
    "cosine_similarity",
    "softplus",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "kl_div",
    "nll_loss",
    "cross_entropy",
    "binary_cross_entropy_with_logits",
}
"""Functions that autocast computes in fp32 on GPUs; on CPUs it computes some of them in bf16."""


class _AsOnGpu(TorchFunctionMode):
    """Context in which CPU tensors are traced as a GPU would compute them, with attention as one fused operation.

    If `narrow` (bf16 autocast), functions that autocast computes in fp32 on GPUs are computed in fp32.
    """

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self._narrow = narrow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return _attention(func, args, kwargs)
        if self._narrow and name in _WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call attention so that it is traced as one operation: without dropout, and with one key head per query head."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
    if given.pop("enable_gqa", False):
        groups = given["query"].shape[-3] // given["key"].shape[-3]
        given |= {name: given[name].repeat_interleave(groups, -3) for name in ("key", "value")}
    tensors = [given.pop(name) for name in names[:3]]
    return func(*tensors, **given)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == torch.bfloat16 else leaf


class CannotTrace(TaskError):
    """Raised if a network cannot be traced with fake tensors; the message names the line of user code."""


def trace(task: Task, batch: Any, *, rows: int, precision: str = "fp32") -> Network:
    """Return the costs of one micro-batch, for each piece (block or layer) of the task's network.

    Args:
        task: The task; it must have a `loss`.
        batch: Any batch of the task's data; its first dimension is changed to `rows`.
        rows: Number of samples in the micro-batch.
        precision: "fp32" or "bf16" (autocast).

    Raises:
        CannotTrace: The network or the loss reads values of tensors, or the task has `step=`.

    >>> task = Task(
    ...     model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=torch.ones(2, 4),
    ... )
    >>> network = trace(task, torch.ones(2, 4), rows=16)
    >>> [piece.name for piece in network.pieces], network.pieces[0].forward.flops
    (['0', '1', '2', '(own lines and loss)'], 1024.0)
    """
    if task.loss is None:
        raise CannotTrace("a task with step= cannot be traced", remedy="its costs are measured instead")
    try:
        with alone(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = weightless(task.model, mode)
            return _Tracer(model, precision).network(task, _stretched(batch, rows), rows)
    except TaskError:
        raise
    except Exception as error:
        raise CannotTrace(
            "a network must be traceable with tensors that have shapes but no values",
            got=f"{type(error).__name__} at {culprit(error)}",
            remedy="whole steps are measured instead; change that line to plan the network piece by piece",
        ) from error


def pieces_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a network that are traced as a whole, by name.

    These are the blocks in containers of repeated blocks, and the modules beside such containers.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> list(pieces_of(nn.ModuleDict({"stem": nn.Linear(2, 2), "blocks": nn.ModuleList([block(), block()])})))
    ['stem', 'blocks.0', 'blocks.1']
    """
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        repeated = _is_repeating(module)
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            is_leaf = not any(True for _ in child.children())
            if is_leaf or (repeated and not isinstance(child, nn.ModuleList)) or not _has_blocks(child):
                found[path] = child
            else:
                walk(child, f"{path}.")

    walk(model, "")
    return found or {"": model}


def _is_repeating(module: nn.Module) -> bool:
    """Return whether a module is a container with repeated blocks: several children of one class, with children."""
    kinds = [type(child) for child in module.children() if any(True for _ in child.children())]
    return isinstance(module, _CONTAINERS) and len(kinds) > len(set(kinds))


def _is_block(model: nn.Module, name: str) -> bool:
    """Return whether a module is one of several blocks of one class in a container.

    recompute="blocks" recomputes such modules.
    """
    container, block = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
    kinds = [type(child) for child in container.children() if any(True for _ in child.children())]
    return isinstance(container, _CONTAINERS) and kinds.count(type(block)) > 1


def _has_blocks(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) or any(_is_repeating(inner) for inner in module.modules())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context in which a network is built for tracing: afterwards, the random state is as before.

    Gradients are enabled, and torch's log about fake tensors is off, because CannotTrace reports its errors.
    """
    state, was_disabled = torch.get_rng_state(), _LOG.disabled
    try:
        _LOG.disabled = True
        with torch.enable_grad():
            yield
    finally:
        _LOG.disabled = was_disabled
        torch.set_rng_state(state)


def weightless(make: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """Build a network of fake tensors, which take no memory.

    If its constructor reads values of tensors, the network is built with real tensors, which are then replaced.
    """
    try:
        return make()
    except Exception:
        with torch.utils._python_dispatch._disable_current_modes():
            model = make()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    fake = mode.from_tensor(parameter.detach())
                    module._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = mode.from_tensor(buffer)
        return model


def _stretched(batch: Any, rows: int) -> Any:
    """Return a batch of uninitialized tensors like those of `batch`, with `rows` rows."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim]
    there = tensors[0].shape[0] if tensors else 0

    def stretch(leaf: Any) -> Any:
        if not isinstance(leaf, (Tensor, np.ndarray)):
            return leaf
        kind = leaf.dtype if isinstance(leaf, Tensor) else torch.from_numpy(leaf[:0]).dtype
        shape = (rows, *leaf.shape[1:]) if leaf.ndim and leaf.shape[0] == there else tuple(leaf.shape)
        return torch.empty(shape, dtype=kind)

    return tree_map(stretch, batch)


class _CostCounter(StorageWatch):
    """Dispatch mode that counts the operations of a piece, their FLOPs and bytes, and the memory that they allocate."""

    def __init__(self, parameters: set[int], whole: tuple[int, ...] = ()) -> None:
        super().__init__({})
        self._whole = whole
        """The shape of the piece's first input. Under tensor parallelism, results of this shape are not sharded."""
        self._parameters = parameters
        self._is_paused = False
        self.works = [PassCost(), PassCost()]
        self.multiplied: set[int] = set()
        self._copies: dict[int, Tensor] = {}
        """Copies of parameters in another dtype, made by autocast; referenced here so that their keys stay unique."""
        self.saved: dict[int, StorageWeakRef] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._fusion = (_Fusion(), _Fusion())

    def has_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Register parameters, so that tensors of their shapes in backward count as gradients of fixed size."""
        for parameter in parameters:
            self._shapes |= {tuple(parameter.shape), tuple(parameter.shape[::-1])}

    def ends(self, tensors: Iterable[Any]) -> None:
        """Record that other pieces read these results, so that fused kernels must write them to memory."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._fusion[self._in_backward].need(self._name(tensor), nbytes(tensor))

    def work(self, *, backward: bool) -> PassCost:
        """Return the counted cost of backward if `backward` is true, else that of forward."""
        fusion = self._fusion[backward]
        return replace(self.works[backward], fused=fusion.moved, kernels=self.works[backward].products + fusion.kernels)

    def _name(self, tensor: Tensor) -> Any:
        """Return an identifier of a tensor's storage that is not reused; None if the piece did not allocate it."""
        known = self._made.get(key_of(tensor))
        return None if known is None else id(known[1])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        old = {key_of(tensor) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(key_of(tensor) in old for tensor in outputs)
        if outputs and not is_view and func._overloadpacket is not _ATEN.detach:
            self._count(func, args, kwargs or {}, result, inputs, outputs)
        return result

    def _count(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        packet = func._overloadpacket
        count = flop_registry.get(_ATTENTION.get(packet, packet))
        flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
        if packet in _CAUSAL and len(args) > _CAUSAL[packet] and args[_CAUSAL[packet]]:
            flops /= 2
        mine = [tensor for tensor in inputs if key_of(tensor) in self._parameters | self._copies.keys()]
        read, written = sum(map(nbytes, inputs)), sum(map(nbytes, outputs))
        fixed = sum(map(nbytes, mine))
        if self._in_backward:
            fixed += sum(nbytes(tensor) for tensor in [*inputs, *outputs] if tuple(tensor.shape) in self._shapes)
            fixed = min(fixed, read + written)
        if packet is _ATEN.embedding:
            read, fixed = written, 0  # only the used rows of a table are read
        if packet is _ATEN.embedding_dense_backward:
            read = written = nbytes(inputs[0])  # the table's gradient is counted with those of all parameters
            fixed = 0
        if packet in _GATHERS:
            read -= nbytes(inputs[0])
        if packet in _FILLS:
            read -= nbytes(outputs[0])
        again = max(0, read - fixed) if packet in _TWO_PASSES else 0
        moved = max(0, read + written - fixed) + again
        if packet is _ATEN._to_copy and mine:
            self._copies[key_of(outputs[0])] = outputs[0]
            moved, fixed = 0, fixed + nbytes(outputs[0])
        elif flops and mine and not self._in_backward:
            self.multiplied |= {key_of(tensor) for tensor in inputs} - self._parameters - self._copies.keys()
        is_whole = not flops and tuple(outputs[0].shape) == self._whole
        is_attention = packet in _ATTENTION
        depth = 0.0 if is_attention or not flops else _inner(flops, outputs[0])
        is_gradient = self._in_backward and tuple(outputs[0].shape) in self._shapes
        self._fuse(packet, flops, mine, inputs, outputs, moved)
        self._fusion[self._in_backward].moved += again
        work = PassCost(
            flops=flops,
            attention=flops if is_attention else 0.0,
            tf32=flops if flops and not is_attention and _is_tf32(packet, inputs) else 0.0,
            winograd=flops if packet in _CONVOLUTIONS and _is_winograd(packet, args) else 0.0,
            relaid=2 * moved if packet in _CONVOLUTIONS and not _is_channels_last(packet, args) else 0.0,
            fill=flops / depth if depth else 0.0,
            depth=depth,
            depth_scaled=depth if is_gradient else 0.0,
            moved=moved,
            product_moved=moved if flops else 0.0,
            product_fixed=fixed if flops else 0.0,
            unsharded=moved if is_whole else 0,
            fixed=fixed,
            operations=1,
            products=1 if flops else 0,
        )
        self.works[self._in_backward] = self.works[self._in_backward] + work

    def _fuse(
        self,
        packet: Any,
        flops: float,
        mine: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        moved: float,
    ) -> None:
        """Count the bytes that an operation moves if all operations between two matrix products run as one kernel."""
        fusion = self._fusion[self._in_backward]
        own = {id(tensor) for tensor in mine}
        sources = [] if packet in _FILLS else [tensor for tensor in inputs if id(tensor) not in own]
        if self._in_backward:
            sources = [tensor for tensor in sources if tuple(tensor.shape) not in self._shapes]
            outputs = [tensor for tensor in outputs if tuple(tensor.shape) not in self._shapes]
        names = [(self._name(tensor), int(tensor.storage_offset()), nbytes(tensor)) for tensor in sources]
        if flops or packet in _UNFUSED:
            for name, _, size in names:
                fusion.need(name, size)
            fusion.stop()
            if not flops:
                fusion.moved += moved
            return
        before = self._fusion[0] if self._in_backward else None
        results = [(self._name(tensor), tensor.numel(), nbytes(tensor)) for tensor in outputs]
        fusion.add(names, results, before, gathers=packet in _GATHERS)

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves for backward, and return it."""
        if not self._is_paused:
            self.saved |= _known([tensor])
        return tensor

    def drop_copies(self) -> int:
        """Exclude autocast's copies of parameters from the memory count; return the bytes of those for backward."""
        self.forget(list(self._copies.values()))
        return sum(size_of(copy) for key, copy in self._copies.items() if key in self.saved)

    def forget(self, tensors: Sequence[Any]) -> None:
        """Exclude the storages of tensors that are counted elsewhere from the memory count."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and key_of(tensor) in self._made:
                self._made[key_of(tensor)][1].size = 0


@dataclass
class _Result:
    """A result of a fused kernel."""

    epoch: int
    """Index of the kernel that computed it."""
    size: int
    """Its bytes."""
    again: int
    """Bytes to read from memory to compute it again."""
    is_written: bool = False
    """Whether a product, a later kernel or another piece needs it, so that the kernel writes it to memory."""


class _Fusion:
    """Count the bytes that operations move if all of them between two matrix products run as one kernel.

    A kernel writes a result only if a product, a later kernel or another piece reads it. Backward computes unwritten
    results of forward again, from those in memory. The bytes of the products themselves are not counted.
    """

    def __init__(self) -> None:
        self.moved = 0.0
        self.kernels = 0
        self._epoch = 0
        self._is_open = False
        self._results: dict[Any, _Result] = {}
        self._read: set[Any] = set()

    def stop(self) -> None:
        """Record a matrix product: later operations run in another fused kernel."""
        self._epoch += 1
        self._is_open = False
        self._read.clear()

    def need(self, name: Any, size: int) -> None:
        """Record that `size` bytes of a result are read from memory, so that its kernel must write them."""
        found = self._results.get(name)
        if found is not None and not found.is_written:
            found.is_written = True
            self.moved += min(size, found.size)

    def add(
        self,
        sources: Sequence[tuple[Any, int, int]],
        results: Sequence[tuple[Any, int, int]],
        before: _Fusion | None,
        *,
        gathers: bool,
    ) -> None:
        """Record an operation that is fused with its neighbours.

        Args:
            sources: Inputs: identifier, offset and bytes.
            results: Outputs: identifier, number of elements and bytes.
            before: In backward, the count of forward, whose results may be computed again.
            gathers: Whether the operation reads only a few elements of its first input.
        """
        if not self._is_open:
            self.kernels += 1
            self._is_open = True
        again = 0
        for index, (name, offset, size) in enumerate(sources):
            found = self._results.get(name)
            if gathers and index == 0:
                continue
            if found is not None and found.epoch == self._epoch:
                again += min(size, found.again)
                continue
            forward = before._results.get(name) if before is not None else None
            taken = size
            if forward is not None and not forward.is_written:
                taken = min(size, forward.again)
            elif found is not None:
                self.need(name, size)
            again += taken
            if (name, offset, size) not in self._read or name is None:
                self._read.add((name, offset, size))
                self.moved += taken
        for name, _, size in results:
            self._results[name] = _Result(self._epoch, size, min(again, size) if again else size)


@dataclass(frozen=True)
class _PieceCosts:
    """The traced costs and outputs of a kind of piece: modules of equal structure with inputs of equal shapes."""

    piece: NetworkPart
    outputs: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    """Shape, dtype and requires_grad of each output."""
    layout: Any
    """The pytree structure of the result."""
    saved_inputs: tuple[bool, ...]
    """For each input, whether autograd saves it for backward."""
    saved_output: bool
    """Whether autograd saves an output for backward."""
    passes_on: bool
    """Whether the piece must run each time: an output is an input or a view of one, or is not a tensor."""


class _Tracer:
    def __init__(self, model: nn.Module, precision: str) -> None:
        self._model = model
        self._parts = pieces_of(model)
        self._precision = precision
        self._parameters = {key_of(parameter) for parameter in model.parameters()}
        self._tables = {key_of(p) for table in _tables_of(model) for p in table.parameters()}
        self._outer = _CostCounter(self._parameters)
        self._outer.has_parameters(model.parameters())
        self._anchor = torch.zeros((), requires_grad=True)
        self._kinds: dict[Any, _PieceCosts] = {}
        self._met: list[tuple[str, Any, int]] = []
        self._needed: dict[int, StorageWeakRef] = {}
        self._alive: list[Tensor] = []

    def network(self, task: Task, batch: Any, rows: int) -> Network:
        """Run the loss and its backward once on fake tensors, and return the network's costs."""
        self._model.train()
        for name, module in self._parts.items():
            module.forward = self._instead(name, module.forward, module)
        with self._scope(), _AsOnGpu(narrow=self._precision == "bf16"), self._outer, _saving(self._outer):
            value = task.loss(self._model, batch)  # type: ignore[misc]
            loss = value.total if isinstance(value, Mean) else value
            self._outer.begin_backward()
            parameters = [p for p in self._model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss.sum(), [self._anchor, *parameters], allow_unused=True)
            self._outer.forget(gradients)
        self._needed |= self._outer.saved
        return Network(
            rows=rows,
            pieces=tuple(self._pieces()),
            precision=self._precision,
            state_bytes=state_bytes(task, self._model),
            input_bytes=sum(size_of(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)),
            buffer_bytes=sum(map(size_of, self._model.buffers())),
        )

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()

    def _instead(self, name: str, forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._outer.paused():
                leaves, _ = tree_flatten((args, kwargs))
                key = (str(module), tuple(map(_shape, module.parameters())), tuple(map(_shape, leaves)))
                if key not in self._kinds:
                    self._kinds[key] = self._measured(forward, module, args, kwargs)
                kind = self._kinds[key]
                tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                self._needed |= _known([t for t, saved in zip(tensors, kind.saved_inputs, strict=True) if saved])
                if kind.passes_on:
                    result = forward(*args, **kwargs)
                    self._met.append((name, key, 0))
                    return result
                outputs = _Stub.apply(  # type: ignore[no-untyped-call]
                    self._outer, kind.outputs, self._anchor, *tensors
                )
                self._alive += outputs
                self._met.append((name, key, key_of(outputs[0]) if outputs else 0))
                return tree_unflatten(list(outputs), kind.layout)

        return call

    def _measured(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> _PieceCosts:
        leaves, layout = tree_flatten((args, kwargs))
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        counter = _CostCounter(self._parameters, shapes[0] if shapes else ())
        # Clone the inputs, because a piece may change them in place, which autograd does not allow for leaf tensors.
        starts = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = [start.clone() for start in starts]
        copies_left = iter(tensors)
        inputs = [next(copies_left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = {key_of(tensor) for tensor in tensors}
        parameters = [p for p in module.parameters() if p.requires_grad]
        counter.has_parameters(parameters)
        asked: list[int] = []
        hooks = [t.register_forward_hook(lambda *of: asked.append(size_of(of[-1]))) for t in _tables_of(module)]
        with counter, _saving(counter):
            again_args, again_kwargs = tree_unflatten(inputs, layout)
            result = forward(*again_args, **again_kwargs)
            outputs, out_layout = tree_flatten(result)
            counter.ends(outputs)
            for hook in hooks:
                hook.remove()
            copies = counter.drop_copies()
            counter.begin_backward()
            kept = sum(life.size for life in counter.lives if life.is_kept)
            ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
            wanted = [t for t in [*starts, *parameters] if t.requires_grad]
            if ends and wanted:
                with counter.paused():
                    seeds = [torch.empty_like(t) for t in ends]
                gradients = torch.autograd.grad(ends, wanted, seeds, allow_unused=True)
                counter.ends(gradients[: len(wanted) - len(parameters)])
                counter.forget(gradients[len(wanted) - len(parameters) :])
        made = [t for t in outputs if isinstance(t, Tensor) and key_of(t) not in given]
        output = sum(size_of(t) for t in made)
        forward_peak, backward_peak = _peaks(counter.lives, kept)
        gradient_bytes = sum(map(size_of, parameters))
        backward = counter.work(backward=True)
        backward = replace(backward, fixed=backward.fixed + gradient_bytes, peak=backward_peak)
        piece = NetworkPart(
            name="",
            forward=replace(counter.work(backward=False), peak=forward_peak),
            backward=backward,
            kept=max(0.0, kept - output),
            copies=copies,
            output=output,
            products=len(counter.multiplied),
            touched=sum(asked),
        )
        return _PieceCosts(
            piece=piece,
            outputs=tuple((t.shape, t.dtype, t.requires_grad) for t in outputs if isinstance(t, Tensor)),
            layout=out_layout,
            saved_inputs=tuple(key_of(t) in counter.saved for t in tensors),
            saved_output=any(key_of(t) in counter.saved for t in made),
            passes_on=not made or len(made) < len([t for t in outputs if isinstance(t, Tensor)]) or _odd(outputs),
        )

    def _pieces(self) -> Iterator[NetworkPart]:
        seen: set[int] = set()
        for name, key, output in self._met:
            kind = self._kinds[key]
            is_kept = kind.saved_output or output in self._needed
            kept = kind.piece.kept + (kind.piece.output if is_kept else 0)
            own = _owned(self._parts[name].parameters(), seen, self._tables)
            yield replace(kind.piece, name=name, kept=kept, is_repeated=_is_block(self._model, name), **own)
        kept = sum(life.size for life in self._outer.lives if life.is_kept)
        forward_peak, backward_peak = _peaks(self._outer.lives, kept)
        yield NetworkPart(
            name=OWN_LINES,
            forward=replace(self._outer.work(backward=False), peak=forward_peak),
            backward=replace(self._outer.work(backward=True), peak=backward_peak),
            kept=kept,
            products=0,
            is_split=self._ends_with_classes(),
            **_owned(self._model.parameters(), seen, self._tables),
        )

    def _ends_with_classes(self) -> bool:
        """Return whether the network ends with a linear layer, whose classes stay sharded in cross-entropy."""
        return bool(self._met) and isinstance(self._parts[self._met[-1][0]], nn.Linear)


class _Stub(torch.autograd.Function):
    """Autograd function in place of a piece that was traced before: makes outputs and gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, counter: _CostCounter, outputs: Any, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.counter = counter
        ctx.shapes = [(t.shape, t.dtype) if t.is_floating_point() else None for t in inputs]
        made = tuple(torch.empty(shape, dtype=kind) for shape, kind, _ in outputs)
        ctx.mark_non_differentiable(*[t for t, (_, _, grad) in zip(made, outputs, strict=True) if not grad])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.counter.paused():
            shapes = [None if shape is None else torch.empty(shape[0], dtype=shape[1]) for shape in ctx.shapes]
            return None, None, None, *shapes


def _saving(counter: _CostCounter) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(counter.save, lambda tensor: tensor)


def _peaks(lives: Sequence[Life], kept: float) -> tuple[float, float]:
    """Return the peak bytes of forward, and those of backward beyond the `kept` bytes that forward keeps for it."""
    changes: dict[int, float] = {}
    turn = min((2 * life.born for life in lives if life.in_backward), default=math.inf)
    for life in lives:
        changes[2 * life.born] = changes.get(2 * life.born, 0.0) + life.size
        if life.died is not None:
            changes[2 * life.died - 1] = changes.get(2 * life.died - 1, 0.0) - life.size
    times = sorted(changes)
    sums = list(accumulate(changes[time] for time in times))
    forward = max((s for time, s in zip(times, sums, strict=True) if time < turn), default=0.0)
    backward = max((s for time, s in zip(times, sums, strict=True) if time >= turn), default=0.0)
    return forward, max(0.0, backward - kept)


def _tables_of(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if getattr(part, "rows_travel", False)]


def _owned(parameters: Iterator[nn.Parameter], seen: set[int], tables: set[int]) -> dict[str, Any]:
    """Return the fields of a NetworkPart about parameters, without parameters whose keys are in `seen`.

    Their keys are added to `seen`, so that a parameter that several pieces share is counted once. `tables` has the keys
    of embedding tables.
    """
    own = [p for p in parameters if key_of(p) not in seen]
    seen |= {key_of(p) for p in own}
    return {
        "params": sum(p.numel() for p in own),
        "param_bytes": sum(map(size_of, own)),
        "frozen_bytes": sum(size_of(p) for p in own if not p.requires_grad),
        "largest": max(map(size_of, own), default=0),
        "table_bytes": sum(size_of(p) for p in own if key_of(p) in tables),
    }


def state_bytes(task: Task, model: nn.Module) -> int:
    """Return the bytes of the optimizer state of a network of fake tensors, found by taking one step.

    If the optimizer reads values of tensors, the result is an estimate: two tensors per parameter.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        made: Any = task.make_optimizer(model)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizers = list(made.values()) if isinstance(made, Mapping) else [made]
        for optimizer in optimizers:
            optimizer.step()
        states = [value for optimizer in optimizers for value in tree_leaves(dict(optimizer.state))]
        return sum(size_of(value) for value in states if isinstance(value, Tensor))
    except Exception:
        # The optimizer reads values of tensors; most such optimizers keep two tensors per parameter.
        return 2 * sum(map(size_of, parameters))


def _known(tensors: Sequence[Tensor]) -> dict[int, StorageWeakRef]:
    """Return weak references to tensors' storages by key; a key is not reused while a reference exists."""
    return {key_of(t): StorageWeakRef(t.untyped_storage()) for t in tensors if t.layout is torch.strided}


def _odd(outputs: Sequence[Any]) -> bool:
    return any(not isinstance(leaf, Tensor) for leaf in outputs)


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)


def size_of(tensor: Tensor) -> int:
    """Return the bytes of all elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def nbytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor's elements take in memory; an expanded tensor takes less than its shape says."""
    if tensor.layout is not torch.strided:
        return size_of(tensor)
    return min(size_of(tensor), tensor.untyped_storage().nbytes())


def _is_tf32(packet: Any, inputs: Sequence[Tensor]) -> bool:
    """Return whether PyTorch's settings in this process allow tensor cores to compute a product in TF32."""
    if any(tensor.dtype != torch.float32 for tensor in inputs):
        return False
    if packet in _CONVOLUTIONS:
        return torch.backends.cudnn.allow_tf32
    return torch.get_float32_matmul_precision() != "highest"


def _is_winograd(packet: Any, args: Sequence[Any]) -> bool:
    """Return whether a convolution is 3x3, with neither strides, gaps nor groups."""
    position = _CONVOLUTIONS[packet]
    stride, _, dilation = args[position + 2 : position + 5]
    size = tuple(args[position].shape[2:])
    return size == (3, 3) and {*stride, *dilation, args[position + 7]} == {1}


def _is_channels_last(packet: Any, args: Sequence[Any]) -> bool:
    """Return whether the weight of a convolution, and so its results, has the layout that tensor cores need."""
    return suggest_memory_format(args[_CONVOLUTIONS[packet]]) is not torch.contiguous_format


def _inner(flops: float, output: Tensor) -> float:
    """Return the length of the inner dimension of a matrix product with these FLOPs and this output."""
    return max(1.0, flops / 2 / max(1, output.numel()))


def key_of(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage; 0 for a sparse tensor, which has none."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
