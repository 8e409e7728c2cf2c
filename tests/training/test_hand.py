"""The hand: custom training loops, on one and on many replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import manyhands as mh
from manyhands.core import CheckpointError, StrategyError, TaskError

from .problems import Gpt, gan_step, generator, padded_tokens, problem, token_loss

X, Y = torch.randn(37, 6, generator=generator(0)), torch.randint(0, 3, (37,), generator=generator(1))


def own_loop(hand: mh.Hand, folder: Path | None = None, stop_after: int = 100) -> list[float]:
    """A plain loop: two epochs with micro-batches, and a checkpoint after every step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model, optimizer = hand.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    losses = hand.restore(folder) if folder else None
    losses = losses["losses"] if losses else []
    for batch in hand.batches((X, Y), 10, epochs=2, seed=7):
        for images, labels in hand.accumulate(batch):
            hand.backward(F.cross_entropy(model(images), labels))
        hand.step()
        losses.append(hand.loss)
        hand.log(loss=losses[-1])
        if folder:
            hand.save(folder, losses=losses)
        if hand.num_steps == stop_after:
            break
    hand.barrier()
    assert optimizer is hand.optimizers[""]
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_custom_loop_gives_the_same_losses_on_any_number_of_replicas(size: int, accumulate: int) -> None:
    alone = mh.launch(own_loop, mh.Single(accumulate=accumulate), on="cpu", progress=False)[0]
    assert len(alone) == 8
    for losses in mh.launch(own_loop, mh.Mirrored(size, accumulate=accumulate), on=f"cpu*{size}", progress=False):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_custom_loop_resumes_on_another_number_of_replicas(tmp_path: Path) -> None:
    alone = mh.launch(own_loop, "single", on="cpu", progress=False)[0]
    first = mh.launch(lambda hand: own_loop(hand, tmp_path, stop_after=3), "replicas=2", on="cpu*2", progress=False)[0]
    assert len(first) == 3
    rest = mh.launch(lambda hand: own_loop(hand, tmp_path), "replicas=3", on="cpu*3", progress=False)[0]
    assert rest == pytest.approx(alone, rel=1e-5)


def test_hand_collectives_return_results_on_all_ranks() -> None:
    def work(hand: mh.Hand) -> list[Any]:
        value = torch.tensor([1.0, 2.0]) * (hand.rank + 1)
        return [
            hand.sum(value).tolist(),
            hand.mean(hand.rank).item(),
            hand.gather(hand.rank).tolist(),
            hand.broadcast(value, source=1).tolist(),
            hand.is_first,
            str(hand.device),
        ]

    common = [[6.0, 12.0], 1.0, [0, 1, 2], [2.0, 4.0]]
    results = mh.launch(work, mh.Mirrored(3), on="cpu*3", progress=False)
    assert results == [[*common, rank == 0, "cpu"] for rank in range(3)]


def test_custom_loop_averages_loss_over_tokens_across_replicas() -> None:
    data = padded_tokens(30)

    def loop(hand: mh.Hand) -> list[float]:
        torch.manual_seed(1)
        net = Gpt()
        model, _ = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        losses = []
        for batch in hand.batches(data, 8):
            hand.backward(token_loss(model, batch))
            hand.step()
            losses.append(hand.loss)
        return losses

    alone = mh.launch(loop, "single", on="cpu", progress=False)[0]
    assert mh.launch(loop, "replicas=3", on="cpu*3", progress=False)[2] == pytest.approx(alone, rel=1e-5)


def test_hand_is_single_rank_without_launch_and_current_under_launch() -> None:
    hand = mh.hand()
    assert (hand.rank, hand.size, hand.is_first) == (0, 1, True)
    assert mh.launch(lambda held: mh.hand() is held, "single", on="cpu", progress=False) == [True]
    assert mh.launch(lambda held: mh.hand() is held, "replicas=2", on="cpu*2", progress=False) == [True, True]


