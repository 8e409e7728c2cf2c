"""WebDataset and a plain DataLoader read the tar files alternately: `python -m benchmarks.peers.webdataset REQUEST`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset

from ..epochs import seconds_per_sample
from ..inputs import IMAGES_PER_BATCH, NUM_SHARDS, TEXTS_PER_BATCH, decoded, image_loader, padded, text_loader

MIXED = 5000
"""Samples in its shuffle buffer."""


def main() -> None:
    """Measures what the request asks for, and writes it where the request says."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = json.loads(sys.argv[1])
    contenders = {"images": _images, "texts": _texts}[asked["work"]](Path(asked["folder"]), asked["workers"])
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(asked["rounds"]):
        for name, measure in contenders.items():
            times[name].append(measure())
    Path(asked["target"]).write_text(json.dumps(times))


def _images(folder: Path, workers: int) -> dict[str, Callable[[], float]]:
    def dataset() -> Any:
        shards = webdataset.WebDataset(_shards(folder, "images"), shardshuffle=NUM_SHARDS).shuffle(MIXED)
        return shards.map(lambda sample: (decoded(sample["png"]), int(sample["cls"])))

    plain = image_loader(folder, workers)
    return {
        "dataloader": lambda: seconds_per_sample(plain),
        "webdataset": lambda: seconds_per_sample(_loader(dataset(), IMAGES_PER_BATCH, workers)),
    }


def _texts(folder: Path, workers: int) -> dict[str, Callable[[], float]]:
    """With workers and without: what is quickly decoded may be read faster in place."""

    def dataset() -> Any:
        shards = webdataset.WebDataset(_shards(folder, "texts"), shardshuffle=NUM_SHARDS).shuffle(MIXED)
        return shards.map(lambda sample: torch.from_numpy(np.frombuffer(sample["tokens"], np.int64)))

    plain, plain_in_place = text_loader(folder, workers), text_loader(folder, 0)
    return {
        "dataloader": lambda: seconds_per_sample(plain),
        "dataloader in place": lambda: seconds_per_sample(plain_in_place),
        "webdataset": lambda: seconds_per_sample(_loader(dataset(), TEXTS_PER_BATCH, workers, padded)),
        "webdataset in place": lambda: seconds_per_sample(_loader(dataset(), TEXTS_PER_BATCH, 0, padded)),
    }


def _shards(folder: Path, stem: str) -> str:
    return f"{folder}/{stem}-{{0..{NUM_SHARDS - 1}}}.tar"


def _loader(dataset: Any, batch_size: int, workers: int, collate: Any = None) -> Any:
    """Batches are made in the workers, as WebDataset recommends."""
    batched = dataset.batched(batch_size, collation_fn=collate or torch.utils.data.default_collate)
    return webdataset.WebLoader(batched, batch_size=None, num_workers=workers)


if __name__ == "__main__":
    main()
