"""Shared fixtures: one zygote for the session, a check for leaks after every test, the markers root and gpu."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # sets environment variables of its own when it is first imported

from manyhands.api.runtime import runtime
from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine
from manyhands.options import Equality
from manyhands.testing import no_leaks

from .clean_folder import CleanFolder
from .watchdog import Watchdog

torch.set_num_threads(1)
_NEEDS: list[str] = []
BUDGETS = {
    "test_benchmarks.py": 2.0,
    "test_matrix.py": 1.5,
    "training": 5.5,
    "storage": 2.0,
    "data": 1.5,
    "launcher": 2.3,
    "distributed": 0.7,
    "recovery": 5.5,
    "sync": 1.5,
    "strategies": 3.5,
    "parameter_server": 2.0,
    "profiling": 1.0,
    "monitoring": 0.75,
    "cli": 1.5,
    "tuning": 1.7,
    "ensembles": 1.0,
    "serving": 2.2,
    "vectorized": 1.0,
    "keras": 1.0,
    "dashboard": 1.2,
    "test_package.py": 0.75,
    "test_examples.py": 4.0,
}
"""Minutes that a package's tests may take on two cores, 0.5 by default; slower tests belong to `make bench`."""


def pytest_configure(config: pytest.Config) -> None:
    """Limit the time of every test, and check once, outside xdist's workers, that tests leave no files here."""
    config.pluginmanager.register(Watchdog())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CleanFolder(config.rootpath))


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Let tests send SIGINT also where it is ignored, as under `nohup … &`; processes that tests start inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def engine() -> Iterator[LocalEngine]:
    """The product's own engine, so that all tests fork from one zygote."""
    # What most ranks of tests would import each for itself: their functions live in files that import pytest.
    runtime.engine._preload += ["pytest", "torch.export._trace", "sympy.physics.units"]
    runtime.engine.warm_up()
    yield runtime.engine
    runtime.engine.close()


@pytest.fixture
def run_ranks(engine: LocalEngine) -> Callable[[Callable[[World], Any], int], list[Any]]:
    """Runs a function on so many real processes."""

    def run(fn: Callable[[World], Any], size: int) -> list[Any]:
        devices, _ = resolve(f"cpu*{size}")
        return engine.start(fn, devices, timeout=60).wait(lambda rank, entry: None, lambda *line: print(*line))

    return run


VERIFIED = (
    "test_verify",
    "test_same_results",
    "test_odd_networks",
    "test_carried_state",
    "test_idioms",
    "test_repositories",
    "test_fit",
    "test_run",
    "test_matrix",
)
"""Files whose runs are compared with one device before training, as users' runs are; others would pay for it too."""


@pytest.fixture(autouse=True)
def _verify(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.path.stem
    monkeypatch.setitem(Equality.__init__.__kwdefaults__, "verify", name in VERIFIED)


@pytest.fixture(autouse=True)
def _clean(engine: LocalEngine) -> Iterator[None]:
    threads = torch.get_num_threads()
    # Long enough for processes to end on a loaded machine; only a test that leaks waits for it.
    with no_leaks(patience=20):
        yield
    # Ray puts a handler of its own there.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert torch.get_num_threads() == threads, "a test changed the number of threads for the tests after it"


LONG = ("test_examples.py", "test_benchmarks.py", "test_hosts.py", "test_matrix.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what this machine cannot run; in CI a test that needs root must run."""
    missing = {"gpu": "" if torch.cuda.is_available() else "needs a CUDA device"}
    missing["root"] = "" if os.geteuid() == 0 or os.environ.get("CI") else "needs root"
    for item in list(items):
        reason = next((missing[m.name] for m in item.iter_markers() if missing.get(m.name)), "")
        if reason:
            items.remove(item)
            _NEEDS.append(f"{item.nodeid}: {reason}")
    # A file runs in one process: those that take minutes go first, so that no one waits for them at the end.
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tells the process that reports what this one could not run."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["needs"] = _NEEDS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hears what a process could not run; all of them collect the same."""
    _NEEDS[:] = getattr(node, "workeroutput", {}).get("needs", _NEEDS)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List tests that could not run here, and the time by package."""
    packages: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                parts = report.nodeid.split("/")
                packages[parts[1].split("::")[0]] = packages.get(parts[1].split("::")[0], 0.0) + report.duration
    if packages:
        terminalreporter.section("seconds by package")
        for package, seconds in sorted(packages.items(), key=lambda pair: -pair[1]):
            budget = 60 * BUDGETS.get(package, 0.5)
            mark = "  over its budget" if seconds > budget else ""
            terminalreporter.write_line(f"{seconds:7.1f} of {budget:4.0f}  {package}{mark}")
    if _NEEDS:
        terminalreporter.section("not run on this machine")
        for line in _NEEDS:
            terminalreporter.write_line(line)
