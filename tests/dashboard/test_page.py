"""The page in a real Chromium: it loads, updates live, shows the right values and escapes every name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.dashboard import opened, violations
from playwright.sync_api import Page, expect

import manyhands as mh
from manyhands.core import keep_event

from .browsing import PLOT, data_of, until
from .logs import Written, a_run

EVIL = '<img src=x onerror="window.harmed=1">\'&quot;</script>'
NAMELESS = """() => {
  const name = (e) => (e.getAttribute("aria-label") || e.textContent.trim() || e.getAttribute("alt")
    || (e.id && document.querySelector(`label[for="${e.id}"]`)?.textContent.trim()) || e.title
    || e.closest("label")?.textContent || "").trim();
  const all = document.querySelectorAll(
    "a, button, input, select, summary, progress, [role=img], [role=group], [role=region], [tabindex='0']");
  return [...all].filter((e) => !name(e)).map((e) => e.outerHTML.slice(0, 120))
    .concat([...document.querySelectorAll("img:not([alt]), table:not(:has(th))")].map((e) => e.outerHTML.slice(0, 120)))
    .concat(document.querySelectorAll("h1").length === 1 ? [] : ["not one h1"])
    .concat(document.documentElement.lang ? [] : ["no lang"])
    .concat([...new Set([...document.querySelectorAll("[id]")].map((e) => e.id))].length
      === document.querySelectorAll("[id]").length ? [] : ["an id twice"]);
}"""


def small_task() -> mh.Task:
    torch.manual_seed(0)
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=(torch.randn(64, 4), torch.ones(64, 1)),
        valid=(torch.randn(16, 4), torch.ones(16, 1)),
        batch_size=8,
    )


class Kill(mh.Callback):
    """Kills a rank once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step(self, hand: mh.Hand) -> None:
        if hand.world.rank == 1 and hand.num_steps == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_run_page_shows_loss_curve_and_rank_failure(show: Callable[..., Page], tmp_path: Path) -> None:
    folder, callbacks = tmp_path / "runs", [Kill(tmp_path / "killed")]
    run = mh.fit(
        small_task(),
        "mirrored",
        on="cpu*2",
        epochs=2,
        folder=folder,
        name="first",
        callbacks=callbacks,
        options=mh.options.Display(progress=False),
    )
    page = show("run?id=runs%2Ffirst")
    expect(page.locator("h1")).to_contain_text("finished")
    steps, losses = data_of(page, "Loss")
    assert steps == list(range(1, run.num_steps + 1))
    assert losses == pytest.approx(run.losses)
    expect(page.get_by_role("region", name="Events")).to_contain_text("rank 1")
    expect(page.locator("svg .mark.fault")).not_to_have_count(0)
    drawn = page.get_by_role("img", name="Timeline").get_attribute("aria-label") or ""
    assert "of them faults" in drawn
    expect(page.get_by_role("img", name="Time so far by rank")).to_be_visible()
    rows = page.get_by_role("region", name="Ranks").locator("tbody tr")
    expect(rows).to_have_count(2)
    # A pointer over the chart reads off the loss of that very step.
    spot = page.evaluate(
        f"() => {{ const p = ({PLOT})('Loss').plot; const b = p.over.getBoundingClientRect();"
        " return [b.left + p.valToPos(p.data[0][7], 'x'), b.top + 40]; }"
    )
    page.mouse.move(*spot)
    expect(page.locator("section.card", has_text="Loss").first.locator("output").first).to_have_text(
        f"{run.losses[7]:.4g}"
    )
    assert page.evaluate(NAMELESS) == []


