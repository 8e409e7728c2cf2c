"""The figures of the README and of docs/benchmarks.md are those of the committed results."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (.*) \| `(\w+)` \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
TIMES = "\N{MULTIPLICATION SIGN}"


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


def note(name: str, which: str) -> float:
    return float(result(name)["notes"][which])


def rows_of_steps() -> list[str]:
    """The table of step times on a CPU."""
    cases = [(f"{network}, {n}", n == "1 process") for n in ("1 process", "2 processes") for network in ("cnn", "mlp")]
    ours = [ratio("step", case, "fit" if is_single else "mirrored") for case, is_single in cases]
    peers = {peer: [ratio("step", f"{peer} {case}", peer) for case, _ in cases] for peer in ("lightning", "accelerate")}
    rows = {"manyhands": ours, **{peer.title(): values for peer, values in peers.items()}}
    return [f"| {who} | {' | '.join(f'{value:.2f}' for value in values)} |" for who, values in rows.items()]


def rows_of_gpu_steps() -> list[str]:
    """The table of step times on a GPU."""
    cases = {"MLP, b128": ("mlp", 2), "ResNet-18, 32x32, b128, bf16": ("resnet18", 2),
             "GPT d256 L4 T128 b32, bf16": ("gpt_small", 2), "GPT-2 124M T1024 b32, bf16": ("gpt2", 1)}  # fmt: skip
    rows = []
    for case, (key, digits) in cases.items():
        names = ("eager", "torch.compile", "Lightning", "Accelerate", "fit")
        *peers, fit = (f"{1000 * seconds('gpu_step', case, name):.{digits}f}" for name in names)
        gain = check("gpu_step", f"{key}_over_eager")
        rows.append(f"| {' | '.join(peers)} | **{fit}** ({gain:{'.1f' if gain > 2 else '.2f'}}{TIMES}")
    return rows


def rows_of_links() -> list[str]:
    """The table of sync policies on slow links, for what reached the loss on both."""
    names = ("auto", "auto, lossy", "bf16", "int8", "PowerSGD 4", "local steps 16", "DiLoCo 50")
    links = ("100 Mbit/s", "1 Gbit/s")
    return [" | ".join(f"{seconds('slow_link', link, name):.1f} s, {1 / ratio('slow_link', link, name):.1f}{TIMES}"
                       for link in links) for name in names]  # fmt: skip


def rows_of_servers() -> list[str]:
    """The table of servers under load."""
    rows = []
    for peer in ("triton", "mlserver", "litserve", "bentoml", "ray serve"):
        theirs, ours = (note("serve", f"{which}, p99 ms") for which in (
            f"{peer} JSON at half load", f"manyhands JSON at that load of {peer} JSON"))  # fmt: skip
        rate = note("serve", f"{peer} JSON requests/s")
        rows.append(f"{rate:,.0f} | {theirs:.0f} ms | {ours:.1f} ms" if theirs >= 100 else
                    f"{rate:,.0f} | {theirs:.1f} ms | {ours:.1f} ms")  # fmt: skip
    return rows


@pytest.mark.parametrize(
    "figures",
    [
        rows_of_steps,
        rows_of_gpu_steps,
        rows_of_links,
        rows_of_servers,
        lambda: [f"| manyhands, JSON | {note('serve', 'manyhands JSON requests/s'):,.0f} |",
                 f"are {note('serve', 'two replicas over one'):.2f} times as fast as one",
                 f"within\n{check('serve', 'refusal_p99_ms'):.1f} ms"],
        lambda: [f"median {seconds('recovery', 'from a kill to the next step', 'manyhands'):.2f} s, "
                 f"maximum {check('recovery', 'seconds_to_step'):.2f} s",
                 f"spends {check('recovery', 'goodput'):.0%} of its time"],
        lambda: [f"mh.tune` takes {check('tune', 'over_plain_loop'):.2f} of the time",
                 f"{check('tune', 'ray_tune_over_ours'):.0f} times as long",
                 f"with {check('tune', 'asha_steps_share'):.0%} of its steps"],
        lambda: [f"{check('split', 'pipeline2_of_ceiling'):.0%} of the throughput",
                 f"{check('split', 'placed2_of_ceiling'):.0%} of the throughput"],
        lambda: [f"p99 is\n{check('hot_swap', 'p99_over_steady'):.2f} times",
                 f"{check('hot_swap', 'neighbour_p99'):.2f} times for another model"],
        lambda: [f"| {check('plan_accuracy', 'local_step_error'):.1%} on average |",
                 f"| {check('plan_accuracy', 'local_memory_error'):.1%} on average |",
                 f"| {check('plan_accuracy', 'published_speedup_error'):.1%} on average |"],
        lambda: [f"{check('stacked', 'transformer100_gain'):.0f} times as fast",
                 f"{check('stacked', 'cnn100_gain'):.0f} times as fast"],
    ],
    ids=["step", "gpu_step", "slow_link", "peers", "serve", "recovery", "tune", "split", "hot_swap", "plan", "stacked"],
)  # fmt: skip
def test_figures_on_the_page_of_benchmarks_match_the_results(figures: Callable[[], list[str]]) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [figure for figure in figures() if figure not in page] == []
