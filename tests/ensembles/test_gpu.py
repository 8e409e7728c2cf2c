"""Members on a GPU, and on a GPU and the CPU, in one program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.ensembles import Ensemble

from .test_ensembles import INPUTS, classifier

pytestmark = pytest.mark.gpu


def test_ensemble_on_a_gpu_predicts_like_one_on_the_cpu(tmp_path: Path) -> None:
    ensemble = mh.ensemble(
        classifier, members=4, epochs=4, on="cuda:0", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    wanted = Ensemble(ensemble.members, batches=ensemble._batches)(INPUTS)
    mixed = Ensemble(ensemble.members, batches=ensemble._batches, devices=[torch.device("cuda:0"), torch.device("cpu")])
    for one in (ensemble, mixed):
        torch.testing.assert_close(one(INPUTS), wanted, rtol=1e-5, atol=1e-5)
    assert {parameter.device.type for parameter in ensemble._program.parameters()} == {"cuda"}
    assert [next(model.parameters()).device.type for model in mixed._program.models] == ["cuda", "cpu"] * 2
    torch.testing.assert_close(mh.load(ensemble.export(tmp_path / "models"))(INPUTS), wanted, rtol=1e-5, atol=1e-5)
