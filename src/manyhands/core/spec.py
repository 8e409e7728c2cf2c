"""StrategySpec: how training is distributed, as plain data that can be printed, serialized and compared."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .errors import StrategyError

ALIASES = {
    "dp": "replicas",
    "ddp": "replicas",
    "fsdp": "shards",
    "tp": "tensor",
    "pp": "stages",
    "cp": "context",
    "ep": "expert",
    "workers": "replicas",
}
"""Common abbreviations of the axes of a `StrategySpec`."""

AXES = ("replicas", "shards", "tensor", "stages", "context", "expert")
MESH_ORDER = ("replicas", "shards", "stages", "context", "tensor")
OPEN_AXES = ("replicas", "shards", "stages")
"""Axes that may take all available devices."""
DATA_AXES = ("replicas", "shards")
"""Axes along which ranks process different samples."""
PRECISIONS = ("fp32", "bf16", "fp64")
WAYS = ("column", "row", "vocabulary", "sequence", "replicate")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SHARDINGS = ("full", "gradients", "optimizer")
OFFLOADS = ("optimizer", "activations")
CAPTURES = ("auto", "graph", "compile", "off")
_NONE = {"replicas": "all", "shards": "all", "staleness": "none"}
"""Text that represents None in a spec's string form."""


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """How training is distributed over devices.

    Functions such as `mh.Single()`, `mh.Mirrored()` and `mh.Sharded()` create a spec. Axes are counts of devices, 1 by
    default; None for replicas or shards means all available devices.

    - `replicas`: copies of the whole network (data parallel), each with its share of every batch;
    - `shards`: ranks among which the network's state is sharded; each of them processes its share of every batch;
    - `stages`: ranks that each hold a piece of the network, as a pipeline or as `place` maps them; 0 for all available
      devices;
    - `tensor`: ranks that split each layer (tensor parallelism);
    - `context`, `sequence_dim`: ranks that split each sequence; the dim of inputs that they split, or 0 to find it;
    - `expert`: reserved for expert parallelism, which is not implemented; must be 1;
    - `sharding`: what is sharded: "full" (parameters, gradients and optimizer state), "gradients" (the same, but
      parameters stay whole between forward and backward) or "optimizer" (optimizer state only);
    - `layout`: overrides of the automatic tensor-parallel layout: patterns of layer names, each with "column", "row",
      "vocabulary", "sequence" (norms and the layers before them, each rank with some of the tokens) or "replicate",
      such as "*.mlp.*:replicate;head:column";
    - `sync`: how replicas synchronize: a policy of `mh.sync` or its text, such as "bf16" or "localsteps(16)";
      "allreduce" is exact, "auto" chooses;
    - `batch_stats`: the samples over which BatchNorm computes statistics: "sync" the whole batch, "micro" each
      micro-batch over all replicas, "local" each replica's share alone. The last two change the mathematics;
    - `precision`: "fp32", "bf16" (autocast; weights stay fp32) or "fp64";
    - `accumulate`: number of micro-batches per batch for gradient accumulation;
    - `capture`: how a step is executed on a GPU: "auto" captures CUDA graphs and compiles if that is faster, "graph"
      only captures, "compile" compiles from the start, "off" runs eagerly;
    - `recompute`: activation checkpointing: "" none, "blocks" for blocks repeated in a list or a sequence, "selective"
      the same but keeping matrix products, convolutions and attention, or a pattern of module names such as "*.mlp";
    - `offload`: what is kept in host memory: "optimizer" the optimizer state (on one device the gradients too),
      "activations" the activations saved for backward, or both as "optimizer+activations";
    - `deterministic`: whether random numbers, such as those of dropout, are the same on any number of replicas;
    - `microbatches`: number of micro-batches into which a pipeline splits a batch;
    - `schedule`: the pipeline schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble";
    - `place`: a map from parts of the network to devices, as "tower_a.*@0;tower_b.*@1", or "auto"; with `stages` and
      without `place`, the strategy is a pipeline;
    - `servers`: number of parameter servers, which hold and update the parameters; the replicas are then workers that
      pull parameters and push gradients;
    - `staleness`: with servers, how many steps old a worker's parameters may be: 0 is synchronous and exact, None is
      fully asynchronous;
    - `correction`: whether a stale gradient's learning rate is divided by 1 + its staleness;
    - `backup`: number of stragglers that a step does not wait for;
    - `followers`: 1 to give every server a follower that replaces it when it fails.

    >>> StrategySpec.parse("dp=4,accumulate=2")
    StrategySpec(replicas=4, accumulate=2)
    >>> str(StrategySpec.parse("mirrored"))
    'replicas=all'
    """

    replicas: int | None = 1
    shards: int | None = 1
    tensor: int = 1
    stages: int = 1
    context: int = 1
    expert: int = 1
    sequence_dim: int = 0
    sharding: str = "full"
    layout: str = ""
    sync: str = "allreduce"
    batch_stats: str = "sync"
    precision: str = "fp32"
    accumulate: int = 1
    capture: str = "auto"
    recompute: str = ""
    offload: str = ""
    deterministic: bool = False
    microbatches: int = 1
    schedule: str = "1f1b"
    place: str = ""
    servers: int = 0
    staleness: int | None = 0
    backup: int = 0
    correction: bool = False
    followers: int = 0

    def __post_init__(self) -> None:
        # Store a policy object as the text that recreates it, so that a spec stays plain data.
        object.__setattr__(self, "sync", text_of(self.sync))
        for axis in AXES:
            count = getattr(self, axis)
            if axis in OPEN_AXES and (count is None or (axis == "stages" and count == 0)):
                continue
            require_count(axis, count)
        both = [axis for axis in OPEN_AXES if not getattr(self, axis)]
        if len(both) > 1:
            raise StrategyError(
                f"only one of {' and '.join(both)} can use all remaining devices",
                got="None for both",
                remedy="pass a number for one of them",
            )
        if isinstance(self.layout, Mapping):
            object.__setattr__(self, "layout", ";".join(f"{pattern}:{way}" for pattern, way in self.layout.items()))
        for way in self.layouts.values():
            _require_one_of("the split of a layer in layout", way, WAYS)
        require_count("accumulate", self.accumulate)
        require_count("microbatches", self.microbatches)
        _require_one_of("schedule", self.schedule, SCHEDULES)
        if self.place and self.microbatches > 1:
            raise StrategyError(
                "mh.Placed does not split a batch into micro-batches",
                got=f"microbatches={self.microbatches}",
                remedy="use accumulate=, or mh.Pipeline",
            )
        if not isinstance(self.deterministic, bool):
            raise StrategyError(
                "deterministic must be true or false", got=repr(self.deterministic), remedy="write deterministic=true"
            )
        if not isinstance(self.recompute, str):
            raise StrategyError(
                'recompute must be "blocks", "selective" or a pattern of module names',
                got=repr(self.recompute),
                remedy='write recompute="blocks"',
            )
        _require_one_of("precision", self.precision, PRECISIONS)
        if self.deterministic and self.capture == "compile":
            raise StrategyError(
                "a deterministic step cannot be compiled, because its random numbers are generated in Python",
                got='deterministic with capture="compile"',
                remedy='omit one of them; capture="graph" works with deterministic',
            )
        _require_one_of("capture", self.capture, CAPTURES)
        for what in self.offloaded:
            _require_one_of("offload", what, OFFLOADS)
        if self.offload and self.capture in ("graph", "compile"):
            raise StrategyError(
                "a step that offloads to host memory can be neither captured nor compiled",
                got=f"offload={self.offload} with capture={self.capture}",
                remedy="omit one of them",
            )
        _require_one_of("sharding", self.sharding, SHARDINGS)
        _require_one_of("batch_stats", self.batch_stats, ("sync", "micro", "local"))
        if self.expert != 1:
            raise StrategyError(
                "the axis 'expert' is reserved and not implemented yet", got=self.expert, remedy="leave expert at 1"
            )
        if self.sequence_dim:
            require_count("sequence_dim", self.sequence_dim)
        _check_servers(self)
        split = [axis for axis in ("shards", "tensor", "stages", "context") if getattr(self, axis) != 1]
        if split and self.replicas == 1 and self.sync != "allreduce":
            raise StrategyError(
                "a sync policy needs several replicas",
                got=f"sync={self.sync} with {split[0]}={getattr(self, split[0])} and one replica",
                remedy="pass replicas=2 or more, or omit sync",
            )

    @property
    def changes_mathematics(self) -> str:
        """Text that says how parameter servers make updates differ from those of one device; empty if they do not."""
        if not self.servers or (self.staleness == 0 and not self.backup):
            return ""
        if self.staleness is None:
            return "every gradient is an update by itself, computed with values that may be old"
        if self.staleness:
            return f"gradients are computed with values that may be {self.staleness} steps old"
        return "a step takes the gradients that come first, so batches are made of other samples"

    @property
    def num_devices(self) -> int | None:
        """Number of devices that the strategy needs; None if it uses all available ones."""
        if self.replicas is None or self.shards is None or not self.stages:
            return None
        return self.replicas * self.shards * self.tensor * self.stages * self.context

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes longer than 1, outermost first: ranks that communicate most are adjacent.

        The spec must have a definite number of devices, see `with_devices`.

        >>> StrategySpec(tensor=4, replicas=2).axes
        {'replicas': 2, 'tensor': 4}
        """
        assert self.replicas is not None, "a spec for definite devices, see with_devices"
        assert self.shards is not None, "a spec for definite devices, see with_devices"
        assert self.stages, "a spec for definite devices, see with_devices"
        return {name: count for name in MESH_ORDER if (count := getattr(self, name)) > 1}

    @property
    def layouts(self) -> dict[str, str]:
        """The split of layers (such as "column") by pattern of layer names, as set by `layout`.

        >>> StrategySpec(tensor=2, layout="*.mlp.*:replicate;head:column").layouts
        {'*.mlp.*': 'replicate', 'head': 'column'}
        """
        pairs = (part.rpartition(":") for part in filter(None, self.layout.split(";")))
        return {pattern.strip(): way.strip() for pattern, _, way in pairs}

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The names in `offload`.

        >>> StrategySpec(offload="optimizer+activations").offloaded
        ('optimizer', 'activations')
        """
        return tuple(filter(None, self.offload.split("+")))

    @property
    def num_parts(self) -> int:
        """Number of shares into which a batch is split: the replicas times the shards."""
        return math.prod(self.axes.get(name, 1) for name in DATA_AXES)

    def __mul__(self, other: StrategySpec) -> StrategySpec:
        """Combine two strategies: multiply their axes, and keep all settings that differ from the defaults.

        >>> StrategySpec(shards=4) * StrategySpec(replicas=2)
        StrategySpec(replicas=2, shards=4)
        """
        if not isinstance(other, StrategySpec):
            return NotImplemented
        return StrategySpec(**{f.name: _product(f, self, other) for f in dataclasses.fields(self)})

    def with_devices(self, count: int) -> StrategySpec:
        """Return the spec with a number for the axis that takes all devices; raise StrategyError if `count` do not fit.

        >>> StrategySpec(replicas=None, shards=2).with_devices(6)
        StrategySpec(replicas=3, shards=2)
        """
        others = (self.replicas or 1) * (self.shards or 1) * self.tensor * (self.stages or 1) * self.context
        if self.num_devices is None and count % others == 0 and count >= others:
            left = count // others
            replicas, shards, stages = (getattr(self, axis) or left for axis in OPEN_AXES)
            return dataclasses.replace(self, replicas=replicas, shards=shards, stages=stages)
        if self.num_devices == count:
            return self
        raise StrategyError(
            f"{self} needs {'a multiple of ' if self.num_devices is None else ''}{others} devices{self.arithmetic}",
            got=f"{count}",
            remedy="change one of its sizes, or pass the devices with on=",
        )

    @property
    def arithmetic(self) -> str:
        """The factors of the number of devices as text; empty unless several axes contribute.

        >>> StrategySpec(tensor=2, stages=3).arithmetic
        ' (2 tensor x 3 stages)'
        """
        factors = [f"{n} {axis}" for axis in AXES if (n := getattr(self, axis)) not in (None, 0, 1)]
        return f" ({' x '.join(factors)})" if len(factors) > 1 else ""

    def explain(self, task: Any) -> Any:
        """Return a table of how the spec splits a task, as `mh.explain(task, spec)` does."""
        # Imported by name because explain depends on packages above this one.
        return import_module(__name__.partition(".")[0]).explain(task, self)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON-ready data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StrategySpec:
        """Create a spec from the result of `to_dict`; raises StrategyError for unknown keys."""
        known = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                alike = difflib.get_close_matches(key, [*sorted(known), *ALIASES], 1)
                remedy = f"did you mean {alike[0]}?" if alike else "correct the name"
                if axis := _AXIS.get(_ELSEWHERE.get(key, key)):
                    remedy = f"write {axis}={values[key]}"
                raise StrategyError(
                    f"a setting of a strategy must be one of {', '.join(sorted([*known, 'workers']))}",
                    got=repr(key),
                    remedy=f"pass it to fit: options=mh.options.Resources({key}=...)"
                    if key in ("fit_in", "memory")
                    else remedy,
                )
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> StrategySpec:
        """Create a spec from text such as "mirrored", "replicas=4,tensor=2", "dp=4" or "mirrored,accumulate=2"."""
        values: dict[str, Any] = {}
        named: list[str] = []
        for part in filter(None, (piece.strip() for piece in split_settings(text))):
            key, equals, value = part.partition("=")
            if equals:
                values.update([_setting(key.strip().lower(), value.strip())])
            else:
                values.update(_named(part.lower()))
                named.append(part.lower())
        if "ps" in named:
            require_count("servers", values["servers"])
        return cls.from_dict(values)

    def __str__(self) -> str:
        shown = self.to_dict() or {"replicas": 1}
        if not self.stages:
            shown["stages"] = "all"
        return ",".join(f"{key}={_NONE[key] if value is None else value}" for key, value in shown.items())

    def __repr__(self) -> str:
        return f"StrategySpec({', '.join(f'{k}={v!r}' for k, v in self.to_dict().items())})"


