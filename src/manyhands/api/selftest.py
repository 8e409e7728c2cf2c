"""Self-test: run every strategy on the devices of this machine, and compare results and speed with one device."""

from __future__ import annotations

import functools
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import training
from ..core import SettingsError, StrategySpec, Task, UsageError
from ..distributed import DEFAULT_TIMEOUT, Device, World
from ..options import Display, Equality
from .bench import steady
from .check import check
from .fit import fit
from .runtime import On, runtime

STEPS = 12
TOLERANCE = 2e-3
"""Largest relative difference of single-precision losses over `STEPS` steps."""
ROWS, BATCH, LENGTH, WORDS = 96, 24, 32, 64
SIZES = (1 << 12, 1 << 20, 1 << 26)
"""Bytes of the all-reduces that are timed."""
PASSED, FAILED, REFUSED, OMITTED = "passed", "failed", "refused", "omitted"


@dataclass(frozen=True, kw_only=True)
class StrategyTrial:
    """The result of one network under one strategy."""

    network: str
    strategy: str
    outcome: str
    """"passed", "failed", "refused", or "omitted" for lack of time."""
    detail: str = ""
    loss_difference: float | None = None
    """The largest relative difference of the losses from those of one device."""
    step_ratio: float | None = None
    """The time of a step over that of one device with the same global batch."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The time of an all-reduce of some bytes over all devices."""

    num_bytes: int
    seconds: float
    bus_bytes_per_second: float


