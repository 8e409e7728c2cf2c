"""Computation of a stack: grouped or unfolded convolutions, compiled steps, and the speed-up of stacking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import manyhands as mh
from manyhands.capture import CaptureError, Phase
from manyhands.vectorized import Gain, Population, compiling, gain, stacked_steps
from manyhands.vectorized.convolutions import ALL, GROUPED, THIN, Unfolded

from .test_equality import alone
from .works import adamw, task


@pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 1)}, {"groups": 2}]
)
def test_unfolded_convolution_equals_conv2d(settings: dict[str, object]) -> None:
    inputs = torch.randn(3, 4, 9, 7, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(6, 4 // int(settings.get("groups", 1)), 3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64)
    with Unfolded():
        found = F.conv2d(inputs, kernels, bias, **settings)
    expected = F.conv2d(inputs, kernels, bias, **settings)
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(value.square().sum(), (inputs, kernels)) for value in (found, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("way", [(ALL, None), (THIN, None), (GROUPED, 1), (GROUPED, 2)])
def test_every_execution_mode_has_the_same_loss_curve(way: tuple[int, int | None], tmp_path: Path) -> None:
    tasks = [task("cnn", adamw(1e-2), seed=seed) for seed in range(3)]
    population = Population(tasks, mh.Single(precision="fp64", deterministic=True), device="cpu", epochs=2)
    population._way._rounds._set(way)
    curves = population.step(population.total)
    run = alone(tasks[1], tmp_path, epochs=2)
    torch.testing.assert_close(curves[:, 1], torch.tensor(run.losses, dtype=torch.float64), rtol=1e-9, atol=0)


class Viewing(torch.nn.Module):
    """Notes in which precision its layers compute; its outputs are seen as rows, as many networks do it."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Conv2d(4, 3, 3)
        self.last, self.seen = torch.nn.Linear(3, 3), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(F.max_pool2d(self.first(x).relu(), 2), 3)
        y = self.second(x)
        z = self.last(y.view(len(x), -1))
        self.seen += [x.dtype, y.dtype, z.dtype]
        return z


@pytest.mark.parametrize("way", [GROUPED, THIN, ALL])
def test_bf16_members_train_like_a_separate_bf16_run(way: int, tmp_path: Path) -> None:
    seen, losses = list[torch.dtype](), list[torch.dtype]()

    def measured(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = F.cross_entropy(model(batch[0]), batch[1])
        losses.append(value.dtype)
        return value

    tasks = [task("cnn", adamw(1e-3), seed=seed).replace(model=lambda: Viewing(seen), loss=measured) for seed in (0, 1)]
    population = Population(tasks, mh.Single(precision="bf16", deterministic=True), device="cpu")
    population._way._rounds._set((way, None))
    seen.clear(), losses.clear()
    curves = population.step(4)
    assert set(seen) == {torch.bfloat16}
    assert set(losses) == {torch.float32}
    run = mh.fit(
        tasks[1],
        mh.Single(precision="bf16"),
        on="cpu",
        steps=4,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    torch.testing.assert_close(curves[:, 1], torch.tensor(run.losses, dtype=torch.float64), rtol=2e-2, atol=0)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_compiled_steps_have_the_same_losses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and made functional as for the compiler itself, which would take a minute here."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    tasks = [task(kind, adamw(1e-2, weight_decay=0.1), seed=seed, clip=0.5) for seed in range(3)]
    notices: list[str] = []
    spec = mh.Single(precision="fp64", capture="compile")
    fast = Population(tasks, spec, device="cpu", epochs=3, notice=notices.append)
    plain = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=3)
    with fast:
        torch.testing.assert_close(fast.step(4), plain.step(4), rtol=1e-9, atol=0)
        assert fast._way._rounds._compiled._made
    assert not notices


def test_compiler_failure_is_reported_and_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiling, "BACKEND", broken)
    tasks = [task("mlp", seed=seed) for seed in range(2)]
    notices: list[str] = []
    fast = Population(tasks, mh.Single(capture="compile"), device="cpu", epochs=3, notice=notices.append)
    plain = Population(tasks, device="cpu", epochs=3)
    torch.testing.assert_close(fast.step(4), plain.step(4))
    assert len(notices) == 1
    assert notices[0].startswith("steps are not compiled: ")
    assert "no compiler here" in notices[0]


def test_gain_is_measured_and_grows_with_the_number_of_members() -> None:
    found = gain(task("mlp"), device="cpu")
    assert found.alone > 0
    assert found.each > 0
    assert found.start >= 0
    assert found(64) >= found(2) or found.start == 0.0
    assert found(10**6) == pytest.approx(found.ceiling, rel=1e-2)
    assert Gain(alone=2.0, start=1.0, each=1.0)(1) == 1.0


class Rerun:
    """A replacement for a CUDA graph: a replay runs the phases, which must find all data on the device themselves."""

    num_made = 0

    def __init__(self, phases: Sequence[Phase], pool: Any) -> None:
        self._phases = phases
        Rerun.num_made += 1

    def replay(self) -> None:
        for phase in self._phases:
            phase.run()


def test_captured_rounds_equal_eager_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_steps, "CapturedGraphs", Rerun)
    monkeypatch.setattr(stacked_steps, "rehearsing", nullcontext)
    monkeypatch.setattr(Rerun, "num_made", 0)
    tasks = [
        task("mlp", adamw(1e-2), seed=seed, schedule=lambda step, total: 1.0 / (1 + step), batch_size=4)
        for seed in range(4)
    ]
    spec = mh.Single(precision="fp64")
    captured, plain = (Population(tasks, spec, device="cpu", epochs=4) for _ in range(2))
    captured._way._rounds._captures = True
    curves = [torch.cat([p.step(7), p.step(9)]) for p in (captured, plain)]
    assert Rerun.num_made == 1
    torch.testing.assert_close(*curves, rtol=1e-12, atol=0)
    for population in (captured, plain):
        population.stop(2)
    torch.testing.assert_close(captured.step(12), plain.step(12), rtol=1e-12, atol=0, equal_nan=True)
    for population in (captured, plain):
        population.replace(2, tasks[2].replace(seed=9))
        population.train()
    assert Rerun.num_made > 2
    for number in range(4):
        assert captured.members[number].loss == pytest.approx(plain.members[number].loss, rel=1e-12)


def test_step_that_synchronizes_with_the_gpu_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def waits() -> Iterator[None]:
        raise CaptureError("train.py:3: outputs.item() waits for the GPU in every step")
        yield

    monkeypatch.setattr(stacked_steps, "rehearsing", waits)
    tasks, notices = [task("mlp", seed=seed) for seed in range(2)], list[str]()
    captured = Population(tasks, device="cpu", epochs=2, notice=notices.append)
    captured._way._rounds._captures = True
    plain = Population(tasks, device="cpu", epochs=2)
    torch.testing.assert_close(captured.step(12), plain.step(12))
    assert notices == ["steps are not captured: train.py:3: outputs.item() waits for the GPU in every step"]
