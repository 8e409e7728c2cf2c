"""Other options of a server: precision, warm-up, recording of requests, traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.serving import Client, Replicas
from manyhands.storage import export

from .conftest import Start, publish
from .test_versions import Moody


def test_bf16_precision_returns_float32_outputs(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    export(network, lambda model, x: model(x), {"x": torch.ones(2, 64)}, tmp_path / "net")
    rows = torch.rand(5, 64)
    exact = network(rows).detach().numpy()
    found = {}
    for precision in ("fp32", "bf16"):
        server = start(tmp_path, precision=precision)
        client = Client(server.url)
        found[precision] = client("net", rows.numpy())
        client.close()
    assert found["bf16"].dtype == np.float32
    np.testing.assert_allclose(found["fp32"], exact, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_allclose(found["bf16"], network(rows).float().detach().numpy(), rtol=1e-2, atol=1e-2)
    assert np.abs(found["bf16"] - exact).max() > 1e-5
    with pytest.raises(SettingsError, match="precision must be fp32 or bf16"):
        Replicas(precision="int8")


def test_serve_rejects_objects_that_are_not_predictors() -> None:
    network: Any = nn.Linear(2, 2)
    with pytest.raises(SettingsError, match=r"got Linear as 'model'. Pass run.predictor\(\)"):
        mh.serve(network, on="cpu")
    with pytest.raises(SettingsError, match="got Linear as 'net'"):
        mh.serve({"net": network}, on="cpu")


def test_recorded_requests_warm_up_the_next_server(start: Start, adder: Path, tmp_path: Path) -> None:
    publish(adder, tmp_path / "models" / "adder", 1)
    requests = tmp_path / "requests"
    requests.mkdir()
    server = start(tmp_path / "models", record=requests)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    client = Client(server.url)
    for _ in range(3):
        client("adder", rows)
    client.close()
    lines = (requests / "adder.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == 3 * [{"inputs": {"x": rows.tolist()}}]

    # Declared versions are allowed too; one that does not match is skipped and counted.
    (requests / "adder.jsonl").write_text("\n".join([*lines, '{"instances": [[1, 2]]}', "no JSON"]))
    server = start(tmp_path / "models", on="cpu*2", warmup=requests, log=tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (warmed,) = [event for event in events if event["kind"] == "warmed_up"]
    assert warmed["requests"] == {"OK": 6, "INVALID_ARGUMENT": 4}
    assert server.state()["models"][0]["versions"][0]["rows"] == 12
    with pytest.raises(SettingsError, match="warmup must be a folder"):
        start(tmp_path / "models", warmup=tmp_path / "nowhere")


def test_every_request_produces_a_trace_span(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    server = start({"moody": Moody()}, traces=True)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": parent}
    httpx.post(f"{server.url}/v1/models/moody:predict", json={"instances": [[1.0]]}, headers=headers)
    infer: dict[str, Any] = {"name": "x", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]}
    httpx.post(f"{server.url}/v2/models/moody/infer", json={"inputs": [infer]})
    first, second = exporter.get_finished_spans()
    assert first.name == "infer moody"
    assert f"{first.context.trace_id:032x}" == parent.split("-")[1]
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == parent.split("-")[2]
    assert first.start_time is not None
    assert first.end_time is not None
    assert first.end_time > first.start_time
    assert second.parent is None
    assert dict(second.attributes or {}) == {
        "manyhands.model": "moody", "manyhands.version": 1, "manyhands.rows": 2, "manyhands.code": "OK",
    }  # fmt: skip