@dataclass(kw_only=True)
class SelfTest:
    """The report of a self-test."""

    machine: dict[str, Any]
    trials: list[StrategyTrial] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    step_over_ddp: float | None = None
    """The time of a step of mh.Mirrored over one of a hand-written loop with DistributedDataParallel."""
    step_over_fsdp: float | None = None
    """The time of a step of mh.Sharded over one of a hand-written loop with fully_shard."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no strategy failed; refused and omitted ones do not count as failures."""
        return not any(trial.outcome == FAILED for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        return {**asdict(self), "passed": self.passed}

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def selftest(
    on: On = None,
    *,
    minutes: float = 10.0,
    timeout: float = DEFAULT_TIMEOUT,
    on_trial: Callable[[StrategyTrial], None] = lambda trial: None,
) -> SelfTest:
    """Run every strategy on the devices, compare with one of them, and measure bandwidth and the speed of steps.

    Each strategy takes part in two comparisons: of two steps in float64 (`mh.check`), and of a short training in single
    precision with layout-free random numbers. Steps are timed beside hand-written loops with DistributedDataParallel
    and fully_shard.

    Args:
        on: Devices, as for `mh.fit`; at least two.
        minutes: Time after which no further strategy is started.
        timeout: Seconds within which a healthy operation completes.
        on_trial: Called with each result.
    """
    if not minutes > 0:
        raise SettingsError("minutes must be above 0", got=minutes, remedy="pass for example minutes=10")
    _, devices, _ = runtime.settle("mirrored", on)
    if len(devices) < 2:
        raise SettingsError(
            "a self-test needs at least two devices",
            got=f"{len(devices)} ({', '.join(map(str, devices))})",
            remedy="pass for example on='cuda:0,1', or on='cpu*2'",
        )
    began = time.monotonic()
    report = SelfTest(machine=_machine(devices))

    def add(trial: StrategyTrial) -> None:
        report.trials.append(trial)
        on_trial(trial)

    try:
        report.transfers = _transfers(devices, timeout)
    except Exception as error:
        add(_failed("", "all-reduce", error))
    for network, make in NETWORKS.items():
        try:
            alone = _OneDeviceTask(make(len(devices)), devices[0], timeout)
        except Exception as error:
            add(_failed(network, "one device", error))
            continue
        for spec in strategies(len(devices)):
            if time.monotonic() - began > 60 * minutes:
                late = f"{minutes:g} min are over"
                add(StrategyTrial(network=network, strategy=str(spec), outcome=OMITTED, detail=late))
            else:
                add(_trial(network, spec, alone, devices, on, timeout))
    if time.monotonic() - began <= 60 * minutes:
        try:
            report.step_over_ddp, report.step_over_fsdp = _peers(devices, timeout)
        except Exception as error:
            add(_failed("", "loops by hand", error))
    report.seconds = time.monotonic() - began
    return report


def _failed(network: str, what: str, error: Exception) -> StrategyTrial:
    return StrategyTrial(network=network, strategy=what, outcome=FAILED, detail=f"{type(error).__name__}: {error}")


def strategies(size: int) -> Iterator[StrategySpec]:
    """Yield the strategies that a self-test runs on `size` devices.

    >>> [str(spec) for spec in strategies(2)][:3]
    ['replicas=2', 'replicas=2,sync=bf16', 'shards=2']
    """
    yield StrategySpec(replicas=size)
    yield StrategySpec(replicas=size, sync="bf16")
    yield StrategySpec(shards=size)
    yield StrategySpec(shards=size, sharding="gradients")
    yield StrategySpec(shards=size, sharding="optimizer")
    yield StrategySpec(tensor=size)
    yield StrategySpec(stages=size, microbatches=2 * size)
    yield StrategySpec(servers=1, replicas=size)
    if size % 2 == 0 and size > 2:
        half = size // 2
        yield StrategySpec(replicas=2, shards=half)
        yield StrategySpec(replicas=half, tensor=2)
        yield StrategySpec(replicas=half, stages=2, microbatches=4)
        yield StrategySpec(shards=half, tensor=2)


# -- the networks ------------------------------------------------------------------------------------------------------


class SmallDecoder(nn.Module):
    """A small transformer with causal attention and dropout."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        block = functools.partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block(width, heads, 4 * width, dropout=0.1) for _ in range(4))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)  # type: ignore[no-any-return]


def _next_word(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    logits = model(batch[0])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def decoder_task(size: int) -> Task:
    """Return the training of a decoder whose heads can be divided over `size` devices."""
    heads = 2 * size
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return Task(
        model=functools.partial(SmallDecoder, heads, 16 * heads),
        loss=_next_word,
        optimizer=_adamw,
        data=(ids,),
        batch_size=BATCH,
    )


def _classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def convolutional_task(size: int) -> Task:
    """Return the training of a convolutional network with batch statistics."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (ROWS,), generator=generator)
    return Task(model=_convolutions, loss=_classes, optimizer=_adamw, data=(images, labels), batch_size=BATCH)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


NETWORKS: dict[str, Callable[[int], Task]] = {"decoder": decoder_task, "convolutional": convolutional_task}


# -- one network under one strategy ------------------------------------------------------------------------------------


class _OneDeviceTask:
    """A task on one device: its losses, and the time of a step."""

    def __init__(self, task: Task, device: Device, timeout: float) -> None:
        self.task = task
        name = device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}"
        self.losses = _losses(task, StrategySpec(), name)
        timed = functools.partial(training.time_steps, task=task, spec=StrategySpec())
        self.seconds = steady(runtime.call(timed, [device], timeout)[0])


def _losses(task: Task, spec: StrategySpec, on: On) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = fit(
            task,
            spec,
            epochs=STEPS,
            steps=STEPS,
            on=on,
            folder=folder,
            options=[Display(progress=False), Equality(deterministic=True, verify=False)],
        )
        return list(run.losses)


