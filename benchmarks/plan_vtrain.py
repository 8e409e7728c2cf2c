"""vTrain's 1,440 measured GPT iterations on eight A100: errors and regret after calibrating on twenty of them.

The networks are traced, as those of any task are; attention is written out in products, as it ran then. Which rows
are calibrated on is decided without looking at their times: one of each of the twenty most frequent combinations of
width, tensor parallelism and micro-batch, drawn with a fixed seed. Errors are those of all other rows.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategySpec
from manyhands.costs import Network, trace
from manyhands.planning import Cluster, Observation, Residuals, Workload, calibrated, estimate

DATA = Path(__file__).parent / "data" / "vtrain_single_node.csv"
CLUSTER = "8 A100-40GB"
NUM_WORDS, LENGTH, HEADS = 51200, 1024, 16
NUM_CALIBRATED = 20
DROPOUT = 0.1


class Block(nn.Module):
    """A transformer's block with its attention written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e4)
        weights = F.dropout(F.softmax(scores, -1, dtype=scores.dtype), DROPOUT)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).reshape(rows, length, width)), DROPOUT)
        return x + F.dropout(self.mlp(self.norm2(x)), DROPOUT)


class GPT(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of the token after each."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def gpt_task(width: int, layers: int, batch_size: int = 8) -> mh.Task:
    """A GPT as it is commonly written."""
    return mh.Task(
        model=lambda: GPT(width, layers),
        loss=next_token,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=torch.zeros(4096, LENGTH + 1, dtype=torch.long),
        batch_size=batch_size,
    )


@dataclass(frozen=True)
class Score:
    """How well the planner does on the rows that it has not seen."""

    median_error: float
    mean_error: float
    rank_correlation: float
    regret: dict[int, float]
    """By how many plans it may measure before it picks."""
    above: int
    """Number of fitted constants above what the datasheet says."""


def observations(path: Path = DATA) -> list[Observation]:
    """All rows, as steps of traced networks."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            number = {key.lstrip("# "): value for key, value in row.items()}
            batch, micro, replicas = (int(number[key]) for key in ("global batch", "micro batch", "data parallelism"))
            stages = int(number["pipeline parallelism"])
            parts: dict[str, Any] = {"microbatches" if stages > 1 else "accumulate": batch // replicas // micro}
            spec = StrategySpec(
                replicas=replicas,
                tensor=int(number["tensor parallelism"]),
                stages=stages,
                precision="bf16",
                recompute="blocks",  # vTrain's configurations say use_checkpoint: true
                **parts,
            )
            network = traced(int(number["hidden size"]), int(number["layers"]))
            workload = Workload(
                networks={"bf16": network}, batch_size=batch, captured=False, fused=True, balanced=False
            )
            found.append(Observation(workload, spec, float(number["iteration time (ms)"]) / 1e3))
    return found


@cache
def traced(width: int, layers: int) -> Network:
    """The network's costs for one sequence."""
    return narrow(gpt_task(width, layers), torch.zeros(1, LENGTH + 1, dtype=torch.long))


def narrow(task: mh.Task, batch: Any, rows: int = 1) -> Network:
    """The costs of a network with bf16 weights, beside fp32 ones that the optimizer keeps, as large models have."""

    make = task.model

    def model() -> nn.Module:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            return make()
        finally:
            torch.set_default_dtype(before)

    network = trace(replace(task, model=model), batch, rows=rows)
    return replace(network, state_bytes=12 * network.params)


def chosen(found: Sequence[Observation], seed: int = 0) -> list[Observation]:
    """The rows to calibrate on."""
    draw = random.Random(seed)
    cells = defaultdict(list)
    for one in found:
        micro = one.workload.batch_size // one.spec.num_parts // (one.spec.accumulate * one.spec.microbatches)
        cells[one.workload.network("bf16").pieces[2].params, one.spec.tensor, micro].append(one)
    most = sorted(cells, key=lambda cell: (-len(cells[cell]), draw.random()))[:NUM_CALIBRATED]
    return [draw.choice(cells[cell]) for cell in most]


def score(found: Sequence[Observation], calibrating: Sequence[Observation]) -> Score:
    """Calibrates on some rows and looks at the others."""
    cluster = calibrated(Cluster.parse(CLUSTER), calibrating)
    left = Residuals.of(cluster, calibrating)
    guesses = [
        estimate(one.workload, cluster, one.spec, correction=left.correction(one.workload)).seconds for one in found
    ]
    seen = set(map(id, calibrating))
    pairs = [(guess, one.seconds) for guess, one in zip(guesses, found, strict=True) if id(one) not in seen]
    errors = [abs(guess / measured - 1) for guess, measured in pairs]
    groups = defaultdict(list)
    for guess, one in zip(guesses, found, strict=True):
        key = (one.workload.network("bf16").params, one.spec.num_devices, one.workload.batch_size)
        groups[key].append((guess, one.seconds))
    regret = {
        count: fmean(
            min(seconds for _, seconds in sorted(group)[:count]) / min(seconds for _, seconds in group) - 1
            for group in groups.values()
        )
        for count in (1, 3, 5)
    }
    fitted = (cluster.chip.reach, cluster.chip.streaming, cluster.inside.share)
    above = sum(value > 1 for value in fitted)
    return Score(median(errors), fmean(errors), rank_correlation(pairs), regret, above)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    ranks = []
    for side in (0, 1):
        order = sorted(range(len(pairs)), key=lambda index: pairs[index][side])
        place = [0.0] * len(pairs)
        for rank, index in enumerate(order):
            place[index] = float(rank)
        ranks.append(torch.tensor(place))
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
