"""Training with parameter servers: equal to one device if synchronous; reported differences otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategyError, TaskError, read_events

from ..grouped_options import fit_options
from ..training.problems import problem

QUIET: dict[str, Any] = {"progress": False}


def events(run: mh.Run, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == kind]


def farthest(one: mh.Run, other: mh.Run) -> float:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.parametrize(("name", "optimizer"), [("mlp", "sgd"), ("mlp", "adamw"), ("gpt", "adamw")])
def test_synchronous_parameter_servers_match_single_device(name: str, optimizer: str, tmp_path: Path) -> None:
    task = problem(name, optimizer).replace(schedule=lambda step, total: 1 - step / (2 * total))
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=2, folder=tmp_path, name="one", **QUIET)
    )
    spec = mh.ParameterServer(servers=2, workers=3, precision="fp64", accumulate=2 if name == "mlp" else 1)
    run = mh.fit(task, spec, **fit_options(on="cpu*3", epochs=2, folder=tmp_path, name="ps", **QUIET))
    assert run.losses == pytest.approx(one.losses, rel=1e-9)
    assert farthest(one, run) <= 1e-9
    assert not run.record["changes_mathematics"]
    assert events(run, "servers")[-1]["staleness"] == {"0": 3 * run.num_steps}
    again = mh.fit(task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=3, resume=run, **QUIET))
    further = mh.fit(task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=3, resume=one, **QUIET))
    assert farthest(again, further) <= 1e-9


class Recommender(nn.Module):
    def __init__(self, optimizer: str | None = None) -> None:
        super().__init__()
        self.users = mh.strategies.Embedding(500, 4, std=0.1, optimizer=optimizer)
        self.items = mh.strategies.Embedding(300, 4, std=0.1, optimizer=optimizer)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], 1)).squeeze(1)


def rating_loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def recommender(kind: str, **settings: Any) -> mh.Task:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(0, rows, (96,), generator=generator) for rows in (500, 300)], 1)
    make = getattr(torch.optim, kind)
    return mh.Task(
        model=lambda: Recommender(**settings),
        loss=rating_loss,
        optimizer=lambda model: make(model.parameters(), lr=0.5),
        data=(ids, torch.randn(96, generator=generator)),
        valid=(ids[:10], torch.zeros(10)),
        batch_size=16,
        clip=0.7,
    )


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_embedding_rows_on_servers_match_single_device_table(optimizer: str, tmp_path: Path) -> None:
    task = recommender(optimizer)
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=2, folder=tmp_path, name="one", **QUIET)
    )
    spec = mh.ParameterServer(servers=2, workers=2, precision="fp64")
    run = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=1, folder=tmp_path, name="ps", **QUIET))
    resumed = mh.fit(
        task,
        mh.ParameterServer(servers=3, workers=1, precision="fp64"),
        **fit_options(on="cpu", epochs=2, resume=run, **QUIET),
    )
    assert resumed.losses == pytest.approx(one.losses, rel=1e-9)
    assert farthest(one, resumed) <= 1e-9
    assert resumed.metrics["valid_loss"] == pytest.approx(one.metrics["valid_loss"], rel=1e-9)


def test_untouched_rows_keep_initial_accumulator_on_resume(tmp_path: Path) -> None:
    task = recommender("Adagrad").replace(
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.5, initial_accumulator_value=0.5)
    )
    settings: dict[str, Any] = {"on": "cpu", "folder": tmp_path, **QUIET}
    one = mh.fit(task, mh.Single(precision="fp64"), **fit_options(epochs=2, name="one", **settings))
    run = mh.fit(task, mh.ParameterServer(2, 1, precision="fp64"), **fit_options(steps=2, name="ps", **settings))
    resumed = mh.fit(task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=2, resume=run, **QUIET))
    assert farthest(one, resumed) <= 1e-9


def test_optimizers_that_move_untouched_rows_are_rejected_or_logged(tmp_path: Path) -> None:
    spec = mh.ParameterServer(servers=1, workers=1)
    settings: dict[str, Any] = {"on": "cpu", "folder": tmp_path, **QUIET}
    task = recommender("SGD").replace(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(
        TaskError, match=r"users.weight with momentum=0.9, which changes all rows\. Put users.weight into"
    ):
        mh.fit(task, spec, **fit_options(**settings))
    run = mh.fit(recommender("AdamW"), spec, **fit_options(**settings))
    assert any("rows of users, items change only when" in entry["text"] for entry in events(run, "notice"))


def test_table_with_own_optimizer_resumes_on_servers_and_one_device(tmp_path: Path) -> None:
    task = recommender("SGD", optimizer="adagrad")
    spec = mh.ParameterServer(servers=2, workers=2)
    whole = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=3, folder=tmp_path, name="whole", **QUIET))
    run = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=1, folder=tmp_path, name="ps", **QUIET))
    resumed = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=3, resume=run, **QUIET))
    assert farthest(whole, resumed) <= 1e-5
    assert mh.fit(task, mh.Single(), **fit_options(on="cpu", epochs=4, resume=run, **QUIET)).num_steps == 24


MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {"staleness": None},
    "corrected": {"staleness": None, "correction": True},
    "bounded": {"staleness": 2},
    "backup": {"backup": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_and_backup_modes_log_changed_mathematics_and_converge(mode: str, tmp_path: Path) -> None:
    task = problem("mlp", "sgd", rows=160).replace(not_finite="skip")
    one = mh.fit(task, mh.Single(), **fit_options(on="cpu", epochs=4, folder=tmp_path, name="one", **QUIET))
    spec = mh.ParameterServer(servers=2, workers=3, **MODES[mode])
    run = mh.fit(task, spec, **fit_options(on="cpu*3", epochs=4, folder=tmp_path, name="ps", save_every=7, **QUIET))
    assert run.num_steps == one.num_steps == 40
    assert "changes the mathematics" in run.record["changes_mathematics"][0]
    assert any("changes the mathematics" in entry["text"] for entry in events(run, "notice"))
    told = events(run, "servers")[-1]
    ages = {int(age): count for age, count in told["staleness"].items()}
    num_gradients = {"asynchronous": 40, "corrected": 40, "bounded": 120, "backup": 80}[mode]
    assert sum(ages.values()) == told["applied"] == num_gradients
    assert run.record["servers"]["staleness"] == told["staleness"]
    if mode == "bounded":
        assert max(ages) <= 2
    if mode == "backup":
        assert set(ages) == {0}
    last, wanted = (sum(r.losses[-10:]) / 10 for r in (run, one))
    assert abs(last - wanted) < 0.25 * (one.losses[0] - wanted) + 0.05


def test_local_batch_norm_buffers_are_counted_and_averaged_on_servers(tmp_path: Path) -> None:
    task = problem("cnn", "sgd")
    spec = mh.ParameterServer(servers=2, workers=2, batch_stats="local")
    run = mh.fit(task, spec, **fit_options(on="cpu*2", folder=tmp_path, **QUIET))
    one = mh.fit(task, mh.Single(), **fit_options(on="cpu", folder=tmp_path, **QUIET))
    counts = {name: int(v) for name, v in run.state_dict().items() if name.endswith("num_batches_tracked")}
    assert counts
    assert set(counts.values()) == {one.num_steps}
    means = [name for name in run.state_dict() if name.endswith("running_mean")]
    for name in means:
        torch.testing.assert_close(run.state_dict()[name], one.state_dict()[name], rtol=0.1, atol=0.1)
    assert any("batch statistics" in entry["text"] for entry in events(run, "notice"))


def test_frozen_start_weights_reach_the_workers(tmp_path: Path) -> None:
    """Frozen weights of a run that is gone on with, not those that a worker's own network begins with."""

    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
        model[0].requires_grad_(False)
        return model

    task = problem("mlp").replace(model=frozen)
    weights = {name: torch.full_like(value, 0.3) for name, value in frozen().state_dict().items()}
    where: dict[str, Any] = {"folder": tmp_path, "start_from": weights, **QUIET}
    one = mh.fit(task, mh.Single(precision="fp64"), **fit_options(on="cpu", name="one", **where))
    spec = mh.ParameterServer(servers=2, workers=2, precision="fp64")
    run = mh.fit(task, spec, **fit_options(on="cpu*2", name="ps", **where))
    assert farthest(one, run) <= 1e-9


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"staleness": -1}, "staleness must be a whole number of at least 0, or None for no bound, but got -1"),
        ({"servers": 0}, "servers must be a whole number of at least 1"),
        ({"workers": 2, "backup": 2}, "backup must be smaller than the number of workers, but got backup=2 of 2"),
        ({"backup": 1, "staleness": None}, "backup workers can only be used in synchronous steps"),
        ({"correction": True}, "correction can only be used with staleness=None"),
    ],
)
def test_invalid_parameter_server_settings_are_rejected(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        mh.ParameterServer(**settings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ps,servers=2,shards=2", "parameter servers need whole networks"),
        ("ps,servers=2,sync=bf16", "parameter servers need whole networks and exact gradients"),
        ("mirrored,staleness=3", "staleness can only be used with parameter servers"),
    ],
)
def test_incompatible_strategy_options_are_rejected(text: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        mh.StrategySpec.parse(text)


def test_strategy_round_trips_through_text_and_dict() -> None:
    spec = mh.ParameterServer(servers=2, workers=4, staleness=None)
    assert mh.StrategySpec.parse("ps,servers=2,workers=4,staleness=none") == spec
    assert mh.StrategySpec.parse(str(spec)) == spec
    assert mh.StrategySpec.from_dict(spec.to_dict()) == spec


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.float()


def test_unsupported_sync_policy_and_float8_parameter_are_rejected(tmp_path: Path) -> None:
    says = r"needs several replicas, but got sync=int8 with shards=2 and one replica. Pass replicas=2 or more"
    with pytest.raises(StrategyError, match=says):
        mh.Sharded(2, sync="int8")
    with pytest.raises(
        TaskError, match=r"collectives can sum, but got scale of torch.float8_e4m3fn. Keep it in bfloat16"
    ):
        mh.fit(
            problem("mlp").replace(model=Narrow), mh.Mirrored(2), **fit_options(on="cpu*2", folder=tmp_path, **QUIET)
        )


def test_unsupported_tasks_are_rejected_before_servers_start(tmp_path: Path) -> None:
    spec = mh.ParameterServer(servers=2, workers=2)
    where: dict[str, Any] = {"on": "cpu*2", "folder": tmp_path, **QUIET}
    with pytest.raises(TaskError, match="parameter servers need a task with loss=, but got a task with step="):
        mh.fit(problem("gan"), spec, **fit_options(**where))
    with pytest.raises(TaskError, match="do not support averaged weights, but got ema=0.9. Omit ema"):
        mh.fit(problem("mlp").replace(ema=0.9), spec, **fit_options(**where))
    with pytest.raises(StrategyError, match="parameter servers need data with random access"):
        mh.fit(problem("mlp").replace(data=Stream(), shuffle=False), spec, **fit_options(steps=3, **where))
    with pytest.raises(StrategyError, match="at most 4 servers, but got 9"):
        mh.fit(problem("mlp"), mh.ParameterServer(servers=9, workers=2), **fit_options(**where))
    with pytest.raises(StrategyError, match=r"0 \(Embedding\) with sparse=True. Use mh.strategies.Embedding"):
        mh.fit(
            problem("mlp").replace(model=lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True))),
            spec,
            **fit_options(**where),
        )
    with pytest.raises(StrategyError, match=r"need a call of mh.fit"):
        mh.launch(lambda hand: None, spec, on="cpu*2")
    assert not list(tmp_path.iterdir())


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(12), torch.tensor(0))] * 100)
