"""Exported models: they compute as the module does, are written atomically, and execute nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from manyhands.core import ArchiveError, DataError
from manyhands.storage import export, load
from manyhands.storage.archive_folders import versions

FILES = ("weights.safetensors", "program.json", "signature.json")


def call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Gpt(nn.Module):
    """A small transformer with tied embeddings, a non-persistent buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1), persistent=False)
        self.scale = torch.tensor([0.5])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + torch.arange(6, device=ids.device)[:, None] / 6
        return self.head(self.block(x, src_mask=self.mask)) * self.scale


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return export(nn.Linear(4, 2), call, {"x": torch.randn(3, 4)}, tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def version(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    for entry in exported.iterdir():
        (folder / entry.name).write_bytes(entry.read_bytes())
    return folder


def reseal(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Makes the digests right again, as an attacker would."""
    data = {name: (folder / name).read_bytes() for name in names}
    files = {name: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in data.items()}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


def edit(folder: Path, change: Callable[[Any], Any], name: str = "program.json") -> None:
    data = json.loads((folder / name).read_text())
    data = change(data) or data
    (folder / name).write_text(json.dumps(data))
    reseal(folder)


@pytest.mark.parametrize("kind", ["cnn", "gpt", "lstm"])
def test_archive_predicts_like_the_module_for_any_batch_size(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    model, sample = {
        "cnn": (Cnn(), lambda n: torch.randn(n, 3, 8, 8)),
        "gpt": (Gpt(), lambda n: torch.randint(0, 32, (n, 6))),
        "lstm": (nn.LSTM(4, 3, batch_first=True), lambda n: torch.randn(n, 5, 4)),
    }[kind]
    if kind == "cnn":
        model(sample(16))
    predict = (lambda m, x: m(x)[0]) if kind == "lstm" else call
    assert model.training
    archive = load(export(model, predict, {"x": sample(2)}, tmp_path / kind))
    assert model.training
    model.eval()
    for rows in (1, 2, 3, 7, 64):
        x = sample(rows)
        with torch.no_grad():
            torch.testing.assert_close(archive(x), predict(model, x), rtol=1e-6, atol=1e-6)
    assert archive.version == 1
    assert archive.signature.inputs["x"].shape[0] is None
    assert archive.signature.outputs["output"].shape[0] is None


def test_archive_supports_multiple_inputs_dict_outputs_and_extra_metadata(tmp_path: Path) -> None:
    model = nn.Bilinear(3, 4, 2)

    def predict(m: nn.Module, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        score = m(left, right)
        return {"zz": score, "probability": score.softmax(-1), "rows": torch.arange(left.shape[0] * 2)}

    inputs = {"left": torch.randn(1, 3), "right": torch.randn(1, 4)}
    archive = load(export(model, predict, inputs, tmp_path, extra={"classes": ["a", "b"]}))
    assert archive.meta["classes"] == ["a", "b"]
    assert list(archive.signature.outputs) == ["zz", "probability", "rows"]
    batch = {"right": torch.randn(5, 4), "left": torch.randn(5, 3)}
    wanted = predict(model, batch["left"], batch["right"])
    for name, answer in archive(batch).items():
        torch.testing.assert_close(answer, wanted[name])
    with pytest.raises(DataError, match="left"):
        archive({"left": torch.randn(5, 3)})


def test_archive_supports_bfloat16_weights_autocast_and_cond_branches(tmp_path: Path) -> None:
    half = nn.Linear(4, 2).bfloat16()
    archive = load(export(half, call, {"x": torch.randn(2, 4).bfloat16()}, tmp_path / "half"))
    x = torch.randn(3, 4).bfloat16()
    assert archive.module.w0.dtype == torch.bfloat16
    torch.testing.assert_close(archive(x), half(x))

    model = nn.Linear(4, 4)

    def predict(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        with torch.enable_grad():
            y = y + 1
        return torch.cond(y.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y.float(),))

    archive = load(export(model, predict, {"x": torch.randn(2, 4)}, tmp_path / "regions"))
    for sign in (5.0, -5.0):
        x = torch.randn(3, 4) + sign
        with torch.autocast("cpu", torch.bfloat16):
            y = (model(x) + 1).float()
        torch.testing.assert_close(archive(x), y.sin() if y.sum() > 0 else y.cos())


@pytest.mark.gpu
def test_archive_runs_on_the_device_it_is_loaded_on(tmp_path: Path) -> None:
    model = Gpt()
    path = export(model, call, {"x": torch.randint(0, 32, (2, 6))}, tmp_path / "cpu")
    ids = torch.randint(0, 32, (5, 6))
    wanted = model.eval()(ids)
    torch.testing.assert_close(load(path, "cuda")(ids).cpu(), wanted, rtol=1e-4, atol=1e-4)
    model.scale = model.scale.cuda()
    path = export(model.cuda(), call, {"x": ids}, tmp_path / "cuda")
    torch.testing.assert_close(load(path)(ids), wanted, rtol=1e-4, atol=1e-4)


def test_version_numbers_increase_and_unrelated_entries_are_ignored(tmp_path: Path, exported: Path) -> None:
    model, inputs = nn.Linear(4, 2), {"x": torch.randn(2, 4)}
    assert versions(tmp_path / "none") == []
    assert export(model, call, inputs, tmp_path).name == "1"
    for name in ("notes", "007", "-3", "1.5", ".tmp-x.1.y", "50"):
        (tmp_path / name).mkdir()
    (tmp_path / "9").write_text("a file")
    (tmp_path / "8").symlink_to(exported)
    assert versions(tmp_path) == [1]
    assert export(model, call, inputs, tmp_path).name == "51"
    assert versions(tmp_path) == [1, 51]
    assert load(tmp_path).version == 51
    assert load(tmp_path / "1").version == 1


class Merging(nn.Linear):
    """Doubles its weights in evaluation mode, as a layer does that merges adapters into them."""

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            with torch.no_grad():
                self.weight *= 0.5 if mode else 2.0
        return super().train(mode)


def test_export_takes_merged_weights_apart_again(tmp_path: Path) -> None:
    model = Merging(2, 1)
    before = model.weight.detach().clone()
    export(model, call, {"x": torch.ones(2, 2)}, tmp_path)
    assert model.training
    assert torch.equal(model.weight, before)


RACE = """
import os, sys
from pathlib import Path
import torch
from manyhands.storage import export
from manyhands.storage.disk import Disk
import manyhands.storage.archive_folders as archive_folders
path, model = Path(sys.argv[1]), torch.nn.Linear(2, 1)
def go():
    export(model, lambda m, x: m(x), {"x": torch.ones(2, 2)}, path)
class Dies(Disk):
    def rename(self, source, target):
        os._exit(7)
export(model, lambda m, x: m(x), {"x": torch.ones(2, 2)}, path / "warm")
for at in range(6):
    if os.fork() == 0:
        if at == 5:
            archive_folders.Disk = Dies
        go(); go(); os._exit(0)
codes = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6))
assert codes == [0, 0, 0, 0, 0, 7], codes
"""


def test_concurrent_exports_get_unique_versions_and_leave_no_temporaries(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RACE, str(tmp_path)], check=True)
    assert versions(tmp_path) == list(range(1, 11))
    assert all(load(tmp_path / str(number)).version == number for number in (1, 5, 10))
    export(nn.Linear(2, 1), call, {"x": torch.ones(2, 2)}, tmp_path)
    assert not list(tmp_path.glob(".tmp-*"))


def test_corrupted_bytes_are_detected_on_load(version: Path) -> None:
    chance = random.Random(0)
    names = [*FILES, "manifest.json"]
    for case in range(200):
        path = version / names[case % 4]
        whole = path.read_bytes()
        data = bytearray(whole)
        if case % 3:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        with pytest.raises(ArchiveError):
            load(version)
        path.write_bytes(whole)
    load(version)


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the line
            return x
        return -x


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1).sum(1) if x.shape[0] == 2 else x.sum(1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Item(), r"traceable.*test_archives.py:\d+: if x.sum\(\).item\(\) > 0:  # the line"),
        (Fixed(), "any batch size"),
        (Counting(), "must not change the model or its inputs"),
        (nn.Linear(9, 1), r"must work on the examples.*test_archives.py:\d+: return model\(x\)"),
    ],
)
def test_unsupported_model_raises_archive_error(tmp_path: Path, model: nn.Module, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        export(model, call, {"x": torch.randn(2, 4)}, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("predict", "inputs", "words"),
    [
        (lambda m, x: (m(x), x), {"x": torch.ones(2, 4)}, "a dict of tensors"),
        (lambda m, x: m(x) + torch.rand(()), {"x": torch.ones(2, 4)}, "same outputs as the model"),
        (call, {"x": torch.tensor(1.0)}, "at least one row"),
        (call, {"../x": torch.ones(2, 4)}, "letters"),
        (lambda m, x, y: m(x), {"x": torch.ones(2, 4), "y": torch.ones(3)}, "same number of rows"),
    ],
)
def test_invalid_export_arguments_raise_archive_error(
    tmp_path: Path, predict: Any, inputs: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(ArchiveError, match=words):
        export(nn.Linear(4, 2), predict, inputs, tmp_path / "m")


def test_export_to_an_unwritable_path_raises_archive_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ArchiveError, match=r"can be written and has free space, but got .*file \(File exists\). Choose another"
    ):
        export(nn.Linear(4, 2), call, {"x": torch.ones(2, 4)}, tmp_path / "file")


def attack(marker: Path) -> str:
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"


def place(program: dict[str, Any], where: str, text: str) -> None:
    """Puts a text where some reader of programs would evaluate it."""
    graph = program["graphs"][0]
    node = graph["nodes"][0]
    symbol = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}
    if where == "size":
        node["args"][0] = symbol
    elif where == "expr_str":
        node["args"][0] = {"expr_str": text}
    elif where == "range_constraints":
        program["range_constraints"] = {text: {"min_val": 0, "max_val": 9}}
    elif where == "guards_code":
        program["guards_code"] = [text]
    elif where == "sym_int_values":
        graph["sym_int_values"] = {"s0": symbol}
    elif where == "operator":
        node["op"] = text
    elif where == "keyword":
        node["kwargs"] = {f"bias={text}, x": 1}
    elif where == "dtype":
        node["args"][0] = {"dtype": text}
    elif where == "weight":
        graph["inputs"][0] = {"weight": text}
    elif where == "input":
        graph["inputs"][-1] = {"input": text}
    elif where == "reference":
        node["args"][0] = {"ref": text}
    elif where == "text":
        node["args"][0] = text
    else:
        graph["outputs"] = {"code": text}


PLACES = ["size", "expr_str", "range_constraints", "guards_code", "sym_int_values", "operator", "keyword"]
PLACES += ["dtype", "weight", "input", "reference", "text", "output"]


@pytest.mark.parametrize("where", PLACES)
def test_code_in_a_shape_expression_is_rejected_and_not_executed(version: Path, tmp_path: Path, where: str) -> None:
    """torch.export.load passes `expr_str` to sympify, which evaluates it."""
    import sympy

    marker = tmp_path / "executed"
    with contextlib.suppress(Exception):  # it fails after having run the text
        sympy.sympify(attack(marker))
    assert marker.exists(), "the attack must work, or this test shows nothing"
    marker.unlink()

    edit(version, lambda program: place(program, where, attack(marker)))
    with pytest.raises(ArchiveError):
        load(version)(torch.ones(1, 4))
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11 on its own archive
def test_torch_export_program_with_embedded_code_is_rejected(version: Path, tmp_path: Path) -> None:
    """A whole program in torch's own form, with the attack where its loader evaluates it."""
    import zipfile

    marker = tmp_path / "executed"
    batch = torch.export.Dim("batch")
    program = torch.export.export(nn.Linear(4, 2), (torch.ones(3, 4),), dynamic_shapes=({0: batch},), strict=False)
    torch.export.save(program, tmp_path / "plain.pt2")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt2") as source,
        zipfile.ZipFile(tmp_path / "bad.pt2", "w") as target,
    ):
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("models/model.json"):
                found = json.loads(data)
                _poison(found, attack(marker))
                data = stolen = json.dumps(found).encode()
            target.writestr(name, data)
    with contextlib.suppress(Exception):  # it fails after having run the text
        torch.export.load(tmp_path / "bad.pt2")
    assert marker.exists(), "the attack must work, or this test shows nothing"
    marker.unlink()

    (version / "program.json").write_bytes(stolen)
    reseal(version)
    with pytest.raises(ArchiveError):
        load(version)
    (version / "program.json").write_bytes((tmp_path / "bad.pt2").read_bytes())
    reseal(version)
    with pytest.raises(ArchiveError, match="JSON"):
        load(version)
    assert not marker.exists()


