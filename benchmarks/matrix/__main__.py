"""Train every network under every strategy and compare with one device: `python -m benchmarks.matrix`."""

from __future__ import annotations

import argparse
import fnmatch
import sys

from .cell import Cell
from .networks import matching
from .runner import Asked, Cache, run_all
from .strategies import SPECS


def main() -> None:
    """Run the cells that the command line asks for."""
    options = _arguments()
    entries = matching(options.only)
    asked = [
        Asked(entry, strategy, options.seed, options.check) for entry in entries for strategy in options.strategies
    ]
    cells: list[Cell] = []

    def on_cell(cell: Cell) -> None:
        cells.append(cell)
        if options.verbose or cell.outcome not in ("same", "refused"):
            print(f"{cell.outcome:8} {cell.strategy:20} {cell.network:40} {cell.seconds:5.1f} s {cell.text[-300:]!r}", flush=True)
        if cell.check_agrees is False:
            print(f"   check {cell.check} on {cell.outcome}: {cell.strategy} {cell.network}: {cell.check_text[-300:]!r}", flush=True)

    run_all(asked, Cache(), on_cell, workers=options.workers, limit=options.limit)
    from collections import Counter
    print(Counter((c.strategy, c.outcome) for c in cells), file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["*"])
    parser.add_argument("--strategies", nargs="*", default=list(SPECS))
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
