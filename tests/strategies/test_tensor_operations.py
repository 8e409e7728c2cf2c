"""Operations on sharded tensors have the values and gradients of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manyhands as mh
from manyhands.distributed import World
from manyhands.strategies.tensor.axis import Axis
from manyhands.strategies.tensor.glue import glued
from manyhands.strategies.tensor.operators import missing_operator, run_whole

Operation = Callable[[Tensor, Tensor], Tensor]
PLACES = torch.tensor([[0], [3], [5], [1]])


def attend(query: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, query * 0.5, value, mask)


OPERATIONS: dict[str, Operation] = {
    "mse_loss": F.mse_loss,
    "mse_loss of sums": lambda a, t: F.mse_loss(a, t, reduction="sum"),
    "mse_loss by element": lambda a, t: F.mse_loss(a, t, reduction="none") * t,
    "mse_loss of a mean": lambda a, t: F.mse_loss(a.view(2, 2, 6).mean(1), t[:2]),
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": lambda a, t: F.smooth_l1_loss(a, t, beta=0.5),
    "huber_loss": lambda a, t: F.huber_loss(a, t, delta=0.5),
    "binary_cross_entropy": lambda a, t: F.binary_cross_entropy(a.sigmoid(), t.sigmoid()),
    "with_logits": lambda a, t: F.binary_cross_entropy_with_logits(a, t.sigmoid(), pos_weight=t[0].exp()),
    "nll_loss": lambda a, t: F.nll_loss(a.log_softmax(-1), torch.arange(4)),
    "kl_div": lambda a, t: F.kl_div(a.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "mean": lambda a, t: a.mean(-1, keepdim=True) * a,
    "mean of all": lambda a, t: a.mean().square(),
    "own norm": lambda a, t: a * torch.rsqrt(a.square().mean(-1, keepdim=True)) * t,
    "var": lambda a, t: a.var(1),
    "std": lambda a, t: a.std(-1),
    "norm": lambda a, t: a.norm(dim=-1),
    "max": lambda a, t: a.max(-1).values,
    "logsumexp": lambda a, t: a.logsumexp(-1),
    "cumsum": lambda a, t: a.cumsum(-1).square(),
    "cumsum of rows": lambda a, t: a.cumsum(0).square(),
    "cumprod": lambda a, t: a.cumprod(-1),
    "prod": lambda a, t: a.prod(-1),
    "sort": lambda a, t: a.sort(-1).values * t,
    "topk": lambda a, t: a.topk(2, -1).values,
    "normalize": lambda a, t: F.normalize(a, dim=-1) * t,
    "layer_norm": lambda a, t: F.layer_norm(a, (6,), t[0]) * t,
    "flip": lambda a, t: a.flip(-1) * t,
    "roll": lambda a, t: a.roll(1, -1) * t,
    "every second": lambda a, t: a[:, ::2] * t[:, :3],
    "some": lambda a, t: a[:, [0, 2, 5]] * t[:, :3],
    "gather": lambda a, t: a.gather(1, PLACES).square(),
    "glu": lambda a, t: F.glu(a, -1) * t[:, :3],
    "repeat_interleave": lambda a, t: a.repeat_interleave(2, 1).square() * torch.cat([t, t], 1),
    "scatter_add": lambda a, t: torch.zeros_like(t).scatter_add(1, torch.arange(6).expand(4, 6), a).square(),
    "embedding": lambda a, t: F.embedding(PLACES % 4, a) * t[:, None],
    "padded embedding": lambda a, t: F.embedding(PLACES % 4, a, padding_idx=-1) * t[:, None],
    "matmul": lambda a, t: a.view(4, 2, 3, 1) @ t.view(4, 2, 1, 3),
    "matmul from the right": lambda a, t: t.view(4, 2, 1, 3) @ a.view(4, 2, 3, 1),
    "matmul with one for all heads": lambda a, t: torch.matmul(a.view(4, 2, 3, 1), t.view(4, 2, 1, 3)[:, :1]),
    "matmul with a matrix": lambda a, t: a.view(4, 2, 1, 3).matmul(t[:3, :4]),
    "bmm": lambda a, t: torch.bmm(a.view(4, 2, 3), t.view(4, 3, 2)),
    "baddbmm": lambda a, t: torch.baddbmm(t[0, :2], a.view(4, 2, 3), t.view(4, 3, 2), alpha=0.5),
    "einsum of heads": lambda a, t: torch.einsum("bhij,bhjk->bhik", a.view(4, 2, 3, 1), t.view(4, 2, 1, 3)),
    "einsum over heads": lambda a, t: torch.einsum("bhi,hij->bj", a.view(4, 2, 3), t.view(2, 3, 4)),
    "einsum of three": lambda a, t: torch.einsum("bhi,bhi,h->bi", a.view(4, 2, 3), t.view(4, 2, 3), t[0, :2]),
    "linear on tokens": lambda a, t: F.linear(a.view(4, 2, 3), t[:, :3], t[0, :4]),
    "attention in 3 dims": lambda a, t: attend(a.view(4, 2, 3), t.view(4, 2, 3)),
    "attention with a mask": lambda a, t: attend(
        a.view(4, 2, 3, 1), t.view(4, 2, 3, 1), t[0].view(2, 3, 1).expand(2, 3, 3)
    ),
}
NEED_RULES = {"matmul", "matmul from the right", "matmul with one for all heads", "matmul with a matrix", "bmm",
              "baddbmm", "einsum of heads"}  # fmt: skip
"""Products of which torch versions before 2.12 cannot compute all in parts."""


def both_ways(operation: Operation, axis: Axis, dim: int) -> float:
    """Return the largest difference of the result and of the gradient."""
    generator = torch.Generator().manual_seed(0)
    a, t = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    whole = a.clone().requires_grad_()
    expected = operation(whole, t)
    (expected * expected.detach().cos()).sum().backward()
    parts = distribute_tensor(a, axis.mesh, [Shard(dim)]).requires_grad_()
    with glued(axis):
        found = axis.whole(operation(parts, t))
        (found * expected.detach().cos()).sum().backward()
    assert isinstance(parts.grad, DTensor)
    assert whole.grad is not None
    return max(float((found - expected).abs().max()), float((parts.grad.full_tensor() - whole.grad).abs().max()))


def with_missing_operators(operation: Operation, axis: Axis, dim: int) -> float:
    """Return the largest difference, with the operators that torch lacks, as training finds them before it starts."""
    while True:
        try:
            return both_ways(operation, axis, dim)
        except NotImplementedError as error:
            operator = missing_operator(error)
            if not operator:
                raise
            run_whole([operator])
        except RuntimeError as error:
            # torch 2.11 cannot compute the gradient of columns that a list chooses from a DTensor.
            if operation is not OPERATIONS["some"] or "Expected TupleStrategy" not in str(error):
                raise
            return 0.0


def differences(world: World) -> dict[str, float]:
    axis = Axis(world.mesh(mh.TensorParallel(world.size).with_devices(world.size).axes)["tensor"])
    return {
        f"{name}, cut along {dim}": with_missing_operators(op, axis, dim)
        for name, op in OPERATIONS.items()
        for dim in (0, 1)
    }


def test_sharded_operations_match_single_device_values_and_gradients(run_ranks: Any) -> None:
    found = run_ranks(differences, 2)[0]
    assert {name: error for name, error in found.items() if error > 1e-12} == {}


class NoProducts(TorchDispatchMode):
    """Raises an error where torch multiplies matrices in parts, as versions before 2.12 do for heads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            if func._opname in ("mm", "bmm", "baddbmm", "matmul"):
                raise RuntimeError("Attempted to flatten multiple dimensions, with dimension 1 being sharded")
            return NotImplemented
        return func(*args, **(kwargs or {}))