def _poison(value: Any, text: str) -> None:
    if isinstance(value, dict):
        if "expr_str" in value:
            value["expr_str"] = text
        for inner in value.values():
            _poison(inner, text)
    elif isinstance(value, list):
        for inner in value:
            _poison(inner, text)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["sample_inputs.pt", "weights.safetensors", "program.json", "signature.json"])
def test_pickled_payload_in_an_archive_is_rejected_and_not_executed(version: Path, tmp_path: Path, name: str) -> None:
    """torch.export.load retries example inputs with weights_only=False."""
    marker = tmp_path / "executed"
    torch.save(Bomb(marker), tmp_path / "bomb.pt")
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    assert marker.exists(), "the attack must work, or this test shows nothing"
    marker.unlink()
    (version / name).write_bytes((tmp_path / "bomb.pt").read_bytes())
    reseal(version)
    with pytest.raises(ArchiveError):
        load(version)
    reseal(version, tuple({*FILES, name}))
    with pytest.raises(ArchiveError):
        load(version)
    assert not marker.exists()


def test_fx_executes_code_in_keyword_names(tmp_path: Path) -> None:
    """torch.fx prints keywords into source; this is why each must be one of the operator's own."""
    marker = tmp_path / "executed"
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.ones.default, ([2],), {f"dtype={attack(marker)}, device": None}))
    fx.GraphModule(nn.Module(), graph)()
    assert marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.save.default",
        "aten.warn.default",
        "aten._print.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.__class__.default",
        "aten.linear.__init__",
        "aten.linear.op",
        "aten.linear.nothing",
        "aten.linear",
        "quantized.linear.default",
        "prim.PythonOp.default",
        "inductor.accumulate_grad_.default",
        "higher_order.cond",
        "os.system",
        "builtins.eval",
        "operator.attrgetter",
        "operator.methodcaller",
        "torch.load",
        "torch.hub.load",
        "region.python",
        "",
    ],
)
def test_operators_outside_the_allowlist_are_rejected(version: Path, name: str) -> None:
    edit(version, lambda program: program["graphs"][0]["nodes"][0].update(op=name))
    with pytest.raises(ArchiveError):
        load(version)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["graphs"][0]["nodes"].append({"op": "operator.pow", "args": [10, 10**9]}),
        lambda p: p["graphs"][0]["nodes"].append({"op": "operator.mul", "args": ["a", 10**9]}),
        lambda p: p["graphs"][0]["nodes"].append({"op": "operator.mul", "args": [[1], 10**9]}),
        lambda p: p["graphs"][0]["nodes"].append({"op": "region.call", "graph": 0, "args": []}),
        lambda p: p["graphs"][0]["nodes"][0].update(args=deep(100)),
        lambda p: p["graphs"][0]["nodes"][0].update(args=[10**30]),
        lambda p: p["graphs"][0]["nodes"][0].update(args=[{"ref": 99}]),
        lambda p: p["graphs"][0]["nodes"][0].update(args=[{"ref": -1}]),
        lambda p: p["graphs"][0]["nodes"][0].update(args=[None] * 50),
        lambda p: p["graphs"][0]["inputs"].append({"constant": {"class_fqn": "os.system"}}),
        lambda p: p["graphs"][0].update(nodes=7),
        lambda p: p.update(graphs=[]),
        lambda p: p.update(format=99),
        lambda p: [1],
    ],
)
def test_malformed_programs_are_rejected(version: Path, change: Callable[[Any], Any]) -> None:
    edit(version, change)
    with pytest.raises(ArchiveError):
        load(version)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["signature"]["inputs"].update({"../x": s["signature"]["inputs"]["x"]}),
        lambda s: s["signature"]["inputs"]["x"].update(dtype="load"),
        lambda s: s["signature"]["inputs"]["x"].update(shape=["__import__"]),
        lambda s: s.update(custom_objects={}),
        lambda s: s.pop("signature"),
    ],
)
def test_malformed_signatures_are_rejected(version: Path, change: Callable[[Any], Any]) -> None:
    def changed(data: Any) -> None:
        change(data)

    edit(version, changed, "signature.json")
    with pytest.raises(ArchiveError):
        load(version)