def test_run_page_updates_live_and_keeps_reader_state(show: Callable[..., Page], tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "live")
    run.t = time.time()
    run.start(total=4)
    run.steps({1: 4.0, 2: 3.0})
    page = show("run?id=runs%2Flive")
    expect(page.locator("h1")).to_contain_text("running")
    page.evaluate("window.same = true")
    assert data_of(page, "Loss") == [[1, 2], [4.0, 3.0]]
    # What a reader opened or moved stays as it was.
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_text("Configuration").click()
    scrolled = "document.querySelector('.scroll[aria-label=\"Events\"]').scrollLeft"
    page.evaluate(f"{scrolled} = 20")
    run.say("epoch", epoch=0, step=2, metrics={"valid_loss": 1.0}, losses={})
    run.steps({3: 2.5, 4: 1.25})
    expect(page.locator(".facts").first).to_contain_text("1.25")
    assert data_of(page, "Loss") == [[1, 2, 3, 4], [4.0, 3.0, 2.5, 1.25]]
    expect(page.locator("details[open]", has_text="Configuration")).to_be_visible()
    assert page.evaluate(scrolled) == 20
    # The order of charts does not depend on which one arrived first.
    expect(page.locator("section.card h3")).to_have_text(
        ["Loss", "Validation loss", "Steps per second", "Learning rate"]
    )
    run.say("end", step=4, stopped=False, seconds={})
    expect(page.locator("h1")).to_contain_text("finished")
    assert page.evaluate("window.same") is True
    a_run(tmp_path / "runs" / "another")
    page.keyboard.press("1")
    link = page.get_by_role("link", name="runs/another")
    expect(link).to_be_visible()
    # News that come while a pointer is down do not take away what it is on.
    link.hover()
    page.mouse.down()
    with page.expect_response(lambda answer: "overview" in answer.url):
        a_run(tmp_path / "runs" / "third")
    page.wait_for_timeout(200)
    page.mouse.up()
    expect(page.locator("h1")).to_contain_text("runs/another")
    # A menu that is opened by pressing, and left by a key, does not keep them away.
    page.keyboard.press("1")
    expect(page.get_by_role("link", name="runs/third")).to_be_visible()
    for kind in ("pointerdown", "contextmenu"):
        page.dispatch_event("h1", kind, {"bubbles": True, "button": 2})
    a_run(tmp_path / "runs" / "fourth")
    expect(page.get_by_role("link", name="runs/fourth")).to_be_visible()
    run.close()


def test_hostile_names_are_rendered_as_text(show: Callable[..., Page], tmp_path: Path) -> None:
    name = EVIL.replace("/", "_")
    run = Written(
        tmp_path / "runs" / name, task=EVIL, params={EVIL: EVIL}, devices=[EVIL, f"{name}/cpu"], spec={EVIL: EVIL}
    )
    run.t = time.time()
    run.start()
    run.say("steps", steps=[1], losses={EVIL: [1.0]}, epoch=0, lr={EVIL: 0.1})
    run.say("epoch", epoch=0, step=1, metrics={EVIL: 0.5}, losses={})
    run.say("notice", text=EVIL)
    run.say("pace", rank=0, host=EVIL, step=1, seconds=1.0)
    run.say("profile", rank=0, host=EVIL, step=1, peak=0, total=1.0, seconds={EVIL: 1.0})
    box = {"rank": 0, "device": EVIL, "parts": [EVIL], "num_operations": 1, "num_parameters": 1, "seconds": 0.0}
    run.say("partition", title=EVIL, boxes=[box], arrows=[])
    run.say("failed", reason=EVIL)
    study = tmp_path / "studies" / name
    study.mkdir(parents=True)
    (study / "journal.log").write_text(EVIL_JOURNAL)
    keep_event(tmp_path / "logs" / name, {"v": 1, "t": 1.0, "kind": "serving", "devices": [EVIL]})
    keep_event(tmp_path / "logs" / name, {"v": 1, "t": 1.0, "kind": "version_failed", "model": EVIL, "version": EVIL})
    page = show("runs")
    for where in ("run", "study", "log"):
        folder = {"run": "runs", "study": "studies", "log": "logs"}[where]
        page.evaluate("([where, id]) => { location.hash = `#/${where}?id=${encodeURIComponent(id)}`; }",
                      [where, f"{folder}/{name}"])  # fmt: skip
        expect(page.locator("h1")).to_contain_text(name)
        expect(page.locator("main")).to_contain_text("onerror='" if where == "study" else EVIL)
    for where in ("runs", "compare", "studies", "serving", "cluster", f"compare?id=runs%2F{name.replace('&', '%26')}"):
        page.goto(f"{page.url.partition('#')[0]}#/{where}")
        expect(page.locator("main")).to_contain_text("onerror")
    assert page.evaluate("window.harmed") is None
    assert page.locator("main img").count() == 0
    run.close()


