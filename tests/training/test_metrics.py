"""Metrics: states are merged over replicas, every sample counts once, and mistakes are refused early."""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision, MulticlassAccuracy

import manyhands as mh
from manyhands.core import StrategySpec, TaskError
from manyhands.data import as_source
from manyhands.distributed import NullWorld, Opaque, World
from manyhands.testing import run_threads
from manyhands.training import Hand, check_metrics, evaluate
from manyhands.training.metrics import MetricSums, OwnMeter, compute, parted

from .problems import generator

INPUTS = torch.randn(23, 6, generator=generator(0))
LABELS = (INPUTS[:, 0] + torch.randn(23, generator=generator(1)) > 0).long()


class Counts:
    """A custom metric: the share of confident samples, with its own merge."""

    def __init__(self) -> None:
        self.sure = torch.zeros(())
        self.seen: list[int] = []

    def update(self, outputs: Tensor, batch: Any) -> None:
        self.sure = self.sure + (outputs > 0.6).sum()
        self.seen.append(len(batch[0]))

    def compute(self) -> dict[str, float]:
        return {"share": float(self.sure) / sum(self.seen), "seen": np.float32(sum(self.seen))}  # type: ignore[dict-item]

    def merge(self, other: Counts) -> None:
        self.sure = self.sure + other.sure
        self.seen += other.seen


class Alone:
    """A metric that cannot be joined with another."""

    def update(self, outputs: Tensor, batch: Any) -> None: ...

    def compute(self) -> float:
        return 1.0


