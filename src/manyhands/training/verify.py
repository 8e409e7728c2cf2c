"""Verification before training: compare a strategy's first two steps on a copy of the network with one device's.

It runs on the ranks of the run, where it is cheap. A difference ends the run before its first step. Where the steps
cannot be compared, the run starts and its record says that it is not verified, and why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import (
    DataError,
    Event,
    ManyhandsError,
    StrategyError,
    StrategySpec,
    Task,
    TaskError,
    UsageError,
    event,
    random_state,
    restore_random_state,
)
from ..data import IndexedSource, as_source
from ..distributed import NullWorld, World, culprit
from .check import judge
from .explain import without_values
from .hand import Hand
from .one_device_checks import changes_parameters, failed_in_parts, fails_in_parts, keeps_state, not_linear
from .trial_steps import Record, has_batch_stats, parts_of, plan_of, take_steps, with_data
from .verdict import MICRO, RANDOM, SAMPLES, Verdict

if TYPE_CHECKING:
    from ..strategies import Layout

MOST_ROWS = 32
MOST_SECONDS = 3.0
"""Maximum seconds of the whole steps, as predicted from the time of a few samples."""
MOST_PARAMETERS = {"cpu": 20_000_000, "cuda": 200_000_000}
_LOCAL = 'batch_stats="local" takes them of each worker\'s part; GroupNorm or LayerNorm need none'


def is_split(spec: StrategySpec) -> bool:
    """Return whether a strategy computes anything differently from one device."""
    return parts_of(spec) > 1 or (spec.num_devices or 1) > 1 or bool(spec.recompute)


def why_not(task: Task, spec: StrategySpec, model: nn.Module, device: torch.device) -> str:
    """Return why verification is skipped, if that is known before it starts; else an empty text."""
    count = sum(parameter.numel() for parameter in model.parameters())
    most = MOST_PARAMETERS.get(device.type, MOST_PARAMETERS["cpu"])
    if task.loss is None:
        return "the task has step=, which may have side effects; mh.check compares it"
    if count > most:
        return (
            f"the network has {count:,} parameters, and a trial of more than {most:,} takes long; mh.check compares it"
        )
    return ""


def require_whole_statistics(model: nn.Module, spec: StrategySpec) -> None:
    """Raise if a layer needs statistics of the whole batch and micro-batches or workers have those of their parts."""
    if spec.batch_stats != "sync" or not (
        spec.accumulate * spec.microbatches > 1 or (spec.servers and parts_of(spec) > 1)
    ):
        return
    for name, part in model.named_modules():
        if has_batch_stats(part):
            whose = "a worker's part" if spec.servers else "a micro-batch"
            raise TaskError(
                "batch statistics must be those of the whole batch, as on one device",
                got=f"{name or 'the network'}, of type {type(part).__name__}, whose statistics under {spec} are those "
                f"of {whose}",
                remedy=_LOCAL if spec.servers else MICRO,
            )


def check_statistics(task: Task, spec: StrategySpec) -> None:
    """Raise as `require_whole_statistics` does, for a task whose model can be built on the meta device."""
    model = without_values(task)
    if model is not None:
        require_whole_statistics(model, spec)


def with_micro_statistics(task: Task, spec: StrategySpec) -> StrategySpec:
    """Return the spec with `batch_stats="micro"` where automatically chosen micro-batches need it."""
    if spec.batch_stats != "sync" or spec.accumulate * spec.microbatches == 1 or spec.servers:
        return spec
    model = without_values(task)
    has_stats = model is not None and any(has_batch_stats(part) for part in model.modules())
    return dataclasses.replace(spec, batch_stats="micro") if has_stats else spec


def verify(
    hand: Hand, task: Task, spec: StrategySpec, layout: Layout | None, seconds_per_row: float, seconds_to_build: float
) -> Verdict:
    """Compare a strategy's first steps with one device's; a collective with the same verdict on all ranks.

    Random states are restored; the hand's network, optimizers and data are not touched. `seconds_per_row` is the time
    of the loss per sample, `seconds_to_build` that of the model function.
    """
    states = random_state(hand.device)
    try:
        return _VerificationTrial(hand, task, spec, layout).run(seconds_per_row, seconds_to_build)
    finally:
        restore_random_state(states, hand.device)


class _VerificationTrial:
    def __init__(self, hand: Hand, task: Task, spec: StrategySpec, layout: Layout | None) -> None:
        self.world, self.layout, self.spec = hand.world, layout, spec
        self.task = with_data(task.replace(ema=None))
        if spec.batch_stats != "sync":
            self.task = self.task.replace(model=_with_fixed_statistics(task.model))
        self.alone = NullWorld(hand.world.rank_info.device)
        self.whole: Record | None = None
        self.stream = not isinstance(as_source(self.task.data, collate=task.collate), IndexedSource)

    def run(self, seconds_per_row: float, seconds_to_build: float) -> Verdict:
        """Take the whole steps on the first rank and the split ones on all; return the first rank's verdict."""
        begun = self._begin(seconds_per_row, seconds_to_build) if self.world.is_first else None
        begun_first = self.world.gather_objects(begun)[0]
        if "verdict" in begun_first:
            return Verdict(spec=self.spec, **begun_first["verdict"])
        try:
            parts = self._split(**begun_first["steps"])
        except UsageError as error:
            return Verdict("not verified", self.spec, why=f"a copy of the network could not be split: {error}")
        except Exception as error:
            if isinstance(error, ManyhandsError | torch.OutOfMemoryError):
                raise
            if self.world.size > 1:
                # Other ranks may wait in a collective, so this rank must fail.
                raise cannot_run(self.spec, error) from error
            return failed_in_parts(self.spec, error)
        verdict = self._judge(begun_first["steps"]["plan"], parts) if self.world.is_first else {}
        return Verdict(spec=self.spec, **self.world.gather_objects(verdict)[0])

    def _begin(self, seconds_per_row: float, seconds_to_build: float) -> dict[str, Any]:
        """Choose rows and take the whole steps, in float64 if the network supports it."""
        parts = parts_of(self.spec)
        if MOST_SECONDS / 2 < 3 * seconds_to_build < 10 * MOST_SECONDS:
            # The first build may include imports and downloads. An error is reported by the next build.
            began = time.perf_counter()
            with contextlib.suppress(Exception):
                self.task.model()
                seconds_to_build = min(seconds_to_build, time.perf_counter() - began)
        affordable = int((MOST_SECONDS - 3 * seconds_to_build) / max(seconds_per_row, 1e-9) / 12)
        if affordable < 2 * parts:
            why = f"a trial of {2 * parts} samples takes longer than {MOST_SECONDS:g} s; mh.check compares them"
            return {"verdict": {"outcome": "not verified", "why": why}}
        why = ""
        for precision in ("fp64", "fp32"):
            try:
                plan = plan_of(self.task, self.spec, min(MOST_ROWS, affordable))
                self.whole = take_steps(self.alone, self.task, StrategySpec(), plan, precision=precision)
                failed = None
                if self.spec.servers:
                    failed = not_linear(self.task, self.spec, plan, self.whole, self.alone)
                    if failed is None:
                        failed = changes_parameters(self.task, self.spec, plan, self.whole, self.alone)
                    if failed is None:
                        failed = keeps_state(self.task, self.spec, plan, self.whole, self.alone)
                if failed is None and self.world.size > 1:
                    failed = fails_in_parts(self.task, self.spec, plan, self.whole, self.alone)
                if failed is not None:
                    return {"verdict": _plain(failed)}
                return {"steps": {"plan": plan, "precision": precision, "draws": self.whole.draws}}
            except DataError:
                raise
            except Exception as error:
                # A user error occurs again in the first step, where it is reported with its samples.
                why = f"a copy of the network could not be trained on one device ({type(error).__name__}: {error})"
        return {"verdict": {"outcome": "not verified", "why": why}}

    def _split(self, plan: list[list[int]], precision: str, draws: bool) -> Record:
        if self.spec.servers:
            spec = StrategySpec(accumulate=parts_of(self.spec), recompute=self.spec.recompute)
            return take_steps(self.alone, self.task, spec, plan, precision=precision, draws=draws)
        spec = dataclasses.replace(
            self.spec, sync="allreduce", offload="" if self.world.size == 1 else self.spec.offload
        )
        return take_steps(self.world, self.task, spec, plan, precision=precision, layout=self.layout, draws=draws)

    def _judge(self, plan: list[list[int]], parts: Record) -> dict[str, Any]:
        assert self.whole is not None
        verdict = judge(self.task, self.spec, plan, self.whole, parts, self.alone)
        if not verdict.equal and (self.whole.strayed or parts.strayed or verdict.why == RANDOM):
            why = "it draws random numbers that are not layout-free, so that two computations differ in any case"
            verdict = Verdict("not verified", self.spec, why=why)
        if self.spec.batch_stats == "local" and any(step.differing for step in parts.steps):
            why = 'batch_stats="local" lets every replica keep separate buffers, which differ'
            verdict = Verdict("not verified", self.spec, why=why)
        if verdict.equal and self.stream:
            why = f"the data is a stream, of which the first {sum(map(len, plan))} samples were compared and are equal"
            verdict = Verdict("not verified", self.spec, why=why)
        return _plain(verdict)


