"""Predictors in Python: objects and functions of the user's program, and files `predictor.py` in a folder of models.

They run in the replica's process without a sandbox, with the rights of the server.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..core import ArchiveError, Predictor, SettingsError, Signature, TensorSpec
from ..storage import OutputMismatch
from .dtypes import BY_TORCH, KINDS, TEXTS, Array, Kind, fits
from .folder import PYTHON_FILE
from .texts import checked

Target = TypeVar("Target")
Specs = Mapping[str, str | TensorSpec]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = [kind.torch for kind in (*KINDS, *TEXTS) if not kind.is_bfloat16]
"""Types of the inputs and outputs of a predictor; numpy has no bfloat16."""


def signature(*, inputs: Specs, outputs: Specs) -> Callable[[Target], Target]:
    """Declare the inputs and outputs of a Python predictor, by decorating its class or function.

    A type is written as "float32[*, 3]": the rows come first, `*` is a size that varies. Beside numbers and bool there
    are "string[*]", whose elements are str, and "bytes[*]" for images and other binary data. A class may also have the
    attributes `inputs` and `outputs`.

    Args:
        inputs: Types by name. The predictor gets a dict of numpy arrays, with the rows of several requests.
        outputs: Types by name. The predictor returns a dict of arrays, tensors or lists with as many rows, or only the
            array if it has one output.

    Example:
        @mh.serving.signature(inputs={"text": "string[*]"}, outputs={"length": "int64[*]"})
        def lengths(inputs):
            return [len(text) for text in inputs["text"]]

        mh.serve({"lengths": lengths})
    """

    def declare(target: Target) -> Target:
        made: Any = target
        made.inputs, made.outputs = dict(inputs), dict(outputs)
        return target

    return declare


class InvalidInput(ValueError):
    """Raised by a Python predictor for a request that it cannot answer; the client gets 400 with this text.

    Other exceptions are errors of the predictor: the client gets 500 with an ID, and the log has the text.
    """


def is_python_predictor(target: object) -> bool:
    """Return whether an object declares inputs and outputs, and can be called or has `predict`."""
    declared = all(isinstance(getattr(target, side, None), Mapping) for side in ("inputs", "outputs"))
    return declared and (callable(target) or callable(getattr(target, "predict", None)))


def signature_of(target: object) -> Signature:
    """Return the inputs and outputs that a Python predictor declares; raises SettingsError if they are invalid."""
    return Signature(_specs(target, "inputs"), _specs(target, "outputs"))


def _specs(target: object, side: str) -> dict[str, TensorSpec]:
    declared = getattr(target, side, None)
    if not isinstance(declared, Mapping) or not declared:
        raise SettingsError(
            f"a Python predictor must declare its {side}",
            got=f"{_name_of(target)} without them",
            remedy=f'decorate it with @mh.serving.signature(inputs={{"text": "string[*]"}}, outputs={{...}}), or write '
            f"{side} = {{...}} in the class",
        )
    return {name: _spec(side, name, text) for name, text in declared.items()}


def _spec(side: str, name: Any, text: Any) -> TensorSpec:
    rule = f"{side} of a Python predictor must be types by name, with rows first"
    remedy = 'write for example {"image": "bytes[*]", "scores": "float32[*, 10]"}'
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(rule, got=f"the name {name!r}", remedy="use letters, digits, dots, dashes and underscores")
    try:
        spec = text if isinstance(text, TensorSpec) else TensorSpec.parse(text)
    except (ValueError, AttributeError):
        raise SettingsError(rule, got=f"{text!r} for {name!r}", remedy=remedy) from None
    if spec.dtype not in _TYPES or not spec.shape or spec.shape[0] is not None:
        raise SettingsError(rule, got=f"{spec} for {name!r}", remedy=f"{remedy}; types are {', '.join(_TYPES)}")
    return spec


def _name_of(target: object) -> str:
    return getattr(target, "__name__", type(target).__name__)


class PythonModel:
    """A predictor in Python, in its own process: created, loaded, and called with batches of arrays.

    Args:
        target: An object with `predict`, a class of such objects, or a function. `load`, if there is one, is called
            first, with the device if it takes an argument.
        device: Name of the replica's device, such as "cuda:0".
    """

    def __init__(self, target: Any, device: str) -> None:
        made = target() if isinstance(target, type) else target
        load = getattr(made, "load", None)
        if callable(load):
            load(device) if inspect.signature(load).parameters else load()
        self._predict: Callable[[dict[str, Array]], Any] = getattr(made, "predict", made)
        if not callable(self._predict):
            raise SettingsError(
                "a Python predictor must be a function or have a method predict(inputs)", got=_name_of(made)
            )
        self.signature = signature_of(made)

    def compute(self, inputs: dict[str, Array], rows: int) -> dict[str, Array]:
        """Return the outputs for `rows` rows; raises OutputMismatch if they differ from the declaration."""
        found = self._predict(inputs)
        specs = self.signature.outputs
        named = found if isinstance(found, Mapping) else {next(iter(specs)): found}
        if set(named) != set(specs):
            raise OutputMismatch(
                f"predict must return the outputs {', '.join(specs)}", got=", ".join(map(str, named)) or "nothing"
            )
        return {name: _as_output(name, named[name], spec, rows) for name, spec in specs.items()}

    def described(self, error: Exception) -> str:
        """Return an error as text, with the last line of its traceback that is not a library's."""
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        code = inspect.unwrap(self._predict).__code__ if inspect.isroutine(self._predict) else None
        frames = [f for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
        return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _as_output(name: str, value: Any, spec: TensorSpec, rows: int) -> Array:
    """Return one output as an array of the declared type; strings as objects of bytes."""
    kind = BY_TORCH[spec.dtype]
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = _texts(value, kind) if kind.is_text else _numbers(value, kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise OutputMismatch(f"output {name!r} must be {spec}", got=f"other elements ({error})") from None
    if not fits(array.shape, spec) or len(array) != rows:
        got = TensorSpec(spec.dtype, array.shape)
        raise OutputMismatch(f"output {name!r} must be {spec} with {rows} rows", got=str(got))
    return array


def _numbers(value: Any, kind: Kind) -> Array:
    """Return numbers in the declared type: floats of any width, but no integers from floats or out of range."""
    array = np.asarray(value)
    wanted = kind.numpy.kind
    if array.dtype.kind not in {"f": "fiub", "b": "b"}.get(wanted, "iub"):
        raise TypeError(f"an array of {array.dtype}")
    if wanted in "iu" and array.size:
        bounds = np.iinfo(kind.numpy)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise OverflowError(f"integers beyond {kind.torch}")
    with np.errstate(over="ignore"):
        return array.astype(kind.numpy, copy=False)


def _texts(value: Any, kind: Kind) -> Array:
    """Return nested lists or an array of str or bytes as an array of bytes."""
    array = value if isinstance(value, np.ndarray) else _nested(value)
    if array.dtype.kind not in "OU":
        raise TypeError(f"an array of {array.dtype}")
    items = [_text(item, kind) for item in array.flat]
    return np.fromiter(items, object, len(items)).reshape(array.shape)


def _nested(value: Any) -> Array:
    """Return nested lists as an array of objects; numpy itself would make bytes of a fixed width, without zeros."""
    shape: list[int] = []
    level = [value]
    while level and all(isinstance(one, list | tuple) for one in level):
        sizes = {len(one) for one in level}
        if len(sizes) > 1:
            raise ValueError("lists must not be ragged")
        shape.append(sizes.pop())
        level = [item for one in level for item in one]
    return np.fromiter(level, object, len(level)).reshape(shape)


def _text(item: Any, kind: Kind) -> bytes:
    if isinstance(item, str):
        return str(item).encode()
    if isinstance(item, bytes | bytearray | memoryview):
        return checked(bytes(item), kind)
    raise TypeError(f"{type(item).__name__} instead of a string")


def open_folder(folder: Path, device: str) -> Predictor | PythonModel:
    """Execute the `predictor.py` of a version's folder, and return its `predictor` or `Predictor`.

    The folder is added to `sys.path`, so that the file can import its neighbours.
    """
    path = folder.absolute() / PYTHON_FILE
    # Python must not write __pycache__ to the folder of models.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("predictor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["predictor"] = module
    spec.loader.exec_module(module)
    found = [getattr(module, name, None) for name in ("predictor", "Predictor")]
    # The abstract class itself may have been imported.
    target = next((one for one in found if one is not None and one is not Predictor), None)
    if isinstance(target, type) and issubclass(target, Predictor):
        target = target()
    if isinstance(target, Predictor):
        return target
    if target is None:
        raise ArchiveError(
            f"{PYTHON_FILE} must define the class Predictor, or an object or function predictor",
            got="neither",
            remedy="define one of them",
        )
    return PythonModel(target, device)
