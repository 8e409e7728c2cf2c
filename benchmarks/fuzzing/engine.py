"""Fuzz targets in a process of their own: `python -m benchmarks.fuzzing.engine SECONDS FOLDER TARGET...`.

With atheris installed the search for one target is guided by the coverage of manyhands; without it, and for several
targets one after another, inputs are mutated at random. An input that raises, or takes more than `SLOWEST` seconds of
CPU time, is written to FOLDER/TARGET/findings, inputs that reach new code to FOLDER/TARGET/corpus, and how many inputs
were tried to FOLDER/TARGET/count.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import math
import pkgutil
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SLOWEST = 1.0
"""Seconds of CPU time for one input of at most `LONGEST` bytes; more is a hang."""
LONGEST = 4096
STRUCTURED = 0.7
"""Share of the mutations that change a value within JSON instead of bytes."""
MEMORY_MIB = 4096
CORPUS = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus"

Target = Callable[[bytes], None]


class Hang(AssertionError):
    """An input took too long."""


def targets() -> dict[str, tuple[Target, Any]]:
    """Return every target by its name, with its seeds: from all modules of this package that have some."""
    package = importlib.import_module("benchmarks.fuzzing")
    names = [f"{package.__name__}.{one.name}" for one in pkgutil.iter_modules(package.__path__) if one.name != "engine"]
    found: list[Any] = [importlib.import_module(name) for name in names]
    return {name: (target, module.SEEDS[name]) for module in found for name, target in module.TARGETS.items()}


def inputs_of(name: str, seeds: Any) -> list[bytes]:
    """Return the inputs to begin with: a target's seeds, and those that the repository keeps."""
    return [*(seeds() if callable(seeds) else seeds), *kept(name)]


def kept(name: str) -> list[bytes]:
    """Return the inputs of a target that the repository keeps."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def timed(target: Target) -> Target:
    """Return the target with a limit of CPU time; wall-clock time says nothing on a busy machine."""

    def call(data: bytes) -> None:
        began = time.process_time()
        target(data)
        if (took := time.process_time() - began) > SLOWEST:
            raise Hang(f"an input of {len(data)} bytes took {took:.1f} s")

    return call


def mutated(draw: random.Random, inputs: Sequence[bytes]) -> bytes:
    """Return an input with some random changes: of the values in it where it is JSON, else of its bytes."""
    changed = restructured(draw, draw.choice(inputs)) if draw.random() < STRUCTURED else None
    if changed is not None:
        return changed[:LONGEST]
    data = bytearray(draw.choice(inputs))
    for _ in range(draw.randint(1, 8)):
        at = draw.randint(0, len(data))
        other = draw.choice(inputs)
        start = draw.randint(0, len(other))
        piece = draw.choice(
            [bytes([draw.randrange(256)]), draw.choice(_PIECES), other[start : start + draw.randint(1, 32)], b""]
        )
        data[at : at + draw.choice([0, len(piece), draw.randint(0, 16)])] = piece
    return bytes(data[:LONGEST])


def restructured(draw: random.Random, data: bytes) -> bytes | None:
    """Return the data with another value somewhere in one of its JSON documents; None where it holds none."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    begin = lines[at].find(b"{")
    try:
        text = lines[at][begin:].decode()
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    places = list(_places(value))
    for _ in range(draw.randint(1, 3)):
        holder, key = draw.choice(places) if places else ([value], 0)
        kind = draw.randrange(8)
        if kind == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif kind == 1:
            other, where = draw.choice(places) if places else (holder, key)
            _put(holder, key, copy.deepcopy(other.get(where) if isinstance(other, dict) else other[where % len(other)]))
        else:
            _put(holder, key, draw.choice(_VALUES))
    lines[at] = lines[at][:begin] + json.dumps(value).encode() + text[end:].encode()
    if draw.random() < 0.2:
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
    return b"\n".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value within a document, as a container and a key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict) or key < len(holder):
        holder[key] = value


_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf,
    "", "x", "\0", "\ud800", "../x", "/etc/passwd", "9" * 400, "<b>", [], {}, [[]], [0], ["x"], {"x": 0}, {"": {}},
    "start", "steps", "epoch", "log", "plan", "partition", "split", "profiled", "servers", "failed", "ensemble",
    "routing",
]  # fmt: skip
_PIECES = [
    b"[" * 1100, b'{"a":' * 1100, b"9" * 4400, b"1e999", b"-1", b"NaN", b"null", b"true", b"\0", b"\xff", b"\n", b'"',
    b"[]", b"{}", b"99999999999999999999", b"../", b"\\ud800", b":", b",",
]  # fmt: skip


def at_random(target: Target, inputs: list[bytes], seconds: float, folder: Path) -> int:
    """Try mutations of the inputs until the time is over; return how many."""
    # Fuzzing must be repeatable, not unpredictable.
    draw = random.Random(0)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = inputs[count] if count < len(inputs) else mutated(draw, inputs)
        count += 1
        try:
            target(data)
        except Exception as error:
            note(folder, data, error)
    return count


def note(folder: Path, data: bytes, error: BaseException) -> None:
    """Keep an input that shows a defect: one for each line that raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}"
    path = folder / "findings" / where
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{where} by {data[:80]!r}", file=sys.stderr)
        traceback.print_exception(error)


def guided(target: Target, inputs: list[bytes], seconds: float, folder: Path) -> int:
    """Search with atheris until the time is over; it ends the process."""
    import atheris

    count = 0

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        try:
            target(data)
        except Exception as error:
            # The search continues: one defect must not hide the others.
            note(folder, data, error)
        if count % 256 == 1:
            (folder / "count").write_text(str(count))

    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    draw = random.Random(0)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        draw.seed(seed)
        changed = restructured(draw, data) if draw.random() < STRUCTURED else None
        return changed if changed is not None and len(changed) <= longest else atheris.Mutate(data, len(data) or 1)

    options = [f"-max_total_time={int(seconds)}", f"-max_len={LONGEST}", "-timeout=60", f"-rss_limit_mb={MEMORY_MIB}"]
    (folder / "findings").mkdir(exist_ok=True)
    where = f"-artifact_prefix={folder / 'findings'}/"
    atheris.Setup([sys.argv[0], *options, where, "-verbosity=0", str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()
    return count


def main() -> None:
    """Fuzz the targets that the command line names."""
    seconds, folder, names = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    is_guided = len(names) == 1 and is_installed()
    with _instrumented() if is_guided else contextlib.nullcontext():
        known = targets()
    for name in names:
        target, seeds = known[name]
        inputs = inputs_of(name, seeds)
        (folder / name).mkdir(parents=True, exist_ok=True)
        for data in inputs:
            # Imports and caches of the first calls are no hang.
            target(data)
        fuzz = guided if is_guided else at_random
        count = fuzz(timed(target), inputs, seconds, folder / name)
        (folder / name / "count").write_text(str(count))


def is_installed() -> bool:
    """Return whether atheris is."""
    return importlib.util.find_spec("atheris") is not None


def _instrumented() -> Any:
    import atheris

    return atheris.instrument_imports(include=["manyhands"], enable_loader_override=False)


if __name__ == "__main__":
    main()
