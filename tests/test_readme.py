"""The README's figures are those of the committed results."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (.*) \| `(\w+)` \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


@functools.cache
def result(name: str) -> dict[str, Any]:
    """What a benchmark left."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def row(name: str, case: str, who: str) -> dict[str, float]:
    """A contender in a case."""
    (found,) = [row for row in result(name)["rows"] if (row["case"], row["name"]) == (case, who)]
    return dict(found)


def ratio(name: str, case: str, who: str) -> float:
    """Return the ratio of a contender to its baseline."""
    return row(name, case, who)["ratio"]


def seconds(name: str, case: str, who: str) -> float:
    return row(name, case, who)["seconds"]


def check(name: str, which: str) -> float:
    return float(result(name)["checks"][which]["value"])


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("step", [f"{ratio('step', f'{network}, {n}', 'fit' if n[0] == '1' else 'mirrored'):.2f}"
                  for network in ("mlp", "cnn") for n in ("1 process", "2 processes")]),
        ("step", [f"{peer.title()} {ratio('step', f'{peer} {network}, 1 process', peer):.2f}"
                  for network in ("mlp", "cnn") for peer in ("lightning", "accelerate")]),
        ("step", [f"{peer.title()} " + " and ".join(
                      f"{ratio('step', f'{peer} {network}, 2 processes', peer):.2f}" for network in ("mlp", "cnn"))
                  for peer in ("lightning", "accelerate")]),
        ("feed", [f"{check('feed', 'feed_over_dataloader'):.2f}",
                  f"WebDataset {1 / ratio('feed', 'webdataset images', 'webdataset'):.2f}"]),
        ("slow_link", [f"{seconds('slow_link', '100 Mbit/s', who):.1f}" for who in ("auto, lossy", "auto", "ddp")]),
        ("slow_link", [f"limit, seconds to DDP's loss | {seconds('slow_link', 'unlimited', 'auto'):.1f}",
                       f"DDP {seconds('slow_link', 'unlimited', 'ddp'):.1f}"]),
        ("parameter_server", [
            f"{1 / ratio('parameter_server', '2 workers, 1 server, 1.9M parameters', 'servers, asynchronous'):.1f}",
            f"{check('parameter_server', 'async_with_straggler'):.1f} asynchronous",
            f"{check('parameter_server', 'backup_with_straggler'):.1f} with a backup worker"]),
        ("split", [f"{ratio('split', 'a deep network in two stages', 'pipeline'):.2f} and "
                   f"{ratio('split', 'a deep network, sharded on two', 'sharded'):.2f} of the time",
                   f"{ratio('split', 'a deep network, tensor parallel on two', 'tensor parallel'):.2f} of the time"]),
        ("serve", [f"{check('serve', 'json_over_litserve'):.1f}", *(
            f"{name} {1 / ratio('serve', 'small network, 32 connections', f'{name.lower()} JSON'):.1f}"
            for name in ("Triton", "MLServer", "BentoML", "Ray Serve"))]),
        ("tune", [f"{seconds('tune', '20 small trials', 'mh.tune'):.1f} s",
                  f"Ray Tune {seconds('tune', '20 small trials', 'ray tune'):.1f} s"]),
        ("plan_accuracy", [f"{100 * check('plan_accuracy', 'local_step_error'):.1f}%"]),
        ("memory", [f"{result('memory')['notes'][which] / 1e9:.1f} billion"
                    for which in ("plain_params", "fit_in_params")]),
        ("stacked", [f"{1000 * seconds('stacked', 'MLP 784-512-512-10, b128', who):.2f} ms"
                     for who in ("one, eager", "100, population, compiled")]),
        ("recovery", [f"{check('recovery', 'seconds_to_step'):.2f} s, {check('recovery', 'recovered_of_20'):.0f} of 20",
                      f"{seconds('recovery', 'from a kill to the next step', 'torchrun, best settings'):.1f} s",
                      f"{check('recovery', 'torchrun_recovered_of_20'):.0f} of 20"]),
    ],
)  # fmt: skip
def test_readme_figures_match_the_benchmark_results(name: str, figures: list[str]) -> None:
    told = " | ".join(text for text, whose in ROWS if whose == name)
    assert told
    for figure in figures:
        assert figure in told, (name, figure)
