"""Version changes under load: new versions take over, broken ones do not, old ones drain."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from torch import Tensor

from manyhands.core import FileError, Predictor, RequestRefused, SettingsError, Signature, TensorSpec, read_events
from manyhands.serving import Client, Rollout, Server
from manyhands.serving.saved_state import SavedState, StateFolder

from .conftest import Start, publish

NO_PROBATION = 0.0


def until(wanted: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Waits for something to become true."""
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
    return found


def current(server: Server, model: str = "adder") -> int | None:
    return next((m["current"] for m in server.state()["models"] if m["name"] == model), None)


def versions(server: Server, model: str = "adder") -> dict[int, str]:
    found = next(m for m in server.state()["models"] if m["name"] == model)
    return {v["version"]: v["state"] for v in found["versions"]}


def http_status(server: Server, model: str = "adder") -> list[dict[str, Any]]:
    return list(httpx.get(f"{server.url}/v1/models/{model}").json()["model_version_status"])


def metrics_of(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics").text


class Load:
    """Clients that ask all the time; every answer says which version gave it."""

    def __init__(self, server: Server, num: int = 4, rows: int = 3) -> None:
        self.answers: list[int] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server.url, i, rows)) for i in range(num)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, client: int, rows: int) -> None:
        value = float(1000 * client)
        with httpx.Client(base_url=url, timeout=30) as http:
            while not self._over.is_set():
                try:
                    answer = http.post("/v1/models/adder:predict", json={"instances": [[value] * 3] * rows})
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.failures.append(answer.text)
                    continue
                differences = {round(x - value) for row in answer.json()["predictions"] for x in row}
                if len(differences) != 1:
                    self.failures.append(f"mixed: {differences}")
                self.answers.append(differences.pop())


def test_version_swaps_under_load_lose_and_mix_no_requests(adder: Path, tmp_path: Path, start: Start) -> None:
    model = tmp_path / "adder"
    publish(adder, model, 1)
    server = start(tmp_path, probation=NO_PROBATION)
    with Load(server) as load:
        until(lambda: 1 in load.answers)
        for number in range(2, 6):
            publish(adder, model, number)
            until(lambda number=number: number in load.answers)
    assert load.failures == []
    assert set(load.answers) == set(range(1, 6))
    until(lambda: versions(server) == {5: "AVAILABLE"})


def test_unload_first_ends_the_old_version_before_loading_and_restores_it(
    adder: Path, tmp_path: Path, start: Start
) -> None:
    model = tmp_path / "adder"
    publish(adder, model, 1)
    server = start(tmp_path, unload_first=True, log=tmp_path / "log")
    publish(adder, model, 2)
    until(lambda: current(server) == 2)
    events = [(entry["kind"], entry.get("version")) for entry in read_events(tmp_path / "log" / "events.jsonl")]
    assert events.index(("version_ended", 1)) < events.index(("version_loading", 2))
    publish(adder, tmp_path / "aside", 3)
    weights = tmp_path / "aside" / "3" / "weights.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    (tmp_path / "aside" / "3").rename(model / "3")
    until(lambda: [v for v in server.state()["models"][0]["versions"] if v["error"]])
    until(lambda: current(server) == 2)
    shutil.rmtree(model / "3")
    until(lambda: current(server) == 2)
    httpx.post(f"{server.manage_url}/manage/models/adder/rollback").raise_for_status()
    assert versions(server)[1] == "AVAILABLE"
    assert 2 not in versions(server)


