"""The table of layers before a run, and the bytes that devices really held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import manyhands as mh
from manyhands.api.runtime import runtime
from manyhands.core import StrategyError

from .networks import network
from .problems import problem


def events(run: mh.Run, kind: str) -> list[dict[str, Any]]:
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def test_explain_table_matches_memory_held_by_ranks(tmp_path: Path) -> None:
    task = network("own")
    spec = mh.Sharded(2) * mh.TensorParallel(2)
    table = spec.explain(task)
    assert not dist.is_initialized(), "looking leaves nothing behind"
    run = mh.fit(task, spec, on="cpu*4", steps=1, folder=tmp_path, options=mh.options.Display(progress=False))
    (split,) = events(run, "split")
    assert split["parameters"] == table.parameters
    assert split["lines"] == table.lines()
    used = sorted(events(run, "used"), key=lambda entry: entry["rank"])
    assert [entry["rank"] for entry in used] == [0, 1, 2, 3]
    assert used[0]["parameters"] == table.parameters
    # AdamW also counts its steps, one number for each parameter.
    assert 0 <= used[0]["optimizer"] - table.optimizer < 200
    assert table.whole / 4 < table.parameters < table.whole / 2
    rows = {row.name: row for row in table.rows}
    assert rows["blocks.*.attention.qkv"].way == "column"
    assert rows["blocks.*.attention.qkv"].held == rows["blocks.*.attention.qkv"].whole / 4
    assert set(table.traffic) == {"shards", "tensor"}
    assert min(table.traffic.values()) > 0


def test_explain_table_shows_sizes_and_traffic_of_replicas_and_shards() -> None:
    task = problem("mlp", "adamw")
    whole = mh.explain(task, mh.Single())
    assert whole.optimizer == 2 * whole.whole
    assert whole.traffic == {}
    mirrored = mh.explain(task, mh.Mirrored(4))
    assert mirrored.traffic == {"replicas": 2 * whole.whole * 3 // 4}
    sharded = mh.explain(task, mh.Sharded(2))
    assert sharded.parameters == pytest.approx(whole.whole / 2, rel=0.1)
    assert sharded.optimizer == 2 * sharded.parameters


def test_explain_reports_reason_shared_by_blocks_once() -> None:
    text = str(mh.explain(problem("gpt"), "tensor=3"))
    assert text.count("on every rank: ") == 1, text
    assert "blocks.layers.0.self_attn, blocks.layers.1.self_attn works on whole tensors" in text
    assert "2 heads cannot be divided among 3 ranks" in text


def test_unsplittable_layout_is_rejected_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runtime, "start", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(StrategyError, match="must match the name of a module, but got '\\*.nothing'"):
        mh.fit(network("own"), mh.TensorParallel(2, layout={"*.nothing": "row"}), on="cpu*2", folder=tmp_path)
    with pytest.raises(StrategyError, match="can be split by row, but got 'norm', which matches norm"):
        mh.fit(network("own"), mh.TensorParallel(2, layout={"norm": "row"}), on="cpu*2", folder=tmp_path)
    with pytest.raises(StrategyError, match="needs a task with loss="):
        mh.fit(problem("gan"), mh.TensorParallel(2), on="cpu*2", folder=tmp_path)
    assert not list(tmp_path.iterdir())
