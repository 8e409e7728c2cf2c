"""Classic PyTorch networks and layers for the loader's allow-list, each as small as it can be."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .zoo import Entry, Inputs

Call = Callable[..., Any]


def classics() -> list[Entry]:
    """Return classic networks, every layer of torch.nn that inference uses, and functions of tensors by kind."""
    return [*_networks(), *_layers(), *_functions()]


def _entry(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], Inputs], predict: Call | None = None
) -> Entry:
    return Entry(name, make, inputs, predict or (lambda model, *given: _first(model(*given))))


def _first(answer: Any) -> Tensor:
    return answer if isinstance(answer, Tensor) else _first(answer[0])


def x(*shape: int) -> Callable[[], Inputs]:
    return lambda: {"x": torch.randn(2, *shape)}


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm(self.one(x)))
        out = self.norm(self.two(out))
        out += x
        return self.relu(out)


class UNet(nn.Module):
    """Two levels with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu_(self.down(x))
        inner = F.relu_(self.mid(F.max_pool2d(skip, 2)))
        up = F.interpolate(self.up(inner), size=skip.shape[-2:], mode="bilinear", align_corners=False)
        return torch.sigmoid(self.out(torch.cat([up, skip], 1)))


class Mixer(nn.Module):
    """A block of MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(4, 4), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + F.gelu(self.channels(self.norm(x)))


class SqueezeExcite(nn.Module):
    """Channel attention of EfficientNet, with depthwise convolutions and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.squeeze, self.excite = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.depthwise(x), inplace=True)
        return F.hardswish(x * F.hardsigmoid(self.excite(F.relu6(self.squeeze(x.mean((2, 3), keepdim=True))))))


class Recommender(nn.Module):
    """Embedding bags and interactions, as of DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, mode="sum")
        self.table, self.linear = nn.Embedding(20, 4, padding_idx=0), nn.Linear(4, 4)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        parts = torch.stack([self.bag(ids), self.table(ids).mean(1), self.linear(dense)], 1)
        product = torch.bmm(parts, parts.transpose(1, 2))
        row, column = torch.tril_indices(3, 3, offset=-1)
        return torch.cat([dense, product[:, row, column]], 1)


class GraphConvolution(nn.Module):
    """Messages along edges, summed by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("source", torch.tensor([0, 1, 2, 0]))
        self.register_buffer("target", torch.tensor([1, 2, 0, 2]))

    def forward(self, x: Tensor) -> Tensor:
        messages = self.linear(x).index_select(1, self.source)
        return torch.zeros_like(x).index_add(1, self.target, messages)


class Decoder(nn.Module):
    """A causal attention block with rotary embeddings and grouped queries, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, 4, 4).transpose(1, 2)
        k, v = (part(x).view(rows, length, 2, 4).transpose(1, 2) for part in (self.k, self.v))
        angle = torch.outer(torch.arange(length, device=x.device).float(), 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], 2, 2)) * turn).flatten(3) for t in (q, k)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.mT / 2).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, 16)


class Flow(nn.Module):
    """A coupling layer with inverse and log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        scale, shift = self.net(a).split(2, -1)
        y = torch.cat([a, b * scale.exp() + shift], -1)
        return torch.cat([y, scale.sum(-1, keepdim=True)], -1)


class VAE(nn.Module):
    """Encodes, takes the mean, decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.encode(x).chunk(2, 1)
        return torch.sigmoid(self.decode(mean + 0 * torch.exp(0.5 * logvar)))


class Detector(nn.Module):
    """Anchors, boxes and the best of them, without a loop over results."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, _, height, width = x.shape
        grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1).float()
        out = self.head(x).permute(0, 2, 3, 1).reshape(rows, -1, 5)
        boxes = torch.cat([out[..., :2].sigmoid() + grid.view(1, -1, 2), out[..., 2:4].exp().clamp(max=100.0)], -1)
        scores, best = out[..., 4].topk(3, 1)
        return torch.cat([boxes.gather(1, best[..., None].expand(-1, -1, 4)), scores[..., None]], -1)


