"""Execution of batches: eagerly, compiled, or as CUDA graphs; the fastest by measurement is used.

A GPU computes a small batch faster than Python can launch it, so batches are captured: a CUDA graph for each of some
sizes, and a batch uses the smallest that holds it. Padding rows are computed too, and discarded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture import CapturedGraphs, CaptureError, Phase, rehearsing, stop_compilers
from ..core import Predictor, SettingsError, Signature
from ..storage import Archive

Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors], dict[str, Tensor]]
"""Maps a batch on the host to outputs on the device."""
TRIES = 5
CLOSE = 0.05
"""Maximum relative difference between the outputs of two executions: kernels sum in different orders."""


class EagerExecution:
    """Compute batches of any size eagerly."""

    def __init__(self, predictor: Predictor, device: torch.device) -> None:
        self.predictor = predictor
        self._device = device

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in inputs.items()}
        with torch.inference_mode():
            return self.predictor.run(moved)


class CapturedBatch:
    """Compute batches of up to `size` rows by one CUDA graph."""

    def __init__(self, predictor: Predictor, statics: Tensors, size: int, pool: Any) -> None:
        self.size = size
        self._inputs = {name: tensor[:size] for name, tensor in statics.items()}
        self._outputs: dict[str, Tensor] = {}

        def run() -> None:
            with torch.inference_mode():
                self._outputs = predictor.run(dict(self._inputs))

        with torch.cuda.stream(torch.cuda.Stream()):
            run()
            with rehearsing():
                run()
            self._captured = CapturedGraphs([Phase(run)], pool)
        torch.cuda.synchronize()

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        rows = num_rows(inputs)
        for name, tensor in inputs.items():
            self._inputs[name][:rows].copy_(tensor, non_blocking=True)
        self._captured.replay()
        return {name: output[:rows] for name, output in self._outputs.items()}


class Fastest:
    """Compute a batch by the smallest CUDA graph that holds it, or eagerly."""

    def __init__(self, plain: EagerExecution, captured: Sequence[CapturedBatch] = ()) -> None:
        self._plain, self._captured = plain, sorted(captured, key=lambda variant: variant.size)

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        rows = num_rows(inputs)
        variant: Run = next((variant for variant in self._captured if rows <= variant.size), self._plain)
        return variant(inputs)


def fastest(predictor: Predictor, device: torch.device, max_rows: int, *, compiles: bool) -> Fastest:
    """Measure the executions available on a device, for models that use only tensors, and return the fastest."""
    plain = EagerExecution(predictor, device)
    if not isinstance(_inner(predictor), Archive) or _is_free(predictor.signature):
        return Fastest(plain)
    if compiles:
        plain = _compiled(plain, device, max_rows)
    return Fastest(plain, _capture_sizes(plain, device, max_rows) if device.type == "cuda" else ())


def recorded_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, such that padding costs at most a third of a large batch.

    >>> recorded_sizes(50)
    [1, 2, 4, 8, 16, 24, 32, 48, 50]
    """
    powers = [1 << number for number in range(max_rows.bit_length())]
    between = [power * 3 // 2 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *between) if size < max_rows} | {max_rows})


def num_rows(inputs: Tensors) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(inputs.values())))


def _compiled(plain: EagerExecution, device: torch.device, max_rows: int) -> EagerExecution:
    """Return the compiled model, if it is faster."""
    other = EagerExecution(_compile(plain.predictor), device)
    batches = [_batch(plain.predictor.signature, rows) for rows in (1, max_rows)]
    try:
        _require_alike(plain, other, batches)
        is_faster = all(_seconds(other, batch) < _seconds(plain, batch) for batch in batches)
    except Exception as error:
        _emit(f"not compiled: {_first_line(error)}")
        return plain
    finally:
        stop_compilers()
    return other if is_faster else plain


def _compile(predictor: Predictor) -> Predictor:
    if isinstance(predictor, Bfloat16):
        return Bfloat16(_compile(predictor.inner))
    assert isinstance(predictor, Archive)
    module: Any = torch.compile(predictor.module, dynamic=True)
    return Archive(module, predictor.signature, predictor.version, predictor.meta, predictor.device)


def _capture_sizes(plain: EagerExecution, device: torch.device, max_rows: int) -> list[CapturedBatch]:
    """Return CUDA graphs for some batch sizes: those whose outputs agree with the model's, and that are faster."""
    signature = plain.predictor.signature
    statics = {name: tensor.to(device) for name, tensor in _batch(signature, max_rows).items()}
    pool, made = torch.cuda.graph_pool_handle(), []
    # There are few sizes, so libraries may benchmark their kernels.
    torch.backends.cudnn.benchmark = True
    # The largest first: the others reuse its memory pool.
    for size in reversed(recorded_sizes(max_rows)):
        # One row less than the graph holds, if possible, to check that padding does not affect the result.
        batch = _batch(signature, max(1, size - 1))
        try:
            variant = CapturedBatch(plain.predictor, statics, size, pool)
            _require_alike(plain, variant, [batch])
        except (CaptureError, RuntimeError) as error:
            _emit(f"not captured: {_first_line(error)}")
            return []
        if _seconds(variant, batch) < _seconds(plain, batch):
            made.append(variant)
    return made


def _require_alike(one: Run, other: Run, batches: Sequence[Tensors]) -> None:
    for batch in batches:
        want = {name: tensor.clone() for name, tensor in one(batch).items()}
        for name, have in other(batch).items():
            have, wanted = have.double(), want[name].double()
            allowed = CLOSE * float(wanted.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
            if have.shape != wanted.shape or not torch.allclose(have, wanted, 0.0, allowed, equal_nan=True):
                raise RuntimeError(f"the output {name!r} would differ")


def _seconds(run: Run, batch: Tensors) -> float:
    """Return the shortest time of some tries."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        for answer in run(batch).values():
            answer.cpu()
        times.append(time.perf_counter() - began)
    return min(times)


def _batch(signature: Signature, rows: int) -> dict[str, Tensor]:
    """Return a batch that any network accepts: random floats, and zeros for integers, which may be indexes."""
    made = {}
    for name, spec in signature.inputs.items():
        dtype: torch.dtype = getattr(torch, spec.dtype)
        shape = [rows, *(size or 1 for size in spec.shape[1:])]
        made[name] = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    return made


def _inner(predictor: Predictor) -> Predictor:
    return predictor.inner if isinstance(predictor, Bfloat16) else predictor


def _is_free(signature: Signature) -> bool:
    return any(size is None for spec in signature.inputs.values() for size in spec.shape[1:])


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _emit(text: str) -> None:
    print(f"batches are {text}", file=sys.stderr)


PRECISIONS = ("fp32", "bf16")


def in_precision(predictor: Predictor, precision: str) -> Predictor:
    """Return the predictor itself, or one that uses bfloat16 where autocast considers it safe."""
    return Bfloat16(predictor) if precision == "bf16" else predictor


def require_precision(precision: str) -> None:
    """Raise SettingsError for an unknown precision."""
    if precision not in PRECISIONS:
        raise SettingsError(
            f"precision must be {' or '.join(PRECISIONS)}", got=repr(precision), remedy='pass precision="bf16"'
        )


class Bfloat16(Predictor):
    """Predictor with matrix products and convolutions in bfloat16, by torch's autocast rules."""

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner
        self.signature = inner.signature

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(inputs.values())).device.type
        with torch.autocast(device, torch.bfloat16):
            answers = self.inner.run(inputs)
        outputs = self.signature.outputs
        return {name: answer.to(getattr(torch, outputs[name].dtype)) for name, answer in answers.items()}
