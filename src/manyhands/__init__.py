"""manyhands shares neural networks out among devices and servers.

Write ordinary single-device PyTorch once; one word, the strategy, changes how it is split.

    import manyhands as mh
    run = mh.fit(task, mh.Mirrored(), epochs=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Device, devices
    from .core import Mirrored, Predictor, Single, StrategySpec, Task, mean
    from .data import bucketed, files
    from .store import load
    from .training import Callback, Hand, Run, hand
    from .verbs import check, evaluate, fit, launch, predict

__version__ = "0.1.0"

__all__ = [
    "Task",
    "mean",
    "fit",
    "launch",
    "hand",
    "check",
    "evaluate",
    "predict",
    "load",
    "files",
    "bucketed",
    "devices",
    "Single",
    "Mirrored",
    "StrategySpec",
    "Run",
    "Hand",
    "Predictor",
    "Callback",
    "Device",
]

_HOMES = {
    "core": ["Task", "mean", "Single", "Mirrored", "StrategySpec", "Predictor"],
    "cluster": ["Device", "devices"],
    "data": ["files", "bucketed"],
    "store": ["load"],
    "training": ["Callback", "Hand", "Run", "hand"],
    "verbs": ["check", "evaluate", "fit", "launch", "predict"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a room when it is first asked for, so that `import manyhands` costs nothing by itself."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