def _networks() -> list[Entry]:
    def bag() -> Inputs:
        return {"ids": torch.randint(0, 20, (2, 5)), "dense": torch.randn(2, 4)}

    encoder = nn.TransformerEncoderLayer
    return [
        _entry("mlp", lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)), x(4)),
        _entry("cnn", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten()), x(3, 8, 8)),
        _entry("resnet_classic", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Residual(4), nn.AdaptiveAvgPool2d(1)), x(3, 8, 8)),
        _entry("unet", UNet, x(3, 8, 8)),
        _entry("mixer", Mixer, x(4, 8)),
        _entry("squeeze_excite", SqueezeExcite, x(4, 8, 8)),
        _entry("recommender", Recommender, bag),
        _entry("graph", GraphConvolution, x(3, 4)),
        _entry("decoder", Decoder, x(6, 16)),
        _entry("flow", Flow, x(4)),
        _entry("vae", VAE, x(6)),
        _entry("detector", Detector, x(3, 4, 4)),
        _entry("transformer_encoder", lambda: nn.TransformerEncoder(encoder(8, 2, 16, batch_first=True), 1), x(5, 8)),
        _entry(
            "transformer", lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
            lambda: {"x": torch.randn(2, 5, 8), "y": torch.randn(2, 4, 8)},
        ),
        _entry("lstm", lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), x(6, 4)),
        _entry("lstm_projection", lambda: nn.LSTM(4, 5, proj_size=3, batch_first=True), x(6, 4)),
        _entry("gru", lambda: nn.GRU(4, 5, batch_first=True), x(6, 4)),
        _entry("rnn", lambda: nn.RNN(4, 5, batch_first=True), x(6, 4)),
        _entry("rnn_relu", lambda: nn.RNN(4, 5, batch_first=True, nonlinearity="relu"), x(6, 4)),
        _entry("lstm_cell", lambda: nn.LSTMCell(4, 5), x(4)),
        _entry("gru_cell", lambda: nn.GRUCell(4, 5), x(4)),
        _entry("rnn_cell", lambda: nn.RNNCell(4, 5), x(4)),
        _entry("attention", lambda: nn.MultiheadAttention(8, 2, batch_first=True), x(5, 8), lambda m, x: m(x, x, x)[0]),
        _entry(
            "attention_unweighted", lambda: nn.MultiheadAttention(8, 2, batch_first=True), x(5, 8),
            lambda m, x: m(x, x, x, need_weights=False)[0],
        ),
    ]  # fmt: skip


