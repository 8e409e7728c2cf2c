"""deterministic=True: a network that draws random numbers gives the same losses for any split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.distributed import NullWorld, World
from manyhands.training import Job, train

from ..grouped_options import fit_options
from .problems import classify, generator, padded_tokens, problem, token_loss
from .test_equality import keep
from .test_fit import StopAt


class Block(nn.Module):
    """A causal block with dropout on its attention, and after it and the MLP."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(p))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.p, self.training)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Two blocks; every other forward of a block may be computed again in backward."""

    def __init__(self, p: float = 0.2, again: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.dropout = nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(16, p) for _ in range(2))
        self.again = again

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x @ self.tokens.weight.T


class Noisy(nn.Module):
    """Draws in most of the ways there are: layers, recurrent dropout, factories; some of it depends on no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.rnn = nn.GRU(4, 4, 2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.last(self.first(x))
        x = F.alpha_dropout(x + 0.1 * torch.randn_like(x), 0.2, training=True)
        weight = self.first.weight + 0.01 * torch.randn_like(self.first.weight)
        x = F.linear(x, weight, self.first.bias).view(len(x), 2, 4)
        x = self.attention(*[self.rnn(x)[0]] * 3)[0] * (1 + torch.rand(())) + torch.rand(len(x), 1, 1)
        return self.last(F.dropout1d(x, 0.2).flatten(1) * np.random.uniform(0.9, 1.1))


class Texts:
    """A dataset of rows."""

    def __init__(self) -> None:
        self.rows = padded_tokens(41)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def gpt(p: float = 0.2, again: bool = False, **changes: Any) -> mh.Task:
    return problem("gpt", "adamw").replace(model=lambda: Gpt(p, again), **changes)


def tasks() -> dict[str, mh.Task]:
    noisy = problem("mlp", "adamw").replace(model=Noisy)
    return {"gpt": gpt(), "again": gpt(again=True), "noisy": noisy, "gan": problem("gan").replace(step=noisy_gan_step)}


def noisy_gan_step(hand: mh.Hand, batch: Any) -> None:
    def critic(part: Any) -> Tensor:
        fake = hand.model.generator(torch.randn_like(part[0])).detach()
        return F.softplus(-hand.model.critic(part[1])).mean() + F.softplus(hand.model.critic(fake)).mean()

    def forge(part: Any) -> Tensor:
        return F.softplus(-hand.model.critic(hand.model.generator(torch.randn_like(part[0])))).mean()

    hand.minimize(critic, "critic")
    hand.minimize(forge, "generator")


def losses_of(world: World, spec: mh.StrategySpec, folder: Path) -> dict[str, dict[str, list[float]]]:
    """The losses of every task, trained in one set of ranks."""
    results: dict[str, dict[str, list[float]]] = {}
    for name, task in tasks().items():
        world.channel.taps[:] = [partial(keep, into=results.setdefault(name, {}))]
        where = folder / f"{name}-{world.size}-{spec.accumulate}"
        train(world, Job(task=task, spec=spec.with_devices(world.size), folder=where, epochs=2))
        world.barrier()
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return losses_of(NullWorld(), mh.Single(deterministic=True), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("size", "accumulate"), [(1, 3), (2, 3), (3, 1), (4, 3)])
def test_losses_are_equal_for_any_split_of_the_batch(
    size: int, accumulate: int, alone: dict[str, Any], run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """41 samples in batches of 16 divide by no number of replicas, and the last batch leaves some without any."""
    spec = mh.Mirrored(accumulate=accumulate, deterministic=True)
    work = partial(losses_of, spec=spec, folder=tmp_path)
    found = work(NullWorld()) if size == 1 else run_ranks(work, size)[0]
    for name, losses in alone.items():
        assert found[name].keys() == losses.keys()
        for key, values in losses.items():
            assert len(values) == 6
            np.testing.assert_allclose(found[name][key], values, rtol=1e-5, err_msg=f"{name} {key}")


def test_dropout_is_active_and_recompute_keeps_the_same_losses(alone: dict[str, Any], tmp_path: Path) -> None:
    np.testing.assert_allclose(alone["again"]["loss"], alone["gpt"]["loss"], rtol=1e-6)
    without = mh.fit(
        gpt(p=0.0), mh.Single(), epochs=2, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    native = mh.fit(gpt(), mh.Single(), epochs=2, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    for other in (without, native):
        assert np.abs(np.subtract(other.losses, alone["gpt"]["loss"])).max() > 1e-3


@pytest.mark.parametrize(("before", "after"), [("cpu*2", "cpu*3"), ("cpu*3", "cpu"), ("cpu", "cpu*2")])
def test_mid_epoch_resume_on_other_number_of_replicas_keeps_losses(
    before: str, after: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"epochs": 2, "folder": tmp_path, "name": "gpt", "progress": False}
    stopped = mh.fit(gpt(), **fit_options(deterministic=True, on=before, callbacks=[StopAt(2)], **settings))
    assert len(stopped.losses) == 2
    resumed = mh.fit(gpt(), **fit_options(deterministic=True, on=after, resume=True, **settings))
    np.testing.assert_allclose(resumed.losses, alone["gpt"]["loss"], rtol=1e-5)


def test_per_replica_padding_length_does_not_change_losses(tmp_path: Path) -> None:
    """A replica pads its own rows only, so its tensors are shorter than those of the whole batch."""

    def pad(rows: list[Tensor]) -> Tensor:
        longest = max(int((row != 0).sum()) for row in rows)
        return torch.stack(rows)[:, :longest]

    task = gpt(data=Texts(), collate=pad, loss=token_loss)
    one, three = (
        mh.fit(
            task,
            on=on,
            epochs=2,
            folder=tmp_path,
            options=[mh.options.Equality(deterministic=True), mh.options.Display(progress=False)],
        )
        for on in ("cpu", "cpu*3")
    )
    np.testing.assert_allclose(three.losses, one.losses, rtol=1e-5)


def test_validation_metrics_do_not_depend_on_number_of_replicas(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) + torch.randn(len(batch[0]), 5), batch[1])

    data = (torch.randn(41, 12, generator=generator(0)), torch.randint(0, 5, (41,), generator=generator(1)))
    task = problem("mlp").replace(
        model=lambda: nn.Sequential(nn.Linear(12, 5), nn.Dropout(0.3)), loss=loss, data=data, valid=data
    )
    runs = [
        mh.fit(
            task,
            on=on,
            folder=tmp_path,
            options=[mh.options.Equality(deterministic=True), mh.options.Display(progress=False)],
        )
        for on in ("cpu", "cpu*3")
    ]
    assert runs[0].metrics.keys() == {"loss", "valid_loss"}
    for name, value in runs[0].metrics.items():
        assert runs[1].metrics[name] == pytest.approx(value, rel=1e-5)
    assert "dropout draws different numbers" not in (runs[1].path / "events.jsonl").read_text()
    assert runs[1].record["spec"] == {"replicas": 3, "deterministic": True}


def own_loop(hand: mh.Hand) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 5))
    model, _ = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = problem("mlp").data
    losses = []
    for batch in hand.batches(data, 16, epochs=2):
        hand.backward(classify(model, batch))
        hand.step()
        losses.append(hand.loss)
    before = torch.get_rng_state()
    model(data[0])
    assert torch.equal(before, torch.get_rng_state()), "torch's own generator stays as it is"
    return losses


def test_custom_training_loop_losses_do_not_depend_on_number_of_replicas() -> None:
    one, three = (mh.launch(own_loop, on=on, deterministic=True, progress=False)[0] for on in ("cpu", "cpu*3"))
    np.testing.assert_allclose(three, one, rtol=1e-5)
    native = mh.launch(own_loop_natively, on="cpu", progress=False)[0]
    assert np.abs(np.subtract(native, one)).max() > 1e-3


def own_loop_natively(hand: mh.Hand) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 5))
    model, _ = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for batch in hand.batches(problem("mlp").data, 16, epochs=2):
        hand.backward(classify(model, batch))
        hand.step()
        losses.append(hand.loss)
    return losses


def test_unsupported_random_operation_is_rejected(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.poisson(torch.ones(len(batch[0]), 5)) if model.training else 0.0
        return F.cross_entropy(model(batch[0]) + noise, batch[1])

    task = problem("mlp").replace(loss=loss)
    with pytest.raises(ValueError, match="needs layout-free random operations, but got torch.poisson"):
        mh.fit(
            task,
            on="cpu",
            folder=tmp_path,
            options=[mh.options.Equality(deterministic=True), mh.options.Display(progress=False)],
        )


def test_untracked_random_operation_logs_a_notice(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.ops.aten.randn.default([len(batch[0]), 5]) if model.training else 0.0
        return F.cross_entropy(model(batch[0]) + noise, batch[1])

    told = {}
    for name, made in {"stray": problem("mlp").replace(loss=loss), "clean": tasks()["noisy"]}.items():
        run = mh.fit(
            made,
            on="cpu",
            folder=tmp_path,
            name=name,
            options=[mh.options.Equality(deterministic=True), mh.options.Display(progress=False)],
        )
        told[name] = (run.path / "events.jsonl").read_text().count("deterministic=True does not know")
    assert told == {"stray": 1, "clean": 0}
