"""Contract tests for implementations of World: a base class for test classes that can run a function on ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import SendError
from ..distributed import Device, World

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)


def any_value(draw: random.Random, depth: int = 3) -> Any:
    """Return a random value of a type that ranks can send to each other, with containers nested up to `depth`."""
    leaves: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.random() < 0.5,
        lambda: draw.randint(-(10 ** draw.randint(0, 40)), 10**40),
        lambda: draw.choice([0.0, -0.0, math.inf, math.nan, draw.gauss(0, 1)]),
        lambda: "".join(chr(draw.randint(32, 0x3000)) for _ in range(draw.randint(0, 9))),
        lambda: draw.randbytes(draw.randint(0, 9)),
        lambda: complex(draw.random(), 1),
        lambda: Path("folder") / str(draw.random()),
        lambda: draw.choice(_DTYPES),
        lambda: torch.Size([2, 3]),
        lambda: torch.arange(draw.randint(0, 5)).to(draw.choice(_DTYPES)),
        lambda: torch.full([draw.randint(0, 3) for _ in range(draw.randint(0, 3))], draw.random()),
        lambda: np.arange(draw.randint(0, 5)).astype(draw.choice(["<f4", "<i8", ">u2", "<M8[s]"])),
        lambda: np.float64(draw.random()),
        lambda: Device("cpu", draw.randint(0, 9), host="host"),
    ]
    parts: list[Callable[[], Any]] = [
        lambda: [any_value(draw, depth - 1) for _ in range(draw.randint(0, 4))],
        lambda: tuple(any_value(draw, depth - 1) for _ in range(draw.randint(0, 4))),
        lambda: {str(key): any_value(draw, depth - 1) for key in range(draw.randint(0, 4))},
        lambda: {(key, str(key)): any_value(draw, depth - 1) for key in range(draw.randint(0, 4))},
        lambda: {draw.randint(0, 9), "text"},
        lambda: frozenset({draw.randint(0, 9)}),
    ]
    return draw.choice(leaves + (2 * parts if depth else []))()


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same type and content; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other) or (one != one and other != other)


Runner = Callable[[Callable[[World], Any], int], list[Any]]
"""Function `run(fn, size)` that runs `fn(world)` on every one of `size` ranks and returns the results in rank order."""


class WorldContract:
    """Contract tests of an implementation of World. Subclass it in a test module, implement `run`, and set `sizes`."""

    sizes: tuple[int, ...] = (1, 2, 3)
    """The numbers of ranks to test."""

    def run(self, fn: Callable[[World], Any], size: int) -> list[Any]:
        """Run `fn(world)` on `size` ranks with the World under test; return the results in rank order."""
        raise NotImplementedError

    def test_every_rank_knows_its_place(self) -> None:
        for size in self.sizes:
            places = self.run(lambda world: (world.rank, world.size, world.is_first), size)
            assert places == [(rank, size, rank == 0) for rank in range(size)]

    def test_all_reduce(self) -> None:
        def reduce(world: World) -> list[list[float]]:
            results = []
            for op in ("sum", "avg", "max", "min"):
                tensor = torch.tensor([1.0, -1.0]) * (world.rank + 1)
                world.all_reduce(tensor, op)
                results.append(tensor.tolist())
            return results

        for size in self.sizes:
            total = size * (size + 1) / 2
            expected = [[total, -total], [total / size, -total / size], [size, -1.0], [1.0, -size]]
            assert self.run(reduce, size) == [expected] * size

    def test_an_all_reduce_under_way_is_complete_after_wait(self) -> None:
        def overlap(world: World) -> list[float]:
            tensors = [torch.full((1000,), float(world.rank + i)) for i in range(4)]
            under_way = [world.start_all_reduce(tensor) for tensor in tensors]
            for pending in reversed(under_way):
                pending.wait()
            return [tensor.mean().item() for tensor in tensors]

        for size in self.sizes:
            ranks = size * (size - 1) / 2
            assert self.run(overlap, size) == [[ranks + i * size for i in range(4)]] * size

    def test_all_gather_stacks_in_rank_order(self) -> None:
        for size in self.sizes:
            results = self.run(lambda world: world.all_gather(torch.tensor([world.rank, 7])).tolist(), size)
            assert results == [[[rank, 7] for rank in range(size)]] * size

    def test_large_messages_arrive_where_they_belong(self) -> None:
        def exchange(world: World) -> bool:
            count = 1_000_003
            own = torch.arange(world.size).unsqueeze(1) * 100 + world.rank * 10 + torch.arange(count) % 10
            rows, stacked = torch.empty_like(own), torch.empty_like(own)
            swapped, gathered = world.start_all_to_all(own, rows), world.start_all_gather(own[0], stacked)
            gathered.wait()
            swapped.wait()
            digits = torch.arange(count) % 10
            froms = torch.arange(world.size).unsqueeze(1) * 10
            return torch.equal(rows, froms + digits + 100 * world.rank) and torch.equal(stacked, froms + digits)

        for size in self.sizes:
            assert self.run(exchange, size) == [True] * size

    def test_broadcast(self) -> None:
        def broadcast(world: World) -> list[int]:
            tensor = torch.tensor([world.rank])
            world.broadcast(tensor, source=world.size - 1)
            return tensor.tolist()

        for size in self.sizes:
            assert self.run(broadcast, size) == [[size - 1]] * size

    def test_tensors_from_one_rank_to_the_next_arrive_by_their_tags(self) -> None:
        def pass_on(world: World) -> list[float]:
            to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            numbers = [torch.full((3,), float(10 * tag + world.rank)) for tag in range(3)]
            into = [torch.empty(3) for _ in range(3)]
            coming = [world.start_receive(tensor, source, tag) for tag, tensor in enumerate(into)]
            going = [world.start_send(numbers[tag], to, tag) for tag in (2, 0, 1)]
            for pending in (*coming, *going):
                pending.wait()
            return [tensor.mean().item() for tensor in into]

        for size in (size for size in self.sizes if size > 1):
            expected = [[10.0 * tag + (rank - 1) % size for tag in range(3)] for rank in range(size)]
            assert self.run(pass_on, size) == expected

    def test_objects_and_barrier(self) -> None:
        def gather(world: World) -> list[Any]:
            world.barrier()
            return world.gather_objects({"rank": world.rank, "text": "é" * world.rank})

        for size in self.sizes:
            assert self.run(gather, size) == [[{"rank": r, "text": "é" * r} for r in range(size)]] * size

    def test_objects_of_all_kinds_keep_their_values_and_types(self) -> None:
        def gather(world: World) -> bool:
            values = [any_value(random.Random(seed)) for seed in range(40)] + ["é" * 5000, torch.arange(10_000)]  # noqa: S311 (values to compare, no secrets)
            found = [world.gather_objects((world.rank, value)) for value in values]
            return all(
                same(every, [(rank, value) for rank in range(world.size)])
                for every, value in zip(found, values, strict=True)
            )

        for size in self.sizes:
            assert self.run(gather, size) == [True] * size

    def test_an_object_that_is_not_plain_data_is_refused(self) -> None:
        def gather(world: World) -> str:
            try:
                return str(world.gather_objects(print)) if world.size > 1 else "one rank sends nothing: plain data"
            except SendError as error:
                return str(error)

        for size in self.sizes:
            assert all("plain data" in text for text in self.run(gather, size))

    def test_a_mark_is_seen_by_whoever_waits_for_it(self) -> None:
        def tell(world: World) -> int:
            if world.rank == world.size - 1:
                world.mark("done")
            else:
                world.wait_for("never", "done")
            return world.rank

        for size in self.sizes:
            assert self.run(tell, size) == list(range(size))

    def test_many_dtypes(self) -> None:
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64)

        def reduce(world: World) -> list[float]:
            tensors = [torch.ones(3, dtype=kind) for kind in kinds]
            for tensor in tensors:
                world.all_reduce(tensor)
            return [float(tensor.sum()) for tensor in tensors]

        for size in self.sizes:
            assert self.run(reduce, size) == [[3.0 * size] * len(kinds)] * size
