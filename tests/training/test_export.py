"""`mh.export`: networks that were trained elsewhere are served as they compute, or refused with the reason."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton_http
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import ArchiveError

IMAGES = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two inputs, and as many outputs, in the form that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 2)

    def forward(self, pixels: Tensor, scale: Tensor, offset: float = 0.0) -> Any:
        made = {"logits": self.layer(pixels) * scale[:, None] + offset, "sum": pixels.sum(1)}
        return made if self.kind == "dict" else Answer(**made) if self.kind == "dataclass" else tuple(made.values())


@dataclasses.dataclass
class Answer:
    logits: Tensor
    sum: Tensor
    nothing: Tensor | None = None


def test_export_has_the_names_of_forward_and_the_weights_of_a_state_dict(tmp_path: Path) -> None:
    class Net(nn.Sequential):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    torch.manual_seed(1)
    trained, net = (Net(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)) for _ in range(2))
    trained(IMAGES)
    save_file(trained.state_dict(), tmp_path / "net.safetensors")
    net.load_state_dict(load_file(tmp_path / "net.safetensors"))
    version = mh.export(net, IMAGES[:1], tmp_path / "models", name="digits", extra={"classes": ["a", "b"]})
    assert version == tmp_path / "models" / "digits" / "1"
    assert net.training
    model = mh.load(version)
    assert {name: str(spec) for name, spec in model.signature.inputs.items()} == {"features": "float32[*, 4]"}
    assert model.meta["classes"] == ["a", "b"]
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), trained.eval()(IMAGES))


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
def test_several_inputs_and_outputs_are_served_by_their_names(kind: str, tmp_path: Path) -> None:
    net = Two(kind)
    example: Any = {"pixels": IMAGES, "scale": torch.ones(3), "offset": 2.0}
    mh.export(net, example, tmp_path, name="two")
    names = ("output_0", "output_1") if kind == "tuple" else ("logits", "sum")
    with (
        mh.serve(tmp_path, on="cpu", listen=mh.serving.Listen(http=0, grpc=0, manage=0, grace=0.05)) as server,
        triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client,
    ):
        asked = [triton_http.InferInput("scale", [2], "FP32"), triton_http.InferInput("pixels", [2, 4], "FP32")]
        asked[0].set_data_from_numpy(np.array([1.0, 3.0], np.float32))
        asked[1].set_data_from_numpy(IMAGES[:2].numpy())
        found = client.infer("two", asked)
        wanted = net(IMAGES[:2], torch.tensor([1.0, 3.0]), 2.0)
        wanted = wanted if kind == "tuple" else (wanted["logits"], wanted["sum"]) if kind == "dict" else (
            wanted.logits, wanted.sum)  # fmt: skip
        for name, value in zip(names, wanted, strict=True):
            np.testing.assert_allclose(found.as_numpy(name), value.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_selected_outputs_and_positional_inputs_are_exported(tmp_path: Path) -> None:
    net = Two("dict")
    model = mh.load(mh.export(net, (IMAGES, torch.ones(3)), tmp_path, outputs=["sum"]))
    assert (list(model.signature.inputs), list(model.signature.outputs)) == (["pixels", "scale"], ["sum"])
    torch.testing.assert_close(model({"pixels": IMAGES, "scale": torch.ones(3)}), IMAGES.sum(1))


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **options
    )
    return BertForSequenceClassification(config)


def test_hugging_face_classifier_is_exported_with_dynamic_length(tmp_path: Path) -> None:
    model = bert()
    tokens = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    version = mh.export(model, tokens, tmp_path, name="bert", dynamic={name: [1] for name in tokens})
    loaded = mh.load(version)
    assert str(loaded.signature.inputs["input_ids"]) == "int64[*, *]"
    longer = {"input_ids": torch.randint(0, 50, (3, 11)), "attention_mask": torch.ones(3, 11, dtype=torch.int64)}
    longer["attention_mask"][0, 5:] = 0
    with torch.no_grad():
        torch.testing.assert_close(loaded(longer), model.eval()(**longer).logits, rtol=1e-4, atol=1e-5)


def test_hugging_face_decoder_is_exported_without_its_cache(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    ids = torch.randint(0, 50, (2, 6))
    loaded = mh.load(mh.export(model, {"input_ids": ids}, tmp_path, dynamic={"input_ids": [1]}))
    assert list(loaded.signature.outputs) == ["logits"]
    longer = torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(loaded(longer), model.eval()(longer).logits, rtol=1e-4, atol=1e-5)


class Coupled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x[:, None])


class Text(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(kind="text", logits=x)


class Cumulative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class RelativeToFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x[:1]


class MeanOfCodes(nn.Module):
    def forward(self, codes: Tensor) -> Tensor:
        return codes.double() - codes.double().mean(0)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(3, 2, 2)


@pytest.mark.parametrize(
    ("net", "example", "message"),
    [
        (Coupled(), IMAGES, "independently of the others.*of which a row changes with the rows after it"),
        (Softmax(), IMAGES[:1], "independently of the others"),
        (Softmax(), torch.zeros(1, 4), "independently of the others"),
        (Cumulative(), IMAGES, "of which a row changes with the rows before it"),
        (RelativeToFirst(), IMAGES, "independently of the others"),
        (MeanOfCodes(), torch.tensor([5]), "independently of the others"),
        (Hidden(), IMAGES, r"one row for each row of the inputs, but got 'output_1_0': float32\[2, \*, 3\].*outputs="),
        (Text(), IMAGES, r"must return tensors, but got kind: str. Pass outputs=\['logits'\]"),
        (Fixed(), IMAGES, "must accept any batch size"),
        (lambda x: x, IMAGES, "needs an nn.Module"),
        (nn.Linear(4, 2), {"input": IMAGES, "more": torch.ones(2)}, "same number of rows"),
        (nn.Linear(4, 2), IMAGES[0, 0], "must be a tensor with at least one row"),
    ],
)
def test_networks_that_cannot_be_served_are_refused_before_a_file_is_written(
    net: Any, example: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ArchiveError, match=message):
        mh.export(net, example, tmp_path / "models", name="net")
    assert not (tmp_path / "models").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_network_of_torchscript_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="TorchScript"):
        mh.export(torch.jit.script(nn.Linear(4, 2)), IMAGES, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "../net"}, "letters, digits, dashes"),
        ({"outputs": ["scores"]}, "names of what the network returns, output, but got scores"),
        ({"dynamic": {"x": [1]}}, "dynamic must name inputs, which are input, but got x"),
    ],
)
def test_invalid_options_of_export_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=message):
        mh.export(nn.Linear(4, 2), IMAGES, tmp_path, **options)
