"""Auto: a policy that selects another, with the least expected time for the measured network and the first steps.

The cost model, in seconds per step: the measured time without waiting, plus the policy's own computation, plus the part
of its communication that backward does not hide, rounds * latency + bytes / bandwidth - OVERLAP * the step. Local
policies communicate once every few steps and hide nothing. Computation, rounds and bytes come from a dry run on the
gradient. The exact steps of a warm-up are amortized over a short run. A policy that changes the mathematics needs more
steps for the same loss, so its time is multiplied by a factor, its price (see LOSSY).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core import format_duration
from ..distributed import NullWorld, Pending, World
from .buckets import BucketExchange
from .links import Links
from .local import Local
from .policy import AllReduce, Policy, PolicyCollectives, make_policy, require
from .policy_memory import PolicyMemory
from .policy_state import PolicyState

OVERLAP = 0.4
"""The fraction of a step in which gradients can be sent while others are computed."""
MARGIN = 0.75
"""Choose another policy only if its cost is below this fraction of that of the exact sum: estimates have errors."""
SAMPLE = 1 << 18
"""Number of gradient elements from which a dry run takes no further parameters."""
HORIZON = 200
"""Number of steps over which the cost of a policy's exact warm-up steps is amortized."""
SETTLED = 1 << 20
"""Number of steps after which every policy is past its warm-up."""
LOSSY = {"bf16": 1.0, "int8": 1.02, "powersgd(4)": 1.15, "topk(0.01)": 1.8, "localsteps(8)": 1.15}
"""Policies considered with lossy=True, and their prices: steps needed for the same loss, relative to the exact sum.

The prices were measured by benchmarks.convergence.
"""
LEAST = {1.02: 1 / 4, 1.15: 1 / 16}
"""The most that a policy can save: the fraction of the time spent waiting for the network that remains, by price."""
LOCAL_PRICE = 0.0025
"""What each local step between two synchronizations, beyond eight, adds to the price of a local policy."""
SHARE = 0.15
"""The time of a synchronization relative to the local steps before it, from which their number is chosen."""


@dataclass(frozen=True)
class Auto(Policy):
    """Policy that selects another one after a few exact steps, logs the reason, and reverts it if steps are slower.

    Without `lossy=True` it considers only policies that do not change the mathematics, and keeps the exact sum.

    >>> print(Auto(lossy=True))
    auto(lossy=True)
    """

    name = "auto"
    changes_mathematics = False
    lossy: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.lossy, bool), "lossy must be True or False", self.lossy)

    def reduce(self, wire: PolicyCollectives, gradient: Tensor, memory: PolicyMemory) -> Iterator[Pending]:
        yield wire.all_reduce(gradient)


@dataclass(frozen=True)
class Forecast:
    """The expected cost of training under a sync policy."""

    policy: Policy
    seconds: float
    """Seconds per step."""
    price: float = 1.0
    """Number of steps needed for the same loss, relative to the exact sum."""

    @property
    def cost(self) -> float:
        """Return the expected seconds for the same progress as one step with the exact sum."""
        return self.seconds * self.price


def is_open(policy: Auto, *, exact: float, alone: float) -> bool:
    """Return whether another policy can be cheaper than the exact sum; if not, the links need not be measured.

    Args:
        policy: The Auto policy with the user's settings.
        exact: Seconds of a step with the exact sum.
        alone: Seconds of the part of that step in which the replica does not wait for the network.

    >>> is_open(Auto(lossy=True), exact=0.04, alone=0.02), is_open(Auto(), exact=0.04, alone=0.02)
    (True, False)
    """
    hoped = min(price * (alone + left * (exact - alone)) for price, left in LEAST.items())
    return policy.lossy and hoped < MARGIN * exact


def forecasts(
    links: Links, parameters: Mapping[str, Tensor], size: int, *, exact: float, alone: float, lossy: bool
) -> list[Forecast]:
    """Return forecasts of the policies that are considered, the cheapest first.

    Args:
        links: Measured latency and bandwidth between the replicas.
        parameters: Trainable parameters by name, which have the shapes of the gradients.
        size: Number of replicas.
        exact: Seconds of a step with the exact sum.
        alone: Seconds of the part of that step in which the replica does not wait for the network.
        lossy: Whether to consider policies that change the mathematics.
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
    """Return the cheapest forecast if its cost is below MARGIN times that of the exact sum, else the exact sum's."""
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
        exchange = dry.seconds + links.seconds(dry.num_bytes, dry.rounds + 2)
        return Forecast(policy, alone + exchange / policy.every, price)
    exposed = max(0.0, links.seconds(dry.num_bytes, dry.rounds) - OVERLAP * alone)
    early = policy.warmup * (exact - alone) / HORIZON
    return Forecast(policy, alone + dry.seconds + exposed + early, price)


@dataclass(frozen=True)
class _DryRun:
    """The cost of exchanging one gradient under a policy: seconds of computation, bytes and communication rounds."""

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
        exchange = BucketExchange(policy, _DryRunWorld(first.device, size), some)
        exchange.take_over(PolicyState(num_steps=SETTLED))
        seconds, rounds = math.inf, 0
        gradient = torch.randn(taken, dtype=torch.float32, device=first.device).to(first.dtype)
        for _ in range(3):
            flat, rounds = gradient.clone(), 1
            began = _now(first.device)
            exchange.begin(flat)
            while exchange.advance():
                rounds += 1
            seconds = min(seconds, _now(first.device) - began)
        return cls(seconds * factor, exchange.num_bytes * factor, rounds)


class _DryRunWorld(NullWorld):
    """World for dry runs: one process that acts as one of `size` ranks, with collectives that send nothing."""

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


def describe_choice(links: Links, found: list[Forecast], chosen: Forecast, world: World) -> str:
    """Return one line with the chosen policy, the measured links, and the forecasts that were compared."""
    shown = ", ".join(f"{f.policy} {format_duration(f.seconds)} (x {f.price:.3g} steps)" for f in found[:4])
    exact = next(f for f in found if isinstance(f.policy, AllReduce))
    if exact not in found[:4]:
        shown += f", {exact.policy} {format_duration(exact.seconds)}"
    text = f"sync={chosen.policy} was chosen for links of {links} between {world.size} replicas: a step takes {shown}"
    return text if not chosen.policy.changes_mathematics else f"{text}. {chosen.policy.explanation}"
