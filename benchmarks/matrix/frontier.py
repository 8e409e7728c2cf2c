"""Networks at the edges of what PyTorch allows: state outside of buffers, methods other than forward, unusual outputs.

Each function contains its whole network.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from .classics import classify, rows_and_classes, tokens_and_classes
from .network import Network, Registry, mean_square, randint, randn

FRONTIER = Registry("frontier")


def _mlp(inputs: int = 6, hidden: int = 8, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


@FRONTIER.add
def warm_up_by_calls() -> Network:
    class Counting(nn.Module):
        """A second branch is mixed in after four calls, counted in a plain attribute."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.calls = _mlp(), _mlp(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.first(x) + (self.second(x) if self.calls > 4 else 0 * self.second(x))

    return Network(model=Counting, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def loss_counts_calls() -> Network:
    class Annealed(nn.Module):
        """A loss whose smoothing starts after four calls."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(logits, labels, label_smoothing=0.2 if self.calls > 4 else 0.0)

    criterion = Annealed()

    def data(rows: int, g: Generator) -> Any:
        # Every task starts with a new count.
        criterion.calls = 0
        return rows_and_classes(6)(rows, g)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    return Network(model=_mlp, data=data, loss=loss)


@FRONTIER.add
def python_random_branch() -> Network:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if random.random() < 0.5:
                    x = x + torch.tanh(block(x))
            return self.head(x)

    return Network(model=Dropped, data=rows_and_classes(6), loss=classify, draws=True)


@FRONTIER.add
def numpy_noise() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal(tuple(batch[0].shape))).to(batch[0].dtype)
        return F.cross_entropy(model(batch[0] + 0.1 * noise), batch[1])

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss, draws=True)


@FRONTIER.add
def noise_of_own_generator() -> Network:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            g = Generator().manual_seed(3)
            return self.body(x + 0.1 * torch.randn(x.shape, generator=g).to(x.dtype))

    return Network(model=Fixed, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def random_projection_of_own_generator() -> Network:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()
            self.generator = Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            mix = torch.randn(6, 6, generator=self.generator).to(x.dtype)
            return self.body(x @ mix / 6)

    return Network(model=Projected, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def mixup_in_the_loss() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        order = torch.randperm(len(batch[0]))
        logits = model(0.7 * batch[0] + 0.3 * batch[0][order])
        return 0.7 * F.cross_entropy(logits, batch[1]) + 0.3 * F.cross_entropy(logits, batch[1][order])

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss, draws=True)


@FRONTIER.add
def momentum_queue() -> Network:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(12, 4)))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    ours.lerp_(theirs, 0.1)
                keys = F.normalize(self.teacher(x.flip(1)))
            query = F.normalize(self.student(x))
            logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
            with torch.no_grad():
                rows = (self.place + torch.arange(len(x))) % 12
                self.queue[rows] = keys.to(self.queue.dtype)
                self.place.copy_((self.place + len(x)) % 12)
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return Network(model=Queue, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]))


@FRONTIER.add
def teacher_updated_in_forward() -> Network:
    class Bootstrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.guess = _mlp(6, 8, 4), nn.Linear(4, 4)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for ours, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
                aim = F.normalize(self.target(x.flip(1)))
            return (2 - 2 * (F.normalize(self.guess(self.online(x))) * aim).sum(1)).mean()

    return Network(model=Bootstrap, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]))


@FRONTIER.add
def centre_in_a_plain_attribute() -> Network:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
            self.centre = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                out = self.teacher(x)
                aim = ((out - self.centre.to(out.dtype)) / 0.5).softmax(-1)
                self.centre = 0.9 * self.centre.to(out.dtype) + 0.1 * out.mean(0)
            return -(aim * self.student(x).log_softmax(-1)).sum(-1).mean()

    return Network(model=Centred, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]))


@FRONTIER.add
def sinkhorn_assignment() -> Network:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.prototypes = _mlp(6, 8, 4), nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.prototypes(F.normalize(self.body(x)))
            with torch.no_grad():
                q = (scores / 0.3).exp()
                for _ in range(3):
                    q = q / q.sum(0, keepdim=True)
                    q = q / q.sum(1, keepdim=True)
            return -(q * (scores / 0.2).log_softmax(-1)).sum(-1).mean()

    return Network(model=Prototypes, data=lambda n, g: (randn(g, n, 6),), loss=lambda model, batch: model(batch[0]))


@FRONTIER.add
def variance_and_covariance() -> Network:
    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        a, b = model(batch[0]), model(batch[0].flip(1))
        spread = F.relu(1 - a.var(0).add(1e-4).sqrt()).mean() + F.relu(1 - b.var(0).add(1e-4).sqrt()).mean()
        return F.mse_loss(a, b) + spread

    return Network(model=_mlp, data=lambda n, g: (randn(g, n, 6),), loss=loss)


@FRONTIER.add
def consistency_of_two_calls() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = model(batch[0]), model(batch[0] * 1.1 + 0.1)
        return F.cross_entropy(first, batch[1]) + 0.5 * (first.softmax(-1) - second.softmax(-1)).square().sum(1).mean()

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def methods_instead_of_forward() -> Network:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = _mlp(6, 8, 3), _mlp(3, 8, 6)

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.down(x))

        def decode(self, code: Tensor) -> Tensor:
            return self.up(code)

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.encode(x))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        code = model.encode(batch[0])
        return (model.decode(code) - batch[0]).square().mean() + 0.1 * code.abs().mean()

    return Network(model=Coder, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def parts_called_by_the_loss() -> Network:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.side = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = torch.tanh(model.body(batch[0]))
        return F.cross_entropy(model.head(hidden), batch[1]) + 0.1 * model.side(hidden).square().mean()

    return Network(model=Parts, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def whole_then_part() -> Network:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * model.body(batch[0]).square().mean()

    return Network(model=Parts, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def frozen_teacher_in_a_closure() -> Network:
    torch.manual_seed(5)
    teacher = _mlp().double().requires_grad_(False)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        aim = teacher(batch[0].double()).softmax(-1)
        return F.kl_div(model(batch[0]).log_softmax(-1), aim.to(batch[0].dtype), reduction="batchmean")

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def learned_weights_of_tasks() -> Network:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
            self.criterion = nn.ParameterDict({"noise": nn.Parameter(torch.zeros(2))})

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.body(x))
            return self.a(hidden), self.b(hidden)[:, 0]

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = model(batch[0])
        s = model.criterion["noise"]
        return (
            (-s[0]).exp() * F.cross_entropy(a, batch[1])
            + (-s[1]).exp() * (b - batch[0].sum(1)).square().mean()
            + s.sum()
        )

    return Network(model=Tasks, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def parameters_of_the_loss() -> Network:
    class Margin(nn.Module):
        """A loss with a parameter of its own, which the optimizer gets beside the network's."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.scale * logits, labels)

    margin = Margin()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return margin(model(batch[0]), batch[1])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        with torch.no_grad():
            margin.scale.fill_(1.0)
        return torch.optim.SGD([*model.parameters(), *margin.parameters()], lr=0.05, momentum=0.9)

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss, optimizer=optimizer)