def test_corrupt_or_incomplete_version_does_not_replace_the_current_one(
    adder: Path, tmp_path: Path, start: Start
) -> None:
    model = tmp_path / "adder"
    publish(adder, model, 1)
    server = start(tmp_path, log=tmp_path / "log")
    publish(adder, tmp_path / "aside", 3)
    whole = tmp_path / "aside" / "3"
    with Load(server, num=1) as load:
        # A copy in the order of names: the manifest comes before the weights.
        (model / "2").mkdir()
        for name in ("manifest.json", "program.json", "signature.json"):
            shutil.copy(whole / name, model / "2" / name)
        weights = (whole / "weights.safetensors").read_bytes()
        status = until(lambda: [v for v in http_status(server) if v["status"]["error_code"] != "OK"])
        assert [(v["version"], v["status"]["error_message"]) for v in status] == [
            ("2", "the version is incomplete: weights.safetensors is missing")
        ]
        (model / "2" / "weights.safetensors").write_bytes(weights[:-1])
        size = f"weights.safetensors has {len(weights) - 1} bytes, but the manifest lists {len(weights)}"
        until(lambda: [v for v in http_status(server) if size in v["status"]["error_message"]])
        assert size in metrics_of(server)
        logged = [e["reason"] for e in read_events(tmp_path / "log" / "events.jsonl") if e["kind"] == "version_failed"]
        assert [reason.partition(": ")[2] for reason in logged] == ["weights.safetensors is missing", size]
        assert current(server) == 1
        (model / "2" / "weights.safetensors").write_bytes(bytes(len(weights)))
        failed = until(lambda: [v for v in server.state()["models"][0]["versions"] if "digest" in v["error"]])
        assert failed[0]["version"] == 2
        assert "digest" in failed[0]["error"]
        assert str(tmp_path) not in failed[0]["error"]
        assert current(server) == 1
        # The same number, copied again, is tried again.
        (model / "2" / "weights.safetensors").write_bytes(weights)
        until(lambda: current(server) == 2)
        until(lambda: 3 in load.answers)
    assert load.failures == []
    assert set(load.answers) == {1, 3}


def test_deleting_the_version_folder_keeps_the_model_loaded(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "adder", 1)
    server = start(tmp_path)
    shutil.rmtree(tmp_path / "adder" / "1")
    time.sleep(0.3)
    assert versions(server) == {1: "AVAILABLE"}


