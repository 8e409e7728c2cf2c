"""Execution of a served batch: which variant is chosen, which are refused, and that all compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.serving import execution as ways
from manyhands.serving.execution import EagerExecution, fastest
from manyhands.storage import Archive, export, load

CPU = torch.device("cpu")
MAX_ROWS = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with a convolution and a norm, exported."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    path = tmp_path_factory.mktemp("net")
    export(net, lambda model, x: model(x), {"x": torch.ones(1, 3, 8, 8)}, path)
    return path


def faster(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """A compiler of whose network this becomes, and a clock by which it is the faster one."""

    def compiled(module: nn.Module, dynamic: bool) -> Any:
        return lambda *inputs: answer(module(*inputs))

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(ways, "_seconds", lambda run, batch: isinstance(run.predictor.module, nn.Module))


def test_faster_compiled_network_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faster(monkeypatch, lambda answers: answers)
    monkeypatch.setattr(ways, "Fastest", lambda plain, captured=(): plain)
    for compiles in (True, False):
        run: Any = fastest(load(folder), CPU, MAX_ROWS, compiles=compiles)
        assert isinstance(run.predictor, Archive)
        assert isinstance(run.predictor.module, nn.Module) != compiles


@pytest.mark.parametrize("kind", ["wrong", "no numbers", "broken"])
def test_compiled_network_with_different_outputs_is_not_used(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(answers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if kind == "broken":
            raise RuntimeError("no compiler here\nand much more")
        factor = 2.0 if kind == "wrong" else float("nan")
        return tuple(factor * tensor for tensor in answers)

    faster(monkeypatch, answer)
    run, batch = fastest(load(folder), CPU, MAX_ROWS, compiles=True), {"x": torch.randn(2, 3, 8, 8)}
    torch.testing.assert_close(run(batch), EagerExecution(load(folder), CPU)(batch))
    reason = "no compiler here" if kind == "broken" else "the output 'output' would differ"
    assert capsys.readouterr().err == f"batches are not compiled: {reason}\n"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_batches_match_eager_outputs(folder: Path, precision: str) -> None:
    device, archive = torch.device("cuda", 0), load(folder, "cuda:0")
    predictor = ways.Bfloat16(archive) if precision == "bf16" else archive
    run = fastest(predictor, device, MAX_ROWS, compiles=False)
    assert [way.size for way in run._captured] == [1, 2, 4, 8, 11]
    for rows in (*range(1, MAX_ROWS + 1), 1):
        batch = {"x": torch.randn(rows, 3, 8, 8)}
        want, have = EagerExecution(predictor, device)(batch)["output"], run(batch)["output"]
        torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)
        assert have.shape == (rows, 5)


@pytest.mark.gpu
def test_network_that_mixes_rows_is_not_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(nn.Identity(), lambda model, x: x - x.mean(0), {"x": torch.ones(2, 3)}, tmp_path)
    device = torch.device("cuda", 0)
    run = fastest(load(tmp_path, "cuda:0"), device, MAX_ROWS, compiles=False)
    batch = {"x": torch.randn(3, 3)}
    torch.testing.assert_close(run(batch)["output"].cpu(), batch["x"] - batch["x"].mean(0))
    assert "batches are not captured: the output 'output' would differ" in capsys.readouterr().err


@pytest.mark.gpu
def test_captured_compiled_network_matches_eager_outputs(folder: Path) -> None:
    device, archive = torch.device("cuda", 0), load(folder, "cuda:0")
    run, batch = fastest(archive, device, 4, compiles=True), {"x": torch.randn(3, 3, 8, 8)}
    want = EagerExecution(archive, device)(batch)["output"]
    torch.testing.assert_close(run(batch)["output"], want, rtol=1e-3, atol=1e-3)


def test_custom_predictor_runs_unchanged(folder: Path) -> None:
    class Own(mh.Predictor):
        signature = load(folder).signature

        def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"output": torch.zeros(len(inputs["x"]), 5)}

    assert not fastest(Own(), CPU, MAX_ROWS, compiles=True)({"x": torch.ones(3, 3, 8, 8)})["output"].any()
