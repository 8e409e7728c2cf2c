"""Contract tests for sync policies: a base class for test classes, given a policy and its precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import World
from ..sync import BucketExchange, Policy, PolicyState, make_policy
from .threads import run_threads

Gradients = Sequence[Mapping[str, Tensor]]
"""The gradients of a replica by parameter name, for each step."""
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (24, 40), "bias": (40,), "kernel": (8, 3, 5, 5), "number": ()}
ODD: dict[str, tuple[int, ...]] = {"a": (7, 13), "empty": (0, 3), "b": (1,), "c": (257,)}
TAIL = [3.0, 1.0, 4194303.0]
"""Piggybacked values behind a gradient: four times the last is about the largest whole number in single precision."""


@dataclass
class PolicyOutcome:
    """The outcome of one exchange on one replica: summed gradient, error feedback, piggybacked values, bytes sent."""

    result: Tensor
    feedback: Tensor
    tail: Tensor
    num_bytes: int
    num_exact_bytes: int


class PolicyContract:
    """Contract tests of a sync policy. Subclass it in a test module, and set `policy`, `precision` and `share`."""

    policy: Policy
    """The policy under test."""
    precision: float
    """Maximum relative difference from the exact sum, for gradients that `suiting` returns."""
    share: float
    """Maximum bytes that two replicas send, relative to those of the exact sum."""
    sizes: tuple[int, ...] = (1, 2, 3, 4)
    """The numbers of replicas to test."""

    def run(self, fn: Callable[[World], Any], size: int) -> list[Any]:
        """Run `fn(world)` on `size` ranks, by default threads; return the results in rank order."""
        return run_threads(fn, size)

    def suiting(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a random gradient that the policy transmits within `precision` in one step.

        Override it for a policy that transmits only some gradients exactly, such as sparse or low-rank ones.
        """
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # -- tests ----------------------------------------------------------------------------------------------------

    def test_its_text_makes_it_again(self) -> None:
        assert make_policy(str(self.policy)) == self.policy
        assert make_policy(repr(self.policy)) == self.policy

    def test_equal_gradients_give_their_mean(self) -> None:
        for size in self.sizes:
            for shapes in (SHAPES, ODD):
                for dtype, factor in CASES:
                    gradient = self._suiting(shapes, dtype, factor)
                    flat = _flat(gradient)
                    for sums in self._exchange(size, [[gradient]] * size):
                        error = _error(sums[0].result / size, flat)
                        assert error <= self.precision, f"{error:.1e} with {size} replicas, {dtype}, {factor:g}"

    def test_narrow_gradients_are_summed_in_single_precision(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            gradient = self._suiting(SHAPES, dtype, 1.0)
            for sums in self._exchange(3, [[gradient]] * 3):
                assert sums[0].result.dtype == dtype
                assert sums[0].feedback.dtype == torch.float32
                assert _error(sums[0].result.float() / 3, _flat(gradient).float()) <= self.precision + 2**-8

    def test_every_replica_gets_the_same_bits(self) -> None:
        for size in self.sizes:
            steps = [[_random(SHAPES, 10 * rank + step) for step in range(3)] for rank in range(size)]
            first, *others = self._exchange(size, steps)
            assert all(torch.equal(a.result, b.result) for sums in others for a, b in zip(first, sums, strict=True))

    def test_what_is_not_sent_is_kept(self) -> None:
        for size in self.sizes:
            for dtype in (torch.float32, torch.float64):
                steps = [[_random(SHAPES, 10 * rank + step, dtype) for step in range(5)] for rank in range(size)]
                found = self._exchange(size, steps)
                owed = torch.zeros_like(found[0][0].feedback)
                for step in range(5):
                    wanted = owed + sum(_flat(steps[rank][step]) for rank in range(size))
                    owed = torch.stack([found[rank][step].feedback for rank in range(size)]).sum(0)
                    got = found[0][step].result + owed
                    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)

    def test_over_time_the_sum_is_right(self) -> None:
        steps = [[_random(SHAPES, rank)] * 128 for rank in range(2)]
        wanted = _flat(steps[0][0]) + _flat(steps[1][0])
        results = torch.stack([sums.result for sums in self._exchange(2, steps)[0]])
        errors = [_error(results[:n].mean(0), wanted) for n in (32, 128)]
        assert errors[1] <= max(0.35 * errors[0], 1e-6), errors

    def test_zeros_stay_zeros_and_what_comes_after_them_is_carried(self) -> None:
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        gradient = self._suiting(SHAPES, torch.float32, 1.0)
        first, second = self._exchange(2, [[zeros, gradient]] * 2)[0]
        assert not first.result.any()
        assert not first.feedback.any()
        assert _error(second.result / 2, _flat(gradient)) <= self.precision

    def test_a_value_that_is_not_finite_shows_and_does_not_stay(self) -> None:
        for value in (float("nan"), float("inf")):
            good = self._suiting(SHAPES, torch.float32, 1.0)
            bad = {name: gradient.clone() for name, gradient in good.items()}
            bad["matrix"][3, 5] = value
            for sums in self._exchange(2, [[bad, good], [good, good]]):
                assert not sums[0].result.isfinite().all()
                assert sums[1].result.isfinite().all()

    def test_riders_stay_exact(self) -> None:
        for size in self.sizes:
            for sums in self._exchange(size, [[_random(SHAPES, rank)] for rank in range(size)]):
                assert sums[0].tail.tolist() == [number * size for number in TAIL]

    def test_bytes_are_counted(self) -> None:
        shapes = {"matrix": (200, 300), "bias": (300,)}
        for sums in self._exchange(2, [[_random(shapes, rank)] for rank in range(2)]):
            assert 0 < sums[0].num_bytes <= self.share * sums[0].num_exact_bytes

    def test_warm_up_is_exact(self) -> None:
        warm = type(self.policy)(**{**_settings(self.policy), "warmup": 2})
        steps = [[_random(SHAPES, 10 * rank + step) for step in range(3)] for rank in range(2)]
        sums = self._exchange(2, steps, warm)[0]
        for step in range(2):
            assert torch.equal(sums[step].result, _flat(steps[0][step]) + _flat(steps[1][step]))
            assert sums[step].num_bytes == sums[step].num_exact_bytes

    def test_state_goes_on_among_as_many_replicas_and_is_dealt_out_among_others(self) -> None:
        steps = [[_random(SHAPES, 10 * rank + step) for step in range(4)] for rank in range(3)]
        whole = self._exchange(3, steps)
        saved = self.run(lambda world: self._state_after(world, steps[world.rank][:2]), 3)[0]
        assert saved.num_steps == 2
        again = self._exchange(3, [part[2:] for part in steps], state=saved)
        for rank in range(3):
            assert all(torch.equal(a.result, b.result) for a, b in zip(again[rank], whole[rank][2:], strict=True))
        owed = torch.stack([sums[1].feedback for sums in whole]).sum(0)
        for size in (2, 4):
            zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            found = self._exchange(size, [[zeros]] * size, state=saved)
            got = found[0][0].result + torch.stack([sums[0].feedback for sums in found]).sum(0)
            torch.testing.assert_close(got, owed, rtol=0, atol=1e-5)

    # -- how ------------------------------------------------------------------------------------------------------

    def _suiting(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, factor: float) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = {name: self.suiting(name, shape, generator) for name, shape in shapes.items()}
        return {name: (tensor * factor).to(dtype) for name, tensor in made.items()}

    def _exchange(
        self, size: int, steps: Sequence[Gradients], policy: Policy | None = None, state: PolicyState | None = None
    ) -> list[list[PolicyOutcome]]:
        """Exchange the gradients in `steps` (by rank) over `size` replicas; return the outcome of each step by rank."""

        def work(world: World) -> list[PolicyOutcome]:
            mine = steps[world.rank]
            exchange = BucketExchange(policy or self.policy, world, mine[0])
            if state is not None:
                exchange.take_over(state.share(world))
            return [_step(exchange, gradient) for gradient in mine]

        return self.run(work, size)

    def _state_after(self, world: World, gradients: Gradients) -> PolicyState:
        exchange = BucketExchange(self.policy, world, gradients[0])
        for gradient in gradients:
            _step(exchange, gradient)
        return PolicyState.of(exchange.state().gathered(world).tensors())


CASES = [
    (torch.float32, 1.0),
    (torch.float32, 1e30),
    (torch.float32, 1e-30),
    (torch.float64, 1e200),
    (torch.float64, 1.0),
]


def _step(exchange: BucketExchange, gradient: Mapping[str, Tensor]) -> PolicyOutcome:
    own = _flat(gradient)
    flat = torch.cat([own, torch.tensor(TAIL, dtype=own.dtype)])
    exchange.begin(flat)
    while exchange.advance():
        pass
    feedback = torch.cat([part.reshape(-1) for part in exchange.state().feedback.values()])
    result, tail = flat.split([own.numel(), len(TAIL)])
    return PolicyOutcome(result, feedback, tail, exchange.num_bytes, exchange.num_exact_bytes)


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of a tensor, computed after scaling, because squares of huge numbers are infinite."""
    scale = wanted.abs().max()
    return float((found / scale - wanted / scale).norm() / (wanted / scale).norm())


def _flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in gradient.values()])


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def _settings(policy: Policy) -> dict[str, Any]:
    return dict(vars(policy))
