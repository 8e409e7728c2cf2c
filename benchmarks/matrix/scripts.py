"""Networks, losses and optimizers in further idioms of training scripts: diffusion, preferences, memories, adapters.

Each function contains its whole network.
"""

from __future__ import annotations

import copy
import math
import random
from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import manyhands as mh

from .classics import classify, rows_and_classes, tokens_and_classes
from .field import Samples
from .network import Network, Registry, mean_square, randint, randn

SCRIPTS = Registry("script")


def _mlp(inputs: int = 6, hidden: int = 8, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def _two(first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    return lambda rows, g: (randn(g, rows, *first), randn(g, rows, *second))


# Generative models


@SCRIPTS.add
def flow_matching_with_label_dropout() -> Network:
    class Block(nn.Module):
        """A block whose norms are modulated by the condition and gated by zeros at first."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width, elementwise_affine=False)
            self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
            self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift, scale, gate = self.modulate(c)[:, None].chunk(3, -1)
            h = self.norm(x) * (1 + scale) + shift
            return x + gate * self.attend(h, h, h, need_weights=False)[0]

    class Transformer(nn.Module):
        def __init__(self, width: int = 8, classes: int = 3) -> None:
            super().__init__()
            self.inputs, self.labels = nn.Linear(4, width), nn.Embedding(classes + 1, width)
            self.time = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width))
            self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
            self.out = nn.Linear(width, 4)
            self.register_buffer("rates", torch.tensor([1.0, 4.0]), persistent=False)
            self.classes = classes

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            if self.training:
                y = torch.where(torch.rand(len(y), device=y.device) < 0.3, self.classes, y)
            angles = t[:, None] * self.rates
            c = self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.labels(y)
            h = self.inputs(x)
            for block in self.blocks:
                h = block(h, c)
            return self.out(h)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        t = torch.sigmoid(torch.randn(len(x), device=x.device, dtype=x.dtype))
        noise = torch.randn_like(x)
        mixed = t[:, None, None] * x + (1 - t[:, None, None]) * noise
        return F.mse_loss(model(mixed, t, y), x - noise)

    return Network(model=Transformer, data=rows_and_classes(5, 4), loss=loss, draws=True)


@SCRIPTS.add
def velocity_with_weighted_noise_levels() -> Network:
    class Diffusion(nn.Module):
        """v-prediction whose weights of noise levels are clamped; the average is updated by a hook of the optimizer."""

        def __init__(self) -> None:
            super().__init__()
            betas = torch.linspace(1e-3, 0.3, 10)
            self.register_buffer("bars", torch.cumprod(1 - betas, 0))
            self.net = _mlp(5, 8, 4)
            self.average = copy.deepcopy(self.net).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            t = torch.randint(0, 10, (x.shape[0],), device=x.device)
            a = self.bars[t].sqrt()[:, None]
            s = (1 - self.bars[t]).sqrt()[:, None]
            noise = torch.randn_like(x)
            seen = a * x + s * noise
            guess = self.net(torch.cat([seen, t[:, None].to(x.dtype) / 10], -1))
            ratio = (a / s).square()
            weight = ratio.clamp(max=5.0) / (ratio + 1)
            each: Tensor = (guess - (a * noise - s * x)).square().mean(1) * weight[:, 0]
            return each

    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(model.net.parameters(), lr=1e-2, eps=1e-3)

        @torch.no_grad()
        def average(*_: Any) -> None:
            for a, b in zip(model.average.parameters(), model.net.parameters(), strict=True):
                a.lerp_(b, 0.2)

        inner.register_step_post_hook(average)
        return inner

    return Network(
        model=Diffusion,
        data=lambda n, g: randn(g, n, 4),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=optimizer,
        draws=True,
    )


@SCRIPTS.add
def codes_restarted_from_the_batch() -> Network:
    class Codes(nn.Module):
        """A codebook by moving averages whose unused codes are replaced by rows of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
            self.register_buffer("codes", torch.randn(8, 4))
            self.register_buffer("used", torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encode(x)
            index = torch.cdist(z.detach(), self.codes).argmin(1)
            hot = F.one_hot(index, 8).to(z.dtype)
            if self.training:
                with torch.no_grad():
                    self.used.mul_(0.8).add_(hot.sum(0), alpha=0.2)
                    self.codes.lerp_((hot.T @ z) / hot.sum(0).clamp(min=1)[:, None], 0.2)
                    dead = self.used < 0.7
                    self.codes[dead] = z[torch.arange(int(dead.sum())) % len(z)]
            q = self.codes[index]
            return self.decode(z + (q - z).detach()), (z - q).square().mean()

    def loss(model: Any, batch: Tensor) -> Tensor:
        out, commit = model(batch)
        return F.mse_loss(out, batch) + 0.25 * commit

    return Network(model=Codes, data=lambda n, g: randn(g, n, 6), loss=loss)


@SCRIPTS.add
def codes_of_bits_with_entropy() -> Network:
    """Look-up free codes; the entropy of the mean code over the batch couples its rows by a small term."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = model[0](batch[0])
        p = torch.sigmoid(4 * z)
        bits = torch.sign(z)
        mean = p.mean(0)
        spread = -(mean * mean.log() + (1 - mean) * (1 - mean).log()).sum()
        return F.cross_entropy(model[2](z + (bits - z).detach()), batch[1]) - 1e-3 * spread

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Identity(), nn.Linear(5, 3)),
        data=rows_and_classes(6),
        loss=loss,
    )


@SCRIPTS.add
def masked_convolution_in_place() -> Network:
    class Masked(nn.Conv2d):
        """A causal convolution that zeroes weights in place in every call, as in many copies of PixelCNN."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            self.mask[:, :, 1, 1:] = 0
            self.mask[:, :, 2:] = 0

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data *= self.mask
            return super().forward(x)

    def model() -> nn.Module:
        return nn.Sequential(Masked(1, 6, 3, padding=1), nn.ReLU(), Masked(6, 6, 3, padding=1), nn.Conv2d(6, 4, 1))

    def loss(model: Any, batch: Tensor) -> Tensor:
        levels = (batch.sigmoid() * 3.99).long()
        return F.cross_entropy(model(batch), levels[:, 0])

    return Network(model=model, data=lambda n, g: randn(g, n, 1, 5, 5), loss=loss)


@SCRIPTS.add
def weights_normalised_by_calls() -> Network:
    class Unit(nn.Module):
        """Sets its weight to rows of length one before it uses it."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.ones(outputs))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.weight.copy_(F.normalize(self.weight, dim=1))
            return F.linear(x, F.normalize(self.weight, dim=1)) * self.scale

    return Network(
        model=lambda: nn.Sequential(Unit(6, 8), nn.SiLU(), Unit(8, 3)), data=rows_and_classes(6), loss=classify
    )


# Preferences and reinforcement learning


class _Language(nn.Module):
    """A small language model."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens))[0])


def _logps(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    logs = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return logs * mask[:, 1:]


@SCRIPTS.add
def direct_preferences_with_reference() -> Network:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = _Language()
            self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.policy(tokens)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        both = torch.cat([batch["chosen"], batch["rejected"]])
        masks = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])
        good, bad = _logps(model, both, masks).sum(1).chunk(2)
        with torch.no_grad():
            good_before, bad_before = _logps(model.reference, both, masks).sum(1).chunk(2)
        return -F.logsigmoid(0.5 * ((good - good_before) - (bad - bad_before))).mean()

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        lengths = randint(g, 4, rows, 1) + 2
        mask = torch.arange(6)[None] < lengths
        return {
            "chosen": randint(g, 11, rows, 6),
            "rejected": randint(g, 11, rows, 6),
            "chosen_mask": mask,
            "rejected_mask": mask.flip(0),
        }

    return Network(model=Pair, data=data, loss=loss)


@SCRIPTS.add
def relative_advantages_of_groups() -> Network:
    """Each row is a prompt with several answers; tokens are averaged over the whole batch."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        tokens, mask = batch["tokens"].flatten(0, 1), batch["mask"].flatten(0, 1)
        rewards = batch["rewards"]
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        logs = _logps(model, tokens, mask)
        ratio = (logs - batch["before"].flatten(0, 1)).exp()
        clipped = ratio.clamp(0.8, 1.2)
        each = -torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None]) * mask[:, 1:]
        return mh.mean(each.sum(), mask[:, 1:].sum())

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {
            "tokens": randint(g, 11, rows, 3, 6),
            "mask": (torch.rand(rows, 3, 6, generator=g) > 0.3).float(),
            "rewards": randn(g, rows, 3),
            "before": -2 + 0.1 * randn(g, rows, 3, 5),
        }

    return Network(model=_Language, data=data, loss=loss)


@SCRIPTS.add
def penalty_adapts_to_divergence() -> Network:
    class Penalised:
        """A loss whose weight of the divergence is raised and lowered by the divergence of each batch."""

        def __init__(self) -> None:
            self.weight = 0.2

        def __call__(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            logs = model(batch[0]).log_softmax(-1)
            divergence = (logs.exp() * (logs + math.log(3))).sum(1).mean()
            value = F.nll_loss(logs, batch[1]) + self.weight * divergence
            self.weight *= 1.5 if divergence.item() > 0.05 else 1 / 1.5
            return value

    penalised = Penalised()

    def data(rows: int, g: Generator) -> Any:
        # Every task starts with the first weight.
        penalised.weight = 0.2
        return rows_and_classes(6)(rows, g)

    return Network(model=_mlp, data=data, loss=penalised)


@SCRIPTS.add
def rewards_normalised_by_running_moments() -> Network:
    class Rewards(nn.Module):
        """Divides targets by moments of all rewards so far, which are merged batch by batch."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(6, 8, 1)
            self.register_buffer("count", torch.tensor(1e-4))
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("var", torch.ones(()))

        def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    mean, var, count = rewards.mean(), rewards.var(unbiased=False), len(rewards)
                    delta, total = mean - self.mean, self.count + count
                    both = self.var * self.count + var * count + delta.square() * self.count * count / total
                    self.mean += delta * count / total
                    self.var.copy_(both / total)
                    self.count.copy_(total)
            target = (rewards - self.mean) / (self.var + 1e-8).sqrt()
            return F.smooth_l1_loss(self.net(x).squeeze(-1), target)

    return Network(model=Rewards, data=_two((6,), ()), loss=lambda model, batch: model(*batch))


@SCRIPTS.add
def quantiles_of_returns() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        taus = (torch.arange(5, device=batch[0].device, dtype=batch[0].dtype) + 0.5) / 5
        delta = batch[1][:, None, :] - model(batch[0])[:, :, None]
        huber = F.huber_loss(delta, torch.zeros_like(delta), reduction="none")
        return ((taus[None, :, None] - (delta.detach() < 0).to(delta.dtype)).abs() * huber).sum(1).mean()

    return Network(model=lambda: _mlp(6, 8, 5), data=_two((6,), (4,)), loss=loss)


# Sequences


class _Scan(torch.autograd.Function):
    """The scan h = a h + b with its backward pass by hand, as fused kernels have it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        h, out = torch.zeros_like(b[:, 0]), torch.empty_like(b)
        for t in range(b.shape[1]):
            h = a[:, t] * h + b[:, t]
            out[:, t] = h
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        a, out = ctx.saved_tensors
        da, db = torch.zeros_like(a), torch.zeros_like(out)
        carried = torch.zeros_like(out[:, 0])
        for t in reversed(range(out.shape[1])):
            carried = carried + gradient[:, t]
            db[:, t] = carried
            if t:
                da[:, t] = carried * out[:, t - 1]
            carried = carried * a[:, t]
        return da, db


@SCRIPTS.add
def scan_with_backward_by_hand() -> Network:
    class Mixer(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)
            self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
            self.log_decay = nn.Parameter(torch.linspace(-1, 1, width))
            self.skip, self.out = nn.Parameter(torch.ones(width)), nn.Linear(width, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            u, z, delta = self.project(self.norm(x)).chunk(3, -1)
            u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            delta = F.softplus(delta)
            h = _Scan.apply(torch.exp(-delta * self.log_decay.exp()), delta * u)
            return x + self.out((h + self.skip * u) * F.silu(z))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(11, 8), nn.ModuleList([Mixer(), Mixer()])
            self.head = nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x[:, -1])

    return Network(model=Model, data=tokens_and_classes(), loss=classify)


@SCRIPTS.add
def segments_with_memory_of_rows() -> Network:
    class Segments(nn.Module):
        """Attends to the hidden states of the segment before, which it keeps row by row."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
            self.memory: list[Tensor] = []

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            past = [m[: len(x)] for m in self.memory if len(m) >= len(x)]
            keys = torch.cat([*past, x], 1)
            self.memory = [x.detach()]
            return self.head(self.norm(x + self.attend(x, keys, keys, need_weights=False)[0]).mean(1))

    return Network(model=Segments, data=tokens_and_classes(), loss=classify)


@SCRIPTS.add
def delays_by_correlation_over_the_batch() -> Network:
    class Correlation(nn.Module):
        """In training, the delays with the highest correlation on average over the batch are used for all rows."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            spectrum = torch.fft.rfft(q, dim=1) * torch.conj(torch.fft.rfft(k, dim=1))
            correlation = torch.fft.irfft(spectrum, n=x.shape[1], dim=1).mean(2)
            if self.training:
                index = correlation.mean(0).topk(2).indices
                weights = torch.stack([correlation[:, i] for i in index], -1).softmax(-1)
                out = sum(torch.roll(v, -int(i), 1) * weights[:, n, None, None] for n, i in enumerate(index))
            else:
                out = v
            return self.head(out.mean(1) + out[:, 0])

    return Network(model=Correlation, data=rows_and_classes(6, 4), loss=classify)


@SCRIPTS.add
def keys_sampled_once_for_all_rows() -> Network:
    class Sparse(nn.Module):
        """Measures queries by randomly drawn keys, which are the same for all rows of a batch."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            drawn = torch.randint(x.shape[1], (x.shape[1], 3), device=x.device)
            sampled = torch.einsum("blc,blsc->bls", q, k[:, drawn])
            top = (sampled.max(-1).values - sampled.mean(-1)).topk(2, dim=1).indices
            chosen = q.gather(1, top[..., None].expand(-1, -1, 8))
            attended = (chosen @ k.transpose(1, 2)).softmax(-1) @ v
            out = (
                v.mean(1, keepdim=True)
                .expand(-1, x.shape[1], -1)
                .scatter(1, top[..., None].expand(-1, -1, 8), attended)
            )
            return self.head(out.tanh().mean(1))

    return Network(model=Sparse, data=rows_and_classes(6, 4), loss=classify, draws=True)


@SCRIPTS.add
def reversible_instance_norm() -> Network:
    class Forecast(nn.Module):
        """Normalises each series, keeps its statistics in attributes and applies them to the forecast."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
            self.trend, self.season = nn.Linear(8, 4), nn.Linear(8, 4)

        def normalise(self, x: Tensor, mode: str) -> Tensor:
            if mode == "norm":
                self.mean = x.mean(1, keepdim=True).detach()
                self.std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
                return (x - self.mean) / self.std * self.weight + self.bias
            return (x - self.bias) / (self.weight + 1e-10) * self.std + self.mean

        def forward(self, x: Tensor) -> Tensor:
            x = self.normalise(x, "norm")
            smooth = F.avg_pool1d(F.pad(x.transpose(1, 2), (2, 2), mode="replicate"), 5, 1)
            out = self.trend(smooth) + self.season(x.transpose(1, 2) - smooth)
            return self.normalise(out.transpose(1, 2), "denorm")

    return Network(model=Forecast, data=_two((8, 3), (4, 3)), loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))


class _Spike(torch.autograd.Function):
    """A step whose gradient is that of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = gradients[0] / (1 + 5 * x.abs()).square()
        return result


@SCRIPTS.add
def spiking_neurons_with_potentials() -> Network:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.tensor(0.8))
            self.potential: Any = None

        def reset(self) -> None:
            self.potential = None

        def forward(self, x: Tensor) -> Tensor:
            before = torch.zeros_like(x) if self.potential is None else self.potential
            now = self.decay * before + x
            spikes: Tensor = _Spike.apply(now - 0.5)
            self.potential = now - 0.5 * spikes.detach()
            return spikes

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.neurons = nn.Linear(6, 8), Leaky()
            self.second, self.last = nn.Linear(8, 3), Leaky()

        def forward(self, x: Tensor) -> Tensor:
            for module in self.modules():
                if isinstance(module, Leaky):
                    module.reset()
            counts: Any = 0
            for _ in range(4):
                counts = counts + self.last(self.second(self.neurons(self.first(x))))
            return counts + self.last.potential

    return Network(model=Spiking, data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def convolutional_lstm() -> Network:
    class Cell(nn.Module):
        """Its peepholes are made at the first call, when the size of pictures is known, and are no parameters."""

        def __init__(self, inputs: int, hidden: int) -> None:
            super().__init__()
            self.hidden = hidden
            self.gates = nn.Conv2d(inputs + hidden, 4 * hidden, 3, padding=1)
            self.peephole: Any = None

        def forward(self, x: Tensor, state: Any) -> Any:
            if self.peephole is None:
                self.peephole = x.new_zeros(1, self.hidden, *x.shape[-2:])
            if state is None:
                zeros = x.new_zeros(len(x), self.hidden, *x.shape[-2:])
                state = zeros, zeros
            h, c = state
            i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f + self.peephole * c) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o + self.peephole * c) * torch.tanh(c)
            return h, (h, c)

    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.ModuleList([Cell(1, 3), Cell(3, 3)]), nn.Conv2d(3, 1, 1)

        def forward(self, frames: Tensor) -> Tensor:
            states: list[Any] = [None] * len(self.cells)
            outs = []
            for x in frames.unbind(1):
                for n, cell in enumerate(self.cells):
                    x, states[n] = cell(x, states[n])
                outs.append(self.out(x))
            return torch.stack(outs, 1)

    return Network(
        model=Video,
        data=lambda n, g: randn(g, n, 4, 1, 4, 4),
        loss=lambda m, b: F.l1_loss(m(b[:, :-1]), b[:, 1:]),
    )