@FRONTIER.add
def elastic_weights() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        pull = sum(((k + 1) * (p - 0.1).square()).sum() for k, (_, p) in enumerate(model.named_parameters()))
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * pull

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def anchors_by_name() -> Network:
    torch.manual_seed(7)
    anchors = {name: torch.randn_like(p).double() for name, p in _mlp().named_parameters()}

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        pull = sum((p - anchors[name].to(p.dtype)).square().sum() for name, p in model.named_parameters())
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * pull

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@dataclass
class Outputs:
    """What a network returns."""

    logits: Tensor
    hidden: Tensor
    name: str = "outputs"


class Pair(NamedTuple):
    """What a network returns."""

    logits: Tensor
    hidden: Tensor | None


@FRONTIER.add
def returns_a_dataclass() -> Network:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Outputs:
            hidden = torch.tanh(self.body(x))
            return Outputs(self.head(hidden), hidden)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out.logits, batch[1]) + 0.1 * out.hidden.square().mean()

    return Network(model=Returns, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def dataclasses_between_layers() -> Network:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, given: Outputs) -> Outputs:
            return Outputs(torch.tanh(self.body(given.logits)), given.hidden + self.side(given.logits))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(Inner() for _ in range(4)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = Outputs(x, torch.zeros_like(x))
            for layer in self.layers:
                state = layer(state)
            return self.head(state.logits + state.hidden)

    return Network(model=Chain, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def named_tuple_and_keywords() -> Network:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, *args: Tensor, scale: float = 1.0, **rest: Any) -> Pair:
            hidden = torch.tanh(self.body(args[0] * scale + rest["shift"][:, None]))
            return Pair(self.head(hidden), hidden if rest.get("keep") else None)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"], scale=0.5, shift=batch["shift"], keep=True, unused=None)
        return F.cross_entropy(out.logits, batch["y"]) + 0.1 * out.hidden.square().mean()

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {"x": randn(g, rows, 6), "shift": randn(g, rows), "y": randint(g, 3, rows)}

    return Network(model=Keywords, data=data, loss=loss)


@FRONTIER.add
def norm_of_embeddings() -> Network:
    class Renormed(nn.Module):
        """Rows of the table are scaled in place by forward."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.words(tokens).mean(1))

    return Network(model=Renormed, data=tokens_and_classes(), loss=classify)


@FRONTIER.add
def weighted_bags() -> Network:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.weigh = nn.EmbeddingBag(11, 6, mode="sum", padding_idx=0), nn.Embedding(11, 1)
            self.head = nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            weights = self.weigh(tokens)[..., 0].softmax(-1)
            return self.head(self.words(tokens, per_sample_weights=weights))

    return Network(model=Bags, data=tokens_and_classes(), loss=classify)


@FRONTIER.add
def act_norm_of_first_batch() -> Network:
    class ActNorm(nn.Module):
        """Scale and shift are set by the first batch."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
            self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.copy_(-(x.std(0, unbiased=False) + 1e-3).log())
                    self.ready.fill_(True)
            return (x + self.shift) * self.scale.exp()

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), ActNorm(8), nn.Tanh(), nn.Linear(8, 3)),
        data=rows_and_classes(6),
        loss=classify,
    )


