"""A partitioned network equals the whole one: losses, weights, dropout, checkpoints under other layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import RunError
from manyhands.distributed import NullWorld, World
from manyhands.storage import Checkpoint, CheckpointStore
from manyhands.training import CHECKPOINTS, Job, train
from tests.strategies.networks import Scribble, task

from ..grouped_options import fit_options
from .problems import generator
from .test_equality import keep

Case = tuple[str, mh.StrategySpec]
TOWERS = {"tower_a.*": "cpu:0", "tower_b.*": 1}


class Thaw(mh.Callback):
    """Sets a layer free in the middle of training, freezes another, cools down; keeps what validation measured."""

    def __init__(self) -> None:
        self.measured: list[float] = []

    def on_epoch(self, hand: mh.Hand, metrics: dict[str, float]) -> None:
        self.measured += metrics.values()

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == 2:
            hand.model.first.requires_grad_(True)
            hand.model.middle.requires_grad_(False)
            hand.model.temperature = 0.5


def trained(world: World, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Trains several tasks in one set of ranks; their losses and weights."""
    results = {}
    for label, (name, spec) in cases.items():
        losses: dict[str, list[float]] = {}
        world.channel.taps[:] = [partial(keep, into=losses)]
        # Each size of a call is traced, so what takes longest has batches of one size.
        rows = 16 if name == "translator" or "tensor" in label or "shards" in label else 21
        made = task(name, rows, dropout=0.2 if spec.deterministic else 0.0)
        where = folder / f"{label.replace(' ', '-').replace('*', 'x')}"
        thaw = Thaw()
        if name == "shifting":
            made = made.replace(valid=made.data)
        callbacks = [thaw] if name == "shifting" else []
        train(
            world,
            Job(
                task=made, spec=spec.with_devices(world.size), folder=where, epochs=2, callbacks=callbacks, verify=False
            ),
        )
        losses["valid"] = thaw.measured
        world.barrier()
        results[label] = (losses, CheckpointStore(where / CHECKPOINTS).load().model)
    return results


def f64(spec: mh.StrategySpec, **settings: Any) -> mh.StrategySpec:
    return dataclasses.replace(spec, precision="fp64", **settings)


