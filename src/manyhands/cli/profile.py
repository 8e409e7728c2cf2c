"""Command `manyhands profile`: print the time and memory of a step, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import resolve_options
from .generated_options import with_options
from .options import (
    Devices,
    Distribution,
    Json,
    Params,
    SeveralHosts,
    add_command,
    require_places,
)
from .screen import note, only_json, print_json
from .target import load_task, parse_params, split_target

if TYPE_CHECKING:
    from ..profiling import Profile

EXAMPLES = (
    "manyhands profile digits.py",
    "manyhands profile digits.py --strategy mirrored --on 'cpu*2' --html profile.html --trace trace.json",
    "manyhands profile digits.py --hosts 4 --join host1:7777 --token-file token   (on every host)",
    "manyhands fit digits.py --profile --name first && manyhands profile runs/first",
)

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py[:name]|RUN",
        help="Python file with a function [bold]task[/], or the folder of a run that was trained with --profile.",
        show_default=False,
    ),
]
Steps = Annotated[int, typer.Option(help="Number of steps to time.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a web page with all results and the timeline.")]
Log = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Add the result to the event log in this folder, for the dashboard."),
]
Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.")]


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, profile, EXAMPLES)


@with_options(Distribution, Devices, SeveralHosts)
def profile(
    target: Target,
    params: Params = None,
    steps: Steps = 20,
    html: Html = None,
    trace: Trace = None,
    log: Log = None,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Print the time and memory of a step by rank, module and operation, with advice.

    For a task, some steps are run on its ranks, and their result is discarded. For a run that was trained with
    --profile, its profiled steps are read. With several hosts, every host prints all results.
    """
    settings = resolve_options((Distribution, Devices, SeveralHosts), given)
    require_places(html=html, trace=trace)
    with only_json(json):
        task = load_task(target) if split_target(target)[0].suffix == ".py" else None
        import manyhands as mh

        if task is None:
            found = mh.profile(Path(target))
        else:
            words = params or []
            strategy, on = settings.of(Distribution).strategy, settings.of(Devices).on
            file, _, name = target.partition(":")
            place = settings.of(SeveralHosts).place(on, Path(file), str(strategy), name, str(steps), *words)
            found = mh.profile(task, strategy, on=place, params=parse_params(words), steps=steps)
    if json:
        print_json(found.to_dict())
    else:
        found.show()
    _write(found, html, trace)
    if log is not None:
        found.log(log)
        note(f"logged in {log}")


def _write(found: Profile, html: Path | None, trace: Path | None) -> None:
    if html is not None:
        note(f"wrote {found.save(html)}")
    if trace is not None:
        note(f"wrote {found.trace(trace)}")
