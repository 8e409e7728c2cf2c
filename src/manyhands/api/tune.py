"""Public function `tune`: search for the best parameters of a task."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import tuning
from ..core import SettingsError, Task, UsageError, require_positive, split_params, task_name
from ..distributed import Device
from ..monitoring import View
from ..options import Algorithm, Budget, Display, Execution, Selection, collect, takes_options
from ..training import new_folder
from ..tuning import Driver, Executor, Journal, Rules, Study, TrialRunner
from .runtime import On, runtime
from .signals import interruptible

OPTIONS = (Algorithm, Budget, Selection, Execution, Display)
TuneOptions = Algorithm | Budget | Selection | Execution | Display


@takes_options(*OPTIONS)
def tune(
    task: Task | Callable[..., Any],
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    objective: str | Sequence[str] = "valid_loss",
    epochs: int = 1,
    on: On = None,
    name: str | None = None,
    folder: str | Path = "studies",
    resume: bool | str = False,
    options: TuneOptions | Sequence[TuneOptions] | None = None,
) -> Study:
    """Search for the best parameters of a task.

    On Ctrl-C the study stops and is returned. It can be resumed.

    Args:
        task: A function of parameters that returns a Task, or that returns a measured number or a dict of them;
            `functools.partial(task, width=64)` sets parameters that are not searched.
        space: Ranges of the parameters: `mh.tuning.uniform`, `loguniform`, `integers`, `choice`, or a list of values.
        trials: Maximum number of trials.
        objective: Metric to optimize: "valid_loss", "valid_score:max", or a list of several.
        epochs: Epochs of a trial that is not stopped early.
        on: Devices, such as "cuda:0,1", "cpu*2" or "ray://head:10001"; by default those of this machine.
        name: Name of the study; by default the name of the task and the time.
        folder: Folder of the studies; the study is saved in folder/name.
        resume: True to resume the study of that name; "auto" starts it if it does not exist.
        options: An object, or a list of several, of the following classes.
            `mh.options.Algorithm(search=, stop=, seed=)`: the search, which is "tpe", "random", "grid" or "cma"; and
            early stopping of bad trials: "asha", "hyperband", "median", or a policy such as `mh.tuning.ASHA(factor=4)`.
            `mh.options.Budget(seconds=, cost=, price=)`: limits of the study's time and cost.
            `mh.options.Selection(constraint=, limits=, keep=)`: which parameters may be tried, upper limits of
            metrics, and how many of the best networks are kept.
            `mh.options.Execution(execution=, per_device=)`: whether trials are trained as one program, and the number
            of processes per device.
            `mh.options.Display(progress=False)`: no output.

    >>> import tempfile, manyhands as mh
    >>> def bowl(x: float = 0.0) -> float:
    ...     return (x - 2) ** 2
    >>> space = {"x": mh.tuning.uniform(-5.0, 5.0)}
    >>> quiet = mh.options.Display(progress=False)
    >>> study = mh.tune(
    ...     bowl, space, trials=40, objective="height:min", folder=tempfile.mkdtemp(), on="cpu", options=quiet
    ... )
    >>> abs(study.best.params["x"] - 2) < 0.5
    True
    """
    algorithm, budget, selection, how, display = collect("tune", OPTIONS, options)
    ranges = tuning.as_space(space)
    task, fixed = split_params(task)
    task = tuning.check_space(ranges, task, fixed)
    objectives = tuning.as_objectives(objective)
    require_positive(trials=trials, epochs=epochs)
    stopping = tuning.as_stopping(algorithm.stop)
    searcher = tuning.make_searcher(algorithm.search, ranges, objectives, algorithm.seed)
    if selection.constraint is not None:
        searcher.keep_to(selection.constraint)
    if searcher.size is None and trials is None and budget.seconds is None and budget.cost is None:
        raise SettingsError("a study needs a limit", remedy="pass trials=, or options=mh.options.Budget(seconds=...)")
    ends = [size for size in (trials, searcher.size) if size is not None]
    limit = min(ends, default=None)
    rules = Rules(
        space=ranges,
        objectives=objectives,
        epochs=epochs,
        stopping=stopping,
        budget=budget,
        trials=trials,
        constraint=selection.constraint,
        limits=dict(selection.limits or {}),
        keep=selection.keep,
    )
    engine, devices, notices = runtime.find_devices(on)
    default = f"{task_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    resume = _resumed(folder, name, resume)
    path = new_folder(folder, name, default, resume)
    runner = TrialRunner(task, fixed, epochs, path / tuning.TRIALS, objectives)
    with _removed_on_failure(path, resume), contextlib.closing(Journal(path, ranges)) as journal:
        record = {**tuning.described(rules, algorithm.search, algorithm.seed), "params": tuning.as_json(fixed)}
        before, known = tuning.read_journal(path)
        if before:
            tuning.require_same(before, record)
        view = tuning.make_study_view(objectives, limit, display.progress)
        with contextlib.closing(view):
            view.begin(known)
            for text in notices:
                view.line(text)
            is_alone = len(devices) == 1 and engine is runtime.engine
            is_alone = is_alone and how.per_device is None and how.execution != "processes"
            must = how.execution == "stacked"
            stack = before.get("stack", 1)
            if is_alone and not before:
                stack = _stack(runner, searcher, selection.constraint, devices[0], limit, must, view)
            elif must and not is_alone:
                raise SettingsError(
                    "execution='stacked' needs one device of this machine, without per_device=",
                    got=f"on={on!r}",
                    remedy='pass for example on="cuda:0"',
                )
            if not before:
                journal.begin(path.name, objectives, {**record, "stack": stack})
            executor: Executor
            if not is_alone:
                executor = tuning.Processes(runner, engine, devices, per_device=how.per_device, on_output=view.output)
            elif stack > 1 or must:
                executor = tuning.Stacked(runner, devices[0], stack, view.line, must_stack=must)
            else:
                executor = tuning.InProcessExecutor(runner, devices[0])
            with contextlib.closing(executor):
                driver = Driver(rules, runner, searcher, journal, known, executor, len(devices), view.show)
                with interruptible(driver.stop, _StudyLines(view)):
                    driver.run()
            study = Study(path, task, params=fixed, trials=driver.trials, stopped=driver.is_stopping)
            for text in study.conclusions() if display.progress is not False else ():
                view.line(text)
    return study


def _resumed(folder: str | Path, name: str | None, resume: bool | str) -> bool:
    """Return whether to resume a study; for "auto", whether the study of that name exists."""
    if isinstance(resume, str) and resume != "auto":
        raise SettingsError('resume must be True, False or "auto"', got=repr(resume), remedy="choose one of them")
    return (Path(folder) / name).is_dir() if resume == "auto" and name is not None else bool(resume)


@contextlib.contextmanager
def _removed_on_failure(path: Path, resume: bool) -> Iterator[None]:
    """Remove the folder of a new study if a UsageError ends it before any trial has ended."""
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
    must: bool,
    view: tuning.StudyView,
) -> int:
    """Return how many trials are trained as one program; 1 if they are trained one after another.

    The number is measured with the task of the first trial, and a line about it is displayed.

    Args:
        runner: Creates the task of a trial from its parameters.
        searcher: Proposes the parameters of the first trial.
        constraint: Function that rejects parameters, or None.
        device: Device of the trials.
        limit: Maximum number of trials, or None.
        must: Whether `execution="stacked"` was requested, so that an error is raised if trials cannot be stacked.
        view: View of the study.
    """
    try:
        made = runner.look(tuning.proposed(searcher, constraint, 0, []))
    except SettingsError:
        raise
    except Exception:  # reported as the failure of a trial
        return 1
    if not isinstance(made, Task):
        return 1
    size, text = tuning.stack_size(made, device, limit, must_stack=must)
    if text:
        view.line(text)
    return size


class _StudyLines(View):
    """View that displays lines through the view of a study."""

    def __init__(self, view: tuning.StudyView) -> None:
        self._view = view

    def line(self, text: str) -> None:
        self._view.line(text)
