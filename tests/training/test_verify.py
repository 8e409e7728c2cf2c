"""Verification before training: a changed result is refused with its line, and ordinary networks train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import DataError, LossNotFinite, StrategySpec, TaskError, as_spec, read_events
from manyhands.data import as_source
from manyhands.training import verify
from manyhands.training.trial_rows import choose_rows

from ..grouped_options import fit_options
from .problems import classify, generator, mlp, problem
from .silent import ORDINARY, SILENT, Tokens, ignoring, noise, norms, spectral, task


def fit(made: mh.Task, folder: Path, strategy: StrategySpec | str = "mirrored", **settings: Any) -> mh.Run:
    on = "cpu" if as_spec(strategy).num_devices == 1 else "cpu*2"
    return mh.fit(
        made, strategy, **fit_options(on=on, folder=folder, progress=False, timeout=60, **{"steps": 3, **settings})
    )


def events(run: mh.Run, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == kind]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SILENT)
def test_loss_changed_by_accumulation_is_rejected_with_its_operation(name: str, tmp_path: Path) -> None:
    made, operation = SILENT[name]
    with pytest.raises(TaskError, match=f"a step must be the same as on one device.*{operation}"):
        fit(made, tmp_path, mh.Single(accumulate=2))
    assert not list(tmp_path.iterdir()), "nothing was trained"
    verdict = mh.check(made, mh.Single(accumulate=2), on="cpu")
    assert verdict.outcome == "different"
    assert verdict.error > 1e-6
    assert verdict.remedy


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("a router's balance loss", mh.Mirrored(2)),
        ("padding in late rows", mh.Sharded(2)),
        ("hard examples", mh.Pipeline(2, microbatches=2)),
        ("hard examples", mh.ParameterServer(workers=2)),
    ],
    ids=str,
)
def test_loss_changed_by_a_strategy_is_rejected_before_training(
    name: str, strategy: StrategySpec, tmp_path: Path
) -> None:
    made, operation = SILENT[name]
    with pytest.raises(TaskError, match=operation):
        fit(made, tmp_path, strategy)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_fails_on_a_part_is_refused(tmp_path: Path) -> None:
    def hardest(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").topk(8).values.mean()

    with pytest.raises(
        TaskError, match=r"selected index k out of range, on a part of the batch, at test_verify.py:\d+"
    ):
        fit(task(loss=hardest), tmp_path)


class Wrapping(torch.optim.Optimizer):
    """Two optimizers in one object: matrices and the rest."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        super().__init__(parameters, {"lr": 0.1})
        self.inner = [
            torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.1, momentum=0.9),
            torch.optim.AdamW([p for p in parameters if p.dim() == 1], lr=0.01),
        ]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner:
            optimizer.step()


def test_wrapping_optimizer_is_rejected_on_parameter_servers(tmp_path: Path) -> None:
    made = task(optimizer=lambda model: Wrapping(model))
    servers = mh.ParameterServer(servers=2, workers=2)
    for verb in (lambda: mh.check(made, servers, on="cpu*2"), lambda: fit(made, tmp_path, servers)):
        with pytest.raises(TaskError, match=r"which steps SGD, AdamW inside it. Return them as a list"):
            verb()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("share", "outcome"), [(0.0, "equal"), (1e-3, "different")])
def test_float32_operations_are_compared_within_rounding_error(share: float, outcome: str) -> None:
    def narrow(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0]).float()
        balance = scores.softmax(-1).mean(0).square().sum()
        return F.cross_entropy(scores, batch[1]) + share * balance

    assert mh.check(task(loss=narrow), mh.Single(accumulate=2), on="cpu").outcome == outcome


def test_micro_batch_without_valid_targets_is_reported_as_a_difference(tmp_path: Path) -> None:
    tokens = torch.randint(1, 20, (40, 5), generator=generator(0))
    tokens[20:] = 0
    made = task(Tokens, ignoring, data=tokens, batch_size=4, shuffle=False)
    verdict = mh.check(made, mh.Mirrored(2), on="cpu*2")
    assert verdict.outcome == "different"
    assert "cross_entropy" in verdict.why
    half = made.replace(data=torch.cat([tokens[:2], tokens[20:22]]))
    with pytest.raises(LossNotFinite, match=r"1 of 2 parts of the batch is not finite.*mh.mean\(total, count\)"):
        fit(half, tmp_path, mh.Single(accumulate=2), verify=False)