def test_version_policies_labels_traffic_splits_and_rollback(adder: Path, tmp_path: Path, start: Start) -> None:
    for number in (1, 2, 3):
        publish(adder, tmp_path / "adder", number)
    server = start(tmp_path, versions="latest:2", max_slowdown=1e9)
    assert versions(server) == {2: "AVAILABLE", 3: "AVAILABLE"}
    with httpx.Client(base_url=server.url) as http, httpx.Client(base_url=server.manage_url) as manage:

        def ask(path: str = "/v1/models/adder:predict", key: str = "") -> float:
            headers = {"x-manyhands-key": key} if key else {}
            answer = http.post(path, json={"instances": [[0, 0, 0]]}, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()["predictions"][0][0]

        assert ask() == 3
        assert manage.post("/manage/models/adder/label", json={"label": "stable", "version": 2}).status_code == 200
        assert ask("/v1/models/adder/labels/stable:predict") == 2
        refused = manage.post("/manage/models/adder/label", json={"label": "no", "version": 9})
        assert refused.status_code == 400
        for nonsense in (
            {"shares": 5},
            {"shares": [{"weight": 1e308 * 10}]},
            {"shares": [{"version": 1.5, "weight": 1}]},
        ):
            body, kind = json.dumps(nonsense), {"Content-Type": "application/json"}
            assert manage.post("/manage/models/adder/split", content=body, headers=kind).status_code == 400, nonsense
        shares = [{"version": 2, "weight": 1}, {"version": 3, "weight": 1}]
        assert manage.post("/manage/models/adder/split", json={"shares": shares}).status_code == 200
        assert {ask() for _ in range(30)} == {2, 3}
        by_key = {key: {ask(key=key) for _ in range(2)} for key in map(str, range(15))}
        assert all(len(found) == 1 for found in by_key.values())
        assert set.union(*by_key.values()) == {2, 3}
        # A rollback ends the split, and takes the version out of the splits of other names.
        assert manage.post(
            "/manage/models/alias/split", json={"shares": [{"model": "adder", **share} for share in shares]}
        )
        assert manage.post("/manage/models/adder/rollback").json() == {"current": 2}
        assert {ask() for _ in range(20)} == {2}
        assert {ask("/v1/models/alias:predict") for _ in range(20)} == {2}
        assert list(manage.get("/manage/models").json()["splits"]) == ["alias"]
        manage.post("/manage/models/alias/split", json={"shares": []})
        # Once more: version 1 was not loaded and is now.
        assert manage.post("/manage/models/adder/rollback").json() == {"current": 1}
        assert ask() == 1
        assert manage.post("/manage/models/adder/rollback").status_code == 400
        assert manage.post("/manage/models/adder/load", json={"version": 3}).json() == {"current": 3}
        assert ask() == 3
        assert manage.post("/v2/repository/models/adder/unload").status_code == 200
        assert http.post("/v1/models/adder:predict", json={"instances": [[0, 0, 0]]}).status_code == 404
        assert manage.post("/v2/repository/models/adder/load").status_code == 200
        assert ask() == 3
        assert manage.post("/manage/models/nothing/load").status_code == 404


def test_rollback_labels_and_split_survive_a_restart(adder: Path, tmp_path: Path, start: Start) -> None:
    for number in (1, 2, 3, 4):
        publish(adder, tmp_path / "models" / "adder", number)
    server = start(tmp_path / "models")
    with Client(server.url, manage=server.manage_url) as client:
        assert client.rollback("adder") == {"current": 3}
        client.load("adder", 1)
        client.label("adder", "stable", 1)
        client.label("adder", "gone", 3)
        client.label("adder", "gone", None)
        client.split("alias", [{"model": "adder", "version": 1, "weight": 1}, {"model": "adder", "weight": 3}])
        before = client.models()
    server.stop()
    state = tmp_path / "models" / ".serving"
    (state / "broken.json").write_text('{"labels": ["x"]}')
    again = start(tmp_path / "models", log=tmp_path / "log")
    with Client(again.url, manage=again.manage_url) as client:
        after = client.models()
        assert {key: after["models"][0][key] for key in ("name", "current", "labels")} == {
            "name": "adder", "current": 3, "labels": {"stable": 1},
        }  # fmt: skip
        assert after["splits"] == before["splits"]
        assert {client("alias", np.zeros((1, 3), np.float32))[0, 0] for _ in range(40)} == {1.0, 3.0}
        # An undone rollback and a removed split and label leave no file.
        client.load("adder")
        client.label("adder", "stable", None)
        client.split("alias", [])
    again.stop()
    logged = list(read_events(tmp_path / "log" / "events.jsonl"))
    assert [entry["model"] for entry in logged if entry["kind"] == "state_refused"] == ["broken"]
    assert [entry["version"] for entry in logged if entry["kind"] == "label"] == [1, None]
    assert [path.name for path in state.iterdir()] == ["adder.json", "broken.json"]
    assert json.loads((state / "adder.json").read_text())["asked"] == [1]


def test_state_that_cannot_be_written_is_reported_and_kept_in_memory(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "models" / "adder", 1)
    (tmp_path / "file").touch()
    server = start(tmp_path / "models", state=tmp_path / "file", log=tmp_path / "log")
    with Client(server.url, manage=server.manage_url) as client:
        assert client.label("adder", "stable", 1) == {"labels": {"stable": 1}}
        client.label("adder", "other", 1)
    lost = [e["reason"] for e in read_events(tmp_path / "log" / "events.jsonl") if e["kind"] == "state_not_saved"]
    assert len(lost) == 1
    assert "a restart loses what was set" in lost[0]


def test_state_folder_of_another_user_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    state = SavedState(labels={"stable": 1}, shares=(), rejected=frozenset(), asked=frozenset())
    StateFolder(folder).write("adder", state)
    assert StateFolder(folder).read() == ({"adder": state}, {})
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o777)
    for path in (folder, tmp_path / "link"):
        states, refused = StateFolder(path).read()
        assert states == {}
        assert "others cannot write to" in refused[""]
        with pytest.raises(FileError):
            StateFolder(path).write("adder", state)


