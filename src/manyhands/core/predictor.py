"""Predictor: every trained thing, as a call on inputs with a signature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype and shape; None where the size is free, as the batch dimension is."""

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('*' if n is None else str(n) for n in self.shape)}]"

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor has this dtype and shape."""
        return (
            str(tensor.dtype).removeprefix("torch.") == self.dtype
            and tensor.dim() == len(self.shape)
            and all(want is None or want == have for want, have in zip(self.shape, tensor.shape, strict=True))
        )


@dataclass(frozen=True)
class Signature:
    """Names and specs of what goes in and what comes out."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            side: {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in specs.items()}
            for side, specs in (("inputs", self.inputs), ("outputs", self.outputs))
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Signature:
        """The inverse of `to_dict`."""
        return cls(
            *(
                {name: TensorSpec(spec["dtype"], tuple(spec["shape"])) for name, spec in values[side].items()}
                for side in ("inputs", "outputs")
            )
        )


class Predictor(ABC):
    """A call on inputs: one array (where there is one input) or a dict of them, the batch dimension first.

    A model, an ensemble and a remote one all are Predictors; serving knows nothing more.
    """

    signature: Signature

    @abstractmethod
    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Answers checked inputs with named outputs."""

    def __call__(self, inputs: Any) -> Any:
        """Checks the inputs against the signature; one output comes back bare, several as a dict."""
        outputs = self.run(self.checked(inputs))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def checked(self, inputs: Any) -> dict[str, Tensor]:
        """The inputs as named tensors, or an error that says what was expected and what came."""
        import torch

        wanted = self.signature.inputs
        named = inputs if isinstance(inputs, Mapping) else {next(iter(wanted)): inputs}
        if set(named) != set(wanted):
            raise DataError(f"the inputs are {', '.join(wanted)}", got=", ".join(map(str, named)), remedy="pass these")
        tensors = {}
        for name, spec in wanted.items():
            tensor = torch.as_tensor(named[name])
            dtype = getattr(torch, spec.dtype)
            if tensor.dtype != dtype and torch.can_cast(tensor.dtype, dtype):
                tensor = tensor.to(dtype)
            if not spec.accepts(tensor):
                came = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                raise DataError(
                    f"input {name!r} must be {spec}", got=str(came), remedy="pass such an array, rows first"
                )
            tensors[name] = tensor
        return tensors