class Running(Metric):
    """A running mean over samples, which torchmetrics declares as a mean over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("smallest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.seen = 0

    def update(self, preds: Tensor) -> None:
        self.seen += len(preds)
        self.mean += (preds.mean() - self.mean) * len(preds) / self.seen
        self.largest = torch.maximum(self.largest, preds.max())
        self.smallest = torch.minimum(self.smallest, preds.min())

    def compute(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "largest": self.largest, "smallest": self.smallest}


def network() -> nn.Module:
    """Return values that do not depend on what other threads draw."""
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    nn.init.uniform_(model[0].weight, -1, 1, generator=generator(2))
    nn.init.zeros_(model[0].bias)
    return model


def task(metrics: dict[str, Any], **changes: Any) -> mh.Task:
    return mh.Task(
        model=network,
        loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1].float()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=(INPUTS, LABELS),
        valid=(INPUTS, LABELS),
        batch_size=5,  # the last one has 3, so that one of four replicas only borrows a row
        predict=lambda model, inputs: model(inputs).sigmoid(),  # of logits torchmetrics would have to guess the kind
        metrics=metrics,
    ).replace(**changes)


def measure(made: mh.Task, world: World | None = None) -> tuple[dict[str, float], Tensor]:
    """What one replica measures with the first weights, and the outputs for all samples."""
    hand = Hand(world or NullWorld(), StrategySpec(replicas=world.size if world else 1))
    hand.build(made)
    feed = hand.reader.make_feed(as_source(made.valid), 5, shuffle=False)
    try:
        values = evaluate(hand, made, feed)
        with torch.no_grad():
            return values, hand.model(INPUTS).sigmoid()
    finally:
        feed.close()
        hand.close()


METRICS: dict[str, Any] = {
    "auc": BinaryAUROC(),
    "precision": lambda: BinaryAveragePrecision(),
    "binned": functools.partial(BinaryAUROC, thresholds=7),
    "mean": (MeanMetric, lambda outputs, batch: outputs),
    "running": (Running(), lambda outputs, batch: {"preds": outputs}),
    "both": MetricCollection([BinaryAccuracy(), BinaryAUROC()]),
    "bounds": MinMaxMetric(BinaryAccuracy()),
    "sure": Counts(),
    "plain": lambda outputs, batch: outputs.mean(),
}


def test_metric_objects_merge_over_replicas_to_the_whole_value() -> None:
    whole, outputs = measure(task(METRICS))
    assert whole["auc"] == pytest.approx(roc_auc_score(LABELS, outputs))
    assert whole["precision"] == pytest.approx(average_precision_score(LABELS, outputs))
    for name in ("mean", "running_mean", "plain"):
        assert whole[name] == pytest.approx(float(outputs.mean())), name
    assert whole["running_largest"] == float(outputs.max())
    assert whole["both_BinaryAUROC"] == whole["auc"]
    assert whole["sure_seen"] == 23
    for size in (3, 4):
        parts = run_threads(lambda world: measure(task(METRICS), world)[0], size)
        for part in parts:
            assert part == pytest.approx(whole), size
            assert part == parts[0]
    shares = [float(roc_auc_score(LABELS[rank::3], outputs[rank::3])) for rank in range(3)]
    assert sum(shares) / 3 != pytest.approx(whole["auc"], rel=1e-3)  # a mean of areas would have been seen here


def test_metrics_of_fit_and_evaluate_are_equal_on_one_and_two_ranks(tmp_path: Path) -> None:
    made = task({"auc": BinaryAUROC, "sure": Counts()})
    runs = [
        mh.fit(
            made, on=on, folder=tmp_path, options=[mh.options.Display(progress=False), mh.options.Recovery(timeout=60)]
        )
        for on in ("cpu", "cpu*2")
    ]
    for run in runs:
        with torch.no_grad():
            wanted = roc_auc_score(LABELS, run.model()(INPUTS).sigmoid())
        assert run.metrics["valid_auc"] == pytest.approx(wanted)
        assert mh.evaluate(run)["auc"] == pytest.approx(wanted)
        assert run.metrics["valid_sure_seen"] == 23
    assert runs[0].metrics == pytest.approx(runs[1].metrics)
    run = mh.Run(runs[0].path, task({"sure": Counts()}))
    assert mh.evaluate(run, on="cpu*2", strategy="mirrored")["sure_seen"] == 23


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Alone(), "over 2 replicas, but got 'it': Alone has no merge"),
        (lambda: Alone(), "over 2 replicas, but got 'it': Alone has no merge"),
        ((PearsonCorrCoef(), lambda outputs, batch: (outputs, outputs)), r"PearsonCorrCoef .* state 'mean_x'"),
        ((RunningMean(2), lambda outputs, batch: outputs), "RunningMean looks at the last batches alone"),
    ],
)
def test_unmergeable_metric_is_rejected_before_work_starts(metric: Any, message: str, tmp_path: Path) -> None:
    made = task({"it": metric})
    check_metrics(made, 1)
    with pytest.raises(TaskError, match=message):
        mh.fit(made, on="cpu*2", folder=tmp_path, options=mh.options.Display(progress=False))
    assert list(tmp_path.iterdir()) == []
    run = mh.fit(made, on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    assert "valid_it" in run.metrics
    with pytest.raises(TaskError, match=message):
        mh.evaluate(run, strategy="mirrored", on="cpu*2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"it": 3}}, "the metric 'it' must be a function, an object"),
        ({"metrics": {"it": (BinaryAUROC(),)}}, "or a pair \\(object, function\\), but got a tuple"),
        (
            {"metrics": {"it": (lambda outputs, batch: 1.0, lambda outputs, batch: ())}},
            "but got a pair whose object is of type function",
        ),
        ({"metrics": {"it": dict}}, "or return an object with update and compute, but got dict"),
        (
            {"metrics": {"it": (MulticlassAccuracy(2, average=None), lambda o, b: ((o > 0).long(), b[1]))}},
            "must compute a number, or a dict of numbers, but got a tensor of shape \\(2,\\)",
        ),
        (
            {
                "metrics": {"it": BinaryAUROC()},
                "data": {"x": INPUTS, "y": LABELS},
                "loss": lambda model, batch: model(batch["x"]).mean(),
                "predict": None,
            },
            "predictions and targets.*but got a batch of type dict. Pass a function that selects them",
        ),
    ],
)
def test_invalid_metrics_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        mh.fit(task(METRICS).replace(**changes), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))


def test_metric_object_of_the_task_is_not_modified() -> None:
    own = Counts()
    used = MetricCollection([BinaryAccuracy()])
    used.update(torch.zeros(4), torch.ones(4).long())
    first, _ = measure(task({"sure": own, "used": used}))
    again, _ = measure(task({"sure": own, "used": used, "new": BinaryAccuracy()}))
    assert again == {**first, "new": first["used_BinaryAccuracy"]}
    assert own.seen == []


def test_metric_that_needs_many_samples_logs_only_a_notice(tmp_path: Path) -> None:
    class Many(Counts):
        def compute(self) -> dict[str, float]:
            if sum(self.seen) < 20:
                raise RuntimeError("too few")
            return super().compute()

    run = mh.fit(task({"many": Many()}), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))
    assert run.metrics["valid_many_seen"] == 23
    events = (run.path / "events.jsonl").read_text()
    assert "'many' could not be computed from a few samples (RuntimeError: too few)" in events


def test_metric_inputs_outside_zero_to_one_log_a_notice(tmp_path: Path) -> None:
    """torchmetrics squashes a batch only if some number in it is beyond 0 and 1, so it depends on the split."""
    made = task(
        {"auc": BinaryAUROC(), "right": BinaryAccuracy(), "mean": (MeanMetric(), lambda outputs, batch: outputs)}
    )
    texts = {}
    for name, predict in {"logits": lambda model, inputs: 3 * model(inputs), "chances": made.predict}.items():
        run = mh.fit(
            made.replace(predict=predict),
            on="cpu",
            folder=tmp_path,
            name=name,
            options=mh.options.Display(progress=False),
        )
        texts[name] = (run.path / "events.jsonl").read_text()
    assert "the metric 'auc' gets values outside of 0 to 1: BinaryAUROC decides" in texts["logits"]
    assert "the metric 'right' gets values outside" in texts["logits"]
    assert "the metric 'mean' gets values outside" not in texts["logits"]
    assert "decides" not in texts["chances"]


class Words:
    """Keeps what is no plain data."""

    def __init__(self) -> None:
        self.counter = Counter[str]()

    def update(self, outputs: Any, batch: Any) -> None:
        self.counter["a"] += 1

    def compute(self) -> float:
        return float(self.counter["a"])

    def merge(self, other: Words) -> None:
        self.counter += other.counter


class Slots(Words):
    """Keeps something outside of its attributes' dict."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.kept = 1


