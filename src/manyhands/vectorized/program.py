"""Program: a training step of many networks of equal structure, as one computation (vmap) over stacked tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..core import LayoutFree, Mean, StrategySpec, Task, TaskError, evaluating, stacked_keys
from ..training import answers as predicted
from .attention import Folded
from .build import Built
from .convolutions import GROUPED, Unfolded
from .dropout_rates import given_chances
from .member_training import CannotStack
from .recurrent import Unrolled
from .stack import (
    AVERAGES,
    BUFFERS,
    CHANCES,
    CLIP,
    COUNT,
    DECAY,
    FROZEN,
    PARAMETERS,
    SEED,
    STEP,
    VALID_SEED,
    Key,
    Stack,
)
from .updates import along

_AS_IT_IS = contextlib.nullcontext()
FIRST_PASS = 1
"""Number of passes over the batch in a training step, for keys of random numbers; evaluation has 0."""


class Program:
    """The training step and evaluation of stacked networks (members), which differ only in the rows of the stack.

    Args:
        built: The network and optimizer of one member, whose structure all share.
        spec: The strategy: precision and determinism.
        device: The device of the stack.
        draws: The random numbers of the members.
    """

    def __init__(self, built: Built, spec: StrategySpec, device: torch.device, draws: LayoutFree) -> None:
        self.built, self.task, self.device = built, built.task, device
        self._spec, self._draws = spec, draws
        self._whole = Whole(built.model.to(device), built.task)
        self.skips = built.task.not_finite == "skip"
        self.clips = built.task.clip is not None
        self.decays = True
        """Whether any member has weight decay; otherwise the update omits it."""
        self.is_random = True
        """Whether the loss draws random numbers; otherwise draws are not intercepted."""
        self.own_chances = False
        """Whether members have different dropout probabilities."""
        self.used: frozenset[str] | None = None
        """Names of the parameters that get gradients, which must be the same in every step; None before the first."""
        self.unfolds = GROUPED
        """Maximum number of inputs per output of convolutions that are unfolded; vmap groups the others."""

    @property
    def model(self) -> nn.Module:
        """The module with the structure of all members; its own tensors are not used."""
        return self._whole.model

    @contextlib.contextmanager
    def trying_kernels(self) -> Iterator[None]:
        """Context in which cuDNN chooses kernels by benchmarking them, unless the strategy is deterministic.

        Grouped convolutions have many implementations, of which cuDNN's heuristics often choose slow ones.
        """
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or not self._spec.deterministic
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    # -- a step ---------------------------------------------------------------------------------------------------

    def factors(self, stack: Stack, factor: Tensor) -> list[dict[str, Tensor]]:
        """Return the factors of the next update, for every parameter group, and last those of moving averages.

        `factor` has the factor of each member's learning rate by its schedule.
        """
        found = []
        for index, (names, update) in enumerate(zip(self.built.groups, self.built.updates, strict=True)):
            numbers = {name: stack[name, str(index)] for name in update.numbers}
            made = update.factors({**numbers, "count": stack[COUNT], "lr": numbers["lr"] * factor})
            dtypes = {stack[PARAMETERS, name].dtype for name in names}
            dtype = dtypes.pop().to_real() if len(dtypes) == 1 else torch.float64
            found.append({name: value.to(dtype) for name, value in made.items()})
        found.append({"rest": 1 - stack[DECAY]} if stack.named(AVERAGES) else {})
        return found

    def step(
        self, stack: Stack, batch: Any, ids: Tensor, factors: Sequence[dict[str, Tensor]], *, shared: bool
    ) -> Tensor:
        """Take a step of all members of a stack, in place; return their losses.

        Args:
            stack: The tensors of the members.
            batch: The samples; row i has those of member i.
            ids: The ids of the samples; row i has those of member i.
            factors: The result of the method `factors`.
            shared: Whether all members have the same samples, which `batch` then has only once, without rows.

        Raises:
            CannotStack: A parameter gets gradients in some steps only.
        """
        # Work on copies of buffers, so that a failure before the update leaves the stack unchanged for a retry.
        buffers = {name: buffer.clone() for name, buffer in stack.named(BUFFERS).items()}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in stack.named(PARAMETERS).items()}
        tensors = {**leaves, **stack.named(FROZEN)}
        odds = stack.named(CHANCES) if self.own_chances else {}

        def keys() -> Tensor:
            return stacked_keys(stack[SEED], stack[STEP], ids)

        loss, buffers = self.compute(tensors, buffers, keys, batch, odds, shared=shared, num_passes=FIRST_PASS)
        total, count = pair_of(loss)
        if count is not None:
            total = total / count.to(total.dtype)
        found = torch.autograd.grad(total.sum(), list(leaves.values()), allow_unused=True)
        gradients = {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
        self._require_same_use(frozenset(gradients))
        with torch.no_grad():
            before = {key: tensor.clone() for key, tensor in stack.tensors.items()} if self.skips else {}
            self._update(stack, gradients, buffers, factors)
            if self.skips:
                _keep_where(_finite(gradients, total), stack, before)
            stack[STEP].add_(1)
        return total.detach()

    def _require_same_use(self, used: frozenset[str]) -> None:
        """Raise CannotStack if the parameters with gradients are not those of the step before.

        A stack has only one count of updates per member, so all its parameters must be updated equally often.
        """
        if self.used is not None and used != self.used:
            some = sorted(used ^ self.used)
            raise CannotStack(f"{some[0]} gets a gradient in some steps only, and a stack counts updates together")
        self.used = used

    def compute(
        self,
        tensors: dict[str, Tensor],
        buffers: dict[str, Tensor],
        keys: Callable[[], Tensor],
        batch: Any,
        odds: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        shared: bool,
        num_passes: int = 0,
        answers: bool = False,
    ) -> Any:
        """Return the loss of every member for its batch, or its predictions, and its buffers afterwards.

        Args:
            tensors: The stacked parameters by name.
            buffers: The stacked buffers by name, which may be changed in place.
            keys: Creates the keys of random numbers; called only if any are drawn.
            batch: The samples; row i has those of member i.
            odds: The stacked dropout probabilities, if they differ between members.
            shared: Whether all members have the same samples, which `batch` then has only once.
            num_passes: Number of passes over the batch, for the keys of random numbers.
            answers: Whether to return predictions instead of losses.
        """

        def one(tensors: dict[str, Tensor], buffers: dict[str, Tensor], keys: Tensor, odds: Any, batch: Any) -> Any:
            own = {f"model.{name}": tensor for name, tensor in {**tensors, **buffers}.items()}
            with given_chances(self.model, odds), self._draws.given(keys, num_passes) if self.is_random else _AS_IT_IS:
                return functional_call(self._whole, own, (batch, answers))

        def every() -> Any:
            own = keys() if self.is_random else next(iter(tensors.values()))
            in_dims = (0, 0, 0, 0, None if shared else 0)
            return vmap(one, in_dims=in_dims)(tensors, buffers, own, dict(odds), batch)

        with self.scope():
            try:
                return every()
            except RuntimeError as error:
                if self.is_random or "randomness" not in str(error):
                    raise
                # The network draws random numbers in this call, but did not when `learn_draws` tried it.
                self.is_random = True
                return every()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Context in which operations on stacked tensors have the strategy's precision and suitable kernels."""
        with contextlib.ExitStack() as held:
            held.enter_context(_quiet_fallback())
            held.enter_context(Folded())
            held.enter_context(Unrolled())
            if self.unfolds:
                held.enter_context(Unfolded(self.unfolds))
            if self._spec.precision == "bf16":
                # Autocast's cache does not work with CUDA graph capture.
                held.enter_context(torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False))
                held.enter_context(Cast(torch.bfloat16))
            yield

    def _update(
        self,
        stack: Stack,
        gradients: dict[str, Tensor],
        buffers: dict[str, Tensor],
        factors: Sequence[dict[str, Tensor]],
    ) -> None:
        for name, buffer in stack.named(BUFFERS).items():
            buffer.copy_(buffers[name])
        if self.clips:
            gradients = _clipped(gradients, stack[CLIP])
        for names, update, own in zip(self.built.groups, self.built.updates, factors, strict=False):
            used = [name for name in names if name in gradients]
            if not used:
                continue
            # Complex tensors are updated as pairs of real numbers, as in torch.
            slots = {slot: [_real(stack[slot, name]) for name in used] for slot in update.slots}
            parameters = [_real(stack[PARAMETERS, name]) for name in used]
            update.apply(parameters, [_real(gradients[name]) for name in used], slots, own, self.decays)
        stack[COUNT].add_(1)
        live = {**stack.named(BUFFERS), **stack.named(PARAMETERS)}
        for name, average in stack.named(AVERAGES).items():
            average.lerp_(live[name].to(average.dtype), along(factors[-1]["rest"], average))

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, stack: Stack, batch: Any, ids: Tensor) -> tuple[tuple[Tensor, Tensor | None], Any]:
        """Return the losses of all members on one batch, and their predictions if the task has metrics, else None.

        The losses are totals and counts, or means and None. Averaged weights are used if there are any.
        """
        tensors = {**stack.named(PARAMETERS), **stack.named(FROZEN)}
        buffers = {name: buffer.clone() for name, buffer in stack.named(BUFFERS).items()}
        for name, average in stack.named(AVERAGES).items():
            kept = buffers if name in buffers else tensors
            kept[name] = average.to(kept[name].dtype)

        def keys() -> Tensor:
            return stacked_keys(stack[VALID_SEED], stack[STEP], ids.expand(len(stack), -1))

        with self.trying_kernels(), evaluating(self._whole.model), torch.no_grad():
            loss, _ = self.compute(tensors, buffers, keys, batch, shared=True)
            answers = None
            if self.task.metrics:
                answers, _ = self.compute(tensors, buffers, keys, batch, shared=True, answers=True)
        return pair_of(loss), answers


