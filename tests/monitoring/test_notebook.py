"""Notebooks: results display themselves as HTML, fit and tune update one output, and interrupting stops them."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jupyter_client.manager import KernelManager

import manyhands as mh
from manyhands.core import event, html_curve, html_table
from manyhands.monitoring import make_view
from manyhands.monitoring.notebook import NUM_LINES, NotebookView
from manyhands.planning import Plan
from manyhands.tuning import Objective, Trial, make_study_view

EVIL = "<img src=x onerror=alert(1)>"
WAIT = 90


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend to be the kernel of a notebook; the HTML that its one output showed, in order."""
    updates: list[str] = []

    class Handle:
        def update(self, html: SimpleNamespace) -> None:
            updates.append(html.data)

    def display(html: SimpleNamespace, *, display_id: bool) -> Handle:
        assert display_id
        return Handle()

    shell = SimpleNamespace(kernel=object())
    kernel = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    boundary = SimpleNamespace(HTML=lambda data: SimpleNamespace(data=data), display=display)
    kernel.display = boundary
    return updates


class Checker(HTMLParser):
    """Notes every tag, every attribute that refers to something, and whether tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> str:
    """Return the HTML if it is well-formed, without scripts and references."""
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    assert not checker.references
    assert checker.tags.isdisjoint({"script", "img", "link", "iframe", "style"})
    return html


def task(lr: float = 0.1) -> mh.Task:
    torch.manual_seed(0)
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        data=(torch.randn(64, 4), torch.ones(64, 1)),
        valid=(torch.randn(16, 4), torch.ones(16, 1)),
        metrics={EVIL: lambda outputs, batch: outputs.mean()},
        batch_size=8,
    )


QUIET = mh.options.Display(progress=False)


def test_run_and_predictor_display_as_escaped_html(tmp_path: Path) -> None:
    run = mh.fit(task(), epochs=2, on="cpu", folder=tmp_path, name="first", options=QUIET)
    html = checked(run._repr_html_())
    assert "run first" in html
    assert "<tr><td>steps</td><td>16</td></tr>" in html
    assert "<polyline" in html
    assert "valid_&lt;img src=x" in html
    signature = checked(run.predictor()._repr_html_())
    assert "ModelPredictor" in signature
    assert "<td>input</td>" in signature
    assert "float32[*, 4]" in signature


def test_study_displays_its_best_trials_as_html(tmp_path: Path) -> None:
    def bowl(x: float = 0.0) -> float:
        return (x - 2) ** 2

    space = {"x": mh.tuning.uniform(-5.0, 5.0)}
    study = mh.tune(
        bowl,
        space,
        trials=8,
        objective=f"{EVIL}:min",
        folder=tmp_path,
        on="cpu",
        name="bowl",
        options=[QUIET, mh.options.Algorithm(search="random")],
    )
    html = checked(study._repr_html_())
    assert "study bowl: the best of 8 trials" in html
    assert html.count("<tr>") == 1 + 5
    assert html.index(f"<td>{study.best.value:.4g}</td>") < html.index(f"<td>{study.top(5)[-1].value:.4g}</td>")
    assert "8 finished" in html


def test_plan_profile_and_split_tables_display_as_html() -> None:
    found = mh.plan(task(), "4 hosts x 8 A100, 100Gb/s")
    assert isinstance(found, Plan)
    plan = checked(found._repr_html_())
    assert "8 samples a step on 4 hosts" in plan
    assert "pick: " in plan
    profile = checked(mh.profile(task(), on="cpu")._repr_html_())
    assert "<th>part of a step</th>" in profile
    assert "forward" in profile
    split = checked(mh.explain(task(), mh.Sharded(2))._repr_html_())
    assert "<td>Linear</td>" in split
    assert "a device sends" in split
    outline = checked(mh.explain(task(), mh.Pipeline(2), on="cpu*2")._repr_html_())
    assert "<svg" in outline


def test_html_helpers_escape_and_leave_out_what_is_not_finite() -> None:
    table = checked(html_table(EVIL, [(EVIL, 1)], (EVIL,)))
    assert table.count("&lt;img") == 3
    assert html_curve([1.0], "loss") == ""
    assert html_curve([float("nan"), float("inf"), 2.0], "loss") == ""
    curve = checked(html_curve([3.0, float("nan"), 1.0], EVIL))
    assert "nan" not in curve
    (points,) = re.findall(r'points="([^"]*)"', curve)
    assert len(points.split()) == 2


def steps(*numbers: int) -> dict[str, Any]:
    losses = {"loss": [1.0 / number for number in numbers]}
    return event("steps", steps=[*numbers], losses=losses, epoch=0, samples_per_second=1234.5)


def test_notebook_view_shows_progress_time_left_curve_and_messages(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    view = make_view(EVIL, None)
    assert isinstance(view, NotebookView)
    view.show(0, event("start", total=10, step=0))
    clock[0] = 4.0
    view.show(0, steps(1, 2))
    assert '<progress value="2" max="10"></progress> step 2 of 10, loss 0.5000, 1,234 samples/s' in shown[-1]
    assert "about 16 s left" in shown[-1]
    assert "<polyline" in shown[-1]
    view.show(0, event("epoch", epoch=0, step=2, losses={"loss": 0.75}, metrics={"valid_loss": 0.5}))
    for number in range(NUM_LINES + 2):
        view.line(f"{EVIL} {number}")
    assert "valid_loss 0.5" in shown[-1]
    assert f"&gt; {NUM_LINES + 1}" in shown[-1]
    assert "&gt; 1<" not in shown[-1]
    view.show(0, event("end", step=2, stopped=True, seconds={}))
    view.close()
    assert "stopped" in shown[-1]
    assert "left" not in shown[-1]
    for html in shown:
        checked(html)


def test_notebook_view_of_a_study_shows_progress_best_trial_and_failures(shown: list[str]) -> None:
    view = make_study_view([Objective("height", "min")], 4, None)
    trials = [Trial(number, {"x": 0.5 * number}) for number in range(3)]
    view.begin(trials)
    for trial, value in zip(trials, (3.0, 1.0, 2.0), strict=True):
        trial.state, trial.values = "finished", (value,)
        view.show(trial)
    failed = Trial(3, {"x": 2.0}, state="failed", reason=EVIL)
    trials.append(failed)
    view.show(failed)
    view.close()
    html = checked(shown[-1])
    assert '<progress value="4" max="4"></progress> 4 of 4 trials; best height 1 (trial 1: x=0.5)' in html
    assert "from 3 to 1" in html
    assert "trial 3 failed: &lt;img" in html


def test_quiet_runs_display_nothing_in_a_notebook(shown: list[str]) -> None:
    make_view("title", False).line("text")
    make_study_view([Objective("height", "min")], 4, False).line("text")
    assert shown == []


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, Any]]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=WAIT)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel()
    manager.cleanup_resources()
    manager.context.destroy()


def run_cell(client: Any, code: str, on_output: Callable[[str], None] = lambda html: None) -> str:
    """Run a cell; return what it printed and raised. `on_output` gets the HTML of each update of its output."""
    asked = client.execute(code)
    printed = ""
    while True:
        message = client.get_iopub_msg(timeout=WAIT)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data"):
            on_output(content["data"].get("text/html", ""))
        elif kind == "stream":
            printed += content["text"]
        elif kind == "error":
            printed += f"{content['ename']}: {content['evalue']}"
        elif kind == "status" and content["execution_state"] == "idle":
            return printed


SCRIPT = """
import torch, manyhands as mh
task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    data=(torch.randn(64, 4), torch.ones(64, 1)),
    batch_size=8,
)
"""


def test_interrupting_a_cell_stops_the_run_and_keeps_the_kernel(kernel: tuple[KernelManager, Any]) -> None:
    manager, client = kernel
    assert run_cell(client, SCRIPT) == ""
    for on in ("cpu", "cpu*2"):
        updates: list[str] = []
        interrupt = functools.cache(manager.interrupt_kernel)

        def once(html: str, updates: list[str] = updates, interrupt: Callable[[], None] = interrupt) -> None:
            updates.append(html)
            if re.search(r"step [1-9]", html):
                interrupt()

        assert run_cell(client, f"run = mh.fit(task, on={on!r}, epochs=1_000_000)", once) == ""
        assert "stopped" in updates[-1]
        assert 'max="8000000"' in updates[-1]
        assert run_cell(client, "print(run.stopped, run.num_steps > 0)") == "True True\n"
