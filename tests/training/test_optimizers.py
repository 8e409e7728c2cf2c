"""Every optimizer trains the same on one device, on replicas and on parameter servers, or is refused beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import manyhands as mh
from manyhands.core import EVENTS, CheckpointError, TaskError, UsageError, mix, read_events, seed_all
from manyhands.data import Cursor, Feed, as_source
from manyhands.distributed import NullWorld, World
from manyhands.parameter_server.layout import cut
from manyhands.parameter_server.shard import ServerShard
from manyhands.parameter_server.update import needs_whole
from manyhands.storage import CheckpointStore
from manyhands.training import CHECKPOINTS, Job, train

X = torch.randn(21, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (21,), generator=torch.Generator().manual_seed(1))
EPOCHS = 2
NAMES = sorted(
    name
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
)
"""All that this version of torch has."""
REFUSED = {"LBFGS"}
MATRICES_ONLY = {"Muon"}


class Net(nn.Module):
    """A classifier with a layer that the usual recipes leave to another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.norm(self.first(x))))
        return out


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(optimizer: Callable[[Any], Any], **changes: Any) -> mh.Task:
    return mh.Task(model=Net, loss=classify, optimizer=optimizer, data=(X, Y), batch_size=8, **changes)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


def torchs_own(name: str) -> Callable[[Any], Any]:
    """An optimizer of torch; one for matrices has another beside it, as its documentation advises."""
    kind = getattr(optim, name)

    def make(model: nn.Module) -> Any:
        if name in MATRICES_ONLY:
            return [kind(matrices(model), lr=0.02), optim.AdamW(others(model), lr=0.01)]
        return kind(model.parameters(), lr=0.01)

    return make


class Noisy(Optimizer):
    """Langevin dynamics: a gradient step with noise."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-group["lr"])


class OwnNoise(Optimizer):
    """The same with a generator, an average and a count that it keeps in attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.generator, self.averages, self.count = torch.Generator().manual_seed(7), {}, [0]  # type: ignore[var-annotated]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
                    average = self.averages[id(p)] = self.averages.get(id(p), 0.0) * 0.9 + p.grad
                    p.add_(average + 0.1 * noise, alpha=-group["lr"] / self.count[0])


