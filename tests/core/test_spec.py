"""Strategy specs: text, data and names are equivalent; invalid ones are refused with a remedy."""

from __future__ import annotations

import pytest

import manyhands as mh
from manyhands.core import StrategyError, StrategySpec, as_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("single", mh.Single()),
        ("mirrored", mh.Mirrored()),
        ("Mirrored", mh.Mirrored()),
        ("dp=4", mh.Mirrored(4)),
        ("fsdp,recompute=blocks", mh.Sharded(recompute="blocks")),
        ("ddp=2, accumulate=3", mh.Mirrored(2, accumulate=3)),
        ("mirrored,precision=bf16,batch_stats=local", mh.Mirrored(precision="bf16", batch_stats="local")),
        ("mirrored,deterministic=true", mh.Mirrored(deterministic=True)),
        ("single,recompute=*.mlp", mh.Single(recompute="*.mlp")),
        ("replicas=4,tensor=2,pp=3", StrategySpec(replicas=4, tensor=2, stages=3)),
        ("replicas=all,fsdp=2", StrategySpec(replicas=None, shards=2)),
    ],
)
def test_strategy_text_is_parsed_and_round_trips(text: str, spec: StrategySpec) -> None:
    assert StrategySpec.parse(text) == spec
    assert StrategySpec.parse(str(spec)) == spec
    assert StrategySpec.from_dict(spec.to_dict()) == spec
    assert hash(spec) == hash(StrategySpec.parse(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("telepathy", r"a strategy must be one of single, mirrored.* auto, or .*\. Write for"),
        ("mirored", r"but got 'mirored'. Did you mean mirrored\?"),
        ("Sharded(2)", "but got 'sharded\\(2\\)'. Write shards=2"),
        ("pipeline=3", "but got 'pipeline'. Write stages=3"),
        ("replicas=0", "replicas must be a whole number of at least 1, but got 0"),
        ("replicas=two", "replicas must be a whole number, but got 'two'"),
        ("precision=fp8", "precision must be one of fp32, bf16, fp64, but got 'fp8'"),
        ("colour=red", "a setting of a strategy must be one of .*workers, but got 'colour'"),
        ("ps,server=1", r"but got 'server'. Did you mean servers\?"),
        ("ps,servers=0", "servers must be a whole number of at least 1, but got 0"),
        ("deterministic=perhaps", "deterministic must be true or false, but got 'perhaps'"),
        ("ep=2", "the axis 'expert' is reserved and not implemented yet"),
    ],
)
def test_invalid_strategy_text_is_rejected(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        StrategySpec.parse(text)


def test_number_of_devices_is_the_product_of_all_axes() -> None:
    assert StrategySpec(replicas=2, tensor=2, stages=3).num_devices == 12
    assert mh.Mirrored().num_devices is None
    assert as_spec(None) == mh.Mirrored()
    with pytest.raises(StrategyError, match="strategy must be a StrategySpec or a string, but got 3"):
        as_spec(3)  # type: ignore[arg-type]