PLAIN_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (getattr(nn, name), (4, 6)) for name in ["ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU", "ReLU", "ReLU6", "RReLU", "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout", "Flatten"]},
    "Threshold": (lambda: nn.Threshold(0.1, 20), (4,)),
    "GLU": (nn.GLU, (4, 6)),
    "GELUTanh": (lambda: nn.GELU("tanh"), (4,)),
    "Softmin": (lambda: nn.Softmin(-1), (4,)),
    "Softmax": (lambda: nn.Softmax(-1), (4,)),
    "Softmax2d": (nn.Softmax2d, (4, 3, 3)),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), (4,)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), (4, 8)),
    "Conv1dReflect": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 8)),
    "Conv2dReplicate": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), (4, 8, 8)),
    "Conv2dSame": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (4, 8, 8)),
    "Conv2dValid": (lambda: nn.Conv2d(4, 6, 3, padding="valid", stride=2, bias=False), (4, 8, 8)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 3), (4, 5, 5, 5)),
    "Conv3dSame": (lambda: nn.Conv3d(4, 6, 3, padding="same"), (4, 5, 5, 5)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 8)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 3), (4, 3, 3, 3)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (4, 2, 2, 2)),
    "BatchNormPlain": (lambda: nn.BatchNorm2d(4, affine=False), (4, 2, 2)),
    "BatchNormOfBatch": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4), (4, 6)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 6, 6)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4), (4, 3, 3, 3)),
    "InstanceNormTracked": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (4, 6, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "LayerNorm": (lambda: nn.LayerNorm([4, 5]), (4, 5)),
    "RMSNorm": (lambda: nn.RMSNorm(5), (4, 5)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (4, 5, 5)),
    **{f"MaxPool{n}d": ((lambda n=n: getattr(nn, f"MaxPool{n}d")(2, ceil_mode=True)), (3, *[5] * n)) for n in (1, 2, 3)},
    **{f"MaxPool{n}dIndices": ((lambda n=n: getattr(nn, f"MaxPool{n}d")(2, return_indices=True)), (3, *[6] * n)) for n in (1, 2, 3)},
    **{f"AvgPool{n}d": ((lambda n=n: getattr(nn, f"AvgPool{n}d")(2)), (3, *[5] * n)) for n in (1, 2, 3)},
    **{f"AdaptiveAvgPool{n}d": ((lambda n=n: getattr(nn, f"AdaptiveAvgPool{n}d")(2)), (3, *[5] * n)) for n in (1, 2, 3)},
    **{f"AdaptiveMaxPool{n}d": ((lambda n=n: getattr(nn, f"AdaptiveMaxPool{n}d")(2)), (3, *[5] * n)) for n in (1, 2, 3)},
    "AdaptiveMaxPool2dIndices": (lambda: nn.AdaptiveMaxPool2d(2, return_indices=True), (3, 5, 5)),
    "LPPool1d": (lambda: nn.LPPool1d(2, 2), (3, 6)),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), (3, 6, 6)),
    **{f"{kind}Pad{n}d": ((lambda kind=kind, n=n: getattr(nn, f"{kind}Pad{n}d")(1)), (3, *[5] * n)) for kind in ("Reflection", "Replication", "Zero", "Circular") for n in (1, 2, 3)},
    "ConstantPad2d": (lambda: nn.ConstantPad2d(1, 3.5), (3, 5, 5)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (4, 3, 3)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), (1, 4, 4)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), (4, 3, 3)),
    **{f"Upsample{mode}": ((lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode)), (3, *[4] * n)) for mode, n in (("nearest", 2), ("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))},
    "Upsample1d": (lambda: nn.Upsample(scale_factor=2), (3, 4)),
    "Upsample3d": (lambda: nn.Upsample(size=5), (3, 4, 4, 4)),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), (3, 4, 4)),
    "Unfold": (lambda: nn.Unfold(2), (3, 4, 4)),
    "Fold": (lambda: nn.Fold((4, 4), 2), (12, 9)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), (4,)),
    "Linear": (lambda: nn.Linear(4, 2), (3, 4)),
    "WeightNorm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), (4,)),
    "SpectralNorm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)).eval(), (4,)),
    "Orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), (4,)),
}  # fmt: skip


def _layers() -> list[Entry]:
    two = {
        "Bilinear": (lambda: nn.Bilinear(4, 5, 3), lambda: {"x": torch.randn(2, 4), "y": torch.randn(2, 5)}),
        "CosineSimilarity": (nn.CosineSimilarity, lambda: {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}),
        "PairwiseDistance": (nn.PairwiseDistance, lambda: {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}),
        "Embedding": (lambda: nn.Embedding(9, 4), lambda: {"x": torch.randint(0, 9, (2, 3))}),
        "EmbeddingBagMean": (lambda: nn.EmbeddingBag(9, 4), lambda: {"x": torch.randint(0, 9, (2, 3))}),
        "EmbeddingBagMax": (lambda: nn.EmbeddingBag(9, 4, mode="max"), lambda: {"x": torch.randint(0, 9, (2, 3))}),
    }
    plain = [_entry(name, make, x(*shape)) for name, (make, shape) in PLAIN_LAYERS.items()]
    return plain + [_entry(name, make, inputs) for name, (make, inputs) in two.items()]


