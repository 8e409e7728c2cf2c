"""Auto: the policy that should take the least time here, by the links, the gradient and the first steps.

The model, in seconds of a step: what was measured without waiting, plus the policy's own arithmetic, plus what of its
exchange does not fit behind backward, rounds * latency + bytes / bandwidth - OVERLAP * the step. Local policies have
their exchange once in so many steps and hide nothing. Arithmetic, rounds and bytes come from a dry run on the gradient.
The exact steps of a warm-up are spread over a short run.
A policy that changes the mathematics needs more steps for the same loss: its time is multiplied by a price, see LOSSY.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed import NullWorld, Pending, World
from .bucket_exchange import BucketExchange, PolicyState
from .collectives import PolicyCollectives
from .links import Links
from .local import Local
from .policy import AllReduce, Policy, make_policy, require
from .policy_memory import PolicyMemory

OVERLAP = 0.4
"""The part of a step in which gradients can travel while others are computed."""
MARGIN = 0.75
"""How much of the exact sum's time another policy may take at most, to be chosen: a small gain is soon a loss."""
SAMPLE = 1 << 18
"""Numbers of the gradient that a dry run looks at."""
HORIZON = 200
"""Steps over which the exact ones of a policy's warm-up are spread."""
SETTLED = 1 << 20
"""Steps after which every policy is over its beginning."""
LOSSY = {"bf16": 1.0, "int8": 1.02, "powersgd(4)": 1.15, "topk(0.01)": 1.8, "localsteps(8)": 1.15}
"""Policies that are considered with lossy=True, and how many times the steps they need, from benchmarks.convergence."""
LEAST = {1.02: 1 / 4, 1.15: 1 / 16}
"""The best that can be hoped for: by the price of a policy, what of the waiting is left."""
LOCAL_PRICE = 0.0025
"""What each step between two agreements adds to the price of a local policy."""
SHARE = 0.15
"""The part of the time that agreements of a local policy may take, where its number of steps is chosen."""


@dataclass(frozen=True)
class Auto(Policy):
    """Chooses after a few exact steps, says why, and goes back to the exact sum if it was wrong.

    Only what keeps the answer is considered, unless `lossy`.

    >>> print(Auto(lossy=True))
    auto(lossy=True)
    """

    name = "auto"
    changes_mathematics = False
    lossy: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.lossy, bool), "lossy is True or False", self.lossy)

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        yield wire.all_reduce(gradient)


@dataclass(frozen=True)
class Forecast:
    """What a policy would take."""

    policy: Policy
    seconds: float
    """Of a step."""
    price: float = 1.0
    """How many times the steps of the exact sum it needs."""

    @property
    def cost(self) -> float:
        """Seconds for as much learning as an exact step gives."""
        return self.seconds * self.price


def is_open(policy: Auto, *, exact: float, alone: float) -> bool:
    """Whether anything but the exact sum can be chosen: if not, nothing need be measured.

    >>> is_open(Auto(lossy=True), exact=0.04, alone=0.02), is_open(Auto(), exact=0.04, alone=0.02)
    (True, False)
    """
    hoped = min(price * (alone + left * (exact - alone)) for price, left in LEAST.items())
    return policy.lossy and hoped < MARGIN * exact


def forecasts(
    links: Links, parameters: Mapping[str, Tensor], size: int, *, exact: float, alone: float, lossy: bool
) -> list[Forecast]:
    """All policies that are considered, the cheapest first.

    `exact` and `alone` are the seconds of a step with the exact sum and of its part without the network.
    """
    found = [Forecast(AllReduce(), exact)]
    real = {name: parameter for name, parameter in parameters.items() if parameter.is_floating_point()}
    if lossy and size > 1 and len(real) == len(parameters) and real:
        for text, price in LOSSY.items():
            found.append(_forecast(make_policy(text), links, real, size, exact, alone, price))
        carrier = next(f.policy for f in found if f.policy.name == "int8")
        once = _DryRun.of(carrier, real, size)
        exchange = once.seconds + links.seconds(once.num_bytes, once.rounds + 2)
        every = min(64, max(8, math.ceil(exchange / (SHARE * alone))))
        far = make_policy(f"localsteps({every},by=int8)")
        found.append(
            _forecast(far, links, real, size, exact, alone, LOSSY["localsteps(8)"] + LOCAL_PRICE * (every - 8))
        )
    return sorted(found, key=lambda forecast: forecast.cost)


