"""Call every allowed operator with hostile arguments; report crashes, access beyond the inputs and leaks of memory.

Inputs lie at the end, or at the beginning, of memory between two protected pages, so that a kernel which reads or
writes beyond them ends its process by a signal. Each call is made twice, with allocators that fill new memory
with different bytes: a result that differs depends on memory that the kernel did not write, and would show a client
what other requests left there. Each operator runs in forked children with limits of memory and time.

    python -m benchmarks.attacks.fuzz_operators --rounds 200
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from manyhands.storage import operators
from manyhands.storage.operator_list import ALLOWED

PAGE = mmap.PAGESIZE
NEVER_CALLED = 3
"""Exit code of a child whose operator refused all arguments."""
LEAKED = 4
"""Exit code of a child whose operator returned memory that it did not write."""
SIZES = (0, 1, 2, 3, 5, 8)
NUMBERS = (
    *(0, 1, 2, 3, -1, -2, 7, 100, 2**31 - 1, 2**31, 2**33, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63)),
    *(-3, -8, -100, 2**15, 2**16, 46341, 2**30, 2**32, 2**32 + 1, -(2**32), 3037000500, 2**60, 2**61, 2**61 + 1),
    0x5555555555555556,
)
WRAPPING = (
    *([2**16, 2**16], [46341, 46341], [2**31, 2], [2**15, 2**16, 1], [2**30, 4], [2**31 - 1, 2**31 - 1]),
    *([2**32, 2**32], [2**32 + 1, 2**32 - 1], [3037000500, 3037000500], [2**62, 4], [2**61, 8], [2**61 + 1, 8]),
    *([0x5555555555555556, 3], [2**21, 2**21, 2**22], [2**33, 2**31, 1, 1], [2**63 - 1, 2], [0, 2**63 - 1, 2**63 - 1]),
    *([-2, -3], [-(2**32), 2**32], [-(2**32), -(2**32)], [-1, -1], [-(2**63), 1], [-(2**63), -1], [2, -3, -4]),
)
"""Sizes whose product does not fit 32 or 64 bits, or is positive although some of them are negative."""
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e30, -1e30, float("inf"), float("-inf"), float("nan")),
    *(1e-3, 1e-7, 1e-30, -1e-30, 1.2e-38, 1e-45, -1e-45, 2.3e-308, 5e-324, -5e-324, 3.4e38, 1e300, 1.7e308, -1.7e308),
    *(2.0**31, -(2.0**31) - 1, 2.0**32, 2.0**53, 2.0**63, -(2.0**63), 2.0**64, 65504.0, 65520.0, 0.999999999999),
)
POISONS = (0x55, 0x2A)
"""Bytes for new memory; as elements of any dtype they are far apart, and finite."""
M_PERTURB = -6
DTYPES = (
    (torch.float32,) * 6
    + (torch.int64,) * 4
    + (
        torch.float64,
        torch.int32,
        torch.bool,
        torch.uint8,
        torch.complex64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int16,
    )
)
TEXTS = (
    "mean",
    "sum",
    "none",
    "ij",
    "bilinear",
    "reflect",
    "constant",
    "circular",
    "replicate",
    "same",
    "valid",
    "left",
    "right",
    "tanh",
    "trunc",
    "floor",
    "amax",
    "prod",
    "linear",
    "nearest",
    "fro",
    "nuc",
    "ortho",
    "i,j->ij",
    "ij,jk->ik",
    "i->",
    "U",
    "L",
    "add",
    "x" * 50,
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Crash:
    """An operator that ended its process, or whose result had memory in it that it did not write.

    The second is named UNINITIALIZED in place of a signal.
    """

    name: str
    signal: str
    arguments: str


def guarded(count: int, dtype: torch.dtype, *, at_end: bool) -> Tensor:
    """Return a tensor of so many elements beside a page that ends the process when it is touched."""
    width = torch.empty((), dtype=dtype).element_size()
    size = count * width
    pages = max(1, -(-size // PAGE))
    length = (pages + 2) * PAGE
    base = _libc.mmap(None, ctypes.c_size_t(length), 3, 0x22, -1, ctypes.c_long(0))
    _libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(PAGE), 0)
    _libc.mprotect(ctypes.c_void_p(base + length - PAGE), ctypes.c_size_t(PAGE), 0)
    start = base + PAGE + (pages * PAGE - size if at_end else 0)
    if size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=dtype)


class Generator:
    """Makes arguments for a schema: sometimes sensible ones, sometimes hostile ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.shape = [self.random.choice(SIZES[1:]) for _ in range(self.random.randint(0, 5))]
        self.hostile = self.random.random()

    def arguments(self, schema: Any) -> dict[str, Any]:
        return {
            one.name: self.value(str(one.real_type), one.name)
            for one in schema.arguments
            if not one.has_default_value() or self.random.random() < 0.5
        }

    def value(self, kind: str, name: str) -> Any:
        if kind.startswith("Optional["):
            return None if self.random.random() < 0.4 else self.value(kind[9:-1], name)
        if kind.startswith("List["):
            return self.many(kind[5:-1], name)
        makers: dict[str, Callable[[], Any]] = {
            "Tensor": lambda: self.tensor(name),
            "int": self.integer,
            "SymInt": self.integer,
            "float": lambda: self.random.choice(FLOATS),
            "bool": lambda: self.random.random() < 0.5,
            "number": lambda: self.random.choice((self.integer(), self.random.choice(FLOATS))),
            "str": lambda: self.random.choice(TEXTS),
            "Device": lambda: torch.device("cpu"),
        }
        maker = makers.get(kind)
        if maker is not None:
            return maker()
        return self.random.choice(DTYPES) if kind == "ScalarType" else None

    def many(self, kind: str, name: str) -> list[Any]:
        if kind in ("int", "SymInt"):
            chance = self.random.random()
            if chance < 0.3:
                return list(self.shape)
            if chance < 0.3 + 0.3 * self.hostile:
                return list(self.random.choice(WRAPPING))
        return [self.value(kind, name) for _ in range(self.random.choice((0, 1, 1, 2, 2, 3, 4, 6)))]

    def integer(self) -> int:
        if self.random.random() < 0.5 * self.hostile:
            return self.random.choice(NUMBERS)
        return self.random.choice((0, 1, 1, 2, 2, 3, 5, -1))

    def tensor(self, name: str) -> Tensor:
        chance = self.random.random()
        shape = (
            list(self.shape) if chance < 0.6 else [self.random.choice(SIZES) for _ in range(self.random.randint(0, 5))]
        )
        if 0.5 < chance < 0.6 and shape:
            shape[self.random.randrange(len(shape))] = self.random.choice(SIZES)
        dtype = self.random.choice(DTYPES)
        if any(
            word in name
            for word in ("ind", "offset", "target", "batch_sizes", "lengths", "sorter", "pivots", "repeats")
        ):
            dtype = self.random.choice((torch.int64, torch.int64, torch.int32, dtype))
        return self.strided(self.filled(shape, dtype))

    def filled(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        flat = guarded(count, dtype, at_end=self.random.random() < 0.7)
        if count:
            if dtype in (torch.int64, torch.int32) and self.random.random() < 0.7 * self.hostile:
                limit = 2**31 - 1 if dtype == torch.int32 else 2**63 - 1
                values = [max(-limit - 1, min(limit, self.integer())) for _ in range(count)]
                flat.copy_(torch.tensor(values, dtype=dtype))
            elif dtype.is_floating_point or dtype.is_complex:
                flat.copy_(torch.randn(count).to(dtype))
                chance = self.random.random()
                if chance < 0.15:
                    flat.copy_(torch.tensor(self.random.choice(FLOATS), dtype=torch.float64).to(dtype))
                elif chance < 0.3:
                    few = [self.random.choice(FLOATS) for _ in range(count)]
                    flat.copy_(torch.tensor(few, dtype=torch.float64).to(dtype))
            else:
                flat.copy_(torch.randint(0, 4, (count,)).to(dtype))
        return flat.view(list(shape))

    def strided(self, tensor: Tensor) -> Tensor:
        chance = self.random.random()
        if chance < 0.1 and tensor.dim() > 1:
            return tensor.transpose(0, -1)
        if chance < 0.15:
            return tensor.expand(self.random.choice((1, 3, 1000)), *tensor.shape)
        if chance < 0.2 and tensor.dim() and tensor.shape[0] > 1:
            return tensor[::2]
        if chance < 0.22 and tensor.dim() and tensor.shape[-1] > 1:
            return tensor[..., 1:]
        return tensor


def fuzz(
    names: Sequence[str],
    rounds: int,
    seconds: float = 20.0,
    say: Callable[[str], None] = lambda text: None,
    seed: int = 0,
) -> list[Crash]:
    """Return the operators that end their process or leak memory, each with the arguments that did it."""
    crashes = []
    for name in names:
        found = _fuzz_one(name, rounds, seconds, seed)
        if found is not None:
            say(f"{found.signal} {found.name} {found.arguments}")
            crashes.append(found)
    return crashes


def _fuzz_one(name: str, rounds: int, seconds: float, seed: int) -> Crash | None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        code = 1
        try:
            code = _attack(name, rounds, seconds, seed, writing)
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as file:
        last = file.read().rpartition(b"\0")[2] or b""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == LEAKED:
        return Crash(name, "UNINITIALIZED", last.decode(errors="replace")[:600])
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, NEVER_CALLED):
        raise RuntimeError(f"the fuzzer itself failed on {name}")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGALRM, signal.SIGKILL):
        return Crash(name, signal.Signals(os.WTERMSIG(status)).name, last.decode(errors="replace")[:600])
    return None


