"""Policies: how replicas agree on a gradient. A policy is a small object that prints as the text that makes it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ..core import StrategyError, check_policies_by, split_settings
from ..distributed import Pending
from .collectives import PolicyCollectives
from .policy_memory import PolicyMemory

POLICIES: dict[str, type[Policy]] = {}
"""Policies by the name that a StrategySpec gives; a subclass of Policy with a `name` enters itself."""
_TEXT = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


class _Made(ABCMeta):
    """Says which settings a policy has where it is given others."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            inspect.signature(cls.__init__).bind(None, *given, **named)  # type: ignore[misc]
        except TypeError:
            told = ", ".join([*map(repr, given), *(f"{name}={value!r}" for name, value in named.items())])
            raise _unknown(cls, f"{cls.__name__}({told})") from None
        return super().__call__(*given, **named)


@dataclass(frozen=True)
class Policy(metaclass=_Made):
    """How the sum of the replicas' gradients comes about: frozen settings and one method.

    A policy of your own is one class; its name is then known to `sync=`. What it does not send it keeps as feedback.

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
    """Whether the result may differ from the exact sum; if so it is said in the plan, the log and the record."""
    needs_matrices: ClassVar[bool] = False
    """Whether it looks at whole parameters, so that parts of them will not do."""
    bucket_bytes: ClassVar[int] = 25 << 20
    """Gradients that it takes at a time: few where computing one part can overlap with sending another."""

    warmup: int = field(default=0, kw_only=True)
    """Steps at the beginning that are summed exactly."""
    between: str = field(default="replicas", kw_only=True)
    """Who agrees by it: all "replicas", or "hosts", with exact sums within each of them."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "name" in cls.__dict__:
            POLICIES[cls.name.lower()] = cls

    def __post_init__(self) -> None:
        require(self.between in ("replicas", "hosts"), 'between is "replicas" or "hosts"', self.between)
        require(isinstance(self.warmup, int) and self.warmup >= 0, "warmup is a whole number from 0", self.warmup)

    @abstractmethod
    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        """Replaces a flat gradient by its sum over the replicas; yields whatever it must wait for.

        The feedback is in the gradient already, and zero: what this replica does not send goes there, so that over the
        replicas gradient = result + feedback. The result must be the same on all of them, bit for bit.
        """

    @property
    def said(self) -> str:
        """What a person is told of a policy that changes the mathematics."""
        start = f" after {self.warmup} exact steps" if self.warmup else ""
        return f"sync={self} changes the mathematics{start}: results differ from one device's"

    def __str__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        shown = [str(value) for f, value in given if not f.kw_only]
        shown += [f"{f.name}={value}" for f, value in given if f.kw_only and value != f.default]
        return f"{self.name}({','.join(shown)})" if shown else self.name


@dataclass(frozen=True)
class AllReduce(Policy):
    """The exact sum, by the backend's own all-reduce."""

    name = "allreduce"
    changes_mathematics = False

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        yield wire.all_reduce(gradient)


def make_policy(policy: str | Policy) -> Policy:
    """The policy of this text.

    >>> make_policy("allreduce")
    AllReduce(warmup=0, between='replicas')
    """
    if isinstance(policy, Policy):
        return policy
    match = _TEXT.fullmatch(policy)
    kind = POLICIES.get(match[1].lower()) if match else None
    if match is None or kind is None:
        raise StrategyError(
            f"sync must be one of {', '.join(POLICIES)}",
            got=repr(policy),
            remedy='write for instance sync="bf16" or sync="topk(0.01)"',
        )
    return _made(kind, match[2] or "")


def require(holds: bool, rule: str, got: object) -> None:
    """Refuses a setting of a policy."""
    if not holds:
        raise StrategyError(f"a policy's {rule}", got=repr(got), remedy="correct it")


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
        f"the policy {kind.name} has the settings {known}", got=got, remedy=f"write for instance {_example(kind)}"
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