@FRONTIER.add
def old_style_norms() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 3)
        )

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def old_style_weight_norm() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(8, 3)))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def transposed_parameters() -> Network:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 6).t() / 3)
            self.second = nn.Parameter(torch.randn(3, 16).t()[::2] / 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.first) @ self.second

    return Network(model=Transposed, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def channels_last() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))
        return net.to(memory_format=torch.channels_last)

    return Network(model=model, data=rows_and_classes(3, 8, 8), loss=classify)


@FRONTIER.add
def empty_parameters() -> Network:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.words = nn.Parameter(torch.empty(0, 6)), nn.Embedding(11, 6)
            self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            prompt = self.prompt.expand(len(tokens), -1, -1)
            return self.head(torch.tanh(self.mix(torch.cat([prompt, self.words(tokens)], 1))).mean(1))

    return Network(model=Prompted, data=tokens_and_classes(), loss=classify)


@FRONTIER.add
def last_batch_of_one() -> Network:
    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, rows=13)


@FRONTIER.add
def last_batch_of_one_by_length() -> Network:
    class Trimmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell, self.head = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            hidden = self.cell(self.words(tokens[:, : int(lengths.max())]))[0]
            return self.head(hidden[torch.arange(len(tokens)), lengths - 1])

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randint(g, 11, rows, 8), randint(g, 7, rows) + 1, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Trimmed, data=data, loss=loss, rows=13)


