"""Plans: the choice and its reason, the scaling curve, refusals, and plan files."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.api.bench import Bench, workload_of
from manyhands.core import SettingsError, StrategyError, StrategySpec
from manyhands.costs import chip, trace
from manyhands.distributed import num_cores
from manyhands.planning import (
    Cluster,
    Curves,
    Plan,
    Search,
    Workload,
    compare,
    estimate,
    make_plan,
    noise_scale,
    read_plan,
    require_same,
)
from manyhands.planning.many_networks import One, many, stacking_gain
from manyhands.planning.workload import best_batch

from ..costs.networks import gpt_task, task
from .test_estimate import cluster, timed

WHOLE = Search(refuses=lambda spec: "not yet: stages" if spec.stages > 1 else "")


@pytest.fixture(scope="module")
def gpt() -> Workload:
    made = gpt_task(width=2048, layers=20, heads=16, words=51200, length=1024)
    batch = torch.zeros(1, 1025, dtype=torch.long)
    networks = {precision: trace(made, batch, rows=8, precision=precision) for precision in ("fp32", "bf16")}
    return Workload(networks=networks, batch_size=512, name="gpt")


def test_plan_for_a_billion_parameters_on_512_devices(gpt: Workload) -> None:
    found = make_plan(gpt, Cluster.parse("64 hosts x 8 H100, 400Gb/s per device"), Search(precision="bf16"))
    assert 1.1e9 < gpt.network("fp32").params < 1.2e9
    assert found.best.option.estimate.fits
    assert found.best.seconds <= found.control.seconds
    assert len(found.options) > 100
    axes = {(o.spec.tensor > 1, o.spec.stages > 1, (o.spec.shards or 1) > 1) for o in found.options}
    assert len(axes) == 8
    assert [o.seconds for o in found.options if o.can_run] == sorted(o.seconds for o in found.options if o.can_run)


def test_oversized_network_is_sharded_or_recomputed(gpt: Workload) -> None:
    found = make_plan(gpt, Cluster.parse("8 V100"), Search())
    assert not found.control.can_run
    best = found.best.spec
    assert best.tensor * best.stages * (best.shards or 1) > 1 or best.recompute
    assert "does not fit" in found.best.why


def test_error_names_the_device_count_that_would_fit() -> None:
    huge = gpt_task(width=8192, layers=8, heads=64, length=128)
    work = Workload(networks={"fp32": trace(huge, torch.zeros(1, 129).long(), rows=1)}, batch_size=8)
    with pytest.raises(
        StrategyError, match=r"must fit into .* H100, but got at least .* \d+ of these devices are enough"
    ):
        make_plan(work, Cluster.parse("1 H100"), Search())


def test_lossy_options_are_chosen_only_on_request() -> None:
    work = timed(1.0, 1e9, batch_size=16)
    slow = cluster(16, per_host=1, gbits=10)
    assert make_plan(work, slow, WHOLE).best.spec.sync == "allreduce"
    lossy = make_plan(work, slow, replace(WHOLE, lossy=True))
    assert lossy.best.spec.sync == "bf16"
    assert "changes the mathematics" in " ".join(lossy.notes)


def test_unsupported_options_are_listed_but_never_chosen() -> None:
    work = timed(0.05, 1e9, batch_size=16)
    found = make_plan(work, cluster(8), WHOLE)
    assert any(option.refused for option in found.options)
    assert found.best.spec.stages == 1


def test_measurements_decide_and_the_control_is_always_measured() -> None:
    work = timed(0.05, 1e8, batch_size=16)
    tried: list[StrategySpec] = []

    def measure(spec: StrategySpec) -> float | str:
        tried.append(spec)
        if spec.shards != 1:
            return "RuntimeError: no"
        return 0.1 if spec == StrategySpec(replicas=8) else 0.2

    found = make_plan(work, cluster(8), Search(), measure=measure, tries=4)
    assert found.control.spec in tried
    assert len(tried) <= 5
    assert found.best.spec == StrategySpec(replicas=8)
    assert found.best.seconds == 0.1
    assert all(o.refused.startswith("failed here") for o in found.options if o.spec in tried and o.spec.shards != 1)


def test_chosen_strategy_is_never_slower_than_data_parallel() -> None:
    for size, params in ((0.001, 1e9), (1.0, 1e6), (0.01, 1e8)):
        for gbits in (1, 100):
            found = make_plan(timed(size, params), cluster(16, gbits=gbits), Search())
            assert found.best.seconds <= found.control.seconds


@pytest.mark.parametrize(
    ("workload", "where", "reason", "remedy"),
    [
        (timed(0.01, 1e8, batch_size=1024), cluster(32, gbits=10), "the network card", "a network four times as fast"),
        (timed(0.001, 1e4, batch_size=1024, feed=2000.0), cluster(8, gbits=400), "input", "a feed twice as fast"),
        (timed(0.01, 1e4, batch_size=1024), cluster(32, gbits=400, spread=0.5), "stragglers", "devices of equal speed"),
        (timed(0.01, 1e4, batch_size=16), cluster(8), "only 16 samples", "a batch of 64"),
        (timed(1e-6, 100, batch_size=1024), cluster(16), "a faster link would not", "a quarter of the latency"),
        (timed(1e-6, 100, batch_size=1024), cluster(16), "latency: ", "local steps"),
        (timed(0.01, 1e8, batch_size=16, noise=4.0), cluster(8), "past the critical batch, about 4", "bf16 gradients"),
    ],
)
def test_scaling_curve_names_the_bottleneck_and_remedies(workload: Any, where: Any, reason: str, remedy: str) -> None:
    curve = Curves(workload, where, StrategySpec(replicas=where.num_devices)).draw()
    assert reason in curve.reason
    assert any(remedy in one.text for one in curve.remedies)
    speeds = [point.speedup for point in curve.points]
    assert speeds[0] == 1.0
    assert all(point.speedup <= 1.01 * point.num_devices for point in curve.points)


def test_scaling_curve_names_the_largest_parameter_on_servers() -> None:
    work = timed(0.5, 138e6, batch_size=64, whole_tensors=True)
    network = work.network("fp32")
    pieces = (*network.pieces[:-1], replace(network.pieces[-1], name="classifier", largest=411_000_000))
    work = replace(work, networks={"fp32": replace(network, pieces=pieces)})
    where = cluster(16, per_host=4, gbits=25)
    curve = Curves(work, where, StrategySpec(replicas=16, servers=4)).draw()
    assert "the hottest of 4 servers: it holds 74%" in curve.reason
    assert "largest parameter of 'classifier'" in curve.reason
    remedies = {one.text: one.gain for one in curve.remedies}
    assert remedies["the largest parameter sharded over all servers"] > 1.5
    assert remedies["sums between replicas instead of servers"] > 3


class Clicks(torch.nn.Module):
    """A table that no device holds, and little else."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        make: Any = mh.strategies.Embedding if by_rows else torch.nn.Embedding
        self.table, self.out = make(1_000_000_000 if by_rows else 10_000_000, 64), torch.nn.Linear(64, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).mean(1))


