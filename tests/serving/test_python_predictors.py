"""Predictors in Python: functions, objects and `predictor.py` in a folder; strings; errors that affect nothing else."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import manyhands as mh
from manyhands.core import ArchiveError, SettingsError, Signature, TensorSpec
from manyhands.distributed import resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Server
from manyhands.serving.folder import complete_versions
from manyhands.serving.protocols.tensorflow_messages import MESSAGES
from manyhands.serving.python_model import PythonModel, signature_of
from manyhands.serving.replica_process import require_rows

from .conftest import Start, publish, settings_of
from .test_grpc import call
from .test_triton_clients import over_http

PICTURE = bytes(range(256))


class Sentiment:
    """Strings to strings and numbers, with an error for one text."""

    inputs: ClassVar = {"text": "string[*]"}
    outputs: ClassVar = {"label": "string[*]", "length": "int64[*]"}

    def load(self, device: str) -> None:
        self.device, self.pid, self.thread = device, os.getpid(), threading.get_ident()

    def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
        assert (self.pid, self.device, self.thread) == (os.getpid(), "cpu", threading.get_ident())
        if "raise" in inputs["text"]:
            raise ValueError("secret detail of a text")
        if "invalid" in inputs["text"]:
            raise mh.serving.InvalidInput("this text is invalid")
        if "exit" in inputs["text"]:
            os._exit(3)
        return {"label": [text.upper() for text in inputs["text"]], "length": [len(text) for text in inputs["text"]]}


@mh.serving.signature(inputs={"image": "bytes[*]"}, outputs={"again": "bytes[*]", "sum": "float32[*]"})
def echo(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"again": inputs["image"], "sum": torch.tensor([float(sum(each)) for each in inputs["image"]])}


@mh.serving.signature(inputs={"x": "float32[*, *]"}, outputs={"rows": "int64[*]"})
def rows(inputs: dict[str, Any]) -> Any:
    return np.full(len(inputs["x"]), len(inputs["x"]))


@mh.serving.signature(inputs={"pair": "string[*, 2]"}, outputs={"joined": "string[*, 1]"})
def join(inputs: dict[str, Any]) -> Any:
    return [[f"{a}+{b}"] for a, b in inputs["pair"]]


MODELS = {"sentiment": Sentiment, "echo": echo, "rows": rows, "join": join}


@pytest.fixture(scope="module")
def server(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = settings_of(log=tmp_path_factory.mktemp("log"))
    with Server(MODELS, engine, resolve("cpu")[0], settings).start() as found:
        yield found


def asked(kit: Any, name: str, values: Any, **options: Any) -> Any:
    array = np.array(values, object)
    one = kit.InferInput(name, list(array.shape), "BYTES")
    one.set_data_from_numpy(array, **options)
    return one


def predict(server: Server, model: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/models/{model}:predict", json=body, timeout=30)


@pytest.mark.parametrize("binary", [True, False])
def test_triton_http_client_sends_and_gets_strings(server: Server, binary: bool) -> None:
    with over_http(server.http) as client:
        texts = asked(triton_http, "text", ["ab", "ä€"], binary_data=binary)
        wanted = [triton_http.InferRequestedOutput("label", binary_data=binary)]
        found = client.infer("sentiment", [texts], outputs=wanted).as_numpy("label").tolist()
        assert [one.decode() if isinstance(one, bytes) else one for one in found] == ["AB", "Ä€"]
        assert client.get_model_metadata("sentiment")["inputs"] == [
            {"name": "text", "datatype": "BYTES", "shape": [-1]}
        ]
        assert client.get_model_config("sentiment")["input"][0]["data_type"] == "TYPE_STRING"


def test_triton_grpc_client_sends_and_gets_strings_and_binary_data(server: Server) -> None:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        found = client.infer("echo", [asked(triton_grpc, "image", [PICTURE, b"", b"\0\0"])])
        assert found.as_numpy("again").tolist() == [PICTURE, b"", b"\0\0"]
        assert found.as_numpy("sum").tolist() == [sum(PICTURE), 0, 0]
        assert client.get_model_config("echo").config.input[0].data_type == 13


def test_outputs_of_any_bytes_are_binary_also_if_json_was_asked_for(server: Server) -> None:
    body = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["\u00e9"]}]}
    answer = httpx.post(f"{server.url}/v2/models/echo/infer", json=body)
    size = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:size])["outputs"][0]["parameters"] == {"binary_data_size": 6}
    assert answer.content[size:] == b"\x02\0\0\0" + "\u00e9".encode()


def test_tensorflow_rest_takes_strings_and_base64(server: Server) -> None:
    answer = predict(server, "sentiment", instances=["a", {"b64": base64.b64encode(b"bc").decode()}])
    assert answer.json() == {"predictions": [{"label": "A", "length": 1}, {"label": "BC", "length": 2}]}
    encoded = {"b64": base64.b64encode(PICTURE).decode()}
    for body in ({"instances": [encoded]}, {"instances": [{"image": encoded}]}):
        assert predict(server, "echo", **body).json() == {"predictions": [{"again": encoded, "sum": 32640.0}]}
    assert predict(server, "join", inputs=[["a", "b"]]).json() == {"outputs": [["a+b"]]}
    signature = httpx.get(f"{server.url}/v1/models/echo/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert signature["serving_default"]["inputs"]["image"]["dtype"] == "DT_STRING"


def test_tensorflow_grpc_takes_strings_and_one_value_for_all(server: Server) -> None:
    for values, wanted in (([b"a", b"bc"], [b"A", b"BC"]), ([b"x"], [b"X", b"X"])):
        proto = {"dtype": 7, "tensor_shape": {"dim": [{"size": 2}]}, "string_val": values}
        request = MESSAGES["PredictRequest"](model_spec={"name": "sentiment"}, inputs={"text": proto})
        path = "/tensorflow.serving.PredictionService/Predict"
        answer = call(server.grpc, path, request, MESSAGES["PredictResponse"])
        assert list(answer.outputs["label"].string_val) == wanted
        assert answer.outputs["label"].dtype == 7


def test_client_sends_and_gets_strings(server: Server) -> None:
    with mh.serving.Client(server.url) as client:
        assert client("join", [["a", "b"], ["c", "d"]]).tolist() == [["a+b"], ["c+d"]]
        found = client("echo", {"image": [PICTURE]})
        assert found["again"].tolist() == [PICTURE]
        assert client.signature("sentiment").inputs == {"text": TensorSpec("string", (None,))}


def test_requests_are_joined_in_batches_and_large_texts_are_split(start: Start) -> None:
    server = start(MODELS)

    def ask(num: int) -> list[int]:
        return [row["length"] for row in predict(server, "sentiment", instances=["x" * num, "y"]).json()["predictions"]]

    sizes = [10, 5_000, 20_000, 70_000] * 10
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, sizes)) == [[size, 1] for size in sizes]
    many = predict(server, "sentiment", instances=[str(number) for number in range(500)]).json()["predictions"]
    assert [row["label"] for row in many] == [str(number) for number in range(500)]
    stats = next(m for m in server.state()["models"] if m["name"] == "sentiment")
    assert stats["versions"][0]["state"] == "AVAILABLE"
    found = predict(server, "rows", instances=[[1.0]] * 64).json()["predictions"]
    assert max(found) > 1, "rows of one request are one batch"


def test_error_in_a_predictor_is_a_500_with_an_id_and_affects_no_other_request(server: Server) -> None:
    def ask(text: str) -> httpx.Response:
        return predict(server, "sentiment", instances=[text])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, ["a", "raise", "b", "c"] * 4))
    assert [one.status_code for one in answers] == [200, 500, 200, 200] * 4
    reason = answers[1].json()["error"]
    assert "secret" not in reason
    number = reason.partition(", error ")[2].split()[0]
    events = [json.loads(line) for line in (Path(server.settings.log.log) / "events.jsonl").read_text().splitlines()]
    (logged,) = [one for one in events if one["kind"] == "model_failed" and one["error"] == number]
    assert logged["detail"].startswith("ValueError: secret detail of a text (test_python_predictors.py:")
    assert predict(server, "rows", instances=[[1.0]]).status_code == 200


def test_request_that_a_predictor_refuses_is_a_400_with_its_text(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: predict(server, "sentiment", instances=[text]), ["a", "invalid", "b"] * 4))
    assert [one.status_code for one in answers] == [200, 400, 200] * 4
    assert answers[1].json() == {"error": "this text is invalid"}


def test_predictor_that_ends_its_process_is_replaced_and_fails_only_that_request(start: Start) -> None:
    server = start(MODELS)
    answer = predict(server, "sentiment", instances=["exit"])
    assert answer.status_code == 500
    assert predict(server, "sentiment", instances=["a"]).json() == {"predictions": [{"label": "A", "length": 1}]}


HOSTILE = {
    "a length beyond the data": b"\xff\xff\xff\xff",
    "a missing length": b"\x01\0\0",
    "bytes after the last string": b"\0\0\0\0x",
    "no string": b"",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_malformed_strings_are_rejected(server: Server, raw: bytes) -> None:
    entry = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [entry]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = httpx.post(f"{server.url}/v2/models/sentiment/infer", content=head + raw, headers=headers)
    assert answer.status_code == 400
    assert "must have 1 strings of the type string, each after its length" in answer.json()["error"]
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        one = triton_grpc.InferInput("text", [1], "BYTES")
        one.set_data_from_numpy(np.array([b""], object))
        one._raw_content = raw
        with pytest.raises(InferenceServerException, match="must have 1 strings|unable to find data|at least one"):
            client.infer("sentiment", [one])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"instances": [5]}, "input 'text' must be string"),
        ({"instances": [["a"]]}, "input 'text' must be string"),
        ({"instances": [None]}, "input 'text' must be string"),
        ({"instances": [{"b64": "!"}]}, "input 'text' must be string"),
        ({"instances": [{"b64": base64.b64encode(b"\xff").decode()}]}, "input 'text' must be string"),
        ({"inputs": "a"}, "input 'text' must be string"),
    ],
)
def test_values_that_are_not_strings_are_rejected(server: Server, inputs: Any, message: str) -> None:
    answer = predict(server, "sentiment", **inputs)
    assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


def test_sizes_of_strings_cannot_be_forged(server: Server) -> None:
    def ask(shape: list[int], size: Any, raw: bytes) -> httpx.Response:
        entry = {"name": "text", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [entry]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return httpx.post(f"{server.url}/v2/models/sentiment/infer", content=head + raw, headers=headers)

    for size in (-1, 5, 2**70, "4", True, [4]):
        assert ask([1], size, b"\0\0\0\0").status_code == 400
    assert ask([2**39], 4, b"\0\0\0\0").status_code == 413
    assert ask([20_000], 80_000, b"\0" * 80_000).status_code == 413
    assert ask([1], 0, b"").status_code == 400


@pytest.mark.parametrize(("rows", "size"), [(16_384, 1 << 20), (1 << 39, 1), (-1, 1), (2**63 - 1, 0)])
def test_one_string_for_all_elements_counts_for_each(server: Server, rows: int, size: int) -> None:
    text = {"dtype": 7, "tensor_shape": {"dim": [{"size": rows}]}, "string_val": [b"a" * size]}
    request = MESSAGES["PredictRequest"](model_spec={"name": "sentiment"}, inputs={"text": text})
    with pytest.raises(grpc.RpcError) as caught:
        call(server.grpc, "/tensorflow.serving.PredictionService/Predict", request, MESSAGES["PredictResponse"])
    assert caught.value.code().name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")  # type: ignore[attr-defined]


def test_strings_count_toward_the_memory_limit(start: Start) -> None:
    server = start({"sentiment": Sentiment}, queue_mib=1)
    answer = predict(server, "sentiment", instances=["a"] * 16_000)
    assert answer.status_code == 503
    assert "bytes of requests are waiting" in answer.json()["error"]
    assert predict(server, "sentiment", instances=["a"] * 100).status_code == 200


def test_number_of_strings_is_limited(start: Start) -> None:
    answer = predict(start({"sentiment": Sentiment}), "sentiment", instances=["a"] * 20_000)
    assert (answer.status_code, answer.json()["error"][:38]) == (413, "a message may have 16384 strings, but ")


def python_version(root: Path, model: str, number: int, word: str) -> Path:
    """Write a version with Python code that has not changed for a while, as after a copy."""
    folder = root / model / str(number)
    folder.mkdir(parents=True)
    (folder / "words.py").write_text(f"WORD = {word!r}\n")
    (folder / "predictor.py").write_text(
        "from pathlib import Path\n"
        "from words import WORD\n\n"
        "class Predictor:\n"
        "    inputs = {'text': 'string[*]'}\n"
        "    outputs = {'text': 'string[*]'}\n\n"
        "    def load(self):\n"
        "        (Path(__file__).parent.parent.parent / 'executed').touch()\n\n"
        "    def predict(self, inputs):\n"
        "        return [text + WORD for text in inputs['text']]\n"
    )
    return folder


def eventually(check: Any) -> None:
    until = time.monotonic() + 60
    while not check():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait until a folder has not changed for two seconds."""
    monkeypatch.setattr("manyhands.serving.folder.PYTHON_SETTLED_SECONDS", -1.0)


