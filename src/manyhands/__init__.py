"""manyhands shares neural networks out among devices and servers.

Write ordinary single-device PyTorch once; one word, the strategy, changes how it is split.

    import manyhands as mh
    run = mh.fit(task, mh.Mirrored(), epochs=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import sync
    from .core import (
        Mirrored,
        ParameterServer,
        Pipeline,
        Placed,
        Predictor,
        Sharded,
        Single,
        StrategySpec,
        Task,
        TensorParallel,
        mean,
    )
    from .cuts import cut
    from .data import bucketed, files
    from .diagnostics import doctor
    from .distributed import Device, devices
    from .ensembles import Answer, Team, TeamApart
    from .launcher import Join
    from .plans import plan
    from .profiles import profile
    from .serving import Client
    from .storage import load, weights
    from .strategies import Embedding, on
    from .studies import map, tune
    from .teams import apart, ensemble
    from .training import Callback, Hand, Patience, Run, Sink, hand
    from .tuning import ASHA, Hyperband, Median, Study, Trial, choice, integers, loguniform, uniform
    from .verbs import check, evaluate, explain, fit, launch, predict, replay, route, serve

__version__ = "0.1.0"

__all__ = [
    "Task",
    "mean",
    "fit",
    "launch",
    "hand",
    "plan",
    "map",
    "tune",
    "ensemble",
    "apart",
    "uniform",
    "loguniform",
    "integers",
    "choice",
    "ASHA",
    "Hyperband",
    "Median",
    "Study",
    "Trial",
    "profile",
    "Team",
    "TeamApart",
    "Answer",
    "check",
    "cut",
    "evaluate",
    "explain",
    "predict",
    "serve",
    "route",
    "Client",
    "replay",
    "load",
    "weights",
    "files",
    "bucketed",
    "devices",
    "doctor",
    "Single",
    "Mirrored",
    "Sharded",
    "ParameterServer",
    "Embedding",
    "TensorParallel",
    "Pipeline",
    "Placed",
    "on",
    "StrategySpec",
    "sync",
    "Run",
    "Hand",
    "Predictor",
    "Callback",
    "Patience",
    "Sink",
    "Device",
    "Join",
]

_HOMES = {
    "cuts": ["cut"],
    "core": [
        "Task",
        "mean",
        "Single",
        "Mirrored",
        "Sharded",
        "TensorParallel",
        "ParameterServer",
        "Pipeline",
        "Placed",
        "StrategySpec",
        "Predictor",
    ],
    "distributed": ["Device", "devices"],
    "launcher": ["Join"],
    "diagnostics": ["doctor"],
    "plans": ["plan"],
    "studies": ["map", "tune"],
    "ensembles": ["Answer", "Team", "TeamApart"],
    "teams": ["apart", "ensemble"],
    "tuning": ["ASHA", "Hyperband", "Median", "Study", "Trial", "choice", "integers", "loguniform", "uniform"],
    "profiles": ["profile"],
    "storage": ["load", "weights"],
    "strategies": ["Embedding", "on"],
    "data": ["files", "bucketed"],
    "training": ["Callback", "Hand", "Patience", "Run", "Sink", "hand"],
    "serving": ["Client"],
    "verbs": ["check", "evaluate", "explain", "fit", "launch", "predict", "replay", "route", "serve"],
}
_ROOMS = ("sync",)
"""Rooms whose names people write themselves: mh.sync.TopK(0.01)."""
_STRATEGIES = ("Mirrored", "Sharded", "TensorParallel", "Pipeline", "Placed")
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a room when it is first asked for, so that `import manyhands` costs nothing by itself."""
    from importlib import import_module

    if name in _STRATEGIES:
        # The policies are known there, so that a strategy that names another one is refused at once.
        import_module(".sync", __name__)
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
