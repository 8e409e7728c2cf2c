"""Context parallelism: sequences split over ranks give the steps of one device, or are refused before training."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.context import outcomes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.core import StrategyError, StrategySpec, UsageError
from manyhands.distributed import NullWorld, World
from manyhands.strategies import require_built
from manyhands.training.step_comparison import compare
from manyhands.training.trial_steps import plan_of, take_steps

from .context_networks import LENGTH, NETWORKS, WIDTH, Encoder, HandWritten, data, shifted, task_of

CLOSE = 1e-9


def errors(world: World, names: list[str], spec: StrategySpec) -> dict[str, str]:
    """Return the first tensor of each network that differs from one device; empty where none does."""
    spec, found = spec.with_devices(world.size), {}
    for name in names:
        task = NETWORKS[name]()
        plan = plan_of(task, spec)
        parts = take_steps(world, task, spec, plan)
        if world.is_first:
            whole = take_steps(NullWorld(), task, mh.Single(), plan)
            differences = compare(whole, parts)
            odd = [d for d in differences if d.is_real or (d.what.startswith("the gradient") and d.error > CLOSE)]
            found[name] = next((f"{each.what} {each.error:.1e}" for each in odd), "")
        world.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_sequences_give_the_steps_of_one_device(size: int, run_ranks: Any) -> None:
    found = run_ranks(partial(errors, names=list(NETWORKS), spec=mh.ContextParallel(size)), size)[0]
    assert found == dict.fromkeys(NETWORKS, "")


SETTINGS = {
    "replicas": mh.Mirrored(2) * mh.ContextParallel(2),
    "recompute": mh.ContextParallel(4, recompute="blocks"),
    "accumulate": mh.ContextParallel(2, accumulate=2, replicas=2),
}


@pytest.mark.parametrize("spec", SETTINGS.values(), ids=list(SETTINGS))
def test_split_sequences_combine_with_other_settings(spec: StrategySpec, run_ranks: Any) -> None:
    names = ["learned positions", "documents", "encoder"]
    assert run_ranks(partial(errors, names=names, spec=spec), 4)[0] == dict.fromkeys(names, "")


class ChannelsFirst(Encoder):
    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2), is_padding)


def channels_first(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1] == 0), batch[2])


def channel_errors(world: World) -> dict[str, str]:
    tokens, inputs, classes = data()
    task = task_of(ChannelsFirst, channels_first).replace(data=(inputs.transpose(1, 2).contiguous(), tokens, classes))
    NETWORKS["channels first"] = lambda: task
    return errors(world, ["channels first"], mh.ContextParallel(world.size, sequence_dim=2))


def test_sequence_dim_names_the_dim_of_inputs_that_is_split(run_ranks: Any) -> None:
    assert run_ranks(channel_errors, 2)[0] == {"channels first": ""}


def narrow_losses(world: World) -> list[float]:
    """Return losses of the first steps in bfloat16, over the ranks and on one device."""
    task = NETWORKS["rotary"]()
    spec = mh.ContextParallel(world.size, precision="bf16")
    plan = plan_of(task, spec)
    found = [take_steps(world, task, spec, plan, precision="bf16")]
    found += [take_steps(NullWorld(), task, mh.Single(), plan, precision="bf16")]
    return [step.losses["loss"] for record in found for step in record.steps]


def test_split_sequences_in_bfloat16_are_as_close_as_it_rounds(run_ranks: Any) -> None:
    first, second, *alone = run_ranks(narrow_losses, 2)[0]
    assert [first, second] == pytest.approx(alone, rel=0.02)


def test_transformers_give_the_steps_of_one_device(run_ranks: Any) -> None:
    names = ["gpt2", "llama", "gemma2", "bloom", "opt", "bert", "t5", "mixtral"]
    assert run_ranks(partial(outcomes, names=names), 2)[0] == dict.fromkeys(names, "")


def test_explain_names_what_is_computed_on_whole_sequences() -> None:
    lines = mh.explain(NETWORKS["convolution and recurrence"](), mh.ContextParallel(2), on="cpu*2").lines()
    assert any(
        "conv1d in near is computed on whole sequences on every rank (context_networks.py" in one for one in lines
    )
    assert any("gru in memory" in one for one in lines)


def test_check_compares_split_sequences_with_one_device(engine: Any) -> None:
    assert mh.check(NETWORKS["documents"](), mh.ContextParallel(2), on="cpu*2").equal


class Dropped(nn.Module):
    """Dropout of activations and of attention weights, which are gathered for it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(F.dropout(self.tokens(tokens), 0.1, self.training)))