TWO: dict[str, Case] = {
    "mlp, placed": ("mlp", f64(mh.Placed())),
    "towers, by a map": ("towers", f64(mh.Placed(TOWERS))),
    "translator, automatic": ("translator", f64(mh.Placed())),
    "residual, placed": ("residual", f64(mh.Placed({"blocks.1": 1, "*": 0}))),
    "residual, one microbatch": ("residual", f64(mh.Pipeline(microbatches=1))),
    "gpt, 1f1b": ("gpt", f64(mh.Pipeline(microbatches=3))),
    "deep, gpipe": ("deep", f64(mh.Pipeline(microbatches=4, schedule="gpipe"), accumulate=2)),
    "deep, interleaved": ("deep", f64(mh.Pipeline(microbatches=4, schedule="interleaved"))),
    "translator, zero-bubble": ("translator", f64(mh.Pipeline(microbatches=4, schedule="zero-bubble"))),
    "deep, recomputed": ("deep", f64(mh.Pipeline(microbatches=2, recompute="blocks", deterministic=True))),
    "deep, dropout": ("deep", f64(mh.Placed({"blocks.1": 0, "blocks.2": 1}, deterministic=True))),
    "towers, fp32": ("towers", mh.Placed(TOWERS)),
    "shifting, interleaved": ("shifting", f64(mh.Pipeline(microbatches=2, schedule="interleaved"))),
}
FOUR: dict[str, Case] = {
    "deep, four stages": ("deep", f64(mh.Pipeline(4, microbatches=4))),
    "residual, times replicas": ("residual", f64(mh.Pipeline(2, microbatches=1, replicas=2))),
    "towers, times replicas": ("towers", f64(mh.Placed({"tower_a": 0, "tower_b": 1}, replicas=2))),
    "gpt, placed on four": ("gpt", f64(mh.Placed(devices=4))),
    "gpt, tensor": ("gpt", f64(mh.TensorParallel(2) * mh.Pipeline(2, microbatches=2))),
    "residual, tensor, recomputed": (
        "residual", f64(mh.TensorParallel(2) * mh.Pipeline(2, microbatches=1, recompute="*"))
    ),
    "deep, tensor, dropout": (
        "deep",
        f64(mh.TensorParallel(2) * mh.Pipeline(2, microbatches=2, schedule="interleaved", deterministic=True)),
    ),
    "shifting, times replicas": ("shifting", f64(mh.Pipeline(2, microbatches=2, replicas=2))),
    "residual, shards": ("residual", f64(mh.Sharded(2) * mh.Pipeline(2, microbatches=1))),
    "deep, shards": ("deep", f64(mh.Sharded(2) * mh.Pipeline(2, microbatches=2, schedule="zero-bubble"), accumulate=2)),
}  # fmt: skip
EIGHT: dict[str, Case] = {
    "mlp, tensor, replicas": ("mlp", f64(mh.StrategySpec.parse("tensor=2,stages=2,replicas=2,microbatches=2"))),
    "deep, shards, tensor": ("deep", f64(mh.StrategySpec(shards=2, tensor=2, stages=2, microbatches=2))),
}


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR), (8, EIGHT)], ids=["2 ranks", "4 ranks", "8 ranks"])
def test_model_parallel_layouts_equal_single_device(
    size: int, cases: dict[str, Case], run_ranks: Any, tmp_path: Path
) -> None:
    results = run_ranks(partial(trained, cases=cases, folder=tmp_path / "cut"), size)[0]
    for label, (name, spec) in cases.items():
        plain = mh.StrategySpec(precision=spec.precision, accumulate=spec.accumulate, deterministic=spec.deterministic)
        losses, weights = trained(NullWorld(), {label: (name, plain)}, tmp_path / "whole")[label]
        found, found_weights = results[label]
        for kind, values in losses.items():
            rtol = 1e-5 if spec.precision == "fp32" else 1e-9
            np.testing.assert_allclose(found[kind], values, rtol=rtol, err_msg=f"{label}: {kind}")
        assert list(found_weights) == list(weights)
        for key, value in weights.items() if spec.precision == "fp64" else ():
            torch.testing.assert_close(found_weights[key], value, rtol=0, atol=1e-9, msg=f"{label}: {key}")


def resumed(world: World, layouts: dict[str, mh.StrategySpec], folder: Path) -> dict[str, Any]:
    """Take a step under each layout, resuming from the previous one's checkpoint; return what was saved, by name."""
    made = task("deep", rows=16).replace(ema=0.9)
    results: dict[str, Any] = {}

    def run(label: str, spec: mh.StrategySpec, where: Path, **settings: Any) -> None:
        alone = spec.num_devices == 1
        if world.is_first or not alone:
            train(NullWorld() if alone else world, Job(task=made, spec=spec, folder=where, verify=False, **settings))
        world.barrier()
        if world.is_first:
            results[label] = contents(CheckpointStore(where / CHECKPOINTS).load())
        world.barrier()

    run("whole", layouts["single"], folder / "whole", epochs=2)
    for label, spec in layouts.items():
        run(label, spec, folder / label, steps=1)
    for first, then in pairwise([*layouts, "single"]):
        run(f"{first} to {then}", layouts[then], folder / first, epochs=2, resume=True)
    return results


def contents(saved: Checkpoint) -> dict[str, Any]:
    """What has to be the same under every layout."""
    slots = {key: optimizer["state"] for key, optimizer in saved.optimizers.items()}
    return {"model": saved.model, "averages": saved.averages, "optimizers": slots}


def assert_all_alike(results: dict[str, Any]) -> None:
    """Checkpoints of all layouts are equal, so a run can resume from any of them."""
    for label, found in results.items():
        wanted = results["whole" if " to " in label or label == "whole" else "single"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9, msg=lambda text, at=label: f"{at}: {text}")