def _pointwise(m: nn.Module, x: Tensor) -> Tensor:
    y = x.abs() + 0.5
    parts = [
        x.sin(), x.cos(), x.tan(), x.asin(), x.acos(), x.atan(), x.sinh(), x.cosh(), x.tanh(), x.asinh(), y.acosh(),
        x.atanh(), x.exp(), x.expm1(), x.exp2(), y.log(), y.log2(), y.log10(), y.log1p(), y.sqrt(), y.rsqrt(), x.square(),
        y.reciprocal(), x.neg(), x.sign(), x.sgn(), x.floor(), x.ceil(), x.round(), x.trunc(), x.frac(), x.erf(), x.erfc(),
        x.erfinv(), y.lgamma(), y.digamma(), x.sigmoid(), y.logit(), x.clamp(-1, 1), x.clamp(min=0), x.clamp_min(0.1),
        x.clamp_max(0.2), torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y),
        torch.atan2(x, y), torch.hypot(x, y), torch.pow(y, 2.5), torch.pow(y, x), 2.0**x, torch.fmod(x, 2), x % 3,
        torch.remainder(x, y), x // 2, torch.floor_divide(x, y), torch.div(x, y, rounding_mode="trunc"), x.lerp(y, 0.3),
        torch.addcmul(x, x, y), torch.addcdiv(x, x, y), torch.xlogy(x, y), torch.special.entr(y), torch.logaddexp(x, y),
        torch.special.i0(x), torch.special.erfcx(x), torch.special.xlog1py(x, y), torch.special.ndtr(x), torch.sinc(x),
        torch.nan_to_num(x), torch.copysign(x, y), torch.heaviside(x, y), torch.deg2rad(x), torch.rad2deg(x),
        torch.true_divide(x, y), torch.rsub(x, 1), 1 - x, 1 / y, x - 1, 2 * x, x + 1, x.mul(y), -x,
        torch.where(x > 0, x, y), torch.where(x > 0, x, 0.0), torch.special.expit(x), torch.logaddexp2(x, y),
    ]  # fmt: skip
    return torch.stack([part.float().nan_to_num(posinf=0, neginf=0) for part in parts]).movedim(0, 1)


def _comparisons(m: nn.Module, x: Tensor) -> Tensor:
    y = x.roll(1, -1)
    i, j = (x * 10).long(), (y * 10).int().long()
    flags = [
        x > y, x >= y, x < y, x <= y, x == y, x != y, x > 0, x >= 0, x < 0, x <= 0, x == 0, x != 0, x.isnan(), x.isinf(),
        x.isfinite(), x.isclose(y), (x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0), x.signbit(),
        torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x, y), torch.logical_not(x), x.isneginf(),
        x.isposinf(), torch.isin(i, torch.tensor([1, 2])), x.bool(), i.bool(),
    ]  # fmt: skip
    numbers = [
        i & j,
        i | j,
        i ^ j,
        ~i,
        i << 1,
        i >> 1,
        i % 3,
        i // 2,
        i.abs(),
        torch.gcd(i, j),
        i.clamp(0, 3),
        i.float(),
    ]
    return torch.stack([part.float() for part in [*flags, *numbers]]).movedim(0, 1)


def _reductions(m: nn.Module, x: Tensor) -> Tensor:
    y = x.abs() + 0.1
    parts = [
        x.sum(-1), x.mean(-1), x.amax(-1), x.amin(-1), x.max(-1).values, x.min(-1).values, x.median(-1).values,
        x.mode(-1).values, x.var(-1), x.std(-1), x.std(-1, unbiased=False), x.prod(-1), x.norm(dim=-1), x.norm(1, -1),
        torch.linalg.vector_norm(x, dim=-1), x.logsumexp(-1), x.argmax(-1), x.argmin(-1), x.nansum(-1), x.nanmean(-1),
        (x > 0).any(-1), (x > 0).all(-1), torch.count_nonzero(x, -1), x.nanmedian(-1).values,
        x.kthvalue(2, -1).values, torch.var_mean(x, -1)[0], torch.std_mean(x, -1)[1], torch.aminmax(x, dim=-1).min,
        x.sum((-1,)), y.log_softmax(-1).sum(-1), F.normalize(x, dim=-1).sum(-1), x.dist(y).expand(x.shape[:-1]),
        x.cumsum(-1)[..., -1], x.cumprod(-1)[..., -1], x.cummax(-1).values[..., 0], x.cummin(-1).values[..., 0],
        x.logcumsumexp(-1)[..., -1], x.diff(dim=-1)[..., 0], torch.trapezoid(x, dim=-1),
        x.max().expand(x.shape[:-1]), x.min().expand(x.shape[:-1]), x.sum().expand(x.shape[:-1]),
    ]  # fmt: skip
    return torch.stack([part.float() for part in parts]).movedim(0, 1)


def _quantiles(m: nn.Module, x: Tensor) -> Tensor:
    """Not with the other reductions: torch 2.11 cannot export them for batches of any size."""
    return torch.stack([x.quantile(0.3, -1), x.nanquantile(0.5, -1)], 1)


