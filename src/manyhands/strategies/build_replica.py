"""Build a replica from a StrategySpec; only this module defines the order in which a network is split."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, complex128, float64, nn
from torch.optim import Optimizer

from ..core import (
    DATA_AXES,
    Attributes,
    StrategyError,
    StrategySpec,
    TaskError,
    each_of,
    joined,
    nested_in,
    parameters_of,
    random_state,
    remember_state,
    require_own_memory,
    restore_random_state,
)
from ..distributed import World
from ..sync import Auto, Local, Policy, make_policy
from .buffers import Buffers, Rules, find_rules
from .deferred import Take
from .local_sgd import replicated
from .mirrored import mirror
from .offload import OffloadedReplica
from .optimizer_traits import require_in_stages
from .parameter_server import ServedReplica, refuse_hooks
from .piece_parameters import Holding
from .pipeline import PipelineReplica, place
from .placed import PlacedReplica
from .recompute import recompute
from .replica import GradientHooks, Replica

Probe = Callable[[nn.Module, Callable[[Any], Any]], Any]
"""Computes the loss of a few samples with the given network; the function is applied to the network's inputs."""
if TYPE_CHECKING:
    from .tensor import Layout

MAIN = ""
"""The key of the optimizer if a task has only one."""


def make_replica(
    spec: StrategySpec,
    world: World,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    probe: Probe | None = None,
    look: Callable[[nn.Module], None] | None = None,
    layout: Layout | None = None,
    fill: Callable[[Take], None] | None = None,
) -> Replica:
    """Build this rank's replica of a network: precision, device, layers, recomputation, shards, optimizers, sync.

    Args:
        probe: Computes the loss of a few samples, to find what can only be observed by running the network.
        look: Called with the whole network before it is partitioned into stages.
        layout: The result of an earlier search for how the layers are split.
        fill: Supplies the values of a network on the meta device; only sharded networks can start without values.
    """
    require_built(spec)
    if fill is None:
        _require_place(model, world)
    hooks = GradientHooks()
    if not (world.size == 1 and "optimizer" in spec.offloaded):
        hooks.adopt(model.named_parameters())
    if spec.servers:
        refuse_hooks(hooks)
    make_optimizer = _with_attributes(model, make_optimizer)
    if spec.servers or set(spec.axes) - {"replicas"}:
        require_own_memory(model)
    if spec.precision == "fp64":
        model = in_double(model)
    if world.size > 1 or spec.servers:
        _require_strided(model)
    if fill is None:
        model = model.to(world.device)
        if world.size > 1:
            _require_sums(model)
            mirror(model, world)
            _convert_parameters(model, probe)
    rules: Rules | None = None
    if spec.stages != 1:
        # The network is probed while it is still whole.
        rules = find_rules(model, probe, nullcontext()) if _splits(spec, world) else {}
    replica = _built(spec, world, model, make_optimizer, probe, look, layout, fill)
    replica.hooks = hooks
    if rules is None:
        rules = find_rules(model, probe, replica.scope()) if _splits(spec, world) else {}
    _follow_buffers(replica, rules)
    return replica


def _with_attributes(
    model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]]
) -> Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]]:
    """Return an optimizer function that finds the attributes of parameters, which strategies replace by other tensors.

    Model functions mark parameters for the optimizer function, as in `parameter._no_weight_decay = True`.
    """
    known = {name: dict(vars(parameter)) for name, parameter in model.named_parameters() if vars(parameter)}

    def make(model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        for name, parameter in model.named_parameters():
            for key, value in known.get(name, {}).items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)
        return make_optimizer(model)

    return make if known else make_optimizer


def _convert_parameters(model: nn.Module, probe: Probe | None) -> None:
    """Run a first forward of a network that is not in float32, which may convert parameters.

    Routers in mixture-of-experts models do so, and buckets and shards must be made for the dtypes used in training.
    """
    parameters = list(model.parameters())
    if probe is None or all(parameter.dtype == torch.float32 for parameter in parameters):
        return
    device = parameters[0].device
    states, put_back = random_state(device), remember_state(model)
    try:
        # An error in the user's code is raised again by the first step.
        with torch.no_grad(), suppress(Exception):
            probe(model, lambda batch: batch)
    finally:
        put_back()
        restore_random_state(states, device)