def test_parameter_servers_are_chosen_for_row_wise_embeddings() -> None:
    task = mh.Task(
        model=lambda: Clicks(by_rows=True),
        loss=lambda model, ids: model(ids).square().mean(),
        optimizer=lambda model: torch.optim.Adagrad(model.parameters()),
        data=torch.zeros(64, 8, dtype=torch.long),
        batch_size=64,
    )
    found = mh.plan(task, "4 hosts x 4 A100, 25Gb/s")
    assert isinstance(found, Plan)
    assert found.best.spec == StrategySpec(replicas=16, servers=4)
    assert found.best.seconds < 0.01
    assert found.best.option.estimate.memory.total < 1e6
    assert mh.plan(task, "8 A100").best.spec == StrategySpec(replicas=8, servers=1)
    # A plain one is held whole, and travels whole; the plan says what it could be instead.
    plain = mh.plan(task.replace(model=lambda: Clicks(by_rows=False)), "4 hosts x 4 A100, 25Gb/s")
    assert isinstance(plain, Plan)
    assert plain.best.spec.servers == 0
    assert plain.curve.remedies[0].text.startswith("table as mh.strategies.Embedding on parameter servers")


def test_custom_step_is_not_planned_for_parameter_servers() -> None:
    task = mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        step=lambda hand, batch: hand.minimize(hand.model(batch).square().mean()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=torch.zeros(64, 4),
        batch_size=16,
    )
    found = mh.plan(task, "2 hosts x 2 A100, 25Gb/s")
    assert isinstance(found, Plan)
    served = next(option for option in found.options if option.spec.servers)
    assert served.refused == "not for this task: parameter servers need a task with loss="
    assert not served.can_run


def test_asynchronous_workers_have_no_straggler_delay() -> None:
    work, where = timed(0.1, 1e6, batch_size=16), cluster(16, spread=0.3)
    waits, backed, goes_on = (
        estimate(work, where, StrategySpec(replicas=16, servers=2, **more))
        for more in ({}, {"backup": 3}, {"staleness": None})
    )
    assert waits.stragglers > backed.stragglers > goes_on.stragglers == 0


