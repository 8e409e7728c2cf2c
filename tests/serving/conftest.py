"""Small models to serve: version k of `adder` answers with its input plus k."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from manyhands.core import from_flat
from manyhands.distributed import resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Batching, Listen, Replicas, Rollout, Server, ServeSettings, ServingLog
from manyhands.storage import export
from manyhands.storage.disk import digest_of


class Adder(nn.Module):
    """x + k."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.k


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported version 1."""
    return export(Adder(), lambda model, x: model(x), {"x": torch.ones(2, 3)}, tmp_path_factory.mktemp("adder"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version with two inputs of different kinds and two outputs."""

    def predict(model: nn.Module, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"sum": a.sum(1) + b, "twice": 2 * b}

    examples = {"a": torch.ones(2, 2), "b": torch.ones(2, dtype=torch.int64)}
    return export(nn.Identity(), predict, examples, tmp_path_factory.mktemp("pair"))


def publish(version: Path, model: Path, number: int) -> None:
    """Version `number` of the adder, moved to its place at once."""
    aside = model.parent / f".{model.name}-{number}"
    shutil.copytree(version, aside)
    save_file({name: torch.tensor(float(number)) for name in _weights(aside)}, aside / "weights.safetensors")
    manifest = json.loads((aside / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"] = digest_of(aside / "weights.safetensors").to_dict()
    (aside / "manifest.json").write_text(json.dumps(manifest))
    model.mkdir(parents=True, exist_ok=True)
    aside.rename(model / str(number))


def _weights(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "weights.safetensors", "pt") as file:
        return list(file.keys())


def settings_of(**values: Any) -> ServeSettings:
    """Settings of a server on free ports, from options of any class by name."""
    kinds = (Listen, Batching, Rollout, Replicas, ServingLog)
    groups = from_flat(kinds, {"http": 0, "grpc": 0, "manage": 0, "grace": 0.05, **values})
    listen, batching, rollout, replicas, log = groups
    return ServeSettings(listen=listen, batching=batching, rollout=rollout, replicas=replicas, log=log)


Start = Callable[..., Server]


@pytest.fixture
def start(engine: LocalEngine) -> Iterator[Start]:
    """Starts servers and stops them."""
    servers: list[Server] = []

    def run(models: Any, on: str = "cpu", **settings: Any) -> Server:
        server = Server(models, engine, resolve(on)[0], settings_of(**{"poll": 0.05, **settings}))
        servers.append(server)
        return server.start()

    yield run
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def served(adder: Path, pair: Path, tmp_path_factory: pytest.TempPathFactory, engine: LocalEngine) -> Iterator[Server]:
    """One server with both models for a whole file."""
    root = tmp_path_factory.mktemp("models")
    publish(adder, root / "adder", 2)
    shutil.copytree(pair, root / "pair" / "1")
    with Server(root, engine, resolve("cpu")[0], settings_of()).start() as server:
        yield server


@pytest.fixture
def http(served: Server) -> Iterator[httpx.Client]:
    """A client of that server."""
    with httpx.Client(base_url=served.url) as client:
        yield client