def _shapes(m: nn.Module, x: Tensor) -> Tensor:
    rows = x.shape[0]
    parts = [
        x.transpose(1, 2), x.permute(0, 2, 1), x.reshape(rows, -1), x.view(rows, -1), x.flatten(1), x.unflatten(1, (2, 2)),
        x.squeeze(), x.unsqueeze(1), x.expand(rows, 4, 4), x[:, None].expand(-1, 3, -1, -1), x.repeat(1, 2, 1), x.tile(2),
        x.flip(-1), x.roll(1, -1), x.rot90(1, (1, 2)), x.narrow(1, 0, 2), x[:, 1:3], x[:, ::2], x[:, -1], x[..., 0],
        x.select(1, 0), torch.cat(x.chunk(2, 1), 2), torch.cat(x.split([1, 3], 1), 1), torch.stack(x.unbind(1), 2),
        torch.hstack([x, x]), torch.dstack([x, x]), x.movedim(1, 2), x.swapaxes(1, 2), x.mT, x.diagonal(0, 1, 2),
        x.unfold(1, 2, 1), F.pad(x, (1, 1)), F.pad(x, (1, 2, 0, 1), value=2.0), x.tril(), x.triu(1), x.contiguous(),
        x.view_as(x), x.expand_as(x), x.clone(), x.detach(), x.broadcast_to(rows, 4, 4), x.ravel().reshape(rows, -1),
        x.tensor_split(2, 1)[0], x.hsplit(2)[0], torch.diag_embed(x), x.repeat_interleave(2, 1), x.fliplr(),
        x.as_strided((rows, 2), (16, 1)), x.new_zeros(rows, 2), x.new_ones(rows, 2), x.new_full((rows, 2), 3.0),
        torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), x.to(torch.float64), x.half(), x.double(),
        x.type_as(x.double()), x.bfloat16(), x.int(), torch.concat([x, x], 1), torch.column_stack([x, x]),
        torch.atleast_3d(x), x.swapdims(1, 2), torch.block_diag(x[0], x[0]).expand(rows, 8, 8),
        torch.cartesian_prod(torch.arange(2), torch.arange(2)).expand(rows, 4, 2), x.transpose(1, 2).contiguous(),
    ]  # fmt: skip
    return torch.cat([part.float().reshape(rows, -1) for part in parts], 1)


def _indexing(m: nn.Module, x: Tensor) -> Tensor:
    rows = x.shape[0]
    index = torch.tensor([0, 2, 1])
    chosen = x.argsort(-1)
    values, places = x.sort(-1, descending=True)
    changed, other = x.clone(), x.clone()
    changed[:, 0] = 1.0
    changed[:, :, index] += 1
    other.index_fill_(1, index, 0.5)
    other.masked_fill_(other > 1, 0.0)
    parts = [
        x[:, index], x[:, :, index], x[:, [0, 1]], x.index_select(1, index), x.gather(2, chosen), x.take_along_dim(chosen, 2),
        x.scatter(2, chosen, x), x.scatter_add(2, chosen, x), x.scatter_reduce(2, chosen, x, "amax"),
        x.scatter(2, chosen, 1.0), x.index_add(1, index, x[:, :3]), x.index_copy(1, index, x[:, :3]),
        x.index_fill(1, index, 2.0), x.masked_fill(x > 0, -1.0), x.where(x > 0, x.neg()), values, places, changed, other,
        x.topk(2).values, x.topk(2, largest=False).indices, torch.searchsorted(values.flip(-1), x), x.msort(),
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), F.one_hot(places, 4), torch.take(x, index).expand(rows, 3),
        x.transpose(0, 1).index_put((index,), torch.tensor(1.0)).transpose(0, 1), torch.tril_indices(3, 3).float().expand(rows, 2, 6),
        torch.arange(rows * 2).reshape(rows, 2), torch.linspace(0, 1, 4).expand(rows, 4),
        torch.eye(4).expand(rows, 4, 4), x.select_scatter(x[:, 0], 1, 1), x.slice_scatter(x[:, :2], 1, 0, 2),
        torch.full((rows, 2), 7), torch.logspace(0, 1, 3).expand(rows, 3), x.argsort(dim=-1, stable=True),
        x.diagonal_scatter(x[:, 0], 0, 1, 2), torch.triu_indices(3, 3).expand(rows, 2, 6),
    ]  # fmt: skip
    return torch.cat([part.float().reshape(rows, -1) for part in parts], 1)


