"""Sync policies: how replicas sum gradients. Base class, registry, and parsing of texts such as "topk(0.01)"."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core import StrategyError, check_policies_by, split_settings
from ..distributed import Pending, World
from .policy_memory import PolicyMemory

POLICIES: dict[str, type[Policy]] = {}
"""Policies by the name used in a StrategySpec; subclasses of Policy with a `name` register themselves."""
_TEXT = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


class _PolicyMeta(ABCMeta):
    """Metaclass of policies: raise an error that lists the known settings if a policy is created with unknown ones."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            inspect.signature(cls.__init__).bind(None, *given, **named)  # type: ignore[misc]
        except TypeError:
            arguments = ", ".join([*map(repr, given), *(f"{name}={value!r}" for name, value in named.items())])
            raise _unknown(cls, f"{cls.__name__}({arguments})") from None
        return super().__call__(*given, **named)


@dataclass(frozen=True)
class Policy(metaclass=_PolicyMeta):
    """Base class of sync policies: how gradients are summed over the replicas.

    A custom policy is a frozen dataclass with a `name`, which can then be used in `sync=`, and the method `reduce`.
    What it does not send in a step, it stores as error feedback. `str(policy)` is the text that creates it.

    >>> @dataclass(frozen=True)
    ... class Signs(Policy):
    ...     name = "signs"
    ...
    ...     def reduce(self, wire, gradient, memory):
    ...         sent = gradient.sign() * gradient.abs().mean()
    ...         memory.feedback.copy_(gradient - sent)
    ...         gradient.copy_(sent)
    ...         yield wire.all_reduce(gradient)
    >>> make_policy("signs(warmup=3)")
    Signs(warmup=3, between='replicas')
    >>> print(Signs())
    signs
    """

    name: ClassVar[str] = ""
    changes_mathematics: ClassVar[bool] = True
    """Whether the result may differ from the exact sum; if so, the plan and the run's log mention it."""
    needs_matrices: ClassVar[bool] = False
    """Whether the policy needs whole gradient matrices, so that it cannot be applied to parts of a parameter."""
    bucket_bytes: ClassVar[int] = 25 << 20
    """Bytes of gradients per bucket; a smaller value lets the encoding of one bucket overlap with sending another."""

    warmup: int = field(default=0, kw_only=True)
    """Number of initial steps that are summed exactly."""
    between: str = field(default="replicas", kw_only=True)
    """Where the policy applies: between all "replicas", or between "hosts", with exact sums within each host."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "name" in cls.__dict__:
            POLICIES[cls.name.lower()] = cls

    def __post_init__(self) -> None:
        require(self.between in ("replicas", "hosts"), 'between must be "replicas" or "hosts"', self.between)
        require(
            isinstance(self.warmup, int) and self.warmup >= 0,
            "warmup must be a whole number of at least 0",
            self.warmup,
        )

    @abstractmethod
    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        """Replace a flat gradient by its sum over the replicas, in place; yield each pending collective to wait for.

        The caller has added the error feedback to the gradient, and has reset it to zero. Store in `memory.feedback`
        what this replica does not send: the sum of all gradients must equal the result plus the sum of all feedback.
        The result must be bitwise equal on all replicas.

        Args:
            wire: The collectives of the replicas.
            gradient: The gradients of a bucket's parameters, concatenated; at least float32.
            memory: The state of the policy for this bucket, such as error feedback and scratch tensors.
        """

    @property
    def explanation(self) -> str:
        """Return the message that informs the user that this policy changes the mathematics."""
        start = f" after {self.warmup} exact steps" if self.warmup else ""
        return f"sync={self} changes the mathematics{start}: results differ from one device's"

    def __str__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        shown = [str(value) for f, value in given if not f.kw_only]
        shown += [f"{f.name}={value}" for f, value in given if f.kw_only and value != f.default]
        return f"{self.name}({','.join(shown)})" if shown else self.name


@dataclass(frozen=True)
class AllReduce(Policy):
    """Sum gradients exactly with the backend's all-reduce; the default policy."""

    name = "allreduce"
    changes_mathematics = False

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        yield wire.all_reduce(gradient)