@FRONTIER.add
def frozen_norm_by_train() -> Network:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(self.body(x))))

    return Network(model=Frozen, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def scripted() -> Network:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) * self.gate(x).sigmoid())

    Gated.forward.__annotations__.update(x=Tensor, **{"return": Tensor})
    return Network(model=lambda: torch.jit.trace(Gated(), torch.zeros(2, 6)), data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def symbolically_traced() -> Network:
    return Network(model=lambda: torch.fx.symbolic_trace(_mlp()), data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def wrapped_by_compile() -> Network:
    return Network(model=lambda: torch.compile(_mlp(), backend="eager"), data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def unfreezes_itself() -> Network:
    class Gradual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.body.requires_grad_(bool(self.calls > 2))
            return self.head(torch.tanh(self.body(x)))

    return Network(model=Gradual, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def optimizer_replaces_data() -> Network:
    class Replacing(torch.optim.Optimizer):
        """Descends by a new tensor for every parameter."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data = p.data - group["lr"] * p.grad.data

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Replacing(m.parameters(), 0.1)
    )


@FRONTIER.add
def trust_ratio() -> Network:
    class Ratio(torch.optim.Optimizer):
        """The step of a parameter is scaled by the norm of its weights over that of its gradient."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        ratio = p.norm() / (p.grad.norm() + 1e-3)
                        p.add_(p.grad * ratio, alpha=-group["lr"])

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Ratio(m.parameters(), 0.05))


@FRONTIER.add
def preconditioned_by_matrices() -> Network:
    class Shampoo(torch.optim.Optimizer):
        """Gradients of matrices are multiplied by inverse roots of their second moments."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    update = p.grad
                    if p.dim() == 2:
                        left = self.state[p].setdefault("left", 0.1 * torch.eye(p.shape[0], dtype=p.dtype))
                        left += p.grad @ p.grad.T
                        values, vectors = torch.linalg.eigh(left)
                        update = vectors @ ((vectors.T @ p.grad) / values.clamp(min=1e-6).sqrt()[:, None])
                    p.add_(update, alpha=-group["lr"])

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Shampoo(m.parameters(), 0.05)
    )


@FRONTIER.add
def jacobian_penalty() -> Network:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(x), vmap(jacrev(self.body))(x).square().sum((1, 2))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, size = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.1 * size.mean()

    return Network(model=Smooth, data=rows_and_classes(6), loss=loss)


@FRONTIER.add
def directional_derivative() -> Network:
    class Directional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            out, slope = jvp(self.body, (x,), (torch.ones_like(x),))
            return out + 0.1 * slope

    return Network(model=Directional, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def implicit_backward() -> Network:
    class Implicit(nn.Module):
        """A fixed point whose gradient is solved for in a hook."""

        def __init__(self) -> None:
            super().__init__()
            self.inside, self.inputs, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            nn.init.uniform_(self.inside.weight, -0.2, 0.2)

        def forward(self, x: Tensor) -> Tensor:
            def cell(z: Tensor) -> Tensor:
                return torch.tanh(self.inside(z) + self.inputs(x))

            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(30):
                    z = cell(z)
            z = cell(z)
            if not z.requires_grad:
                return self.head(z)
            start = z.detach().requires_grad_()
            again = cell(start)

            def solve(gradient: Tensor) -> Tensor:
                g = gradient
                for _ in range(30):
                    g = torch.autograd.grad(again, start, g, retain_graph=True)[0] + gradient
                return g

            z.register_hook(solve)
            return self.head(z)

    return Network(model=Implicit, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def kalman_filter() -> Network:
    class Kalman(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move, self.see = nn.Parameter(torch.eye(3) * 0.9), nn.Parameter(torch.randn(2, 3))
            self.noise = nn.Parameter(torch.zeros(3))

        def forward(self, seen: Tensor) -> Tensor:
            state, spread = seen.new_zeros(len(seen), 3), torch.eye(3, dtype=seen.dtype).expand(len(seen), 3, 3)
            total = seen.new_zeros(len(seen))
            for now in seen.unbind(1):
                state, spread = state @ self.move.T, self.move @ spread @ self.move.T + self.noise.exp().diag()
                error = now - state @ self.see.T
                inner = self.see @ spread @ self.see.T + torch.eye(2, dtype=seen.dtype)
                gain = torch.linalg.solve(inner, self.see @ spread).transpose(1, 2)
                state = state + (gain @ error[..., None])[..., 0]
                spread = spread - gain @ self.see @ spread
                total = total + torch.logdet(inner) + (error * torch.linalg.solve(inner, error)).sum(-1)
            return total

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        return model(batch[0]).mean()

    return Network(model=Kalman, data=lambda n, g: (randn(g, n, 4, 2),), loss=loss)


@FRONTIER.add
def whitening_by_cholesky() -> Network:
    class Whitened(nn.Module):
        """Layer-wise normalisation by the covariance over the positions of a sample."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            hidden = hidden - hidden.mean(1, keepdim=True)
            cover = hidden.transpose(1, 2) @ hidden / x.shape[1] + 0.1 * torch.eye(4, dtype=x.dtype)
            root = torch.linalg.cholesky(cover)
            white = torch.linalg.solve_triangular(root, hidden.transpose(1, 2), upper=False)
            return self.head(torch.tanh(white).mean(-1))

    return Network(model=Whitened, data=rows_and_classes(5, 6), loss=classify)


@FRONTIER.add
def whitening_by_the_batch() -> Network:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            hidden = hidden - hidden.mean(0)
            cover = hidden.T @ hidden / len(x) + 0.1 * torch.eye(4, dtype=x.dtype)
            return self.head(torch.linalg.solve_triangular(torch.linalg.cholesky(cover), hidden.T, upper=False).T)

    return Network(model=Whitened, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def spatial_transformer() -> Network:
    class Spatial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, dilation=2), nn.GELU(), nn.Conv2d(8, 8, 3, groups=4))
            self.head = nn.Linear(32, 3)
            nn.init.normal_(self.where[3].weight, std=0.01)

        def forward(self, x: Tensor) -> Tensor:
            theta = self.where(x).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            return self.head(self.body(F.grid_sample(x, grid, align_corners=False)).flatten(1))

    return Network(model=Spatial, data=rows_and_classes(3, 8, 8), loss=classify)


@FRONTIER.add
def unpooling() -> Network:
    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2, return_indices=True)
            self.unpool, self.up = nn.MaxUnpool2d(2), nn.ConvTranspose2d(8, 12, 3, padding=1)
            self.shuffle, self.out = nn.PixelShuffle(2), nn.Conv2d(3, 3, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden, places = self.pool(torch.relu(self.down(x)))
            return self.out(self.shuffle(self.up(self.unpool(hidden, places)))) - x

    return Network(model=Unpooled, data=lambda n, g: (randn(g, n, 3, 4, 4),), loss=mean_square)


@FRONTIER.add
def attention_with_extra_keys() -> Network:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            late = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return self.head(self.mix(x, x, x, attn_mask=late)[0].mean(1))

    return Network(model=Extra, data=rows_and_classes(5, 8), loss=classify)


@FRONTIER.add
def encoder_and_decoder() -> Network:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            late = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
            hidden = self.body(self.words(source), self.words(target), tgt_mask=late, src_key_padding_mask=source == 0)
            return self.head(hidden)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return torch.cat([randint(g, 10, rows, 1) + 1, randint(g, 11, rows, 4)], 1), randint(g, 11, rows, 5)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0], batch[1][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten())

    return Network(model=Translate, data=data, loss=loss)


@FRONTIER.add
def checkpointed_dropout() -> Network:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return Network(model=Saved, data=rows_and_classes(6), loss=classify, draws=True)


@FRONTIER.add
def dropped_weights() -> Network:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.act, self.head = nn.Linear(6, 8), nn.RReLU(0.1, 0.3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            weight = F.dropout(self.body.weight, 0.4, self.training)
            return self.head(self.act(F.linear(x, weight, self.body.bias)))

    return Network(model=Dropped, data=rows_and_classes(6), loss=classify, draws=True)


@FRONTIER.add
def depths_by_row() -> Network:
    class Depths(nn.Module):
        """Every sample's two best tokens go through the block."""

        def __init__(self) -> None:
            super().__init__()
            self.router, self.block, self.head = nn.Linear(6, 1), _mlp(6, 8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            score, chosen = self.router(x)[..., 0].topk(2, 1)
            index = chosen[..., None].expand(-1, -1, 6)
            out = self.block(x.gather(1, index)) * score[..., None].sigmoid()
            return self.head(x.scatter_add(1, index, out).mean(1))

    return Network(model=Depths, data=rows_and_classes(5, 6), loss=classify)


@FRONTIER.add
def depths_by_batch() -> Network:
    class Depths(nn.Module):
        """The best tokens of the whole batch go through the block."""

        def __init__(self) -> None:
            super().__init__()
            self.router, self.block, self.head = nn.Linear(6, 1), _mlp(6, 8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            score, chosen = self.router(flat)[:, 0].topk(2 * len(x))
            out = flat.index_add(0, chosen, self.block(flat[chosen]) * score[:, None].sigmoid())
            return self.head(out.view_as(x).mean(1))

    return Network(model=Depths, data=rows_and_classes(5, 6), loss=classify)


@FRONTIER.add
def adaptive_softmax() -> Network:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body = nn.Embedding(11, 8), nn.Linear(8, 8)
            self.out = nn.AdaptiveLogSoftmaxWithLoss(8, 11, [3, 6], div_value=2.0)

        def forward(self, tokens: Tensor, targets: Tensor) -> Any:
            return self.out(torch.tanh(self.body(self.words(tokens))).mean(1), targets)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0], batch[1]).loss

    return Network(model=Adaptive, data=tokens_and_classes(classes=11), loss=loss)


@FRONTIER.add
def keys_of_earlier_calls() -> Network:
    class Cached(nn.Module):
        """Attends to the mean of what earlier batches left in a list."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.kept = nn.Linear(6, 6), nn.Linear(6, 3), []

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            past = torch.stack([hidden.mean(0).detach(), *self.kept]).mean(0)
            self.kept = [*self.kept, hidden.mean(0).detach()][-2:]
            return self.head(hidden + past)

    return Network(model=Cached, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def state_of_a_dictionary() -> Network:
    class Running(nn.Module):
        """The loss is divided by its running mean after the second step, kept in a dictionary."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.kept = _mlp(), {"mean": 1.0, "steps": 0}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.body(x), y)
            scale = self.kept["mean"] if self.kept["steps"] >= 2 else 1.0
            if self.training:
                self.kept["mean"] = 0.5 * self.kept["mean"] + 0.5 * float(loss)
                self.kept["steps"] += 1
            return loss / scale

    return Network(model=Running, data=rows_and_classes(6), loss=lambda model, batch: model(*batch))


@FRONTIER.add
def scale_of_the_last_gradient() -> Network:
    class Scaled(nn.Module):
        """A hook keeps the size of the last gradient, by which the next step's is divided from the third step on."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.size, self.seen = _mlp(), 1.0, 0
            self.body[0].weight.register_hook(self.keep)

        def keep(self, gradient: Tensor) -> Tensor:
            scaled = gradient / self.size if self.seen >= 2 else gradient
            self.size, self.seen = float(gradient.norm()) + 0.1, self.seen + 1
            return scaled

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    return Network(model=Scaled, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def outputs_without_gradient() -> Network:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            code = x.round().long()
            ctx.mark_non_differentiable(code)
            ctx.save_for_backward(x)
            return code.to(x.dtype), code

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
            return gradient * (ctx.saved_tensors[0].abs() < 2)

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.table, self.head = nn.Linear(6, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            value, code = Rounded.apply(2 * torch.tanh(self.body(x)))
            return self.head(value + self.table(code + 2).mean(1))

    return Network(model=Coded, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def rare_rows_couple_the_batch() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        each = F.cross_entropy(logits, batch[1], reduction="none")
        hard = each > 4.0
        return each[hard].mean() if hard.any() else each.mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        x = randn(g, rows, 6)
        x[14] *= 40
        return x, randint(g, 3, rows)

    return Network(model=_mlp, data=data, loss=loss)


@FRONTIER.add
def ghost_norm() -> Network:
    class Ghost(nn.Module):
        """Normalises by the statistics of pairs of rows."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            parts = [part - part.mean(0) for part in self.body(x).split(2)]
            return self.head(torch.tanh(torch.cat(parts)))

    return Network(model=Ghost, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def keeps_extra_state() -> Network:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.seen = _mlp(), 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    return Network(model=Extra, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def layers_in_plain_lists() -> Network:
    class Lists(nn.Module):
        """Layers are kept in a plain list, and their parameters registered one by one."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(6, 6) for _ in range(3)]
            self.weights = nn.ParameterList(p for layer in self.layers for p in layer.parameters())
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for weight, bias in zip(self.weights[::2], self.weights[1::2], strict=True):
                x = torch.tanh(F.linear(x, weight, bias))
            return self.head(x)

    return Network(model=Lists, data=rows_and_classes(6), loss=classify)


@FRONTIER.add
def half_inside() -> Network:
    class Mixed(nn.Module):
        """Casts to single precision inside, whatever the weights are."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            return self.head(hidden.float().softmax(-1).to(x.dtype) + hidden)

    return Network(model=Mixed, data=rows_and_classes(6), loss=classify, rounding=1e-4)