def test_checkpoint_of_any_layout_resumes_under_every_other_layout(run_ranks: Any, tmp_path: Path) -> None:
    layouts = {
        "single": mh.Single(precision="fp64"),
        "mirrored": mh.Mirrored(2, precision="fp64"),
        "sharded": mh.Sharded(2, precision="fp64"),
        "gradients and optimizer state": mh.Sharded(2, sharding="optimizer", precision="fp64"),
        "tensor": mh.TensorParallel(2, precision="fp64"),
        "pipeline": mh.Pipeline(2, microbatches=2, precision="fp64"),
        "placed": mh.Placed({"blocks.0": 0, "blocks.1": 1, "head": 1}, precision="fp64"),
    }
    assert_all_alike(run_ranks(partial(resumed, layouts=layouts, folder=tmp_path), 2)[0])


def test_checkpoints_of_combined_layouts_resume_under_each_other(run_ranks: Any, tmp_path: Path) -> None:
    layouts = {
        "single": mh.Single(precision="fp64"),
        "tensor and stages": mh.TensorParallel(2, precision="fp64") * mh.Pipeline(2, microbatches=2),
        "shards and stages": mh.Sharded(2, precision="fp64") * mh.Pipeline(2, microbatches=2),
        "shards and replicas": mh.Sharded(2, replicas=2, precision="fp64"),
    }
    assert_all_alike(run_ranks(partial(resumed, layouts=layouts, folder=tmp_path), 4)[0])


def test_place_on_network_matches_single_device_in_fit_evaluate_and_predict(tmp_path: Path) -> None:
    def marked() -> nn.Module:
        with mh.strategies.place_on("cpu:1"):
            first = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.BatchNorm1d(16))
        with mh.strategies.place_on(0):
            return nn.Sequential(first, nn.Linear(16, 5))

    made = task("deep", rows=24).replace(
        model=marked,
        ema=0.8,
        not_finite="skip",
        metrics={"top": lambda out, batch: (out.argmax(1) == batch[1]).double().mean()},
    )
    made = made.replace(valid=made.data)
    settings: dict[str, Any] = {"folder": tmp_path, "progress": False, "timeout": 60, "epochs": 2}
    alone = mh.fit(made, mh.Single(precision="fp64"), **fit_options(on="cpu", **settings))
    cut = mh.fit(made, mh.Placed(precision="fp64"), **fit_options(on="cpu*2", **settings))
    assert cut.metrics == pytest.approx(alone.metrics, rel=1e-9)
    np.testing.assert_allclose(cut.losses, alone.losses, rtol=1e-9)
    for averaged in (True, False):
        for key, value in alone.state_dict(averaged=averaged).items():
            torch.testing.assert_close(cut.state_dict(averaged=averaged)[key], value, rtol=0, atol=1e-9, msg=key)
    rows = made.data[0]
    torch.testing.assert_close(
        mh.predict(cut, rows, mh.Pipeline(2), on="cpu*2"), mh.predict(alone, rows), rtol=0, atol=1e-9
    )
    assert mh.evaluate(cut, None, mh.Placed(devices=2), on="cpu*2") == pytest.approx(mh.evaluate(alone), rel=1e-9)
    assert mh.check(made, mh.Placed(), on="cpu*2")