# -- what is not refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDINARY)
def test_verification_passes_ordinary_networks_without_changing_training(name: str, tmp_path: Path) -> None:
    strategy = mh.Mirrored(2) if name in ("norms and dropout", "noise", "frozen") else mh.Single(accumulate=3)
    run = fit(ORDINARY[name], tmp_path, strategy)
    assert run.verdict == "equal"
    plain = fit(ORDINARY[name], tmp_path, strategy, verify=False)
    assert plain.verdict == "not verified, because verify=False was passed"
    assert run.losses == plain.losses
    ours, theirs = run.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("strategy", [mh.Sharded(2), mh.TensorParallel(2), mh.ParameterServer(workers=2)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_verification_passes_for_sharded_tensor_and_parameter_server(
    strategy: StrategySpec, clip: float | None, tmp_path: Path
) -> None:
    assert fit(ORDINARY["adam"].replace(clip=clip), tmp_path, strategy).verdict == "equal"


def test_check_handles_parameter_servers_and_a_part_with_zero_count() -> None:
    task = ORDINARY["counted"].replace(schedule=lambda step, total: 1 - step / total)
    verdict = mh.check(task, mh.ParameterServer(workers=2), on="cpu*2")
    assert verdict, str(verdict)


def test_check_compares_complex_weights() -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(12, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.turn.dtype) @ self.turn

    def sizes(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).abs(), batch[1])

    def coupled(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0])
        return y.real.square().mean() + y.imag.std()

    assert mh.check(task(Phase, sizes), mh.Single(accumulate=2), on="cpu")
    assert mh.check(task(Phase, coupled), mh.Single(accumulate=2), on="cpu").outcome == "different"


# -- micro-batches ----------------------------------------------------------------------------------------------------


def test_micro_batch_statistics_need_explicit_batch_stats_setting(tmp_path: Path) -> None:
    made = problem("cnn", "adamw")
    for strategy in (mh.Single(accumulate=2), mh.Pipeline(2, microbatches=2)):
        with pytest.raises(TaskError, match=r'norm, of type BatchNorm2d, whose statistics.*batch_stats="micro"'):
            fit(made, tmp_path, strategy)
    assert fit(made, tmp_path, mh.Single(accumulate=2, batch_stats="micro")).verdict == "equal"
    with pytest.raises(TaskError, match=r"of a worker's part\. batch_stats=\"local\""):
        fit(made, tmp_path, mh.ParameterServer(workers=2))


class Following(nn.Module):
    """Counts its steps, and follows the mean of its inputs, which its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = spectral()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return self.net(x) + 0.1 * self.steps


def test_buffers_under_accumulation_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    made = task(Following)
    whole, parts = (
        fit(made, tmp_path, mh.Single(accumulate=count, precision="fp64"), epochs=2, steps=6) for count in (1, 3)
    )
    assert parts.verdict == "equal"
    assert int(parts.state_dict()["steps"]) == 6
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-10, atol=1e-12)


# -- the record -------------------------------------------------------------------------------------------------------


def test_verdict_is_saved_in_run_record_and_events(tmp_path: Path) -> None:
    run = fit(ORDINARY["adam"], tmp_path)
    record = json.loads((run.path / "run.json").read_text())
    assert record["verdict"]["outcome"] == "equal"
    assert mh.Run(run.path).verdict == "equal"
    assert [entry["text"] for entry in events(run, "verdict")] == [
        "verified: replicas=2 takes the same first steps as one device"
    ]
    assert fit(ORDINARY["adam"], tmp_path, mh.Single()).record["verdict"]["why"] == "nothing is split"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (problem("gan"), "the task has step="),
        (
            task(data=noise, batch_size=6),
            "the data is a stream, of which the first 12 samples were compared and are equal",
        ),
        (
            task(model=lambda: nn.Sequential(Strict(), mlp())),
            "could not be trained on one device (RuntimeError: this network takes 6 rows)",
        ),
    ],
    ids=["a step", "a stream", "a size"],
)
def test_unverifiable_task_records_the_reason(made: mh.Task, why: str, tmp_path: Path) -> None:
    run = fit(made, tmp_path, mh.Single(accumulate=2), steps=1)
    assert run.verdict.startswith("not verified, because ")
    assert why in run.verdict


class Strict(nn.Module):
    """Cannot be trained on a whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) != 6:
            raise RuntimeError("this network takes 6 rows")
        return x


