"""Charts in a real Chromium: smoothing, axes, scales, gaps, downloads, and the columns of the list of runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from .browsing import PLOT, data_of, until
from .logs import Written, a_run


def a_long_run(path: Path) -> None:
    """Two epochs of four steps, of which one step lasts a second; the loss alternates."""
    run = Written(path)
    run.start(total=8)
    for step in range(1, 9):
        run.steps({step: 2.0 if step % 2 else 1.0})
        if step % 4 == 0:
            metrics = {"valid_loss": 1.0 / step, "valid_accuracy": 0.5 + step / 20}
            run.t -= 1.0
            run.say("epoch", epoch=step // 4 - 1, step=step, metrics=metrics, losses={})
    run.say("end", step=8, stopped=False, seconds={})
    run.close()


def set_smoothing(page: Page, weight: float) -> None:
    page.get_by_label("Smoothing").evaluate(
        f"(e) => {{ e.value = {weight}; e.dispatchEvent(new Event('input', {{ bubbles: true }})); }}"
    )


def test_smoothing_is_an_exponential_average_and_is_kept(show: Callable[..., Page], tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    run.steps({step: 2.0 if step % 2 else 1.0 for step in range(1, 41)})
    for epoch, value in enumerate((3.0, 2.0, 1.0)):
        run.say("epoch", epoch=epoch, step=10 * epoch + 10, metrics={"valid_loss": value}, losses={})
    page = show("run?id=runs%2Ffirst")
    raw = data_of(page, "Loss")[1]
    assert raw == [2.0, 1.0] * 20
    set_smoothing(page, 0.5)
    _, smooth, beside = data_of(page, "Loss")
    expected, last = [], 0.0
    for num, value in enumerate(raw, 1):
        last = 0.5 * last + 0.5 * float(value or 0)
        expected.append(last / (1 - 0.5**num))
    assert smooth == pytest.approx(expected)
    assert beside == raw
    # An average of few points would only be late.
    assert data_of(page, "Validation loss")[1:] == [[3.0, 2.0, 1.0]]
    page.reload()
    assert data_of(page, "Loss")[1] == pytest.approx(expected)
    set_smoothing(page, 0)
    assert data_of(page, "Loss")[1:] == [raw]
    run.close()


def test_x_axis_is_step_epoch_or_time_since_the_start(show: Callable[..., Page], tmp_path: Path) -> None:
    a_long_run(tmp_path / "runs" / "first")
    page = show("run?id=runs%2Ffirst")
    assert data_of(page, "Loss")[0] == list(range(1, 9))
    page.get_by_label("x axis").select_option("epoch")
    assert data_of(page, "Loss")[0] == pytest.approx([step / 4 for step in range(1, 9)])
    assert data_of(page, "Accuracy")[0] == [1, 2]
    page.get_by_label("x axis").select_option("relative time")
    assert data_of(page, "Loss")[0] == pytest.approx([float(step) for step in range(1, 9)])
    page.get_by_label("Smoothing").focus()
    page.goto(f"{page.url.partition('#')[0]}#/compare?id=runs%2Ffirst")
    assert data_of(page, "loss")[0] == pytest.approx([float(step) for step in range(1, 9)])
    expect(page.get_by_label("x axis")).to_have_value("time")


def test_losses_and_accuracies_have_charts_of_their_own(show: Callable[..., Page], tmp_path: Path) -> None:
    a_long_run(tmp_path / "runs" / "first")
    page = show("run?id=runs%2Ffirst")
    assert data_of(page, "Validation loss") == [[4, 8], [0.25, 0.125]]
    assert data_of(page, "Accuracy")[1] == pytest.approx([0.7, 0.9])


def test_logarithmic_scale_is_offered_only_where_it_shows_more(show: Callable[..., Page], tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "wide", {1: 100.0, 2: 1.0})
    a_run(tmp_path / "runs" / "narrow", {1: 2.0, 2: 1.0})
    a_run(tmp_path / "runs" / "negative", {1: 100.0, 2: -1.0})
    page = show("run?id=runs%2Fwide")
    button = page.get_by_role("button", name="Logarithmic scale of Loss")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    until(page, f"({PLOT})('Loss').plot.scales.y.distr === 3")
    for name in ("narrow", "negative"):
        page.goto(f"{page.url.partition('#')[0]}#/run?id=runs%2F{name}")
        expect(page.locator("h1")).to_contain_text(name)
        data_of(page, "Loss")
        expect(button).to_be_hidden()


def test_steps_with_a_loss_that_is_not_finite_are_marked(show: Callable[..., Page], tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    run.steps({1: 2.0, 2: math.nan, 3: 1.5, 4: math.inf})
    run.say("failed", reason="LossNotFinite: loss became inf at step 4; lower the learning rate")
    page = show("run?id=runs%2Ffirst")
    card = page.locator("section.card", has=page.get_by_role("heading", name="Loss", exact=True))
    expect(card.locator("p.fault")).to_have_text("loss is not finite at step 2 and 1 more")
    expect(card.locator("figure")).to_have_attribute(
        "aria-label", "Loss: loss 1.5, loss is not finite at step 2 and 1 more"
    )
    # The marker after the last point is within the chart.
    until(page, f"({PLOT})('Loss').plot.scales.x.max >= 4")
    box = page.evaluate(
        f"() => {{ const p = ({PLOT})('Loss').plot; const b = p.over.getBoundingClientRect();"
        " return { x: b.left + p.valToPos(2, 'x') - 2, y: b.top + 20, width: 5, height: b.height - 30 }; }"
    )
    with Image.open(io.BytesIO(page.screenshot(clip=box))) as shot:
        colours = [shot.convert("RGB").getpixel((x, y)) for x in range(shot.width) for y in range(shot.height)]
    assert sum(red > 150 and green < 140 and blue < 140 for red, green, blue in colours) > 20
    run.close()


def test_chart_is_downloaded_as_csv_and_png(show: Callable[..., Page], tmp_path: Path) -> None:
    evil = '=HYPERLINK("http://x")'
    run = Written(tmp_path / "runs" / "first")
    run.start()
    for step in (1, 2):
        losses = {"loss": [-float(step)], evil: [0.5], "+1": [1.0]}
        run.say("steps", steps=[step], losses=losses, epoch=0, lr={"": 0.1})
    page = show("run?id=runs%2Ffirst")
    data_of(page, "Loss")
    with page.expect_download() as found:
        page.get_by_role("button", name="Download Loss as CSV").click()
    assert found.value.suggested_filename == "runs-first-manyhands-Loss.csv"
    text = Path(found.value.path()).read_text()
    assert list(csv.reader(io.StringIO(text))) == [
        ["step", "loss", f"'{evil}", "'+1"],
        ["1", "-1", "0.5", "1"],
        ["2", "-2", "0.5", "1"],
    ]
    with page.expect_download() as found:
        page.get_by_role("button", name="Download Loss as PNG").click()
    picture = Path(found.value.path()).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20]) > 300
    run.close()


def test_csv_marks_cells_that_a_spreadsheet_would_compute(show: Callable[..., Page]) -> None:
    page = show("runs")
    cells: list[str | float] = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", 'a "b", c', -1.5]
    made = page.evaluate("async (all) => all.map((await import('/download.js')).cell)", cells)
    marked = [f'"\'{cell}"' for cell in cells[:7]]
    assert made == [*marked, '"a ""b"", c"', "-1.5"]


def test_run_list_has_curves_groups_and_chosen_columns(show: Callable[..., Page], tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "apple", {1: 3.0, 2: 1.0}, params={"lr": 0.1}, tags=["fruit"], task="small")
    a_run(tmp_path / "runs" / "pear", {1: 2.0, 2: 0.5}, params={"lr": 0.2}, tags=["fruit"], task="large")
    a_run(tmp_path / "runs" / "rose", {1: 1.0, 2: 0.1}, defaults={"lr": 0.3}, params={}, task="large")
    page = show("runs")
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.locator("svg.spark polyline")).to_have_count(3)
    assert "tags" in page.locator("thead").inner_text()
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="lr", exact=True).check()
    page.get_by_role("checkbox", name="samples/s").check()
    page.get_by_role("checkbox", name="steps/s").uncheck()
    page.keyboard.press("Escape")
    expect(page.get_by_role("checkbox", name="lr", exact=True)).to_be_hidden()
    page.reload()
    heads = page.locator("thead th")
    expect(heads.filter(has_text="lr")).to_have_count(1)
    expect(heads.filter(has_text="samples/s")).to_have_count(1)
    expect(heads.filter(has_text="steps/s")).to_have_count(0)
    page.get_by_role("button", name="lr").click()
    assert [row.split("\t")[1] for row in page.locator("tbody").inner_text().splitlines() if "\t" in row] == [
        "runs/rose",
        "runs/pear",
        "runs/apple",
    ]
    page.get_by_label("Group by").select_option("task")
    expect(page.locator("tr.group")).to_have_text(["large", "small"])
    page.get_by_role("searchbox").fill("fruit")
    expect(page.locator("tbody tr:not(.group)")).to_have_count(2)


def test_long_list_of_runs_shows_the_first_hundred_until_all_are_asked_for(
    show: Callable[..., Page], tmp_path: Path
) -> None:
    for number in range(105):
        a_run(tmp_path / "runs" / f"run-{number:03d}")
    page = show("runs")
    expect(page.locator("main [role=status]")).to_have_text("105 runs")
    expect(page.locator("tbody tr")).to_have_count(100)
    page.get_by_role("button", name="Show all 105 runs").click()
    expect(page.locator("tbody tr")).to_have_count(105)


def test_run_page_shows_environment_tags_and_utilization(show: Callable[..., Page], tmp_path: Path) -> None:
    about = {"commit": "a" * 40, "branch": "main", "host": "host1", "command": "fit.py --token '***'"}
    run = Written(tmp_path / "runs" / "first", environment=about, tags=["baseline"], notes="wider", torch="2.13.0")
    run.start()
    run.steps({1: 1.0})
    for busy in (20.0, 40.0):
        gpus = [{"used": busy, "memory": 1 << 30}]
        run.say("usage", host="host1", cpu=busy, memory=1 << 30, sent=10.0, received=20.0, gpus=gpus)
    page = show("run?id=runs%2Ffirst")
    expect(page.get_by_role("region", name="Environment")).to_contain_text("fit.py --token '***'")
    expect(page.get_by_role("region", name="Environment")).to_contain_text("a" * 40)
    expect(page.locator(".tag")).to_have_text("baseline")
    assert data_of(page, "CPU and GPU")[1:] == [[20.0, 40.0], [20.0, 40.0]]
    assert data_of(page, "Network")[1:] == [[10.0, 10.0], [20.0, 20.0]]
    expect(page.get_by_role("region", name="Utilization")).to_contain_text("host1")
    run.close()


def test_compare_shows_defaults_of_parameters_that_were_not_set(show: Callable[..., Page], tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "a", defaults={"lr": 0.1, "width": 8}, params={})
    a_run(tmp_path / "runs" / "b", defaults={"lr": 0.1, "width": 8}, params={"lr": 0.5})
    page = show("compare?id=runs%2Fa&id=runs%2Fb")
    table = page.get_by_role("region", name="Differences").last
    expect(table.locator("tr", has=page.get_by_text("lr", exact=True))).to_contain_text("0.10.5")
    expect(table.get_by_text("width", exact=True)).to_have_count(0)


def test_tables_scroll_and_pages_do_not(show: Callable[..., Page], tmp_path: Path) -> None:
    params = {f"a_long_name_of_a_parameter_{number}": number for number in range(12)}
    for name in ("apple", "pear"):
        a_run(tmp_path / "runs" / f"{name}-{'x' * 80}", params=params | {"name": name * 20})
    page = show("runs")
    page.evaluate("(keys) => localStorage.setItem('columns', keys)", json.dumps([f"param {name}" for name in params]))
    ids = page.evaluate("async () => (await (await fetch('/api/overview')).json()).ids")
    chosen = "&".join(f"id={one.replace('/', '%2F')}" for one in ids)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        for where in ("runs", f"run?{chosen.partition('&')[0]}", f"compare?{chosen}"):
            page.goto(f"{page.url.partition('#')[0]}#/{where}")
            page.reload()
            expect(page.locator(".scroll, .facts").first).to_be_visible()
            if where == "runs":
                page.get_by_text("Columns", exact=True).click()
                expect(page.get_by_role("checkbox", name="a_long_name_of_a_parameter_9")).to_be_visible()
            until(page, "document.documentElement.scrollWidth <= innerWidth")
            clipped = """() => [...document.querySelectorAll('table')].filter((t) => {
              const host = t.closest('.scroll'); return !host || getComputedStyle(host).overflowX !== 'auto'
                || host.getBoundingClientRect().right > innerWidth; }).length"""
            assert page.evaluate(clipped) == 0
