"""Weights from files: every format, common differences of names, and refusals that list the names."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._utils import _rebuild_sparse_tensor

from manyhands.core import ArchiveError, CheckpointError
from manyhands.storage import Checkpoint, CheckpointStore, Weights, export, load, match, open_weights, weights


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)


def state(width: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(t.shape) if t.is_floating_point() else t for name, t in Net(width).state_dict().items()}


def loaded(source: Weights) -> tuple[nn.Module, list[str]]:
    """Load the weights into a network; return it with the notices."""
    model = Net()
    found = open_weights(source.source)
    matched = match(found.shapes, model, source)
    model.load_state_dict(matched.renamed(found.load()[0]), strict=False)
    return model, matched.notices


def holds(model: nn.Module, wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def legacy(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def sharded(tensors: dict[str, Tensor], folder: Path, save: Callable[[Any, Path], None], ending: str) -> None:
    """A folder as Hugging Face writes a large network."""
    folder.mkdir()
    stem = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    parts = {name: f"part-{index % 2}.{ending}" for index, name in enumerate(tensors)}
    for file in sorted(set(parts.values())):
        save({name: tensors[name] for name, part in parts.items() if part == file}, folder / file)
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))


FORMATS: dict[str, Callable[[dict[str, Tensor], Path], Path | None]] = {
    "w.safetensors": save_file,
    "w.pt": torch.save,
    "w.pth": legacy,
    "pytorch_model.bin": lambda tensors, path: torch.save({"epoch": 3, "state_dict": tensors}, path),
    "w.ckpt": lambda tensors, path: torch.save({"step": torch.tensor(1), "model": tensors, "lr": [0.1]}, path),
    "shards": lambda tensors, path: sharded(tensors, path, save_file, "safetensors"),
    "bins": lambda tensors, path: sharded(tensors, path, torch.save, "bin"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_loaded_from_every_format(name: str, tmp_path: Path) -> None:
    FORMATS[name](state(), tmp_path / name)
    model, notices = loaded(weights(tmp_path / name))
    assert holds(model, state())
    assert notices == []


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_folder_with_one_weight_file_is_loaded(name: str, tmp_path: Path) -> None:
    (save_file if name.endswith("safetensors") else torch.save)(state(), tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert holds(loaded(weights(tmp_path))[0], state())


def test_checkpoint_weights_and_ema_averages_are_loaded(tmp_path: Path) -> None:
    averages = {"head.bias": torch.ones(2)}
    with CheckpointStore(tmp_path) as store:
        store.save(Checkpoint(step=3, model=state(), averages=averages))
    found = open_weights(tmp_path)
    assert found.shapes["head.weight"] == (2, 3)
    tensors, kept = found.load()
    assert torch.equal(tensors["head.weight"], state()["head.weight"])
    assert torch.equal(kept["head.bias"], averages["head.bias"])


def test_shapes_are_read_from_the_header_alone(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "w.safetensors")
    found = open_weights(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").unlink()
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in state().items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name: f"module.{name}", "without 'module.'"),
        (lambda name: f"_orig_mod.{name}", "without '_orig_mod.'"),
        (lambda name: f"model.{name}", "without 'model.'"),
        (lambda name: f"module._orig_mod.{name}", "without"),
        (lambda name: f"_orig_mod.module.model.{name}", "without"),
        (lambda name: name.replace("body.", "body._orig_mod."), "without '_orig_mod.'"),
        (lambda name: f"net.{name}", None),
    ],
)
def test_common_prefixes_are_stripped_with_a_notice(change: Callable[[str], str], said: str | None) -> None:
    source = weights({change(name): tensor for name, tensor in state().items()})
    if said is None:
        with pytest.raises(
            CheckpointError, match=r"rename with mh.storage.weights\(path, rename=\{'net\.body\.0\.': 'body\.0\.'"
        ):
            loaded(source)
        model, notices = loaded(weights(source.source, rename={"net.": ""}))
        assert notices == []
    else:
        model, notices = loaded(source)
        assert len(notices) == 1
        assert said in notices[0]
    assert holds(model, state())


def test_weights_are_loaded_into_a_submodule_by_prefix() -> None:
    outer = nn.ModuleDict({"inner": Net()})
    found = open_weights(state())
    matched = match(found.shapes, outer, weights(state()))
    outer.load_state_dict(matched.renamed(found.load()[0]), strict=False)
    assert holds(outer["inner"], state())
    assert matched.notices == ["names of a state dict of 9 tensors were taken under 'inner.'"]


def test_submodule_name_that_looks_like_a_prefix_is_kept() -> None:
    model = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    source = weights(dict(model.state_dict()))
    assert match(open_weights(source.source).shapes, model, source).notices == []


def test_a_tied_weight_may_be_stored_once() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    model["last"].weight = model["first"].weight
    tensors = {name: tensor + 1 for name, tensor in model.state_dict().items() if name != "last.weight"}
    source = weights(tensors)
    model.load_state_dict(match(open_weights(tensors).shapes, model, source).renamed(tensors), strict=False)
    assert torch.equal(model["last"].weight, tensors["first.weight"])
    del tensors["first.weight"]
    with pytest.raises(CheckpointError, match=r"2 missing \(first.weight, last.weight\)"):
        match(open_weights(tensors).shapes, model, source)


def test_mismatch_error_lists_missing_unexpected_and_reshaped_tensors() -> None:
    tensors = {**state(4), "extra.weight": torch.ones(1)}
    tensors["top.bias"] = tensors.pop("head.bias")
    with pytest.raises(CheckpointError) as caught:
        loaded(weights(tensors))
    text = str(caught.value)
    assert text.startswith(
        "a state dict of 10 tensors must contain the tensors of Net, but got 1 missing (head.bias), "
    )
    assert "2 unexpected (extra.weight, top.bias)" in text
    assert "7 of another shape (body.0.weight is (4, 2) and should be (3, 2), " in text
    assert "rename with mh.storage.weights(path, rename={'top.': 'head.'})" in text
    assert "take what fits with mh.storage.weights(path, strict=False)" in text


def test_rename_that_merges_two_names_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="every tensor a unique name"):
        loaded(weights({"a.w": torch.ones(1), "b.w": torch.ones(1)}, rename={"a.": "", "b.": ""}))


def test_non_strict_loading_takes_matching_tensors() -> None:
    tensors = {**state(), "head.weight": torch.ones(7, 7), "extra": torch.ones(1)}
    model, notices = loaded(weights(tensors, strict=False))
    assert torch.equal(model.body[0].weight, tensors["body.0.weight"])  # type: ignore[index, union-attr]
    assert model.head.weight.shape == (2, 3)  # type: ignore[union-attr]
    assert len(notices) == 1
    assert notices[0].startswith("8 tensors of ")
    assert "are loaded; 1 unexpected (extra), 1 of another shape (head.weight is (7, 7)" in notices[0]
    with pytest.raises(CheckpointError, match="9 missing"):
        loaded(weights({"foreign": torch.ones(1)}, strict=False))


class Danger:
    """A pickle that would do something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was-executed"),)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("w.pt", lambda path: torch.save(Net(), path), "only plain tensors are read.*save its model.state_dict"),
        (
            "w.pt",
            lambda path: torch.save({"a": Danger()}, path),
            "only plain tensors are read from a pickle, because it can execute",
        ),
        ("w.pt", lambda path: path.write_bytes(b"nothing"), "w.pt"),
        ("w.pth", lambda path: path.write_bytes(b""), "must be a complete file of torch.save"),
        ("w.bin", lambda path: torch.save([1, 2], path), "must contain a state dict, but got list without tensors"),
        ("w.safetensors", lambda path: path.write_bytes(b"nothing"), "must be a complete safetensors file"),
        ("w.onnx", lambda path: path.write_bytes(b"nothing"), "which is another kind of file"),
        ("w.pt", lambda path: None, "which does not exist"),
        ("w", lambda path: path.mkdir(), "an empty folder"),
        ("w", lambda path: (path.mkdir(), (path / "model.safetensors.index.json").write_text("{}")), "list the files"),
        (
            "w",
            lambda path: (
                path.mkdir(),
                (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}'),
            ),
            "must list files in its own folder, but got '../a.safetensors'",
        ),
    ],
)
def test_unsupported_or_unsafe_weight_files_are_rejected(
    name: str, write: Callable[[Path], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        loaded(weights(tmp_path / name))
    assert not (tmp_path / "was-executed").exists()


def test_truncated_weight_file_is_rejected(tmp_path: Path) -> None:
    for name, save in (("w.safetensors", save_file), ("w.pt", torch.save)):
        save(state(), tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError, match=name):
            loaded(weights(tmp_path / name))


def test_weights_of_the_newest_exported_version_are_loaded(tmp_path: Path) -> None:
    for width in (1.0, 2.0):
        net = nn.Linear(2, 1)
        nn.init.constant_(net.weight, width)
        version = export(net, lambda model, x: model(x), {"x": torch.zeros(2, 2)}, tmp_path / "models")
    for folder in (tmp_path / "models", version):
        found = open_weights(weights(folder).source)
        assert found.shapes == {"weight": (1, 2), "bias": (1,)}
        assert found.load()[0]["weight"].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs", "a file that begins with b'version https://'"),
        (b"PK\x03\x04 and no more", "one that ends early, after 16 bytes"),
        (b"\x80\x02}q\x00X", "a damaged one"),
    ],
)
def test_corrupted_torch_file_error_is_a_plain_sentence(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        open_weights(tmp_path / "w.pt")
    assert str(error.value) == (
        f"{tmp_path / 'w.pt'} must be a complete file of torch.save, but got {told}. Copy or download it again."
    )


def test_control_characters_in_tensor_names_are_escaped_in_errors(tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07\x9b2J\u202e\r"
    save_file({name: torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as error:
        loaded(weights(tmp_path / "w.safetensors"))
    assert r"\x1b]0;owned\x07\x9b2J\u202e\x0d" in str(error.value)
    assert not set(name) & set("\x1b\x07\x9b\u202e\r") & set(str(error.value))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_module_is_rejected_without_suggesting_weights_only_false(zipped: bool, tmp_path: Path) -> None:
    torch.save(Net(), tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError) as error:
        open_weights(tmp_path / "w.pt")
    assert f"w.pt with {Net.__module__}.Net in it. If you trust the file, save" in str(error.value)
    assert "weights_only" not in str(error.value)
    assert "safe_globals" not in str(error.value)


class Rebuilt:
    """Is pickled as the call of a function of torch that `weights_only` allows."""

    def __init__(self, function: Callable[..., Tensor], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


FAR = torch.tensor([2**40])
HOSTILE: dict[str, Callable[[], object]] = {
    "sparse": lambda: Rebuilt(_rebuild_sparse_tensor, torch.sparse_coo, (FAR[None], torch.ones(1), (3,))),
    "compressed": lambda: Rebuilt(
        _rebuild_sparse_tensor, torch.sparse_csr, (torch.tensor([0, 1]), FAR, torch.ones(1), (1, 3))
    ),
    "a sparse one that torch accepts": lambda: torch.eye(3).to_sparse(),
    "without values": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("build", HOSTILE.values(), ids=list(HOSTILE))
def test_non_dense_tensors_in_a_pickle_are_rejected(build: Callable[[], object], zipped: bool, tmp_path: Path) -> None:
    """Older torch takes the indices of sparse tensors as they come; making one dense writes to that address."""
    torch.save({"head.bias": build()}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    # Newer torch itself rejects indices beyond the shape.
    with pytest.raises(CheckpointError, match=r"'head\.bias' must be|w\.pt must be a complete file .* damaged"):
        open_weights(tmp_path / "w.pt")


def test_state_dict_with_non_tensor_values_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="the values of a state dict must be tensors, but got {'a': int}"):
        open_weights({"a": 1})


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5", "model.pt"])
def test_keras_files_are_rejected_without_being_unpacked_or_imported(name: str, tmp_path: Path) -> None:
    """A Keras file can hold code (Lambda layers, custom objects); it is served only after an export."""
    place = tmp_path / "models" / "1" / name
    place.parent.mkdir(parents=True)
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("config.json", '{"class_name": "Lambda", "config": {"function": "os.system"}}')
        file.writestr("../../escaped", "x")
        file.writestr("model.weights.h5", bytes(1 << 20))
    before = sorted(tmp_path.rglob("*"))
    for source in (place, place.parent, place.parents[1]):
        with pytest.raises(CheckpointError):
            open_weights(source)
        with pytest.raises(ArchiveError):
            load(source)
    assert sorted(tmp_path.rglob("*")) == before


def _tensor(shape: list[int], offsets: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({}, 1 << 63),
        ({}, (1 << 64) - 1),
        ({"a": _tensor([2], [0, 8]), "b": _tensor([2], [0, 8])}, None),
        ({"a": _tensor([1], [4, 8])}, None),
        ({"a": _tensor([1 << 32, 1 << 32], [0, 0])}, None),
        ({"a": _tensor([1 << 62, 4], [0, 0])}, None),
        ({"a": _tensor([-1], [0, 8])}, None),
        ({"a": _tensor([2], [0, 1 << 40])}, None),
    ],
)
def test_safetensors_header_with_hostile_sizes_is_rejected(
    tmp_path: Path, header: dict[str, Any], size: int | None
) -> None:
    """Lengths that no file has, tensors that share bytes or leave a gap, and sizes whose product wraps."""
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="must be a complete safetensors file"):
        open_weights(path)