def text_of(policy: object) -> str:
    """Return the text, such as "bf16", of a sync policy that is given as an object or as text."""
    if isinstance(policy, str):
        return policy
    if isinstance(policy, type) or not hasattr(policy, "changes_mathematics"):
        got = f"the class {policy.__name__}" if isinstance(policy, type) else repr(policy)
        made = f"mh.sync.{policy.__name__}(...)" if isinstance(policy, type) else 'mh.sync.Int8() or "bf16"'
        raise StrategyError("sync must be a policy or its name", got=got, remedy=f"write for example {made}")
    return str(policy)


NAMED: dict[str, dict[str, Any]] = {
    "single": {"replicas": 1},
    "mirrored": {"replicas": None},
    "sharded": {"shards": None},
    "pipeline": {"stages": 0, "microbatches": 8},
    "placed": {"stages": 0, "place": "auto"},
    "ps": {"replicas": None, "servers": 1},
    "tensorparallel": {"tensor": 2},
    "contextparallel": {"context": 2},
}
"""Settings of the strategies that text can name."""
_ELSEWHERE = {"dp": "mirrored", "ddp": "mirrored", "fsdp": "sharded", "pp": "pipeline"}
_ELSEWHERE |= {"tp": "tensorparallel", "cp": "contextparallel"}
"""Common abbreviations of strategies."""
_AXIS = {name: next(iter(NAMED[name])) for name in _ELSEWHERE.values()}
"""For each strategy, the axis that a number such as the 2 in "sharded(2)" is meant for."""


