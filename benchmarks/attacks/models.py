"""Hostile archives: programs written by hand, with the right digests, that try to reach what a model must not reach.

`FORGERIES` holds a builder per attack. `attempt` runs one against the loader in a forked child, `attempt_all` runs all
of them; `honest_exports_accepted` is the other side of the scale: the share of honest networks that still load.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from manyhands.core import ManyhandsError
from manyhands.storage import load
from manyhands.storage.disk import digest_of

from .outcome import Outcome

Json = Any
SENTINEL = 1234.5
"""What memory beside a weight is filled with, to find it in an answer."""
WIDTH = 4


def forge(
    folder: Path,
    nodes: Sequence[Json],
    *,
    weights: Mapping[str, Tensor] | None = None,
    graphs: Sequence[Json] = (),
    output: Json = None,
    signature: Json = None,
) -> Path:
    """Write a version folder with this program and the right digests.

    Values are numbered: the input `x` (float32, rows of 4) is 0, the weights follow, then the nodes.

    Args:
        folder: The model's folder; the version is 1.
        nodes: The nodes of the first graph.
        weights: Tensors of the program, `w` of four ones where none are given.
        graphs: Further graphs, for regions.
        output: What the program returns; the last node where nothing is given.
        signature: The signature, if not x → y of rows of 4 numbers.

    Returns:
        The version's folder.
    """
    held = dict(weights) if weights is not None else {"w": torch.ones(WIDTH)}
    inputs = [{"input": 0}, *({"weight": name} for name in held)]
    last = {"ref": len(inputs) + len(nodes) - 1}
    graph = {"inputs": inputs, "nodes": list(nodes), "outputs": [last if output is None else output]}
    spec = {"dtype": "float32", "shape": [None, WIDTH]}
    described = signature or {"inputs": {"x": spec}, "outputs": {"y": spec}}
    version = folder / "1"
    version.mkdir(parents=True)
    save_file(held, version / "weights.safetensors")
    program = {"format": 1, "torch": str(torch.__version__), "graphs": [graph, *graphs]}
    (version / "program.json").write_text(json.dumps(program))
    (version / "signature.json").write_text(json.dumps({"format": 1, "signature": described, "extra": {}}))
    names = ("weights.safetensors", "program.json", "signature.json")
    files = {name: digest_of(version / name).to_dict() for name in names}
    (version / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return version


def call(op: str, *args: Json, **kwargs: Json) -> Json:
    """Return a node that calls an operator."""
    return {
        "op": op,
        "args": list(args),
        **({"kwargs": kwargs} if kwargs else {}),
    }


def ref(number: int) -> Json:
    """Return a reference to a value."""
    return {"ref": number}


X, W, FIRST = ref(0), ref(1), 2
LONG, FLOAT = {"dtype": "int64"}, {"dtype": "float32"}


def _read(view: Json) -> list[Json]:
    """Nodes that add what lies beyond a weight to the input."""
    return [
        view,
        call("aten.arange.start", 4, 8, dtype=LONG),
        call("aten.index_select.default", ref(FIRST), 0, ref(FIRST + 1)),
        call("aten.add.Tensor", X, ref(FIRST + 2)),
    ]


def _pooled_backward(op: str, dims: int, *more: Json) -> Callable[[Path], Path]:
    """A gradient of pooling with indices far outside."""
    shape = [1, 1, *[2] * dims]

    def build(folder: Path) -> Path:
        nodes = [
            call("aten.full.default", shape, 1.0, dtype=FLOAT),
            call("aten.full.default", shape, 2**40, dtype=LONG),
            call(op, ref(FIRST), ref(FIRST), *more, ref(FIRST + 1)),
            call("aten.add.Tensor", X, 1),
        ]
        return forge(folder, nodes)

    return build


def _plain(*nodes: Json, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: forge(folder, list(nodes), **options)


def _many(count: int) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        sizes = [call("aten.sym_size.int", X, 1)]
        sizes += [call("operator.mul", ref(FIRST + i), ref(FIRST + i)) for i in range(count)]
        return forge(folder, [*sizes, call("aten.add.Tensor", X, 1)])

    return build


def _nested(depth: int) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        inner = [
            {"inputs": 1, "nodes": [{"op": "region.call", "graph": i + 2, "args": [ref(0)]}], "outputs": [ref(1)]}
            for i in range(depth)
        ]
        last = {"inputs": 1, "nodes": [], "outputs": [ref(0)]}
        return forge(folder, [{"op": "region.call", "graph": 1, "args": [X]}], graphs=[*inner, last])

    return build


_REGION_WRITES = {"inputs": 1, "nodes": [call("aten.add_.Tensor", ref(0), 1)], "outputs": [ref(1)]}
_STATS = {"w": torch.ones(WIDTH), "mean": torch.zeros(WIDTH), "var": torch.ones(WIDTH)}

FORGERIES: dict[str, Callable[[Path], Path]] = {
    "read_by_reshape_alias": _plain(*_read(call("aten._reshape_alias.default", W, [64], [1]))),
    "write_by_reshape_alias": _plain(
        call("aten._reshape_alias.default", W, [2**30], [1]),
        call("aten.full.default", [1], 2**29, dtype=LONG),
        call("aten.index_fill_.int_Scalar", ref(FIRST), 0, ref(FIRST + 1), 1.0),
        call("aten.add.Tensor", X, 1),
    ),
    "read_by_as_strided": _plain(*_read(call("aten.as_strided.default", W, [64], [1]))),
    "read_by_as_strided_offset": _plain(*_read(call("aten.as_strided.default", W, [8], [1], 2**40))),
    "read_by_as_strided_negative": _plain(*_read(call("aten.as_strided.default", W, [8], [1], -64))),
    "read_by_set": _plain(*_read(call("aten.set_.source_Tensor_storage_offset", W, W, 0, [64], [1]))),
    "read_by_resize": _plain(*_read(call("aten.resize_.default", W, [64]))),
    "read_unwritten": _plain(call("aten.empty.memory_format", [2, WIDTH]), call("aten.add.Tensor", X, ref(FIRST))),
    "read_by_index": _plain(
        call("aten.full.default", [2], 2**40, dtype=LONG), call("aten.index.Tensor", W, [ref(FIRST)])
    ),
    "read_by_unsafe_index": _plain(
        call("aten.full.default", [2], 2**40, dtype=LONG), call("aten._unsafe_index.Tensor", W, [ref(FIRST)])
    ),
    "max_pool2d_backward": _pooled_backward(
        "aten.max_pool2d_with_indices_backward.default", 2, [1, 1], [1, 1], [0, 0], [1, 1], False
    ),
    "max_pool3d_backward": _pooled_backward(
        "aten.max_pool3d_with_indices_backward.default", 3, [1] * 3, [1] * 3, [0] * 3, [1] * 3, False
    ),
    "adaptive_max_pool2d_backward": _pooled_backward("aten.adaptive_max_pool2d_backward.default", 2),
    "adaptive_max_pool3d_backward": _pooled_backward("aten.adaptive_max_pool3d_backward.default", 3),
    "sparse_to_dense": _plain(
        call("aten.full.default", [1, 1], 2**40, dtype=LONG),
        call("aten.sparse_coo_tensor.size", [4], layout={"layout": "sparse_coo"}),
        call("aten.sparse_coo_tensor.indices_size", ref(FIRST), W, [4]),
        call("aten.to_dense.default", ref(FIRST + 2)),
    ),
    "dtype_as_number": _plain(call("aten.arange.default", 4, dtype=-1), call("aten.add.Tensor", X, ref(FIRST))),
    "layout_as_number": _plain(call("aten.zeros.default", [4], layout=99), call("aten.add.Tensor", X, ref(FIRST))),
    "file_operator": _plain(call("aten.from_file.default", "/etc/passwd", False, 10)),
    "output_overload": _plain(call("aten.add.out", X, X, out=W), call("aten.add.Tensor", X, 1)),
    "private_kernel": _plain(call("aten._fused_adam_.default", [W], [W], [W], [W], [], [])),
    "changes_a_weight": _plain(call("aten.add_.Tensor", W, 1), call("aten.add.Tensor", X, W)),
    "changes_a_view_of_a_weight": _plain(
        call("aten.view.default", W, [2, 2]),
        call("aten.select.int", ref(FIRST), 0, 0),
        call("aten.fill_.Scalar", ref(FIRST + 1), 9.0),
        call("aten.add.Tensor", X, W),
    ),
    "changes_a_weight_through_dropout": _plain(
        call("aten.dropout.default", W, 0.5, False),
        call("aten.mul_.Tensor", ref(FIRST), 2),
        call("aten.add.Tensor", X, W),
    ),
    "changes_a_weight_in_a_region": _plain(
        {"op": "region.call", "graph": 1, "args": [W]}, call("aten.add.Tensor", X, W), graphs=[_REGION_WRITES]
    ),
    "changes_what_a_region_returned": _plain(
        {"op": "region.call", "graph": 1, "args": [W]},
        call("aten.add_.Tensor", ref(FIRST), 1),
        call("aten.add.Tensor", X, W),
        graphs=[{"inputs": 1, "nodes": [], "outputs": ref(0)}],
    ),
    "changes_an_input": _plain(call("aten.add_.Tensor", X, 1)),
    "changes_running_statistics": _plain(
        call("aten.batch_norm.default", X, None, None, ref(2), ref(3), True, 0.9, 1e-5, False), weights=_STATS
    ),
    "numbers_without_limit": _many(40),
    "nested_without_limit": _nested(30),
    "argument_twice": _plain(call("aten.add.Tensor", X, 1, other=2)),
    "text_as_size": _plain(call("aten.zeros.default", ["4"]), call("aten.add.Tensor", X, ref(FIRST))),
    "huge_number": _plain(call("aten.add.Tensor", X, 2**70)),
    "unknown_graph": _plain({"op": "region.call", "graph": 7, "args": [X]}),
    "forward_reference": _plain(call("aten.add.Tensor", ref(9), 1)),
}
"""Archives that the loader must refuse, or that must fail without harm when they are called."""


def wrong_shape(folder: Path) -> Path:
    """A model that declares nine columns and gives four."""
    spec, wide = {"dtype": "float32", "shape": [None, WIDTH]}, {"dtype": "float32", "shape": [None, 9]}
    return forge(folder, [call("aten.add.Tensor", X, 1)], signature={"inputs": {"x": spec}, "outputs": {"y": wide}})


def wrong_dtype(folder: Path) -> Path:
    """A model that declares floats and gives whole numbers."""
    return forge(folder, [call("aten.to.dtype", X, LONG)])


def allocates(folder: Path) -> Path:
    """A model that asks for as many floats as the first number of the input says."""
    nodes = [
        call("aten.max.default", X),
        call("aten.to.dtype", ref(FIRST), LONG),
        call("aten.item.default", ref(FIRST + 1)),
        call("aten.ones.default", [ref(FIRST + 2)]),
        call("aten.sum.default", ref(FIRST + 3)),
        call("aten.add.Tensor", X, ref(FIRST + 4)),
    ]
    return forge(folder, nodes)


def empties(folder: Path) -> Path:
    """A model that answers with as many empty lists as the first number of the input says: few bytes, a long text."""
    nodes = [
        call("aten.max.default", X),
        call("aten.to.dtype", ref(FIRST), LONG),
        call("aten.item.default", ref(FIRST + 1)),
        call("aten.sym_size.int", X, 0),
        call("aten.zeros.default", [ref(FIRST + 3), ref(FIRST + 2), 0], dtype=FLOAT),
    ]
    spec, free = {"dtype": "float32", "shape": [None, WIDTH]}, {"dtype": "float32", "shape": [None, None, 0]}
    return forge(folder, nodes, signature={"inputs": {"x": spec}, "outputs": {"y": free}})


def computes_long(folder: Path) -> Path:
    """A model that multiplies square matrices as wide as the first number of the input says, 200 times."""
    nodes = [
        call("aten.max.default", X),
        call("aten.to.dtype", ref(FIRST), LONG),
        call("aten.item.default", ref(FIRST + 1)),
        call("aten.zeros.default", [ref(FIRST + 2), ref(FIRST + 2)]),
    ]
    nodes += [call("aten.mm.default", ref(FIRST + 3 + i), ref(FIRST + 3 + i)) for i in range(200)]
    last = FIRST + len(nodes) - 1
    nodes += [call("aten.sum.default", ref(last)), call("aten.add.Tensor", X, ref(last + 1))]
    return forge(folder, nodes)


def raises(folder: Path) -> Path:
    """A model that fails on positive numbers: sizes that do not fit."""
    nodes = [
        call("aten.max.default", X),
        call("aten.to.dtype", ref(FIRST), LONG),
        call("aten.item.default", ref(FIRST + 1)),
        call("aten.narrow.default", W, 0, 0, ref(FIRST + 2)),
        call("aten.sum.default", ref(FIRST + 3)),
        call("aten.add.Tensor", X, ref(FIRST + 4)),
    ]
    return forge(folder, nodes)


def attempt(name: str, build: Callable[[Path], Path] | None = None) -> Outcome:
    """Load and call a forged model in a forked child, with memory beside the weights that it could find.

    The attack succeeded if the child ended by a signal, if an answer holds what lies beside a weight, or if a second
    call answers otherwise than the first.
    """
    with tempfile.TemporaryDirectory() as root:
        version = (build or FORGERIES[name])(Path(root) / "model")
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _suffer(version, writing)
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as file:
            told = json.loads(file.read() or b"{}")
    if os.WIFSIGNALED(status):
        return Outcome(name, True, detail={"ended by": signal.Signals(os.WTERMSIG(status)).name})
    return Outcome(
        name, bool(told.get("reached")), str(told.get("reason", "")), {"answer": str(told.get("answer", ""))}
    )


def attempt_all() -> list[Outcome]:
    """Run every forged archive against the loader."""
    return [attempt(name) for name in FORGERIES]


def _suffer(version: Path, writing: int) -> None:
    """Be the victim: load the model, call it twice, report; never returns."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(60)
    told: dict[str, Json] = {}
    try:
        model = load(version)
        neighbours = [torch.full((WIDTH,), SENTINEL) for _ in range(1000)]
        x = torch.zeros(2, WIDTH)
        first, second = model(x).clone(), model(x).clone()
        reached = bool((first > SENTINEL / 2).any()) or not torch.equal(first, second) or bool(x.any())
        told = {"reached": reached, "answer": str(first.flatten()[:4].tolist()), "kept": len(neighbours)}
    except ManyhandsError as error:
        told = {"reached": False, "reason": str(error)[:300]}
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        told = {"reached": False, "reason": f"{type(error).__name__}: {str(error)[:300]}"}
    os.write(writing, json.dumps(told).encode())
    os._exit(0)


def honest_exports_accepted(say: Callable[[str], None] = lambda text: None) -> float:
    """Return the share of the whole zoo of honest networks that exports, loads and answers as the model does."""
    from .zoo import accepted, zoo

    return accepted(zoo(), say)