class Whole(nn.Module):
    """A network with the loss of its task as one module, so that functional_call can replace the network's tensors."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Any, answers: bool = False) -> Any:
        if answers:
            return predicted(self.task, self.model, batch), {}
        assert self.task.loss is not None
        loss = self.task.loss(self.model, batch)
        # Some layers change their buffers in place, others replace them.
        return (loss.total, loss.count) if isinstance(loss, Mean) else loss, dict(self.model.named_buffers())


def pair_of(loss: Any) -> tuple[Tensor, Tensor | None]:
    """Return the members' losses as totals and counts, or as means and None; raise TaskError if one is not a scalar."""
    total, count = loss if isinstance(loss, tuple) else (loss, None)
    if not isinstance(total, Tensor) or total.dim() != 1:
        raise TaskError(
            "a loss must be a scalar, the mean over the samples of the batch",
            got=f"a tensor of shape {tuple(total.shape[1:])}" if isinstance(total, Tensor) else type(total).__name__,
            remedy="end it with .mean(), or return mh.mean(losses.sum(), count)",
        )
    return total, count


@contextlib.contextmanager
def _quiet_fallback() -> Iterator[None]:
    """Context without torch's warning about operators that have no vmap rule, which every step would repeat."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _clipped(gradients: dict[str, Tensor], most: Tensor) -> dict[str, Tensor]:
    """Return gradients clipped for each member to its maximum norm in `most`."""
    norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients.values()])
    norm = torch.linalg.vector_norm(norms, dim=0)
    scale = (most.to(norm.dtype) / (norm + 1e-6)).clamp(max=1.0)
    return {name: gradient * along(scale, gradient) for name, gradient in gradients.items()}


def _finite(gradients: dict[str, Tensor], total: Tensor) -> Tensor:
    flags = [gradient.flatten(1).isfinite().all(1) for gradient in gradients.values()]
    return torch.stack(flags).all(0) if flags else total.isfinite()


def _keep_where(good: Tensor, stack: Stack, before: dict[Key, Tensor]) -> None:
    """Restore the rows of members whose step is skipped: those for which `good` is False."""
    for key, tensor in stack.tensors.items():
        tensor.copy_(torch.where(good.view(-1, *[1] * (tensor.dim() - 1)), tensor, before[key]))


_NARROW = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d}
_NARROW |= {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}
_WIDE = {torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax, F.softmax, F.log_softmax, F.layer_norm}
_WIDE |= {F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss, F.smooth_l1_loss}
_WIDE |= {F.huber_loss, F.kl_div}


class Cast(TorchFunctionMode):
    """Context in which inputs of layers are cast to `dtype`, and those of losses and softmax to float32.

    This is what autocast does, which does not apply to stacked tensors.

    >>> inputs, weights, bias = torch.randn(3, 4, 5), torch.randn(3, 2, 5), torch.randn(3, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), Cast(torch.bfloat16):
    ...     torch.func.vmap(F.linear)(inputs, weights, bias).dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NARROW or func in _WIDE:
            dtype = self._dtype if func in _NARROW else torch.float32
            args, kwargs = pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_meant = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if is_meant else value
