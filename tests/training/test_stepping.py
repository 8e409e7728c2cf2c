"""The phases of a captured step, run separately on the CPU: the same sums and weights."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.capture import CaptureError
from manyhands.core import LossNotFinite, StrategyError, TaskError, read_events
from manyhands.data import as_source
from manyhands.distributed import NullWorld, World
from manyhands.training import Hand, step_capture, step_variants, stepping
from manyhands.training.step import take_step
from manyhands.training.step_capture import StepCapture
from manyhands.training.step_variants import StepVariants
from manyhands.training.stepping import Stepper

from ..grouped_options import fit_options
from .problems import Cnn, Sometimes, classify, generator, mlp

Ranks = Callable[[Callable[[World], Any], int], list[Any]]


def work(model: Callable[[], nn.Module]) -> mh.Task:
    return mh.Task(
        model=model,
        loss=classify,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=(torch.randn(96, 12, generator=generator(0)), torch.randint(0, 5, (96,), generator=generator(1))),
        batch_size=8,
        clip=0.5,
    )


def in_parts(world: World, model: Callable[[], nn.Module], *, deferred: bool) -> tuple[list[float], list[str]]:
    task = work(model)
    hand = Hand(world, mh.StrategySpec(replicas=world.size))
    hand.build(task)
    assert task.loss is not None
    in_phases = StepCapture(hand, task.loss, StepVariants(hand, task.loss, None), None) if deferred else None
    losses = []
    for number, batch in enumerate(hand.reader.one_epoch(hand.reader.make_feed(as_source(task.data), 8, shuffle=True))):
        if in_phases is not None:
            with in_phases._in_parts(is_deferred=True, usage=hand.replica.usage("") if number else None):
                for phase in in_phases._phases(batch, 0, is_deferred=True):
                    phase.run()
        else:
            take_step(hand, task, batch)
        losses.append(float(hand.losses[""]))
    different = hand.replica.differences()
    hand.close()
    return losses, different


@pytest.mark.parametrize("model", [mlp, Sometimes])
def test_all_reduce_after_backward_equals_overlapped_all_reduce(
    model: Callable[[], nn.Module], run_ranks: Ranks
) -> None:
    during = run_ranks(lambda world: in_parts(world, model, deferred=False), 2)
    after = run_ranks(lambda world: in_parts(world, model, deferred=True), 2)
    np.testing.assert_allclose(after[0][0], during[0][0], rtol=1e-6)
    assert [different for _, different in (*during, *after)] == [[], [], [], []]


# -- step variants ----------------------------------------------------------------------------------------------------


def pictures(**settings: Any) -> mh.Task:
    data = (torch.randn(320, 1, 6, 6, generator=generator(0)), torch.randint(0, 5, (320,), generator=generator(1)))
    return mh.Task(
        model=Cnn,
        loss=classify,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data=data,
        batch_size=6,
        **settings,
    )


def notices(run: mh.Run) -> list[str]:
    return [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]


def test_step_variants_are_tried_in_long_runs_and_give_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mh.fit(
        pictures(),
        mh.Single(capture="off"),
        on="cpu",
        epochs=1,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    short = mh.fit(
        pictures(), mh.Single(), on="cpu", epochs=1, folder=tmp_path, options=mh.options.Display(progress=False)
    )
    monkeypatch.setitem(step_variants.WORTH_SECONDS, "cpu", 0.0)
    tried = mh.fit(
        pictures(), mh.Single(), on="cpu", epochs=1, folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert notices(short) == notices(plain) == []
    assert short.losses == plain.losses
    np.testing.assert_allclose(tried.losses, plain.losses, rtol=1e-4)
    (said,) = notices(tried)
    assert "as written" in said
    assert "channels last" in said


def test_bfloat16_falls_back_to_float32_where_it_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_variants.WORTH_SECONDS, "cpu", 0.0)
    measured = {step_variants.AS_WRITTEN: 0.3, step_variants.CHANNELS_LAST: 0.4, step_variants.FULL_WIDTH: 0.1}
    monkeypatch.setattr(step_variants.StepVariants, "_measured", lambda self: measured[self._variant])
    run = mh.fit(
        pictures(),
        mh.Single(precision="bf16"),
        on="cpu",
        epochs=1,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    assert any("executed fp32 from now on" in text for text in notices(run))
    full = mh.fit(
        pictures(),
        mh.Single(capture="off"),
        on="cpu",
        epochs=1,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    np.testing.assert_allclose(run.losses, full.losses, rtol=0.05)


def tried_together(world: World) -> tuple[list[float], list[str]]:
    """Two ranks that disagree on what is faster still lay out their gradients alike."""
    task = pictures()
    assert task.loss is not None
    step_variants.WORTH_SECONDS["cpu"] = 0.0
    hand = Hand(world, mh.StrategySpec(replicas=world.size))
    hand.build(task)
    stepper = Stepper(hand, task, 600)
    losses = []
    for batch in hand.reader.one_epoch(hand.reader.make_feed(as_source(task.data), 6, shuffle=True)):
        stepper.take(batch)
        losses.append(float(hand.losses[""]))
    stepper.close()
    different = hand.replica.differences()
    hand.close()
    return losses, different


def test_ranks_switch_step_variants_together(run_ranks: Ranks) -> None:
    (alone,) = run_ranks(tried_together, 1)
    both = run_ranks(tried_together, 2)
    np.testing.assert_allclose(both[0][0], alone[0], rtol=1e-4)
    assert [different for _, different in both] == [[], []]


def test_compiler_failure_is_logged_and_falls_back_to_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(function: Any, **_: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise torch._dynamo.exc.TorchDynamoException("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(step_variants, "stop_compilers", lambda: None)
    plain = mh.fit(
        pictures(),
        mh.Single(capture="off"),
        on="cpu",
        epochs=1,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    run = mh.fit(
        pictures(),
        mh.Single(capture="compile"),
        on="cpu",
        epochs=1,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    assert run.losses == plain.losses
    assert "could not be compiled: TorchDynamoException: no compiler here" in notices(run)[0]


def test_compiler_finds_global_names_of_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rank: the program's functions are copies, and the main module is another's."""
    main = types.ModuleType("__main__")
    main.taken = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    copy = types.FunctionType(classify.__code__, {"__name__": "__main__", "F": nn.functional, "taken": 2})
    step_variants._give_names(copy, mlp())
    assert main.F is nn.functional
    assert main.taken == 1
    assert not hasattr(main, "classify")