def test_metric_state_is_sent_as_plain_data_where_possible() -> None:
    assert isinstance(OwnMeter("it", Counts(), None, torch.device("cpu")).pack(), dict)

    def measure(world: World) -> list[float]:
        meters = [OwnMeter("it", kind(), None, world.device) for kind in (Words, Slots)]
        assert all(isinstance(meter.pack(), Opaque) for meter in meters)
        for meter in meters:
            meter.update(None, None, 1)
        return [found for meter in meters for found in compute([meter], world).values()]

    assert run_threads(measure, 3) == [[3.0, 3.0]] * 3


def test_metrics_merge_when_some_replicas_saw_no_samples() -> None:
    def replica(world: World) -> dict[str, float]:
        _, meters = parted(task({"auc": BinaryAUROC(), "sure": Counts()}), world)
        if world.rank == 1:
            for meter in meters:
                meter.update(torch.tensor([0.1, 0.9]), (torch.zeros(2), torch.tensor([0, 1])), 2)
        return compute(meters, world)

    for values in run_threads(replica, 3):
        assert values == {"auc": 1.0, "sure_share": 0.5, "sure_seen": 2.0}


def test_mean_over_zero_items_is_nan() -> None:
    sums = MetricSums(NullWorld())
    sums.add("tokens", mh.mean(torch.tensor(0.0), 0), 4)
    sums.add("loss", torch.tensor(2.0), 4)
    means = sums.means()
    assert math.isnan(means["tokens"])
    assert means["loss"] == 2.0