def test_a_large_network_is_compared_by_its_loss_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MOST_SECONDS", 1e-9)
    assert "a trial of 4 samples takes longer than" in fit(ORDINARY["adam"], tmp_path, mh.Single(accumulate=2)).verdict
    monkeypatch.setitem(verify.MOST_PARAMETERS, "cpu", 100)
    run = fit(ORDINARY["adam"], tmp_path, mh.Single(accumulate=2))
    assert "parameters, and a trial of more than 100 takes long" in run.verdict
    with pytest.raises(TaskError, match="a loss must be a mean over the batch's samples.*for their halves together"):
        fit(SILENT["a contrastive loss"][0], tmp_path, mh.Single(accumulate=2))


def test_nan_on_one_device_gives_verdict_not_verified() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) * 0 - 1).log().mean()

    verdict = mh.check(task(loss=broken), mh.Single(accumulate=2), on="cpu")
    assert verdict.outcome == "not verified"
    assert not verdict
    assert "log at test_verify.py" in verdict.why


# -- rows -------------------------------------------------------------------------------------------------------------


def test_verification_rows_span_the_data_and_separate_padded_rows() -> None:
    tokens = torch.randint(1, 20, (1000, 6), generator=generator(0))
    tokens[900:, 2:] = 0
    first, second = choose_rows(as_source(tokens), 32, parts=2, seed=0, most=16)
    assert (len(first), len(second)) == (16, 8), "1000 rows leave a ragged batch of 8"
    padded = [row >= 900 for row in first]
    assert not any(padded[:8])
    assert all(padded[8:])
    assert max(second) - min(second) > 500


@pytest.mark.parametrize("seed", range(8))
def test_every_compared_step_has_a_row_that_counts_where_most_rows_are_padding(seed: int) -> None:
    targets = torch.randint(0, 11, (41, 4)).masked_fill((torch.arange(41) % 10 > 0)[:, None], -100)
    for rows in choose_rows(as_source(targets), 16, parts=2, seed=seed, most=64):
        assert (targets[rows] != -100).any()


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"data": (torch.randn(40, 12), torch.arange(40) % 7)},
            r"a target must be the index of a class.*but got [56] in .*samples.*. Give the last layer at least [67]",
        ),
        (
            {"data": (np.random.default_rng(0).normal(size=(40, 12)), np.arange(40) % 5)},
            r"batch\[0\] of torch.float64.*Convert the data, x.astype\('float32'\)",
        ),
    ],
    ids=["a target", "a type"],
)
def test_invalid_targets_and_dtypes_raise_data_error_with_a_remedy(changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text):
        fit(task(**changes), tmp_path, mh.Single())


def test_invalid_target_in_a_late_step_names_its_sample(tmp_path: Path) -> None:
    labels = torch.zeros(40, dtype=torch.long)
    labels[31] = 6
    made = task(data=(torch.randn(40, 12), labels), batch_size=10, shuffle=False)
    with pytest.raises(DataError, match="6 in sample 31 of step 4"):
        fit(made, tmp_path, mh.Single(), steps=4)


def test_verification_restores_rng_state_and_loss_state(tmp_path: Path) -> None:
    class Centred(nn.Module):
        """A loss with a state of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            self.calls += 1
            self.seen += 1
            return classify(model, batch)

    loss = Centred()
    torch.manual_seed(7)
    wanted = torch.rand(2)
    torch.manual_seed(7)
    counts = []
    for verifies in (True, False):
        before = loss.calls, float(loss.seen)
        made = task(norms, lambda model, batch: loss(model, batch))
        fit(made, tmp_path, mh.Single(accumulate=2, batch_stats="micro"), verify=verifies)
        counts.append((loss.calls - before[0], float(loss.seen) - before[1]))
    assert counts[0] == counts[1]
    assert torch.equal(torch.rand(2), wanted)
    assert torch.get_default_dtype() is torch.float32
