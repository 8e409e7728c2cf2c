"""Search algorithms that propose the parameters of trials, by name; each has its own file."""

from collections.abc import Sequence

from ...core import SettingsError
from ..objective import Objective
from ..space import Space
from .cma import CMA
from .grid import GridSearch
from .random_search import RandomSearch
from .searcher import Constraint, Searcher
from .tpe import TPE, require_optuna

SEARCHERS: dict[str, type[Searcher]] = {"tpe": TPE, "random": RandomSearch, "grid": GridSearch, "cma": CMA}


def make_searcher(name: str, space: Space, objectives: Sequence[Objective], seed: int) -> Searcher:
    """Return a new searcher by its name, such as "tpe"; raise SettingsError if the name is unknown."""
    if name not in SEARCHERS:
        raise SettingsError(
            f"search must be one of {', '.join(SEARCHERS)}", got=repr(name), remedy="choose one of them"
        )
    return SEARCHERS[name](space, objectives, seed)


__all__ = ["SEARCHERS", "Constraint", "Searcher", "make_searcher", "require_optuna"]