EVIL = 'x"} 1\nmanyhands_available{model="adder",version="1"} 0\n# {a="'


def test_label_from_a_state_file_cannot_forge_metrics(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "models" / "adder", 1)
    (tmp_path / "models" / ".serving").mkdir()
    state = {"labels": {EVIL: 1}, "shares": [], "rejected": [], "asked": [], "unloaded": False}
    (tmp_path / "models" / ".serving" / "adder.json").write_text(json.dumps(state))
    server = start(tmp_path / "models", log=tmp_path / "log")
    text = httpx.get(f"{server.url}/metrics").text
    assert [line for line in text.splitlines() if line.startswith("manyhands_available")] == [
        'manyhands_available{model="adder",version="1"} 1'
    ]
    assert server.state()["models"][0]["labels"] == {}
    kinds = [entry["kind"] for entry in read_events(tmp_path / "log" / "events.jsonl")]
    assert "state_refused" in kinds


class Moody(Predictor):
    """Raises where its input is negative."""

    signature = Signature({"x": TensorSpec("float32", (None, 1))}, {"y": TensorSpec("float32", (None, 1))})

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        if (x < 0).any():
            raise ValueError("no negative numbers")
        if (x == 666).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (x == 100).any():
            time.sleep(0.3)
        if (x == 777).any():
            time.sleep(3600)
        return {"y": x + 1}


def ask_moody(url: str, value: float) -> httpx.Response:
    # Reading all authorities of the world, for TLS that is not used, takes longer than the answer.
    return httpx.post(f"{url}/v1/models/moody:predict", json={"inputs": [[value]]}, timeout=30, verify=False)


def test_replica_killed_under_load_is_replaced_without_failed_requests(start: Start) -> None:
    server = start({"moody": Moody()}, on="cpu*2")
    first = {r["pid"] for r in server.state()["models"][0]["versions"][0]["replicas"]}
    assert len(first) == 2
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(ask_moody(server.url, 1.0) for _ in range(15))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) > 5)
    os.kill(min(first), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200}
    later = until(
        lambda: [
            r["pid"]
            for r in server.state()["models"][0]["versions"][0]["replicas"]
            if len(server.state()["models"][0]["versions"][0]["replicas"]) == 2
        ]
    )
    assert min(first) not in later


