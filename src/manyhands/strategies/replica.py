"""Replica: what one rank holds of a network, and how a step is taken on it. One device alone is the plain case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategySpec, each_of
from ..distributed import World
from ..graph import fuse_on_cpu
from .buffers import Buffers
from .gradient_hooks import GradientHooks
from .local_updates import BY_ELEMENT, on_own_parts
from .optimizer_traits import stepping
from .skipped_updates import step_where

if TYPE_CHECKING:
    from .partition_drawing import Outline

_AS_IT_IS = contextlib.nullcontext()


class Replica:
    """One replica of a network with its optimizers. Subclasses change what differs when it is split."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        self.spec, self.world, self.model, self.optimizers = spec, world, model, dict(optimizers)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.is_narrow = spec.precision == "bf16"
        """Whether the network is computed in bfloat16."""
        self.group: World = world
        """The ranks whose gradients are summed in every step; all of them, unless replicas go apart."""
        self.hooks = GradientHooks()
        """The user's hooks on parameters, which are called with complete gradients."""
        self.buffers = Buffers(model, {}, world)
        """Buffers that forward updates, which the parts of a batch leave as the whole batch would."""
        self.notes: list[str] = []
        """What a person should know of how the network was split."""
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
    def speaks(self) -> bool:
        """Whether this rank's loss counts: of ranks that work on the same samples it is one's."""
        return True

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Where the network and its loss are computed: the chosen precision."""
        narrow: contextlib.AbstractContextManager[object] = _AS_IT_IS
        if self.is_narrow:
            # Narrow copies of all weights would outlive the blocks that are computed again, which have them again.
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
        """The loss of a micro-batch, as far as this rank computes it."""
        return function(self.model, data)

    def ghost(self, is_ghost: bool) -> None:
        """Says whether the micro-batch that follows is only borrowed, so that its statistics must not count."""

    def riders(self, key: str) -> Tensor | None:
        """Room for three numbers that are summed along with the gradients; None: they must travel by themselves."""
        return None

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        """Adds the objective's gradients to the parameters of one optimizer; `last` of the step's micro-batches."""
        if len(self.optimizers) == 1:
            objective.backward()
        else:
            objective.backward(inputs=[p for p in self.groups[key].values() if p.requires_grad])

    @property
    def is_recordable(self) -> bool:
        """Whether forward and backward may stand in a CUDA graph: no collective of another kind lies in them."""
        return True

    @property
    def is_local(self) -> bool:
        """Whether forward needs no other replica."""
        return True

    @property
    def records_exchange(self) -> bool:
        """Whether the sums over the replicas may stand in a CUDA graph too."""
        return self.world.is_recordable

    @property
    def drifts(self) -> bool:
        """Whether replicas go apart between agreements."""
        return False

    @property
    def agrees(self) -> bool:
        """Whether all replicas hold the same network now."""
        return True

    def note(self, key: str, row: Tensor) -> bool:
        """Replicas that drift have taken a step, with its numbers in a row; True when it is time to agree."""
        return False

    def meet(self, key: str) -> None:
        """Makes the replicas agree on one optimizer's parameters; rows become their sums. All must call it together."""

    def join(self, others: Iterable[Tensor] = ()) -> None:
        """Averages what stays a replica's own when they agree: the states of its optimizers, and whatever else."""

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that this rank sent to other replicas in the last step."""
        return 0

    def policy_state(self) -> dict[str, Tensor]:
        """What the policy remembers, of all replicas; all of them must ask together."""
        return {}

    def own_policy_state(self) -> dict[str, Tensor]:
        """What the policy remembers, as this rank holds it, without asking others; `load_policy_state` takes it too."""
        return {}

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        """Goes on from what `policy_state` gave, on any number of replicas; says what could not be taken over."""
        return "gradients that the policy had not sent yet are left out: no policy here keeps any" if saved else ""

    def defer(self, is_deferred: bool) -> None:
        """Whether gradients wait for `pack` and `exchange` instead of being summed during backward."""

    def usage(self, key: str) -> Any:
        """Which parameters the last step used, as `settle` takes it."""
        return None

    def settle(self, key: str, usage: Any) -> None:
        """Takes it for known which parameters are used, so that nobody need look; None looks again."""

    def pack(self, key: str) -> None:
        """Lays deferred gradients out for their exchange."""

    def exchange(self, key: str) -> None:
        """Sums deferred gradients over the replicas."""

    def finish(self, key: str, count: Tensor | None) -> None:
        """Completes the gradients of one optimizer; divides them by what was counted, where the loss counts."""
        if count is not None:
            gradients = [p.grad for p in self.groups[key].values() if p.grad is not None]
            torch._foreach_div_(gradients, count)

    def clip(self, key: str, max_norm: float) -> Tensor:
        """Shortens the gradient to a norm; returns the norm it had."""
        return nn.utils.clip_grad_norm_(list(self.groups[key].values()), max_norm)

    def is_finite(self, key: str) -> Tensor:
        """Whether every gradient is finite, as a flag on the device."""
        gradients = [p.grad for p in self.groups[key].values() if p.grad is not None]
        if not gradients:
            return torch.ones((), dtype=torch.bool, device=self.world.device)
        return torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all()

    def update(self, key: str, where: Tensor | None = None) -> None:
        """Takes the optimizer's step, only if the flag `where` is set, and forgets the gradients."""
        if key in self._parked:
            bring = self.bringing(key)
            if where is None or bool(where):
                self._parked[key].step(bring)
        else:
            with stepping(self, self.optimizers[key]):
                step_where(self.optimizers[key], where)
        self.optimizers[key].zero_grad(set_to_none=True)
        for parameter in self._untrained.values():
            parameter.grad = None

    def bringing(self, key: str) -> Callable[[nn.Parameter], Tensor | None]:
        """Takes the gradients off the parameters of one optimizer, and gives them one by one."""
        held: dict[nn.Parameter, Tensor | None] = {}
        for group in self.optimizers[key].param_groups:
            for parameter in group["params"]:
                held[parameter], parameter.grad = parameter.grad, None
        return held.pop

    def forget(self) -> None:
        """Lets go of the gradients of the step under way."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def lay_out_anew(self) -> None:
        """Follows parameters that lie otherwise in memory than before."""

    def plain(self, value: Any) -> Any:
        """A loss, or what the network gave, with whole tensors as on one device."""
        return value

    def whole(self, tensor: Tensor, name: str = "") -> Tensor:
        """All of a parameter, its gradient or a slot of its optimizer, on every rank that calls it together."""
        return tensor

    def outline(self) -> Outline | None:
        """Which pieces of the network are where, if it is cut; all ranks ask together."""
        return None

    def hints(self) -> list[str]:
        """What to know before a run starts."""
        return []

    def remarks(self) -> list[str]:
        """What was seen of how the work was split; all ranks ask together."""
        return []

    def gathered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Nested dicts with whole tensors in the place of parts, which stand under the names of parameters."""
        return self._gathered(parts, "", set(self.names.values()))  # type: ignore[no-any-return]

    def _gathered(self, value: Any, name: str, names: set[str]) -> Any:
        if isinstance(value, Tensor):
            return self.whole(value, name)
        if not isinstance(value, dict):
            return value
        return {key: self._gathered(child, key if key in names else name, names) for key, child in value.items()}

    def part_for(self, whole: Tensor, like: Tensor, name: str = "") -> Tensor:
        """What this rank holds of a whole tensor, laid out like the parameter of this name."""
        return whole

    def load(self, whole: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Puts whole tensors into the network, by the names of the plain module."""
        self.model.load_state_dict(self.parts(whole), strict=strict)

    def parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors of the network, by name."""
        held = self.model.state_dict()
        return {n: self.part_for(value, held[n], n) if n in held else value for n, value in whole.items()}

    def align_buffers(self) -> None:
        """Gives every replica the first one's buffers."""

    def differences(self) -> list[str]:
        """Names of parameters and buffers that should be equal over the replicas and are not."""
        return []

    def close(self) -> None:
        """Takes off whatever the strategy put on the network."""

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter in mine}