@SCRIPTS.add
def documents_packed_into_rows() -> Network:
    class Packed(nn.Module):
        """Rows hold several documents; attention sees the own document only, and masks are kept by length."""

        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(11, width), nn.Linear(width, 3 * width)
            self.out, self.head = nn.Linear(width, width), nn.Linear(width, 11, bias=False)
            self.head.weight = self.embed.weight
            self.causal: dict[int, Tensor] = {}

        def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
            length = tokens.shape[1]
            if length not in self.causal:
                self.causal[length] = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
            mask = self.causal[length] & (documents[:, :, None] == documents[:, None])
            x = self.embed(tokens)
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            return self.head(x + self.out(y.transpose(1, 2).flatten(2)))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        tokens, documents = batch
        targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], -100)
        out = model(tokens[:, :-1], documents[:, :-1])
        total = F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return mh.mean(total, (targets != -100).sum())

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randint(g, 11, rows, 7), (torch.rand(rows, 7, generator=g) > 0.7).long().cumsum(1)

    return Network(model=Packed, data=data, loss=loss)


@SCRIPTS.add
def one_block_many_times() -> Network:
    class Albert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList([block] * 3)
            self.head = nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x[:, 0])

    return Network(model=Albert, data=tokens_and_classes(), loss=classify)