EVIL_JOURNAL = "".join(
    line + "\n"
    for line in (
        '{"op_code":0,"study_name":"x","directions":[1]}',
        '{"op_code":2,"study_id":0,"user_attr":{"manyhands":{"space":{"EVIL":"x"},"objectives":[["EVIL","min"]],'
        '"epochs":1,"stop":"EVIL","search":"EVIL"}}}',
        '{"op_code":4,"study_id":0,"state":0,"distributions":{"EVIL":"{\\"attributes\\":{\\"choices\\":[\\"EVIL\\"]}}"},'
        '"given":{"EVIL":"EVIL"}}',
        '{"op_code":6,"trial_id":0,"state":1,"values":[1.0],"metrics":{"EVIL":1.0},"seconds":1.0,"reason":"EVIL",'
        '"feasible":true}',
    )
).replace("EVIL", "<img src=x onerror='window.harmed=1'>")


def test_every_page_loads_with_accessible_names(show: Callable[..., Page], tmp_path: Path) -> None:
    task = small_task()

    def make(lr: float = 0.1, kind: str = "a") -> mh.Task:
        return task.replace(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr))

    options: dict[str, Any] = {"on": "cpu", "options": mh.options.Display(progress=False)}
    study = mh.tune(
        make,
        {"lr": mh.tuning.loguniform(1e-3, 1e-1), "kind": mh.tuning.choice("a", "b")},
        trials=5,
        epochs=1,
        name="first",
        folder=tmp_path / "studies",
        **options,
    )
    mh.ensemble(make, members=2, epochs=1, name="ensemble", folder=tmp_path / "studies", **options)
    mh.fit(
        make,
        mh.Placed({"0": 0, "2": 1}),
        on="cpu*2",
        name="partitioned",
        folder=tmp_path / "runs",
        options=mh.options.Display(progress=False),
    )
    plan = mh.plan(make, "4 hosts x 8 A100, 100Gb/s")
    both = mh.plan(make, ["8 H100, $2/h", "8 A100, $1/h"]).with_noise(500)
    both.log(tmp_path / "plans" / "both")
    plan.log(tmp_path / "plans" / "first")
    mh.profile(make, on="cpu", steps=2).log(tmp_path / "profiles" / "first")
    page = show("runs")
    expect(page.get_by_role("link", name="runs/partitioned")).to_be_visible()
    titles = page.locator("nav a").all_text_contents()
    for number, title in enumerate(titles, 1):
        page.keyboard.press(str(number))
        expect(page.locator("main h1")).to_have_text(title)
        expect(page.locator("nav a[aria-current=page]")).to_have_text(title)
        assert page.evaluate(NAMELESS) == []
    page.get_by_role("checkbox", name="Show finished").check()
    expect(page.locator(".device", has_text="runs/partitioned")).to_have_count(2)
    expect(page.locator(".device", has_text="studies/ensemble")).to_have_count(1)
    expect(page.get_by_role("img", name="Partition of the network")).to_be_visible()
    page.keyboard.press("5")
    devices, predicted, perfect, *_ = data_of(page, "Speed-up against devices")
    points = {point.num_devices: point.speedup for point in plan.curve.points}
    shown = {count: value for count, value in zip(devices, predicted, strict=True) if value is not None}
    assert shown == {count: pytest.approx(value, abs=1e-3) for count, value in points.items()}
    assert [value for value in perfect if value is not None] == sorted(points)
    page.get_by_label("Which plan").select_option(index=1)
    expect(page.get_by_role("region", name="Clusters side by side").locator("tbody tr")).to_have_count(2)
    expect(page.get_by_role("region", name="Clusters side by side")).to_contain_text("kWh")
    expect(page.get_by_role("region", name="To a target loss")).to_contain_text("$")
    page.goto(f"{page.url.partition('#')[0]}#/study?id=studies%2Ffirst")
    expect(page.locator("svg .way")).to_have_count(5)
    best = page.locator("svg .way.best")
    assert best.get_attribute("data-trial") == str(study.best.number)
    rates, values = data_of(page, "valid_loss by lr")
    assert dict(zip(rates, values, strict=True)) == {trial.params["lr"]: trial.value for trial in study.trials}
    kinds, values = data_of(page, "valid_loss by kind")
    assert sorted(zip(kinds, values, strict=True)) == sorted(
        ("ab".index(trial.params["kind"]), trial.value) for trial in study.trials
    )
    row = page.get_by_role("region", name="Trials").last.locator("tr.chosen")
    expect(row).to_contain_text(str(study.best.number))
    expect(row.locator("td").nth(5)).to_have_text("1")  # epochs
    expect(page.locator("h1 .state")).to_have_text("finished")
    assert page.evaluate(NAMELESS) == []
    page.set_viewport_size({"width": 390, "height": 844})
    small = "[...document.querySelectorAll('svg text')].filter((e) => e.getBoundingClientRect().height < 9).length"
    assert page.evaluate(small) == 0
    for number, title in enumerate(titles, 1):
        page.keyboard.press(str(number))
        expect(page.locator("main h1")).to_have_text(title)
        until(page, "document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("4")
    expect(page.locator("main")).to_contain_text("mean")
    expect(page.get_by_role("region", name="Members").last.locator("tbody tr")).to_have_count(2)
    # The audit of the widest and of the narrowest window, in both themes.
    url = page.url.partition("#")[0]
    addresses = [*(title.lower() for title in titles), "study?id=studies%2Ffirst", "run?id=runs%2Fpartitioned"]
    found = []
    for width, height in ((390, 844), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        for address in addresses:
            opened(page, url, address)
            found += [(address, width, each) for each in violations(page)]
        page.keyboard.press("t")
    assert found == []
    page.goto(f"{url}#/study?id=unknown")
    page.get_by_role("link", name="Show all").click()
    expect(page.get_by_role("link", name="studies/first")).to_be_visible()


def test_keyboard_shortcuts_filter_and_compare_runs(show: Callable[..., Page], tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "apple", {1: 1.0, 2: 0.5}, params={"lr": 0.1})
    a_run(tmp_path / "runs" / "pear", {1: 2.0, 2: 0.25}, params={"lr": 0.2})
    page = show("runs")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.keyboard.press("/")
    page.keyboard.type("pear")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.locator("input[type=search]").fill("")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    # Both began at once: the order is that of their names.
    assert page.evaluate("document.activeElement.textContent") == "runs/apple"
    for box in page.get_by_role("checkbox", name="Compare runs/").all():
        box.check()
    # Ticked runs stay ticked after navigating away and back.
    page.keyboard.press("2")
    expect(page.get_by_role("button", name="Leave out")).to_have_count(2)
    page.keyboard.press("1")
    expect(page.get_by_role("checkbox", name="Compare runs/", checked=True)).to_have_count(2)
    page.get_by_role("link", name="Compare 2 runs").click()
    steps, *curves = data_of(page, "loss")
    assert steps == [1, 2]
    assert sorted(curves) == [[1.0, 0.5], [2.0, 0.25]]
    row = page.get_by_role("region", name="Differences").last.locator("tr", has=page.get_by_text("lr", exact=True))
    expect(row).to_contain_text("0.2")
    page.locator("figure.chart").first.focus()
    page.keyboard.press("Home")
    expect(page.locator("section.card").first.locator("output").first).to_have_text("2" if curves[0][0] == 2 else "1")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Leave out runs/apple").click()
    expect(page.get_by_role("button", name="Leave out")).to_have_count(1)
    assert data_of(page, "loss") == [[1, 2], [2.0, 0.25]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_themes_have_sufficient_contrast(show: Callable[..., Page], tmp_path: Path, scheme: Any) -> None:
    a_run(tmp_path / "runs" / "first")
    page = show("run?id=runs%2Ffirst", color_scheme=scheme)
    ratio = """(names) => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => { const hex = style.getPropertyValue(name).trim();
        const part = (at) => { const v = parseInt(hex.slice(at, at + 2), 16) / 255;
          return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
        return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5); };
      const [a, b] = names.map(light).sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05); }"""
    for ink in ("--ink", "--soft", "--accent", "--good", "--bad", "--warn"):
        for ground in ("--ground", "--raised"):
            assert page.evaluate(ratio, [ink, ground]) >= 4.5, (ink, ground)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (before == "rgb(255, 255, 255)") == (scheme == "light")
    page.keyboard.press("t")
    until(page, f"getComputedStyle(document.body).backgroundColor !== '{before}'")
    data_of(page, "Loss")


def test_serving_page_shows_a_running_server(show: Callable[..., Page], tmp_path: Path) -> None:
    run = mh.fit(
        small_task(),
        "single",
        on="cpu",
        folder=tmp_path / "runs",
        name="first",
        options=mh.options.Display(progress=False),
    )
    log = tmp_path / "logs" / "first"
    with mh.serve(
        {"adder": run.predictor()}, on="cpu", listen=mh.serving.Listen(http=0, grpc=0, manage=0), log=str(log)
    ) as server:
        client = mh.serving.Client(server.url)
        client("adder", torch.ones(2, 4))
        page = show("serving", servers=[server.url])
        row = page.get_by_role("region", name="Versions").locator("tbody tr")
        expect(row).to_contain_text("adder")
        expect(row).to_contain_text("OK 1")
        client("adder", torch.ones(2, 4))
        expect(row).to_contain_text("OK 2")
        assert page.evaluate(NAMELESS) == []
        page.get_by_role("link", name="logs/first").click()
        expect(page.locator("h1")).to_contain_text("serving")
        expect(page.get_by_role("region", name="Versions").locator("tbody")).to_have_text("adder1availablecurrent")
        ports = [server.grpc, *(url.rpartition(":")[2] for url in (server.url, server.manage_url))]
        log = tmp_path / "logs" / "router"
        with mh.route(
            "127.0.0.1:{}/{}/{}".format(*ports), listen=mh.serving.Listen(http=0, grpc=0, manage=0), log=str(log)
        ) as router:
            mh.serving.Client(router.url)("adder", torch.ones(2, 4))
            routed = show("serving", servers=[router.url])
            row = routed.get_by_role("region", name="Servers behind a router").locator("tbody tr")
            expect(row).to_contain_text(f"127.0.0.1:{server.grpc}serving")
            data_of(routed, "Responses per second, by server")
            routed.get_by_role("link", name="logs/router").click()
            expect(routed.get_by_role("region", name="Events")).to_contain_text("backend up")
            assert max(filter(None, data_of(page, "Requests per second")[1])) >= 1
    expect(page.locator("h1")).to_contain_text("stopped")


def test_ensemble_of_a_study_lists_its_members_and_leaves_the_study(show: Callable[..., Page], tmp_path: Path) -> None:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(1) > 0).long()

    def make(lr: float = 0.1) -> mh.Task:
        return mh.Task(
            model=lambda: torch.nn.Linear(4, 2),
            loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
            data=(inputs, labels),
            valid=(inputs, labels),
            batch_size=8,
        )

    quiet = mh.options.Display(progress=False)
    study = mh.tune(
        make,
        {"lr": mh.tuning.loguniform(1e-3, 1.0)},
        trials=4,
        epochs=1,
        on="cpu",
        name="first",
        folder=tmp_path / "studies",
        options=[quiet, mh.options.Selection(keep=2)],
    )
    ensemble = mh.ensemble(study, members=2, options=quiet)
    _, alone = ensemble.calibration()
    page = show("ensembles")
    rows = page.get_by_role("region", name="Members").last.locator("tbody tr")
    expect(rows).to_have_count(2)
    for row, trial, measured in zip(rows.all(), study.top(2), alone, strict=True):
        cells = row.locator("td")
        expect(cells.first).to_have_text(str(trial.number))
        expect(row).to_contain_text(f"{trial.value:.4g}")
        expect(cells.nth(-2)).to_have_text(f"{measured.accuracy:.4g}")
    expect(page.locator("main")).to_contain_text("loss of the best member")
    assert page.evaluate(NAMELESS) == []
    page.goto(f"{page.url.partition('#')[0]}#/studies")
    expect(page.get_by_role("link", name="studies/first")).to_be_visible()
