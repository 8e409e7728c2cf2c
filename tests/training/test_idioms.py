"""Idioms of public repositories: the result of a plain loop, or a refusal before training."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

import manyhands as mh
from manyhands.core import DataError, StrategyError, TaskError
from manyhands.graph import Call
from manyhands.strategies import is_by_element, is_by_tensor, odd_slots
from manyhands.strategies.by_block import why_not_by_block
from manyhands.strategies.first_call import Calling
from manyhands.strategies.placement import Placement
from manyhands.training.cause import ForwardChanges

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))


def classify(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def task(model: Any, **changes: Any) -> mh.Task:
    made = mh.Task(model=model, loss=classify, optimizer=sgd, data=(X, Y), batch_size=6, shuffle=False)
    return made.replace(**changes)


def fit(made: mh.Task, folder: Path, spec: Any = None) -> mh.Run:
    on = "cpu" if spec is None else "cpu*2"
    return mh.fit(
        made,
        spec or mh.Single(),
        on=on,
        folder=folder,
        options=[mh.options.Display(progress=False), mh.options.Recovery(timeout=60)],
    )


def plain_losses(made: mh.Task) -> list[float]:
    torch.manual_seed(0)
    model = made.model()
    model.load_state_dict(first_weights(made))
    optimizer: Any = made.optimizer(model)
    losses = []
    for first in (0, 6):
        optimizer.zero_grad()
        assert made.loss is not None
        loss: Any = made.loss(model, (X[first : first + 6], Y[first : first + 6]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def first_weights(made: mh.Task) -> dict[str, Tensor]:
    from manyhands.core import mix, seed_all

    seed_all(mix(made.seed, 0))
    return made.model().state_dict()


class Averaging:
    """A loss with a history in an attribute, which weighs its terms by the last values."""

    def __init__(self) -> None:
        self.history: list[float] = []

    def __call__(self, net: Any, batch: Any) -> Tensor:
        loss = classify(net, batch)
        weight = loss.item() / self.history[-1] if self.history else 1.0
        self.history.append(loss.item())
        return weight * loss


def test_trials_leave_no_history_in_a_loss_object(tmp_path: Path) -> None:
    loss = Averaging()
    expected = plain_losses(task(lambda: nn.Linear(6, 3), loss=Averaging()))
    assert fit(task(lambda: nn.Linear(6, 3), loss=loss), tmp_path).losses == pytest.approx(expected, rel=1e-5)
    assert len(loss.history) == 2


class Merging(nn.Linear):
    """A frozen layer with an adapter, which evaluation merges into the weight."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.down, self.up = nn.Parameter(torch.ones(2, 6) / 6), nn.Parameter(torch.ones(3, 2) / 6)
        self.requires_grad_(False)
        self.down.requires_grad_(True)
        self.up.requires_grad_(True)
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged is mode:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).data
            self.merged = not mode
        return self

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (0 if self.merged else input @ self.down.T @ self.up.T)


def test_adapters_that_evaluation_merges_are_trained(tmp_path: Path) -> None:
    made = task(Merging, valid=(X, Y))
    expected = plain_losses(made)
    assert fit(made, tmp_path).losses == pytest.approx(expected, rel=1e-5)


def marked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[2].weight._no_weight_decay = True  # type: ignore[union-attr]
    return model


def by_mark(net: nn.Module) -> torch.optim.Optimizer:
    kept = [p for p in net.parameters() if getattr(p, "_no_weight_decay", False)]
    assert len(kept) == 1
    rest = [p for p in net.parameters() if not hasattr(p, "_no_weight_decay")]
    return torch.optim.SGD([{"params": kept, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}], lr=0.1)


@pytest.mark.parametrize("spec", [mh.Sharded(2), mh.TensorParallel(2), mh.Placed(devices=2)], ids=str)
def test_optimizer_function_finds_attributes_of_parameters(spec: Any, tmp_path: Path) -> None:
    made = task(marked, optimizer=by_mark)
    assert fit(made, tmp_path, spec).losses == pytest.approx(plain_losses(made), rel=1e-5)


