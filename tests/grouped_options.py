"""Arguments of `mh.fit` and `mh.tune` from single settings, for tests that share and vary them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from manyhands.api import fit, tune


def fit_options(**settings: Any) -> dict[str, Any]:
    """Return arguments of `mh.fit`: settings of options classes become objects in `options`."""
    return _grouped(fit.OPTIONS, settings)


def tune_options(**settings: Any) -> dict[str, Any]:
    """Return arguments of `mh.tune`: settings of options classes become objects in `options`."""
    return _grouped(tune.OPTIONS, settings)


def _grouped(kinds: Sequence[type], settings: dict[str, Any]) -> dict[str, Any]:
    objects = []
    for kind in kinds:
        names = [each.name for each in fields(kind) if each.name in settings]
        if names:
            objects.append(kind(**{name: settings.pop(name) for name in names}))
    return {**settings, "options": objects} if objects else settings
