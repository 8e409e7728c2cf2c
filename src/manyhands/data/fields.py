"""Fields: a batch of dictionaries, and the length of each sample before padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Fields(dict[str, Any]):
    """A batch of samples that are dictionaries: one tensor for every field, so that `model(**batch)` works.

    If samples differ in length, a field is padded with zeros at the end. The length of each sample is available, also
    if nothing was padded:

    >>> batch = Fields({"tokens": torch.tensor([[5, 6, 7], [8, 0, 0]])}, padded={"tokens": torch.tensor([3, 1])})
    >>> batch.lengths("tokens")
    tensor([3, 1])
    >>> batch.mask("tokens")
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """

    def __init__(self, fields: dict[str, Any], padded: dict[str, Tensor] | None = None) -> None:
        super().__init__(fields)
        self.padded = padded or {}
        """The lengths in the fields that were padded."""

    def lengths(self, field: str) -> Tensor:
        """Return the length of every sample in a field, on the batch's device."""
        values: Tensor = self[field]
        found = self.padded.get(field)
        return values.new_full((len(values),), values.shape[1], dtype=torch.int64) if found is None else found

    def mask(self, field: str) -> Tensor:
        """Return True where a field holds a sample's values and False for padding: (samples, longest)."""
        places = torch.arange(self[field].shape[1], device=self[field].device)
        return places < self.lengths(field).unsqueeze(1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fields, (dict(self), self.padded)
