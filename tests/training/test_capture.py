"""Captured steps on a CUDA device: the losses of eager steps, and the right line if a step cannot be captured."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import read_events
from manyhands.data import as_source
from manyhands.distributed import Device, DirectChannel, RankInfo, TorchWorld
from manyhands.strategies.mirrored import MirroredReplica
from manyhands.training import Hand
from manyhands.training.stepping import Stepper

from .problems import Cnn, Sometimes, classify, generator, mlp

pytestmark = pytest.mark.gpu

ROWS = 330


def data(*shape: int) -> tuple[Tensor, Tensor]:
    rows = torch.randn(ROWS, *shape, generator=generator(0))
    return rows, torch.randint(0, 5, (ROWS,), generator=generator(1))


def task(model: Callable[[], nn.Module] = mlp, loss: Any = classify, **settings: Any) -> mh.Task:
    standard: dict[str, Any] = {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": data(12),
        "batch_size": 16,
        "seed": 5,
    }
    return mh.Task(model=model, loss=loss, **{**standard, **settings})


def fit(work: mh.Task, folder: Path, *, on: str = "cuda:0", epochs: int = 2, **spec: Any) -> mh.Run:
    strategy = mh.Single(**spec) if on == "cuda:0" else mh.Mirrored(**spec)
    return mh.fit(
        work,
        strategy,
        on=on,
        epochs=epochs,
        folder=folder,
        options=[mh.options.Display(progress=False), mh.options.Recovery(timeout=60)],
    )


def notices(run: mh.Run) -> str:
    return "\n".join(entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice")


def same(work: mh.Task, folder: Path, *, rtol: float = 2e-5, **settings: Any) -> mh.Run:
    """Trains recorded and plainly, compares, and gives the recorded run."""
    captured = fit(work, folder, capture="graph", **settings)
    plain = fit(work, folder, capture="off", **settings)
    assert set(captured.history) == set(plain.history)
    for name, values in plain.history.items():
        assert list(captured.history[name]) == list(values)
        np.testing.assert_allclose(list(captured.history[name].values()), list(values.values()), rtol=rtol)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(captured.state_dict()[name].float(), value.float(), rtol=1e-3, atol=2e-4, msg=name)
    return captured


def counted(model: nn.Module, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    chosen = batch[1] != 0
    return mh.mean((losses * chosen).sum(), chosen.sum())


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def warm_up(step: int, total: int) -> float:
    return min(1.0, (step + 1) / 20)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(task(), id="plain"),
        pytest.param(task(schedule=warm_up, clip=0.1), id="schedule and clipping"),
        pytest.param(task(loss=counted), id="counts"),
        pytest.param(task(Cnn, data=data(1, 6, 6), optimizer=momentum), id="batch statistics"),
        pytest.param(task(lambda: nn.Sequential(nn.Dropout(0.3), mlp())), id="dropout"),
        pytest.param(task(valid=data(12), metrics={"seen": lambda out, batch: 1.0}), id="validation in between"),
        pytest.param(task(ema=0.9, valid=data(12), clip=0.5), id="a moving average"),
        pytest.param(task(optimizer=momentum, schedule=warm_up), id="sgd"),
        pytest.param(
            task(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3), schedule=warm_up), id="rmsprop"
        ),
    ],
)
def test_captured_run_equals_eager_run(work: mh.Task, tmp_path: Path) -> None:
    run = same(work, tmp_path)
    assert "captured as one CUDA graph" in notices(run)
    assert "runs eagerly" not in notices(run)


def test_gradient_accumulation_is_captured_in_one_graph(tmp_path: Path) -> None:
    assert "one CUDA graph" in notices(same(task(), tmp_path, accumulate=3))


def blocks() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(12, 5))


def test_deterministic_random_numbers_differ_in_every_graph_replay(tmp_path: Path) -> None:
    run = same(task(blocks), tmp_path, deterministic=True)
    assert "one CUDA graph" in notices(run)
    split = fit(task(blocks), tmp_path, on="cuda:0*2", deterministic=True)
    assert "two CUDA graphs" in notices(split)
    cpu = mh.fit(
        task(blocks),
        mh.Single(deterministic=True),
        on="cpu",
        epochs=2,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    np.testing.assert_allclose(split.losses, run.losses, rtol=1e-4)
    np.testing.assert_allclose(cpu.losses, run.losses, rtol=1e-3)


def test_recompute_with_capture_equals_eager_run(tmp_path: Path) -> None:
    run = same(task(blocks), tmp_path, deterministic=True, recompute="blocks")
    assert "one CUDA graph" in notices(run)
    same(task(blocks), tmp_path, recompute="blocks")


def test_captured_run_with_smaller_last_batches_equals_eager_run(tmp_path: Path) -> None:
    same(task(), tmp_path, epochs=6)


def test_two_ranks_on_one_gpu_capture_two_graphs_around_gloo_all_reduce(tmp_path: Path) -> None:
    run = same(task(clip=0.5), tmp_path, on="cuda:0*2")
    assert "two CUDA graphs around the exchange over gloo" in notices(run)
    alone = fit(task(clip=0.5), tmp_path, capture="off")
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-4)
    within = same(task(Cnn, data=data(1, 6, 6), optimizer=momentum), tmp_path, on="cuda:0*2")
    assert "batch statistics are exchanged over gloo inside the network" in notices(within)


def test_captured_step_leaves_unused_parameters_unchanged(tmp_path: Path) -> None:
    same(task(Sometimes), tmp_path)
    same(task(Sometimes), tmp_path, on="cuda:0*2")


# -- what cannot be recorded ------------------------------------------------------------------------------------------


def with_item(model: nn.Module, batch: Any) -> Tensor:
    loss = classify(model, batch)
    return loss * 2 if loss.item() > 1e6 else loss


def with_mask(model: nn.Module, batch: Any) -> Tensor:
    chosen = model(batch[0])[batch[1] >= 0]
    return F.cross_entropy(chosen, batch[1])


def with_copy(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * torch.tensor(2.0, device=batch[0].device)


def with_wait(model: nn.Module, batch: Any) -> Tensor:
    torch.cuda.synchronize()
    return classify(model, batch)


class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if float(gradient.sum()) < 1e6 else gradient * 0


def with_backward(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(Looks.apply(model(batch[0])), batch[1])


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) / (1 + 0.01 * self.calls)


def with_chance(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * (1 + 0 * random.random())


def hooked() -> nn.Module:
    net = mlp()
    net[1].register_forward_hook(lambda *_: None)
    return net


def place(function: Any, offset: int) -> str:
    return f"test_capture.py:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("work", "said"),
    [
        pytest.param(task(loss=with_item), place(with_item, 2) + ": return loss * 2 if loss.item()", id="item"),
        pytest.param(task(loss=with_mask), place(with_mask, 1) + ": chosen = model(batch[0])[batch", id="mask"),
        pytest.param(task(loss=with_copy), place(with_copy, 1) + ": return classify", id="copy from the host"),
        pytest.param(task(loss=with_wait), place(with_wait, 1) + ": torch.cuda.synchronize()", id="wait"),
        pytest.param(task(loss=with_backward), "float(gradient.sum())", id="in backward"),
        pytest.param(task(Counts), "Counts.calls changes with every step", id="a counter"),
        pytest.param(task(loss=with_chance), "the step draws from random", id="chance"),
        pytest.param(task(hooked), "1 has hooks", id="hooks"),
    ],
)
def test_uncapturable_step_runs_eagerly_and_logs_the_reason(work: mh.Task, said: str, tmp_path: Path) -> None:
    run = same(work, tmp_path)
    assert "runs eagerly" in notices(run)
    assert said in notices(run)


class Texts(torch.utils.data.Dataset[Any]):
    """Samples of many lengths, so that batches have many shapes."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3 + index % 40, 12, generator=generator(index)), index % 5


