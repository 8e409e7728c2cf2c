"""Several mesh axes: positions of ranks, shares of samples, and products of strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import StrategyError
from manyhands.distributed import World
from manyhands.training import Hand


def assign_ranks(world: World) -> dict[str, Any]:
    """What a rank sees of a mesh of two replicas, two stages and two tensor ranks."""
    spec = mh.StrategySpec(tensor=2, stages=2, replicas=2)
    hand = Hand(world, spec)
    numbers = {name: torch.tensor(float(world.rank)) for name in ("replicas", "stages", "tensor")}
    for name, number in numbers.items():
        world.along(spec.axes, name).all_reduce(number)
    inner = world.along(spec.axes, "stages", "tensor")
    return {
        "place": (hand.rank, hand.size, world.is_first),
        "rows": [batch.tolist() for batch in hand.batches(torch.arange(6), 4, shuffle=False)],
        "sums": {name: int(number) for name, number in numbers.items()},
        "inner": (inner.rank, inner.gather_objects(world.rank)),
        "same": world.along(spec.axes, "stages", "tensor") is inner,
        "mesh": list(world.mesh(spec.axes).mesh_dim_names or ()),
        "sum": float(hand.sum(1.0)),
    }


def test_ranks_that_differ_along_stages_or_tensor_get_the_same_samples(run_ranks: Any) -> None:
    ranks = run_ranks(assign_ranks, 8)
    assert [rank["place"] for rank in ranks] == [(r // 4, 2, r == 0) for r in range(8)]
    assert all(rank["rows"] == [[0, 1], [4]] for rank in ranks[:4])
    assert all(rank["rows"] == [[2, 3], [5]] for rank in ranks[4:])
    assert [rank["sums"]["tensor"] for rank in ranks] == [1, 1, 5, 5, 9, 9, 13, 13]
    assert [rank["sums"]["stages"] for rank in ranks] == [2, 4, 2, 4, 10, 12, 10, 12]
    assert [rank["sums"]["replicas"] for rank in ranks] == [4, 6, 8, 10, 4, 6, 8, 10]
    assert [rank["inner"] for rank in ranks] == [(r % 4, [0, 1, 2, 3] if r < 4 else [4, 5, 6, 7]) for r in range(8)]
    assert all(rank["same"] and rank["mesh"] == ["replicas", "stages", "tensor"] for rank in ranks)
    assert all(rank["sum"] == 2.0 for rank in ranks)


def test_strategy_product_multiplies_axes_and_keeps_settings() -> None:
    assert mh.Sharded(4, precision="bf16") * mh.StrategySpec(tensor=2) == mh.StrategySpec(
        shards=4, tensor=2, precision="bf16"
    )
    assert mh.StrategySpec(tensor=2) * mh.StrategySpec(tensor=2, stages=3) == mh.StrategySpec(tensor=4, stages=3)
    everything = mh.Mirrored() * mh.StrategySpec(tensor=2)
    assert everything.with_devices(6) == mh.StrategySpec(replicas=3, tensor=2)
    assert mh.StrategySpec.parse("tp=2,pp=2,dp=2") == mh.StrategySpec(tensor=2, stages=2, replicas=2)


def test_conflicting_strategy_products_are_rejected() -> None:
    with pytest.raises(StrategyError, match="must have the same precision, but got 'bf16' and 'fp64'"):
        mh.Sharded(2, precision="bf16") * mh.Mirrored(2, precision="fp64")
    with pytest.raises(StrategyError, match="only one factor of a product may leave replicas"):
        mh.Mirrored() * mh.Mirrored(2)
    with pytest.raises(TypeError):
        mh.Sharded(2) * 3  # type: ignore[operator]


def test_strategy_product_must_match_number_of_devices() -> None:
    spec = mh.StrategySpec(tensor=2, stages=2, replicas=2)
    with pytest.raises(StrategyError, match=r"needs 8 devices \(2 replicas x 2 tensor x 2 stages\), but got 6"):
        spec.with_devices(6)
    with pytest.raises(StrategyError, match="needs a multiple of 2 devices, but got 5"):
        (mh.Mirrored() * mh.StrategySpec(tensor=2)).with_devices(5)
