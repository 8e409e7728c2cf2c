"""Inputs: images and texts as files, and functions that decode them. Peers import it: torch, numpy and Pillow only.

The same samples lie there in every form that a contender reads best: PNG images in a folder and in tar files; texts,
as numbers, in one mapped array, in tar files and (for ours) in Parquet files.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

SIDE, CROP = 96, 48
NUM_CLASSES = 10
NUM_SHARDS = 4
IMAGES_PER_BATCH, TEXTS_PER_BATCH = 32, 64
VOCABULARY = 30_000
Members = dict[str, bytes]


def write_images(folder: Path, count: int) -> None:
    """PNG images of smooth colours with a little noise, about 17 KB each, in tar files and one by one."""
    (folder / "png").mkdir(parents=True)
    draw = np.random.default_rng(0)
    samples = ((f"{number:06}", _image(draw, number)) for number in range(count))
    for name, members in _in_tars(folder / "images", samples, count):
        (folder / "png" / f"{name}_{members['cls'].decode()}.png").write_bytes(members["png"])


def write_texts(folder: Path, count: int) -> None:
    """Texts of 16 to 400 numbers, most of them short: one array with the places of each, and tar files."""
    draw = np.random.default_rng(1)
    lengths = np.minimum(400, 16 + draw.exponential(80, count).astype(np.int64))
    tokens = draw.integers(1, VOCABULARY, lengths.sum(), dtype=np.int64)
    ends = np.cumsum(lengths)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "ends.npy", ends)
    texts = np.split(tokens, ends[:-1])
    samples = ((f"{number:06}", {"tokens": text.tobytes()}) for number, text in enumerate(texts))
    for _ in _in_tars(folder / "texts", samples, count):
        pass


def _image(draw: np.random.Generator, number: int) -> Members:
    smooth = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((SIDE, SIDE))
    noisy = np.asarray(smooth).astype(np.int16) + draw.integers(-3, 4, (SIDE, SIDE, 3))
    packed = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(packed, "png")
    return {"png": packed.getvalue(), "cls": str(number % NUM_CLASSES).encode()}


def _in_tars(stem: Path, samples: Iterable[tuple[str, Members]], count: int) -> Iterator[tuple[str, Members]]:
    """Writes samples into tar files as they pass by."""
    archives = [tarfile.open(f"{stem}-{shard}.tar", "w") for shard in range(NUM_SHARDS)]  # noqa: SIM115
    for number, (name, members) in enumerate(samples):
        for ending, content in members.items():
            member = tarfile.TarInfo(f"{name}.{ending}")
            member.size = len(content)
            archives[number * NUM_SHARDS // count].addfile(member, io.BytesIO(content))
        yield name, members
    for archive in archives:
        archive.close()


def decoded(png: bytes) -> np.ndarray[Any, Any]:
    """An image, cut at a random place and turned at random."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    top, left = random.randrange(SIDE - CROP), random.randrange(SIDE - CROP)
    cut = pixels[top : top + CROP, left : left + CROP]
    return np.ascontiguousarray((cut[:, ::-1] if random.random() < 0.5 else cut).transpose(2, 0, 1))


class PngFolder(Dataset[tuple[np.ndarray[Any, Any], int]]):
    """Images of a folder, a file each."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        with open(self._paths[index], "rb") as file:
            return decoded(file.read()), int(self._paths[index][-5])


class MappedTexts(Dataset[Tensor]):
    """Texts in one mapped array: the quickest way to single samples that there is."""

    def __init__(self, folder: Path) -> None:
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="c")
        self._ends = np.load(folder / "ends.npy")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Tensor:
        start = self._ends[index - 1] if index else 0
        return torch.from_numpy(self._tokens[start : self._ends[index]])


def padded(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Texts as one batch, and their lengths."""
    return pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts])


def image_loader(folder: Path, workers: int) -> DataLoader[Any]:
    """A plain DataLoader of the images."""
    return DataLoader(PngFolder(folder / "png"), IMAGES_PER_BATCH, shuffle=True, num_workers=workers)


def text_loader(folder: Path, workers: int) -> DataLoader[Any]:
    """A plain DataLoader of the texts."""
    dataset = MappedTexts(folder)
    return DataLoader(dataset, TEXTS_PER_BATCH, shuffle=True, num_workers=workers, collate_fn=padded)