class Both(Optimizer):
    """Two optimizers in one object that lists all parameters in its groups and has no state itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})
        self.inner = [optim.SGD(matrices(model), lr=0.05, momentum=0.9), optim.AdamW(others(model), lr=0.01)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner:
            one.step()


class Hiding(Optimizer):
    """Two optimizers in one object that lists only the matrices in its groups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(matrices(model), {"lr": 0.05})
        self.rest = optim.AdamW(others(model), lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        self.rest.step()


class Lookahead(Optimizer):
    """Steps of another optimizer, and every second time halfway back to where the weights were."""

    def __init__(self, base: Optimizer) -> None:
        self.defaults, self.base, self.param_groups = {}, base, base.param_groups
        super().__setstate__({"state": {}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state.setdefault(p, {"slow": p.clone(), "count": 0})
                slots["count"] += 1
                if slots["count"] % 2 == 0:
                    p.copy_(slots["slow"].lerp_(p, 0.5))


class Sharpness(Optimizer):
    """SAM, which computes the loss twice in a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 0.1})
        self.base = optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"


def stepping(model: nn.Module) -> Optimizer:
    """An optimizer whose step steps its scheduler, in a hook."""
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def recipe(model: nn.Module) -> dict[str, Optimizer]:
    """Three optimizers by name, for one loss."""
    weights = matrices(model)
    return {
        "heads": optim.SGD(weights[1:], lr=0.05, momentum=0.9),
        "body": optim.RMSprop(weights[:1], lr=0.01),
        "rest": optim.Adam(others(model), lr=0.01),
    }


CASES: dict[str, Callable[[Any], Any]] = {
    **{name: torchs_own(name) for name in NAMES if name not in REFUSED},
    "recipe": recipe,
    "noisy": lambda model: Noisy(model.parameters()),
    "own noise": lambda model: OwnNoise(model.parameters()),
    "both": lambda model: Both(model),
    "lookahead": lambda model: Lookahead(optim.AdamW(model.parameters(), lr=0.02)),
    "stepping": stepping,
    "some": lambda model: optim.AdamW([*model.first.parameters(), *model.norm.parameters()], lr=0.02),
}


def by_hand(made: mh.Task) -> dict[str, Tensor]:
    """The weights after the same steps in a plain loop."""
    assert made.loss is not None
    seed_all(mix(made.seed, 0))
    model = made.model().double()
    optimizers = made.optimizer(model)
    optimizers = list(optimizers.values()) if isinstance(optimizers, dict) else optimizers
    feed = Feed(as_source(made.data), batch_size=made.batch_size or 1, seed=made.seed, dtype=torch.float64)
    for epoch in range(EPOCHS):
        for batch in feed.epoch(Cursor(epoch, 0)):
            model.zero_grad()
            made.loss(model, batch.data).backward()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
    return model.state_dict()


def trained(
    world: World, names: list[str], folder: Path, spec: mh.StrategySpec | None = None, **settings: Any
) -> dict[str, Any]:
    """The weights of several tasks, trained one after another in one set of ranks."""
    found = {}
    spec = spec or mh.Mirrored(world.size, precision="fp64")
    for name in names:
        train(world, Job(task=task(CASES[name]), spec=spec, folder=folder / name, epochs=EPOCHS, **settings))
        world.barrier()
        found[name] = CheckpointStore(folder / name / CHECKPOINTS).load().model
    return found


TRAINED = [name for name in CASES if name != "SparseAdam"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(NullWorld(), TRAINED, tmp_path_factory.mktemp("alone"))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "noisy"])
def test_one_device_equals_a_plain_loop(name: str, alone: dict[str, Any]) -> None:
    assert_same(alone[name], by_hand(task(CASES[name])), name)


def test_replicas_equal_one_device(alone: dict[str, Any], run_ranks: Any, tmp_path: Path) -> None:
    found = run_ranks(partial(trained, names=TRAINED, folder=tmp_path), 2)[0]
    for name in TRAINED:
        assert_same(found[name], alone[name], name)


@pytest.mark.parametrize("name", ["recipe", "both", "lookahead", "some", "noisy", "Muon"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, alone: dict[str, Any], tmp_path: Path) -> None:
    if name not in CASES:
        return
    trained(NullWorld(), [name], tmp_path, steps=2)
    assert_same(trained(NullWorld(), [name], tmp_path, resume=True)[name], alone[name], name)


SPLITS = [
    mh.Sharded(2, precision="fp64"),
    mh.Sharded(2, sharding="optimizer", precision="fp64"),
    mh.TensorParallel(2, precision="fp64"),
    mh.Pipeline(2, precision="fp64"),
]


def in_parts(world: World, folder: Path) -> list[dict[str, Any]]:
    names = ["recipe", "some"]
    return [trained(world, names, folder / str(number), spec) for number, spec in enumerate(SPLITS)]


def test_model_parallel_supports_several_optimizers_and_unoptimized_parameters(
    alone: dict[str, Any], run_ranks: Any, tmp_path: Path
) -> None:
    for spec, found in zip(SPLITS, run_ranks(partial(in_parts, folder=tmp_path), 2)[0], strict=True):
        for name, weights in found.items():
            assert_same(weights, alone[name], f"{name} under {spec}")


def test_resume_rejects_unsaved_scheduler_in_an_optimizer_hook(tmp_path: Path) -> None:
    trained(NullWorld(), ["stepping"], tmp_path, steps=2)
    with pytest.raises(CheckpointError, match=r"whose state is not in the checkpoint. Pass Task\(schedule="):
        trained(NullWorld(), ["stepping"], tmp_path, resume=True)


@pytest.mark.parametrize("name", ["recipe", "both"])
def test_schedule_scales_learning_rate_of_every_optimizer(name: str, tmp_path: Path) -> None:
    def slower(step: int, total: int) -> float:
        return 0.5

    made = task(CASES[name], schedule=slower)
    run = mh.fit(
        made,
        mh.Single(precision="fp64"),
        on="cpu",
        epochs=EPOCHS,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )

    def halved(model: nn.Module) -> Any:
        optimizers = CASES[name](model)
        for one in optimizers.values() if isinstance(optimizers, dict) else optimizers.inner:
            for group in one.param_groups:
                group["lr"] *= 0.5
        return optimizers

    assert_same(run.model().state_dict(), by_hand(task(halved)), name)


def test_parameters_in_no_optimizer_are_logged_and_unchanged(tmp_path: Path) -> None:
    run = mh.fit(
        task(CASES["some"]),
        mh.Single(precision="fp64"),
        on="cpu",
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    said = [entry["text"] for entry in read_events(run.path / EVENTS) if entry["kind"] == "notice"]
    assert "2 parameters are in no optimizer and stay as they are: out.weight, out.bias" in said
    seed_all(mix(0, 0))
    torch.testing.assert_close(run.model().state_dict()["out.weight"], Net().out.weight.detach().double())


def scheduled(model: nn.Module) -> Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def with_scheduler(model: nn.Module) -> Any:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return optimizer, optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def twice(model: nn.Module) -> list[Optimizer]:
    return [optim.SGD(model.parameters(), lr=0.1), optim.Adam([model.out.bias], lr=0.1)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (scheduled, r"creates a .*which would never be stepped. Remove the scheduler and pass Task\(schedule="),
        (with_scheduler, "creates a CosineAnnealingLR"),
        (twice, "out.bias in two of them"),
        (lambda model: [optim.SGD(model.parameters(), lr=0.1), 3], "an object of type int among them"),
        (lambda model: [], "an empty list"),
        (
            lambda model: Hiding(model),
            r"Hiding, whose inner optimizers \(AdamW\) have 4 parameters that are in none of its groups.*as a "
            r"list, \[AdamW\]",
        ),
        (lambda model: Sharpness(model.parameters()), "Sharpness, which computes the loss several times in a step"),
        (lambda model: optim.LBFGS(model.parameters()), "LBFGS, which computes the loss several times"),
    ],
)
def test_unsupported_optimizers_are_rejected_with_a_remedy(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        mh.fit(task(make), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids).mean(1)
        return found


def test_sparse_gradients_train_on_one_device_and_are_rejected_on_replicas(tmp_path: Path) -> None:
    ids = torch.randint(0, 9, (21, 4), generator=torch.Generator().manual_seed(2))
    made = task(torchs_own("SparseAdam")).replace(model=Words, data=(ids, Y))
    run = mh.fit(
        made,
        mh.Single(precision="fp64"),
        on="cpu",
        epochs=EPOCHS,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    assert_same(run.model().state_dict(), by_hand(made), "SparseAdam")
    for spec in (mh.Mirrored(2), mh.ParameterServer(workers=2, servers=1)):
        with pytest.raises(UsageError, match=r"table.* with sparse=True\. "):
            mh.fit(made, spec, on="cpu*2", folder=tmp_path, options=mh.options.Display(progress=False))


# -- parameter servers ------------------------------------------------------------------------------------------------


def on_servers(name: str, steps: int = 4) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Parameters after some updates: of two servers that share them out, and of the optimizer itself."""
    torch.manual_seed(0)
    plain, held = Net().double(), Net().double()
    held.load_state_dict(plain.state_dict())
    optimizer, moved = (task(CASES[name]).make_optimizer(model) for model in (plain, held))
    shares = cut(held, 2, whole=needs_whole(moved))
    shards = [ServerShard(number, share, held, moved) for number, share in enumerate(shares)]
    names = dict(held.named_parameters())
    for shard in shards:
        for slab, values in zip(shard.share, shard.values, strict=True):
            for piece in slab.pieces:
                values[piece.place] = names[piece.name].detach().flatten()[piece.start : piece.stop]
    for _ in range(steps):
        for name_, parameter in plain.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            for shard in shards:
                for piece, mine in shard.pieces.items():
                    if piece.name == name_:
                        mine.grad = parameter.grad.flatten()[piece.start : piece.stop].view(mine.shape)
        for one in (optimizer, *(shard.optimizer for shard in shards)):
            one.step()
    for name_, parameter in plain.named_parameters():
        found = torch.zeros_like(parameter).flatten()
        for shard in shards:
            for piece, mine in shard.pieces.items():
                if piece.name == name_:
                    found[piece.start : piece.stop] = mine.detach().flatten()
        yield name_, found.view(parameter.shape), parameter.detach()


@pytest.mark.parametrize("name", [*(name for name in TRAINED if name in NAMES), "recipe"])
def test_parameter_server_update_equals_the_optimizer(name: str) -> None:
    for key, found, expected in on_servers(name):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=f"{name}: {key}")


class Own(Optimizer):
    """Steps tensors of its own list instead of its groups'."""

    def __init__(self, params: Any) -> None:
        self.mine = list(params)
        super().__init__(self.mine, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: Both(model), r"Both, which steps SGD, AdamW inside it. Return them as a list, \[SGD, AdamW\]"),
        (CASES["lookahead"], "Lookahead, which steps AdamW inside it"),
        (stepping, r"SGD, whose step has hooks, .*[.] Pass Task\(schedule="),
        (CASES["noisy"], r"Noisy, which draws random numbers that would differ between servers[.] Use mh.Mirrored\(\)"),
        (
            lambda model: Own(model.parameters()),
            "Own, which does not update the tensors of its parameter groups",
        ),
    ],
)
def test_optimizers_that_cannot_be_split_over_servers_are_rejected(make: Any, words: str) -> None:
    made, before = make(Net()), torch.get_rng_state()
    with pytest.raises(TaskError, match=words):
        needs_whole(made)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameter_servers_with_several_optimizers_match_single_device(alone: dict[str, Any], tmp_path: Path) -> None:
    name = "Muon" if "Muon" in TRAINED else "recipe"
    spec = mh.ParameterServer(workers=2, servers=2, precision="fp64")
    run = mh.fit(
        task(CASES[name]), spec, on="cpu*2", epochs=EPOCHS, folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert_same(run.model().state_dict(), alone[name], name)
