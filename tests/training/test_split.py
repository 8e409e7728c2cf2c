"""One network cut over ranks equals one network whole: losses, weights, dropout, checkpoints under any other layout."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.cluster import NullWorld, World
from manyhands.store import CheckpointStore
from manyhands.training import Job, train
from manyhands.training.loop import CHECKPOINTS
from tests.strategies.networks import task

from .test_equality import keep

Case = tuple[str, mh.StrategySpec]
TOWERS = {"tower_a.*": "cpu:0", "tower_b.*": 1}


def trained(world: World, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Trains several tasks in one set of ranks; their losses and weights."""
    results = {}
    for label, (name, spec) in cases.items():
        losses: dict[str, list[float]] = {}
        world.line.taps[:] = [partial(keep, into=losses)]
        # Each size of a call is traced, so the network that takes longest has batches of one size.
        rows = 16 if name == "translator" else 21
        made = task(name, rows, dropout=0.2 if spec.deterministic else 0.0)
        where = folder / f"{label.replace(' ', '-').replace('*', 'x')}"
        train(world, Job(task=made, spec=spec.with_devices(world.size), folder=where, epochs=2))
        world.barrier()
        results[label] = (losses, CheckpointStore(where / CHECKPOINTS).load().model)
    return results


def f64(spec: mh.StrategySpec, **settings: Any) -> mh.StrategySpec:
    return dataclasses.replace(spec, precision="fp64", **settings)


TWO: dict[str, Case] = {
    "mlp, placed": ("mlp", f64(mh.Placed())),
    "towers, by a map": ("towers", f64(mh.Placed(TOWERS))),
    "towers, all on the second": ("towers", f64(mh.Placed({"*": 1}, devices=2))),
    "translator, automatic": ("translator", f64(mh.Placed(), accumulate=2)),
    "residual, placed": ("residual", f64(mh.Placed({"blocks.1": 1, "*": 0}))),
    "residual, one microbatch": ("residual", f64(mh.Pipeline(microbatches=1))),
    "gpt, 1f1b": ("gpt", f64(mh.Pipeline(microbatches=3))),
    "deep, gpipe": ("deep", f64(mh.Pipeline(microbatches=4, schedule="gpipe"), accumulate=2)),
    "deep, interleaved": ("deep", f64(mh.Pipeline(microbatches=4, schedule="interleaved"))),
    "translator, zero-bubble": ("translator", f64(mh.Pipeline(microbatches=3, schedule="zero-bubble"))),
    "deep, recomputed": ("deep", f64(mh.Pipeline(microbatches=2, recompute="blocks", deterministic=True))),
    "deep, dropout": ("deep", f64(mh.Placed({"blocks.1": 0, "blocks.2": 1}, deterministic=True))),
    "towers, fp32": ("towers", mh.Placed(TOWERS)),
}
FOUR: dict[str, Case] = {
    "deep, four stages": ("deep", f64(mh.Pipeline(4, microbatches=4))),
    "residual, times replicas": ("residual", f64(mh.Pipeline(2, microbatches=1, replicas=2))),
    "translator, times replicas": ("translator", f64(mh.Pipeline(2, microbatches=2, replicas=2, deterministic=True))),
    "towers, times replicas": ("towers", f64(mh.Placed({"tower_a": 0, "tower_b": 1}, replicas=2))),
    "gpt, placed on four": ("gpt", f64(mh.Placed(devices=4))),
    "residual, placed times replicas": ("residual", f64(mh.Placed({"blocks.1": 1, "*": 0}, replicas=2))),
}


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_a_network_that_is_cut_equals_one_device(
    size: int, cases: dict[str, Case], run_ranks: Any, tmp_path: Path
) -> None:
    results = run_ranks(partial(trained, cases=cases, folder=tmp_path / "cut"), size)[0]
    for label, (name, spec) in cases.items():
        plain = mh.StrategySpec(precision=spec.precision, accumulate=spec.accumulate, deterministic=spec.deterministic)
        losses, weights = trained(NullWorld(), {label: (name, plain)}, tmp_path / "whole")[label]
        found, found_weights = results[label]
        np.testing.assert_allclose(
            found["loss"], losses["loss"], rtol=1e-5 if spec.precision == "fp32" else 1e-9, err_msg=label
        )
        assert list(found_weights) == list(weights)
        for key, value in weights.items() if spec.precision == "fp64" else ():
            torch.testing.assert_close(found_weights[key], value, rtol=0, atol=1e-9, msg=f"{label}: {key}")