def _splits(spec: StrategySpec, world: World) -> bool:
    """Return whether a forward sees only part of the batch while buffers must be those of the whole batch."""
    num_parts = spec.accumulate * spec.microbatches * world.along(spec.axes, *DATA_AXES).size
    is_local = spec.batch_stats == "local" or (spec.replicas != 1 and isinstance(make_policy(spec.sync), Local))
    return (num_parts > 1 or spec.servers > 0) and not is_local


def _follow_buffers(replica: Replica, rules: Rules) -> None:
    spec, world = replica.spec, replica.world
    held = dict(replica.model.named_buffers())
    mine = {name: rule for name, rule in rules.items() if not held[name].is_meta}
    replica.buffers = Buffers(replica.model, mine, world.along(spec.axes, *DATA_AXES))
    if spec.servers and replica.buffers.names:
        raise StrategyError(
            "under parameter servers, forward must not update buffers",
            got=f"{replica.buffers.names[0]}, which is updated from samples",
            remedy="use mh.Mirrored() or mh.Sharded()",
        )


def _built(
    spec: StrategySpec,
    world: World,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    probe: Probe | None,
    look: Callable[[nn.Module], None] | None,
    layout: Layout | None,
    fill: Callable[[Take], None] | None,
) -> Replica:
    if spec.stages != 1:
        holding = _holding(spec, world, model, probe, layout)
        placement = place(spec, world, model, probe, look, holding.layers)
        holding.hold(model)
        optimizers = optimizers_of(model, make_optimizer)
        for optimizer in optimizers.values():
            require_in_stages(optimizer)
        return (PlacedReplica if spec.place else PipelineReplica)(spec, world, model, optimizers, placement, holding)
    if spec.shards != 1 and world.size > 1:
        whole = _whole_in_a_step(spec, world, model, make_optimizer, probe, fill)
        if whole is not None:
            return whole
    if spec.tensor > 1 or (spec.shards != 1 and world.size > 1):
        return _in_parts(spec, world, model, make_optimizer, probe, layout, fill)
    if spec.context > 1 and world.size > 1:
        from .context import splitting_context

        require_loss(spec, probe is not None)
        return splitting_context(spec, world, model, lambda model: optimizers_of(model, make_optimizer), probe)
    recompute(model, spec.recompute, own_randomness=not spec.deterministic)
    if spec.servers:
        return ServedReplica(spec, world, model, optimizers_of(model, make_optimizer))
    if world.size == 1 and "optimizer" in spec.offloaded:
        return OffloadedReplica(spec, world, model, optimizers_of(model, make_optimizer))
    if world.size == 1:
        return Replica(spec, world, model, optimizers_of(model, make_optimizer))
    return replicated(spec, world, model, optimizers_of(model, make_optimizer))


def in_double(model: nn.Module) -> nn.Module:
    """Return a network in double precision; complex tensors stay complex, which Module.double() makes real."""

    def widened(tensor: Tensor) -> Tensor:
        wide = complex128 if tensor.is_complex() else float64 if tensor.is_floating_point() else tensor.dtype
        return tensor.to(wide)

    made: nn.Module = model._apply(widened)
    return made


