"""The engines there are, by what `on=` names."""

from __future__ import annotations

import functools

from .engine import Engine


def engine_for(on: object, local: Engine) -> Engine:
    """The engine that reaches what `on=` names: another cluster's, or the local one."""
    if isinstance(on, str) and (on == "ray" or on.startswith("ray://")):
        return _ray(on)
    return local


@functools.cache
def _ray(address: str) -> Engine:
    from .ray_engine import RayEngine

    return RayEngine(address)
