"""The command line application: its commands, global options, and handling of errors."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import failures

COMMANDS = (
    "devices",
    "doctor",
    "selftest",
    "cluster",
    "manifest",
    "explain",
    "check",
    "plan",
    "profile",
    "fit",
    "tune",
    "ensemble",
    "evaluate",
    "predict",
    "export",
    "launch",
    "token",
    "replay",
    "serve",
    "dashboard",
    "models",
)
"""Commands in the order of the help. To add one, add a file of its name with a function `add(app)`, and a line here."""

EPILOG = (
    "Every command has its own help, with examples: [bold]manyhands fit --help[/].\n\n"
    "Shell completion: [bold]manyhands --install-completion[/]."
)


class Commands(TyperGroup):
    """The group of all commands. Its help omits the options that install shell completion."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.hidden = True  # type: ignore[attr-defined]
        return params


app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, epilog=EPILOG
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"manyhands {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the complete Python traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train, tune and serve neural networks on any number of devices.

    Write single-device PyTorch once, and choose a strategy that decides how it is distributed.
    """
    failures.debug(debug)


for command in COMMANDS:
    import_module(f".{command}", __package__).add(app)
