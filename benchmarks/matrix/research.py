"""Networks as in research code: unusual layers, losses, hooks and state. Each function contains its whole network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import manyhands as mh

from .classics import classify, rows_and_classes, tokens_and_classes
from .network import Network, Registry, mean_square, randint, randn

RESEARCH = Registry("research")


@RESEARCH.add
def lora() -> Network:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8)
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.normal_(self.up.weight, std=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2.0 * self.up(self.down(x))

    def model() -> nn.Module:
        return nn.Sequential(Adapted(), nn.SiLU(), Adapted(), nn.SiLU(), nn.Linear(8, 3))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)

    return Network(model=model, data=rows_and_classes(8), loss=classify, optimizer=optimizer)


@RESEARCH.add
def rotary_decoder() -> Network:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv = nn.Embedding(11, 8), nn.Linear(8, 24, bias=False)
            self.out, self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 16)
            self.down, self.norm = nn.Linear(16, 8), nn.RMSNorm(8)
            angles = torch.arange(8.0)[:, None] / 100 ** (torch.arange(0, 4, 2) / 4)[None]
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def rotate(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens)
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            x = x + self.down(F.silu(self.gate(x)) * self.up(x))
            return F.linear(x, self.words.weight)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Network(model=Decoder, data=lambda n, g: randint(g, 11, n, 7), loss=loss)


@RESEARCH.add
def alibi_sliding_window() -> Network:
    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)
            distance = torch.arange(6)[None] - torch.arange(6)[:, None]
            bias = torch.stack([distance * 2.0**-k for k in (1, 2)])
            bias = bias.masked_fill((distance > 0) | (distance < -2), -1e9)
            self.register_buffer("bias", bias)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.reshape(len(x), 6, 2, 4).permute(0, 2, 1, 3) for part in self.qkv(x).split(8, -1))
            weights = (q @ k.transpose(-1, -2) / 2 + self.bias).softmax(-1)
            return self.head(self.out((weights @ v).permute(0, 2, 1, 3).reshape(len(x), 6, 8)).mean(1))

    return Network(model=Window, data=rows_and_classes(6, 8), loss=classify)


@RESEARCH.add
def perceiver() -> Network:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(4, 8))
            self.read = nn.MultiheadAttention(8, 2, batch_first=True)
            self.think = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            latents = self.latents.expand(len(x), -1, -1)
            latents = latents + self.read(latents, x, x, need_weights=False)[0]
            latents = self.norm(latents + self.think(latents, latents, latents)[0])
            return self.head(latents.mean(1))

    return Network(model=Perceiver, data=rows_and_classes(5, 8), loss=classify)


@RESEARCH.add
def set_transformer_masked() -> Network:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.score, self.head = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
            hidden = torch.tanh(self.embed(x))
            absent = torch.arange(x.shape[1])[None] >= sizes[:, None]
            weights = self.score(hidden)[..., 0].masked_fill(absent, -1e9).softmax(-1)
            return self.head(torch.einsum("bn,bnd->bd", weights, hidden))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6, 4), randint(g, 5, rows) + 1, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Pool, data=data, loss=loss)


@RESEARCH.add
def recommender() -> Network:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum") for n in (7, 13, 5))
            self.dense, self.top = nn.Linear(3, 4), nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            parts = [self.dense(dense), *(table(ids[:, i]) for i, table in enumerate(self.tables))]
            stacked = torch.stack(parts, 1)
            pairs = torch.bmm(stacked, stacked.transpose(1, 2))
            rows, columns = torch.tril_indices(4, 4, -1)
            return self.top(torch.cat([parts[0], pairs[:, rows, columns]], 1))[:, 0]

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 3), randint(g, 5, rows, 3, 2), randint(g, 2, rows).float()

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out = model(batch[0], batch[1])
        return F.binary_cross_entropy_with_logits(out, batch[2].to(out.dtype))

    return Network(model=Recommender, data=data, loss=loss)


@RESEARCH.add
def top_k_experts() -> Network:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 4, bias=False)
            self.up, self.down = nn.Parameter(torch.randn(4, 6, 8) / 3), nn.Parameter(torch.randn(4, 8, 6) / 3)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            hidden = F.gelu(torch.einsum("bd,bkdh->bkh", x, self.up[chosen]))
            out = torch.einsum("bkh,bkhd->bkd", hidden, self.down[chosen])
            return self.head(x + (weights[..., None] * out).sum(1))

    return Network(model=Experts, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def experts_with_capacity() -> Network:
    class Capacity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            gates = self.router(x).softmax(-1)
            chosen = gates.argmax(-1)
            out = x
            for number, expert in enumerate(self.experts):
                mine = chosen == number
                within = mine & (mine.long().cumsum(0) <= 2)
                out = out + expert(x) * (within * gates[:, number])[:, None]
            return self.head(out)

    return Network(model=Capacity, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def fourier_operator() -> Network:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64) / 4)
            self.skip = nn.Conv1d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            modes = torch.fft.rfft(x)[..., :3]
            mixed = torch.einsum("bim,iom->bom", modes, self.weight.to(modes.dtype))
            return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.skip(x))

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 1), Spectral(), Spectral(), nn.Conv1d(4, 1, 1))

    return Network(model=model, data=lambda n, g: (randn(g, n, 1, 8),), loss=mean_square)


@RESEARCH.add
def neural_ode() -> Network:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
            self.head = nn.Linear(4, 3)

        def slope(self, x: Tensor, time: float) -> Tensor:
            return self.field(torch.cat([x, x.new_full((len(x), 1), time)], 1))

        def forward(self, x: Tensor) -> Tensor:
            for step in range(4):
                middle = x + 0.125 * self.slope(x, step / 4)
                x = x + 0.25 * self.slope(middle, step / 4 + 0.125)
            return self.head(x)

    return Network(model=Flow, data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def equilibrium() -> Network:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.inputs, self.head = nn.Linear(6, 6), nn.Linear(4, 6), nn.Linear(6, 3)
            nn.init.uniform_(self.inside.weight, -0.1, 0.1)

        def forward(self, x: Tensor) -> Tensor:
            state, drive = torch.zeros(len(x), 6, dtype=x.dtype), self.inputs(x)
            with torch.no_grad():
                for _ in range(10):
                    state = torch.tanh(self.inside(state) + drive)
            return self.head(torch.tanh(self.inside(state) + drive))

    return Network(model=Equilibrium, data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def hypernetwork() -> Network:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.randn(3))
            self.make = nn.Linear(3, 4 * 5 + 5)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = self.make(self.code).split([20, 5])
            return self.head(torch.relu(F.linear(x, weight.view(5, 4), bias)))

    return Network(model=Hyper, data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def weights_per_sample() -> Network:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.head = nn.Linear(4, 4 * 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.make(x).view(-1, 5, 4)
            return self.head(torch.tanh(torch.bmm(weight, x[..., None])[..., 0]))

    return Network(model=Dynamic, data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def stacked_by_functional_call() -> Network:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 3)
            self.scales = nn.Parameter(1 + 0.1 * torch.randn(5, 3, 4))

        def forward(self, x: Tensor) -> Tensor:
            def one(scale: Tensor) -> Tensor:
                weights = {"weight": self.base.weight * scale, "bias": self.base.bias}
                return functional_call(self.base, weights, (x,))

            return vmap(one)(self.scales).mean(0)

    return Network(model=Ensemble, data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def spline_network() -> Network:
    class Spline(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(outputs, inputs, 5) / 3)
            self.base = nn.Parameter(torch.randn(outputs, inputs) / 3)
            self.register_buffer("grid", torch.linspace(-2, 2, 5))

        def forward(self, x: Tensor) -> Tensor:
            basis = torch.exp(-((x[..., None] - self.grid) ** 2))
            return torch.einsum("big,oig->bo", basis, self.weight) + F.silu(x) @ self.base.T

    return Network(model=lambda: nn.Sequential(Spline(4, 6), Spline(6, 3)), data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def margin_of_angles() -> Network:
    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 4))
            self.centres = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.centres)).clamp(-0.999, 0.999)
            shifted = torch.cos(torch.acos(cosine) + 0.3)
            chosen = F.one_hot(labels, 3).bool()
            return 4.0 * torch.where(chosen, shifted, cosine)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(*batch), batch[1])

    return Network(model=Angles, data=rows_and_classes(6), loss=loss)


@RESEARCH.add
def center_loss() -> Network:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
            self.centres = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            features = torch.tanh(self.body(x))
            return self.head(features), (features - self.centres[labels]).square().sum(1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, distances = model(*batch)
        return F.cross_entropy(logits, batch[1]) + 0.1 * distances.mean()

    return Network(model=Centres, data=rows_and_classes(6), loss=loss)


@RESEARCH.add
def gradient_reversal() -> Network:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -0.5 * gradient

    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classes, self.domains = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = F.elu(self.body(x))
            return self.classes(features), self.domains(Reverse.apply(features))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 3, rows), randint(g, 2, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        classes, domains = model(batch[0])
        return F.cross_entropy(classes, batch[1]) + F.cross_entropy(domains, batch[2])

    return Network(model=Domains, data=data, loss=loss)


@RESEARCH.add
def straight_through_quantizer() -> Network:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def rounded(self, weight: Tensor) -> Tensor:
            scale = weight.detach().abs().max() / 7
            return weight + ((weight / scale).round() * scale - weight).detach()

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(F.linear(x, self.rounded(self.one.weight), self.one.bias))
            return F.linear(hidden, self.rounded(self.two.weight), self.two.bias)

    return Network(model=Quantized, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def range_observer() -> Network:
    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
            self.register_buffer("largest", torch.tensor(0.1))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            if self.training:
                self.largest.copy_(torch.maximum(self.largest, hidden.detach().abs().max()))
            scale = self.largest / 127
            return self.two(hidden + ((hidden / scale).round() * scale - hidden).detach())

    return Network(model=Observed, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def self_distillation() -> Network:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(6, 4)
            self.teacher = nn.Linear(6, 4)
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)
            self.predict = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    own.lerp_(other, 0.1)
                target = F.normalize(self.teacher(x + 0.1), dim=1)
            guess = F.normalize(self.predict(self.student(x)), dim=1)
            return (2 - 2 * (guess * target).sum(1)).mean()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    return Network(model=Teacher, data=lambda n, g: (randn(g, n, 6),), loss=lambda m, b: m(b[0]), optimizer=optimizer)


@RESEARCH.add
def decorrelation_loss() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, two = model(batch[0]), model(batch[0] * 0.9)
        one = (one - one.mean(0)) / (one.std(0) + 1e-3)
        two = (two - two.mean(0)) / (two.std(0) + 1e-3)
        cross = one.T @ two / len(one)
        return (cross - torch.eye(4, dtype=cross.dtype)).square().sum()

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), data=rows_and_classes(6), loss=loss
    )


@RESEARCH.add
def dice_over_the_batch() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        predicted, wanted = model(batch[0]).sigmoid(), batch[1].to(batch[0].dtype)
        return 1 - (2 * (predicted * wanted).sum() + 1) / (predicted.sum() + wanted.sum() + 1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 1, 6, 6), randint(g, 2, rows, 1, 6, 6)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))

    return Network(model=model, data=data, loss=loss)


@RESEARCH.add
def focal_by_positives() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        logits, wanted = model(batch[0]), batch[1].to(batch[0].dtype)
        each = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        focal = (1 - torch.exp(-each)) ** 2 * each
        return mh.mean(focal.sum(), wanted.sum().clamp(min=0) + 1e-12)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), (randint(g, 4, rows, 5) == 0).long()

    return Network(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), data=data, loss=loss)


@RESEARCH.add
def class_weights() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        weight = torch.tensor([1.0, 2.0, 5.0], dtype=logits.dtype)
        return F.cross_entropy(logits, batch[1], weight=weight, label_smoothing=0.1)

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), data=rows_and_classes(6), loss=loss
    )


@RESEARCH.add
def connectionist_loss() -> Network:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 8, batch_first=True, bidirectional=True), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0]).log_softmax(-1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 9, 4), randint(g, 4, rows, 3) + 1, randint(g, 3, rows) + 1

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0]).transpose(0, 1)
        lengths = torch.full((outputs.shape[1],), 9)
        return F.ctc_loss(outputs, batch[1], lengths, batch[2], reduction="none").mean()

    return Network(model=Reader, data=data, loss=loss)


@RESEARCH.add
def conditional_random_field() -> Network:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.rnn = nn.Embedding(11, 4), nn.LSTM(4, 6, batch_first=True)
            self.emit, self.moves = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 3))

        def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
            scores = self.emit(self.rnn(self.words(tokens))[0])
            alpha = scores[:, 0]
            for step in range(1, tokens.shape[1]):
                alpha = torch.logsumexp(alpha[:, :, None] + self.moves, 1) + scores[:, step]
            path = scores.gather(2, tags[..., None])[..., 0].sum(1) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
            return (torch.logsumexp(alpha, 1) - path).mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randint(g, 11, rows, 5), randint(g, 3, rows, 5)

    return Network(model=Tagger, data=data, loss=lambda model, batch: model(*batch))


@RESEARCH.add
def policy_gradient() -> Network:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.body(x))
            return self.policy(hidden).log_softmax(-1), self.value(hidden)[:, 0]

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return randn(g, rows, 4), randint(g, 3, rows), randn(g, rows), randn(g, rows) * 0.1 - 1.1

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        states, actions, returns, old = batch
        logs, values = model(states)
        advantage = (returns - values).detach()
        ratio = torch.exp(logs.gather(1, actions[:, None])[:, 0] - old)
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = -(logs.exp() * logs).sum(1)
        return (0.5 * (returns - values).square() - clipped - 0.01 * entropy).mean()

    return Network(model=Actor, data=data, loss=loss)


@RESEARCH.add
def policy_gradient_normalised() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logs = model(batch[0]).log_softmax(-1)
        returns = batch[0].sum(1)
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        return -(logs.gather(1, batch[1][:, None])[:, 0] * advantage).mean()

    return Network(model=lambda: nn.Linear(6, 3), data=rows_and_classes(6), loss=loss)


@RESEARCH.add
def preference_pairs() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        both = model(torch.cat([batch[0], batch[1]]))[:, 0]
        chosen, rejected = both.chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randn(g, rows, 6)

    return Network(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), data=data, loss=loss)


@RESEARCH.add
def mixed_inputs() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        other = batch[0].roll(1, 0)
        logits = model(0.7 * batch[0] + 0.3 * other)
        return 0.7 * F.cross_entropy(logits, batch[1]) + 0.3 * F.cross_entropy(logits, batch[1].roll(1, 0))

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), data=rows_and_classes(6), loss=loss
    )


@RESEARCH.add
def stochastic_depth() -> Network:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                keep = torch.rand(len(x), 1, dtype=x.dtype) < 0.8
                x = x + keep * torch.tanh(block(x)) / 0.8
            return self.head(x)

    return Network(model=Deep, data=rows_and_classes(6), loss=classify, draws=True)


@RESEARCH.add
def gumbel_router() -> Network:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route, self.paths = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = F.gumbel_softmax(self.route(x), tau=0.7, hard=True)
            return sum(weights[:, k : k + 1] * path(x) for k, path in enumerate(self.paths))

    return Network(model=Router, data=rows_and_classes(6), loss=classify, draws=True)


@RESEARCH.add
def capsules() -> Network:
    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(6, 12), nn.Parameter(torch.randn(4, 3, 3, 5) / 2)

        def squash(self, x: Tensor) -> Tensor:
            size = x.square().sum(-1, keepdim=True)
            return size / (1 + size) * x / (size + 1e-6).sqrt()

        def forward(self, x: Tensor) -> Tensor:
            votes = torch.einsum("bid,idoe->bioe", self.squash(self.first(x).view(-1, 4, 3)), self.weight)
            routing = torch.zeros(len(x), 4, 3, dtype=x.dtype)
            for _ in range(3):
                out = self.squash((routing.softmax(-1)[..., None] * votes).sum(1))
                routing = routing + (votes * out[:, None]).sum(-1)
            return out.norm(dim=-1) * 5

    return Network(model=Capsules, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def radiance_field() -> Network:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, points: Tensor) -> Tensor:
            scaled = points[..., None, :] * 2.0 ** torch.arange(3)[:, None]
            encoded = torch.cat([scaled.sin(), scaled.cos()], -1).flatten(-2)
            colour, density = self.body(encoded).split([3, 1], -1)
            alpha = 1 - torch.exp(-F.softplus(density[..., 0]) * 0.2)
            seen = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
            return ((alpha * seen)[..., None] * colour.sigmoid()).sum(1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 5, 3), randn(g, rows, 3).sigmoid()

    return Network(model=Field, data=data, loss=loss)


@RESEARCH.add
def physics_informed() -> Network:
    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        u = model(x)
        first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0][:, :1]
        return (first[:, 1:] - 0.1 * second + u * first[:, :1]).square().mean()

    return Network(
        model=lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=lambda n, g: (randn(g, n, 2),),
        loss=loss,
    )


@RESEARCH.add
def energy_and_forces() -> Network:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1))

        def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                positions = positions.detach().requires_grad_()
                gaps = (positions[:, :, None] - positions[:, None] + 1e-3).norm(dim=-1)[..., None]
                energy = self.body(gaps).sum((1, 2, 3))
                forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
            return energy, forces

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        energy, forces = model(batch[0])
        return 1e-3 * (energy.square().mean() + (forces - batch[1]).square().mean())

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 4, 3), randn(g, rows, 4, 3)

    return Network(model=Energy, data=data, loss=loss)


@RESEARCH.add
def meta_learning() -> Network:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            def adapted(x: Tensor, y: Tensor) -> Tensor:
                weight, bias = self.two.weight, self.two.bias
                hidden = torch.tanh(self.one(x))
                error = F.linear(hidden[:2], weight, bias)[:, 0] - y[:2]
                inner = error @ hidden[:2] / 2
                return (F.linear(hidden[2:], weight - 0.1 * inner, bias)[:, 0] - y[2:]).square().mean()

            return vmap(adapted)(x, y).mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 4, 3), randn(g, rows, 4)

    return Network(model=Learner, data=data, loss=lambda model, batch: model(*batch))


@RESEARCH.add
def recurrent_memory() -> Network:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 3)
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            before = torch.zeros(len(x), 6, dtype=x.dtype)
            if self.state is not None and self.state.shape == before.shape:
                before = self.state
            state = self.cell(x, before)
            self.state = state.detach()
            return self.head(state)

    return Network(model=Memory, data=rows_and_classes(4), loss=classify)


@RESEARCH.add
def reentrant_checkpoint() -> Network:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    return Network(model=Blocks, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def full_backward_hooks() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        net[2].register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
        net[0].register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-0.01, 0.01),))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def gradient_accumulated_in_hook() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        net[0].weight.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def views_of_one_parameter() -> Network:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(6 * 8 + 8 + 8 * 3) / 3)

        def forward(self, x: Tensor) -> Tensor:
            first, bias, second = self.flat.split([48, 8, 24])
            return F.linear(torch.tanh(F.linear(x, first.view(8, 6), bias)), second.view(3, 8))

    return Network(model=Views, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def transposed_tie() -> Network:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.bias = nn.Linear(6, 4), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.inside(x)), self.inside.weight.T, self.bias) - x

    return Network(model=Autoencoder, data=lambda n, g: (randn(g, n, 6),), loss=mean_square)


@RESEARCH.add
def parameter_dict() -> Network:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterDict({"in": torch.randn(8, 6) / 3, "out": torch.randn(3, 8) / 3})
            self.scales = nn.ParameterList([torch.ones(8), torch.ones(())])

        def forward(self, x: Tensor) -> Tensor:
            return self.scales[1] * F.linear(
                torch.relu(F.linear(x, self.weights["in"])) * self.scales[0], self.weights["out"]
            )

    return Network(model=Named, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def tasks_by_name() -> Network:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleDict({"class": nn.Linear(8, 3), "value": nn.Linear(8, 1)})
            self.uncertainty = nn.Parameter(torch.zeros(2))

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            hidden = F.mish(self.body(batch["inputs"]))
            return {name: head(hidden) for name, head in self.heads.items()}

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {"inputs": randn(g, rows, 6), "class": randint(g, 3, rows), "value": randn(g, rows, 1)}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch)
        first, second = F.cross_entropy(out["class"], batch["class"]), F.huber_loss(out["value"], batch["value"])
        scales = torch.exp(-model.uncertainty)
        return scales[0] * first + scales[1] * second + model.uncertainty.sum()

    return Network(model=Tasks, data=data, loss=loss)


@RESEARCH.add
def graph_attention_packed() -> Network:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.score, self.head = nn.Linear(4, 8), nn.Linear(16, 1), nn.Linear(8, 3)

        def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
            hidden = self.project(nodes)
            pairs = torch.cat([hidden[:, :, None].expand(-1, -1, 5, -1), hidden[:, None].expand(-1, 5, -1, -1)], -1)
            scores = F.leaky_relu(self.score(pairs))[..., 0].masked_fill(links == 0, -1e4)
            return self.head(F.elu(scores.softmax(-1) @ hidden).amax(1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 5, 4), randint(g, 2, rows, 5, 5), randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Attention, data=data, loss=loss)


@RESEARCH.add
def selective_scan() -> Network:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inside, self.rates = nn.Embedding(11, 6), nn.Linear(6, 12), nn.Linear(6, 6 + 4 + 4)
            self.mix = nn.Conv1d(6, 6, 3, padding=2, groups=6)
            self.decay = nn.Parameter(torch.log(torch.arange(1.0, 5.0)).repeat(6, 1))
            self.skip, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x, gate = self.inside(self.words(tokens)).chunk(2, -1)
            x = F.silu(self.mix(x.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2))
            delta, into, out_of = self.rates(x).split([6, 4, 4], -1)
            delta = F.softplus(delta)
            state = x.new_zeros(len(x), 6, 4)
            seen = []
            for t in range(tokens.shape[1]):
                state = torch.exp(-delta[:, t, :, None] * self.decay.exp()) * state
                state = state + delta[:, t, :, None] * into[:, t, None] * x[:, t, :, None]
                seen.append((state * out_of[:, t, None]).sum(-1))
            return self.head(((torch.stack(seen, 1) + self.skip * x) * F.silu(gate)).mean(1))

    return Network(model=Scan, data=tokens_and_classes(), loss=classify)


@RESEARCH.add
def linear_attention_recurrent() -> Network:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.rand(3, 8))
            self.receive, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
            self.decay, self.bonus = nn.Parameter(torch.linspace(-1, 0, 8)), nn.Parameter(torch.zeros(8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            before = F.pad(x, (0, 0, 1, -1))
            r, k, v = (x * m + before * (1 - m) for m in self.mix)
            r, k, v = self.receive(r).sigmoid(), self.key(k), self.value(v)
            top, bottom, rate = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.exp(self.decay.exp().neg())
            out = []
            for t in range(x.shape[1]):
                now = torch.exp(self.bonus + k[:, t])
                out.append((top + now * v[:, t]) / (bottom + now + 1e-6))
                top, bottom = rate * top + k[:, t].exp() * v[:, t], rate * bottom + k[:, t].exp()
            return self.head(self.out(r * torch.stack(out, 1))[:, -1])

    return Network(model=Recurrent, data=rows_and_classes(5, 8), loss=classify)


@RESEARCH.add
def masked_autoencoder() -> Network:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.place = nn.Linear(4, 8), nn.Parameter(torch.randn(6, 8) / 3)
            self.blank = nn.Parameter(torch.zeros(8))
            self.encode = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.decode = nn.Linear(8, 4)

        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            shown = order[:, :3, None].expand(-1, -1, 8)
            embedded = self.patches(x) + self.place
            encoded = self.encode(embedded.gather(1, shown))
            whole = self.blank.to(encoded.dtype).expand(len(x), 6, 8).scatter(1, shown, encoded) + self.place
            errors = (self.decode(whole) - x).square().mean(-1)
            return errors.gather(1, order[:, 3:]).mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6, 4), torch.rand(rows, 6, generator=g).argsort(1)

    return Network(model=Masked, data=data, loss=lambda model, batch: model(*batch))


@RESEARCH.add
def windowed_attention_2d() -> Network:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.qkv, self.out = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 8)
            self.bias, self.head = nn.Parameter(torch.zeros(9, 2)), nn.Linear(8, 3)
            steps = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
            gaps = steps[:, :, None] - steps[:, None] + 1
            self.register_buffer("index", gaps[0] * 3 + gaps[1])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))
            b, h, w, c = x.shape
            windows = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
            q, k, v = self.qkv(windows).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) / 2 + self.bias[self.index].permute(2, 0, 1)
            mixed = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, c))
            x = x + mixed.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
            return self.head(x.mean((1, 2)))

    return Network(model=Shifted, data=rows_and_classes(3, 8, 8), loss=classify)


@RESEARCH.add
def depthwise_squeeze() -> Network:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.deep = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.norm, self.squeeze, self.excite = nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
            self.narrow = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.hardswish(self.norm(self.deep(self.wide(x))))
            gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(hidden, 1)))).sigmoid()
            return x + self.narrow(hidden * gate)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), Block(), Block(), nn.Flatten(), nn.Linear(64, 3))

    return Network(model=model, data=rows_and_classes(3, 8, 8), loss=classify)


@RESEARCH.add
def coupling_flow() -> Network:
    class Coupling(nn.Module):
        def __init__(self, flips: bool) -> None:
            super().__init__()
            self.flips, self.net = flips, nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, 1) if not self.flips else x.chunk(2, 1)[::-1]
            scale, shift = self.net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            b = b * scale.exp() + shift
            return torch.cat([a, b] if not self.flips else [b, a], 1), log_det + scale.sum(1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Coupling(bool(k % 2)) for k in range(4))

        def forward(self, x: Tensor) -> Tensor:
            log_det = torch.zeros(len(x), dtype=x.dtype)
            for step in self.steps:
                x, log_det = step(x, log_det)
            return (0.5 * x.square().sum(1) - log_det).mean()

    return Network(model=Flow, data=lambda n, g: (randn(g, n, 4),), loss=lambda model, batch: model(batch[0]))


@RESEARCH.add
def actor_and_critic() -> Network:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, states: Tensor, actions: Tensor | None = None) -> Tensor:
            actions = self.actor(states).tanh() if actions is None else actions
            return self.critic(torch.cat([states, actions], 1))[:, 0]

    def step(hand: Any, batch: Any) -> None:
        hand.minimize(lambda part: (hand.model(part[0], part[1]) - part[2]).square().mean(), "critic")
        hand.minimize(lambda part: -hand.model(part[0]).mean(), "actor")

    def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.SGD(model.critic.parameters(), lr=0.05),
            "actor": torch.optim.SGD(model.actor.parameters(), lr=0.02, momentum=0.5),
        }

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 4), randn(g, rows, 2), randn(g, rows)

    return Network(model=Both, data=data, optimizer=optimizers, step=step)


@RESEARCH.add
def early_exit() -> Network:
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            outputs = []
            for block, head in zip(self.blocks, self.heads, strict=True):
                x = F.relu(block(x))
                outputs.append(head(x))
                if outputs[-1].softmax(-1).amax() > 0.999:
                    break
            return outputs

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = [F.cross_entropy(out, batch[1]) for out in model(batch[0])]
        return sum(losses) / len(losses)

    return Network(model=Exits, data=rows_and_classes(6), loss=loss)


@RESEARCH.add
def length_of_batch() -> Network:
    class Trimmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            tokens = tokens[:, : int(lengths.max())]
            mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None])[..., None]
            hidden = torch.tanh(self.mix(self.words(tokens))) * mask
            return self.head(hidden.sum(1) / lengths[:, None])

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randint(g, 11, rows, 8), randint(g, 7, rows) + 1, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Trimmed, data=data, loss=loss)


@RESEARCH.add
def padded_mean_over_batch_length() -> Network:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            hidden = self.words(tokens[:, : int(lengths.max())])
            return self.head(hidden.mean(1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randint(g, 11, rows, 8), randint(g, 7, rows) + 1, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Mean, data=data, loss=loss)


@RESEARCH.add
def product_key_memory() -> Network:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.keys = nn.Linear(6, 8), nn.Parameter(torch.randn(2, 4, 4))
            self.values, self.head = nn.Embedding(16, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            halves = self.query(x).view(-1, 2, 4)
            scores, places = torch.einsum("bhd,hnd->bhn", halves, self.keys).topk(2, -1)
            pairs = (scores[:, 0, :, None] + scores[:, 1, None]).flatten(1)
            index = (places[:, 0, :, None] * 4 + places[:, 1, None]).flatten(1)
            return self.head(x + (pairs.softmax(-1)[..., None] * self.values(index)).sum(1))

    return Network(model=Memory, data=rows_and_classes(6), loss=classify)


@RESEARCH.add
def sharpness_aware() -> Network:
    class Sharp(torch.optim.SGD):
        """SGD on gradients that are normalised by their norm over all parameters."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters]))
            for parameter in parameters:
                parameter.grad.div_(norm + 1e-3)
            return super().step(closure)

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda model: Sharp(model.parameters(), lr=0.1),
    )


@RESEARCH.add
def layer_wise_rates() -> Network:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": list(layer.parameters()), "lr": 1e-2 * 0.5**k, "weight_decay": 0.1 * k}
            for k, layer in enumerate(layer for layer in model.children() if any(True for _ in layer.parameters()))
        ]
        return torch.optim.AdamW(groups, eps=1e-5, amsgrad=True)

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        data=rows_and_classes(6),
        loss=classify,
        optimizer=optimizer,
    )