def padded(samples: list[Any]) -> Any:
    rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    return rows, torch.tensor([label for _, label in samples])


def over_time(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).mean(1), batch[1])


def test_ranks_that_abort_capture_warm_up_stay_synchronized(tmp_path: Path) -> None:
    run = same(task(loss=with_item), tmp_path, on="cuda:0*2")
    assert "loss.item()" in notices(run)
    run = same(task(loss=with_backward), tmp_path, on="cuda:0*2")
    assert "gradient.sum()" in notices(run)


def test_batches_of_more_than_eight_shapes_run_eagerly(tmp_path: Path) -> None:
    run = same(task(loss=over_time, data=Texts(), collate=padded, batch_size=4, workers=0), tmp_path)
    assert "more than 8 shapes" in notices(run)


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have, with a counter in Python."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"] / self.count**0.5)


@pytest.mark.parametrize("on", ["cuda:0", "cuda:0*2"])
def test_unknown_optimizer_update_runs_outside_the_graph(on: str, tmp_path: Path) -> None:
    work = task(optimizer=lambda m: Lion(m.parameters(), 0.01), schedule=warm_up, clip=0.5)
    run = same(work, tmp_path, on=on)
    assert "the update of Lion is not known" in notices(run)
    assert "captured up to its update" in notices(run)