def _products(m: nn.Module, x: Tensor) -> Tensor:
    rows, v = x.shape[0], x[:, 0]
    square = x @ x.mT + 3 * torch.eye(4)
    parts = [
        x @ x, torch.matmul(x, v[..., None]), torch.bmm(x, x), torch.baddbmm(x, x, x), torch.einsum("bij,bjk->bik", x, x),
        torch.einsum("bij,bij->b", x, x), torch.einsum("bij->bji", x), torch.tensordot(x, x[0], 1), torch.addmm(v, v, x[0]),
        torch.mm(v, x[0]), torch.mv(v, x[0, 0]), torch.outer(v[:, 0], x[0, 0]),  F.linear(x, x[0]),
        torch.cdist(x, x), F.cosine_similarity(x, x.neg(), -1), torch.linalg.cross(x[..., :3], x[..., 1:]),
        torch.linalg.norm(x, dim=(1, 2)), torch.linalg.matrix_norm(x), torch.linalg.inv(square), torch.linalg.det(square),
        torch.linalg.solve(square, x), torch.linalg.cholesky(square), torch.linalg.eigvalsh(square), torch.inverse(square),
        torch.linalg.svdvals(x), torch.linalg.qr(square)[1].abs(), torch.linalg.slogdet(square)[1], torch.trace(x[0]).expand(rows),
        torch.linalg.matrix_power(x, 2), torch.linalg.pinv(square), torch.linalg.vecdot(x, x),
         torch.linalg.solve_triangular(square.tril(), x, upper=False), torch.logdet(square),
        torch.cholesky_solve(x, torch.linalg.cholesky(square)),
        F.bilinear(v, v, x[:1]), torch.inner(v, v[:1]), torch.addbmm(x[0], x, x).expand(rows, 4, 4),
        F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    ]  # fmt: skip
    return torch.cat([part.reshape(rows, -1) for part in parts], 1)