def _attack(name: str, rounds: int, seconds: float, seed: int, log: int) -> int:
    """Call an operator again and again; return whether any call went well, or one leaked memory."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Beyond what this process holds already, which is much after other tests.
    limit = psutil.Process().memory_info().data + (1 << 30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    signal.alarm(int(seconds) + 5)
    function, until, sane = operators.named(name), time.monotonic() + seconds, 0
    schema: Any = function._schema  # type: ignore[attr-defined]
    for number in range(rounds):
        if time.monotonic() > until:
            break
        numbers = (seed * 1_000_003 + number) * 7919 + len(name)
        if len(seen := [_called(name, schema, numbers, poison, log) for poison in POISONS]) and None not in seen:
            sane += 1
            # A call that gives different results with equal memory is not deterministic, and leaks nothing.
            if not _are_close(seen[0], seen[1]) and _are_close(
                seen[0], _called(name, schema, numbers, POISONS[0], log)
            ):
                return LEAKED
    return 0 if sane else NEVER_CALLED


def _called(name: str, schema: Any, seed: int, poison: int, log: int) -> list[Tensor] | None:
    """Return the results of one call, with new memory filled with a byte; None where the call is refused."""
    arguments = Generator(seed).arguments(schema)
    os.write(log, b"\0" + _told(arguments).encode()[:700])
    _libc.mallopt(M_PERTURB, poison ^ 0xFF)
    try:
        torch.manual_seed(seed)
        with torch.inference_mode():
            found = operators.checked(name)(**arguments)
            listed = found if isinstance(found, (tuple, list)) else [found]
            return [one.clone() for one in listed if isinstance(one, Tensor) and 0 < one.numel() < 1 << 22]
    except Exception:  # (most random arguments are refused)
        return None
    finally:
        _libc.mallopt(M_PERTURB, 0)


def _are_close(left: list[Tensor], right: list[Tensor] | None) -> bool:
    """Whether two results agree; sums may be rounded differently, as their memory is aligned differently."""
    if right is None or [one.shape for one in left] != [one.shape for one in right]:
        return False
    return all(torch.allclose(a, b, 1e-2, 1e-4, equal_nan=True) for a, b in zip(left, right, strict=True))


def _told(arguments: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        if isinstance(value, Tensor):
            few = value.flatten()[:6].tolist() if 0 < value.numel() < 100 and not value.dtype.is_floating_point else ""
            return f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}{few}"
        return f"[{', '.join(map(short, value))}]" if isinstance(value, list) else repr(value)

    return ", ".join(f"{key}={short(value)}" for key, value in arguments.items())


def main() -> None:
    """Fuzz all operators, or those whose name contains a text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    names = sorted(name for name in ALLOWED if options.only in name)[first::step]
    crashes = fuzz(names, options.rounds, options.seconds, lambda text: print(text, flush=True), options.seed)
    print(f"{len(crashes)} of {len(names)} operators crashed or leaked memory")
    sys.exit(bool(crashes))


if __name__ == "__main__":
    main()
