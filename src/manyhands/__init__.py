"""manyhands distributes neural networks over devices and servers.

Write single-device PyTorch once, and choose a strategy that decides how it is distributed.

    import manyhands as mh
    run = mh.fit(task, mh.Mirrored(), epochs=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import data, distributed, ensembles, monitoring, options, serving, storage, strategies, sync, tuning
    from .api.check import check
    from .api.ensemble import ensemble
    from .api.evaluate import evaluate, predict
    from .api.explain import explain
    from .api.export import export
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
        ContextParallel,
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
    from .diagnostics import doctor
    from .distributed import devices
    from .launcher import Join
    from .storage import load
    from .training import Callback, Hand, Patience, Run, hand

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
    "profile",
    "check",
    "partition",
    "evaluate",
    "explain",
    "export",
    "predict",
    "serve",
    "route",
    "replay",
    "load",
    "devices",
    "doctor",
    "Single",
    "Mirrored",
    "Sharded",
    "ParameterServer",
    "TensorParallel",
    "ContextParallel",
    "Pipeline",
    "Placed",
    "StrategySpec",
    "data",
    "distributed",
    "ensembles",
    "monitoring",
    "options",
    "serving",
    "storage",
    "strategies",
    "sync",
    "tuning",
    "Run",
    "Hand",
    "Predictor",
    "Callback",
    "Patience",
    "Join",
]

_MODULES = {
    "api.check": ["check"],
    "api.ensemble": ["ensemble"],
    "api.evaluate": ["evaluate", "predict"],
    "api.explain": ["explain"],
    "api.export": ["export"],
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
        "ContextParallel",
        "ParameterServer",
        "Pipeline",
        "Placed",
        "StrategySpec",
        "Predictor",
    ],
    "distributed": ["devices"],
    "launcher": ["Join"],
    "diagnostics": ["doctor"],
    "storage": ["load"],
    "training": ["Callback", "Hand", "Patience", "Run", "hand"],
}
_SUBPACKAGES = (
    "data", "distributed", "ensembles", "monitoring", "options",
    "serving", "storage", "strategies", "sync", "tuning",
)  # fmt: skip
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
