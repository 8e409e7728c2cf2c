"""Exported models: numbered versions, written atomically, and a loader that executes no code from them.

The folder of a version has only the files `weights.safetensors`, `program.json`, `signature.json` and `manifest.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import (
    ArchiveError,
    CheckpointError,
    Predictor,
    Signature,
    TensorSpec,
    counted,
    evaluating,
    read_file,
    require_format,
)
from .archive_folders import (
    FILES,
    FORMAT,
    JSON_CAP,
    MANIFEST,
    PROGRAM,
    SIGNATURE,
    VERSION,
    WEIGHTS,
    publish,
    require_plain_folder,
    to_json,
    unsafe,
    version_folder,
)
from .disk import digest_of
from .program import environment_kept, trace, user_line
from .program_builder import build
from .row_independence import require_independent_rows
from .tensors import read_tensors, require_storable

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
DEPTH_CAP = 40
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
Predict = Callable[..., Any]


class OutputMismatch(ArchiveError):
    """Raised when a model's outputs do not match its signature."""


class Archive(Predictor):
    """An exported model that was loaded on a device, ready for inference."""

    def __init__(
        self,
        module: nn.Module,
        signature: Signature,
        version: int,
        meta: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.signature, self.version, self.meta, self.device = signature, version, meta, device
        self.module = module
        """The network as a torch.fx module that takes the inputs in order; it can be compiled."""

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute outputs by name from validated inputs by name, on the device of the model."""
        with torch.inference_mode():
            answers = self.module(*(inputs[name].to(self.device) for name in self.signature.inputs))
        named = dict(zip(self.signature.outputs, answers, strict=True))
        # In mixed precision the caller converts the outputs back.
        require_outputs(self.signature, named, any_dtype=torch.is_autocast_enabled(self.device.type))
        return named


def require_outputs(
    signature: Signature, answers: Mapping[str, Any], rows: int | None = None, *, any_dtype: bool = False
) -> None:
    """Raise OutputMismatch unless a model's outputs have the names, dtypes and shapes that its signature declares.

    Args:
        signature: The signature of the model.
        answers: The model's outputs by name.
        rows: Number of rows that each output must have; None for any number.
        any_dtype: Whether dtypes may differ.
    """
    for name, spec in signature.outputs.items():
        answer = answers.get(name)
        if not isinstance(answer, Tensor):
            raise OutputMismatch(
                f"output {name!r} must be a tensor, {spec}",
                got=type(answer).__name__ if name in answers else "no output with this name",
                remedy="export the model again",
            )
        given_spec = TensorSpec(str(answer.dtype).removeprefix("torch."), tuple(answer.shape))
        wanted = TensorSpec(given_spec.dtype, spec.shape) if any_dtype else spec
        if not wanted.accepts(answer) or (rows is not None and answer.shape[:1] != (rows,)):
            many = "" if rows is None else f" with {counted(rows, 'row')}"
            raise OutputMismatch(
                f"output {name!r} must be {spec}{many}", got=str(given_spec), remedy="export the model again"
            )


def export(
    model: nn.Module,
    predict: Predict,
    inputs: dict[str, Tensor],
    path: Path,
    *,
    free: Mapping[str, Collection[int]] | None = None,
    extra: dict[str, Any] | None = None,
    by_rows: bool = False,
) -> Path:
    """Write `predict(model, *inputs)` as the next version under `path` and return the version's folder.

    Args:
        model: The network.
        predict: Function of the model and its inputs; returns a tensor or a dict of tensors by name.
        inputs: Examples of the inputs by name. Their dimension 0 is the batch, whose size stays dynamic.
        path: Folder of the model, in which versions are numbered.
        free: Further dynamic dimensions, by name of the input.
        extra: JSON data to store with the version.
        by_rows: Whether every output must have a row for each input row that depends on that row alone.

    Raises:
        ArchiveError: The network cannot be traced, its program gives other results, an output is not by rows, or the
            folder cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     made = export(nn.Flatten(), lambda model, x: model(x) * 2, {"x": torch.ones(3, 1, 2)}, Path(root))
    ...     made.name, load(Path(root))(torch.ones(1, 1, 2))
    ('1', tensor([[2., 2.]]))
    """
    device = next((tensor.device for tensor in model.state_dict().values() if isinstance(tensor, Tensor)), None)
    examples = _examples(inputs, device or torch.device("cpu"))
    with evaluating(model), environment_kept():
        network = _ExportedNetwork(model, predict, tuple(examples.values()))
        dims = {name: set(free.get(name, ())) if free else set() for name in examples}
        traced = trace(network, tuple(examples.values()), list(dims.values()))
        weights = _dense(traced.weights)
        signature = _signature(examples, dims, network.names, traced.shapes)
        program = to_json(traced.program)
        _require_same_answers(network, program, weights, examples, dims)
        if by_rows:
            require_independent_rows(network, network.names, examples, signature)
    described = {"format": FORMAT, "signature": signature.to_dict(), "extra": extra or {}}
    return publish(Path(path), weights, {PROGRAM: program, SIGNATURE: to_json(described)})


def load(path: Path, device: str = "cpu") -> Archive:
    """Load the exported model in the folder of a version, or the newest version in a model folder.

    The archive is data: nothing of it is unpickled, evaluated or imported, and its program may use only operators of a
    closed list, so loading and calling a model does not execute code of its author. This is one layer: torch's
    kernels are C++ code that computes with the author's arguments in this process, and a fault in one of them gives
    the author what this process may read and do. Serve models that you do not trust with `manyhands serve`, whose
    replicas are sandboxed processes.

    Args:
        path: The folder.
        device: The device on which the model computes.

    Raises:
        ArchiveError: The folder is damaged, or contains anything but regular files and a program of allowed operators.
    """
    folder, place = version_folder(Path(path)), torch.device(device)
    require_plain_folder(folder)
    files = _checked(folder)
    described, program = _parsed(SIGNATURE, files[SIGNATURE]), _parsed(PROGRAM, files[PROGRAM])
    signature = _read_signature(described)
    weights = {name: tensor.to(place) for name, tensor in _read_weights(folder / WEIGHTS).items()}
    module = build(program, weights, place)
    _require_fitting(signature, program["graphs"][0])
    meta = {"torch": str(program["torch"]), **described["extra"]}
    return Archive(module, signature, int(folder.name) if VERSION.fullmatch(folder.name) else 0, meta, place)


class _ExportedNetwork(nn.Module):
    """A model with its predict function, as one network that takes tensors and returns a tuple of tensors."""

    def __init__(self, model: nn.Module, predict: Predict, examples: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.model, self.predict = model, predict
        try:
            with torch.no_grad():
                answer = predict(model, *examples)
        except Exception as error:
            raise ArchiveError(
                "predict(model, *inputs) must work on the examples",
                got=f"{type(error).__name__} at {user_line(error)} ({str(error)[:200]})",
                remedy="pass examples that the model accepts",
            ) from error
        self.names = _output_names(answer)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        answer = self.predict(self.model, *tensors)
        return (answer,) if isinstance(answer, Tensor) else tuple(answer[name] for name in self.names)


def _output_names(answer: object) -> list[str]:
    if isinstance(answer, Tensor):
        return ["output"]
    if not isinstance(answer, Mapping) or not answer or not all(isinstance(v, Tensor) for v in answer.values()):
        raise ArchiveError(
            "predict must return a tensor or a dict of tensors",
            got=type(answer).__name__,
            remedy='return {"name": tensor, ...}',
        )
    for name in answer:
        _require_name(name)
    return list(answer)


def _examples(inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return examples on the model's device with at least two rows, since torch.export treats 1 as a fixed size."""
    sizes = {}
    for name, tensor in inputs.items():
        _require_name(name)
        if not isinstance(tensor, Tensor) or tensor.dim() < 1 or tensor.shape[0] < 1:
            is_tensor = isinstance(tensor, Tensor)
            raise ArchiveError(
                f"the example {name!r} must be a tensor with at least one row",
                got=f"a tensor of shape {tuple(tensor.shape)}" if is_tensor else type(tensor).__name__,
                remedy="pass a batch of at least one row",
            )
        sizes[name] = tensor.shape[0]
    if len(set(sizes.values())) != 1:
        raise ArchiveError(
            "the examples must have the same number of rows", got=sizes, remedy="pass examples of one batch"
        )
    return {name: _two_rows(tensor.detach().to(device)) for name, tensor in inputs.items()}


def _two_rows(tensor: Tensor) -> Tensor:
    return tensor if len(tensor) > 1 else torch.cat([tensor, tensor])


def _dense(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with _as_archive_errors():
        return {
            name: require_storable(name, tensor).detach().cpu().contiguous().clone() for name, tensor in weights.items()
        }


def _signature(
    examples: Mapping[str, Tensor],
    free: Mapping[str, set[int]],
    names: list[str],
    shapes: list[tuple[str, tuple[int | None, ...]]],
) -> Signature:
    inputs = {
        name: TensorSpec(
            str(tensor.dtype).removeprefix("torch."),
            tuple(None if dim == 0 or dim in free[name] else size for dim, size in enumerate(tensor.shape)),
        )
        for name, tensor in examples.items()
    }
    outputs = {name: TensorSpec(*shape) for name, shape in zip(names, shapes, strict=True)}
    return Signature(inputs, outputs)


def _require_same_answers(
    network: _ExportedNetwork,
    program: bytes,
    weights: Mapping[str, Tensor],
    examples: Mapping[str, Tensor],
    free: Mapping[str, set[int]],
) -> None:
    """Raise ArchiveError unless the stored program returns the model's outputs, for several batch sizes."""
    device = next(iter(examples.values())).device
    before = {name: tensor.to(device, copy=True) for name, tensor in weights.items()}
    module = build(_parsed(PROGRAM, program), before, device)
    longer = tuple(_longer(tensor, free[name]) for name, tensor in examples.items())
    batches = [tuple(_with_rows(tensor, rows) for tensor in examples.values()) for rows in (None, 1, -1)]
    for batch in [*batches, longer]:
        with torch.no_grad():
            wanted, found = network(*batch), module(*(tensor.clone() for tensor in batch))
        for name, want, have in zip(network.names, wanted, found, strict=True):
            _require_close(name, len(batch[0]), want, have)
    for name, tensor in before.items():
        if not torch.equal(tensor.cpu().view(-1).view(torch.uint8), weights[name].view(-1).view(torch.uint8)):
            raise ArchiveError(
                "predict must not change the model",
                got=f"a change of {name!r}",
                remedy="assign to copies of its tensors",
            )


def _longer(tensor: Tensor, dims: set[int]) -> Tensor:
    """Return the example with its last entry repeated along each dimension in `dims`, the dynamic ones."""
    for dim in dims:
        tensor = torch.cat([tensor, tensor.narrow(dim, tensor.shape[dim] - 1, 1)], dim)
    return tensor


def _with_rows(tensor: Tensor, rows: int | None) -> Tensor:
    """Return the example itself for `rows` None, its first row for 1, or the example with one more row for -1."""
    if rows is None:
        return tensor
    return tensor[:1] if rows == 1 else torch.cat([tensor, tensor[:1]])


def _require_close(name: str, rows: int, want: Tensor, have: Tensor) -> None:
    if want.shape == have.shape and want.dtype == have.dtype:
        bound = TOLERANCE.get(want.dtype, 0.0)
        if torch.allclose(have.cpu(), want.cpu(), rtol=bound, atol=bound, equal_nan=True):
            return
        got = f"other values of {name!r} for a batch of {rows} rows"
    else:
        got = f"shape {tuple(have.shape)} instead of {tuple(want.shape)} of {name!r} for a batch of {rows} rows"
    raise ArchiveError(
        "the exported program must return the same outputs as the model",
        got=got,
        remedy="remove randomness from predict, and take sizes from the shapes of the inputs",
    )


def _checked(folder: Path) -> dict[str, bytes]:
    """Return the contents of the program and signature files, after verifying the digest of every file."""
    manifest = _parsed(MANIFEST, read_file(folder / MANIFEST, JSON_CAP))
    files = manifest.get("files")
    require_format(str(folder), manifest.get("format"), FORMAT, ArchiveError)
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or set(files) != set(FILES):
        raise unsafe("a manifest that lists other files")
    texts = {name: read_file(folder / name, JSON_CAP) for name in (PROGRAM, SIGNATURE)}
    for name, recorded in files.items():
        if digest_of(folder / name).to_dict() != recorded:
            raise ArchiveError(
                "every file must have the digest in the manifest",
                got=f"another digest of {name}",
                remedy="copy the model again",
            )
    return texts


def _parsed(name: str, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} must be JSON", got=str(error)[:200], remedy="copy the model again") from error
    if not isinstance(value, dict):
        raise ArchiveError(
            f"{name} must contain a JSON object", got=type(value).__name__, remedy="copy the model again"
        )
    _require_shallow(name, value)
    return value


def _require_shallow(name: str, value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEPTH_CAP:
            raise unsafe(f"{name} nested more than {DEPTH_CAP} deep")
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]


def _read_signature(described: Mapping[str, Any]) -> Signature:
    try:
        if set(described) != {"format", "signature", "extra"} or described["format"] != FORMAT:
            raise ValueError("other fields, or another format")
        if not isinstance(described["extra"], dict):
            raise ValueError("a value of extra that is not an object")
        signature = Signature.from_dict(described["signature"])
        for name, spec in (*signature.inputs.items(), *signature.outputs.items()):
            _require_name(name)
            _require_spec(spec)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArchiveError(
            f"{SIGNATURE} must describe inputs and outputs", got=str(error)[:200], remedy="export the model again"
        ) from error
    return signature


def _require_fitting(signature: Signature, graph: Mapping[str, Any]) -> None:
    takes = sum("input" in place for place in graph["inputs"])
    gives = len(graph["outputs"]) if isinstance(graph["outputs"], list) else 0
    if (takes, gives) != (len(signature.inputs), len(signature.outputs)):
        raise ArchiveError(
            f"{SIGNATURE} must match the program",
            got=f"{len(signature.inputs)} inputs and {len(signature.outputs)} outputs for {takes} and {gives}",
            remedy="export the model again",
        )


def _require_spec(spec: TensorSpec) -> None:
    if not isinstance(getattr(torch, str(spec.dtype), None), torch.dtype):
        raise ValueError(f"the unknown dtype {spec.dtype!r}")
    if not all(size is None or (type(size) is int and size >= 0) for size in spec.shape):
        raise ValueError(f"the invalid shape {spec.shape!r}")


def _read_weights(path: Path) -> dict[str, Tensor]:
    with _as_archive_errors():
        # Copied, because overwriting a memory-mapped file would crash the process.
        return {name: tensor.clone() for name, tensor in read_tensors(path).items()}


@contextmanager
def _as_archive_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ArchiveError(error.rule, got=error.got, remedy=error.remedy) from error


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ArchiveError(
            "names must consist of letters, digits, dots, dashes and underscores, at most 64 characters",
            got=repr(name)[:100],
            remedy="rename it",
        )