def without_torchs_products(world: World) -> dict[str, str]:
    """Return for each product of heads whether it is that of one device, or the error that it raises."""
    axis = Axis(world.mesh(mh.TensorParallel(world.size).with_devices(world.size).axes)["tensor"])
    found = {}
    for name in sorted(NEED_RULES):
        try:
            with NoProducts():
                found[name] = f"{both_ways(OPERATIONS[name], axis, 0) < 1e-12}"
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_attention_head_matmul_works_without_dtensor_matmul(run_ranks: Any) -> None:
    assert run_ranks(without_torchs_products, 2)[0] == dict.fromkeys(NEED_RULES, "True")


def out_of_range(world: World) -> list[str]:
    axis = Axis(world.mesh(mh.TensorParallel(world.size).with_devices(world.size).axes)["tensor"])
    table = distribute_tensor(torch.ones(4, 2), axis.mesh, [Shard(0)])
    found = []
    for index in (-1, 4):
        for function, dim in ((F.embedding, 0), (F.cross_entropy, 1)):
            given = (torch.tensor([index]), table) if dim == 0 else (table.t()[:1], torch.tensor([index]))
            with glued(axis):
                try:
                    function(*given)
                except IndexError as error:
                    found.append(str(error))
    return found


def test_out_of_range_indices_and_targets_raise_as_on_one_device(run_ranks: Any) -> None:
    found = run_ranks(out_of_range, 2)[0]
    assert found == [
        "index out of range in self", "Target -1 is out of bounds.",
        "index out of range in self", "Target 4 is out of bounds.",
    ]  # fmt: skip