@pytest.mark.usefixtures("settled")
def test_folder_with_python_code_is_refused_unless_it_is_trusted(tmp_path: Path, adder: Path, start: Start) -> None:
    root = tmp_path / "models"
    publish(adder, root / "adder", 1)
    python_version(root, "words", 1, "!")
    server = start(root, log=tmp_path / "log")
    (state,) = (one for one in server.state()["models"] if one["name"] == "words")
    assert "start it with --trust-python" in state["versions"][0]["error"]
    assert httpx.post(f"{server.url}/v1/models/words:predict", json={"instances": ["a"]}).status_code == 404
    assert httpx.get(f"{server.url}/v2/models/adder/ready").status_code == 200
    assert not (root / "executed").exists()


@pytest.mark.usefixtures("settled")
def test_no_way_to_load_a_version_executes_python_code_without_trust(tmp_path: Path, adder: Path, start: Start) -> None:
    """By management, labels, splits, a state file, a version swap, links, or code that appears in a loaded version."""
    root = tmp_path / "models"
    publish(adder, root / "words", 1)
    for number in (2, 3):
        python_version(root, "words", number, "!")
    (root / "words" / "4").symlink_to(root / "words" / "3")
    publish(adder, root / "words", 5)
    (root / "words" / "5" / "predictor.py").symlink_to(root / "words" / "3" / "predictor.py")
    (root / ".serving").mkdir()
    state = {
        "labels": {"new": 3},
        "shares": [{"model": "words", "version": 2, "weight": 1}],
        "rejected": [],
        "asked": [2],
    }
    (root / ".serving" / "words.json").write_text(json.dumps({**state, "unloaded": False}))
    server = start(root, versions="all")
    with httpx.Client(base_url=server.manage_url, timeout=60) as manage:
        for number in (2, 3, 4, 5):
            assert manage.post("/manage/models/words/load", json={"version": number}).status_code != 200
            label = manage.post("/manage/models/words/label", json={"label": "x", "version": number})
            share = {"version": number, "weight": 1}
            assert label.status_code != 200
            assert manage.post("/manage/models/words/split", json={"shares": [share]}).status_code != 200
        code = (root / "words" / "3" / "predictor.py").read_text()
        for parameters in ({"file:6/predictor.py": code}, {"config": "{}"}):
            asked = manage.post("/v2/repository/models/words/load", json={"parameters": parameters})
            assert asked.status_code == 400
        # Code that is added after the scan that found a complete version.
        publish(adder, root / "words", 7)
        eventually(lambda: server.state()["models"][0]["current"] == 7)
        (root / "words" / "7" / "predictor.py").write_text(code)
        for replica in server.state()["models"][0]["versions"][-1]["replicas"]:
            os.kill(replica["pid"], 9)
        eventually(lambda: server.state()["models"][0]["versions"][-1]["replicas"] == [])
        assert manage.post("/manage/models/words/load", json={"version": 1}).status_code == 200
        assert httpx.post(
            f"{server.url}/v1/models/words/versions/1:predict", json={"instances": [[1, 2, 3]]}
        ).is_success
    with pytest.raises(ArchiveError, match="must consist of"):
        mh.load(root / "words" / "7")
    assert not (root / "executed").exists()


