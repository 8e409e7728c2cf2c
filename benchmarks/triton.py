"""Conformance: a real Triton and our server are asked the same, and answer the same.

`python -m benchmarks.triton`. Triton comes from nvidia-pytriton, in an environment of its own. Every request of
`triton_requests` goes to both: a status, a number or a word that differs, and is not among DIFFERENCES, ends the
program with 1, and so does a difference that is gone.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.serving import Server
from manyhands.serving.dtypes import KINDS
from manyhands.storage import export

from .peers import triton_server
from .peers.triton_server import Triton, write_model
from .serve import make_environment
from .serving_works import ROW, mlp
from .triton_requests import RAW, Seen, by_clients, over_grpc, over_http

OWN = {"platform", "backend", "ns", "preferred_batch_size"}
"""Fields whose values are a server's own."""
DIFFERENCES = {
    "ours takes more": (
        "HTTP: GET /v2/",
        "HTTP: too many rows",
        "gRPC: too many rows",
        "HTTP: kinds without a form as JSON",
    ),
    "ours refuses what Triton wraps, flattens or drops": (
        "HTTP: 300 as int8",
        "HTTP: oddly nested numbers",
        "gRPC: one raw too many",
    ),
    "a mistake is named, and is the client's": (
        "HTTP: an unknown content coding",
        "gRPC: RepositoryModelUnload of an unknown model",
        "gRPC: RepositoryModelLoad of an unknown model",
    ),
    "a model that was unloaded does not affect clients of the others": (
        "gRPC: server ready after RepositoryModelUnload",
    ),
    "the same status with a text that names what was expected and what was given": (
        "HTTP: no rows",
        "gRPC: no rows",
        "HTTP: rows that differ",
        "HTTP: no such datatype",
        "gRPC: no such datatype",
        "gRPC: no datatype",
        "HTTP: no numbers",
        "HTTP: bytes and numbers at once",
        "HTTP: nothing but bytes for many inputs",
        "HTTP: a header of many",
        "HTTP: a header of 0",
        "HTTP: nothing",
        "HTTP: a body that is no gzip",
        "gRPC: a negative shape",
        "gRPC: no shape",
    ),
    "the same words, names in another order": (
        "client: an input is missing over HTTP",
        "client: an input is missing over gRPC",
    ),
}
"""Requests that are answered otherwise, and why."""


def main() -> None:
    """Asks both servers, and returns the differences."""
    make_environment(triton_server.FOLDER, triton_server.REQUIREMENTS)
    known = {name: reason for reason, names in DIFFERENCES.items() for name in names}
    num_same, num_form, num_wrong = 0, 0, 0
    with tempfile.TemporaryDirectory() as name, both(Path(name)) as (ours, triton):
        for what, request in requests():
            here, there = request.ask(ours.http, ours.grpc), request.ask(triton.http, triton.grpc)
            num_form += is_form(here, there)
            if agree(here, there) == (what not in known):
                num_same += what not in known
                continue
            num_wrong += 1
            print(f"{what}: is among DIFFERENCES, but there is none" if what in known else f"{what} differs")
            print(f"  ours:   {str(here)[:800]}\n  Triton: {str(there)[:800]}")
    for reason, names in DIFFERENCES.items():
        print(f"known: {reason}: {', '.join(names)}")
    print(
        f"{num_same} requests are answered alike ({num_form} of them 400 here and 500 there, for JSON of another form)"
    )
    print(f"{len(known)} are answered otherwise for a reason, {num_wrong} without one")
    sys.exit(num_wrong > 0)


def requests() -> Iterator[tuple[str, Any]]:
    """All requests, by a name that says how it comes."""
    families = {"HTTP": over_http(), "gRPC": over_grpc(), "client": by_clients()}
    return chain.from_iterable(((f"{way}: {name}", one) for name, one in some) for way, some in families.items())


def agree(ours: Seen, triton: Seen) -> bool:
    """The same status, words of which one is the beginning of the other, and the same values."""
    if is_form(ours, triton):
        return True
    words = re.sub(r"^\[request id: .*?\] ", "", triton.error)
    begins = ours.error.startswith(words) or (words.startswith(ours.error) and bool(ours.error))
    return ours.status == triton.status and begins and alike(ours.value, triton.value)


def is_form(ours: Seen, triton: Seen) -> bool:
    """Whether JSON did not have the form of a request: Triton calls that an error of its own, we the client's."""
    return (ours.status, triton.status) == ("400", "500")


def alike(ours: Any, triton: Any) -> bool:
    """Whether the values are equal; metadata of manyhands may be a subset."""
    if isinstance(ours, np.ndarray) and isinstance(triton, np.ndarray):
        if ours.dtype.kind != "f" or ours.shape != triton.shape:
            return ours.dtype == triton.dtype and np.array_equal(ours, triton)
        return ours.dtype == triton.dtype and np.allclose(ours, triton, rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(ours, dict) and isinstance(triton, dict):
        return all(name in OWN or (name in triton and alike(ours[name], triton[name])) for name in ours)
    if isinstance(ours, (list, tuple)) and isinstance(triton, (list, tuple)):
        return len(ours) == len(triton) and all(map(alike, ours, triton))
    return bool(ours == triton)


@contextmanager
def both(folder: Path) -> Iterator[tuple[Server, Triton]]:
    """Our server and Triton with the same models: echoes of every kind, two versions of an adder, a network."""
    models, repository, backends = (folder / name for name in ("models", "repository", "backends"))
    for one in (models, repository, backends):
        one.mkdir()
    for name, kinds in {"echo": KINDS, "numbers": [kind for kind in KINDS if kind.open not in RAW]}.items():
        tensors = {kind.torch: f"{kind.open} 3" for kind in kinds}
        write_model(repository, name, 1, tensors, {f"{tensor}_out": text for tensor, text in tensors.items()})
        examples = {tensor: torch.ones(2, 3).to(getattr(torch, tensor)) for tensor in tensors}
        export(Echo(tensors), lambda model, *inputs: model(*inputs), examples, models / name)
    write_model(repository, "adder", 2, {"x": "FP32 3"}, {"output": "FP32 3"})
    for number in (1, 2):
        export(nn.Identity(), lambda model, x, number=number: x + number, {"x": torch.ones(2, 3)}, models / "adder")
    write_model(repository, "mlp", 1, {"x": f"FP32 {ROW}"}, {"output": "FP32 10"})
    export(mlp(), lambda model, x: model(x), {"x": torch.ones(2, ROW)}, models / "mlp")
    with (
        mh.serve(
            models,
            on="cpu",
            listen=mh.serving.Listen(http=0, grpc=0, manage=0),
            rollout=mh.serving.Rollout(versions="all"),
            log=folder / "log",
        ) as ours,
        triton_server.running(repository, backends) as triton,
    ):
        yield ours, triton


class Echo(nn.Module):
    """Answers every input with itself."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        return {f"{name}_out": each.clone() for name, each in zip(self.names, inputs, strict=True)}


if __name__ == "__main__":
    main()
