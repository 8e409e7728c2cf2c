"""Train every network under every strategy and compare with one device: `python -m benchmarks.matrix`.

A run that is interrupted resumes: results are kept by a hash of the network, the strategy and the source.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from .cell import REFUSED, SAME, Cell
from .networks import find, matching
from .runner import Asked, Cache, run_all
from .strategies import SPECS
from .summary import Table, lines, report, write_page


def main() -> None:
    """Run the cells that the command line asks for, and report."""
    options = _arguments()
    if options.generated:
        from .generated import search

        sys.exit(1 if search(options.seconds, options.seed, options.limit) else 0)
    cells: list[Cell] = []
    asked = _asked(options)
    began = time.monotonic()

    def on_cell(cell: Cell) -> None:
        cells.append(cell)
        _show(cell, options.verbose)
        if len(cells) % 100 == 0:
            print(f"{len(cells)} of {len(asked)} cells, {time.monotonic() - began:.0f} s", flush=True)

    run_all(asked, Cache(), on_cell, workers=options.workers, limit=options.limit)
    order = {(one.entry.name, one.strategy): number for number, one in enumerate(asked)}
    table = Table(sorted(cells, key=lambda cell: order[cell.network, cell.strategy]))
    print("\n".join(lines(table)))
    is_whole = options.only == ["*"] and options.strategies == list(SPECS) and not options.quick
    if is_whole:
        write_page(table)
    report(table, quick=not is_whole, seed=options.seed).finish()


def _asked(options: argparse.Namespace) -> list[Asked]:
    if options.quick:
        from .sample import SAMPLE

        return [Asked(find(name), strategy, 0, False) for name, strategy, _ in SAMPLE]
    entries = matching(options.only)
    asked = [
        Asked(entry, strategy, options.seed, options.check) for entry in entries for strategy in options.strategies
    ]
    if options.cells is None or options.cells >= len(asked):
        return asked
    drawn = set(random.Random(options.seed).sample(range(len(asked)), options.cells))
    return [cell for number, cell in enumerate(asked) if number in drawn]


def _show(cell: Cell, verbose: bool) -> None:
    if verbose or cell.outcome not in (SAME, REFUSED):
        about = f"{cell.outcome:8} {cell.strategy:20} {cell.network:40} {cell.seconds:5.1f} s"
        print(f"{about} {cell.text[-300:]!r}", flush=True)
    if cell.check_agrees is False:
        print(f"check {cell.check:10} {cell.strategy:20} {cell.network:40} is {cell.outcome}", flush=True)
        print(f"    {cell.check_text[-300:]!r}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the fixed sample of the test suite")
    parser.add_argument("--seed", type=int, default=0, help="of first weights and data")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN", help="networks, such as 'classic.*'")
    parser.add_argument("--strategies", nargs="*", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--cells", type=int, metavar="N", help="so many cells, drawn by the seed, instead of all")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not ask mh.check")
    parser.add_argument("--workers", type=int, default=1, help="cells at the same time; 0 reports kept results only")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a cell")
    parser.add_argument("--verbose", action="store_true", help="a line for every cell")
    parser.add_argument("--generated", action="store_true", help="random networks instead")
    parser.add_argument("--seconds", type=float, default=180, help="how long random networks are tried")
    return parser.parse_args()


if __name__ == "__main__":
    main()
