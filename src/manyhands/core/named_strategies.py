"""Strategies under the names that users write: each function returns a StrategySpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .errors import StrategyError
from .spec import StrategySpec, require_count, text_of

_policy_checks: list[Callable[[str], object]] = []


def check_policies_by(check: Callable[[str], object]) -> None:
    """Register a check that raises for a text that names no known sync policy; called when a strategy is created."""
    _policy_checks.append(check)


def policy_text(policy: object) -> str:
    """Return the text of a sync policy, given as an object or as text, after checking it."""
    text = text_of(policy)
    for check in _policy_checks:
        check(text)
    return text


def Single(
    *,
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    capture: str = "auto",
    recompute: str = "",
    offload: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Train on one device, in the caller's process.

    >>> Single(accumulate=4)
    StrategySpec(accumulate=4)
    """
    return StrategySpec(
        replicas=1,
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        capture=capture,
        recompute=recompute,
        offload=offload,
        deterministic=deterministic,
    )


def Mirrored(
    replicas: int | None = None,
    *,
    sync: object = "allreduce",
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    capture: str = "auto",
    recompute: str = "",
    offload: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Data parallel training: a replica per device processes its share of each batch, and gradients are averaged.

    `sync` chooses how, exactly by default. "bf16", "fp16", `mh.sync.Int8()`, `mh.sync.TopK(0.01)` and
    `mh.sync.PowerSGD(4)` send fewer bytes, `mh.sync.LocalSteps(16)` and `mh.sync.DiLoCo(100)` synchronize rarely; they
    change the mathematics. With `between="hosts"` they act between hosts only. "auto" measures and caches its choice,
    `mh.sync.Auto(lossy=True)` may choose any of them.

    >>> Mirrored(2)
    StrategySpec(replicas=2)
    """
    return StrategySpec(
        replicas=replicas,
        sync=policy_text(sync),
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        capture=capture,
        recompute=recompute,
        offload=offload,
        deterministic=deterministic,
    )


def Sharded(
    shards: int | None = None,
    *,
    replicas: int | None = 1,
    sharding: str = "full",
    sync: object = "allreduce",
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: str = "",
    offload: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Sharded data parallel training: every rank holds a shard of each parameter, gradient and optimizer state.

    `sharding="gradients"` keeps whole parameters between forward and backward, which costs memory and saves traffic;
    `sharding="optimizer"` keeps parameters and gradients whole on every rank and shards only the optimizer state.
    With `replicas`, several such groups train in parallel (shard inside a host, replicate across hosts).

    >>> Sharded(4, replicas=2)
    StrategySpec(replicas=2, shards=4)
    """
    return StrategySpec(
        replicas=replicas,
        shards=shards,
        sharding=sharding,
        sync=policy_text(sync),
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        recompute=recompute,
        offload=offload,
        deterministic=deterministic,
    )


def TensorParallel(
    tensor: int = 2,
    *,
    replicas: int | None = 1,
    layout: Mapping[str, str] | str = "",
    sync: object = "allreduce",
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: str = "",
    offload: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Tensor parallel training: each device computes some features, heads or vocabulary rows of every layer.

    The split is found by tracing a few samples through the network; `layout` overrides it by patterns of layer names,
    such as {"*.mlp.*": "replicate", "head": "column"}.

    >>> TensorParallel(2, replicas=4, layout={"head": "replicate"})
    StrategySpec(replicas=4, tensor=2, layout='head:replicate')
    """
    return StrategySpec(
        replicas=replicas,
        tensor=tensor,
        layout=layout,  # type: ignore[arg-type]
        sync=policy_text(sync),
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        recompute=recompute,
        offload=offload,
        deterministic=deterministic,
    )


def ContextParallel(
    context: int = 2,
    *,
    replicas: int | None = 1,
    sequence_dim: int = 0,
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Context parallel training: each device holds the whole network and computes a part of every sequence.

    Attention reaches the whole sequence: keys and values travel around the devices. Activations take as many times less
    memory as there are devices. The sequence is the dim next to the samples, in token ids (samples, tokens) and in
    embedded inputs (samples, tokens, features); `sequence_dim` names another one.

    >>> ContextParallel(4, replicas=2)
    StrategySpec(replicas=2, context=4)
    """
    return StrategySpec(
        replicas=replicas,
        context=context,
        sequence_dim=sequence_dim,
        precision=precision,
        accumulate=accumulate,
        recompute=recompute,
        deterministic=deterministic,
    )


def ParameterServer(
    servers: int = 1,
    workers: int | None = None,
    *,
    staleness: int | None = 0,
    backup: int = 0,
    correction: bool = False,
    followers: int = 0,
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    deterministic: bool = False,
) -> StrategySpec:
    """Parameter servers hold and update the parameters; workers pull values, push gradients, and may come and go.

    - `staleness=0`: a step is the whole batch, as on one device; `staleness=3`: a worker may be three steps ahead of
      the slowest; `staleness=None`: workers never wait, and every worker's batch is a separate update;
    - `backup=1`: a step does not wait for the slowest worker, whose samples are assigned again;
    - `correction`: a stale gradient's learning rate is divided by 1 + its staleness;
    - `followers=1`: every server has a follower, which has all that the server acknowledges and replaces it when it
      fails, so that no step is repeated. It doubles the servers' memory and computation. Without it, servers resume
      from the last checkpoint.

    All but the plain `staleness=0` change the mathematics. Settings of one device are combined by a product:
    `mh.ParameterServer(2, 4) * mh.Single(recompute="blocks")`.

    >>> ParameterServer(servers=2, workers=4)
    StrategySpec(replicas=4, servers=2)
    >>> str(ParameterServer(servers=2, workers=4, staleness=None))
    'replicas=4,servers=2,staleness=none'
    """
    require_count("servers", servers)
    return StrategySpec(
        replicas=workers,
        servers=servers,
        staleness=staleness,
        backup=backup,
        correction=correction,
        followers=followers,
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        deterministic=deterministic,
    )


def Pipeline(
    stages: int | None = None,
    *,
    microbatches: int = 8,
    schedule: str = "1f1b",
    replicas: int | None = 1,
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: str = "",
    offload: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Pipeline parallel training: a stage of the network per device; the stages work on different microbatches.

    Stages are balanced to take equally long. The loss is computed on the last stage for every microbatch. Several
    pipelines with a sync policy are a product: `mh.Pipeline(4) * mh.Mirrored(2, sync="bf16")`.

    >>> Pipeline(4, microbatches=16)
    StrategySpec(stages=4, microbatches=16)
    """
    return StrategySpec(
        replicas=replicas,
        stages=stages or 0,
        microbatches=microbatches,
        schedule=schedule,
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        recompute=recompute,
        offload=offload,
        deterministic=deterministic,
    )


def Placed(
    where: Mapping[str, str | int] | None = None,
    *,
    devices: int | None = None,
    replicas: int | None = 1,
    sync: object = "allreduce",
    batch_stats: str = "sync",
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: str = "",
    offload: str = "",
    deterministic: bool = False,
) -> StrategySpec:
    """Place parts of a network on chosen devices; parts that do not depend on each other run at the same time.

    `where` maps patterns of module names to devices: "cuda:1", "host2/cuda:0", or their index in `on=`. "*" matches all
    modules that no other pattern names; operations outside of these parts run where most of their inputs are. Without a
    map, the `with mh.strategies.place_on(...):` blocks in which the network was built decide; if there are none, the
    network is partitioned for equal time, balanced parameters and little communication.

    >>> Placed({"tower_a.*": "cpu:0", "tower_b.*": "cpu:1"})
    StrategySpec(stages=2, place='tower_a.*@cpu:0;tower_b.*@cpu:1')
    """
    if where is not None and not where:
        raise StrategyError(
            "the map of mh.Placed must name parts of the network",
            got="an empty map",
            remedy="omit it for an automatic placement",
        )
    count = devices if where is None else devices or len(set(map(str, where.values())))
    return StrategySpec(
        replicas=replicas,
        stages=count or 0,
        place=";".join(f"{pattern}@{device}" for pattern, device in where.items()) if where else "auto",
        sync=policy_text(sync),
        batch_stats=batch_stats,
        precision=precision,
        accumulate=accumulate,
        recompute=recompute,
        offload=offload,
        deterministic=deterministic,
    )


def as_spec(strategy: StrategySpec | str | None) -> StrategySpec:
    """Return a spec from a user's argument; None means data parallel on all available devices."""
    if strategy is None:
        return Mirrored()
    if isinstance(strategy, str):
        return StrategySpec.parse(strategy)
    if not isinstance(strategy, StrategySpec):
        raise StrategyError(
            "strategy must be a StrategySpec or a string",
            got=f"{strategy!r}",
            remedy='pass for example mh.Mirrored(), mh.Single() or "replicas=2"',
        )
    return strategy