def _whole_in_a_step(
    spec: StrategySpec,
    world: World,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    probe: Probe | None,
    fill: Callable[[Take], None] | None,
) -> Replica | None:
    """Return a replica whose optimizer state alone is sharded, where that is asked for or the network needs it."""
    why = ""
    if spec.sharding != "optimizer":
        # Importing torch's fake tensors is slow, and few runs need them.
        from .by_block import why_not_by_block

        why = next(filter(None, world.gather_objects(why_not_by_block(model, probe, world.device))), "")
        if not why:
            return None
        _require_whole_possible(spec, why)
        spec = dataclasses.replace(spec, sharding="optimizer")
    from .optimizer_shards import OptimizerShardedReplica, sharded_optimizers
    from .sharded import taking

    if fill is not None:
        allocate(model, world.device)
        fill(taking(model))
        _convert_parameters(model, probe)
    recompute(model, spec.recompute, own_randomness=not spec.deterministic)
    parted, shadows = sharded_optimizers(spec, world, model, make_optimizer)
    replica = OptimizerShardedReplica(spec, world, model, parted, shadows)
    if why:
        replica.notes.append(f'{why}: parameters and gradients stay whole on every rank, as with sharding="optimizer"')
    return replica


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for a network on the meta device; parameters and buffers that modules share stay shared."""
    held: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    held.setdefault(id(tensor), []).append((own, name))
    # A module may convert plain tensors in its own `_apply`, too: they have values already.
    attributes = Attributes(model)
    model.to_empty(device=device)
    attributes.put_back()
    model.to(device)
    for (first, name), *others in held.values():
        for own, other in others:
            own[other] = first[name]


def _require_whole_possible(spec: StrategySpec, why: str) -> None:
    if spec.tensor > 1 or isinstance(make_policy(spec.sync), Local):
        raise StrategyError(
            "shards of a network with tensor=, or with local steps, must run the same blocks on all ranks",
            got=f"{why}, and {spec}",
            remedy="use mh.Mirrored(), or mh.Sharded() without tensor and with another sync",
        )


def _in_parts(
    spec: StrategySpec,
    world: World,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    probe: Probe | None,
    layout: Layout | None,
    fill: Callable[[Take], None] | None,
) -> Replica:
    """Build a replica of a network that no rank holds whole: layers are split first, then the rest is sharded."""
    # Importing torch's FSDP and DTensor is slow, and few runs need them.
    from .sharded import ShardedReplica, shard, shared_stats, taking

    stats = shared_stats(model, spec, world)
    sharding = None
    if spec.tensor > 1:
        from .tensor import TensorSharding

        if layout is None:
            require_loss(spec, probe is not None)
            assert probe is not None
            layout = lay_out(model, spec, world, probe)
        sharding = TensorSharding(spec, world, model, layout)
        sharding.apply(model)
    scope = ExitStack if sharding is None else sharding.scope
    recompute(model, spec.recompute, own_randomness=not spec.deterministic, scope=scope)
    if spec.shards != 1:
        apart = len(optimizers_of(model, make_optimizer)) > 1
        shard(model, spec, world, apart=apart, compares=probe is None)
    if fill is not None:
        allocate(model, world.device)
        fill(taking(model))
    optimizers = optimizers_of(model, make_optimizer)
    if sharding is None:
        return ShardedReplica(spec, world, model, optimizers, stats)
    from .tensor import TensorReplica

    return TensorReplica(spec, world, model, optimizers, sharding, stats)


def _holding(spec: StrategySpec, world: World, model: nn.Module, probe: Probe | None, layout: Layout | None) -> Holding:
    """Return how ranks that run the same pieces of a network hold their parameters."""
    if spec.shards == 1 and spec.tensor == 1:
        return Holding()
    from .sharded_pieces import HeldInParts

    if spec.tensor > 1 and layout is None:
        require_loss(spec, probe is not None)
        assert probe is not None
        layout = lay_out(model, spec, world, probe)
    return HeldInParts(spec, world, model, layout)


def lay_out(model: nn.Module, spec: StrategySpec, world: World, probe: Probe) -> Layout:
    """Return how a network's layers are split over the tensor axis, found by running a few samples through it."""
    from .tensor import Axis, find_layout

    # Activations between stages are whole, so none stay sharded by sequence. On a CPU they do so only on request:
    # gloo implements reduce-scatter as an all-reduce, so more bytes would be sent, not fewer.
    is_wanted = world.device.type != "cpu" or "sequence" in spec.layouts.values()
    spreads = spec.stages == 1 and is_wanted
    return find_layout(model, Axis(world.mesh(spec.axes)["tensor"]), probe, spec.layouts, spreads=spreads)


def sequence_notes(model: nn.Module, spec: StrategySpec, probe: Probe) -> list[str]:
    """Return what context parallelism computes on whole sequences; raise for a network that it cannot split."""
    from .context import find

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return find(model, spec, probe, device).notes


def require_loss(spec: StrategySpec, has_loss: bool) -> None:
    """Raise if splitting the network needs a loss, because samples are followed up to it, and there is none."""
    if (spec.tensor > 1 or spec.stages != 1 or spec.context > 1) and not has_loss:
        raise StrategyError(
            "a strategy that partitions the network needs a task with loss=, trained by mh.fit",
            got=str(spec),
            remedy="use mh.Mirrored() or mh.Sharded() for custom training steps",
        )


