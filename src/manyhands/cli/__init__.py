"""The command line: one file per verb. Nothing heavy is imported until a verb needs it."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process; it ends the process with an exit code."""
    try:
        from .app import app

        app(prog_name="manyhands")
    except KeyboardInterrupt:
        sys.exit(130)