def choose(found: list[Forecast]) -> Forecast:
    """The cheapest one, if it is enough cheaper than the exact sum."""
    exact = next(forecast for forecast in found if isinstance(forecast.policy, AllReduce))
    return found[0] if found[0].cost < MARGIN * exact.cost else exact


def _forecast(
    policy: Policy,
    links: Links,
    parameters: Mapping[str, Tensor],
    size: int,
    exact: float,
    alone: float,
    price: float,
) -> Forecast:
    carrier = policy.carrier if isinstance(policy, Local) else policy
    dry = _DryRun.of(carrier, parameters, size)
    if isinstance(policy, Local):
        meeting = dry.seconds + links.seconds(dry.num_bytes, dry.rounds + 2)
        return Forecast(policy, alone + meeting / policy.every, price)
    exposed = max(0.0, links.seconds(dry.num_bytes, dry.rounds) - OVERLAP * alone)
    early = policy.warmup * (exact - alone) / HORIZON
    return Forecast(policy, alone + dry.seconds + exposed + early, price)


@dataclass(frozen=True)
class _DryRun:
    """A policy's own work for one gradient."""

    seconds: float
    num_bytes: float
    rounds: int

    @classmethod
    def of(cls, policy: Policy, parameters: Mapping[str, Tensor], size: int) -> _DryRun:
        some: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if sum(p.numel() for p in some.values()) < SAMPLE:
                some[name] = parameter.detach()
        taken = sum(parameter.numel() for parameter in some.values())
        factor = sum(parameter.numel() for parameter in parameters.values()) / max(1, taken)
        first = next(iter(some.values()))
        course = BucketExchange(policy, _Alone(first.device, size), some)
        course.take_over(PolicyState(num_steps=SETTLED))
        seconds, rounds = math.inf, 0
        gradient = torch.randn(taken, dtype=torch.float32, device=first.device).to(first.dtype)
        for _ in range(3):
            flat, rounds = gradient.clone(), 1
            began = _now(first.device)
            course.begin(flat)
            while course.advance():
                rounds += 1
            seconds = min(seconds, _now(first.device) - began)
        return cls(seconds * factor, course.num_bytes * factor, rounds)


class _Alone(NullWorld):
    """One rank that acts as one of several: nothing travels."""

    def __init__(self, device: torch.device, size: int) -> None:
        super().__init__()
        self.device, self.size = device, size

    def start_all_gather(self, tensor: Tensor, into: Tensor) -> Pending:
        into[:] = tensor
        return Pending()

    def start_all_to_all(self, tensor: Tensor, into: Tensor) -> Pending:
        into.copy_(tensor)
        return Pending()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def tell_choice(links: Links, found: list[Forecast], chosen: Forecast, world: World) -> str:
    """Why a policy was chosen, in one line."""
    shown = ", ".join(f"{f.policy} {1000 * f.seconds:.3g} ms (x {f.price:.3g} steps)" for f in found[:4])
    exact = next(f for f in found if isinstance(f.policy, AllReduce))
    if exact not in found[:4]:
        shown += f", {exact.policy} {1000 * exact.seconds:.3g} ms"
    said = f"sync={chosen.policy} was chosen for links of {links} between {world.size} replicas: a step takes {shown}"
    return said if not chosen.policy.changes_mathematics else f"{said}. {chosen.policy.said}"
