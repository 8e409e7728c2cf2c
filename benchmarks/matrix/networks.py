"""All networks of the matrix by name. A kind is imported when one of its networks is asked for."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from .network import Entry, Registry


def _classics() -> Registry:
    from .classics import CLASSICS

    return CLASSICS


def _research() -> Registry:
    from .research import RESEARCH

    return RESEARCH


def _frontier() -> Registry:
    from .frontier import FRONTIER

    return FRONTIER


def _field() -> Registry:
    from .field import FIELD

    return FIELD


def _idioms() -> Registry:
    from .idioms import IDIOMS

    return IDIOMS


def _scripts() -> Registry:
    from .scripts import SCRIPTS

    return SCRIPTS


def _habits() -> Registry:
    from .habits import HABITS

    return HABITS


def _repositories() -> Registry:
    from .repositories import REPOSITORIES

    return REPOSITORIES


def _modules() -> Registry:
    from .modules import module_registry

    return module_registry()


def _optimizers() -> Registry:
    from .optimizers import OPTIMIZERS

    return OPTIMIZERS


def _architectures() -> Registry:
    from .architectures import ARCHITECTURES

    return ARCHITECTURES


def _zoo() -> Registry:
    from .zoo import ZOO

    return ZOO


KINDS: dict[str, Callable[[], Registry]] = {
    "classic": _classics,
    "research": _research,
    "frontier": _frontier,
    "field": _field,
    "idiom": _idioms,
    "script": _scripts,
    "habit": _habits,
    "repository": _repositories,
    "optimizer": _optimizers,
    "module": _modules,
    "transformers": _architectures,
    "zoo": _zoo,
}


def find(name: str) -> Entry:
    """Return a network by its full name, or by the expression that makes a generated one."""
    if name.startswith("Generated("):
        from .generated import entry_of

        return entry_of(name)
    return KINDS[name.partition(".")[0]]()[name]


def matching(patterns: Sequence[str]) -> list[Entry]:
    """Return the networks whose names match one of the patterns, kind by kind.

    >>> [entry.name for entry in matching(["classic.ml?"])]
    ['classic.mlp']
    """
    kinds = [kind for kind in KINDS if any(fnmatch.fnmatch(kind, p.partition(".")[0]) for p in patterns)]
    entries = [entry for kind in kinds for entry in KINDS[kind]().values()]
    return [entry for entry in entries if any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns)]