def require_built(spec: StrategySpec) -> None:
    """Raise for combinations of axes that are not supported, and for policies that do not exist or do not fit."""
    if spec.sharding == "optimizer" and (spec.tensor > 1 or isinstance(make_policy(spec.sync), Local)):
        raise StrategyError(
            'sharding="optimizer" needs replicas that synchronize in every step, and whole layers',
            got=str(spec),
            remedy='use sharding="full", or omit tensor and the policy',
        )
    policy = make_policy(spec.sync)
    if spec.context > 1:
        _require_context(spec)
    if (spec.shards != 1 or spec.tensor > 1 or spec.stages != 1) and isinstance(policy, Auto):
        raise StrategyError(
            "a policy can only be chosen automatically for whole networks",
            got=str(spec),
            remedy='use mh.Mirrored(), or name the policy, for example sync="bf16"',
        )
    if spec.stages != 1:
        _require_pipelined(spec, policy)
    if (spec.shards != 1 or spec.tensor > 1) and policy.between == "hosts":
        raise StrategyError(
            "a policy between hosts needs a whole network on every host",
            got=str(spec),
            remedy="use as many shards as a host has devices, and replicas over the hosts",
        )
    if (spec.shards != 1 or spec.tensor > 1) and policy.needs_matrices:
        raise StrategyError(
            f"the policy {policy} needs whole matrices on every rank",
            got=str(spec),
            remedy='use mh.Mirrored(), or another policy such as sync="int8"',
        )


def _require_context(spec: StrategySpec) -> None:
    others = [axis for axis in ("shards", "tensor", "stages") if getattr(spec, axis) != 1]
    others += [
        name
        for name in ("sync", "servers", "offload", "batch_stats")
        if getattr(spec, name) != getattr(StrategySpec, name)
    ]
    others += ["capture"] if spec.capture in ("graph", "compile") else []
    if others:
        raise StrategyError(
            "context parallelism can be combined with replicas, accumulate, recompute and precision",
            got=f"context={spec.context} with {others[0]}={getattr(spec, others[0])}",
            remedy=f"omit {others[0]}, as in mh.Mirrored(2) * mh.ContextParallel({spec.context})",
        )


def _require_pipelined(spec: StrategySpec, policy: Policy) -> None:
    if spec.place and (spec.shards != 1 or spec.tensor > 1):
        raise StrategyError(
            "a placed part runs on one device, so its layers and parameters cannot be sharded",
            got=str(spec),
            remedy="leave shards and tensor at 1, or use mh.Pipeline for stages that several devices share",
        )
    if spec.sharding == "optimizer" and spec.shards != 1:
        raise StrategyError(
            "a sharded stage must shard its parameters, gradients and optimizer state",
            got=str(spec),
            remedy='omit sharding, or use sharding="full"',
        )
    if spec.servers or isinstance(policy, Local):
        raise StrategyError(
            "a partitioned network must be synchronized in every step, without parameter servers or local steps",
            got=str(spec),
            remedy="leave servers at 0, and use a sync policy such as int8",
        )
    if spec.schedule == "zero-bubble" and spec.recompute:
        raise StrategyError(
            "the zero-bubble schedule splits a backward into halves, which cannot be recomputed",
            got=f"recompute={spec.recompute!r}",
            remedy='omit recompute, or use schedule="1f1b"',
        )


def optimizers_of(
    model: nn.Module, make: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]]
) -> dict[str, Optimizer]:
    """Return the optimizers of a network by key, after checking that they hold its parameters, each once."""
    try:
        made = make(model)
    except TypeError as error:
        if not any(words in str(error) for words in ("can only optimize", "object is not iterable")):
            raise
        raise TaskError(
            "optimizer must be a function of the model",
            got=f"a function of parameters ({error})",
            remedy="write optimizer=lambda model: torch.optim.AdamW(model.parameters())",
        ) from error
    made = joined(made) if isinstance(made, list | tuple) else made
    optimizers: dict[str, Any] = dict(made) if isinstance(made, Mapping) else {MAIN: made}
    for key, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                "the optimizer function must return a torch optimizer, or a list or a dict of them",
                got=f"{key + ': ' if key else ''}{type(optimizer).__name__}",
                remedy="return torch.optim.AdamW(model.parameters())",
            )
        for member in each_of(optimizer):
            _require_single_gradient(member)
    _require_parameters(model, [p for optimizer in optimizers.values() for p in parameters_of(optimizer)])
    return optimizers


