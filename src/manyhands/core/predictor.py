"""Predictor: the interface of trained models, which are called on inputs that match a signature."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .html_tables import html_table

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype and shape; None for dynamic sizes, such as the batch dimension."""

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('*' if n is None else str(n) for n in self.shape)}]"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Return the spec whose text is given; raises ValueError for another text.

        >>> TensorSpec.parse("float32[*, 3]")
        TensorSpec(dtype='float32', shape=(None, 3))
        """
        match = re.fullmatch(r"(\w+)\[([*\d, ]*)\]", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a type with sizes, such as float32[*, 3]")
        sizes = [size.strip() for size in match[2].split(",")] if match[2].strip() else []
        return cls(match[1], tuple(None if size == "*" else int(size) for size in sizes))

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the dtype and the shape of this spec."""
        return (
            str(tensor.dtype).removeprefix("torch.") == self.dtype
            and tensor.dim() == len(self.shape)
            and all(want is None or want == have for want, have in zip(self.shape, tensor.shape, strict=True))
        )


@dataclass(frozen=True)
class Signature:
    """Names, dtypes and shapes of the inputs and outputs of a model."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def to_dict(self) -> dict[str, Any]:
        """Return the signature as JSON-ready data."""
        return {
            side: {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in specs.items()}
            for side, specs in (("inputs", self.inputs), ("outputs", self.outputs))
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Signature:
        """Create a signature from the result of `to_dict`."""
        return cls(
            *(
                {name: TensorSpec(spec["dtype"], tuple(spec["shape"])) for name, spec in values[side].items()}
                for side in ("inputs", "outputs")
            )
        )


class Predictor(ABC):
    """A trained model. It is called with an array, or a dict of arrays by name if it has several inputs, rows first.

    Models, ensembles and remote models are Predictors; serving uses only this interface.
    """

    signature: Signature

    @abstractmethod
    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name for validated inputs by name."""

    def __call__(self, inputs: Any) -> Any:
        """Validate the inputs and compute the outputs: one as a tensor, several as a dict by name."""
        outputs = self.run(self.checked(inputs))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def checked(self, inputs: Any) -> dict[str, Tensor]:
        """Return the inputs as tensors by name, with the signature's dtypes; raise DataError if they do not match."""
        import torch

        wanted = self.signature.inputs
        named = inputs if isinstance(inputs, Mapping) else {next(iter(wanted)): inputs}
        if set(named) != set(wanted):
            raise DataError(
                f"the inputs must be {', '.join(wanted)}",
                got=", ".join(map(str, named)),
                remedy="pass exactly these inputs",
            )
        tensors = {}
        for name, spec in wanted.items():
            tensor = torch.as_tensor(named[name])
            dtype = getattr(torch, spec.dtype)
            if tensor.dtype != dtype and torch.can_cast(tensor.dtype, dtype):
                tensor = tensor.to(dtype)
            if not spec.accepts(tensor):
                came = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                raise DataError(
                    f"input {name!r} must be {spec}",
                    got=str(came),
                    remedy="pass an array of this type and shape, with the rows first",
                )
            tensors[name] = tensor
        return tensors

    def _repr_html_(self) -> str:
        sides = (("input", self.signature.inputs), ("output", self.signature.outputs))
        rows = [(side, name, spec) for side, specs in sides for name, spec in specs.items()]
        return html_table(type(self).__name__, rows, ("", "name", "type and shape"))