def sampled_loss(net: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_(True)
    net(x).sum().backward()
    assert x.grad is not None
    net.zero_grad()
    return classify(net, (batch[0] - 0.1 * x.grad, batch[1]))


def test_pipeline_rejects_a_loss_that_calls_backward(tmp_path: Path) -> None:
    made = task(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), loss=sampled_loss)
    with pytest.raises(StrategyError, match=r"net\(x\).sum\(\).backward\(\)"):
        fit(made, tmp_path, mh.Pipeline(2, microbatches=2))


class StepFromProgress(torch.optim.Optimizer):
    """Estimates one step size from the progress of all parameters, as Prodigy does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        made = total = 0.0
        for p in group["params"]:
            start = self.state[p].setdefault("start", p.detach().clone())
            made += float((p.grad * (start - p)).sum())
            total += float(p.grad.abs().sum())
        group["d"] = max(group["d"], made / total)
        for p in group["params"]:
            p.sub_(p.grad.sign(), alpha=group["d"])


class ListOfMatrices(torch.optim.Optimizer):
    """Keeps a list of matrices per parameter, as SOAP does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            sums = self.state[p].setdefault("sums", [torch.zeros(n, n, dtype=p.dtype) for n in p.shape])
            g = p.grad.reshape(len(p), -1)
            sums[0] += g @ g.T
            p.sub_(p.grad / (1 + sums[0].diagonal()).sqrt().view(-1, *[1] * (p.dim() - 1)), alpha=0.1)


def test_global_step_size_is_not_taken_for_an_update_by_tensor() -> None:
    optimizer = StepFromProgress(nn.Linear(2, 2).parameters())
    assert not is_by_element(optimizer)
    assert not is_by_tensor(optimizer)


def test_lists_of_tensors_in_optimizer_state_are_saved_and_resumed(tmp_path: Path) -> None:
    made = task(lambda: nn.Linear(6, 3), optimizer=lambda net: ListOfMatrices(net.parameters()))
    whole = mh.fit(
        made, "single", on="cpu", epochs=2, folder=tmp_path / "a", options=mh.options.Display(progress=False)
    )
    mh.fit(
        made,
        "single",
        on="cpu",
        epochs=1,
        folder=tmp_path / "b",
        name="run",
        options=mh.options.Display(progress=False),
    )
    resumed = mh.fit(
        made,
        "single",
        on="cpu",
        epochs=2,
        folder=tmp_path / "b",
        name="run",
        resume=True,
        options=mh.options.Display(progress=False),
    )
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)


def test_parameter_servers_reject_lists_in_optimizer_state(tmp_path: Path) -> None:
    assert odd_slots(ListOfMatrices(nn.Linear(2, 2).parameters())) == ["sums"]
    made = task(lambda: nn.Linear(6, 3), optimizer=lambda net: ListOfMatrices(net.parameters()))
    with pytest.raises(TaskError, match="'sums' is neither a tensor nor a number"):
        fit(made, tmp_path, mh.ParameterServer(servers=1, workers=1))