# -- steps that are left out ------------------------------------------------------------------------------------------


def spoiled(**settings: Any) -> mh.Task:
    rows = torch.randn(64, 12, generator=generator(0))
    rows[20, 3] = float("nan")
    return mh.Task(
        model=lambda: nn.Sequential(nn.BatchNorm1d(12), mlp()),
        loss=classify,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=(rows, torch.randint(0, 5, (64,), generator=generator(1))),
        batch_size=8,
        shuffle=False,
        **settings,
    )


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_step_with_nonfinite_gradient_is_skipped(on: str, tmp_path: Path) -> None:
    run = mh.fit(
        spoiled(not_finite="skip", ema=0.9),
        on=on,
        epochs=2,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    skipped = [entry["step"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "skipped"]
    assert skipped == [3, 11]
    assert sorted(run.history["loss"]) == [step for step in range(1, 17) if step not in skipped]
    for averaged in (False, True):
        assert all(value.isfinite().all() for value in run.state_dict(averaged=averaged).values())
    assert run.state_dict()["0.num_batches_tracked"] == 14
    assert sum("was skipped" in text for text in notices(run)) == 2


def test_nonfinite_loss_stops_the_run_by_default(tmp_path: Path) -> None:
    for on in ("cpu", "cpu*3"):
        with pytest.raises(LossNotFinite, match="the data itself is not finite: look at sample 20"):
            mh.fit(spoiled(), on=on, epochs=2, folder=tmp_path, options=mh.options.Display(progress=False))


def test_resume_with_other_settings_logs_the_changes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"on": "cpu", "folder": tmp_path, "progress": False, "name": "run"}
    mh.fit(work(mlp).replace(ema=0.9), mh.Single(accumulate=2), **fit_options(steps=3, deterministic=True, **settings))
    run = mh.fit(work(mlp), **fit_options(steps=6, resume=True, **settings))
    told = " ".join(notices(run))
    assert "continues with deterministic=False; it had True" in told
    assert "continues with accumulate=1; it had 2" in told
    assert "without the average of its weights" in told


def test_many_consecutive_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    task = spoiled(not_finite="skip").replace(batch_size=2)
    task.data[0][8:] = float("nan")
    with pytest.raises(LossNotFinite, match="20 steps in a row"):
        mh.fit(task, on="cpu", epochs=1, folder=tmp_path, options=mh.options.Display(progress=False))


def test_invalid_not_finite_and_capture_are_rejected() -> None:
    with pytest.raises(TaskError, match='not_finite must be "stop" or "skip"'):
        spoiled(not_finite="ignore")
    with pytest.raises(StrategyError, match="capture must be one of"):
        mh.Single(capture="yes")


# -- step capture, as far as it needs no GPU --------------------------------------------------------------------------


def stepped(task: mh.Task, num_steps: int, *, change: Any = None, **spec: Any) -> list[float]:
    """The losses of some steps through a captured step, with something done between them."""
    hand = Hand(NullWorld(), mh.StrategySpec(**spec))
    hand.build(task)
    stepper = Stepper(hand, task, 1000)
    losses = []
    for batch in itertools.islice(
        hand.reader.one_epoch(hand.reader.make_feed(as_source(task.data), 8, shuffle=True)), num_steps
    ):
        stepper.take(batch)
        losses.append(float(hand.losses[""]))
        if change is not None:
            change(hand)
    stepper.close()
    hand.close()
    return losses


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be captured on the CPU; the test defines what a capture does."""

    def as_tensors(optimizer: torch.optim.Optimizer) -> str:
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"])
        return ""

    monkeypatch.setattr(stepping, "CAPTURE_DEVICES", ("cpu",))
    monkeypatch.setattr(step_capture, "make_capturable", as_tensors)
    monkeypatch.setattr(step_capture, "rehearsing", contextlib.nullcontext)


def set_rate(hand: Hand) -> None:
    hand.optimizers[""].param_groups[0]["lr"] = 0.001 * hand.num_steps


def test_float_learning_rate_becomes_a_tensor_before_capture(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    seen: list[type] = []

    class Note:
        def __init__(self, phases: Any, pool: Any) -> None:
            seen.append(type(hands[0].optimizers[""].param_groups[0]["lr"]))
            raise CaptureError("enough was seen")

    hands: list[Hand] = []

    def change(hand: Hand) -> None:
        hands[:] = [hand]
        set_rate(hand)

    monkeypatch.setattr(step_capture, "CapturedGraphs", Note)
    found = stepped(work(mlp), 8, change=change)
    assert seen == [Tensor]
    monkeypatch.setattr(stepping, "CAPTURE_DEVICES", ())
    np.testing.assert_allclose(found, stepped(work(mlp), 8, change=set_rate), rtol=1e-5)


def test_aborted_capture_warm_up_does_not_change_random_numbers(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    task = work(lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(12), mlp()))

    @contextlib.contextmanager
    def breaking() -> Any:
        yield
        raise CaptureError("it waits")

    monkeypatch.setattr(step_capture, "rehearsing", breaking)
    broken = stepped(task, 8, deterministic=True)
    monkeypatch.setattr(stepping, "CAPTURE_DEVICES", ())
    # A learning rate in a tensor is rounded to fp32, and nothing else may differ.
    np.testing.assert_allclose(broken, stepped(task, 8, deterministic=True), rtol=1e-6)


def test_compiler_failure_in_backward_is_logged_and_falls_back_to_eager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise torch._dynamo.exc.TorchDynamoException("no compiler for backward")

    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: Fails.apply(function(*args)))
    monkeypatch.setattr(step_variants, "stop_compilers", lambda: None)
    plain = mh.fit(
        work(mlp), mh.Single(capture="off"), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    run = mh.fit(
        work(mlp), mh.Single(capture="compile"), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert run.losses == plain.losses
    assert "no compiler for backward" in notices(run)[0]


@pytest.mark.parametrize(("compiled", "kept"), [(0.1, "compiled"), (0.9, "as written")])
def test_compiled_step_is_tried_once_where_the_eager_step_cannot_be_captured(
    compiled: float, kept: str, monkeypatch: pytest.MonkeyPatch, on_cpu: None
) -> None:
    num_rehearsals = 0

    @contextlib.contextmanager
    def breaking() -> Any:
        nonlocal num_rehearsals
        num_rehearsals += 1
        yield
        raise CaptureError("it waits")

    seconds = {step_variants.AS_WRITTEN: 0.5, step_variants.COMPILED: compiled}
    monkeypatch.setitem(step_variants.WINDOWS, "cpu", (1, 5))
    monkeypatch.setattr(step_variants.StepVariants, "_measured", lambda self: seconds[self._variant])
    monkeypatch.setattr(step_variants.StepVariants, "_compile_seconds", lambda self: 0.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(step_variants, "stop_compilers", lambda: None)
    monkeypatch.setattr(step_capture, "rehearsing", breaking)
    monkeypatch.setattr(step_capture.StepCapture, "_capture_graph", lambda self, *_: refuse(self))
    said: list[str] = []
    monkeypatch.setattr(Hand, "notice", lambda self, text: said.append(text))

    def refuse(capture: Any) -> str:
        capture._leave_uncaptured(True, "it still waits")
        return ""

    task = work(mlp)
    found = stepped(task, 12)
    assert num_rehearsals == 1
    assert said[:2] == [
        "the step runs eagerly, not as a CUDA graph: it waits",
        "the compiled step runs uncaptured, not as a CUDA graph: it still waits",
    ]
    assert said[2].startswith(f"steps are executed {kept} from now on")
    monkeypatch.setattr(stepping, "CAPTURE_DEVICES", ())
    np.testing.assert_allclose(found, stepped(task, 12, capture="off"), rtol=1e-5)


def test_ends_of_epochs_do_not_count_when_a_variant_is_timed() -> None:
    hand = Hand(NullWorld(), mh.StrategySpec())
    variants = step_variants.StepVariants(hand, classify, 1000)
    variants.loss_for("whole")
    first, last = step_variants.WINDOWS["cpu"]
    for count in range(last):
        is_end = count % 4 == 3
        variants.tick("rest" if is_end else "whole", False, 9.0 if is_end else 0.5)
    assert variants._measured() == 0.5
    assert len(variants._steps) == last - first
