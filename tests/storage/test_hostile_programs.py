"""Forged archives: none accesses foreign memory, and each is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.attacks import models, zoo
from benchmarks.attacks.fuzz_operators import fuzz
from torch import Tensor, nn

from manyhands.core import ArchiveError
from manyhands.storage import OutputMismatch, export, load, operators
from manyhands.storage.operator_list import ALLOWED


def test_forged_archives_are_rejected_with_a_reason() -> None:
    outcomes = models.attempt_all()
    assert [outcome.name for outcome in outcomes if outcome.succeeded] == []
    assert [outcome.name for outcome in outcomes if not outcome.is_refused_with_reason] == []


def test_outputs_that_differ_from_the_signature_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(OutputMismatch, match=r"output 'y' must be float32\[\*, 9\], but got float32\[2, 4\]"):
        load(models.wrong_shape(tmp_path / "shape"))(torch.zeros(2, 4))
    with pytest.raises(OutputMismatch, match=r"output 'y' must be float32\[\*, 4\], but got int64\[2, 4\]"):
        load(models.wrong_dtype(tmp_path / "dtype"))(torch.zeros(2, 4))


def test_allowlist_contains_no_out_variants_or_backward_operators() -> None:
    assert not [name for name in ALLOWED if name.endswith((".out", "_out", ".grad_input"))]
    words = ("backward", "sparse", "mkldnn", "quantize", "resize", "set_.", "_reshape_alias", "empty", "unsafe_index")
    assert not [name for name in ALLOWED for word in words if word in name]


SUSPICIOUS = (
    "aten.index.Tensor aten.index_put_.default aten.gather.default aten.scatter_.src aten.embedding.default "
    "aten.max_unpool2d.default aten.col2im.default aten.searchsorted.Tensor aten.take.default aten.median.dim "
    "aten.nll_loss_nd.default aten.lstm.input aten.as_strided.default aten.grid_sampler_2d.default"
)


def test_indexing_operators_survive_hostile_arguments() -> None:
    assert fuzz(SUSPICIOUS.split(), rounds=12, seconds=1.0) == []


def test_fuzzer_detects_uninitialized_memory_in_operator_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(name: str) -> Any:
        return lambda self: torch.empty_like(self) if name == "aten.relu.default" else self.clone()

    monkeypatch.setattr(operators, "checked", leaking)
    (found,) = fuzz(["aten.relu.default", "aten.neg.default"], rounds=12, seconds=5.0)
    assert (found.name, found.signal) == ("aten.relu.default", "UNINITIALIZED")


@pytest.mark.parametrize("entry", zoo.sample(), ids=lambda entry: entry.name)
def test_legitimate_models_are_accepted(entry: zoo.Entry) -> None:
    assert zoo.refusal(entry) == ""


class Bessel(nn.Module):
    """Uses an operator that no archive may have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


def test_export_error_names_the_rejected_operator_and_source_line(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"bessel_j0.*not in the list.*at test_hostile_programs.py:\d+ in "):
        export(Bessel(), lambda model, x: model(x), {"x": torch.ones(2, 3)}, tmp_path)


class Scratch(nn.Module):
    """Changes memory of its own in place, inside and outside of a region, and takes memory without writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu_()
        with torch.no_grad():
            y = y * 2
            y.add_(1)
        y[:, 0] = 0.5
        return torch.empty_like(y).copy_(y).mul_(2)


def test_export_supports_in_place_writes_to_scratch_tensors(tmp_path: Path) -> None:
    model, x = Scratch().eval(), torch.randn(2, 3)
    made = export(model, lambda model, x: model(x), {"x": x}, tmp_path)
    program = json.loads((made / "program.json").read_text())
    assert "aten.empty" not in str(program)
    assert torch.allclose(load(made)(x), model(x))