def take_split_steps(world: World, *, task: Task, spec: StrategySpec, plan: list[list[int]], draws: bool) -> Record:
    """Take the steps of a plan on all ranks, for a network whose steps run on one device.

    Raises:
        StrategyError: The steps raise an error under the strategy.
    """
    try:
        return take_steps(world, task, spec, plan, draws=draws)
    except Exception as error:
        if isinstance(error, ManyhandsError | torch.OutOfMemoryError):
            raise
        raise cannot_run(spec, error) from error


def cannot_run(spec: StrategySpec, error: Exception) -> StrategyError:
    """Return the refusal of a network whose steps run on one device and raise an error under a strategy."""
    return StrategyError(
        f"under {spec} the steps of a network must run as they do on one device",
        got=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''} "
        f"at {culprit(error)}",
        remedy="use mh.Mirrored(), which computes the network as it is written, and report this network",
    )


def _plain(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict without its spec, as plain values that ranks can exchange."""
    plain = {part.name: getattr(verdict, part.name) for part in dataclasses.fields(verdict) if part.name != "spec"}
    return {**plain, "notes": list(verdict.notes)}


def _with_fixed_statistics(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a model function whose batch statistics are frozen, where the user chose statistics of parts."""

    def made() -> nn.Module:
        model = make()
        for part in model.modules():
            if has_batch_stats(part) and part.running_mean is not None:
                part.eval()
        return model

    return made


def refuse(verdict: Verdict) -> None:
    """Raise a verdict's difference as a `TaskError`."""
    if verdict.outcome == "different":
        rule = f"under {verdict.spec} a step must be the same as on one device"
        got = f"a difference of {verdict.error:.1e} in {verdict.first}: {verdict.why}"
        raise TaskError(rule, got=got, remedy=verdict.remedy or SAMPLES)


def verdict_event(verdict: Verdict) -> Event:
    """Return the event that records a verdict."""
    return event("verdict", outcome=verdict.outcome, why=verdict.why, error=verdict.error, text=summary(verdict))


def summary(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    because = f", because {verdict.why}" if verdict.why else ""
    return (
        f"verified: {verdict.spec} takes the same first steps as one device"
        if verdict.equal
        else f"not verified{because}"
    )