def in_a_row(samples: list[tuple[Tensor, list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Collate the labels of all samples in a row, as losses for sequences take them."""
    labels = torch.tensor([label for _, each in samples for label in each])
    return torch.stack([x for x, _ in samples]), labels, torch.tensor([len(each) for _, each in samples])


def test_labels_of_all_samples_in_a_row_are_collated_by_each_rank(tmp_path: Path) -> None:
    samples = [(X[i], [int(Y[i])] * (1 + i % 3)) for i in range(12)]

    def loss(net: Any, batch: Any) -> Tensor:
        inputs, labels, lengths = batch
        assert len(labels) == lengths.sum()
        each = F.cross_entropy(net(inputs).repeat_interleave(lengths, 0), labels, reduction="none")
        return torch.stack([part.mean() for part in each.split(lengths.tolist())]).mean()

    made = task(lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1)), loss=loss, data=samples, collate=in_a_row)
    assert mh.check(made, mh.Single(), on="cpu")
    assert mh.check(made, mh.Mirrored(2), on="cpu*2")
    calm = made.replace(model=lambda: nn.Linear(6, 3))
    assert fit(calm, tmp_path, mh.Mirrored(2)).losses == pytest.approx(fit(calm, tmp_path).losses, rel=1e-5)
    with pytest.raises(DataError, match="along dim 0 of every tensor"):
        fit(calm, tmp_path, mh.Mirrored(2, accumulate=2))


def popping(net: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch.pop("y")
    return F.cross_entropy(net(**batch), labels)


class Layers(nn.Module):
    """Two layers that are called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_loss_may_take_things_out_of_the_batch(tmp_path: Path) -> None:
    made = task(Layers, loss=popping, data={"x": X, "y": Y})
    expected = fit(made, tmp_path).losses
    assert fit(made, tmp_path, mh.Pipeline(2, microbatches=2)).losses == pytest.approx(expected, rel=1e-5)


class Sharing(nn.Module):
    """Passes a dict from layer to layer, in which the first one leaves what the others use."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
            if "first" not in shared:
                shared["first"] = torch.tanh(self.linear(x))
            return x + self.linear(shared["first"])

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, shared = self.embed(x), dict[str, Tensor]()
        for layer in self.layers:
            x = layer(x, shared)
        return self.head(x + shared["first"])


def test_parameters_of_layers_that_write_into_a_dict_are_whole_in_a_step() -> None:
    def probe(net: nn.Module, fake: Any) -> Any:
        return classify(net, fake((X, Y)))

    why = why_not_by_block(Sharing(), probe, torch.device("cpu"))
    assert why == "layers.0 changes a list or dict that it is called with"


class Codes(nn.Module):
    """Looks position codes up by the number of rows, which must be a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = dict.fromkeys(range(1, 20), 1.0)[x.shape[0]]
        return self.second(torch.tanh(self.first(x)) * scale)


def test_partitioned_network_that_needs_numbers_as_sizes_is_traced_for_each() -> None:
    calls = [Call.of([X[:rows]], {}) for rows in (6, 5, 4, 3)]
    calling = Calling(calls[0], False, (0,))
    spec, device = mh.Placed(devices=2), torch.device("cpu")
    placement = Placement(Codes(), spec, 2, device, contextlib.nullcontext, calling)
    placement.settle(lambda works: [0] * len(works.units))
    found = [placement.partition(call, training=True) for call in calls]
    assert len({id(partition) for partition in found}) == len(calls)


def test_sparse_buffers_are_refused_on_several_devices(tmp_path: Path) -> None:
    def model() -> nn.Module:
        net = nn.Linear(6, 3)
        net.register_buffer("adjacency", torch.eye(6).to_sparse(), persistent=False)
        return net

    with pytest.raises(TaskError, match=r"adjacency, a tensor of layout torch.sparse_coo.*indices and its values"):
        fit(task(model), tmp_path, mh.Mirrored(2))


def test_differentiation_in_a_loss_is_not_taken_for_a_change_of_parameters() -> None:
    watch = ForwardChanges()
    net = nn.Linear(6, 3)

    def loss(net: Any, batch: Any) -> Tensor:
        def inner(values: dict[str, Tensor]) -> Tensor:
            return functional_call(net, values, (batch[0],)).mul_(2).square().mean()

        return sum(g.square().sum() for g in grad(inner)(dict(net.named_parameters())).values())  # type: ignore[return-value]

    watched = watch.watched(task(lambda: net, loss=loss)).loss
    assert watched is not None
    watched(net, (X, Y)).backward()
    assert watch.changed == []