def _fft(m: nn.Module, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    window = torch.hann_window(4)
    signal = x.flatten(1)
    parts = [
        spectrum.abs(), spectrum.real, spectrum.imag, spectrum.angle(), torch.fft.irfft(spectrum), torch.fft.fft(x).abs(),
        torch.fft.ifft(torch.fft.fft(x)).real, torch.fft.fft2(x).abs(), torch.fft.ifft2(torch.fft.fft2(x)).real,
        torch.fft.rfft2(x).abs(), torch.fft.irfft2(torch.fft.rfft2(x)), torch.fft.fftn(x, dim=(1, 2)).abs(),
        torch.fft.fftshift(x), torch.fft.ifftshift(x), torch.fft.fftfreq(4).expand(x.shape[0], 4), torch.fft.hfft(spectrum),
        torch.stft(signal, 4, window=window, return_complex=True).abs(), torch.view_as_real(spectrum), spectrum.conj().real,
        torch.complex(x, x).abs(), torch.polar(x.abs(), x).real, (spectrum * spectrum.conj()).real, torch.fft.ihfft(x).abs(),
        torch.istft(torch.stft(signal, 4, window=window, return_complex=True), 4, window=window),
    ]  # fmt: skip
    return torch.cat([part.reshape(x.shape[0], -1) for part in parts], 1)


def _images(m: nn.Module, x: Tensor) -> Tensor:
    rows = x.shape[0]
    theta = torch.eye(2, 3).expand(rows, 2, 3)
    grid = F.affine_grid(theta, [rows, 3, 6, 6], align_corners=False)
    modes = [F.grid_sample(x, grid, mode=mode, align_corners=False) for mode in ("bilinear", "nearest", "bicubic")]
    border = [F.grid_sample(x, grid, padding_mode=mode, align_corners=True) for mode in ("border", "reflection")]
    sizes = [
        F.interpolate(x, size=(5, 7), mode=mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    ]
    smooth = [F.interpolate(x, size=(5, 7), mode=mode, antialias=True) for mode in ("bilinear", "bicubic")]
    scaled = [F.interpolate(x, scale_factor=0.5, mode="bilinear", recompute_scale_factor=True)]
    pooled, indices = F.max_pool2d(x, 2, return_indices=True)
    more = [
        F.max_unpool2d(pooled, indices, 2),
        F.unfold(x, 2),
        F.avg_pool2d(x, 2, count_include_pad=False),
        F.pixel_shuffle(x[:, :1].repeat(1, 4, 1, 1), 2),
    ]
    return torch.cat([part.reshape(rows, -1) for part in [*modes, *border, *sizes, *smooth, *scaled, *more]], 1)  # fmt: skip


def _losses(m: nn.Module, x: Tensor) -> Tensor:
    target, y = x.argmax(-1), x.sigmoid()
    parts = [
        F.mse_loss(x, y, reduction="none"), F.l1_loss(x, y, reduction="none"), F.smooth_l1_loss(x, y, reduction="none"),
        F.huber_loss(x, y, reduction="none"), F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        F.binary_cross_entropy(y, y, reduction="none"), F.kl_div(x.log_softmax(-1), y, reduction="none"),
        F.cross_entropy(x, target, reduction="none"), F.nll_loss(x.log_softmax(-1), target, reduction="none"),
        F.poisson_nll_loss(x, y, reduction="none"), F.cosine_embedding_loss(x, y, torch.ones(x.shape[0]), reduction="none"),
        F.margin_ranking_loss(x, y, torch.ones_like(x), reduction="none"), F.soft_margin_loss(x, y.sign(), reduction="none"),
        F.triplet_margin_loss(x, y, y.neg(), reduction="none"),
    ]  # fmt: skip
    return torch.cat([part.reshape(x.shape[0], -1) for part in parts], 1)


def _draws(m: nn.Module, x: Tensor) -> Tensor:
    draws = [
        torch.rand_like(x), torch.randn_like(x), torch.rand(x.shape), torch.randn(x.shape), torch.bernoulli(x.sigmoid()),
        torch.randint(0, 5, x.shape), torch.randint_like(x, 5), torch.empty_like(x).uniform_(), torch.normal(x, x.abs()),
        torch.zeros_like(x).normal_(), torch.multinomial(x.softmax(-1), 2), torch.zeros_like(x).exponential_(),
        F.dropout(x, 0.5, training=True), F.gumbel_softmax(x), torch.zeros_like(x).bernoulli_(0.3), torch.poisson(x.abs()),
    ]  # fmt: skip
    return x + 0 * torch.stack([draw.float().sum().nan_to_num(posinf=0.0) for draw in draws]).sum()


def _in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    y.add_(1).mul_(2).sub_(0.5).div_(3).clamp_(-1, 1).neg_().abs_().sqrt_().exp_().pow_(2).tanh_().sigmoid_().relu_()
    y[:, :2].zero_()
    y[:, 2:].fill_(0.3)
    y.copy_(y.flip(-1)).round_().floor_().ceil_().sin_().cos_().addcmul_(x, x).addcdiv_(x, x.abs() + 1).lerp_(x, 0.5)
    y.masked_fill_(x > 0, 0.1).index_add_(1, torch.tensor([0]), y[:, :1].clone()).scatter_(
        1, torch.tensor([[0]]).expand(x.shape[0], 1), 2.0
    )
    y.tril_() if y.dim() > 2 else None
    (
        F.elu_(y),
        F.leaky_relu_(y),
        F.hardtanh_(y),
        F.silu(y, inplace=True),
        F.threshold_(y, 0.1, 0.2),
        F.selu_(y),
        F.celu_(y),
    )
    y.logical_not_().logical_and_(x).clamp_min_(0).clamp_max_(1).reciprocal_().nan_to_num_(0.0, 0.0, 0.0).cumsum_(-1)
    return y


FUNCTIONS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "pointwise": (_pointwise, (4,)),
    "comparisons": (_comparisons, (4,)),
    "reductions": (_reductions, (4, 5)),
    "quantiles": (_quantiles, (4, 5)),
    "shapes": (_shapes, (4, 4)),
    "indexing": (_indexing, (4, 4)),
    "products": (_products, (4, 4)),
    "fft": (_fft, (4, 4)),
    "grid_sample": (_images, (3, 6, 6)),
    "losses": (_losses, (4,)),
    "draws": (_draws, (4,)),
    "in_place": (_in_place, (4,)),
}


def _functions() -> list[Entry]:
    return [_entry(name, nn.Identity, x(*shape), call) for name, (call, shape) in FUNCTIONS.items()]