def _require_parameters(model: nn.Module, held: list[Tensor]) -> None:
    """Raise unless the optimizers hold parameters of this model only, each once, and at least one trainable one."""
    known = set(held)
    missed = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if missed and not any(p.requires_grad for p in held):
        raise TaskError(
            "the optimizer must hold a trainable parameter",
            got=f"none of {', '.join(missed[:5])}{' …' if len(missed) > 5 else ''}",
            remedy="create it from model.parameters()",
        )
    foreign = len(known - set(model.parameters()))
    if foreign:
        raise TaskError(
            "the optimizer must hold this model's parameters only",
            got=f"{foreign} of another model",
            remedy="create it from its argument",
        )
    if len(known) != len(held):
        twice = next(name for name, p in model.named_parameters() if sum(p is one for one in held) > 1)
        raise TaskError(
            "a parameter must belong to one optimizer only",
            got=f"{twice} in two of them",
            remedy="pass each parameter to one of them",
        )


def _require_single_gradient(optimizer: Optimizer) -> None:
    """Raise if an optimizer needs a closure, or updates parameters that are in none of its groups."""
    name, inner = type(optimizer).__name__, nested_in(optimizer)
    hidden = {p for one in inner.values() for p in parameters_of(one)} - set(parameters_of(optimizer))
    if hidden:
        kinds = ", ".join(type(one).__name__ for one in inner.values())
        raise TaskError(
            "the parameter groups of an optimizer must contain all parameters that it updates",
            got=f"{name}, whose inner optimizers ({kinds}) have {len(hidden)} parameters that are in none of its "
            "groups",
            remedy=f"return the inner optimizers themselves as a list, [{kinds}]",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    why = "" if needs_closure or not inner else _failed_step(optimizer)
    if needs_closure or why:
        raise TaskError(
            "an optimizer step must need one gradient only",
            got=f"{name}, which computes the loss several times in a step{why and f' ({why})'}",
            remedy="use for example torch.optim.AdamW",
        )


def _failed_step(optimizer: Optimizer) -> str:
    """Return why a step without a closure fails, tried on a copy; empty if it succeeds or cannot be copied."""
    copied: Optimizer = object.__new__(type(optimizer))
    # A step on shards communicates, and ranks on which it fails would leave the others waiting.
    shards = [parameter for parameter in parameters_of(optimizer) if hasattr(parameter, "placements")]  # DTensors
    memo = {id(shard): nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device="meta")) for shard in shards}
    try:
        copied.__dict__.update(copy.deepcopy(vars(optimizer), memo))  # copying an optimizer drops its attributes
        for parameter in parameters_of(copied):
            parameter.grad = torch.zeros_like(parameter)
        with torch.random.fork_rng(devices=[]):
            copied.step()
    except (AssertionError, TypeError) as error:  # raised by calling or requiring a closure that is None
        return f"{type(error).__name__}: {error}"
    except Exception:
        return ""
    return ""


def _require_sums(model: nn.Module) -> None:
    """Raise for a tensor whose dtype collectives cannot sum."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.itemsize == 1:
            raise TaskError(
                "tensors of a network on several devices must have a dtype that collectives can sum",
                got=f"{name} of {tensor.dtype}",
                remedy="keep it in bfloat16 or float32, and convert it where it is used",
            )


def _require_strided(model: nn.Module) -> None:
    """Raise for a parameter or buffer without a memory layout by which collectives send and compare it."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise TaskError(
                "tensors of a network on several devices must be dense",
                got=f"{name}, a tensor of layout {tensor.layout}",
                remedy="register its indices and its values as two buffers, and build the sparse tensor in forward",
            )


def _require_place(model: nn.Module, world: World) -> None:
    if not isinstance(model, nn.Module):
        raise TaskError(
            "the model function must return an nn.Module", got=type(model).__name__, remedy="return the network"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", world.device.type):
            raise TaskError(
                f"the model function must build on the CPU (it is moved to {world.device})",
                got=f"{name} on {tensor.device}",
                remedy="remove .to(device)",
            )
