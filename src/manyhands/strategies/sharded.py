"""Sharded strategy: every rank holds a shard of each parameter, of its gradient and of its optimizer state.

torch's `fully_shard` shards and gathers along the inner axis; this module handles the outer replica axis and its
synchronization policy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..core import DATA_AXES, Mean, StrategyError, StrategySpec
from ..distributed import World, culprit
from ..sync import Agreement, BucketExchange, Local, PolicyState, average, make_policy, report_policy
from .batch_stats import BatchStats
from .by_block import SameBlocks
from .deferred import Take
from .local_sgd import common_slots
from .local_updates import own_part, parted
from .mirrored import hash_of, require_dense
from .recompute import CONTAINERS, blocks_of
from .replica import Replica

# torch logs that collectives along two axes run as two operations; the user cannot act on that message.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shard(model: nn.Module, spec: StrategySpec, world: World, *, apart: bool = False, compares: bool = False) -> None:
    """Shard a network over the ranks of its group, block by block, so that few parameters are gathered at a time.

    Args:
        apart: Shard each callable submodule as a separate root. Used with several optimizers, where the submodules
            are called one by one and each gathers its own parameters.
        compares: Let the ranks check that they run the same blocks.
    """
    if isinstance(model, CONTAINERS) and not apart:
        raise StrategyError(
            "a network must have a forward method",
            got=type(model).__name__,
            remedy="wrap it in an nn.Module whose forward calls its layers",
        )
    require_dense(model)
    mesh = world.mesh(spec.axes)["shards"]
    again = spec.sharding == "full"
    _make_contiguous(model)
    # Scalars and empty parameters cannot be sharded: every rank keeps a copy.
    numbers = {parameter for parameter in nn.Module.parameters(model) if parameter.dim() == 0 or not parameter.numel()}
    roots = list(_called(model)) if apart else [model]
    _require_own(model, roots)
    for block in blocks_of(model).values():
        if block not in roots:
            block.register_forward_hook(_without_views)
            fully_shard(block, mesh=mesh, reshard_after_forward=again, ignored_params=numbers)
    for root in roots:
        root.register_forward_hook(_without_views)
        fully_shard(root, mesh=mesh, reshard_after_forward=again, ignored_params=numbers)
    if compares:
        inner = {name: block for name, block in blocks_of(model).items() if block not in roots}
        for root in roots:
            SameBlocks(root, inner if root is model else {}, world.along(spec.axes, "shards"))


def _make_contiguous(model: nn.Module) -> None:
    """Copy parameters with other strides, such as those of `channels_last`, which torch cannot shard."""
    for parameter in nn.Module.parameters(model):
        if type(parameter.data) is Tensor and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _without_views(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return the outputs with views replaced by tensors that own their data, as far as autograd is concerned.

    torch gathers parameters for backward in a hook on the output's gradient. If the output is a view (a linear layer's
    output on sequences is one) and is changed in place, as in `logits /= 2`, autograd recomputes the view from its base
    and the hook does not fire.
    """

    def own(answer: Tensor) -> Tensor:
        is_view = type(answer) is Tensor and answer.requires_grad and answer._is_view()
        return torch.ops.aten._unsafe_view(answer, answer.shape) if is_view else answer

    return tree_map_only(Tensor, own, outputs)


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost submodules that have parameters and can be called, looking inside containers."""
    for child in model.children():
        if isinstance(child, CONTAINERS):
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child


def _require_own(model: nn.Module, roots: Sequence[nn.Module]) -> None:
    """Raise if submodules that are called one by one share a parameter: each gathers and frees its own parameters."""
    owners: dict[nn.Parameter, nn.Module] = {}
    names = {module: name for name, module in model.named_modules()}
    for root in roots:
        for parameter in nn.Module.parameters(root):
            other = owners.setdefault(parameter, root)
            if other is not root:
                raise StrategyError(
                    "sharded modules of several optimizers must not share a parameter",
                    got=f"a parameter of both {names[other]} and {names[root]}",
                    remedy='use sharding="optimizer", or mh.Mirrored()',
                )


def taking(model: nn.Module) -> Take:
    """Return a function that copies this rank's shard of a whole tensor into the parameter or buffer of that name."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    @torch.no_grad()
    def take(name: str, tensor: Tensor) -> None:
        mine = held[name]
        own_part(mine).copy_(tensor[_window(mine)] if isinstance(mine, DTensor) else tensor)

    return take


def shared_stats(model: nn.Module, spec: StrategySpec, world: World) -> BatchStats | None:
    """Return batch statistics over all ranks that synchronize in every step; None where each rank keeps its own."""
    if spec.batch_stats == "local":
        return None
    is_local_sgd = spec.replicas != 1 and isinstance(make_policy(spec.sync), Local)
    return BatchStats(model, world.along(spec.axes, *(("shards",) if is_local_sgd else DATA_AXES)))


