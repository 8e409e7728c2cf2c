"""Memory: the breakdown of a step in bytes, limits, and out-of-memory errors that name what would fit."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import OutOfMemory, PeerLost, SettingsError, WorkerFailed
from manyhands.data import Cursor, as_source
from manyhands.distributed import NullWorld, World
from manyhands.training import Hand, Job, parse_bytes, train
from manyhands.training.memory import Account, account, is_out_of_memory, remedies

WIDTH, DEPTH, ROWS = 256, 12, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.gelu(self.norm(self.layer(x))))


def net() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def task(rows: int = ROWS, **changes: Any) -> mh.Task:
    made = mh.Task(
        model=net,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=(torch.zeros(2 * rows, WIDTH), torch.zeros(2 * rows)),
        batch_size=rows,
    )
    return made.replace(**changes)


def held(made: mh.Task, spec: mh.StrategySpec | None = None) -> Account:
    hand = Hand(NullWorld(), spec or mh.Single())
    hand.build(made)
    feed = hand.reader.make_feed(as_source(made.data), made.batch_size or 1, shuffle=False)
    batch = next(iter(feed.epoch(Cursor())))
    feed.close()
    return account(hand, made, batch)


def test_memory_account_counts_parameters_state_and_activations() -> None:
    """Per block and row: what gelu takes, what tanh gives, what the norm takes, and the input of the block."""
    found = held(task())
    count = DEPTH * (WIDTH * WIDTH + 3 * WIDTH) + WIDTH + 1
    buffers = DEPTH * (2 * WIDTH * 4 + 8)
    assert found.parameters == count * 4 + buffers
    assert found.gradients == count * 4
    assert found.optimizer == 2 * count * 4
    assert found.rows == ROWS
    block = {name: size for name, size in found.activations.items() if name.startswith("3.") or name == "3"}
    row = ROWS * WIDTH * 4
    assert block == {"3": 2 * row, "3.layer": row, "3.norm": row}
    assert found.total == found.fixed + sum(found.activations.values()) + found.working
    assert list(found.activations.values()) == sorted(found.activations.values(), reverse=True)


def test_memory_account_reflects_accumulation_precision_and_recompute() -> None:
    whole = sum(held(task()).activations.values())
    quarter = held(task(), mh.Single(accumulate=4))
    assert quarter.rows == ROWS // 4
    assert sum(quarter.activations.values()) == pytest.approx(whole / 4, rel=0.01)
    assert sum(held(task(), mh.Single(recompute="blocks")).activations.values()) < whole / 3
    assert sum(held(task(), mh.Single(precision="bf16")).activations.values()) < whole * 0.8
    sgd = task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert held(sgd).optimizer == 0


def tight(world: World, spec: mh.StrategySpec, folder: Path, made: Callable[[], mh.Task] = task) -> str | int:
    """Trains in 96 MiB, in a process of its own, whose memory has no holes from other tests."""
    torch.set_num_threads(1)
    job = Job(task=made(), spec=spec, folder=folder, epochs=1, memory=parse_bytes("96MiB"))
    try:
        return train(world, job).num_steps
    except OutOfMemory as error:
        return str(error)


def test_out_of_memory_advice_fits_into_the_limit(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """108 MiB in 96: a real allocation fails, and the same limit is enough for what the error says."""

    def run(spec: mh.StrategySpec) -> Any:
        return run_ranks(partial(tight, spec=spec, folder=tmp_path / str(spec)), 1)[0]

    text = run(mh.Single())
    for line in (
        r"^step 1 did not fit into the memory of cpu on rank 0, at .*test_memory.py:\d+, where .* more were asked for",
        r"parameters +3\.\d MiB",
        r"gradients +3\.\d MiB",
        r"optimizer state +6\.\d MiB",
        r"activations +9\d\.\d MiB for 2048 rows: \d+ 4\.0 MiB",
        r'recompute="blocks" +about 4\d\.\d MiB$',
    ):
        assert re.search(line, text, re.MULTILINE), text
    advised = re.search(r"accumulate=(\d+) +about \d+\.\d MiB$", text, re.MULTILINE)
    assert advised is not None, text
    assert run(mh.Single(accumulate=int(advised[1]), batch_stats="micro")) == 2
    assert run(mh.Single(recompute="blocks")) == 2


def wide() -> mh.Task:
    """Forward keeps one wide tensor, makes two, and backward has three at a time."""
    rows = 16 * ROWS
    return task(
        model=lambda: nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 1)),
        data=(torch.zeros(rows, 16), torch.zeros(rows)),
        batch_size=rows,
    )


def test_temporary_tensors_of_a_step_are_counted(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    wide_tensor = 16 * ROWS * 1024 * 4
    found = held(wide())
    assert found.activations["1"] == wide_tensor
    assert found.working == pytest.approx(2 * wide_tensor, rel=0.01)

    def run(spec: mh.StrategySpec) -> Any:
        return run_ranks(partial(tight, spec=spec, folder=tmp_path / str(spec), made=wide), 1)[0]

    advised = re.search(r"accumulate=(\d+) +about \d+\.\d MiB$", run(mh.Single()), re.MULTILINE)
    assert advised is not None
    assert run(mh.Single(accumulate=int(advised[1]))) == 1


def test_process_stays_usable_after_out_of_memory(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(OutOfMemory, match="step 1 did not fit into the memory of cpu") as caught:
        mh.fit(
            task(4 * ROWS),
            mh.Single(),
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Display(progress=False), mh.options.Resources(memory="96MiB")],
        )
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    _require_nothing_left(caught)
    assert (
        mh.fit(task(8), mh.Single(), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)).num_steps
        == 2
    )


def _require_nothing_left(caught: Any) -> None:
    """Nothing of the failed step is alive, although its error still is."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    assert not [tuple(t.shape) for t in tensors if t.dim() == 2 and len(t) == 4 * ROWS and t.grad_fn is not None]
    assert caught.value is not None


