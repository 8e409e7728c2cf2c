"""Samples of a host's usage."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from manyhands.core import event
from manyhands.core.fields import is_event
from manyhands.monitoring import HostUsage
from manyhands.monitoring import usage as module


def test_sample_is_an_event_of_bounded_size_that_readers_accept() -> None:
    sample = HostUsage(interval=0.0).take()
    assert sample is not None
    assert is_event(sample)
    assert 0 <= sample["cpu"] <= 100
    assert len(json.dumps(sample)) < 300


def test_sample_is_taken_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now))
    usage = HostUsage(interval=10.0)
    now = 109.0
    assert usage.take() is None
    now = 110.0
    assert usage.take() is not None
    now = 119.0
    assert usage.take() is None


def test_gpus_are_sampled_by_the_driver_and_a_failing_driver_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    works = True

    def rates(gpu: int) -> Any:
        if not works:
            raise RuntimeError("the driver was unloaded")
        return types.SimpleNamespace(gpu=40 + gpu)

    driver = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=rates,
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(used=1 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    usage = HostUsage(with_gpus=True, interval=0.0)
    sample = usage.take()
    assert sample is not None
    assert sample["gpus"] == [{"used": 40, "memory": 1 << 30}, {"used": 41, "memory": 1 << 30}]
    works = False
    sample = usage.take()
    assert sample is not None
    assert "gpus" not in sample


def test_usage_with_fields_of_other_types_is_no_event() -> None:
    assert is_event(event("usage", cpu=1.0, memory=2))
    assert not is_event(event("usage", cpu=1.0, memory="2"))
    assert not is_event(event("usage", cpu=1.0, memory=2, gpus=[{"used": 1.0}]))
