"""Deferred initialization: values are bit-equal to an immediate one, and the whole network never exists."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import default_dtype
from manyhands.strategies import CannotDefer, Deferred, defer
from manyhands.strategies.build_replica import allocate
from manyhands.strategies.replica import GradientHooks


class Custom(nn.Module):
    """All ways of initialising: in parts, by other tensors, by what small ones hold, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = nn.TransformerEncoderLayer(64, 4), nn.LSTM(64, 64)
        self.norm, self.words = nn.BatchNorm1d(5), nn.Embedding(500, 64, padding_idx=0)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        nn.init.orthogonal_(self.layer.linear1.weight)
        nn.init.trunc_normal_(self.words.weight, std=0.02)
        nn.init.trunc_normal_(self.layer.norm1.weight, std=0.5)
        with torch.no_grad():
            self.layer.linear2.weight[3] = 7.0
            self.layer.linear2.bias.copy_(torch.arange(64.0))
        self.register_buffer("mask", torch.tril(torch.ones(300, 300)).bool())
        self.register_buffer("chance", torch.randn(3))
        self.apply(self.again)

    def again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Brought(nn.Module):
    """Values from elsewhere, copied and taken as they are; another dtype; a tied weight."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.one, self.two, self.tied = nn.Linear(100, 400), nn.Linear(100, 400), nn.Linear(100, 400)
        with torch.no_grad():
            self.one.weight.copy_(values)
        self.two.weight = nn.Parameter(values.clone())
        self.tied.weight = self.one.weight
        self.wide = nn.Linear(100, 400).double()


def hugging(kind: str) -> nn.Module:
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    vit = transformers.ViTConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=300)
    return transformers.ViTModel(vit)  # type: ignore[no-any-return]


VALUES = torch.randn(400, 100)


def complex_filters() -> nn.Module:
    """A network whose parameter shows the memory of complex numbers as real ones."""
    model = nn.Module()
    model.filters = nn.Parameter(torch.view_as_real(torch.randn(30, 50, dtype=torch.cfloat)) / 2)
    model.phases = nn.Parameter(torch.view_as_real(torch.randn(30, 50, dtype=torch.cfloat)))
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "complex": complex_filters,
    "custom": Custom,
    "brought": lambda: Brought(VALUES),
    "gpt2": lambda: hugging("gpt2"),
    "vit": lambda: hugging("vit"),
}


def values(deferred: Deferred) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    deferred.fill(lambda name, tensor: found.setdefault(name, tensor.clone()))  # type: ignore[arg-type, return-value]
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_deferred_initialization_equals_eager_initialization(name: str) -> None:
    torch.manual_seed(5)
    plain = NETWORKS[name]()
    after = torch.randn(1)
    torch.manual_seed(5)
    deferred = defer(NETWORKS[name])
    assert all(tensor.is_meta for tensor in (*deferred.model.parameters(), *deferred.model.buffers()))
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = values(deferred)
    assert found.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []
    assert torch.equal(torch.randn(1), after), "what is drawn next is the same too"


def test_deferred_values_ignore_default_dtype_set_before_fill() -> None:
    def make() -> nn.Module:
        model = nn.Linear(4, 4)
        model.places = nn.Parameter(torch.randn(9, 16))
        return model

    torch.manual_seed(5)
    expected = dict(make().named_parameters())
    torch.manual_seed(5)
    deferred = defer(make)
    torch.set_default_dtype(torch.float64)
    try:
        found = values(deferred)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []


def test_fill_holds_at_most_three_tensors_in_memory() -> None:
    width, depth = 256, 12

    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Linear(width, width) for _ in range(depth)))
            self.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)

    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def take(name: str, tensor: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(tensor.untyped_storage()))  # type: ignore[arg-type]
        most = max(most, sum(ref() is not None for ref in alive))

    defer(Deep).fill(take)
    assert len(alive) == 2 * depth
    assert most <= 3


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 300))
        self.scale = float(self.weight.detach().sum())


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(2, 2), [torch.randn(300, 300)]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(300, 300).normal_(generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Looks, "item"), (Hides, "hidden is a tensor, and neither"), (Own, "a separate generator")],
)
def test_defer_raises_cannot_defer_and_restores_rng_state(make: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(CannotDefer, match=reason):
        defer(make)
    assert torch.equal(torch.get_rng_state(), state), "the function can be called plainly after that"


def test_allocate_keeps_shared_parameters_and_buffers_shared() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"words": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "norm": nn.BatchNorm1d(3)}
        )
        model["head"].weight = model["words"].weight
        model["again"] = nn.BatchNorm1d(3)
        model["again"].running_mean = model["norm"].running_mean
    allocate(model, torch.device("cpu"))
    assert model["head"].weight is model["words"].weight
    assert model["again"].running_mean is model["norm"].running_mean
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_replay_uses_the_default_dtype_of_the_model_function() -> None:
    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rates", 10 ** (torch.arange(0, 40_000, 2) / 40_000))

    expected, deferred = Rates().rates, defer(Rates)
    with default_dtype(torch.float64):
        assert torch.equal(values(deferred)["rates"], expected)


def test_gradient_hooks_of_small_parameters_are_kept() -> None:
    def make() -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
        model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        return model

    model = defer(make).model
    hooks = GradientHooks()
    hooks.adopt(model.named_parameters())
    assert hooks.names == ["weight", "bias"]