def without_kernels(model: nn.Module, batch: Any) -> Tensor:
    """As oneDNN does once it found no memory for a kernel's code: that thread gets no more of them."""
    if threading.current_thread() is threading.main_thread():
        raise RuntimeError("could not create a primitive")
    # The account is made without the limit: OpenMP ends a process in which it can start no thread.
    assert not is_limited()
    return loss(model, batch)


def is_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def test_kernel_allocation_failure_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    made = task(8, loss=without_kernels)
    with pytest.raises(OutOfMemory, match=r"step 1 did not fit.*test_memory.py:\d+\n(.|\n)*activations .* for 8 rows"):
        mh.fit(
            made,
            mh.Single(),
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Display(progress=False), mh.options.Resources(memory="96MiB")],
        )
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        mh.fit(made, mh.Single(), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))


def test_parameters_above_memory_limit_are_rejected_before_the_first_step(tmp_path: Path) -> None:
    def fragile(model: nn.Module, batch: Any) -> Tensor:
        if is_limited():
            # As a library does that does not look at what malloc says.
            os.kill(os.getpid(), signal.SIGSEGV)
        return loss(model, batch)

    made = task(8, model=lambda: nn.Linear(WIDTH, 1 << 15), loss=fragile)
    with pytest.raises(
        OutOfMemory, match=r"step 1 did not fit(.|\n)*parameters +32.1 MiB(.|\n)* for 8 rows(.|\n)*no batch"
    ):
        mh.fit(
            made,
            mh.Single(),
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Display(progress=False), mh.options.Resources(memory="16MiB")],
        )


def test_out_of_memory_on_a_replica_is_raised_by_fit(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"on rank [01](.|\n)*accumulate=\d+ .*about") as caught:
        mh.fit(
            task(8 * ROWS),
            "mirrored",
            on="cpu*2",
            folder=tmp_path,
            options=[mh.options.Display(progress=False), mh.options.Resources(memory="96MiB")],
        )
    assert isinstance(caught.value.__cause__, WorkerFailed)


def test_remedies_suggest_sharding_or_accumulation_as_needed() -> None:
    hand = Hand(NullWorld(), mh.Single())
    fixed = Account(parameters=40 << 20, gradients=40 << 20, optimizer=80 << 20)
    assert remedies(hand, task(), None, fixed, 100 << 20) == [
        "mh.Sharded(4)        about 40.0 MiB on each of 4 devices",
        "no batch: parameters, gradients and optimizer state alone are more than there is",
    ]
    hand = Hand(NullWorld(), mh.Single(recompute="blocks", precision="bf16"))
    full = Account(parameters=1 << 20, gradients=1 << 20, optimizer=1 << 20, activations={"0": 120 << 20}, rows=2)
    assert remedies(hand, task(), None, full, 100 << 20) == ["accumulate=2         about 63.0 MiB"]


def test_custom_step_out_of_memory_omits_activation_sizes(tmp_path: Path) -> None:
    def step(hand: mh.Hand, batch: Any) -> None:
        hand.minimize(lambda part: loss(hand.model, part))

    made = task(4 * ROWS, loss=None, step=step)
    with pytest.raises(OutOfMemory, match=r"activations +could not be measured\nwhat would help:\n  a smaller batch"):
        mh.fit(
            made,
            mh.Single(),
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Display(progress=False), mh.options.Resources(memory="96MiB")],
        )


def test_unrelated_errors_are_not_reported_as_out_of_memory(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            raise RuntimeError("something else")
        return loss(model, batch)

    with pytest.raises(RuntimeError, match="^something else$"):
        mh.fit(task(8, loss=broken), mh.Single(), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    assert not is_out_of_memory(PeerLost("all_reduce", "x.py:1", "rank 1 died: can't allocate memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize("memory", ["much", "-1GiB", "0", "8GiX", "GiB", "8 i", True, 0, -5])
def test_invalid_memory_limits_are_rejected(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match='number of bytes above zero, but got .*. Write for example "8GiB"'):
        mh.fit(task(8), on="cpu", folder=tmp_path / "runs", options=mh.options.Resources(memory=memory))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("8gb", 8 * 10**9),
        ("500 MB", 5 * 10**8),
        ("20000k", 2 * 10**7),
        (2**25, 2**25),
        ("2Ti", 2**41),
    ],
)
def test_parse_bytes_accepts_units_and_numbers(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("memory", ["8", 1.5, "1KB"])
def test_memory_limit_below_minimum_is_rejected(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at least 16.0 MiB, but got .* Include the unit"):
        mh.fit(task(8), on="cpu", folder=tmp_path / "runs", options=mh.options.Resources(memory=memory))
    assert not (tmp_path / "runs").exists()