def _trial(
    network: str, spec: StrategySpec, alone: _OneDeviceTask, devices: Sequence[Device], on: On, timeout: float
) -> StrategyTrial:
    result = functools.partial(StrategyTrial, network=network, strategy=str(spec))
    try:
        verdict = check(alone.task, spec, on=on, timeout=timeout)
        if not verdict.equal:
            return result(outcome=FAILED, detail=str(verdict))
        losses = _losses(alone.task, spec, on)
        ratio = None
        if not spec.servers:
            timed = functools.partial(training.time_steps, task=alone.task, spec=spec)
            ratio = max(map(steady, runtime.call(timed, devices, timeout))) / alone.seconds
    except UsageError as error:
        return result(outcome=REFUSED, detail=str(error))
    except Exception as error:
        return _failed(network, str(spec), error)
    if len(losses) != len(alone.losses) or not all(map(math.isfinite, (*losses, *alone.losses))):
        return result(outcome=FAILED, detail=f"the losses are {losses}, and on one device {alone.losses}")
    largest = max(map(abs, alone.losses))
    difference = max(abs(a - b) for a, b in zip(losses, alone.losses, strict=True)) / largest
    # A policy that rounds gradients is compared loosely: it must still learn the same.
    most = TOLERANCE if spec.sync == "allreduce" else 25 * TOLERANCE
    outcome = PASSED if difference <= most else FAILED
    detail = "" if outcome == PASSED else f"losses differ from one device by {difference:.2g}"
    return result(outcome=outcome, detail=detail, loss_difference=difference, step_ratio=ratio)


# -- bandwidth, and loops by hand --------------------------------------------------------------------------------------


def _transfers(devices: Sequence[Device], timeout: float) -> list[Transfer]:
    """Return the times of all-reduces of several sizes over all devices."""
    seconds = runtime.call(_time_all_reduces, devices, timeout)[0]
    share = 2 * (len(devices) - 1) / len(devices)
    return [
        Transfer(num_bytes=size, seconds=each, bus_bytes_per_second=share * size / each)
        for size, each in zip(SIZES, seconds, strict=True)
    ]


def _time_all_reduces(world: World) -> list[float]:
    found = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=world.device)
        times = []
        for _ in range(8):
            world.barrier()
            began = time.perf_counter()
            world.all_reduce(tensor)
            _synchronize(world)
            times.append(time.perf_counter() - began)
        found.append(median(times[2:]))
    return found


def _peers(devices: Sequence[Device], timeout: float) -> tuple[float, float]:
    """Return the time of a step over that of a loop by hand: of replicas over DDP, and of shards over fully_shard."""
    size = len(devices)
    task, ratios = convolutional_task(size).replace(model=_wide, data=_rows(), batch_size=64 * size), []
    for spec, wrap in ((StrategySpec(replicas=size), _with_ddp), (StrategySpec(shards=size), _with_fsdp)):
        ours = runtime.call(functools.partial(training.time_steps, task=task, spec=spec), devices, timeout)
        theirs = runtime.call(functools.partial(_time_by_hand, task=task, wrap=wrap), devices, timeout)
        ratios.append(max(map(steady, ours)) / max(map(steady, theirs)))
    return ratios[0], ratios[1]


def _wide() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(4):
        layers += [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1024, 1024, generator=generator), torch.randint(10, (1024,), generator=generator)


def _with_ddp(model: nn.Module, world: World) -> nn.Module:
    ids = None if world.device.type == "cpu" else [world.device.index]
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _with_fsdp(model: nn.Module, world: World) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.children():
        if isinstance(block, nn.Sequential):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _time_by_hand(world: World, task: Task, wrap: Callable[[nn.Module, World], nn.Module]) -> list[float]:
    """Return the seconds of steps of a loop as it is written by hand, with the data on the device."""
    torch.manual_seed(0)
    model = wrap(task.model().to(world.device), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    inputs, labels = (tensor.to(world.device) for tensor in task.data)
    rows = (task.batch_size or 1) // world.size
    times = []
    for step in range(20):
        first = (step * world.size + world.rank) * rows % (len(inputs) - rows + 1)
        began = time.perf_counter()
        F.cross_entropy(model(inputs[first : first + rows]), labels[first : first + rows]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronize(world)
        times.append(time.perf_counter() - began)
    return times[5:]


def _synchronize(world: World) -> None:
    if world.device.type != "cpu":
        torch.accelerator.synchronize(world.device)


def _machine(devices: Sequence[Device]) -> dict[str, Any]:
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "devices": [str(device) for device in devices],
        "models": sorted({device.model for device in devices if device.model}),
        "links": sorted({device.links for device in devices if device.links}),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