def test_server_is_not_ready_while_a_model_has_no_replica(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.serving.version.Version._backoff", lambda version, device: 1.0)
    server = start({"moody": Moody()})
    paths = ("/v2/health/ready", "/v2/models/moody/ready")

    def statuses() -> set[int]:
        return {httpx.get(server.url + path, verify=False).status_code for path in paths}

    assert statuses() == {200}
    os.kill(server.state()["models"][0]["versions"][0]["replicas"][0]["pid"], signal.SIGKILL)
    until(lambda: statuses() == {400})
    until(lambda: statuses() == {200})
    assert ask_moody(server.url, 1.0).status_code == 200


def test_model_failure_and_replica_crash_return_500_and_serving_continues(start: Start) -> None:
    server = start({"moody": Moody()})
    answer = ask_moody(server.url, -1)
    assert answer.status_code == 500
    assert re.fullmatch(
        r"the model failed: moody version 1, error [0-9a-f]{8} in the server's log", answer.json()["error"]
    )
    assert ask_moody(server.url, 666).status_code == 500
    assert ask_moody(server.url, 1).json()["outputs"] == [[2.0]]


@pytest.mark.parametrize(("cause", "status"), [(666.0, 500), (777.0, 504)])
def test_request_that_aborts_or_hangs_its_replica_affects_only_itself(
    cause: float, status: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a restart took nearly all the time that the others have, so that the test takes less.
    for name, value in (("HUNG_SECONDS", 0.7), ("NUM_RESTARTS", 1000), ("HUNG_SHARE", 0.97)):
        monkeypatch.setattr(f"manyhands.serving.batcher.{name}", value)
    server = start({"moody": Moody()}, max_rows=8)
    for value in range(20):
        assert ask_moody(server.url, value).status_code == 200
    answers: dict[float, httpx.Response] = {}

    def ask(value: float) -> None:
        answers[value] = ask_moody(server.url, value)

    # The first request occupies the replica, so that the others form batches with the one that fails.
    threads = [threading.Thread(target=ask, args=(value,)) for value in (100.0, *range(6), cause, *range(6, 12))]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert answers.pop(cause).status_code == status
    assert {value: answer.json() for value, answer in answers.items()} == {
        value: {"outputs": [[value + 1]]} for value in answers
    }


def test_failing_new_version_is_rolled_back(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "adder", 1)
    server = start(tmp_path, probation=60, num_requests=10)
    publish(adder, tmp_path / "adder", 2)
    until(lambda: current(server) == 2)
    assert versions(server) == {1: "AVAILABLE", 2: "AVAILABLE"}
    model = server._management.gateway.catalogue.models["adder"]  # type: ignore[union-attr]
    for _ in range(10):
        model.versions[2].metrics.count("INTERNAL", 0.0)
    until(lambda: current(server) == 1)
    time.sleep(0.2)
    assert current(server) == 1


def test_only_sustained_slowdown_of_a_new_version_triggers_rollback(adder: Path, tmp_path: Path, start: Start) -> None:
    for number in (1, 2):
        publish(adder, tmp_path / "adder", number)
    server = start(tmp_path, versions="latest:2", poll=60)
    model = server._management.gateway.catalogue.models["adder"]  # type: ignore[union-attr]
    rule = Rollout(probation=600)

    def answered(number: int, num: int, seconds: float) -> None:
        for _ in range(num):
            model.versions[number].metrics.count("OK", seconds)

    def ask(num: int) -> None:
        """Real requests, whose times are those of this machine as it is now."""
        for _ in range(num):
            answer = http.post("/v1/models/adder:predict", json={"instances": [[0, 0, 0]]})
            assert answer.json() == {"predictions": [[2.0] * 3]}

    answered(1, 40, 1e-5)
    answered(2, 40, 1e-5)
    answered(2, 1, 1.0)
    assert model.verdict(rule) == ""
    assert model.versions[2].shadow is None
    with httpx.Client(base_url=server.url) as http:
        # Slower than the old one ever was: now both compute the same requests, and are found to be alike.
        answered(2, 100, 0.01)
        assert model.verdict(rule) == ""
        ask(19)
        assert model.verdict(rule) == ""
        assert model.versions[2].shadow is not None
        ask(11)
        until(lambda: model.verdict(rule) == "" and model.versions[2].shadow is None)
        # The next look finds it slow again; this time it is slower on the same requests too.
        assert model.verdict(rule) == ""
        ask(30)
        answered(2, 30, 60.0)
        until(lambda: re.fullmatch(r"p90 is [\d.]+ m?s, that of version 1, measured .*m?s", model.verdict(rule)))
    assert model.versions[2].shadow is None
    assert model.versions[1].metrics.num_requests == 40


def test_empty_or_broken_model_folder_does_not_affect_other_models(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "adder", 1)
    (tmp_path / "empty").mkdir()
    server = start(tmp_path)
    with httpx.Client(base_url=server.url) as http, httpx.Client(base_url=server.manage_url) as manage:
        assert http.get("/v2/health/ready").status_code == 200
        assert [m["name"] for m in server.state()["models"]] == ["adder"]
        assert http.get("/v1/models/empty").status_code == 404
        assert manage.post("/manage/models/empty/load").status_code == 404
        assert manage.post("/manage/models/empty/load", json={"version": 3}).status_code == 404
        publish(adder, tmp_path / "later", 1)
        broken = tmp_path / "broken" / "1"
        shutil.copytree(adder, tmp_path / "aside")
        (tmp_path / "aside" / "program.json").write_bytes(bytes((adder / "program.json").stat().st_size))
        broken.parent.mkdir()
        (tmp_path / "aside").rename(broken)
        until(lambda: current(server, "later") == 1)
        until(lambda: [m for m in server.state()["models"] if m["name"] == "broken" and m["versions"][0]["error"]])
        assert http.get("/v2/health/ready").status_code == 200
        assert server.state()["ready"]
    # At the start it is different: a server with a model that cannot answer should get no clients.
    server.stop()
    assert not start(tmp_path).state()["ready"]


def test_overload_is_rejected_with_503_and_accepted_requests_are_served(start: Start) -> None:
    server = start({"moody": Moody()}, max_rows=1, queue_rows=2)
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(ask_moody(server.url, 100))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 503}
    assert codes.count(200) >= 3
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 503)
    assert ask_moody(server.url, 1).status_code == 200


