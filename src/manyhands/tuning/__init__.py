"""Hyper-parameter tuning: search spaces, studies, and trials in this process, in other processes or stacked (vmap)."""

from .driver import Driver, Rules, TrialsFailed, as_json, described, proposed, require_same
from .executors import Executor, InProcessExecutor, Processes
from .journal import Journal, read_journal
from .mapping import ItemsFailed, map_items
from .objective import Objective, as_objectives
from .searching import Constraint, Searcher, make_searcher
from .space import Range, Space, as_space, check_space, choice, integers, loguniform, parse_range, uniform
from .stopping import ASHA, Hyperband, Median, Stopping, as_stopping
from .study import TRIALS, Study
from .trial import Trial
from .trial_work import TrialRunner
from .vectorized_trials import Stacked, stack_size
from .view import StudyView, make_study_view

__all__ = [
    "Study",
    "Trial",
    "uniform",
    "loguniform",
    "integers",
    "choice",
    "Range",
    "Space",
    "as_space",
    "check_space",
    "parse_range",
    "Objective",
    "as_objectives",
    "Searcher",
    "Constraint",
    "make_searcher",
    "Stopping",
    "ASHA",
    "Hyperband",
    "Median",
    "as_stopping",
    "Journal",
    "TRIALS",
    "read_journal",
    "Rules",
    "Driver",
    "TrialsFailed",
    "as_json",
    "described",
    "proposed",
    "require_same",
    "TrialRunner",
    "Executor",
    "InProcessExecutor",
    "Processes",
    "Stacked",
    "stack_size",
    "map_items",
    "ItemsFailed",
    "StudyView",
    "make_study_view",
]