def drawn(world: World) -> tuple[list[str], bool, list[float]]:
    """Train with random numbers of torch; return what differs, if losses are finite, and what ranks draw next."""
    task = task_of(Dropped, shifted)
    hand = mh.Hand(world, mh.ContextParallel(world.size))
    hand.build(task)
    hand.reader.seed(0)
    losses = []
    for batch in hand.batches(task.data, 3):
        for part in hand.accumulate(batch):
            with hand.scope():
                value = hand.replica.loss(shifted, part)
            hand.backward(value)
        hand.step()
        losses.append(hand.loss)
    found = hand.replica.differences()
    hand.close()
    return found, all(map(math.isfinite, losses)), world.gather_objects(torch.rand(()).item())


def test_ranks_stay_equal_where_they_draw_different_numbers(run_ranks: Any) -> None:
    for differing, is_finite, following in run_ranks(drawn, 3):
        assert differing == []
        assert is_finite
        assert len(set(following)) == 1


class OwnFunction(torch.autograd.Function):
    """A backward that is not linear: it limits the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-4, 1e-4) * 2


class Limited(HandWritten):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + OwnFunction.apply(self.tokens(tokens)).sum(-1, keepdim=True)


class InPlace(HandWritten):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x[:, ::2] = 0.0
        return self.head(self.blocks[0](x))


ODD = {"own function": lambda: task_of(Limited, shifted), "in place": lambda: task_of(InPlace, shifted)}


def odd_errors(world: World) -> dict[str, str]:
    NETWORKS.update(ODD)
    return errors(world, list(ODD), mh.ContextParallel(world.size))


def test_own_backwards_and_changes_of_some_tokens_are_computed_on_whole_sequences(run_ranks: Any) -> None:
    assert run_ranks(odd_errors, 3)[0] == dict.fromkeys(ODD, "")


class WithHook(HandWritten):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return logits


class Tokenwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def penalty(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    loss = shifted(model, batch)
    (slope,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    return loss + slope.square().sum()


class Reentrant(HandWritten):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(checkpoint(self.blocks[0], x, use_reentrant=True) + self.blocks[1](x))


def normed() -> nn.Module:
    model = HandWritten()
    model.norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (-1, LENGTH)))
    return model


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "hook": (WithHook, shifted, "register_hook, in test_context.py:.*logits.register_hook"),
    "no attention": (Tokenwise, shifted, "needs a network with attention"),
    "penalty": (HandWritten, penalty, r"autograd.grad .* but got test_context.py:\d+: \(slope,\) ="),
    "reentrant": (Reentrant, shifted, "within another backward, computes a part of the gradient"),
    "batch norm": (normed, shifted, "norm.1, a BatchNorm1d"),
}


def refusals(world: World) -> dict[str, str]:
    found = {}
    for name, (model, loss, _) in REFUSED.items():
        task = task_of(model, loss)
        try:
            take_steps(world, task, mh.ContextParallel(world.size), plan_of(task, mh.ContextParallel(world.size)))
            found[name] = ""
        except UsageError as error:
            found[name] = str(error)
        world.barrier()
    return found


def test_networks_that_cannot_be_split_are_refused_by_name_and_line(run_ranks: Any) -> None:
    import re

    found = run_ranks(refusals, 2)[0]
    for name, (_, _, reason) in REFUSED.items():
        assert re.search(reason, found[name]), f"{name}: {found[name] or 'was trained'}"


@pytest.mark.parametrize(
    "other",
    [
        {"shards": 2},
        {"tensor": 2},
        {"stages": 2},
        {"replicas": 2, "sync": "bf16"},
        {"capture": "graph"},
        {"offload": "optimizer"},
    ],
)
def test_combinations_that_are_not_supported_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="context parallelism can be combined with replicas"):
        require_built(dataclasses.replace(mh.ContextParallel(2), **other))


def test_text_of_a_strategy_names_the_axis() -> None:
    assert StrategySpec.parse("cp=4") == mh.ContextParallel(4)
    assert StrategySpec.parse("contextparallel") == mh.ContextParallel()
    assert str(mh.Mirrored(2) * mh.ContextParallel(3, sequence_dim=2)) == "replicas=2,context=3,sequence_dim=2"
    assert (mh.Mirrored(2) * mh.ContextParallel(3)).axes == {"replicas": 2, "context": 3}
