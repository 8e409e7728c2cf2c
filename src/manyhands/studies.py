"""The verbs of many networks: `map`, a function on many inputs, and `tune`, a search for the best parameters."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import tuning
from .core import SettingsError, Task, UsageError, task_name
from .distributed import Device
from .launcher import Engine, engine_for
from .training import View, make_view, new_folder
from .tuning import Budget, Driver, Executor, Journal, Rules, Stopping, Study, TrialRunner
from .verbs import On, _engine, _interruptible

EXECUTIONS = ("stacked", "processes")


def map(
    fn: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    on: On = None,
    per_device: int | None = None,
    progress: bool | None = None,
) -> list[Any]:
    """Calls a function on many inputs, in a process on each device; the results come in the inputs' order.

    - `on`: where, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default what this machine has;
    - `per_device`: how many processes share a device; by default as many as get the most done, which is measured.

    An input that fails does not hold the others up: they are all done, and then `ItemsFailed` names it. One whose
    process dies is tried once more. Ctrl-C ends all processes. In a process on a GPU that GPU is the current device.

    >>> import manyhands as mh
    >>> mh.map(lambda n: n * n, [1, 2, 3], on="cpu", per_device=1)
    [1, 4, 9]
    """
    if not callable(fn):
        raise SettingsError("map calls a function", got=type(fn).__name__, remedy="pass one")
    _require_number(per_device, "per_device")
    todo = list(items)
    if not todo:
        return []
    engine, devices, _ = _place(on)
    if len(devices) == 1 and per_device == 1 and engine is _engine:
        return _mapped_here(fn, todo)
    view = make_view("map", progress, live=False)
    try:
        return tuning.map_items(fn, todo, engine, devices, per_device=per_device, on_output=view.output)
    finally:
        view.close()


def tune(
    task: Task | Callable[..., Any],
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    objective: str | Sequence[str] = "valid_loss",
    epochs: int = 1,
    search: str = "tpe",
    stop: Stopping | str | None = None,
    seconds: float | None = None,
    cost: float | None = None,
    price: float | None = None,
    constraint: tuning.Constraint | None = None,
    limits: Mapping[str, float] | None = None,
    params: Mapping[str, Any] | None = None,
    execution: str | None = None,
    per_device: int | None = None,
    on: On = None,
    name: str | None = None,
    folder: str | Path = "studies",
    resume: bool | str = False,
    keep: int = 1,
    seed: int = 0,
    progress: bool | None = None,
) -> Study:
    """Searches for the best parameters of a task.

    - `task`: a function of parameters that makes a Task, or that returns what it measured, a number or a dict of them;
    - `space`: what they may be: `mh.uniform`, `mh.loguniform`, `mh.integers`, `mh.choice`, or a list of values;
    - `trials`, `seconds`, `cost`: when to end; `price` is what a device costs in an hour;
    - `objective`: what is made small, or large: "valid_loss", "valid_score:max", or a list of several;
    - `epochs`: passes over the data of a trial that is not stopped before;
    - `search`: "tpe", "random", "grid" or "cma";
    - `stop`: "asha", "hyperband", "median", or `mh.ASHA(factor=4)` and its like: ends trials that do not look good;
    - `constraint`: a function of the parameters that says whether they may be tried; `limits`: what a trial may have
      measured at most, by name, to count;
    - `params`: the task's other parameters;
    - `execution`: "stacked" trains many trials as one program, on one device; "processes" one in each; by default what
      measures better;
    - `per_device`: how many processes share a device; by default what measures better;
    - `on`: where, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default what this machine has;
    - `name`, `folder`, `resume`: the study is kept under folder/name, and goes on from there after any crash; "auto"
      begins it where there is none yet;
    - `keep`: of how many of the best trials the trained networks stay; so many come to the end, whoever is stopped;
    - `seed`: of the search; a trial's own randomness is its task's.

    Ctrl-C ends the study where it can go on, and returns it.

    >>> import tempfile, manyhands as mh
    >>> def bowl(x: float = 0.0) -> float:
    ...     return (x - 2) ** 2
    >>> space = {"x": mh.uniform(-5.0, 5.0)}
    >>> study = mh.tune(
    ...     bowl, space, trials=40, objective="height:min", folder=tempfile.mkdtemp(), on="cpu", progress=False
    ... )
    >>> abs(study.best.params["x"] - 2) < 0.5
    True
    """
    ranges = tuning.as_space(space)
    fixed = dict(params or {})
    task = tuning.check_space(ranges, task, fixed)
    objectives = tuning.as_objectives(objective)
    for number, what in ((trials, "trials"), (epochs, "epochs"), (keep, "keep"), (per_device, "per_device")):
        _require_number(number, what)
    budget = Budget(trials=trials, seconds=seconds, cost=cost, price=price)
    stopping = tuning.as_stopping(stop)
    searcher = tuning.make_searcher(search, ranges, objectives, seed)
    if constraint is not None:
        searcher.keep_to(constraint)
    if searcher.size is None and trials is None and seconds is None and cost is None:
        raise SettingsError("a study has an end", got="none", remedy="pass trials=, seconds= or cost=")
    if execution is not None and execution not in EXECUTIONS:
        raise SettingsError(f"execution is {' or '.join(EXECUTIONS)}", got=repr(execution), remedy="name one of these")
    ends = [size for size in (trials, searcher.size) if size is not None]
    limit = min(ends, default=None)
    rules = Rules(
        space=ranges,
        objectives=objectives,
        epochs=epochs,
        stopping=stopping,
        budget=budget,
        constraint=constraint,
        limits=dict(limits or {}),
        keep=keep,
    )
    engine, devices, notices = _place(on)
    default = f"{task_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    resume = _resumed(folder, name, resume)
    path = new_folder(folder, name, default, resume)
    workshop = TrialRunner(task, fixed, epochs, path / tuning.TRIALS, objectives)
    with _taken_away_if_useless(path, resume), contextlib.closing(Journal(path, ranges)) as journal:
        record = {**tuning.described(rules, search, seed), "params": tuning.as_json(fixed)}
        before, known = tuning.read_journal(path)
        if before:
            tuning.require_same(before, record)
        view = tuning.make_study_view(objectives, limit, progress)
        with contextlib.closing(view):
            view.begin(known)
            for text in notices:
                view.line(text)
            is_alone = len(devices) == 1 and engine is _engine and per_device is None and execution != "processes"
            stack = before.get("stack", 1)
            if is_alone and not before:
                stack = _stack(workshop, searcher, constraint, devices[0], limit, execution, view)
            elif execution == "stacked" and not is_alone:
                raise SettingsError("a stack is on one device of this machine", got=repr(on), remedy="name one")
            if not before:
                journal.begin(path.name, objectives, {**record, "stack": stack})
            executor: Executor
            if not is_alone:
                executor = tuning.Processes(workshop, engine, devices, per_device=per_device, on_output=view.output)
            elif stack > 1 or execution == "stacked":
                must = execution == "stacked"
                executor = tuning.Stacked(workshop, devices[0], stack, view.line, must_stack=must)
            else:
                executor = tuning.InProcessExecutor(workshop, devices[0])
            with contextlib.closing(executor):
                driver = Driver(rules, workshop, searcher, journal, known, executor, len(devices), view.show)
                with _interruptible(driver.stop, _Said(view)):
                    driver.run()
    return Study(path, task, params=fixed, trials=driver.trials, stopped=driver.is_stopping)


def _resumed(folder: str | Path, name: str | None, resume: bool | str) -> bool:
    """Whether to go on with a study; "auto" does where there is one."""
    if isinstance(resume, str) and resume != "auto":
        raise SettingsError('resume is True, False or "auto"', got=repr(resume), remedy="pass one of these")
    return (Path(folder) / name).is_dir() if resume == "auto" and name is not None else bool(resume)


@contextlib.contextmanager
def _taken_away_if_useless(path: Path, resume: bool) -> Iterator[None]:
    """A new study that a mistake has ended before anything was measured leaves no folder."""
    try:
        yield
    except UsageError:
        if not resume and not any(trial.is_over for trial in tuning.read_journal(path)[1]):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _stack(
    workshop: TrialRunner,
    searcher: tuning.Searcher,
    constraint: tuning.Constraint | None,
    device: Device,
    limit: int | None,
    execution: str | None,
    view: tuning.StudyView,
) -> int:
    """How many trials are trained as one program, as the first one's task measures; 1 for none."""
    try:
        made = workshop.look(tuning.proposed(searcher, constraint, 0, []))
    except SettingsError:
        raise
    except Exception:  # what it raises is told as a trial's failure
        return 1
    if not isinstance(made, Task):
        return 1
    size, said = tuning.stack_size(made, device, limit, must_stack=execution == "stacked")
    if said:
        view.line(said)
    return size


def _place(on: On) -> tuple[Engine, list[Device], list[str]]:
    engine = engine_for(on, _engine)
    devices, notices = engine.devices(on, None)
    return engine, devices, notices


def _mapped_here(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """In this process, so that a debugger works."""
    results: list[Any] = []
    failures: dict[int, BaseException] = {}
    for place, item in enumerate(items):
        try:
            results.append(fn(item))
        except (Exception, SystemExit) as error:
            results.append(None)
            failures[place] = error
    if failures:
        raise tuning.ItemsFailed(results, failures, items) from failures[min(failures)]
    return results


def _require_number(value: int | None, name: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise SettingsError(f"{name} must be a whole number of at least 1", got=value, remedy=f"pass {name}=1 or more")


class _Said(View):
    """Says what the study's view should."""

    def __init__(self, view: tuning.StudyView) -> None:
        self._view = view

    def line(self, text: str) -> None:
        self._view.line(text)