@pytest.mark.usefixtures("settled")
def test_trusted_folders_have_versions_labels_and_splits(tmp_path: Path, adder: Path, start: Start) -> None:
    root = tmp_path / "models"
    publish(adder, root / "adder", 1)
    python_version(root, "words", 1, " one")
    server = start(root, trust_python=True, versions="latest:2")

    def answer(path: str = "words") -> Any:
        return httpx.post(f"{server.url}/v1/models/{path}:predict", json={"instances": ["a"]}, timeout=30).json()

    assert answer() == {"predictions": ["a one"]}
    assert (root / "executed").exists()
    assert sorted(path.name for path in (root / "words" / "1").iterdir()) == ["predictor.py", "words.py"]
    python_version(root, "words", 2, " two")
    eventually(lambda: answer() == {"predictions": ["a two"]})
    with mh.serving.Client(server.url, manage=server.manage_url) as client:
        client.label("words", "old", 1)
        client.split("words", [{"version": 1, "weight": 1}])
        assert answer("words/labels/old") == answer() == {"predictions": ["a one"]}
        client.split("words", [])
        client.rollback("words")
        assert answer() == {"predictions": ["a one"]}
    assert httpx.get(f"{server.url}/v2/models/adder/ready").status_code == 200


@pytest.mark.usefixtures("settled")
def test_predictor_that_cannot_be_loaded_affects_only_its_version(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "models"
    python_version(root, "words", 1, "!")
    broken = python_version(root, "broken", 1, "!")
    (broken / "predictor.py").write_text("raise ValueError('cannot load')\n")
    linked = python_version(root, "linked", 1, "!")
    (linked / "predictor.py").rename(linked / "other.py")
    (linked / "predictor.py").symlink_to(linked / "other.py")
    empty = python_version(root, "empty", 1, "!")
    (empty / "predictor.py").write_text("from manyhands import Predictor\n")
    server = start(root, trust_python=True)
    assert httpx.post(f"{server.url}/v1/models/words:predict", json={"instances": ["a"]}).json() == {
        "predictions": ["a!"]
    }
    errors = {one["name"]: one["versions"][0]["error"] for one in server.state()["models"]}
    assert "cannot load" in errors["broken"]
    assert "predictor.py, which is a link" in errors["linked"]
    assert "predictor.py must define the class Predictor" in errors["empty"]


def test_folder_that_is_being_copied_is_not_loaded_yet(tmp_path: Path) -> None:
    python_version(tmp_path, "words", 1, "!")
    assert complete_versions(tmp_path / "words", python=True).complete == {}
    assert "trust" in complete_versions(tmp_path / "words").refused[1]


def test_sandboxed_models_cannot_have_strings() -> None:
    signature = Signature({"x": TensorSpec("string", (None,))}, {"y": TensorSpec("float32", (None,))})
    require_rows(signature, texts=True)
    with pytest.raises(ArchiveError, match="must be numbers or bools with the rows first"):
        require_rows(signature)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda inputs: inputs, "must declare its inputs, but got <lambda> without them"),
        (mh.serving.signature(inputs={"x": "float32"}, outputs={"y": "float32[*]"})(lambda x: x), "'float32' for 'x'"),
        (mh.serving.signature(inputs={"x": "float32[3]"}, outputs={"y": "int8[*]"})(lambda x: x), "rows first"),
        (mh.serving.signature(inputs={"x": "text[*]"}, outputs={"y": "int8[*]"})(lambda x: x), "types are float32"),
        (mh.serving.signature(inputs={"x": "int8[*]"}, outputs={})(lambda x: x), "must declare its outputs"),
        (mh.serving.signature(inputs={"../x": "int8[*]"}, outputs={"y": "int8[*]"})(lambda x: x), "the name '../x'"),
        (torch.nn.Linear(1, 1), "a folder that mh.export or run.export wrote to"),
        (5, "models must be a folder"),
    ],
)
def test_invalid_predictors_are_refused_before_the_server_starts(target: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        mh.serve(target, on="cpu")


class Given:
    inputs: ClassVar = {"x": "float32[*]"}

    def __init__(self, spec: str, found: Any) -> None:
        self.outputs, self.found = {"y": spec}, found

    def predict(self, inputs: Any) -> Any:
        return self.found


@pytest.mark.parametrize(
    ("spec", "found", "wanted"),
    [
        ("float32[*]", [1, 2.5], [1.0, 2.5]),
        ("float16[*, 1]", torch.ones(2, 1), [[1.0], [1.0]]),
        ("uint8[*]", np.array([1, 255]), [1, 255]),
        ("bool[*]", [True, False], [True, False]),
        ("bytes[*]", [b"a\0", "b"], [b"a\0", b"b"]),
        ("string[*, *]", np.array([["a", "b"], ["c", "d"]]), [[b"a", b"b"], [b"c", b"d"]]),
    ],
)
def test_outputs_are_converted_to_the_declared_type(spec: str, found: Any, wanted: Any) -> None:
    model = PythonModel(Given(spec, found), "cpu")
    assert model.compute({}, 2)["y"].tolist() == wanted
    assert signature_of(model._predict.__self__).outputs == {"y": TensorSpec.parse(spec)}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "found", "message"),
    [
        ("float32[*]", [1.0], r"with 2 rows, but got float32\[1\]"),
        ("float32[*, 2]", [[1.0], [2.0]], r"but got float32\[2, 1\]"),
        ("float32[*]", ["1", "2"], "other elements"),
        ("float32[*]", [[1.0], [2.0, 3.0]], "other elements"),
        ("uint8[*]", [1, 256], "integers beyond uint8"),
        ("int64[*]", [1.5, 2.0], "an array of float64"),
        ("bool[*]", [1, 0], "an array of int64"),
        ("string[*]", [b"\xff", "b"], "other elements"),
        ("string[*]", [1, 2], "int instead of a string"),
        ("bytes[*]", np.array([b"a", b"b"]), r"an array of \|S1"),
        ("float32[*]", {"y": [1.0, 2.0], "z": []}, "must return the outputs y, but got y, z"),
        ("float32[*]", None, "other elements"),
    ],
)
def test_outputs_that_differ_from_the_declaration_are_errors(spec: str, found: Any, message: str) -> None:
    with pytest.raises(ArchiveError, match=message):
        PythonModel(Given(spec, found), "cpu").compute({}, 2)