def test_stop_waits_for_requests_in_flight(start: Start) -> None:
    server = start({"moody": Moody()})
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask_moody(server.url, 100)))
    thread.start()
    until(lambda: any(r["rows"] for r in server.state()["models"][0]["versions"][0]["replicas"]))
    server.stop()
    thread.join()
    assert answers[0].json()["outputs"] == [[101.0]]
    with pytest.raises(httpx.ConnectError):
        ask_moody(server.url, 1)


def test_public_host_requires_a_token_and_requests_must_present_it(start: Start, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs a token"):
        start(tmp_path, host="0.0.0.0")
    server = start({"moody": Moody()}, token="secret")
    assert ask_moody(server.url, 1).status_code == 401
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    headers = {"Authorization": "Bearer secret"}
    # The token for requests does not open management, which has none here.
    closed = httpx.get(f"{server.manage_url}/manage/models", headers=headers)
    assert closed.status_code == 403
    assert "set MANYHANDS_MANAGE_TOKEN" in closed.json()["error"]
    with pytest.raises(SettingsError, match="must differ"):
        start(tmp_path, token="secret", manage_token="secret")
    assert httpx.get(f"{server.url}/v1/models/moody", headers=headers).status_code == 200
    rows = np.ones((1, 1), np.float32)
    for token, words in ((None, "pass token="), ("other", "another one")):
        with Client(server.url, token=token) as client, pytest.raises(RequestRefused, match=words):
            client("moody", rows)
    with Client(server.url, token="secret") as client:
        assert client("moody", rows) == 2


def test_invalid_serve_settings_raise_before_start(start: Start, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="folder of models"):
        start(tmp_path / "nothing")
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / "manifest.json").touch()
    with pytest.raises(
        SettingsError, match=rf"which is a single model. Pass the folder that contains it: {tmp_path}[.]$"
    ):
        start(tmp_path / "model")
    with pytest.raises(SettingsError, match="must consist of"):
        start({"../x": Moody()})
    with pytest.raises(SettingsError, match="versions must be"):
        start(tmp_path, versions="newest")
    server = start({"moody": Moody()})
    with pytest.raises(SettingsError, match="port must be free"):
        start({"moody": Moody()}, http=server.http)


def test_symbolic_links_and_invalid_model_names_are_not_served(adder: Path, tmp_path: Path, start: Start) -> None:
    publish(adder, tmp_path / "models" / "adder", 1)
    publish(adder, tmp_path / "elsewhere" / "secret", 1)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    (tmp_path / "models" / "adder" / "2").symlink_to(tmp_path / "elsewhere" / "secret" / "1")
    (tmp_path / "models" / "a b").mkdir()
    server = start(tmp_path / "models")
    assert [m["name"] for m in server.state()["models"]] == ["adder"]
    assert versions(server) == {1: "AVAILABLE"}
