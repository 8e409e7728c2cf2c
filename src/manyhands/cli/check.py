"""Command `manyhands check`: check that a strategy gives the same results as one device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import typer

from ..core import resolve_options
from .generated_options import with_options
from .options import Devices, Distribution, Json, Params, Target, add_command
from .screen import note, only_json, print_json, stdout
from .target import load_task, parse_params

if TYPE_CHECKING:
    from ..training import Verdict


EXAMPLES = (
    "manyhands check digits.py --on 'cpu*2'",
    "manyhands check digits.py width=32 --strategy replicas=2,accumulate=2",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, check, EXAMPLES)


@with_options(Distribution, Devices)
def check(target: Target, params: Params = None, json: Json = False, *, given: dict[str, Any]) -> None:
    """Compare the first two steps of a task under a strategy with those on one device, in float64.

    If they differ, the first differing parameter, the operation that causes it, and a remedy are printed. The exit code
    is 0 if they are equal and 1 otherwise.
    """
    settings = resolve_options((Distribution, Devices), given)
    with only_json(json):
        task = load_task(target)
        import manyhands as mh

        verdict = mh.check(
            task, settings.of(Distribution).strategy, on=settings.of(Devices).on, params=parse_params(params or [])
        )
    if json:
        print_json(as_dict(verdict))
    else:
        _show(verdict)
    raise typer.Exit(0 if verdict.equal else 1)


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON-ready data."""
    return {
        "equal": verdict.equal,
        "outcome": verdict.outcome,
        "strategy": str(verdict.spec),
        "first": verdict.first,
        "error": verdict.error if math.isfinite(verdict.error) else None,
        "why": verdict.why,
        "remedy": verdict.remedy,
        "notes": list(verdict.notes),
    }


def _show(verdict: Verdict) -> None:
    style = "green" if verdict.equal else "red"
    stdout().print(str(verdict), style=style, markup=False, highlight=False, soft_wrap=True)
    if verdict.spec.num_devices == 1 and verdict.spec.accumulate == 1:
        note("nothing was split, because there was one device; --on 'cpu*2' makes two of it")