def make_policy(policy: str | Policy) -> Policy:
    """Return the policy that a text such as "topk(0.01)" describes; a Policy is returned as it is.

    Raises:
        StrategyError: The text names no known policy, or has wrong settings.

    >>> make_policy("allreduce")
    AllReduce(warmup=0, between='replicas')
    """
    if isinstance(policy, Policy):
        return policy
    match = _TEXT.fullmatch(policy)
    kind = POLICIES.get(match[1].lower()) if match else None
    if match is None or kind is None:
        raise StrategyError(
            f"sync must be one of {', '.join(sorted(POLICIES))}",
            got=repr(policy),
            remedy='write for example sync="bf16" or sync="topk(0.01)"',
        )
    return _made(kind, match[2] or "")


def require(holds: bool, rule: str, got: object) -> None:
    """Raise StrategyError with the rule and the value that a policy's setting has, unless `holds`."""
    if not holds:
        raise StrategyError(f"a policy's {rule}", got=repr(got), remedy="change this setting of the policy")


def _made(kind: type[Policy], inside: str) -> Policy:
    given: list[Any] = []
    named: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in split_settings(inside))):
        key, equals, value = part.partition("=")
        if equals:
            named[key.strip()] = _value(value.strip())
        else:
            given.append(_value(part))
    return kind(*given, **named)


def _unknown(kind: Any, got: str) -> StrategyError:
    known = ", ".join(f.name if not f.kw_only else f"{f.name}=" for f in dataclasses.fields(kind))
    return StrategyError(
        f"the policy {kind.name} must have the settings {known}", got=got, remedy=f"write for example {_example(kind)}"
    )


def _example(kind: type[Policy]) -> str:
    names = [f.name for f in dataclasses.fields(kind) if not f.kw_only or f.name in kind.__dict__]
    return f"{kind.name}({', '.join(f'{name}=…' for name in names)})" if names else f"{kind.name}(warmup=10)"


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


check_policies_by(make_policy)


class PolicyCollectives:
    """The collectives of the replicas, for `Policy.reduce`, which waits for a started collective by yielding it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rank, self.size = world.rank, world.size
        self.num_bytes = 0
        """Bytes that this replica sent since the counter was last set to 0, calculated for ring algorithms."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start to replace a tensor by its sum over the replicas, in place."""
        self.num_bytes += 2 * _bytes(tensor) * (self.size - 1) // self.size
        return self._world.start_all_reduce(tensor)

    def all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Pending]:
        """Start to gather the tensors of all replicas; return their stack in rank order, valid after waiting.

        `into` is an optional tensor for the result.
        """
        self.num_bytes += _bytes(tensor) * (self.size - 1)
        if into is None:
            into = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return into, self._world.start_all_gather(tensor, into)

    def all_to_all(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Pending]:
        """Start to send row r of a tensor to replica r; row r of the returned tensor comes from replica r.

        The result is valid after waiting. `into` is an optional tensor for it.
        """
        self.num_bytes += _bytes(tensor) * (self.size - 1) // self.size
        into = torch.empty_like(tensor) if into is None else into
        return into, self._world.start_all_to_all(tensor, into)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_OURS = __name__.partition(".")[0]


def carrying(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to register the user's custom policies in the process that calls it, such as a rank.

    >>> carrying(max)(1, 2)
    2
    """
    own = [kind for kind in POLICIES.values() if kind.__module__.partition(".")[0] != _OURS]
    return functools.partial(_with_policies, own, fn) if own else fn


def _with_policies(kinds: Sequence[type[Policy]], fn: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    for kind in kinds:
        POLICIES[kind.name.lower()] = kind
    return fn(*given, **named)
