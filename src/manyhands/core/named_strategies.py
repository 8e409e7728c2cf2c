"""Named strategies, such as Mirrored and Sharded: functions that return a StrategySpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .errors import StrategyError
from .spec import StrategySpec, require_count, text_of

_policy_checks: list[Callable[[str], object]] = []


def check_policies_by(check: Callable[[str], object]) -> None:
    """Register a function that raises for the text of an unknown sync policy; it is called for every new strategy."""
    _policy_checks.append(check)


def policy_text(policy: object) -> str:
    """Return the text of a sync policy, given as an object or as text; raise StrategyError for an unknown policy."""
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

    The arguments are explained under `StrategySpec`.

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

    Without `replicas`, all available devices are used. `sync` decides how gradients are averaged, by default exactly.
    "bf16", "fp16", `mh.sync.Int8()`, `mh.sync.TopK(0.01)` and `mh.sync.PowerSGD(4)` send fewer bytes;
    `mh.sync.LocalSteps(16)` and `mh.sync.DiLoCo(100)` synchronize rarely. All of these change the mathematics. With
    `between="hosts"` they act between hosts only. "auto" measures and caches its choice among the exact policies,
    `mh.sync.Auto(lossy=True)` may choose any of them. The other arguments are explained under `StrategySpec`.

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

    Without `shards`, all available devices are used. `sharding="gradients"` keeps whole parameters between forward and
    backward, which costs memory and saves traffic; `sharding="optimizer"` keeps parameters and gradients whole on every
    rank and shards only the optimizer state. With `replicas`, several groups of `shards` ranks train in parallel, for
    example one group per host. The other arguments are explained under `StrategySpec`.

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

    The split of each layer is found by tracing the network with a few samples; `layout` overrides it by patterns of
    layer names, such as {"*.mlp.*": "replicate", "head": "column"}. `tensor` is the number of devices of a replica. The
    other arguments are explained under `StrategySpec`.

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
    """Parameter servers hold and update the parameters; workers pull them and push gradients.

    Workers may join and leave during training.

    Args:
        servers: Number of servers, each of which holds a part of the parameters.
        workers: Number of workers, one per device; None uses all available devices.
        staleness: 0: a step is the whole batch, as on one device. 3: a worker may be three steps ahead of the slowest
            one. None: workers never wait, and every worker's batch is a separate update.
        backup: Number of the slowest workers for which a step does not wait; their samples are assigned again.
        correction: Whether the learning rate for a stale gradient is divided by 1 + its staleness.
        followers: 1 adds a follower to every server: a second server that has every update which the server has
            acknowledged, and replaces it when it fails, so that no step is repeated. It doubles the servers' memory
            and computation. With 0, servers resume from the last checkpoint after a failure.

    The other arguments are explained under `StrategySpec`. `backup`, and any `staleness` other than 0, change the
    mathematics. To add further settings of one device, multiply the strategies:
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
    """Pipeline parallel training: each device computes a stage of the network, the stages different micro-batches.

    Without `stages`, all available devices are used. Stages are chosen to take equally long. The last stage computes
    the loss of every micro-batch. Multiply strategies for several pipelines with a sync policy:
    `mh.Pipeline(4) * mh.Mirrored(2, sync="bf16")`. The arguments are explained under `StrategySpec`.

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

    Args:
        where: Maps patterns of module names to devices: "cuda:1", "host2/cuda:0", or an index in `on=`. "*" matches
            all modules that no other pattern names; operations outside of these modules run where most of their
            inputs are. None takes the devices of the `with mh.strategies.place_on(...):` blocks in which the network
            was built; without such blocks, the network is partitioned for equal time, balanced parameters and little
            communication.
        devices: Number of devices; by default those that `where` names, or all available ones.

    The other arguments are explained under `StrategySpec`.

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
    """Return the spec of a user's `strategy` argument; None means data parallel training on all available devices."""
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
