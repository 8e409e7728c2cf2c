"""Every decoder on the inputs that fuzzing found interesting, and the fuzzer itself on decoders with known defects."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from benchmarks.fuzz import NUM_TARGETS
from benchmarks.fuzzing import engine

NAMES = sorted(path.name for path in engine.CORPUS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_corpus_inputs_trigger_no_defect(name: str) -> None:
    target, seeds = engine.targets()[name]
    inputs = engine.inputs_of(name, seeds)
    assert inputs
    for data in inputs:
        target(data)


def test_every_fuzz_target_has_a_corpus_and_is_counted_by_the_benchmark() -> None:
    assert sorted(engine.targets()) == NAMES
    assert len(NAMES) == NUM_TARGETS
    size = sum(path.stat().st_size for path in engine.CORPUS.rglob("*") if path.is_file())
    assert size < 300 << 10


def test_fuzzer_finds_defects_and_keeps_one_input_of_each(tmp_path: Path) -> None:
    def fragile(data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            _ = [*value.get("list", [])]

    count = engine.at_random(fragile, [b'{"list": [1, 2]}'], 1.0, tmp_path)
    assert count > 10
    (found,) = (tmp_path / "findings").iterdir()
    assert found.name.startswith("TypeError-test_corpus-")
    with pytest.raises(TypeError):
        fragile(found.read_bytes())


def test_slow_input_is_reported_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SLOWEST", 0.01)

    def slow(data: bytes) -> None:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    with pytest.raises(engine.Hang):
        engine.timed(slow)(b"x")