def scribbled(world: World, seeds: list[int]) -> list[str]:
    """Random networks with random homes: gradients of a step against the whole network's; what differs."""
    from manyhands.graph import Call
    from manyhands.strategies.first_call import Calling
    from manyhands.strategies.placed import PlacedReplica
    from manyhands.strategies.placement import Placement

    wrong = []
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model = Scribble(seed).double()
        x = torch.randn(3, 4, dtype=torch.float64)
        sum(out.square().sum() for out in model(x)).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        spec = mh.Placed(devices=world.size, precision="fp64")
        call = Call.of([x], {})
        placement = Placement(
            model, spec, world.size, world.device, contextlib.nullcontext, Calling(call, False, tuple(range(3)))
        )
        placement.settle(lambda works, draw=draw: [draw.randrange(world.size) for _ in works.units])
        placement.drop(world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = PlacedReplica(spec, world, model, {"": optimizer}, placement)
        loss = replica.loss(lambda net, batch: sum(out.square().sum() for out in net(batch)), x)
        replica.backward(loss, "", last=True)
        replica.finish("", None)
        mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in replica.gathered(mine).items():
            wanted = expected.pop(name)
            if wanted is None or not torch.allclose(gradient, wanted, rtol=0, atol=1e-12):
                wrong.append(f"seed {seed}: {name}")
        wrong += [f"seed {seed}: nothing for {name}" for name, value in expected.items() if value is not None]
        replica.close()
    return wrong


def test_random_placements_do_not_deadlock_and_match_whole_gradients(run_ranks: Any) -> None:
    assert run_ranks(partial(scribbled, seeds=list(range(8))), 3) == [[]] * 3


def test_pipeline_rank_killed_inside_microbatch_does_not_change_results(tmp_path: Path) -> None:
    made = task("deep", rows=16)
    settings: dict[str, Any] = {"folder": tmp_path, "progress": False, "timeout": 60}
    spec = mh.Pipeline(2, microbatches=2, precision="fp64")
    alone = mh.fit(made, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=2, **settings))
    mark = tmp_path / "died"

    def loss(model: Any, batch: Any) -> Tensor:
        value = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        if model.training and value.requires_grad and not mark.exists() and os.environ.get("MH_STEP") == "2":
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    class Count(mh.Callback):
        def on_step(self, hand: mh.Hand) -> None:
            os.environ["MH_STEP"] = str(hand.num_steps)

    dying = made.replace(loss=loss)
    with contextlib.suppress(RunError):
        mh.fit(
            dying, spec, **fit_options(on="cpu*2", epochs=2, name="cut", callbacks=[Count()], save_every=1, **settings)
        )
    assert mark.exists()
    run = mh.fit(dying, spec, **fit_options(on="cpu*2", epochs=2, name="cut", resume=True, **settings))
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(run.state_dict()[key], value, rtol=0, atol=1e-9, msg=key)


def test_hugging_face_models_match_single_device_under_every_split(run_ranks: Any, tmp_path: Path) -> None:
    splits = [mh.Sharded(2), mh.TensorParallel(2), mh.Pipeline(2, microbatches=2)]
    results = run_ranks(partial(split_in_turn, splits=splits, folder=tmp_path / "cut"), 2)[0]
    for name, whole in split_in_turn(NullWorld(), [mh.Single()], tmp_path / "whole").items():
        assert len(whole) == 2
        # GPT-2 computes its loss in fp32, whatever its weights are.
        np.testing.assert_allclose(results[name], whole * len(splits), rtol=1e-6, err_msg=name)


def split_in_turn(world: World, splits: list[mh.StrategySpec], folder: Path) -> dict[str, list[float]]:
    """The losses of two steps of each network under one strategy after another."""
    found = {}
    for name, made in hugging_face().items():
        losses: dict[str, list[float]] = {}
        world.channel.taps[:] = [partial(keep, into=losses)]
        for number, spec in enumerate(splits):
            train(world, Job(task=made, spec=f64(spec), folder=folder / f"{name}-{number}", steps=2))
            world.barrier()
        found[name] = losses.get("loss", [])
    return found


def hugging_face() -> dict[str, mh.Task]:
    """Real architectures with random weights: tied embeddings, an encoder and a decoder, pictures."""
    import transformers as hf

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5}
    gpt2 = hf.GPT2Config(
        vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    t5 = hf.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 99, (16, 12), generator=generator(0))
    labels = torch.randint(0, 5, (16,), generator=generator(1))
    pictures = torch.randn(16, 3, 16, 16, generator=generator(2))
    networks = {
        "gpt2": (partial(hf.GPT2LMHeadModel, gpt2), {"input_ids": ids, "labels": ids}),
        "bert": (
            partial(hf.BertForSequenceClassification, hf.BertConfig(vocab_size=100, **small, **quiet)),
            {"input_ids": ids, "labels": labels},
        ),
        "vit": (
            partial(hf.ViTForImageClassification, hf.ViTConfig(image_size=16, patch_size=8, **small, **quiet)),
            {"pixel_values": pictures, "labels": labels},
        ),
        "t5": (partial(hf.T5ForConditionalGeneration, t5), {"input_ids": ids, "labels": ids}),
    }
    return {
        name: mh.Task(
            model=model,
            loss=lambda model, batch: model(**batch).loss,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            data=data,
            batch_size=8,
        )
        for name, (model, data) in networks.items()
    }
