"""Every attack by requests against one server: each is rejected with a reason, and other requests are answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.attacks import Outcome
from benchmarks.attacks.requests import ATTACKS, INFER, MIB, PREDICT, Target, grpc_memory, head, post, send
from torch import nn

from manyhands.distributed import resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Server
from manyhands.serving.limits import Limits
from manyhands.serving.parsing import INLINE
from manyhands.storage import export

from .conftest import Start, publish, settings_of
from .test_versions import Moody

LIMITS = Limits(connections=64, connections_per_address=48, body=64 << 20, bodies=128 << 20)


@pytest.fixture(scope="module")
def target(adder: Path, tmp_path_factory: pytest.TempPathFactory, engine: LocalEngine) -> Iterator[Target]:
    """A server with both tokens, a model of rows of 3 and one of rows of any length."""
    root = tmp_path_factory.mktemp("attacked")
    publish(adder, root / "adder", 1)
    free = export(
        nn.Identity(), lambda model, x: 2 * x, {"x": torch.ones(2, 3)}, tmp_path_factory.mktemp("x"), free={"x": [1]}
    )
    shutil.copytree(free, root / "free" / "1")
    settings = settings_of(token="asking", manage_token="managing", limits=LIMITS)
    with Server(root, engine, resolve("cpu")[0], settings).start() as server:
        ports = {"http": server.http, "grpc": server.grpc, "manage": server.manage}
        found = Target(**ports, token="asking", manage_token="managing", connections=100)
        # The process for large texts starts with the first of them.
        text = b'{"instances": [[1, 2, 3]], "signature_name": "%b"}' % (b"a" * MIB)
        headers = {**found.headers, "Content-Length": str(len(text))}
        assert send(found.http, [head("POST", PREDICT, headers), text], seconds=30.0).status == 400
        yield found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_is_rejected_with_a_reason(target: Target, attack: Callable[[Target], Outcome]) -> None:
    outcome = attack(target)
    assert not outcome.succeeded, outcome
    assert outcome.is_refused_with_reason, outcome


def test_unfinished_grpc_messages_of_authenticated_clients_are_bounded_in_memory(target: Target) -> None:
    """The token lets a client send large messages, but not hold more of them than all bodies may have."""
    outcome = grpc_memory(target, num=30, size=16 * MIB, with_token=True)
    assert float(outcome.detail["refused"]) > 0, outcome
    assert outcome.reason.startswith("overloaded: unfinished messages take more than"), outcome


def test_large_json_bodies_are_parsed_and_answered(target: Target) -> None:
    rows = [[float(number), 0.0, 1.0] for number in range(4000)]
    for name in ("instances", "inputs"):
        text = json.dumps({name: rows, "signature_name": "serving_default"}).encode()
        assert len(text) > INLINE
        answer = json.loads(post(target, PREDICT, text).text)
        assert next(iter(answer.values())) == [[a + 1, b + 1, c + 1] for a, b, c in rows]
    text = json.dumps({"inputs": [{"name": "x", "shape": [4000, 3], "datatype": "FP32", "data": rows}]}).encode()
    answer = json.loads(post(target, INFER, text).text)
    assert answer["outputs"][0]["data"][:6] == [1.0, 1.0, 2.0, 2.0, 1.0, 2.0]
    text = b'{"instances": [[NaN, 1, 2]], "signature_name": "serving_default"%b}' % (b" " * INLINE)
    assert "NaN" in post(target, PREDICT, text).text
    many = b'{"instances": [%b[]]}' % (b"[]," * (1 << 20))
    refused = post(target, PREDICT, many)
    assert (refused.status, "values, but got" in refused.reason) == (413, True)


def test_tokens_are_accepted_only_by_their_own_listener(target: Target) -> None:
    for port, path, token, status in (
        (target.http, "/v1/models/adder", target.token, 200),
        (target.http, "/v1/models/adder", target.manage_token, 401),
        (target.manage, "/manage/models", target.manage_token, 200),
        (target.manage, "/manage/models", target.token, 401),
        (target.manage, "/v1/models/adder", target.token, 401),
        (target.http, "/manage/models", target.token, 404),
    ):
        headers = {"Host": "localhost", "Authorization": f"Bearer {token}"}
        assert send(port, [head("GET", path, headers)]).status == status, (port, path, token)


def test_allowed_origin_can_predict_but_not_manage_models(start: Start) -> None:
    """Neither token is set, as on a developer's machine: the origin is all that keeps pages out."""
    server = start({"moody": Moody()}, allow=("https://app.example", "models.example"))
    page = {"Host": "models.example", "Origin": "https://app.example", "Content-Type": "application/json"}
    body = json.dumps({"instances": [[20.0]]}).encode()
    length = {"Content-Length": str(len(body))}
    assert send(server.http, [head("POST", "/v1/models/moody:predict", {**page, **length}), body]).status == 200
    for port, path in ((server.manage, "/manage/models"), (server.manage, "/v2/repository/models/moody/unload")):
        refused = send(port, [head("POST", path, {**page, "Content-Length": "2"}), b"{}"])
        assert refused.status == 403, (path, refused)
        assert "https://app.example" in refused.reason
    own = {"Host": "models.example", "Origin": "http://models.example"}
    assert send(server.manage, [head("GET", "/manage/models", own)]).status == 200
