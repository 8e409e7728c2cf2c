"""The command line, one file per command. Commands import slow packages such as torch only when they need them."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process, and exit with its exit code."""
    try:
        from .app import app

        app(prog_name="manyhands")
    except KeyboardInterrupt:
        sys.exit(130)