def test_tiny_workload_saturates_early() -> None:
    made = gpt_task()
    work = Workload(networks={"fp32": trace(made, made.data, rows=8)}, batch_size=64, captured=False)
    curve = Curves(work, Cluster.parse("8 A100"), StrategySpec(replicas=8)).draw()
    assert curve.saturates <= 3
    assert "too little work" in curve.reason


def test_bf16_gradients_raise_the_saturation_point() -> None:
    curve = Curves(timed(0.01, 1e8, batch_size=1024), cluster(32, gbits=10), StrategySpec(replicas=32)).draw()
    remedy = next(one for one in curve.remedies if "bf16 gradients" in one.text)
    assert remedy.is_lossy
    assert remedy.saturates > 1.5 * curve.saturates
    assert remedy.gain > 1.3


def test_fewer_devices_are_chosen_when_more_are_slower() -> None:
    found = make_plan(timed(0.05, 1e9, batch_size=16), cluster(16, gbits=10), WHOLE)
    assert found.best.spec.num_devices == 8  # one host of the two


def test_comparison_of_clusters_explains_the_best() -> None:
    work = timed(1.0, 2e9, batch_size=64)
    few = replace(cluster(8), price=2.0)
    far = replace(cluster(16, per_host=1, gbits=10), price=1.0)
    both = compare([make_plan(work, where, WHOLE) for where in (far, few)])
    assert both.best.plan.cluster == few
    assert "loses most in communication" in both.why()
    assert "a million samples cost" in both.why()


def test_plan_file_round_trip_and_validation(tmp_path: Path) -> None:
    work = timed(0.05, 1e8, batch_size=16)
    found = make_plan(work, cluster(8), Search(), fingerprint="5 parameters (abc)")
    path = found.best.save(tmp_path / "plan.toml")
    assert read_plan(path) == (found.best.spec, "5 parameters (abc)")
    with pytest.raises(SettingsError, match=r"made, of 5 parameters \(abc\), but got a network of 6"):
        require_same(path, "5 parameters (abc)", "6 parameters (abd)")
    path.write_text("strategy = 3")
    with pytest.raises(SettingsError, match="must contain a strategy"):
        read_plan(path)
    with pytest.raises(SettingsError, match="must be valid TOML"):
        read_plan(tmp_path / "none.toml")


def test_plan_report_as_html_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = make_plan(timed(0.01, 1e8, batch_size=64), replace(cluster(16, gbits=10), price=2.0), Search())
    found.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert str(found.best.spec) in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    found.save_svg(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    found.show()
    shown = capsys.readouterr().out
    for word in ("(control)", "per 1M samples", "this cluster", "saturates", "times the speed here", "may be off by"):
        assert word in shown


def test_best_batch_size_follows_the_gradient_noise_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    signal, spread = torch.full((50,), 0.1), 2.0

    def squares(size: int) -> list[float]:
        drawn = signal + spread * torch.randn(4000, 50, generator=generator) / size**0.5
        return drawn.square().sum(1).tolist()

    true = 50 * spread**2 / float(signal.square().sum())
    assert noise_scale(64, squares(64), 1024, squares(1024)) == pytest.approx(true, rel=0.2)
    assert best_batch(true, {64: 1.0, 1024: 2.0, 65536: 100.0}) == 1024
    with pytest.raises(SettingsError, match="two batch sizes must be positive and ascending"):
        noise_scale(8, [1.0], 8, [1.0])


def test_networks_are_stacked_while_it_increases_throughput() -> None:
    gpu = Cluster.parse("1 H200")
    small = One(start=1.1e-3, each=0.1e-3 / 128, batch_size=128, memory=50e6)
    assert stacking_gain(small, 1) == 1.0
    assert stacking_gain(small, 10**6) == pytest.approx(1 + 11, rel=0.01)
    best = many(small, 100, gpu)[0]
    assert best.name == "stacked"
    assert best.gain == pytest.approx(stacking_gain(small, 100), rel=0.01)
    large = One(start=1e-4, each=0.01, batch_size=128, memory=100e9)
    assert many(large, 8, Cluster.parse("8 H200"))[0].together == 1
    with pytest.raises(SettingsError, match="must fit on a device"):
        many(replace(large, memory=200e9), 2, gpu)


def test_plan_recommends_how_to_train_many_networks(capsys: pytest.CaptureFixture[str]) -> None:
    small = mh.plan(small_task, "1 H200", networks=100)
    assert isinstance(small, Plan)
    assert small.ways[0].name == "stacked"
    assert small.ways[0].gain > 5
    small.show()
    assert "100 such networks: stacked, 100 on a device at a time" in capsys.readouterr().out
    wide = mh.plan(lambda: small_task(4096).replace(batch_size=4096, data=torch.zeros(4096, 16)), "8 H200", networks=8)
    assert isinstance(wide, Plan)
    assert next(way for way in wide.ways if way.name == "one per device").gain == pytest.approx(8, rel=0.15)
    on_cores = make_plan(
        timed(0.01, 1e6), replace(cluster(2), chip=replace(cluster(2).chip, name="CPU")), WHOLE, networks=8
    )
    assert next(way for way in on_cores.ways if way.name == "packed").together == 1
    with pytest.raises(SettingsError, match="networks must be a whole number"):
        mh.plan(small_task, "1 H200", networks=0)


def test_time_to_target_is_reported_when_the_noise_scale_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    work, where = timed(0.01, 1e7, batch_size=64), cluster(16, gbits=10)
    assert make_plan(work, where, WHOLE).to_target() == {}
    # Exchanges take as long whatever the batch is: a larger one pays as long as gradients are noisy.
    noisy, quiet = (make_plan(replace(work, noise=noise), where, WHOLE) for noise in (1e5, 1.0))
    assert noisy.to_target()[64] == quiet.to_target()[64] == 1.0
    assert noisy.to_target()[1024] < 0.9
    assert quiet.to_target()[1024] > 2
    noisy.show()
    assert "would reach a target in" in capsys.readouterr().out


# -- the function ------------------------------------------------------------------------------------------------------


def small_task(width: int = 64) -> mh.Task:
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=(torch.randn(64, 16), torch.randn(64, 1)),
        batch_size=32,
    )