def test_deeply_nested_json_is_rejected(version: Path) -> None:
    (version / "program.json").write_text("[" * 200_000 + "]" * 200_000)
    reseal(version)
    with pytest.raises(ArchiveError):
        load(version)


def test_symlinks_missing_files_and_unlisted_files_are_rejected(version: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (version / "program.json").rename(secret)
    (version / "program.json").symlink_to(secret)
    with pytest.raises(ArchiveError, match="not a regular file"):
        load(version)
    (version / "program.json").unlink()
    with pytest.raises(ArchiveError, match=r"no program\.json"):
        load(version)
    secret.rename(version / "program.json")
    (version / "model.so").write_bytes(b"")
    with pytest.raises(ArchiveError, match=r"model\.so beside them"):
        load(version)
    (version / "model.so").unlink()
    os.mkfifo(version / "pipe")
    with pytest.raises(ArchiveError, match="pipe"):
        load(version)
    (version / "pipe").unlink()
    data = json.loads((version / "manifest.json").read_text())
    data["files"]["../../secret"] = data["files"]["program.json"]
    (version / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ArchiveError, match="lists other files"):
        load(version)


def test_oversized_files_are_rejected_before_reading(version: Path) -> None:
    with (version / "program.json").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArchiveError, match="more than"):
        load(version)


