"""manyhands distributes neural networks over devices and servers.

Write single-device PyTorch once, and choose a strategy that decides how it is distributed.

    import manyhands as mh
    run = mh.fit(task, mh.Mirrored(), epochs=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import serving, sync
    from .api.check import check
    from .api.ensemble import ensemble
    from .api.evaluate import evaluate, predict
    from .api.explain import explain
    from .api.fit import fit
    from .api.launch import launch
    from .api.map import map
    from .api.partition import partition
    from .api.plan import plan
    from .api.profile import profile
    from .api.remote_ensemble import remote_ensemble
    from .api.replay import replay
    from .api.route import route
    from .api.serve import serve
    from .api.tune import tune
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
        TorchScheduler,
        mean,
    )
    from .data import bucketed, files
    from .diagnostics import doctor
    from .distributed import Device, devices
    from .ensembles import Ensemble, EnsemblePrediction, RemoteEnsemble
    from .launcher import Join
    from .monitoring import Sink
    from .serving import Client
    from .storage import load, weights
    from .strategies import Embedding, place_on
    from .training import Callback, Hand, Patience, Run, hand
    from .tuning import ASHA, Hyperband, Median, Study, Trial, choice, integers, loguniform, uniform

__version__ = "0.1.0"

__all__ = [
    "Task",
    "TorchScheduler",
    "mean",
    "fit",
    "launch",
    "hand",
    "plan",
    "map",
    "tune",
    "ensemble",
    "remote_ensemble",
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
    "Ensemble",
    "RemoteEnsemble",
    "EnsemblePrediction",
    "check",
    "partition",
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
    "place_on",
    "StrategySpec",
    "sync",
    "serving",
    "Run",
    "Hand",
    "Predictor",
    "Callback",
    "Patience",
    "Sink",
    "Device",
    "Join",
]

_MODULES = {
    "api.check": ["check"],
    "api.ensemble": ["ensemble"],
    "api.evaluate": ["evaluate", "predict"],
    "api.explain": ["explain"],
    "api.fit": ["fit"],
    "api.launch": ["launch"],
    "api.map": ["map"],
    "api.partition": ["partition"],
    "api.plan": ["plan"],
    "api.profile": ["profile"],
    "api.remote_ensemble": ["remote_ensemble"],
    "api.replay": ["replay"],
    "api.route": ["route"],
    "api.serve": ["serve"],
    "api.tune": ["tune"],
    "core": [
        "Task",
        "TorchScheduler",
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
    "ensembles": ["EnsemblePrediction", "Ensemble", "RemoteEnsemble"],
    "tuning": ["ASHA", "Hyperband", "Median", "Study", "Trial", "choice", "integers", "loguniform", "uniform"],
    "storage": ["load", "weights"],
    "strategies": ["Embedding", "place_on"],
    "data": ["files", "bucketed"],
    "training": ["Callback", "Hand", "Patience", "Run", "hand"],
    "monitoring": ["Sink"],
    "serving": ["Client"],
}
_SUBPACKAGES = ("serving", "sync")
"""Subpackages that are part of the public interface: mh.sync.TopK(0.01)."""
_STRATEGIES = ("Mirrored", "Sharded", "TensorParallel", "Pipeline", "Placed")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a module when one of its names is first used, so that `import manyhands` is fast."""
    from importlib import import_module

    if name in _STRATEGIES:
        # Registers the sync policies, so that a strategy with an unknown policy raises at once.
        import_module(".sync", __name__)
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