def _product(field: dataclasses.Field[Any], one: StrategySpec, other: StrategySpec) -> Any:
    """Return a setting of the product of two specs: for an axis the product, else the value that is not the default."""
    a, b = getattr(one, field.name), getattr(other, field.name)
    if field.name in AXES:
        if (not a or not b) and 1 not in (a, b):
            raise StrategyError(
                f"only one factor of a product may leave {field.name} open",
                got=" and ".join(str(n) if n else "all" for n in (a, b)),
                remedy=f"set {field.name} in one of them only",
            )
        return b if a == 1 else a if b == 1 else a * b
    if field.default not in (a, b) and a != b:
        raise StrategyError(
            f"the factors of a product must have the same {field.name}",
            got=f"{a!r} and {b!r}",
            remedy=f"set {field.name} in one of them only",
        )
    return b if a == field.default else a


def split_settings(text: str) -> list[str]:
    """Split settings at commas, except inside parentheses.

    >>> split_settings("replicas=2,sync=localsteps(16,by=topk(0.1,warmup=1))")
    ['replicas=2', 'sync=localsteps(16,by=topk(0.1,warmup=1))']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _named(word: str) -> dict[str, Any]:
    try:
        return NAMED[_ELSEWHERE.get(word, word)]
    except KeyError:
        raise StrategyError(
            f"a strategy must be one of {', '.join(NAMED)}, auto, or settings such as replicas=4",
            got=repr(word),
            remedy=_meant(word),
        ) from None


def _meant(word: str) -> str:
    """Return a suggestion for an unknown strategy such as sharded(2), sharded:2 or shraded."""
    name, _, number = re.sub(r"[(:*]", "=", word).rstrip(")").partition("=")
    alike = difflib.get_close_matches(name, [*NAMED, *_ELSEWHERE, "auto"], 1)
    if not alike:
        return 'write for example "mirrored" or "replicas=2,accumulate=4"'
    axis = _AXIS.get(_ELSEWHERE.get(alike[0], alike[0]))
    return f"write {axis}={number}" if axis and number.isdigit() else f"did you mean {alike[0]}?"


def _setting(key: str, text: str) -> tuple[str, Any]:
    name = ALIASES.get(key, key)
    if name in OPEN_AXES and text in ("all", "auto"):
        return name, 0 if name == "stages" else None
    if name == "staleness" and text.lower() == "none":
        return name, None
    if name in (*AXES, "accumulate", "microbatches", "servers", "staleness", "backup", "followers", "sequence_dim"):
        try:
            return name, int(text)
        except ValueError:
            raise StrategyError(f"{name} must be a whole number", got=repr(text), remedy=f"write {key}=2") from None
    if name in ("deterministic", "correction") and text.lower() in ("true", "false"):
        return name, text.lower() == "true"
    return name, text


def _check_servers(spec: StrategySpec) -> None:
    """Raise StrategyError for invalid or contradictory parameter-server settings."""
    for name in ("servers", "backup", "followers", *(() if spec.staleness is None else ("staleness",))):
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            none = ", or None for no bound" if name == "staleness" else ""
            raise StrategyError(
                f"{name} must be a whole number of at least 0{none}", got=repr(value), remedy=f"pass {name}=0 or more"
            )
    if not spec.servers:
        for name in ("staleness", "backup", "correction", "followers"):
            if getattr(spec, name) != getattr(StrategySpec, name):
                raise StrategyError(
                    f"{name} can only be used with parameter servers",
                    got=f"{name}={getattr(spec, name)} without servers",
                    remedy="use mh.ParameterServer(servers=2, workers=4, ...)",
                )
        return
    if spec.followers > 1:
        raise StrategyError("followers must be 0 or 1", got=spec.followers, remedy="pass followers=1")
    others = [name for name in ("shards", "tensor", "stages", "context") if getattr(spec, name) != 1]
    others += [name for name in ("sync", "offload") if getattr(spec, name) != getattr(StrategySpec, name)]
    if others:
        raise StrategyError(
            "parameter servers need whole networks and exact gradients",
            got=f"servers={spec.servers} with {others[0]}={getattr(spec, others[0])}",
            remedy=f"omit {others[0]}, or use mh.Mirrored()",
        )
    if spec.backup and spec.staleness != 0:
        raise StrategyError(
            "backup workers can only be used in synchronous steps",
            got=f"backup={spec.backup} with staleness={spec.staleness}",
            remedy="pass staleness=0 or backup=0",
        )
    if spec.replicas is not None and spec.backup >= spec.replicas:
        raise StrategyError(
            "backup must be smaller than the number of workers",
            got=f"backup={spec.backup} of {spec.replicas} workers",
            remedy=f"pass backup={spec.replicas - 1} or less",
        )
    if spec.correction and spec.staleness is not None:
        raise StrategyError(
            "correction can only be used with staleness=None, where single gradients are stale",
            got=f"staleness={spec.staleness}",
            remedy="omit correction",
        )


def require_count(name: str, value: object) -> None:
    """Raise StrategyError unless a setting is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StrategyError(
            f"{name} must be a whole number of at least 1", got=repr(value), remedy=f"pass {name}=1 or more"
        )


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StrategyError(f"{name} must be one of {', '.join(allowed)}", got=repr(value), remedy="choose one of them")