# Solvers and derivatives inside


class _Adjoint(torch.autograd.Function):
    """Integrates a network and computes gradients by integrating backwards."""

    @staticmethod
    def forward(ctx: Any, net: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.net = net
        with torch.no_grad():
            for _ in range(4):
                x = x + 0.25 * net(x)
        ctx.save_for_backward(x, *weights)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        adjoint = gradients[0]
        sums = [torch.zeros_like(w) for w in weights]
        for _ in range(4):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                speed = ctx.net(at)
                dx, *dw = torch.autograd.grad(speed, (at, *ctx.net.parameters()), adjoint)
            x = x - 0.25 * speed.detach()
            adjoint = adjoint + 0.25 * dx
            sums = [s + 0.25 * d for s, d in zip(sums, dw, strict=True)]
        return None, adjoint, *sums


@SCRIPTS.add
def adjoint_of_an_equation() -> Network:
    class Equation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.speed, self.head = _mlp(6, 8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(_Adjoint.apply(self.speed, x, *self.speed.parameters()))

    return Network(model=Equation, data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def step_sizes_by_the_error_of_the_batch() -> Network:
    class Adaptive(nn.Module):
        """Halves the step while the error, a root mean square over the batch, is too large."""

        def __init__(self) -> None:
            super().__init__()
            self.speed, self.head = _mlp(6, 8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            t, step = 0.0, 0.5
            while t < 1:
                step = min(step, 1 - t)
                first = self.speed(x)
                second = self.speed(x + step * first)
                error = float((step * (second - first).detach() / 2).square().mean().sqrt())
                if error > 0.05 and step > 0.05:
                    step = step * max(0.3, 0.9 * math.sqrt(0.05 / error))
                    continue
                x, t = x + step * (first + second) / 2, t + step
                step = step * min(2.0, 0.9 * math.sqrt(0.05 / max(error, 1e-6)))
            return self.head(x)

    return Network(model=Adaptive, data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def fixed_point_until_the_batch_converges() -> Network:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.cell, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            u, z = self.inputs(x), x.new_zeros(len(x), 8)
            with torch.no_grad():
                for _ in range(30):
                    after = torch.tanh(0.8 * self.cell(z) + u)
                    if (after - z).norm() < 1e-2 * after.norm():
                        break
                    z = after
            return self.head(torch.tanh(0.8 * self.cell(z) + u))

    return Network(model=Equilibrium, data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def inner_loop_of_each_row() -> Network:
    """Each row is a task; its inner loop runs by torch.func under vmap, with learned rates."""

    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(2, 6, 1)
            self.rates = nn.ParameterDict(
                {name.replace(".", "_"): torch.full((), 0.1) for name, _ in self.net.named_parameters()}
            )

        def forward(self, x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
            first = dict(self.net.named_parameters())

            def error(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
                return F.mse_loss(functional_call(self.net, weights, (x,)), y)

            def one(x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
                weights = first
                for _ in range(2):
                    gradients = grad(error)(weights, x, y)
                    weights = {n: w - self.rates[n.replace(".", "_")] * gradients[n] for n, w in weights.items()}
                return error(weights, qx, qy)

            return vmap(one)(x, y, qx, qy)

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        return randn(g, rows, 4, 2), randn(g, rows, 4, 1), randn(g, rows, 3, 2), randn(g, rows, 3, 1)

    return Network(model=Meta, data=data, loss=lambda m, b: m(*b).mean())


@SCRIPTS.add
def norms_of_gradients_of_each_row() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = dict(model.named_parameters())

        def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

        each = vmap(grad(one), (None, 0, 0))(weights, *batch)
        norms = sum(g.flatten(1).square().sum(1) for g in each.values())
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * norms.mean()

    return Network(model=_mlp, data=rows_and_classes(6), loss=loss)


@SCRIPTS.add
def marginal_likelihood_of_a_process() -> Network:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.noise = _mlp(6, 8, 2), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            f = self.features(x)
            k = torch.exp(-torch.cdist(f, f).square() / 2) + F.softplus(self.noise) * torch.eye(len(x), dtype=x.dtype)
            root = torch.linalg.cholesky(k)
            alpha = torch.cholesky_solve(y[:, None], root)
            return (0.5 * (y[:, None] * alpha).sum() + root.diagonal().log().sum()) / len(x)

    return Network(model=Kernel, data=_two((6,), ()), loss=lambda m, b: m(*b))


# Quantization, adapters and weights made of others


@SCRIPTS.add
def observer_frozen_after_calls() -> Network:
    class Fake(nn.Module):
        """Fake quantization whose range follows the activations for two calls and is fixed then."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.zeros(()))
            self.register_buffer("high", torch.zeros(()))
            self.register_buffer("observing", torch.ones((), dtype=torch.bool))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training and bool(self.observing):
                with torch.no_grad():
                    self.low.copy_(torch.minimum(self.low, x.amin()))
                    self.high.copy_(torch.maximum(self.high, x.amax()))
                self.calls += 1
                self.observing.fill_(self.calls < 2)
            scale = (self.high - self.low) / 63
            levels = ((x - self.low) / scale).round().clamp(0, 63)
            return x + (levels * scale + self.low - x).detach()

    return Network(
        model=lambda: nn.Sequential(nn.Linear(6, 8), Fake(), nn.ReLU(), nn.Linear(8, 3), Fake()),
        data=rows_and_classes(6),
        loss=classify,
    )


@SCRIPTS.add
def weights_of_signs() -> Network:
    class Binary(nn.Linear):
        """Uses signs of its weights; the weights themselves are clamped after each update by a hook."""

        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.abs().mean(1, keepdim=True).detach()
            signs = self.weight + (torch.sign(self.weight) * scale - self.weight).detach()
            return F.linear(x, signs, self.bias)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        @torch.no_grad()
        def clamp(*_: Any) -> None:
            for module in model.modules():
                if isinstance(module, Binary):
                    module.weight.clamp_(-0.3, 0.3)

        inner.register_step_post_hook(clamp)
        return inner

    return Network(
        model=lambda: nn.Sequential(Binary(6, 8), nn.BatchNorm1d(8), nn.Hardtanh(), Binary(8, 3)),
        data=rows_and_classes(6),
        loss=classify,
        optimizer=optimizer,
    )


@SCRIPTS.add
def adapters_share_random_matrices() -> Network:
    class Shared(nn.Module):
        """Scales random matrices that all layers share (a parametrization); weights below it are frozen."""

        def __init__(self, a: Tensor, b: Tensor, inputs: int, outputs: int) -> None:
            super().__init__()
            self.register_buffer("a", a, persistent=False)
            self.register_buffer("b", b, persistent=False)
            self.size = outputs, inputs
            self.d, self.e = nn.Parameter(torch.full((4,), 0.1)), nn.Parameter(torch.ones(outputs))

        def forward(self, weight: Tensor) -> Tensor:
            outputs, inputs = self.size
            return weight + self.e[:, None] * (self.b[:outputs] @ (self.d[:, None] * self.a[:, :inputs]))

    def model() -> nn.Module:
        net = _mlp()
        a, b = torch.randn(4, 8), torch.randn(8, 4)
        for layer in (net[0], net[2]):
            layer.weight.requires_grad_(False)
            parametrize.register_parametrization(layer, "weight", Shared(a, b, layer.in_features, layer.out_features))
        return net

    return Network(
        model=model,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
    )


@SCRIPTS.add
def spectral_norm_with_averaged_copy() -> Network:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                parametrizations.spectral_norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), nn.Linear(8, 3)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = Critic()
            self.average = AveragedModel(self.critic, avg_fn=lambda a, b, n: 0.8 * a + 0.2 * b, use_buffers=True)
            self.average.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.critic(x)

    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.critic.parameters(), lr=0.05, momentum=0.9)
        inner.register_step_post_hook(lambda *_: model.average.update_parameters(model.critic))
        return inner

    return Network(model=Averaged, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@SCRIPTS.add
def convolutions_mixed_for_each_row() -> Network:
    class Conditional(nn.Module):
        """Mixes kernels by row and folds the batch into groups of one convolution."""

        def __init__(self, inputs: int, outputs: int, kernels: int = 3) -> None:
            super().__init__()
            self.route = nn.Linear(inputs, kernels)
            self.weight = nn.Parameter(0.3 * torch.randn(kernels, outputs, inputs, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            shares = self.route(x.mean((2, 3))).sigmoid()
            weight = torch.einsum("bk,koihw->boihw", shares, self.weight)
            b, c, h, w = x.shape
            out = F.conv2d(x.reshape(1, b * c, h, w), weight.flatten(0, 1), padding=1, groups=b)
            return out.view(b, -1, h, w)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = Conditional(3, 4), nn.GroupNorm(2, 4), Conditional(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x)).relu()
            return self.head(self.second(x).mean((2, 3)))

    return Network(model=Model, data=rows_and_classes(3, 5, 5), loss=classify)


@SCRIPTS.add
def deformed_sampling() -> Network:
    class Deformed(nn.Module):
        """Samples pictures at learned offsets and standardizes the weights of its convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.offset, self.conv = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)
            self.norm, self.head = nn.GroupNorm(3, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            n, _, h, w = x.shape
            eye = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(n, 2, 3)
            grid = F.affine_grid(eye, [n, 1, h, w], align_corners=False)
            moved = F.grid_sample(x, grid + 0.3 * self.offset(x).tanh().permute(0, 2, 3, 1), align_corners=False)
            weight = self.conv.weight
            mean = weight.mean((1, 2, 3), keepdim=True)
            std = (weight.flatten(1).var(1) + 1e-6).sqrt().view(-1, 1, 1, 1)
            return self.head(self.norm(F.conv2d(moved, (weight - mean) / std, self.conv.bias, padding=1)).mean((2, 3)))

    return Network(model=Deformed, data=rows_and_classes(3, 5, 5), loss=classify)


# Noise


class _Shake(torch.autograd.Function):
    """Mixes two branches by random shares, and their gradients by other ones."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        share = torch.rand(len(a), 1, device=a.device, dtype=a.dtype)
        return share * a + (1 - share) * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        share = torch.rand(len(g), 1, device=g.device, dtype=g.dtype)
        return share * g, (1 - share) * g


@SCRIPTS.add
def other_noise_in_backward() -> Network:
    class Shaken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = _mlp(6, 8, 6), _mlp(6, 8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + _Shake.apply(self.left(x), self.right(x)))

    return Network(model=Shaken, data=rows_and_classes(6), loss=classify, draws=True)


@SCRIPTS.add
def mixup_at_a_random_layer() -> Network:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)])

        def forward(self, x: Tensor, share: float, order: Tensor, at: int) -> Tensor:
            for number, layer in enumerate(self.layers):
                if number == at:
                    x = share * x + (1 - share) * x[order]
                x = layer(x) if number == 2 else layer(x).relu()
            return x

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        share, at = float(torch.rand(())), random.randrange(3)
        order = torch.randperm(len(x))
        out = model(x, share, order, at)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return Network(model=Mixed, data=rows_and_classes(6), loss=loss, draws=True)


@SCRIPTS.add
def attacked_rows_with_their_own_norm() -> Network:
    class Twice(nn.Module):
        """Batch statistics of attacked rows are kept apart from those of clean ones."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.norms = nn.ModuleDict({"clean": nn.BatchNorm1d(8), "attacked": nn.BatchNorm1d(8)})

        def forward(self, x: Tensor, kind: str) -> Tensor:
            return self.head(self.norms[kind](self.first(x)).relu())

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        attacked = x.clone()
        for _ in range(2):
            attacked.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(attacked, "attacked"), y, reduction="sum"), attacked)
            attacked = (attacked + 0.05 * slope.sign()).detach()
        return F.cross_entropy(model(x, "clean"), y) + F.cross_entropy(model(attacked, "attacked"), y)

    return Network(model=Twice, data=rows_and_classes(6), loss=loss)


@SCRIPTS.add
def checkpoint_with_noise_and_keywords() -> Network:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]), nn.Linear(6, 3)

        def part(self, x: Tensor, *, layer: Any, scale: float) -> Tensor:
            return x + F.dropout(layer(x).relu(), 0.3, self.training) * scale

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = checkpoint(self.part, x, use_reentrant=False, layer=layer, scale=1 / (number + 1))
            return self.head(x)

    return Network(model=Noisy, data=rows_and_classes(6), loss=classify, draws=True)


# Memories of samples


@SCRIPTS.add
def targets_remembered_by_sample() -> Network:
    class Remembering(nn.Module):
        """Keeps a moving average of each sample's predictions, by the sample's number in the data."""

        def __init__(self, rows: int = 17) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("targets", torch.zeros(rows, 3))

        def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            out = self.net(x)
            p = out.softmax(1).detach()
            self.targets[index] = 0.7 * self.targets[index] + 0.3 * p / p.sum(1, keepdim=True)
            return out, self.targets[index]

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, index = batch
        out, targets = model(x, index)
        p = out.softmax(1).clamp(1e-4, 1 - 1e-4)
        return F.cross_entropy(out, y) + (1 - (targets * p).sum(1)).log().mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        return randn(g, rows, 6), randint(g, 3, rows), torch.arange(rows)

    return Network(model=Remembering, data=data, loss=loss)


@SCRIPTS.add
def bank_of_instances() -> Network:
    class Bank(nn.Module):
        """Compares rows with features of all samples, which the loss writes after it has read them."""

        def __init__(self, rows: int = 17) -> None:
            super().__init__()
            self.net = _mlp(6, 8, 4)
            self.register_buffer("bank", F.normalize(torch.randn(rows, 4), dim=1))

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.net(x), dim=1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, index = batch
        features = model(x)
        value = F.cross_entropy(features @ model.bank.clone().T / 0.2, index)
        with torch.no_grad():
            model.bank.index_copy_(0, index, F.normalize(0.5 * model.bank[index] + 0.5 * features, dim=1))
        return value

    return Network(model=Bank, data=lambda n, g: (randn(g, n, 6), torch.arange(n)), loss=loss)


@SCRIPTS.add
def prior_of_counted_labels() -> Network:
    class Adjusted(nn.Module):
        """Adds the logarithm of how often each class was seen so far."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()
            self.register_buffer("counts", torch.ones(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.training:
                self.counts += torch.bincount(y, minlength=3).to(self.counts.dtype)
            return self.net(x) + (self.counts / self.counts.sum()).log()

    return Network(model=Adjusted, data=rows_and_classes(6), loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[1]))


@SCRIPTS.add
def prototypes_of_classes_seen() -> Network:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(6, 8, 4)
            self.register_buffer("prototypes", torch.zeros(3, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            features = self.net(x)
            distance = torch.cdist(features, self.prototypes.clone())
            with torch.no_grad():
                for label in y.unique():
                    self.prototypes[label] = 0.9 * self.prototypes[label] + 0.1 * features[y == label].mean(0)
            return -distance

    return Network(model=Prototypes, data=rows_and_classes(6), loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[1]))


@SCRIPTS.add
def loss_divided_by_its_running_mean() -> Network:
    scales: dict[str, float] = {}

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        parts = {"fit": F.cross_entropy(out, batch[1]), "size": out.square().mean()}
        for name, part in parts.items():
            scales[name] = 0.5 * scales.get(name, float(part.detach())) + 0.5 * float(part.detach())
        return parts["fit"] / scales["fit"] + parts["size"] / scales["size"]

    def data(rows: int, g: Generator) -> Any:
        # Every task starts without scales.
        scales.clear()
        return rows_and_classes(6)(rows, g)

    return Network(model=_mlp, data=data, loss=loss)


# Losses and batches


@SCRIPTS.add
def smoothed_weighted_and_ignored() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 0.5], dtype=batch[0].dtype)
        return F.cross_entropy(model(batch[0]), batch[1], weight, ignore_index=-1, label_smoothing=0.1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 4, rows) - 1

    return Network(model=_mlp, data=data, loss=loss)


@SCRIPTS.add
def weights_of_samples_counted() -> Network:
    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return mh.mean((each * batch["w"]).sum(), batch["w"].sum())

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {"x": randn(g, rows, 6), "y": randint(g, 3, rows), "w": torch.rand(rows, generator=g).double()}

    return Network(model=_mlp, data=data, loss=loss)


@SCRIPTS.add
def weights_of_samples_divided() -> Network:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (each * batch["w"]).sum() / batch["w"].sum()

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {"x": randn(g, rows, 6), "y": randint(g, 3, rows), "w": torch.rand(rows, generator=g)}

    return Network(model=_mlp, data=data, loss=loss)


@SCRIPTS.add
def mean_of_known_targets() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        known = ~batch[1].isnan()
        return (model(batch[0]).squeeze(-1)[known] - batch[1][known]).square().mean()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        y = randn(g, rows)
        y[torch.rand(rows, generator=g) < 0.3] = math.nan
        return randn(g, rows, 6), y

    return Network(model=lambda: _mlp(6, 8, 1), data=data, loss=loss)


@SCRIPTS.add
def sum_divided_by_a_constant() -> Network:
    return Network(
        model=_mlp,
        data=rows_and_classes(6),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / 6,
    )


@SCRIPTS.add
def scaled_by_the_batch_size() -> Network:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) / math.sqrt(x.size(0))

    return Network(model=Scaled, data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def sigmoid_of_all_pairs() -> Network:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = _mlp(6, 8, 4), _mlp(5, 8, 4)
            self.scale, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-2.0))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
            return a @ b.T * self.scale.exp() + self.bias

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(*batch)
        return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)

    return Network(model=Towers, data=_two((6,), (5,)), loss=loss)


@SCRIPTS.add
def lovasz_of_each_picture() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, labels = model(batch[0]).flatten(1), (batch[1] > 0).to(batch[0].dtype).flatten(1)
        values = []
        for one, truth in zip(logits, labels, strict=True):
            errors, order = (1 - one * (2 * truth - 1)).sort(descending=True)
            truth = truth[order]
            left = truth.sum() - truth.cumsum(0)
            union = truth.sum() + (1 - truth).cumsum(0)
            jaccard = 1 - left / union
            jaccard = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
            values.append(F.relu(errors) @ jaccard)
        return torch.stack(values).mean()

    return Network(
        model=lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1)),
        data=_two((1, 4, 4), (1, 4, 4)),
        loss=loss,
    )


@SCRIPTS.add
def experts_choose_rows() -> Network:
    class Choice(nn.Module):
        """Each expert takes the rows of the batch that score highest for it."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList([_mlp(6, 8, 6) for _ in range(3)])
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).softmax(-1)
            out = x
            for number, expert in enumerate(self.experts):
                shares, rows = scores[:, number].topk(max(1, len(x) // 3))
                out = out.index_add(0, rows, shares[:, None] * expert(x[rows]))
            return self.head(out)

    return Network(model=Choice, data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def layers_by_language_of_rows() -> Network:
    class Languages(nn.Module):
        """Nested dictionaries of modules; only those of the languages in the batch are called."""

        def __init__(self) -> None:
            super().__init__()
            names = ("de", "fr", "ja")
            self.inputs = nn.ModuleDict(
                {n: nn.ModuleDict({"norm": nn.LayerNorm(6), "up": nn.Linear(6, 8)}) for n in names}
            )
            self.shared, self.names = nn.Linear(8, 8), names
            self.outputs = nn.ModuleDict({n: nn.Linear(8, 3) for n in names})

        def forward(self, x: Tensor, language: Tensor) -> Tensor:
            out = x.new_zeros(len(x), 3)
            for number in language.unique().tolist():
                name = self.names[number]
                rows = (language == number).nonzero().squeeze(1)
                part = self.inputs[name]
                hidden = self.shared(part["up"](part["norm"](x[rows])).relu())
                out = out.index_copy(0, rows, self.outputs[name](hidden).to(out.dtype))
            return out

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 3, rows), (torch.arange(rows) // 4) % 3

    return Network(model=Languages, data=data, loss=lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1]))


@SCRIPTS.add
def small_integers_and_masks() -> Network:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.scale = nn.Embedding(11, 8), nn.Linear(3, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, tokens: Tensor, mask: Tensor, levels: Tensor) -> Tensor:
            x = self.embed(tokens.int()).masked_fill(~mask[..., None], 0.0)
            x = x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            return self.head((x + self.scale(levels.to(x.dtype) / 127)).relu())

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {
            "tokens": randint(g, 11, rows, 5).to(torch.uint8),
            "mask": torch.rand(rows, 5, generator=g) > 0.4,
            "levels": (randint(g, 255, rows, 3) - 127).to(torch.int8),
            "label": randint(g, 3, rows).to(torch.int16),
        }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["tokens"], batch["mask"], batch["levels"]), batch["label"].long())

    return Network(model=Typed, data=data, loss=loss)


_Item = namedtuple("_Item", ["features", "meta", "label"])


@SCRIPTS.add
def named_tuples_with_text_and_none() -> Network:
    """Batches hold tensors between strings, numbers and None; the network returns None beside its logits."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.bonus = _mlp(), nn.ParameterDict({"web": torch.zeros(3), "book": torch.zeros(3)})

        def forward(self, item: Any) -> Any:
            logits = self.net(item.features)
            logits = logits + torch.stack([self.bonus[source] for source in item.meta["source"]])
            return {"logits": logits, "attention": None, "hidden": (None, logits.detach())}

    def collate(samples: list[Any]) -> Any:
        return _Item(
            torch.stack([s[0] for s in samples]),
            {"source": [s[2] for s in samples], "version": 3, "weights": None},
            torch.tensor([s[1] for s in samples]),
        )

    def data(rows: int, g: Generator) -> Any:
        x, y = randn(g, rows, 6), randint(g, 3, rows)
        return Samples([(x[i], int(y[i]), "web" if i % 3 else "book") for i in range(rows)])

    return Network(
        model=Model,
        data=data,
        collate=collate,
        loss=lambda m, b: F.cross_entropy(m(b)["logits"], b.label),
    )


@SCRIPTS.add
def lists_of_lengths() -> Network:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, series: list[Tensor]) -> list[Tensor]:
            padded = pad_sequence(series, batch_first=True)
            out = self.head(self.cell(padded)[0])
            return [one[: len(s)] for one, s in zip(out, series, strict=True)]

    def collate(samples: list[Any]) -> Any:
        return [s[0] for s in samples], [s[1] for s in samples]

    def data(rows: int, g: Generator) -> Any:
        lengths = (randint(g, 5, rows) + 2).tolist()
        return Samples([(randn(g, n, 4), randint(g, 3, n)) for n in lengths])

    def loss(model: Any, batch: Any) -> Any:
        series, labels = batch
        outs = model(series)
        total = sum(F.cross_entropy(o, y, reduction="sum") for o, y in zip(outs, labels, strict=True))
        return mh.mean(total, sum(len(y) for y in labels))

    return Network(model=Lists, data=data, collate=collate, loss=loss)


class _Picture(Tensor):
    """A tensor subclass, as libraries use them for pictures."""


@SCRIPTS.add
def pictures_of_a_subclass() -> Network:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.as_subclass(_Picture)).flatten(1))

    return Network(model=Net, data=rows_and_classes(3, 5, 5), loss=classify)


@SCRIPTS.add
def wrapped_by_data_parallel() -> Network:
    return Network(model=lambda: nn.DataParallel(_mlp()), data=rows_and_classes(6), loss=classify)


@SCRIPTS.add
def frozen_body_whose_statistics_move() -> Network:
    class Transfer(nn.Module):
        """Weights of the body are frozen, but its batch statistics are still updated."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0))
            self.head = nn.Linear(8, 3)
            for parameter in self.body.parameters():
                parameter.requires_grad = False

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.body(x)
            return self.head(features)

    return Network(
        model=Transfer,
        data=rows_and_classes(6),
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(filter(lambda p: p.requires_grad, m.parameters()), lr=0.05, momentum=0.9),
    )


# Optimizers


class _Cautious(torch.optim.Optimizer):
    """Adam that keeps the parts of its update that agree with the gradient, and scales them up by their share."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"], state["t"] = torch.zeros_like(p), torch.zeros_like(p), 0
                state["t"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.05)
                update = state["m"] / (state["v"].sqrt() + 1e-3)
                mask = (update * p.grad > 0).to(p.dtype)
                p.add_(update * mask / mask.mean().clamp(min=1e-3), alpha=-group["lr"])


@SCRIPTS.add
def cautious_adam() -> Network:
    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: _Cautious(m.parameters(), lr=0.02)
    )


@SCRIPTS.add
def one_moment_for_each_row_of_weights() -> Network:
    class Mini(torch.optim.Optimizer):
        """Adam with one second moment for each output, or for a whole vector."""

        def __init__(self, named: Any, lr: float) -> None:
            super().__init__([{"params": [p], "name": name} for name, p in named], {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                (p,) = group["params"]
                state = self.state[p]
                size = p.grad.square()
                size = size.mean(1, keepdim=True) if group["name"].endswith("weight") else size.mean()
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(size)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(size, 0.1)
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-3, value=-group["lr"])

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Mini(m.named_parameters(), lr=0.02)
    )


@SCRIPTS.add
def gradients_projected_to_low_rank() -> Network:
    class Low(torch.optim.Adam):
        """Keeps Adam's moments in the space of the largest singular vectors, which change every second step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state, g = self.state[p], p.grad
                    if g is None:
                        continue
                    state["n"] = state.get("n", 0) + 1
                    if g.ndim == 2:
                        if state["n"] % 2 == 1:
                            u = torch.linalg.svd(g, full_matrices=False).U[:, :2]
                            state["u"] = u * torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
                        g = state["u"].T @ g
                    if "m" not in state:
                        state["m"], state["v"] = torch.zeros_like(g), torch.zeros_like(g)
                    state["m"].lerp_(g, 0.1)
                    state["v"].lerp_(g.square(), 0.1)
                    update = state["m"] / (state["v"].sqrt() + 1e-3)
                    p.sub_(group["lr"] * (state["u"] @ update if p.ndim == 2 else update))

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Low(m.parameters(), lr=0.02)
    )


@SCRIPTS.add
def slow_gradients_amplified_before_steps() -> Network:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        slow: dict[Any, Tensor] = {}

        @torch.no_grad()
        def amplify(*_: Any) -> None:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    before = slow.get(name)
                    slow[name] = p.grad.clone() if before is None else 0.8 * before + 0.2 * p.grad
                    p.grad.add_(slow[name], alpha=2.0)

        inner.register_step_pre_hook(amplify)
        return inner

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@SCRIPTS.add
def groups_added_while_training() -> Network:
    """The body joins the optimizer after the first step."""

    def optimizer(model: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9)

        def unfreeze(optimizer: Any, *_: Any) -> None:
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})

        inner.register_step_post_hook(unfreeze)
        return inner

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@SCRIPTS.add
def optimistic_updates() -> Network:
    class Optimistic(torch.optim.SGD):
        """Extrapolates by the gradient of the step before."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        now = p.grad.clone()
                        p.grad.mul_(2).sub_(self.state[p].get("before", now))
                        self.state[p]["before"] = now
            return super().step(closure)

    return Network(
        model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=lambda m: Optimistic(m.parameters(), lr=0.05)
    )


@SCRIPTS.add
def decay_by_names_and_norm_of_all() -> Network:
    class Normed(torch.optim.AdamW):
        """Divides all gradients by their common norm, then by the largest norm so far."""

        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            self.largest = torch.maximum(getattr(self, "largest", norm), norm)
            torch._foreach_div_(gradients, self.largest)
            return super().step(closure)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and not n.endswith("bias")]
        others = [p for n, p in model.named_parameters() if p.ndim <= 1 or n.endswith("bias")]
        return Normed(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02, eps=1e-3
        )

    return Network(model=_mlp, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@SCRIPTS.add
def squares_of_half_inputs() -> Network:
    class Half(nn.Module):
        """Stores its table in half precision and computes in the precision of its layers."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(11, 6).half())
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(F.embedding(x, self.table).to(self.net[0].weight.dtype).sum(1))

    return Network(model=Half, data=lambda n, g: (randint(g, 11, n, 4),), loss=mean_square, precision="fp32")