def test_fit_inside_launch_uses_the_launched_ranks(tmp_path: Path) -> None:
    """Under `launch`, `fit` joins the ranks that are already there."""
    task = problem("mlp")
    alone = mh.fit(task, mh.Single(), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))

    def inner(hand: mh.Hand) -> list[float]:
        run = mh.fit(task, folder=tmp_path, name="inner", options=mh.options.Display(progress=False))
        return run.losses

    for losses in mh.launch(inner, mh.Mirrored(2), on="cpu*2", progress=False):
        assert losses == pytest.approx(alone.losses, rel=1e-5)


def test_invalid_hand_calls_raise_task_error() -> None:
    hand = mh.hand()
    with pytest.raises(TaskError, match="the hand has no network yet"):
        _ = hand.model
    net = nn.Linear(6, 3)
    hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TaskError, match="hand.step must follow hand.backward"):
        hand.step()
    with pytest.raises(TaskError, match="the optimizer must be one of '', but got 'critic'"):
        hand.minimize(torch.ones(()), "critic")
    with pytest.raises(TaskError, match="needs the batch that hand.batches returned last"):
        list(hand.accumulate((X, Y)))


def test_minimize_with_a_loss_tensor_rejects_accumulation(tmp_path: Path) -> None:
    def step(hand: mh.Hand, batch: Any) -> None:
        hand.minimize(hand.model.critic(batch[1]).mean(), "critic")
        hand.minimize(hand.model.critic(hand.model.generator(batch[0])).mean(), "generator")

    task = problem("gan").replace(step=step)
    run = mh.fit(task, mh.Single(), steps=2, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    assert set(run.metrics) == {"critic", "generator"}
    with pytest.raises(StrategyError, match="Pass a function: hand.minimize"):
        mh.fit(
            task,
            mh.Single(accumulate=2),
            steps=2,
            on="cpu",
            folder=tmp_path,
            options=mh.options.Display(progress=False),
        )
    assert problem("gan").step is gan_step


def test_timed_block_that_raises_is_still_measured() -> None:
    hand = mh.hand()
    with pytest.raises(ValueError, match="slip"), hand.times.timed("validation"):
        raise ValueError("slip")
    assert hand.times.seconds["validation"] > 0


def scheduled_loop(hand: mh.Hand, folder: Path, stop_after: int = 100, saves: bool = True) -> list[float]:
    """A plain loop with a scheduler, whose state is passed to `save`; the learning rates of its steps."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    model, optimizer = hand.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    state = hand.restore(folder)
    rates: list[float] = [] if state is None else state["rates"]
    if state is not None:
        scheduler.load_state_dict(state["scheduler"])
    for batch in hand.batches((X, Y), 10, epochs=2, seed=7):
        rates.append(optimizer.param_groups[0]["lr"])
        for images, labels in hand.accumulate(batch):
            hand.backward(F.cross_entropy(model(images), labels))
        hand.step()
        scheduler.step()
        hand.save(folder, rates=rates, **({"scheduler": scheduler.state_dict()} if saves else {}))
        if hand.num_steps == stop_after:
            break
    hand.barrier()
    return rates


def test_scheduler_of_a_custom_loop_resumes_from_the_state_that_was_saved(tmp_path: Path) -> None:
    whole = mh.launch(lambda hand: scheduled_loop(hand, tmp_path / "whole"), on="cpu", progress=False)[0]
    assert whole == [1.0] * 3 + [0.5] * 3 + [0.25] * 2
    part = mh.launch(lambda hand: scheduled_loop(hand, tmp_path / "part", 4), on="cpu", progress=False)[0]
    assert part == whole[:4]
    rest = mh.launch(lambda hand: scheduled_loop(hand, tmp_path / "part"), "mirrored", on="cpu*2", progress=False)[0]
    assert rest == whole


def test_resume_of_a_custom_loop_rejects_a_scheduler_that_was_not_saved(tmp_path: Path) -> None:
    mh.launch(lambda hand: scheduled_loop(hand, tmp_path, 4, saves=False), on="cpu", progress=False)
    with pytest.raises(CheckpointError, match=r"save its state too: hand\.save\(path, scheduler=scheduler\.state_dict"):
        mh.launch(lambda hand: scheduled_loop(hand, tmp_path), on="cpu", progress=False)