def test_plan_for_hardware_that_is_not_present() -> None:
    found = mh.plan(small_task, "2 hosts x 8 H100, 100Gb/s", params={"width": 128})
    assert isinstance(found, Plan)
    assert found.name == "small_task"
    assert found.workload.network("fp32").params == 16 * 128 + 128 + 128 + 1
    assert not found.cluster.measured
    assert found.to_dict()["best"] == str(found.best.spec)
    both = mh.plan(small_task, ["8 H100", "8 V100"])
    assert len(both.to_dict()["plans"]) == 2


def test_plan_on_local_devices_measures_and_its_choice_runs(tmp_path: Path, engine: Any) -> None:
    found = mh.plan(small_task, on="cpu*2", tries=1)
    assert isinstance(found, Plan)
    assert found.cluster.measured
    assert found.workload.feed is not None
    assert found.workload.noise is not None
    assert found.control.spec == StrategySpec(replicas=2)
    assert found.control.measured is not None
    assert found.best.option.measured is not None
    path = found.best.save(tmp_path / "plan.toml")
    run = mh.fit(
        small_task, str(path), on="cpu*2", steps=2, folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert run.record["spec"] == found.best.spec.to_dict()
    with pytest.raises(SettingsError, match="for which it was made, of"):
        mh.fit(
            functools.partial(small_task, width=32),
            str(path),
            steps=1,
            folder=tmp_path,
            options=mh.options.Display(progress=False),
        )


@pytest.mark.gpu
def test_plan_on_a_local_gpu_measures_captured_steps(tmp_path: Path, engine: Any) -> None:
    found = mh.plan(small_task, on="cuda:0", tries=1)
    assert isinstance(found, Plan)
    assert found.cluster.measured
    assert found.best.option.measured is not None
    run = mh.fit(
        small_task, found.best.spec, on="cuda:0", steps=2, folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert run.record["spec"] == found.best.spec.to_dict()


def test_constants_of_a_local_cpu_begin_at_the_catalogue_and_may_exceed_it() -> None:
    here, core = Bench(small_task(), "cpu", 60.0).cluster().chip, chip("CPU")
    assert here.rate("fp32") / core.rate("fp32") == pytest.approx(num_cores())
    assert here.bandwidth * here.streaming / (core.bandwidth * core.streaming) == pytest.approx(num_cores())
    assert here.attention / here.reach == pytest.approx(core.attention / core.reach)
    # Cores may be faster than the catalogue's; the fit must be able to find that with fractions below 1.
    assert here.flops["fp32"] >= core.flops["fp32"] * num_cores()
    assert here.bandwidth >= 4 * core.bandwidth * num_cores()


def test_calibration_fits_steps_within_and_beyond_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {8: 0.28, 32: 1.7}  # as seen on a machine whose caches others use too
    bench = Bench(small_task(), "cpu", 60.0)
    monkeypatch.setattr(bench, "_seconds", lambda spec, batch_size: seconds[batch_size])
    workload, _ = workload_of(small_task(), "small", bench)
    workload, here = bench.calibrated(workload, bench.cluster(), "fp32")
    whole, parts = (
        estimate(workload, here, spec, correction=bench.correction).seconds
        for spec in (StrategySpec(), StrategySpec(accumulate=4))
    )
    assert whole == pytest.approx(1.7, rel=0.1)
    assert parts == pytest.approx(4 * 0.28, rel=0.1)


def test_auto_strategy_runs_and_logs_the_choice(tmp_path: Path, engine: Any) -> None:
    run = mh.fit(small_task, "auto", on="cpu", steps=2, folder=tmp_path, options=mh.options.Display(progress=False))
    assert run.num_steps == 2
    assert "auto: replicas=1" in (run.path / "events.jsonl").read_text()


def test_untraceable_network_is_measured_as_one_piece(engine: Any) -> None:
    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * (2 if x.sum().item() > 0 else 1)

    found = mh.plan(small_task().replace(model=Looks), "4 H100", on="cpu")
    assert isinstance(found, Plan)
    assert ".item()" in " ".join(found.notes)
    assert found.workload.network("fp32").pieces[0].name == "all of it, measured"


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"precision": "fp8"}, "fp32 or bf16"),
        ({"tries": -1}, "tries must be a whole number"),
        ({"cluster": []}, "at least one cluster is required"),
        ({"cluster": "2 hosts x 8 H100"}, "the speed of its network"),
        ({"cluster": 8}, "a cluster must be a string"),
    ],
)
def test_invalid_input_is_rejected_before_planning_starts(more: dict[str, Any], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        mh.plan(small_task, **more)


def test_saturation_is_the_last_count_that_pays_where_efficiency_is_not_monotone() -> None:
    work = timed(1e-4, 1e4, batch_size=120)
    curves = Curves(work, cluster(8, gbits=400), StrategySpec(replicas=8))
    paying = [count for count in range(1, 121) if curves.point(count).efficiency >= 0.5]
    assert curves.saturation() == paying[-1]
    assert len(paying) < paying[-1]  # bisection could end in a gap


def test_curve_of_a_large_cluster_goes_beyond_its_devices() -> None:
    work = timed(10.0, 1e4, batch_size=8192)
    curve = Curves(work, cluster(2048, gbits=400), StrategySpec(replicas=2048)).draw()
    assert curve.points[-1].num_devices == 8192
    assert curve.saturates > 1024


def test_band_follows_the_evidence_and_close_options_are_named() -> None:
    work = timed(0.05, 1e8, batch_size=16)
    known = make_plan(work, cluster(8), Search())
    assert known.evidence == "catalogue"
    assert all(option.seconds < (1 + known.band) * known.best.seconds for option in known.close())
    network = replace(work.network("fp32"), is_measured=True)
    unknown = make_plan(replace(work, networks={"fp32": network}), cluster(8), Search())
    assert unknown.band > known.band
    assert len(unknown.close()) >= len(known.close())
    calibrated = make_plan(work, replace(cluster(8), measured=True), Search())
    assert calibrated.band < known.band


def test_plan_is_fitted_to_earlier_runs(tmp_path: Path) -> None:
    made = task(lambda: torch.nn.Linear(64, 64), lambda model, batch: model(batch).square().mean(), torch.ones(8, 64))
    predicted = mh.plan(made, "1 A100").best.seconds
    for factor in (1.5, 2.5):
        seconds, folder = factor * predicted, tmp_path / str(factor)
        folder.mkdir()
        record = {"spec": StrategySpec().to_dict(), "batch_size": 8, "devices": ["cuda:0"]}
        (folder / "run.json").write_text(json.dumps(record))
        for index in range(4):
            entry = {
                "v": 1,
                "t": 1.7e9 + 10 * index * seconds,
                "kind": "steps",
                "steps": [10 * index + 10],
                "losses": {},
            }
            entry |= {"epoch": 0, "samples_per_second": 8 / seconds, "lr": {}}
            with (folder / "events.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
        found = mh.plan(made, "1 A100", seen=[folder])
        assert found.evidence == "calibrated"
        assert found.best.seconds == pytest.approx(seconds, rel=0.1)
    with pytest.raises(SettingsError, match="devices like those of the cluster, CPU"):
        mh.plan(made, "8 CPU", seen=[folder])
