"""The matrix of networks and strategies: a fixed sample, and defects that the comparison must detect."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from benchmarks.matrix import reference
from benchmarks.matrix.cell import CRASHED, DIFFERS, HUNG, SAME, Cell, References, Tolerance, first_difference, run_cell
from benchmarks.matrix.generated import Generated, entry_of, generated_networks
from benchmarks.matrix.networks import find
from benchmarks.matrix.reference import Result
from benchmarks.matrix.runner import Asked, Cache
from benchmarks.matrix.sample import SAMPLE
from benchmarks.matrix.strategies import SPECS
from benchmarks.matrix.summary import Table, checks, lines, page, picture
from hypothesis import given, settings
from torch import Tensor

NETWORKS = list(dict.fromkeys(network for network, _, _ in SAMPLE))
START = {"weight": torch.zeros(3, dtype=torch.float64), "mean": torch.zeros(2), "calls": torch.tensor(0)}


@pytest.mark.parametrize("network", NETWORKS)
def test_matrix_sample_has_the_expected_outcomes(network: str) -> None:
    references, entry = References(), find(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = [
            (run_cell(entry, strategy, 0, references, checks=False), expected)
            for name, strategy, expected in SAMPLE
            if name == network
        ]
    assert [(cell.strategy, cell.text) for cell, expected in cells if cell.outcome != expected] == []


def test_sample_covers_every_strategy_and_kind() -> None:
    assert {strategy for _, strategy, _ in SAMPLE} == set(SPECS)
    kinds = {"classic", "research", "field", "optimizer", "module", "transformers"}
    assert {network.partition(".")[0] for network in NETWORKS} == kinds


def result(losses: list[float], **changes: Tensor) -> Result:
    state = {"weight": torch.tensor([1.0, 2, 3], dtype=torch.float64), "mean": torch.ones(2), "calls": torch.tensor(3)}
    return Result(losses, {**state, **changes}, START, frozenset({"weight"}))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (result([1.0, 0.5]), ""),
        (result([1.0, float("nan")]), "loss of step 2: nan"),
        (result([1.0]), "1 losses instead of 2"),
        (result([1.0, 0.5], weight=torch.tensor([1.0, 2, float("nan")])), "parameter weight differs by nan"),
        (result([1.0, 0.5], weight=torch.tensor([1.0, 2, 3 + 1e-6], dtype=torch.float64)), "parameter weight differs"),
        (result([1.0, 0.5], weight=torch.tensor([1.0, 2, 3 + 1e-12], dtype=torch.float64)), ""),
        (result([1.0, 0.5], weight=torch.ones(2)), "parameter weight has shape (2,)"),
        (result([1.0, 0.5], calls=torch.tensor(6)), "buffer calls: [6] instead of [3]"),
        (result([1.0, 0.5], extra=torch.ones(1)), "extra should not be there"),
    ],
)
def test_comparison_reports_the_first_difference(changed: Result, found: str) -> None:
    said = first_difference(result([1.0, 0.5]), changed, Tolerance())
    assert said.startswith(found)
    assert bool(said) == bool(found)


def test_error_in_a_small_gradient_is_detected() -> None:
    start = torch.ones(3, dtype=torch.float64)
    right = Result([1.0], {"gate": start + 1e-7}, {"gate": start}, frozenset({"gate"}))
    wrong = Result([1.0], {"gate": start + 1.07e-7})
    assert "parameter gate differs" in first_difference(right, wrong, Tolerance())


def test_reference_equals_a_plain_training_loop() -> None:
    network = find("classic.mean_square_of_one_layer").network
    task = network.task(seed=3)
    trained = reference.train(task, "fp64")
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    model.load_state_dict(trained.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for first in (0, 6, 12):
        optimizer.zero_grad()
        model(task.data[first : first + 6].double()).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.weight, trained.state["weight"])
    assert len(trained.losses) == 3


def test_results_are_cached_by_network_strategy_and_seed(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    asked = Asked(find("classic.mlp"), "mirrored2", 0, True)
    cell = Cell(network="classic.mlp", strategy="mirrored2", seed=0, outcome=SAME, check="equal")
    Cache(path).put(asked, cell)
    assert Cache(path).get(asked) == cell
    others = [
        Asked(find("classic.mlp"), "mirrored2", 1, True),
        Asked(find("classic.lstm"), "mirrored2", 0, True),
        Asked(find("classic.mlp"), "single", 0, True),
    ]
    assert [Cache(path).get(other) for other in others] == [None, None, None]
    assert len({Asked(find("classic.mlp"), strategy, 0, True).key for strategy in SPECS}) == len(SPECS)


def test_summary_counts_every_outcome() -> None:
    outcomes = {"a": SAME, "b": DIFFERS, "c": CRASHED, "d": HUNG, "e": "left out", "f": "refused"}
    text = {"f": "TaskError: a loss must be a mean, but got 2. End it with .mean()"}
    cells = [
        Cell(network=name, strategy="mirrored2", seed=0, outcome=outcome, text=text.get(name, ""), check="equal")
        for name, outcome in outcomes.items()
    ]
    table = Table(cells)
    found = {name: check.value for name, check in checks(table, whole=True).items()}
    assert found == {
        "differs": 1,
        "crashed": 1,
        "hung": 1,
        "cells": 5,
        "same_share": 0.2,
        "lowest_same_share": 0.2,
        "check_agrees": 0.2,
    }
    assert list(table.refusals()) == ["a loss must be a mean"]
    assert "a  =" in lines(table)
    assert "| `mirrored2` | 1 | 1 | 1 | 1 | 1 |" in page(table)
    assert picture(table).startswith("<svg")


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(made=generated_networks)
def test_generated_networks_train_and_repr_round_trips(made: Generated) -> None:
    entry = entry_of(repr(made))
    assert eval(repr(made)) == made
    trained = reference.train(entry.network.task(0), "fp64")
    assert len(trained.losses) == 2
