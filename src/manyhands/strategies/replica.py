"""Replica: the part of a network that one rank holds, and the operations of a training step on it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture import CAPTURABLE, fuse_on_cpu, skips_on_device
from ..core import StrategySpec, each_of, saves_all
from ..distributed import World
from .buffers import Buffers
from .local_updates import BY_ELEMENT, on_own_parts
from .optimizer_traits import stepping

if TYPE_CHECKING:
    from .partition_drawing import Outline
    from .pipeline import PipelineReplica

_AS_IT_IS = contextlib.nullcontext()
Hooks = dict[int, Callable[[Tensor], Any]]
_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


class Replica:
    """One replica of a network with its optimizers, on a single device; subclasses override what differs when split."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        self.spec, self.world, self.model, self.optimizers = spec, world, model, dict(optimizers)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.is_narrow = spec.precision == "bf16"
        """Whether the network is computed in bfloat16."""
        self.group: World = world
        """The ranks whose gradients are summed in every step: all ranks, except in local SGD."""
        self.hooks = GradientHooks()
        """The user's hooks on parameters, called with complete gradients."""
        self.buffers = Buffers(model, {}, world)
        """Buffers that forward updates: after all micro-batches they have the value that the whole batch would give."""
        self.notes: list[str] = []
        """Messages for the user about how the network was split."""
        self.groups = {key: self._parameters_of(optimizer) for key, optimizer in self.optimizers.items()}
        self._parked: dict[str, Any] = {}
        if "optimizer" in spec.offloaded:
            from .offload import Parking

            self._parked = {key: Parking(optimizer, world.device) for key, optimizer in self.optimizers.items()}
        for key in self.optimizers.keys() - self._parked.keys():
            for member in each_of(self.optimizers[key]):
                with on_own_parts(member, by_element=type(member) in BY_ELEMENT):
                    fuse_on_cpu(member)
        held = {name for group in self.groups.values() for name in group}
        self._untrained = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in held}
        if self._untrained:
            shown = list(self._untrained)
            names = f"{', '.join(shown[:5])}{' …' if len(shown) > 5 else ''}"
            self.notes.append(f"{len(shown)} parameters are in no optimizer and stay as they are: {names}")
        if spec.offload and world.device.type == "cpu":
            self.notes.append(f"offload={spec.offload} changes nothing on a CPU: its memory is the host's")

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: among ranks that compute the same samples exactly one does."""
        return True

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return the context for forward and loss: autocast to the chosen precision, and activation offloading."""
        narrow: contextlib.AbstractContextManager[object] = _AS_IT_IS
        if self.is_narrow:
            # Cached bfloat16 weights would outlive the recomputed blocks, which cast the weights again anyway.
            caches = not self.spec.recompute
            narrow = torch.autocast(self.world.device.type, dtype=torch.bfloat16, cache_enabled=caches)
        if "activations" not in self.spec.offloaded:
            return narrow
        from .offload import keeping_on_host

        both = contextlib.ExitStack()
        both.enter_context(narrow)
        both.enter_context(keeping_on_host(self.world.device))
        return both

    def loss(self, function: Callable[[Any, Any], Any], data: Any) -> Any:
        """Compute the loss of a micro-batch, or this rank's share of it."""
        return function(self.model, data)

    def explained(self, error: Exception) -> Exception:
        """Return the error to raise when a custom step raised this one: a refusal, if the strategy caused it."""
        return error

    @property
    def pipeline(self) -> PipelineReplica | None:
        """This replica where it runs several micro-batches at a time, in stages; None where one follows another."""
        return None

    def set_padding(self, is_padding: bool) -> None:
        """Set whether the next micro-batch is a padding micro-batch, whose batch statistics must not count."""

    def piggybacked(self, key: str) -> Tensor | None:
        """Return space for three numbers that are summed together with the gradients; None: send them separately."""
        return None

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        """Add the objective's gradients to one optimizer's parameters; `last` marks the step's last micro-batch."""
        if len(self.optimizers) == 1:
            objective.backward()
        else:
            objective.backward(inputs=[p for p in self.groups[key].values() if p.requires_grad])

    @property
    def is_capturable(self) -> bool:
        """Whether forward and backward can be captured in a CUDA graph, that is, contain no other collectives."""
        return True

    @property
    def is_local(self) -> bool:
        """Whether forward needs no communication with other replicas."""
        return True

    @property
    def records_exchange(self) -> bool:
        """Whether the all-reduce over the replicas can be captured in a CUDA graph too."""
        return self.world.is_capturable

    @property
    def is_local_sgd(self) -> bool:
        """Whether this is local SGD: replicas diverge between synchronizations."""
        return False

    @property
    def agrees(self) -> bool:
        """Whether all replicas hold the same parameters now."""
        return True

    def note(self, key: str, row: Tensor) -> bool:
        """Count a local SGD step with its numbers in `row`; return True when it is time to synchronize."""
        return False

    def meet(self, key: str) -> None:
        """Synchronize one optimizer's parameters over the replicas and sum the rows. Collective on all replicas."""

    def join(self, others: Iterable[Tensor] = ()) -> None:
        """Average over the replicas what local SGD keeps per replica: the optimizers' states, and `others`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that this rank sent to other replicas in the last step."""
        return 0

    def policy_state(self) -> dict[str, Tensor]:
        """Return the policy's state of all replicas. Collective: all replicas call it."""
        return {}

    def own_policy_state(self) -> dict[str, Tensor]:
        """Return the policy's state of this rank, without communication; `load_policy_state` accepts it too."""
        return {}

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        """Load what `policy_state` returned, on any number of replicas; return a message about what was dropped."""
        return (
            "gradients that the policy had not sent yet are dropped, because the current policy keeps none"
            if saved
            else ""
        )

    def defer(self, is_deferred: bool) -> None:
        """Set whether gradients wait for `pack` and `exchange` instead of being summed during backward."""

    def usage(self, key: str) -> Any:
        """Return which parameters the last step used, in the form that `settle` takes."""
        return None

    def settle(self, key: str, usage: Any) -> None:
        """Fix which parameters are used, so that steps skip the check; None checks in every step again."""

    def pack(self, key: str) -> None:
        """Copy deferred gradients into the buckets for their exchange."""

    def exchange(self, key: str) -> None:
        """Sum deferred gradients over the replicas."""

    def finish(self, key: str, count: Tensor | None) -> None:
        """Complete the gradients of one optimizer; divide them by `count` if the loss is a mean over counted items."""
        if count is not None:
            gradients = [p.grad for p in self.groups[key].values() if p.grad is not None]
            torch._foreach_div_(gradients, count)

    def clip(self, key: str, max_norm: float) -> Tensor:
        """Clip the gradient to a norm; return the norm before clipping."""
        return nn.utils.clip_grad_norm_(list(self.groups[key].values()), max_norm)

    def is_finite(self, key: str) -> Tensor:
        """Return a flag on the device: whether every gradient is finite."""
        gradients = [p.grad for p in self.groups[key].values() if p.grad is not None]
        if not gradients:
            return torch.ones((), dtype=torch.bool, device=self.world.device)
        return torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all()

    def update(self, key: str, where: Tensor | None = None) -> None:
        """Run the optimizer's step, only if the flag `where` is set, and drop the gradients."""
        if key in self._parked:
            bring = self.bringing(key)
            if where is None or bool(where):
                self._parked[key].step(bring)
        else:
            optimizer = self.optimizers[key]
            with _AS_IT_IS if _is_plain(optimizer) else stepping(self, optimizer):
                step_where(optimizer, where)
        self.optimizers[key].zero_grad(set_to_none=True)
        for parameter in self._untrained.values():
            parameter.grad = None

    def bringing(self, key: str) -> Callable[[nn.Parameter], Tensor | None]:
        """Detach the gradients from one optimizer's parameters; return a function from a parameter to its gradient."""
        held: dict[nn.Parameter, Tensor | None] = {}
        for group in self.optimizers[key].param_groups:
            for parameter in group["params"]:
                held[parameter], parameter.grad = parameter.grad, None
        return held.pop

    def forget(self) -> None:
        """Drop the gradients of the current step."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def rebuild_layout(self) -> None:
        """Update internal views after parameters moved in memory."""

    def plain(self, value: Any) -> Any:
        """Return a loss or a network output with whole tensors, as on one device."""
        return value

    def whole(self, tensor: Tensor, name: str = "") -> Tensor:
        """Return a whole parameter, gradient or optimizer slot. Collective: all ranks call it."""
        return tensor

    def outline(self) -> Outline | None:
        """Return where each piece of a partitioned network is, or None. Collective: all ranks call it."""
        return None

    def hints(self) -> list[str]:
        """Return hints for the user before a run starts."""
        return []

    def remarks(self) -> list[str]:
        """Return observations about how the work was split. Collective: all ranks call it."""
        return []

    def gathered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return nested dicts with shards, found under the names of parameters, replaced by whole tensors."""
        return self._gathered(parts, "", self._first_names())  # type: ignore[no-any-return]

    def _first_names(self) -> dict[str, str]:
        """Return the first name of every parameter by each of its names, all of which a state dict has."""
        named = list(self.model.named_parameters(remove_duplicate=False))
        first = {parameter: name for name, parameter in reversed(named)}
        return {name: first[parameter] for name, parameter in named}

    def _gathered(self, value: Any, name: str, first: Mapping[str, str]) -> Any:
        if isinstance(value, Tensor):
            return self.whole(value, name)
        if not isinstance(value, dict):
            return value
        return {key: self._gathered(child, first.get(key, name), first) for key, child in value.items()}

    def part_for(self, whole: Tensor, like: Tensor, name: str = "") -> Tensor:
        """Return this rank's part of a whole tensor, laid out like the parameter of this name."""
        return whole

    def load(self, whole: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load whole tensors into the network, by the names of the original module."""
        self.model.load_state_dict(self.parts(whole), strict=strict and saves_all(self.model))

    def parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of the network's whole tensors, by name."""
        held, first = self.model.state_dict(), self._first_names()
        return {n: self.part_for(v, held[n], first.get(n, n)) if n in held else v for n, v in whole.items()}

    def align_buffers(self) -> None:
        """Broadcast the first replica's buffers to all replicas."""

    def differences(self) -> list[str]:
        """Return the names of parameters and buffers that should be equal over the replicas and are not."""
        return []

    def close(self) -> None:
        """Remove everything that the strategy attached to the network, such as hooks."""

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter in mine}


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether an update needs no other tensors or random numbers than those that the optimizer has."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return type(optimizer) in BY_ELEMENT and all(type(parameter) is nn.Parameter for parameter in parameters)


