"""The feed: samples per second from files, against a plain DataLoader and WebDataset, and how long a step waits.

`python -m benchmarks.feed [--quick]`. Images are decoded, cut and turned; texts are padded. All contenders have the
same two cores and the same number of worker processes, and one pass over the data counts, start of workers included.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import manyhands as mh
from manyhands.data import Cursor, Feed, as_source

from .epochs import seconds_per_sample
from .inputs import (
    IMAGES_PER_BATCH,
    NUM_SHARDS,
    TEXTS_PER_BATCH,
    decoded,
    image_loader,
    text_loader,
    write_images,
    write_texts,
)
from .peers import environment
from .report import Check, Report, Row, arguments, interleaved
from .works import CNN, loss

WORKERS = 2
ROWS_PER_GROUP = 1000
BASELINE = "dataloader"


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    report = Report("feed", quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, 640 if quick else 3840)
        write_texts(folder, 3200 if quick else 25_600)
        write_parquet(folder)
        rounds = 2 if quick else 24
        rows = throughput(report, folder, rounds)
        report.checks["feed_over_dataloader"] = Check(value=min(1 / row.ratio for row in rows.values()), at_least=1.0)
        if not quick:
            ahead = [peer(report, folder, work, rounds) / row.ratio for work, row in rows.items()]
            report.checks["feed_over_webdataset"] = Check(value=min(ahead), at_least=1.0)
        share = wait_share(report, folder, 40 if quick else 400)
        report.checks["wait_share"] = Check(value=share, at_most=0.05)
    report.finish()


def throughput(report: Report, folder: Path, rounds: int) -> dict[str, Row]:
    """Our rows over the baseline's, by work; for texts the baseline is the better of two and of no workers."""
    images = as_source(mh.data.files(folder / "images-*.tar", decode=image_of))
    texts = as_source(mh.data.files(folder / "texts-*.parquet"))
    image_baseline = image_loader(folder, WORKERS)
    times = interleaved(
        {
            "feed": lambda: seconds_per_sample(epochs(images, IMAGES_PER_BATCH)),
            BASELINE: lambda: seconds_per_sample(image_baseline),
            f"{BASELINE} again": lambda: seconds_per_sample(image_baseline),
        },
        rounds,
    )
    rows = {"images": report.add("images, 2 workers", times, BASELINE)["feed"]}
    times = interleaved(text_contenders(folder, texts), rounds)
    rows["texts"] = report.add("texts", times, better(times, BASELINE))["feed"]
    return rows


def text_contenders(folder: Path, texts: Any) -> dict[str, Callable[[], float]]:
    """Ours needs no workers for columns; a DataLoader may be quicker with or without them."""
    with_workers, in_place = text_loader(folder, WORKERS), text_loader(folder, 0)
    return {
        "feed": lambda: seconds_per_sample(epochs(texts, TEXTS_PER_BATCH)),
        BASELINE: lambda: seconds_per_sample(with_workers),
        f"{BASELINE} in place": lambda: seconds_per_sample(in_place),
        f"{BASELINE} in place again": lambda: seconds_per_sample(in_place),
    }


def epochs(source: Any, batch_size: int) -> Iterator[Any]:
    """One pass of our feed, in its shuffled order."""
    feed = Feed(source, batch_size=batch_size, workers=WORKERS)
    for batch in feed.epoch(Cursor()):
        yield tuple(batch.data.values()) if isinstance(batch.data, dict) else batch.data


def image_of(sample: dict[str, bytes]) -> tuple[np.ndarray[Any, Any], int]:
    """A sample of a tar file as pixels and class."""
    return decoded(sample["png"]), int(sample["cls"])


def write_parquet(folder: Path) -> None:
    """The texts in Parquet files."""
    tokens, ends = np.load(folder / "tokens.npy"), np.load(folder / "ends.npy")
    column = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]), pa.int32()), pa.array(tokens))
    per_shard = -(-len(column) // NUM_SHARDS)
    for shard in range(NUM_SHARDS):
        table = pa.table({"tokens": column.slice(shard * per_shard, per_shard)})
        pq.write_table(table, folder / f"texts-{shard}.parquet", row_group_size=ROWS_PER_GROUP)


def peer(report: Report, folder: Path, work: str, rounds: int) -> float:
    """WebDataset's time over a DataLoader's, with the best settings of each, alternating in a separate environment."""
    environment.make()
    target = folder / f"{work}.json"
    asked = {"work": work, "folder": str(folder), "workers": WORKERS, "rounds": rounds, "target": str(target)}
    command = [str(environment.PYTHON), "-m", "benchmarks.peers.webdataset", json.dumps(asked)]
    subprocess.run(command, cwd=environment.ROOT, check=True)
    times = json.loads(target.read_text())
    rows = report.add(f"webdataset {work}", times, better(times, BASELINE))
    return rows[better(times, "webdataset")].ratio


def better(times: Mapping[str, list[float]], name: str) -> str:
    """The faster of a contender's two settings, with workers and in place."""
    settings = [setting for setting in (name, f"{name} in place") if setting in times]
    return min(settings, key=lambda setting: median(times[setting]))


def wait_share(report: Report, folder: Path, num_steps: int) -> float:
    """The share of the time of `fit` that goes into waiting for images, once it has found its number of workers."""
    task = mh.Task(
        model=CNN.model,
        loss=image_loss,
        optimizer=CNN.make_optimizer,
        data=mh.data.files(folder / "images-*.tar", decode=image_of),
        batch_size=IMAGES_PER_BATCH,
    )
    run = mh.fit(
        task,
        mh.Single(),
        on="cpu",
        epochs=1000,
        steps=num_steps,
        folder=folder / "runs",
        options=mh.options.Display(progress=False),
    )
    lines = map(json.loads, (run.path / "events.jsonl").read_text().splitlines())
    waits = [line["seconds"] for line in lines if line["kind"] == "waits"]
    first, last = waits[len(waits) // 2], waits[-1]
    total, waited = last["total"] - first["total"], last["input"] - first["input"]
    steps = num_steps * total / last["total"]
    report.add("a step of a convolutional network", {"all": [total / steps], "waiting": [waited / steps]}, "all")
    return float(waited / total)


def image_loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross-entropy of the pixels as numbers from 0 to 1."""
    return loss(model, (batch[0] / 255, batch[1]))


if __name__ == "__main__":
    main()