def test_loading_an_empty_folder_raises_archive_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="none in"):
        load(tmp_path)


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**40,
    1e308,
    "",
    "x",
    "__import__",
    [],
    [[]],
    {},
    {"ref": 0},
    {"dtype": "load"},
]


def mutate(value: Any, chance: random.Random) -> Any:
    """Replaces, removes or doubles one thing somewhere inside."""
    if isinstance(value, dict | list) and value and chance.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(list(keys))
        kind = chance.random()
        if kind < 0.1:
            del value[key]
        elif kind < 0.2 and isinstance(value, list):
            value.append(value[key])
        else:
            value[key] = mutate(value[key], chance)
        return value
    return chance.choice(JUNK)


def test_mutated_programs_load_or_raise_archive_error(tmp_path: Path, version: Path) -> None:
    """Whatever a program holds, the only error is ours."""
    made = export(Gpt(), call, {"x": torch.randint(0, 32, (2, 6))}, tmp_path / "gpt")
    chance = random.Random(0)
    refused = 0
    for folder, name in ((made, "program.json"), (version, "program.json"), (version, "signature.json")):
        whole = (folder / name).read_text()
        for _ in range(150):
            (folder / name).write_text(json.dumps(mutate(json.loads(whole), chance)))
            reseal(folder)
            try:
                load(folder)
            except ArchiveError:
                refused += 1
        (folder / name).write_text(whole)
        reseal(folder)
    assert refused > 200
