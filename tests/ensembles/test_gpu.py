"""Members on a GPU, and on a GPU and the CPU, in one program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.ensembles import Team

from .test_teams import INPUTS, classifier

pytestmark = pytest.mark.gpu


def test_a_team_on_devices_says_what_one_on_the_cpu_does(tmp_path: Path) -> None:
    team = mh.ensemble(classifier, members=4, epochs=4, on="cuda:0", folder=tmp_path, progress=False)
    wanted = Team(team.members, batches=team._batches)(INPUTS)
    mixed = Team(team.members, batches=team._batches, devices=[torch.device("cuda:0"), torch.device("cpu")])
    for one in (team, mixed):
        torch.testing.assert_close(one(INPUTS), wanted, rtol=1e-5, atol=1e-5)
    assert {parameter.device.type for parameter in team._program.parameters()} == {"cuda"}
    assert [next(model.parameters()).device.type for model in mixed._program.models] == ["cuda", "cpu"] * 2
    torch.testing.assert_close(mh.load(team.export(tmp_path / "models"))(INPUTS), wanted, rtol=1e-5, atol=1e-5)