class Warms(mh.Callback):
    """Changes a value that the loss reads, and a rate, in mid-run."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 20:
            hand.model.temperature = 3.0
        if hand.num_steps == 25:
            for group in hand.optimizers[""].param_groups:
                group["lr"] = 0.001


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature


def test_value_changed_by_callback_triggers_recapture(tmp_path: Path) -> None:
    runs = [
        mh.fit(
            task(Tempered),
            mh.Single(capture=how),
            on="cuda:0",
            epochs=2,
            folder=tmp_path,
            callbacks=[Warms()],
            options=mh.options.Display(progress=False),
        )
        for how in ("graph", "off")
    ]
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=2e-5)
    assert "Tempered.temperature has changed: the step is captured again" in notices(runs[0])


hidden = {"steps": 0}


def _drift() -> float:
    hidden["steps"] += 1
    return 1.0 + 0.01 * hidden["steps"]


def with_drift(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * _drift()


def test_python_counter_in_loss_is_detected_at_capture(tmp_path: Path) -> None:
    run = fit(task(loss=with_drift), tmp_path, capture="graph")
    assert "hidden['steps'] changes with every step" in notices(run)


class Settings:
    """A value two steps away, where no watch looks."""

    inner: Any = None


class Scale:
    def __init__(self) -> None:
        self.value = 1.0


settings = Settings()
settings.inner = Scale()


class Rescales(mh.Callback):
    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 10:
            settings.inner.value = 2.0


def with_scale(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) * settings.inner.value


def test_audit_detects_changes_that_the_captured_graph_misses(tmp_path: Path) -> None:
    run = mh.fit(
        task(loss=with_scale),
        on="cuda:0",
        epochs=1,
        folder=tmp_path,
        callbacks=[Rescales()],
        options=mh.options.Display(progress=False),
    )
    assert "where the program gives" in notices(run)


# -- skipping ---------------------------------------------------------------------------------------------------------


def spoiled() -> tuple[Tensor, Tensor]:
    rows, labels = data(12)
    rows[100] = float("nan")
    rows[101] = float("inf")
    return rows, labels


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, Lion])
def test_captured_step_with_nonfinite_gradient_is_skipped(optimizer: Any, tmp_path: Path) -> None:
    def norm_first() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(12), mlp())

    work = task(
        norm_first,
        data=spoiled(),
        optimizer=lambda m: optimizer(m.parameters(), lr=0.01),
        not_finite="skip",
        shuffle=False,
    )
    run = same(work, tmp_path)
    skipped = [entry["step"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "skipped"]
    assert skipped == [7, 28]
    assert all(value.isfinite().all() for value in run.state_dict().values())
    cpu = mh.fit(work, on="cpu", epochs=2, folder=tmp_path, options=mh.options.Display(progress=False))
    np.testing.assert_allclose(cpu.losses, run.losses, rtol=1e-3)


# -- compiling --------------------------------------------------------------------------------------------------------


def compiles(folder: Path) -> None:
    work = task(clip=0.5, schedule=warm_up)
    plain = fit(work, folder, capture="off", epochs=4)
    compiled = fit(work, folder, capture="compile", epochs=4)
    np.testing.assert_allclose(compiled.losses, plain.losses, rtol=1e-4)
    assert "compiled, and captured as one CUDA graph" in notices(compiled)


def in_a_process(program: str) -> None:
    """Compilers and nccl leave sockets, threads and variables with their process."""
    done = subprocess.run([sys.executable, "-c", f"{program}; print('passed')"], capture_output=True, text=True)
    assert done.stdout.strip().endswith("passed"), done.stderr


def test_a_compiled_run_gives_the_same_losses(tmp_path: Path) -> None:
    in_a_process(
        f"from tests.training.test_capture import compiles; from pathlib import Path; compiles(Path({str(tmp_path)!r}))"
    )


def nccl_records() -> None:
    """One rank under nccl: the captured graph contains the all-reduce, which hooks start in backward."""
    world = TorchWorld(
        RankInfo(device=Device("cuda", 0)), DirectChannel(), torch.distributed.HashStore(), "cpu:gloo,cuda:nccl"
    )
    losses = {}
    for capture in ("graph", "off"):
        work = task(clip=0.5)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            hand = Hand(world, mh.StrategySpec(capture=capture))
            hand.build(work)
            hand.adopt(MirroredReplica(hand.spec, world, hand.model, hand.optimizers))
            stepper = Stepper(hand, work, 100)
            feed = hand.reader.make_feed(as_source(work.data), 16, shuffle=True)
            found = []
            for batch in hand.reader.one_epoch(feed):
                stepper.take(batch)
                found.append(float(hand.losses[""]))
            losses[capture] = found
            assert (stepper._capture is not None and bool(stepper._capture._made)) == (capture == "graph")
            hand.close()
    np.testing.assert_allclose(losses["graph"], losses["off"], rtol=2e-5)
    world.close()


def test_nccl_collectives_are_captured() -> None:
    in_a_process("from tests.training.test_capture import nccl_records; nccl_records()")