def step_where(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Run an optimizer's step if the flag is set; otherwise leave parameters and state unchanged."""
    if flag is None:
        optimizer.step()
    elif flag.device.type != "cpu" and skips_on_device(optimizer):
        # Fused updates read these two attributes, which torch's gradient scaler sets.
        optimizer.found_inf, optimizer.grad_scale = (~flag).float(), None  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif flag.device.type == "cpu" or type(optimizer) not in CAPTURABLE or not optimizer.state:
        if flag:
            optimizer.step()
    else:
        held = list(_tensors(optimizer))
        before = [tensor.clone() for tensor in held]
        optimizer.step()
        keep_where(flag, held, before)


def keep_where(flag: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Keep the current values of tensors if the flag is set; otherwise restore the previous ones."""
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(flag, tensor, old))


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.detach()
            yield from (slot for slot in optimizer.state[parameter].values() if isinstance(slot, Tensor))


class GradientHooks:
    """The user's hooks on parameters, by name: they see the complete gradient of a step, as they do on one device.

    Autograd calls `parameter.register_hook` and `register_post_accumulate_grad_hook` with what one backward of one rank
    adds: the gradient of a part of the batch, or of a part of the parameter. A hook that clamps or reads a norm would
    give a different result on each part. So hooks are removed from the parameters and called on the complete gradient.
    Handles that torch returned still remove their hooks.
    """

    def __init__(self) -> None:
        self._before: dict[str, Hooks] = {}
        self._after: dict[str, Hooks] = {}

    def adopt(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Move the hooks from the parameters into this object."""
        for name, parameter in named:
            for held, attribute in ((self._before, _BEFORE), (self._after, _AFTER)):
                hooks = getattr(parameter, attribute, None)
                if hooks and not held.get(name) and not any(_is_ours(hook) for hook in hooks.values()):
                    held[name] = hooks
                    # None would leave torch's registration of the old hooks in place.
                    setattr(parameter, attribute, OrderedDict())

    @property
    def names(self) -> list[str]:
        """Names of the parameters with hooks."""
        return [name for held in (self._before, self._after) for name, hooks in held.items() if hooks]

    def call(self, replica: Replica, key: str) -> None:
        """Call the hooks of one optimizer's parameters that have a gradient. Collective: all ranks call it.

        Hooks that were registered since the last step are moved too; autograd has not called those on shards.
        """
        named = list(replica.groups[key].items())
        self.adopt((name, p) for name, p in named if hasattr(p, "_local_tensor"))
        for name in self.names:
            parameter = replica.groups[key].get(name)
            if parameter is not None and parameter.grad is not None:
                self._call(replica, name, parameter)
        self.adopt(named)

    def _call(self, replica: Replica, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient = replica.whole(parameter.grad, name)
        for hook in list(self._before.get(name, {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        after = list(self._after.get(name, {}).values())
        if after:
            self._call_after(replica, name, parameter, gradient, after)
        else:
            parameter.grad = replica.part_for(gradient, parameter, name)

    def _call_after(
        self, replica: Replica, name: str, parameter: nn.Parameter, gradient: Tensor, hooks: list[Callable[..., Any]]
    ) -> None:
        """Call hooks with a parameter and its gradient; they may change both."""
        whole = replica.whole(parameter.detach(), name)
        is_own = whole.data_ptr() == parameter.data_ptr() and type(parameter) is nn.Parameter
        seen = parameter if is_own else nn.Parameter(whole, parameter.requires_grad)
        seen.grad = gradient
        for hook in hooks:
            hook(seen)
        parameter.grad = None if seen.grad is None else replica.part_for(seen.grad, parameter, name)
        if seen is not parameter:
            with torch.no_grad():
                parameter.copy_(replica.part_for(seen.detach(), parameter, name))


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("manyhands.")