class ShardedReplica(Replica):
    """One rank's shard of a network."""

    def __init__(
        self,
        spec: StrategySpec,
        world: World,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        stats: BatchStats | None,
    ) -> None:
        super().__init__(spec, world, model, optimizers)
        self._stats = stats
        self._policy = make_policy(spec.sync)
        if len(optimizers) > 1 and isinstance(self._policy, Local):
            raise StrategyError(
                "shards with several optimizers must be synchronized in every step",
                got=f"sync={spec.sync} and the optimizers {', '.join(optimizers)}",
                remedy='omit sync, or use sync="int8" or mh.Mirrored()',
            )
        self._roots = list(_outermost(model))
        """The modules that gather their parameters when they are called."""
        self._outer = world.along(spec.axes, "replicas")
        self._inner = [axis for axis in spec.axes if axis != "replicas"]
        self._exchanges: dict[str, BucketExchange] = {}
        self._exchange_names: dict[str, tuple[str, ...]] = {}
        self._saved: PolicyState | None = None
        """The policy's state from a checkpoint, until the first gradients arrive."""
        self._agreement: Agreement | None = None
        if isinstance(self._policy, Local) and self._outer.size > 1:
            # The ranks of one group synchronize in every step; the groups run local SGD.
            self.group = world.along(spec.axes, *self._inner)
            parameters = next(iter(self.groups.values()))
            self._agreement = Agreement(self._policy, self._outer, parameters, model.buffers, own_part)

    @property
    def is_capturable(self) -> bool:
        return False

    @property
    def is_local(self) -> bool:
        return False

    def explained(self, error: Exception) -> Exception:
        if not self._roots or "mixed torch.Tensor and DTensor" not in str(error):
            return error
        return StrategyError(
            "with shards, a custom step must use parameters through modules, which gather them when they are called",
            got=f"{culprit(error)}, which computes with a shard of a parameter",
            remedy='use sharding="optimizer", which keeps parameters whole, or mh.Mirrored()',
        )

    def set_padding(self, is_padding: bool) -> None:
        if self._stats is not None:
            self._stats.is_padding = is_padding

    def loss(self, function: Callable[[Any, Any], Any], data: Any) -> Any:
        try:
            value = super().loss(function, data)
        except RuntimeError as error:
            if not self._roots or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise _reads_parts() from error
        if _is_sharded(value.total if isinstance(value, Mean) else value):
            raise _reads_parts()
        return value

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        for root in self._roots:
            # Gradients of another optimizer must not stay pending inside torch until the next backward.
            root.set_requires_gradient_sync(last or len(self.groups) > 1)
        if self._roots:
            # fully_shard averages gradients over the group; this project sums them.
            objective = objective * self.spec.axes["shards"]
        with self._others_kept(key):
            objective.backward()

    @contextmanager
    def _others_kept(self, key: str) -> Iterator[None]:
        """Restore the gradients of other optimizers after backward, which computes them for every parameter used."""
        others = [p for other, group in self.groups.items() if other != key for p in group.values()]
        before = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        yield
        for parameter, gradient in zip(others, before, strict=True):
            parameter.grad = gradient

    def finish(self, key: str, count: Tensor | None) -> None:
        self._add_numbers(key)
        is_summed = self._outer.size > 1 and self._agreement is None
        if is_summed:
            self._fill_in(key)
        gradients = list(self._gradients(key))
        if is_summed and gradients:
            self._add_over_replicas(key, gradients)
        if count is not None:
            torch._foreach_div_(gradients, count.to(gradients[0].dtype))

    def _add_numbers(self, key: str) -> None:
        """Average the gradients of unsharded parameters over the shards, as torch does for the sharded ones."""
        if not self._roots:
            return
        kept = [p for p in self.groups[key].values() if not _is_sharded(p) and p.requires_grad]
        if not kept:
            return
        # A rank that did not use a parameter contributes zeros; a parameter that no rank used keeps no gradient.
        gradients = [torch.zeros_like(own_part(p)) if p.grad is None else own_part(p.grad) for p in kept]
        used = torch.tensor([float(p.grad is not None) for p in kept], device=gradients[0].device)
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), used.to(gradients[0].dtype)])
        self.world.along(self.spec.axes, "shards").all_reduce(flat, "avg")
        *means, used = flat.split([*(gradient.numel() for gradient in gradients), len(kept)])
        for parameter, mean, is_used in zip(kept, means, used.tolist(), strict=True):
            if is_used:
                mean = mean.to(parameter.dtype).view_as(own_part(parameter))
                parameter.grad = parted(mean, parameter) if isinstance(parameter, DTensor) else mean

    def _fill_in(self, key: str) -> None:
        """Set zero gradients for parameters that only other replicas used, so that all sum the same gradients."""
        trained = [p for p in self.groups[key].values() if p.requires_grad]
        used = torch.tensor([int(p.grad is not None) for p in trained], device=self.world.device)
        self._outer.all_reduce(used, "max")
        for parameter, is_used in zip(trained, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                zeros = torch.zeros_like(own_part(parameter))
                parameter.grad = parted(zeros, parameter) if isinstance(parameter, DTensor) else zeros

    @property
    def is_local_sgd(self) -> bool:
        return self._agreement is not None

    @property
    def agrees(self) -> bool:
        return self._agreement is None or self._agreement.is_reached

    def note(self, key: str, row: Tensor) -> bool:
        return self._agreement is not None and self._agreement.note(row)

    def meet(self, key: str) -> None:
        if self._agreement is not None:
            self._agreement.meet()

    @torch.no_grad()
    def join(self, others: Iterable[Tensor] = ()) -> None:
        average(self._outer, map(own_part, (*common_slots(self.world, self), *others)))

    def load(self, whole: Mapping[str, Tensor], *, strict: bool = True) -> None:
        super().load(whole, strict=strict)
        if self._agreement is not None:
            self._agreement.restart()

    def _add_over_replicas(self, key: str, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        exchange = self._exchange_for(
            key, {n: own_part(p.detach()) for n, p in self.groups[key].items() if p.grad is not None}
        )
        exchange.begin(flat)
        while exchange.advance():
            pass
        if self.world.is_first:
            report_policy(self._outer, self._policy, exchange, exchange.num_bytes, exchange.num_exact_bytes)
        sizes = [gradient.numel() for gradient in gradients]
        parts = [part.view_as(gradient) for part, gradient in zip(flat.split(sizes), gradients, strict=True)]
        torch._foreach_copy_(gradients, parts)

    def _exchange_for(self, key: str, parts: Mapping[str, Tensor]) -> BucketExchange:
        """Return the bucket exchange of these shards; if other parameters are used now, carry the policy state over."""
        if self._exchange_names.get(key) != tuple(parts):
            made = BucketExchange(self._policy, self._outer, parts)
            made.measures = True
            known = self._exchanges[key].state() if key in self._exchanges else self._saved
            if known is not None:
                made.take_over(known)
            self._exchanges[key], self._exchange_names[key] = made, tuple(parts)
        return self._exchanges[key]

    def _remembered(self) -> PolicyState | None:
        """Return the policy's state for all gradients, or the one loaded from a checkpoint if there is none yet."""
        known = (
            PolicyState.joined(exchange.state() for exchange in self._exchanges.values()) if self._exchanges else None
        )
        return self._saved if known is None else known

    @property
    def num_bytes(self) -> int:
        if self._agreement is not None:
            return self._agreement.num_bytes
        return sum(exchange.num_bytes for exchange in self._exchanges.values())

    def policy_state(self) -> dict[str, Tensor]:
        if self._agreement is None:
            return self._unsent()
        state = self._agreement.state()
        shared = {key: _global(held, self._parameter(key)) for key, held in state.shared.items()}
        whole = {key: self.whole(value, key.partition("/")[2]) for key, value in shared.items()}
        return PolicyState({}, whole, state.num_steps).tensors()

    def own_policy_state(self) -> dict[str, Tensor]:
        if self._agreement is not None:
            return self._agreement.state().own().tensors()
        if not self._policy.changes_mathematics or self._outer.size == 1:
            return {}
        state = self._remembered()
        return {} if state is None else state.own().tensors()

    def _unsent(self) -> dict[str, Tensor]:
        """Return every replica's error feedback with whole parameters; only the first rank receives the tensors."""
        if not self._exchanges or not self._policy.changes_mathematics or self._outer.size == 1:
            return {}
        state, kept = PolicyState.joined(exchange.state() for exchange in self._exchanges.values()), {}
        for name, part in state.feedback.items():
            whole = self.whole(_global(part.contiguous(), self._named(name)), name)
            stacked = self._outer.all_gather(whole)
            if self.world.is_first:
                kept[name] = stacked.cpu()
        return PolicyState(kept, {}, state.num_steps).tensors()

    def _named(self, name: str) -> nn.Parameter:
        return next(group[name] for group in self.groups.values() if name in group)

    def _parameter(self, key: str) -> nn.Parameter:
        return next(iter(self.groups.values()))[key.partition("/")[2]]

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        if saved and PolicyState.of(saved).is_own:
            self._saved = PolicyState.of(saved)
            if self._agreement is not None:
                self._agreement.restart()
                self._agreement.take_over(self._saved)
            return ""
        if self._agreement is not None and saved:
            state = PolicyState.of(saved)
            parts = {
                key: own_part(self.part_for(held, self._parameter(key), key.partition("/")[2]))
                for key, held in state.shared.items()
            }
            self._agreement.take_over(PolicyState({}, parts, state.num_steps))
            return ""
        if not self._policy.changes_mathematics or self._outer.size == 1:
            return super().load_policy_state(saved)
        if not saved:
            return f"the checkpoint has no state of sync={self._policy}, which starts fresh"
        state = PolicyState.of(saved).share(self._outer)
        known = {name: held for name, held in state.feedback.items() if name in self.names.values()}
        mine = {name: own_part(self.part_for(held, self._named(name), name)) for name, held in known.items()}
        self._saved = PolicyState(mine, {}, state.num_steps)
        return ""

    def _gradients(self, key: str) -> Iterator[Tensor]:
        """Yield this rank's shards of the gradients of one optimizer."""
        for parameter in self.groups[key].values():
            if parameter.grad is not None:
                yield own_part(parameter.grad)

    def clip(self, key: str, max_norm: float) -> Tensor:
        """Clip to a norm over all shards, counting each shard once however many ranks hold it; return the norm."""
        gradients, copies = list(self._gradients(key)), list(self._copies(key))
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1, device=self.world.device)
        squares = (norms.square() / torch.tensor(copies or [1], device=norms.device)).sum()
        self.world.along(self.spec.axes, *self._inner).all_reduce(squares)
        norm = squares.sqrt()
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _copies(self, key: str) -> Iterator[int]:
        """Yield for each gradient how many ranks of this replica hold the same shard."""
        axes = {axis: self.spec.axes[axis] for axis in self._inner}
        for parameter in self.groups[key].values():
            if parameter.grad is not None:
                sharded_axes: Sequence[str] = ()
                if isinstance(parameter, DTensor):
                    names = parameter.device_mesh.mesh_dim_names or ()
                    sharded_axes = [
                        n for n, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()
                    ]
                yield math.prod(size for axis, size in axes.items() if axis not in sharded_axes)

    def is_finite(self, key: str) -> Tensor:
        fine = [gradient.isfinite().all() for gradient in self._gradients(key)]
        flag = torch.stack(fine).all() if fine else torch.ones((), dtype=torch.bool, device=self.world.device)
        number = flag.to(torch.int64)
        self.group.all_reduce(number, "min")
        return number > 0

    def whole(self, tensor: Tensor, name: str = "") -> Tensor:
        return whole(tensor)

    def part_for(self, whole: Tensor, like: Tensor, name: str = "") -> Tensor:
        if not isinstance(like, DTensor) or isinstance(whole, DTensor) or whole.shape != like.shape:
            return whole
        if all(type(place) in (Shard, Replicate) for place in like.placements):
            # Slice before moving: the whole tensor may be memory-mapped from a file larger than the device's memory.
            mine = whole[_window(like)]
            return parted(mine.to(like.device, like.dtype).contiguous(), like)
        moved = whole.to(like.device, like.dtype)
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)

    def align_buffers(self) -> None:
        data = self.world.along(self.spec.axes, *DATA_AXES)
        for buffer in self.model.buffers():
            data.broadcast(own_part(buffer))

    def differences(self) -> list[str]:
        """Return the names of parameters that differ between replicas, by comparing hashes of the shards."""
        named = {name: own_part(tensor.detach()) for name, tensor in self.model.named_parameters()}
        return self.odd_over(self._outer, named if self.agrees else {}, "over the replicas")

    def odd_over(self, world: World, named: Mapping[str, Tensor], where: str) -> list[str]:
        """Return the names of tensors that differ between the ranks of `world`, collected from all ranks."""
        found = []
        if named and world.size > 1:
            gathered = world.all_gather(torch.stack([hash_of(tensor) for tensor in named.values()]))
            same = (gathered == gathered[0]).all(0).tolist()
            found = [name for name, is_same in zip(named, same, strict=True) if not is_same]
        every = self.world.gather_objects(found)
        return [f"{name} ({where})" for name in dict.fromkeys(name for names in every for name in names)]

    def close(self) -> None:
        if self._stats is not None:
            self._stats.close()


def _reads_parts() -> StrategyError:
    return StrategyError(
        "with shards, a loss must use parameters through the network only, which gathers them when it is called",
        got="a loss that computes with parameters directly",
        remedy="compute with them in forward, use the optimizer's weight_decay for a penalty, or use mh.Mirrored()",
    )


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that `fully_shard` was applied to."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and "shards" in (tensor.device_mesh.mesh_dim_names or ())


def _window(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank's shard covers."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, gathered from all ranks; any other tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return parted(own_part(tensor), tensor).full_tensor()


def _global(part: Tensor, like: Tensor) -> Tensor:
    """Wrap a rank's shard as a DTensor laid out like the given parameter."""
    return parted(part, like) if isinstance(like, DTensor) else part
