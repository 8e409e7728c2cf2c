"""Public function `tune`: search for the best parameters of a task."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import tuning
from ..core import SettingsError, Task, UsageError, task_name
from ..distributed import Device
from ..monitoring import View
from ..training import new_folder
from ..tuning import Budget, Driver, Executor, Journal, Rules, Stopping, Study, TrialRunner
from .runtime import On, require_positive, runtime
from .signals import interruptible

EXECUTIONS = ("stacked", "processes")


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
    """Search for the best parameters of a task.

    Ctrl-C stops the study and returns it; it can be resumed.

    Args:
        task: A function of parameters that returns a Task, or that returns a measured number or a dict of them.
        space: Ranges of the parameters: `mh.uniform`, `mh.loguniform`, `mh.integers`, `mh.choice`, or a list of values.
        trials: Maximum number of trials.
        objective: Metric to optimize: "valid_loss", "valid_score:max", or a list of several.
        epochs: Epochs of a trial that is not stopped early.
        search: "tpe", "random", "grid" or "cma".
        stop: "asha", "hyperband", "median", or a policy such as `mh.ASHA(factor=4)`, which stops bad trials early.
        seconds: Maximum duration of the study.
        cost: Maximum cost of the study; needs `price`.
        price: Price of a device per hour.
        constraint: Function of the parameters that returns whether they may be tried.
        limits: Upper limits of metrics by name; trials that exceed one do not count.
        params: Other parameters of the task.
        execution: "stacked" trains many trials as one program on one device, "processes" trains each in its own
            process; by default the faster one, by measurement.
        per_device: Processes per device; by default measured.
        on: Devices, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default those of this machine.
        name: Name of the study.
        folder: Folder of the studies; the study is saved in folder/name.
        resume: True to resume the study of that name; "auto" starts it if it does not exist.
        keep: Number of best trials whose networks are kept; so many trials are always trained to the end.
        seed: Seed of the search; the seed of a trial is that of its task.
        progress: False to display nothing.

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
    require_positive(trials=trials, epochs=epochs, keep=keep, per_device=per_device)
    budget = Budget(trials=trials, seconds=seconds, cost=cost, price=price)
    stopping = tuning.as_stopping(stop)
    searcher = tuning.make_searcher(search, ranges, objectives, seed)
    if constraint is not None:
        searcher.keep_to(constraint)
    if searcher.size is None and trials is None and seconds is None and cost is None:
        raise SettingsError("a study needs a limit", remedy="pass trials=, seconds= or cost=")
    if execution is not None and execution not in EXECUTIONS:
        raise SettingsError(
            f"execution must be {' or '.join(EXECUTIONS)}", got=repr(execution), remedy="choose one of them"
        )
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
    engine, devices, notices = runtime.find_devices(on)
    default = f"{task_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    resume = _resumed(folder, name, resume)
    path = new_folder(folder, name, default, resume)
    runner = TrialRunner(task, fixed, epochs, path / tuning.TRIALS, objectives)
    with _removed_on_failure(path, resume), contextlib.closing(Journal(path, ranges)) as journal:
        record = {**tuning.described(rules, search, seed), "params": tuning.as_json(fixed)}
        before, known = tuning.read_journal(path)
        if before:
            tuning.require_same(before, record)
        view = tuning.make_study_view(objectives, limit, progress)
        with contextlib.closing(view):
            view.begin(known)
            for text in notices:
                view.line(text)
            is_alone = (
                len(devices) == 1 and engine is runtime.engine and per_device is None and execution != "processes"
            )
            stack = before.get("stack", 1)
            if is_alone and not before:
                stack = _stack(runner, searcher, constraint, devices[0], limit, execution, view)
            elif execution == "stacked" and not is_alone:
                raise SettingsError(
                    "execution='stacked' needs one device of this machine", got=repr(on), remedy="pass one device"
                )
            if not before:
                journal.begin(path.name, objectives, {**record, "stack": stack})
            executor: Executor
            if not is_alone:
                executor = tuning.Processes(runner, engine, devices, per_device=per_device, on_output=view.output)
            elif stack > 1 or execution == "stacked":
                must = execution == "stacked"
                executor = tuning.Stacked(runner, devices[0], stack, view.line, must_stack=must)
            else:
                executor = tuning.InProcessExecutor(runner, devices[0])
            with contextlib.closing(executor):
                driver = Driver(rules, runner, searcher, journal, known, executor, len(devices), view.show)
                with interruptible(driver.stop, _StudyLines(view)):
                    driver.run()
    return Study(path, task, params=fixed, trials=driver.trials, stopped=driver.is_stopping)


def _resumed(folder: str | Path, name: str | None, resume: bool | str) -> bool:
    """Return whether to resume a study; "auto" resumes it if it exists."""
    if isinstance(resume, str) and resume != "auto":
        raise SettingsError('resume must be True, False or "auto"', got=repr(resume), remedy="choose one of them")
    return (Path(folder) / name).is_dir() if resume == "auto" and name is not None else bool(resume)


@contextlib.contextmanager
def _removed_on_failure(path: Path, resume: bool) -> Iterator[None]:
    """Remove the folder of a new study that failed before anything was measured."""
    try:
        yield
    except UsageError:
        if not resume and not any(trial.is_over for trial in tuning.read_journal(path)[1]):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _stack(
    runner: TrialRunner,
    searcher: tuning.Searcher,
    constraint: tuning.Constraint | None,
    device: Device,
    limit: int | None,
    execution: str | None,
    view: tuning.StudyView,
) -> int:
    """Return how many trials are trained as one program, measured on the first task; 1 for no stacking."""
    try:
        made = runner.look(tuning.proposed(searcher, constraint, 0, []))
    except SettingsError:
        raise
    except Exception:  # reported as the failure of a trial
        return 1
    if not isinstance(made, Task):
        return 1
    size, text = tuning.stack_size(made, device, limit, must_stack=execution == "stacked")
    if text:
        view.line(text)
    return size


class _StudyLines(View):
    """Prints lines through the study's view."""

    def __init__(self, view: tuning.StudyView) -> None:
        self._view = view

    def line(self, text: str) -> None:
        self._view.line(text)
