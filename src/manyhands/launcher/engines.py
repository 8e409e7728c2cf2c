"""The registry of engines, by the value of `on=`."""

from __future__ import annotations

import functools

from .engine import Engine


def engine_for(on: object, local: Engine) -> Engine:
    """Return the Ray engine if `on=` names a Ray cluster, else the local engine."""
    if isinstance(on, str) and (on == "ray" or on.startswith("ray://")):
        return _ray(on)
    return local


@functools.cache
def _ray(address: str) -> Engine:
    from .ray_engine import RayEngine

    return RayEngine(address)
