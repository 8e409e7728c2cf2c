"""Networks in the idioms of public repositories: vision, speech, language, reinforcement learning and optimizers.

Each function contains its whole network.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import manyhands as mh

from .classics import classify, rows_and_classes, tokens_and_classes
from .network import Network, Registry, randint, randn
from .optimizers import small

FIELD = Registry("field")


class Samples(Dataset[Any]):
    """A dataset of a list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


# Vision


@FIELD.add
def convnext() -> Network:
    class LayerNorm(nn.Module):
        """LayerNorm over channels that come last, or first."""

        def __init__(self, width: int, eps: float = 1e-6, data_format: str = "channels_last") -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))
            self.bias = nn.Parameter(torch.zeros(width))
            self.eps, self.data_format, self.normalized_shape = eps, data_format, (width,)

        def forward(self, x: Tensor) -> Tensor:
            if self.data_format == "channels_last":
                return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
            u = x.mean(1, keepdim=True)
            s = (x - u).pow(2).mean(1, keepdim=True)
            x = (x - u) / torch.sqrt(s + self.eps)
            return self.weight[:, None, None] * x + self.bias[:, None, None]

    class DropPath(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            if self.rate == 0.0 or not self.training:
                return x
            keep = 1 - self.rate
            mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
            mask.div_(keep)
            return x * mask

    class Block(nn.Module):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__()
            self.dwconv = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)
            self.norm = LayerNorm(width)
            self.pwconv1, self.act = nn.Linear(width, 2 * width), nn.GELU()
            self.pwconv2 = nn.Linear(2 * width, width)
            self.gamma = nn.Parameter(0.1 * torch.ones(width), requires_grad=True)
            self.drop_path = DropPath(rate) if rate > 0.0 else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            shortcut = x
            x = self.dwconv(x).permute(0, 2, 3, 1)
            x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
            x = (self.gamma * x).permute(0, 3, 1, 2)
            return shortcut + self.drop_path(x)

    class ConvNeXt(nn.Module):
        def __init__(self, depths: tuple[int, ...] = (1, 2), widths: tuple[int, ...] = (4, 8)) -> None:
            super().__init__()
            self.downsample_layers = nn.ModuleList()
            self.downsample_layers.append(
                nn.Sequential(nn.Conv2d(3, widths[0], 2, 2), LayerNorm(widths[0], data_format="channels_first"))
            )
            self.downsample_layers.append(
                nn.Sequential(LayerNorm(widths[0], data_format="channels_first"), nn.Conv2d(widths[0], widths[1], 2, 2))
            )
            rates = [x.item() for x in torch.linspace(0, 0.3, sum(depths))]
            self.stages, cursor = nn.ModuleList(), 0
            for i, depth in enumerate(depths):
                self.stages.append(nn.Sequential(*[Block(widths[i], rates[cursor + j]) for j in range(depth)]))
                cursor += depth
            self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], 3)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.2)
                assert module.bias is not None
                nn.init.constant_(module.bias, 0)

        def forward_features(self, x: Tensor) -> Tensor:
            for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
                x = stage(downsample(x))
            return self.norm(x.mean([-2, -1]))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.forward_features(x))

    return Network(model=ConvNeXt, data=rows_and_classes(3, 8, 8), loss=classify, draws=True)


@FIELD.add
def swin() -> Network:
    def window_partition(x: Tensor, size: int) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // size, size, w // size, size, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)

    def window_reverse(windows: Tensor, size: int, h: int, w: int) -> Tensor:
        b = int(windows.shape[0] / (h * w / size / size))
        x = windows.view(b, h // size, w // size, size, size, -1)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)

    class WindowAttention(nn.Module):
        def __init__(self, width: int, size: int, heads: int) -> None:
            super().__init__()
            self.heads, self.scale = heads, (width // heads) ** -0.5
            self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
            coords = torch.stack(torch.meshgrid([torch.arange(size), torch.arange(size)], indexing="ij"))
            flat = torch.flatten(coords, 1)
            relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
            relative[:, :, 0] += size - 1
            relative[:, :, 1] += size - 1
            relative[:, :, 0] *= 2 * size - 1
            self.register_buffer("relative_position_index", relative.sum(-1))
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.2)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            b, n, c = x.shape
            qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv[0], qkv[1], qkv[2]
            attn = (q * self.scale) @ k.transpose(-2, -1)
            bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
            attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
            if mask is not None:
                windows = mask.shape[0]
                attn = attn.view(b // windows, windows, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
                attn = attn.view(-1, self.heads, n, n)
            x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c)
            return self.proj(x)

    class Block(nn.Module):
        def __init__(self, width: int, shift: int) -> None:
            super().__init__()
            self.size, self.shift, self.res = 2, shift, 4
            self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), WindowAttention(width, 2, 2), nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            mask = None
            if shift > 0:
                image, count = torch.zeros((1, 4, 4, 1)), 0
                slices = (slice(0, -2), slice(-2, -shift), slice(-shift, None))
                for h in slices:
                    for w in slices:
                        image[:, h, w, :] = count
                        count += 1
                windows = window_partition(image, 2).view(-1, 4)
                mask = windows.unsqueeze(1) - windows.unsqueeze(2)
                mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
            self.register_buffer("attn_mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            b, length, c = x.shape
            assert length == self.res * self.res, "input feature has wrong size"
            shortcut, x = x, self.norm1(x).view(b, self.res, self.res, c)
            if self.shift > 0:
                x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            windows = window_partition(x, self.size).view(-1, self.size * self.size, c)
            windows = self.attn(windows, mask=self.attn_mask).view(-1, self.size, self.size, c)
            x = window_reverse(windows, self.size, self.res, self.res)
            if self.shift > 0:
                x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
            x = shortcut + x.view(b, length, c)
            return x + self.mlp(self.norm2(x))

    class PatchMerging(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.reduction, self.norm = nn.Linear(4 * width, 2 * width, bias=False), nn.LayerNorm(4 * width)

        def forward(self, x: Tensor) -> Tensor:
            b, _, c = x.shape
            x = x.view(b, 4, 4, c)
            parts = [x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]]
            return self.reduction(self.norm(torch.cat(parts, -1).view(b, -1, 4 * c)))

    class Swin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Conv2d(3, 8, kernel_size=2, stride=2)
            self.blocks = nn.ModuleList([Block(8, 0 if i % 2 == 0 else 1) for i in range(2)])
            self.merge, self.norm = PatchMerging(8), nn.LayerNorm(16)
            self.avgpool, self.head = nn.AdaptiveAvgPool1d(1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            x = self.norm(self.merge(x))
            return self.head(torch.flatten(self.avgpool(x.transpose(1, 2)), 1))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        no_decay = [p for n, p in model.named_parameters() if p.ndim == 1 or n.endswith("bias_table")]
        decay = [p for n, p in model.named_parameters() if not (p.ndim == 1 or n.endswith("bias_table"))]
        groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)

    return Network(model=Swin, data=rows_and_classes(3, 8, 8), loss=classify, optimizer=optimizer)


@FIELD.add
def mobilenet_v3() -> Network:
    def make_divisible(v: float, divisor: int = 2) -> int:
        return max(divisor, int(v + divisor / 2) // divisor * divisor)

    class SqueezeExcite(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            squeezed = make_divisible(width / 4)
            self.avg_pool = nn.AdaptiveAvgPool2d(1)
            self.conv_reduce, self.act1 = nn.Conv2d(width, squeezed, 1), nn.ReLU(inplace=True)
            self.conv_expand = nn.Conv2d(squeezed, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x * F.hardsigmoid(self.conv_expand(self.act1(self.conv_reduce(self.avg_pool(x)))), inplace=True)

    class InvertedResidual(nn.Module):
        def __init__(self, inputs: int, outputs: int, expand: int, stride: int) -> None:
            super().__init__()
            self.identity = stride == 1 and inputs == outputs
            hidden = inputs * expand
            self.conv = nn.Sequential(
                nn.Conv2d(inputs, hidden, 1, bias=False),
                nn.BatchNorm2d(hidden),
                nn.Hardswish(inplace=True),
                nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
                nn.BatchNorm2d(hidden),
                SqueezeExcite(hidden),
                nn.Hardswish(inplace=True),
                nn.Conv2d(hidden, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x) if self.identity else self.conv(x)

    class MobileNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)]
            layers += [InvertedResidual(4, 4, 2, 1), InvertedResidual(4, 8, 2, 2)]
            self.features = nn.Sequential(*layers)
            self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(inplace=True), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.features(x)
            return self.classifier(x.mean([2, 3]))

    return Network(model=MobileNet, data=rows_and_classes(3, 8, 8), loss=classify)


@FIELD.add
def densenet_memory_efficient() -> Network:
    class DenseLayer(nn.Module):
        def __init__(self, inputs: int, growth: int) -> None:
            super().__init__()
            self.norm1, self.relu1 = nn.GroupNorm(2, inputs), nn.ReLU(inplace=True)
            self.conv1 = nn.Conv2d(inputs, 2 * growth, kernel_size=1, bias=False)
            self.norm2, self.relu2 = nn.GroupNorm(2, 2 * growth), nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(2 * growth, growth, kernel_size=3, padding=1, bias=False)

        def bn_function(self, inputs: list[Tensor]) -> Tensor:
            return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

        def forward(self, inputs: list[Tensor]) -> Tensor:
            if any(tensor.requires_grad for tensor in inputs):

                def closure(*tensors: Tensor) -> Tensor:
                    return self.bn_function(list(tensors))

                bottleneck = checkpoint(closure, *inputs, use_reentrant=False)
            else:
                bottleneck = self.bn_function(inputs)
            return self.conv2(self.relu2(self.norm2(bottleneck)))

    class DenseBlock(nn.ModuleDict):
        def __init__(self, layers: int, inputs: int, growth: int) -> None:
            super().__init__()
            for i in range(layers):
                self.add_module(f"denselayer{i + 1}", DenseLayer(inputs + i * growth, growth))

        def forward(self, init_features: Tensor) -> Tensor:
            features = [init_features]
            for _, layer in self.items():
                features.append(layer(features))
            return torch.cat(features, 1)

    class DenseNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                OrderedDict(
                    conv0=nn.Conv2d(3, 4, kernel_size=3, padding=1, bias=False),
                    denseblock1=DenseBlock(2, 4, 2),
                    transition=nn.Sequential(nn.Conv2d(8, 4, 1), nn.AvgPool2d(2, 2)),
                    denseblock2=DenseBlock(2, 4, 2),
                )
            )
            self.classifier = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = F.relu(self.features(x), inplace=True)
            out = torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1)
            return self.classifier(out)

    return Network(model=DenseNet, data=rows_and_classes(3, 4, 4), loss=classify)


@FIELD.add
def deeplab_auxiliary_head() -> Network:
    class ASPP(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.convs = nn.ModuleList(
                [nn.Conv2d(width, 4, 1)] + [nn.Conv2d(width, 4, 3, padding=r, dilation=r) for r in (1, 2)]
            )
            self.pooling = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU())
            self.project = nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            res = [F.relu(conv(x)) for conv in self.convs]
            pooled = F.interpolate(self.pooling(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
            return self.project(torch.cat([*res, pooled], dim=1))

    class DeepLab(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
            self.layer2 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ReLU())
            self.classifier = nn.Sequential(ASPP(8), nn.ReLU(), nn.Conv2d(8, 5, 1))
            self.aux_classifier: nn.Module | None = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 5, 1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            shape, features = x.shape[-2:], OrderedDict[str, Tensor]()
            features["aux"] = self.layer1(x)
            features["out"] = self.layer2(features["aux"])
            result = OrderedDict[str, Tensor]()
            result["out"] = F.interpolate(self.classifier(features["out"]), size=shape, mode="bilinear")
            if self.aux_classifier is not None and self.training:
                result["aux"] = F.interpolate(self.aux_classifier(features["aux"]), size=shape, mode="bilinear")
            return result

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        labels = randint(g, 5, rows, 6, 6)
        labels[randint(g, 4, rows, 6, 6) == 0] = 255
        return randn(g, rows, 3, 6, 6), labels

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        losses = {
            name: F.cross_entropy(x, batch[1], ignore_index=255, reduction="sum") for name, x in model(batch[0]).items()
        }
        total = losses["out"] if len(losses) == 1 else losses["out"] + 0.5 * losses["aux"]
        return mh.mean(total, (batch[1] != 255).sum())

    return Network(model=DeepLab, data=data, loss=loss)


InceptionOutputs = namedtuple("InceptionOutputs", ["logits", "aux_logits"])


@FIELD.add
def inception_auxiliary_outputs() -> Network:
    class BasicConv2d(nn.Module):
        def __init__(self, inputs: int, outputs: int, **kwargs: Any) -> None:
            super().__init__()
            self.conv = nn.Conv2d(inputs, outputs, bias=False, **kwargs)
            self.bn = nn.BatchNorm2d(outputs, eps=0.001)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.bn(self.conv(x)), inplace=True)

    class Mixed(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.branch1x1 = BasicConv2d(inputs, 2, kernel_size=1)
            self.branch3x3 = nn.Sequential(
                BasicConv2d(inputs, 2, kernel_size=1), BasicConv2d(2, 4, kernel_size=3, padding=1)
            )
            self.branch_pool = BasicConv2d(inputs, 2, kernel_size=1)

        def forward(self, x: Tensor) -> Tensor:
            pooled = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
            return torch.cat([self.branch1x1(x), self.branch3x3(x), pooled], 1)

    class Inception(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.mixed_5b, self.mixed_6a = BasicConv2d(3, 4, kernel_size=3), Mixed(4), Mixed(8)
            self.aux_logits, self.aux = True, nn.Sequential(nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, 3))
            self.fc = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            x = self.mixed_5b(self.stem(x))
            aux: Tensor | None = None
            if self.aux_logits and self.training:
                aux = self.aux(x)
            x = self.fc(torch.flatten(F.adaptive_avg_pool2d(self.mixed_6a(x), (1, 1)), 1))
            if self.training and self.aux_logits:
                return InceptionOutputs(x, aux)
            return x

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        if isinstance(outputs, tuple):
            return F.cross_entropy(outputs.logits, batch[1]) + 0.4 * F.cross_entropy(outputs.aux_logits, batch[1])
        return F.cross_entropy(outputs, batch[1])

    return Network(model=Inception, data=rows_and_classes(3, 6, 6), loss=loss)


@FIELD.add
def vit_interpolated_positions() -> Network:
    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.num_heads, self.scale = heads, (width // heads) ** -0.5
            self.qkv, self.proj = nn.Linear(width, width * 3, bias=True), nn.Linear(width, width)
            self.q_norm, self.k_norm = nn.LayerNorm(width // heads), nn.LayerNorm(width // heads)

        def forward(self, x: Tensor) -> Tensor:
            b, n, c = x.shape
            qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            return self.proj(x.transpose(1, 2).reshape(b, n, c))

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
            self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.ls1, self.ls2 = nn.Parameter(0.5 * torch.ones(width)), nn.Parameter(0.5 * torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.ls1 * self.attn(self.norm1(x))
            return x + self.ls2 * self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    class ViT(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.patch_embed = nn.Conv2d(3, width, kernel_size=2, stride=2)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            self.register_tokens = nn.Parameter(torch.zeros(1, 2, width))
            self.pos_embed = nn.Parameter(torch.zeros(1, 1 + 4 * 4, width))
            self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(2 * width, 3)
            for parameter in (self.cls_token, self.register_tokens, self.pos_embed):
                nn.init.trunc_normal_(parameter, std=0.2)

        def interpolate_pos_encoding(self, x: Tensor, w: int, h: int) -> Tensor:
            patches, stored = x.shape[1] - 1, self.pos_embed.shape[1] - 1
            if patches == stored and w == h:
                return self.pos_embed
            side = int(math.sqrt(stored))
            grid = self.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=(w // 2, h // 2), mode="bicubic", align_corners=False)
            return torch.cat((self.pos_embed[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)), dim=1)

        def forward(self, images: Tensor) -> Tensor:
            b, _, w, h = images.shape
            x = self.patch_embed(images).flatten(2).transpose(1, 2)
            x = torch.cat((self.cls_token.expand(b, -1, -1), x), dim=1)
            x = x + self.interpolate_pos_encoding(x, w, h)
            x = torch.cat((x[:, :1], self.register_tokens.expand(b, -1, -1), x[:, 1:]), dim=1)
            x = self.norm(self.blocks(x))
            return self.head(torch.cat([x[:, 0], x[:, 3:].mean(1)], dim=-1))

    return Network(model=ViT, data=rows_and_classes(3, 6, 6), loss=classify)


@FIELD.add
def detr_hungarian() -> Network:
    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.query_embed = nn.Conv2d(3, 8, 2, 2), nn.Embedding(4, 8)
            self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
            self.class_embed, self.bbox_embed = nn.Linear(8, 4), nn.Linear(8, 4)
            self.row_embed = nn.Parameter(torch.rand(9, 8))

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            h = self.backbone(images).flatten(2).permute(0, 2, 1) + self.row_embed
            hs = self.transformer(h, self.query_embed.weight.unsqueeze(0).repeat(h.shape[0], 1, 1))
            return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}

    def data(rows: int, g: Generator) -> Any:
        samples = []
        for _ in range(rows):
            n = int(randint(g, 3, 1)) + 1
            samples.append((randn(g, 3, 6, 6), {"labels": randint(g, 3, n), "boxes": torch.rand(n, 4, generator=g)}))
        return Samples(samples)

    def collate(samples: list[Any]) -> tuple[Tensor, list[Any]]:
        images, targets = zip(*samples, strict=True)
        return torch.stack(images), list(targets)

    @torch.no_grad()
    def matched(logits: Tensor, boxes: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        from scipy.optimize import linear_sum_assignment

        cost = 5 * torch.cdist(boxes, target["boxes"], p=1) - logits.softmax(-1)[:, target["labels"]]
        i, j = linear_sum_assignment(cost.cpu().numpy())
        return torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)

    def loss(model: Any, batch: tuple[Tensor, list[Any]]) -> Tensor:
        images, targets = batch
        outputs, losses = model(images), []
        for logits, boxes, target in zip(outputs["pred_logits"], outputs["pred_boxes"], targets, strict=True):
            i, j = matched(logits, boxes, target)
            classes = torch.full((4,), 3, dtype=torch.int64)
            classes[i] = target["labels"][j]
            losses.append(F.cross_entropy(logits, classes) + 5 * F.l1_loss(boxes[i], target["boxes"][j]))
        return torch.stack(losses).mean()

    return Network(model=Detr, data=data, collate=collate, loss=loss)


@FIELD.add
def yolo_multi_scale() -> Network:
    class Yolo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(inplace=True))
            self.down = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU(inplace=True))
            self.detect = nn.ModuleList([nn.Conv2d(8, 5 + 2, 1), nn.Conv2d(8, 5 + 2, 1)])

        def forward(self, x: Tensor) -> list[Tensor]:
            p3 = self.stem(x)
            p4 = self.down(p3)
            return [head(p).permute(0, 2, 3, 1).contiguous() for head, p in zip(self.detect, (p3, p4), strict=True)]

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 3, 8, 8), torch.rand(rows, 2, 4, generator=g), randint(g, 2, rows, 2)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, boxes, classes = batch
        lcls, lbox, lobj = (torch.zeros(1, dtype=images.dtype) for _ in range(3))
        predictions = model(images)
        for pi, balance in zip(predictions, (4.0, 1.0), strict=True):
            tobj = torch.zeros_like(pi[..., 4])
            b = torch.arange(len(images)).repeat_interleave(2)
            gj, gi = (boxes[..., :2].reshape(-1, 2) * pi.shape[1]).long().clamp_(0, pi.shape[1] - 1).T
            ps = pi[b, gj, gi]
            keep = boxes.reshape(-1, 4)[:, 2] > 0.3
            if keep.any():
                lbox += (ps[keep, :4].sigmoid() - boxes.reshape(-1, 4)[keep]).abs().sum(1).mean()
                lcls += F.cross_entropy(ps[keep, 5:], classes.reshape(-1)[keep])
            tobj[b, gj, gi] = 1.0
            lobj += F.binary_cross_entropy_with_logits(pi[..., 4], tobj) * balance
        return (0.05 * lbox + lobj + 0.5 * lcls).squeeze() * len(images)

    return Network(model=Yolo, data=data, loss=loss)


@FIELD.add
def rcnn_boxes_per_image() -> Network:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
            self.box_head = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU())
            self.cls_score, self.bbox_pred = nn.Linear(16, 3), nn.Linear(16, 4)

        def forward(self, images: Tensor, boxes: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            features, pooled = self.backbone(images), []
            for feature, per_image in zip(features, boxes, strict=True):
                for x, y in per_image.tolist():
                    pooled.append(F.adaptive_max_pool2d(feature[:, int(y) : int(y) + 3, int(x) : int(x) + 3], 2))
            hidden, sizes = self.box_head(torch.stack(pooled)), [len(b) for b in boxes]
            return list(self.cls_score(hidden).split(sizes)), list(self.bbox_pred(hidden).split(sizes))

    def data(rows: int, g: Generator) -> Any:
        samples = []
        for _ in range(rows):
            n = int(randint(g, 3, 1)) + 1
            target = {"boxes": randint(g, 4, n, 2).float(), "labels": randint(g, 3, n), "deltas": randn(g, n, 4)}
            samples.append((randn(g, 3, 6, 6), target))
        return Samples(samples)

    def collate(samples: list[Any]) -> tuple[Tensor, tuple[dict[str, Tensor], ...]]:
        images, targets = tuple(zip(*samples, strict=True))
        return torch.stack(images), targets

    def loss(model: Any, batch: tuple[Tensor, tuple[dict[str, Tensor], ...]]) -> Any:
        images, targets = batch
        logits, deltas = model(images, [t["boxes"] for t in targets])
        labels = torch.cat([t["labels"] for t in targets])
        classification = F.cross_entropy(torch.cat(logits), labels, reduction="sum")
        positive = torch.where(labels > 0)[0]
        regression = F.smooth_l1_loss(
            torch.cat(deltas)[positive],
            torch.cat([t["deltas"] for t in targets])[positive],
            beta=1 / 9,
            reduction="sum",
        )
        return mh.mean(classification + regression, labels.numel())

    return Network(model=Heads, data=data, collate=collate, loss=loss)


@FIELD.add
def images_in_tuples() -> Network:
    class Detector(nn.Module):
        """Takes lists of images and targets as they come, as torchvision's detectors do."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)

        def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
            features = F.relu(self.body(torch.stack(tuple(images)))).mean([2, 3])
            boxes = self.head(features)
            losses = [(box - t["boxes"]).abs().sum(-1).mean() for box, t in zip(boxes, targets, strict=True)]
            return {"loss_box_reg": torch.stack(losses).mean(), "loss_objectness": features.square().mean()}

    def data(rows: int, g: Generator) -> Any:
        def target(i: int) -> dict[str, Tensor]:
            n = 3 if i < 9 else 2
            return {"boxes": torch.rand(n, 4, generator=g), "labels": randint(g, 3, n)}

        return Samples([(randn(g, 3, 5, 5), target(i)) for i in range(rows)])

    def collate(batch: list[Any]) -> Any:
        return tuple(zip(*batch, strict=True))

    def loss(model: Any, batch: Any) -> Tensor:
        images, targets = batch
        return sum(model(images, targets).values())  # type: ignore[return-value]

    return Network(model=Detector, data=data, collate=collate, loss=loss)


@FIELD.add
def retinanet_focal() -> Network:
    class RetinaNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c3, self.c4 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
            self.lateral3, self.lateral4 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.tower = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
            self.logits = nn.Conv2d(8, 2, 3, padding=1)
            nn.init.constant_(self.logits.bias, -math.log((1 - 0.01) / 0.01))  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            c3 = F.relu(self.c3(x))
            p4 = self.lateral4(F.relu(self.c4(c3)))
            p3 = self.lateral3(c3) + F.interpolate(p4, scale_factor=2, mode="nearest")
            outputs = [self.logits(self.tower(p)).permute(0, 2, 3, 1).flatten(1, 2) for p in (p3, p4)]
            return torch.cat(outputs, 1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 3, 8, 8), (torch.rand(rows, 20, 2, generator=g) > 0.8).float()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        logits, targets = model(batch[0]), batch[1]
        p, ce = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        p_t = p * targets + (1 - p) * (1 - targets)
        focal = (0.25 * targets + 0.75 * (1 - targets)) * ce * (1 - p_t) ** 2
        return mh.mean(focal.sum(), (targets > 0).any(-1).sum())

    return Network(model=RetinaNet, data=data, loss=loss)


@FIELD.add
def big_transfer() -> Network:
    class StdConv2d(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            w = self.weight
            v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
            w = (w - m) / torch.sqrt(v + 1e-10)
            return F.conv2d(input, w, self.bias, self.stride, self.padding, self.dilation, self.groups)

    class PreActBottleneck(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
            super().__init__()
            middle = outputs // 2
            self.gn1, self.conv1 = nn.GroupNorm(2, inputs), StdConv2d(inputs, middle, 1, bias=False)
            self.gn2, self.conv2 = nn.GroupNorm(2, middle), StdConv2d(middle, middle, 3, stride, 1, bias=False)
            self.gn3, self.conv3 = nn.GroupNorm(2, middle), StdConv2d(middle, outputs, 1, bias=False)
            self.relu = nn.ReLU(inplace=True)
            if stride != 1 or inputs != outputs:
                self.downsample = StdConv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.gn1(x))
            residual = x
            if hasattr(self, "downsample"):
                residual = self.downsample(out)
            out = self.conv1(out)
            out = self.conv2(self.relu(self.gn2(out)))
            return self.conv3(self.relu(self.gn3(out))) + residual

    def model() -> nn.Module:
        root = nn.Sequential(OrderedDict(conv=StdConv2d(3, 4, 3, padding=1, bias=False)))
        body = nn.Sequential(PreActBottleneck(4, 8, 2), PreActBottleneck(8, 8))
        head = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        return nn.Sequential(root, body, head)

    return Network(model=model, data=rows_and_classes(3, 6, 6), loss=classify)


@FIELD.add
def resnet_last_batch_of_one() -> Network:
    class BasicBlock(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
            self.downsample = None
            if stride != 1:
                self.downsample = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )
            nn.init.zeros_(self.bn2.weight)

        def forward(self, x: Tensor) -> Tensor:
            identity = x if self.downsample is None else self.downsample(x)
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            out += identity
            return self.relu(out)

    def model() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3, 1, 1), BasicBlock(4, 4), BasicBlock(4, 8, 2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(3, 6, 6), loss=classify, rows=13)


@FIELD.add
def eegnet_max_norm() -> Network:
    class Conv2dWithConstraint(nn.Conv2d):
        """Clips the norm of its weight before each use, as EEGNet does."""

        def __init__(self, *args: Any, max_norm: float = 1.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.max_norm = max_norm

        def forward(self, input: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.max_norm)
            return super().forward(input)

    class EEGNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temporal = nn.Conv2d(1, 4, (1, 3), padding=(0, 1), bias=False)
            self.spatial = Conv2dWithConstraint(4, 8, (3, 1), groups=4, bias=False, max_norm=0.5)
            self.pool, self.fc = nn.AvgPool2d((1, 2)), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.elu(self.spatial(self.temporal(x.unsqueeze(1))))
            return self.fc(self.pool(x).flatten(1))

    return Network(model=EEGNet, data=rows_and_classes(3, 8), loss=classify)


# Speech and sequences


@FIELD.add
def wavenet() -> Network:
    class CausalConv1d(nn.Conv1d):
        def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1) -> None:
            self.left = (kernel - 1) * dilation
            super().__init__(inputs, outputs, kernel, dilation=dilation, padding=self.left)

        def forward(self, input: Tensor) -> Tensor:
            x = super().forward(input)
            return x[:, :, : -self.left] if self.left else x

    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = CausalConv1d(8, 6, 2)
            self.filters = nn.ModuleList(parametrizations.weight_norm(CausalConv1d(6, 12, 2, 2**i)) for i in range(3))
            self.residuals = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(3))
            self.skips = nn.ModuleList(nn.Conv1d(6, 8, 1) for _ in range(3))
            self.post = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 8, 1))

        def forward(self, codes: Tensor) -> Tensor:
            x = self.front(F.one_hot(codes, 8).to(self.front.weight.dtype).transpose(1, 2))
            skip_sum: Any = 0
            for conv, residual, skip in zip(self.filters, self.residuals, self.skips, strict=True):
                a, b = conv(x).split(6, dim=1)
                z = torch.tanh(a) * torch.sigmoid(b)
                skip_sum = skip_sum + skip(z)
                x = (residual(z) + x) * math.sqrt(0.5)
            return self.post(skip_sum)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]), batch[:, 1:])

    return Network(model=WaveNet, data=lambda n, g: randint(g, 8, n, 9), loss=loss)


@FIELD.add
def conformer() -> Network:
    class RelPositionAttention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads, self.d_k = heads, width // heads
            self.linear_q, self.linear_k, self.linear_v = (nn.Linear(width, width) for _ in range(3))
            self.linear_pos, self.linear_out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
            self.pos_bias_u = nn.Parameter(torch.Tensor(heads, self.d_k))
            self.pos_bias_v = nn.Parameter(torch.Tensor(heads, self.d_k))
            nn.init.xavier_uniform_(self.pos_bias_u)
            nn.init.xavier_uniform_(self.pos_bias_v)

        def rel_shift(self, x: Tensor) -> Tensor:
            b, h, t1, t2 = x.size()
            x = torch.cat([torch.zeros((b, h, t1, 1), device=x.device, dtype=x.dtype), x], dim=-1)
            return x.view(b, h, t2 + 1, t1)[:, :, 1:].view(b, h, t1, t2)[:, :, :, : t2 // 2 + 1]

        def forward(self, x: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
            b = x.size(0)
            q = self.linear_q(x).view(b, -1, self.heads, self.d_k)
            k = self.linear_k(x).view(b, -1, self.heads, self.d_k).transpose(1, 2)
            v = self.linear_v(x).view(b, -1, self.heads, self.d_k).transpose(1, 2)
            p = self.linear_pos(pos).view(1, -1, self.heads, self.d_k).transpose(1, 2)
            ac = torch.matmul((q + self.pos_bias_u).transpose(1, 2), k.transpose(-2, -1))
            bd = self.rel_shift(torch.matmul((q + self.pos_bias_v).transpose(1, 2), p.transpose(-2, -1)))
            scores = (ac + bd) / math.sqrt(self.d_k)
            hidden = mask.unsqueeze(1).eq(0)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            attn = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
            return self.linear_out(torch.matmul(attn, v).transpose(1, 2).contiguous().view(b, -1, x.size(-1)))

    class ConvolutionModule(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1)
            self.depthwise_conv = nn.Conv1d(width, width, 3, padding=1, groups=width)
            self.norm, self.pointwise_conv2 = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.glu(self.pointwise_conv1(x.transpose(1, 2)), dim=1)
            return self.pointwise_conv2(F.silu(self.norm(self.depthwise_conv(x)))).transpose(1, 2)

    class ConformerLayer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.ff1 = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            self.ff2 = copy.deepcopy(self.ff1)
            self.norm_mha, self.self_attn = nn.LayerNorm(width), RelPositionAttention(width, 2)
            self.norm_conv, self.conv, self.norm_final = (
                nn.LayerNorm(width),
                ConvolutionModule(width),
                nn.LayerNorm(width),
            )

        def forward(self, x: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
            x = x + 0.5 * self.ff1(x)
            x = x + self.self_attn(self.norm_mha(x), pos, mask)
            x = x + self.conv(self.norm_conv(x))
            x = x + 0.5 * self.ff2(x)
            return self.norm_final(x)

    class Conformer(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed, self.width, self.pe = nn.Linear(4, width), width, None
            self.encoders = nn.ModuleList([ConformerLayer(width) for _ in range(2)])
            self.ctc = nn.Linear(width, 5)

        def positions(self, x: Tensor) -> Tensor:
            t = x.size(1)
            position = torch.arange(t - 1, -t, -1.0, device=x.device).unsqueeze(1)
            div_term = torch.exp(
                torch.arange(0, self.width, 2, device=x.device).float() * -(math.log(1e4) / self.width)
            )
            pe = torch.zeros(2 * t - 1, self.width, device=x.device)
            pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
            return pe.unsqueeze(0).to(x.dtype)

        def forward(self, feats: Tensor, lengths: Tensor) -> Tensor:
            x = self.embed(feats)
            mask = (torch.arange(x.size(1), device=x.device)[None] < lengths[:, None]).unsqueeze(1)
            pos = self.positions(x)
            for layer in self.encoders:
                x = layer(x, pos, mask)
            return self.ctc(x).log_softmax(-1)

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        return randn(g, rows, 7, 4), randint(g, 3, rows) + 5, randint(g, 4, rows, 2) + 1

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        feats, lengths, targets = batch
        log_probs = model(feats, lengths).transpose(0, 1)
        sizes = torch.full((len(feats),), 2, dtype=torch.long)
        return F.ctc_loss(log_probs, targets, lengths, sizes, reduction="sum") / feats.size(0)

    return Network(model=Conformer, data=data, loss=loss)


@FIELD.add
def ctc_concatenated_targets() -> Network:
    class DeepSpeech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 8, 3, padding=1)
            self.rnns = nn.ModuleList([nn.GRU(8, 8, bidirectional=True) for _ in range(2)])
            self.fc = nn.Linear(8, 5, bias=False)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = F.hardtanh(self.conv(x.transpose(1, 2)), 0, 20, inplace=True).permute(2, 0, 1)
            for rnn in self.rnns:
                x = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
                x, _ = rnn(x)
                x, _ = pad_packed_sequence(x)
                x = x.view(x.size(0), x.size(1), 2, -1).sum(2)
            return self.fc(x).log_softmax(-1)

    def data(rows: int, g: Generator) -> Any:
        samples = []
        for _ in range(rows):
            n = int(randint(g, 3, 1)) + 5
            samples.append((randn(g, n, 4), (randint(g, 4, int(randint(g, 2, 1)) + 1) + 1).tolist()))
        return Samples(samples)

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = pad_sequence([s[0] for s in samples], batch_first=True)
        targets = torch.IntTensor([label for s in samples for label in s[1]])
        input_lengths = torch.IntTensor([len(s[0]) for s in samples])
        return inputs, targets, input_lengths, torch.IntTensor([len(s[1]) for s in samples])

    def loss(model: Any, batch: Any) -> Tensor:
        inputs, targets, input_lengths, target_lengths = batch
        out = model(inputs, input_lengths)
        return F.ctc_loss(out, targets, input_lengths, target_lengths, zero_infinity=True)

    return Network(model=DeepSpeech, data=data, collate=collate, loss=loss)


@FIELD.add
def tacotron_teacher_forcing() -> Network:
    class LocationSensitiveAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query_layer, self.memory_layer = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
            self.v, self.location_conv = nn.Linear(6, 1, bias=False), nn.Conv1d(2, 3, 3, padding=1, bias=False)
            self.location_dense = nn.Linear(3, 6, bias=False)

        def forward(self, state: Tensor, memory: Tensor, processed: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            location = self.location_dense(self.location_conv(weights).transpose(1, 2))
            energies = self.v(torch.tanh(self.query_layer(state.unsqueeze(1)) + location + processed)).squeeze(-1)
            weights = F.softmax(energies, dim=1)
            return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights

    class Tacotron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoder = nn.Embedding(9, 8), nn.LSTM(8, 4, batch_first=True, bidirectional=True)
            self.prenet, self.attention_rnn = nn.Linear(3, 4), nn.LSTMCell(4 + 8, 8)
            self.attention_layer, self.proj = LocationSensitiveAttention(), nn.Linear(16, 3)

        def initialize_decoder_states(self, memory: Tensor) -> None:
            b, t = memory.size(0), memory.size(1)
            self.attention_hidden = memory.new_zeros(b, 8)
            self.attention_cell = memory.new_zeros(b, 8)
            self.attention_weights, self.attention_weights_cum = memory.new_zeros(b, t), memory.new_zeros(b, t)
            self.attention_context, self.memory = memory.new_zeros(b, 8), memory
            self.processed_memory = self.attention_layer.memory_layer(memory)

        def decode(self, decoder_input: Tensor) -> Tensor:
            cell_input = torch.cat((decoder_input, self.attention_context), -1)
            self.attention_hidden, self.attention_cell = self.attention_rnn(
                cell_input, (self.attention_hidden, self.attention_cell)
            )
            cat = torch.stack((self.attention_weights, self.attention_weights_cum), dim=1)
            self.attention_context, self.attention_weights = self.attention_layer(
                self.attention_hidden, self.memory, self.processed_memory, cat
            )
            self.attention_weights_cum += self.attention_weights
            return self.proj(torch.cat((self.attention_hidden, self.attention_context), dim=1))

        def forward(self, text: Tensor, mels: Tensor) -> Tensor:
            memory, _ = self.encoder(self.embedding(text))
            self.initialize_decoder_states(memory)
            output, outputs = mels.new_zeros(len(mels), 3), []
            for t in range(mels.size(1)):
                teacher = t == 0 or random.random() < 0.5
                frame = (mels[:, t - 1] if t else output) if teacher else output.detach()
                output = self.decode(F.relu(self.prenet(frame)))
                outputs.append(output)
            return torch.stack(outputs, 1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randint(g, 9, rows, 5), randn(g, rows, 4, 3)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(*batch), batch[1]) + F.l1_loss(model(*batch), batch[1])

    return Network(model=Tacotron, data=data, loss=loss, draws=True)


@FIELD.add
def pointer_network() -> Network:
    class PointerNet(nn.Module):
        def __init__(self, hidden: int = 8) -> None:
            super().__init__()
            self.embedding, self.encoder = nn.Linear(2, hidden), nn.LSTM(hidden, hidden, batch_first=True)
            self.decoder_cell = nn.LSTMCell(hidden, hidden)
            self.w1, self.w2 = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
            self.vt = nn.Linear(hidden, 1, bias=False)
            self.decoder_input0 = nn.Parameter(torch.FloatTensor(hidden), requires_grad=True)
            nn.init.uniform_(self.decoder_input0, -1, 1)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            b, n, _ = inputs.size()
            embedded = self.embedding(inputs)
            encoded, (h, c) = self.encoder(embedded)
            h, c, x = h.squeeze(0), c.squeeze(0), self.decoder_input0.unsqueeze(0).expand(b, -1)
            mask, logits, pointers = torch.zeros(b, n, dtype=torch.bool, device=inputs.device), [], []
            keys = self.w1(encoded)
            for _ in range(n):
                h, c = self.decoder_cell(x, (h, c))
                scores = self.vt(torch.tanh(keys + self.w2(h).unsqueeze(1))).squeeze(-1)
                scores = scores.masked_fill(mask, -1e4)
                index = scores.argmax(1)
                logits.append(F.log_softmax(scores, -1))
                pointers.append(index)
                mask = mask.clone()
                mask[torch.arange(b), index] = True
                x = embedded[torch.arange(b), index]
            return torch.stack(logits, 1), torch.stack(pointers, 1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        points = torch.rand(rows, 4, 2, generator=g)
        return points, points[..., 0].argsort(1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, _ = model(batch[0])
        return F.nll_loss(logits.reshape(-1, logits.size(-1)), batch[1].reshape(-1))

    return Network(model=PointerNet, data=data, loss=loss)


@FIELD.add
def neural_turing_machine() -> Network:
    class NTM(nn.Module):
        def __init__(self, n: int = 5, m: int = 4, hidden: int = 8) -> None:
            super().__init__()
            self.n, self.m = n, m
            self.register_buffer("mem_bias", torch.rand(n, m))
            self.controller, self.fc = nn.LSTMCell(3 + m, hidden), nn.Linear(hidden + m, 3)
            self.read_head, self.write_head = nn.Linear(hidden, m + 6), nn.Linear(hidden, 3 * m + 6)
            self.h_bias = nn.Parameter(torch.randn(1, hidden) * 0.05)

        def address(self, memory: Tensor, parameters: Tensor, previous: Tensor) -> Tensor:
            k, beta, gate, shift, gamma = torch.split(parameters, [self.m, 1, 1, 3, 1], dim=1)
            similarity = F.cosine_similarity(memory + 1e-16, k.unsqueeze(1) + 1e-16, dim=-1)
            content = F.softmax(F.softplus(beta) * similarity, dim=1)
            gated = torch.sigmoid(gate) * content + (1 - torch.sigmoid(gate)) * previous
            shift = F.softmax(shift, dim=1)
            result = torch.zeros_like(gated)
            for b in range(gated.size(0)):
                padded = torch.cat([gated[b, -1:], gated[b], gated[b, :1]])
                result[b] = F.conv1d(padded.view(1, 1, -1), shift[b].view(1, 1, -1)).view(-1)
            sharp = result ** (1 + F.softplus(gamma))
            return torch.div(sharp, torch.sum(sharp, dim=1).view(-1, 1) + 1e-16)

        def forward(self, x: Tensor) -> Tensor:
            b, steps = x.size(0), x.size(1)
            memory = self.mem_bias.clone().repeat(b, 1, 1)
            h, c = self.h_bias.clone().repeat(b, 1), torch.zeros(b, 8, dtype=x.dtype)
            w_read = w_write = torch.zeros(b, self.n, dtype=x.dtype)
            read, outputs = torch.zeros(b, self.m, dtype=x.dtype), []
            for t in range(steps):
                h, c = self.controller(torch.cat([x[:, t], read], 1), (h, c))
                w_read = self.address(memory, self.read_head(h), w_read)
                read = torch.matmul(w_read.unsqueeze(1), memory).squeeze(1)
                parameters, e, a = torch.split(self.write_head(h), [self.m + 6, self.m, self.m], dim=1)
                w_write = self.address(memory, parameters, w_write)
                erase = torch.matmul(w_write.unsqueeze(-1), torch.sigmoid(e).unsqueeze(1))
                memory = memory * (1 - erase) + torch.matmul(w_write.unsqueeze(-1), a.unsqueeze(1))
                outputs.append(torch.sigmoid(self.fc(torch.cat([h, read], 1))))
            return torch.stack(outputs, 1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        x = randint(g, 2, rows, 4, 3).float()
        return x, x.flip(1)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy(model(batch[0]), batch[1])

    return Network(model=NTM, data=data, loss=loss, rows=11)


@FIELD.add
def tree_lstm_padded() -> Network:
    class TreeLSTM(nn.Module):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.words, self.width = nn.Embedding(12, width, padding_idx=0), width
            self.ioux, self.iouh = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
            self.fx, self.fh = nn.Linear(width, width), nn.Linear(width, width)
            self.head = nn.Linear(width, 3)

        def forward(self, tokens: Tensor, children: Tensor) -> Tensor:
            b, n = tokens.shape
            x = self.words(tokens)
            h, c = x.new_zeros(b, n + 1, self.width), x.new_zeros(b, n + 1, self.width)
            rows = torch.arange(b)[:, None]
            for node in range(n):
                kids = children[:, node]
                child_h, child_c = h[rows, kids], c[rows, kids]
                iou = self.ioux(x[:, node]) + self.iouh(child_h.sum(1))
                i, o, u = torch.split(iou, self.width, dim=1)
                f = torch.sigmoid(self.fh(child_h) + self.fx(x[:, node]).unsqueeze(1))
                new_c = torch.sigmoid(i) * torch.tanh(u) + (f * child_c).sum(1)
                new_h = torch.sigmoid(o) * torch.tanh(new_c)
                h, c = h.clone(), c.clone()
                h[:, node + 1], c[:, node + 1] = new_h, new_c
            return self.head(h[:, -1])

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        children = torch.stack([torch.stack([randint(g, node + 1, 2) for node in range(5)]) for _ in range(rows)])
        return randint(g, 12, rows, 5), children, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=TreeLSTM, data=data, loss=loss)


@FIELD.add
def packed_sorted_inside() -> Network:
    class TextLSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 6, padding_idx=0)
            self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
            self.attn, self.fc = nn.Linear(10, 1), nn.Linear(10, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            lengths, order = torch.sort(lengths, dim=0, descending=True)
            _, unsort = torch.sort(order, dim=0)
            packed = pack_padded_sequence(self.embed(x[order]), lengths.cpu().numpy(), batch_first=True)
            self.lstm.flatten_parameters()
            out, (h_n, _) = self.lstm(packed)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.size(1))
            out = out.index_select(0, unsort)
            mask = x.ne(0)
            weights = self.attn(out).squeeze(-1).masked_fill(~mask, float("-inf")).softmax(-1)
            pooled = torch.bmm(weights.unsqueeze(1), out).squeeze(1)
            return self.fc(pooled + torch.cat([h_n[-2], h_n[-1]], 1).index_select(0, unsort))

    def data(rows: int, g: Generator) -> Any:
        return Samples(
            [
                {"text": randint(g, 12, int(randint(g, 5, 1)) + 2) + 1, "label": int(randint(g, 3, 1))}
                for _ in range(rows)
            ]
        )

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        texts = [s["text"] for s in samples]
        return {
            "text": pad_sequence(texts, batch_first=True, padding_value=0),
            "lengths": torch.tensor([len(t) for t in texts]),
            "label": torch.tensor([s["label"] for s in samples]),
        }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["text"], batch["lengths"]), batch["label"])

    return Network(model=TextLSTM, data=data, collate=collate, loss=loss)


# Tables and recommendation


@FIELD.add
def tabnet() -> Network:
    def sparsemax(z: Tensor) -> Tensor:
        z = z - z.max(-1, keepdim=True)[0]
        ordered, _ = torch.sort(z, dim=-1, descending=True)
        k = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
        support = k * ordered > ordered.cumsum(-1) - 1
        size = support.sum(-1, keepdim=True)
        tau = (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size.to(z.dtype)
        return torch.clamp(z - tau, min=0)

    class GBN(nn.Module):
        def __init__(self, width: int, virtual_batch_size: int = 3) -> None:
            super().__init__()
            self.virtual_batch_size, self.bn = virtual_batch_size, nn.BatchNorm1d(width, momentum=0.01)

        def forward(self, x: Tensor) -> Tensor:
            chunks = x.chunk(int(np.ceil(x.shape[0] / self.virtual_batch_size)), 0)
            return torch.cat([self.bn(chunk) for chunk in chunks], dim=0)

    class TabNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.initial_bn, self.shared = nn.BatchNorm1d(6), nn.Linear(6, 16, bias=False)
            self.glu_bn = nn.ModuleList(GBN(16) for _ in range(2))
            self.att = nn.ModuleList(nn.Linear(4, 6, bias=False) for _ in range(2))
            self.att_bn, self.final = nn.ModuleList(GBN(6) for _ in range(2)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.initial_bn(x)
            prior, m_loss, att, out = torch.ones_like(x), x.new_zeros(()), x[:, :4], x.new_zeros(len(x), 4)
            for bn, att_linear, att_bn in zip(self.glu_bn, self.att, self.att_bn, strict=True):
                m = sparsemax(att_bn(att_linear(att)) * prior)
                m_loss = m_loss + torch.mean(torch.sum(torch.mul(m, torch.log(m + 1e-15)), dim=1))
                prior = torch.mul(1.3 - m, prior)
                hidden = bn(self.shared(m * x))
                hidden = hidden[:, :8] * torch.sigmoid(hidden[:, 8:])
                out, att = out + F.relu(hidden[:, :4]), hidden[:, 4:]
            return self.final(out), m_loss / 2

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, m_loss = model(batch[0])
        return F.cross_entropy(out, batch[1]) - 1e-2 * m_loss

    return Network(model=TabNet, data=rows_and_classes(6), loss=loss)


@FIELD.add
def dlrm_offsets() -> Network:
    class DLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum") for n in (7, 5))
            self.bot_l = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
            self.cross = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
            self.top_l = nn.Sequential(nn.Linear(12 + 3, 6), nn.ReLU(), nn.Linear(6, 1), nn.Sigmoid())

        def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
            x = self.bot_l(dense)
            ly = [emb(i, o) for emb, i, o in zip(self.emb_l, indices, offsets, strict=True)]
            t = torch.cat([x, *ly], dim=1).view((len(x), -1, 4))
            z = torch.bmm(t, torch.transpose(t, 1, 2))
            li = torch.tensor([i for i in range(3) for j in range(i)])
            lj = torch.tensor([j for i in range(3) for j in range(i)])
            x0 = crossed = t.flatten(1)
            for layer in self.cross:
                crossed = x0 * layer(crossed) + crossed
            return self.top_l(torch.cat([crossed, z[:, li, lj]], dim=1)).squeeze(1)

    def data(rows: int, g: Generator) -> Any:
        def bag(n: int) -> Tensor:
            return randint(g, n, int(randint(g, 3, 1)) + 1)

        return Samples([(randn(g, 3), (bag(7), bag(5)), float(randint(g, 2, 1))) for _ in range(rows)])

    def collate(samples: list[Any]) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        dense, bags, labels = zip(*samples, strict=True)
        offsets, indices = [], []
        for table in zip(*bags, strict=True):
            sizes = torch.tensor([0] + [len(b) for b in table[:-1]])
            offsets.append(torch.cumsum(sizes, 0))
            indices.append(torch.cat(table))
        return torch.stack(dense), offsets, indices, torch.tensor(labels)

    def loss(model: Any, batch: tuple[Tensor, list[Tensor], list[Tensor], Tensor]) -> Tensor:
        dense, offsets, indices, labels = batch
        out = model(dense, offsets, indices)
        return F.binary_cross_entropy(out, labels.to(out.dtype))

    return Network(model=DLRM, data=data, collate=collate, loss=loss)


# Generative models


@FIELD.add
def bayes_by_backprop() -> Network:
    class BayesLinear(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.W_mu = nn.Parameter(torch.empty((outputs, inputs)).normal_(0, 0.3))
            self.W_rho = nn.Parameter(torch.empty((outputs, inputs)).normal_(-3, 0.1))
            self.bias = nn.Parameter(torch.zeros(outputs))

        def forward(self, x: Tensor) -> Tensor:
            self.W_sigma = torch.log1p(torch.exp(self.W_rho))
            mean, var = F.linear(x, self.W_mu, self.bias), F.linear(x**2, self.W_sigma**2)
            eps = torch.empty(mean.size(), dtype=mean.dtype).normal_(0, 1)
            return mean + torch.sqrt(1e-16 + var) * eps

        def kl_loss(self) -> Tensor:
            sigma, prior = torch.log1p(torch.exp(self.W_rho)), 0.1
            ratio = (sigma / prior).pow(2) + (self.W_mu / prior).pow(2) - 1
            return 0.5 * (2 * torch.log(prior / sigma) + ratio).sum()

    class BNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = BayesLinear(6, 8), nn.Softplus(), BayesLinear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.fc2(self.act(self.fc1(x)))
            kl: Any = 0.0
            for module in self.modules():
                if hasattr(module, "kl_loss"):
                    kl = kl + module.kl_loss()
            return x, kl

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs, kl = model(batch[0])
        return F.cross_entropy(outputs, batch[1]) + kl / 3 / 17

    return Network(model=BNN, data=rows_and_classes(6), loss=loss, draws=True)


@FIELD.add
def glow_act_norm() -> Network:
    class ActNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.loc, self.scale = nn.Parameter(torch.zeros(1, width)), nn.Parameter(torch.ones(1, width))
            self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

        def initialize(self, x: Tensor) -> None:
            with torch.no_grad():
                mean, std = x.mean(0, keepdim=True), x.std(0, keepdim=True)
                self.loc.data.copy_(-mean)
                self.scale.data.copy_(1 / (std + 1e-6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.initialized.item() == 0:
                self.initialize(x)
                self.initialized.fill_(1)
            return self.scale * (x + self.loc), self.scale.abs().log().sum()

    class InvConv(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            weight = np.linalg.qr(np.random.RandomState(0).randn(width, width))[0].astype(np.float32)
            p, lower, upper = torch.linalg.lu(torch.from_numpy(weight))
            s = torch.diag(upper)
            self.register_buffer("w_p", p)
            self.register_buffer("l_mask", torch.tril(torch.ones(width, width), -1))
            self.register_buffer("s_sign", torch.sign(s))
            self.register_buffer("l_eye", torch.eye(width))
            self.w_l, self.w_u = nn.Parameter(lower), nn.Parameter(torch.triu(upper, 1))
            self.w_s = nn.Parameter(torch.log(torch.abs(s)))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            lower = self.w_l * self.l_mask + self.l_eye
            upper = self.w_u * self.l_mask.T + torch.diag(self.s_sign * torch.exp(self.w_s))
            return x @ (self.w_p @ lower @ upper).T, self.w_s.sum()

    class Coupling(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(width // 2, 8), nn.ReLU(inplace=True), nn.Linear(8, width))
            self.net[-1].weight.data.mul_(0.1)  # type: ignore[union-attr, operator]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, 1)
            log_s, t = self.net(a).chunk(2, 1)
            s = torch.sigmoid(log_s + 2)
            return torch.cat([a, (b + t) * s], 1), torch.sum(torch.log(s), 1)

    class Glow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flows = nn.ModuleList(layer for _ in range(2) for layer in (ActNorm(4), InvConv(4), Coupling(4)))

        def forward(self, x: Tensor) -> Tensor:
            logdet: Any = 0
            for flow in self.flows:
                x, det = flow(x)
                logdet = logdet + det
            return (-0.5 * (x**2 + math.log(2 * math.pi)).sum(1) + logdet).mean()

    return Network(model=Glow, data=lambda n, g: (2 * randn(g, n, 4) + 1,), loss=lambda model, batch: -model(batch[0]))


@FIELD.add
def sliced_score_matching() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 12), nn.Softplus(), nn.Linear(12, 12), nn.Softplus(), nn.Linear(12, 4))

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        samples = batch[0].detach().requires_grad_(True)
        vectors = torch.randn_like(samples)
        vectors = vectors / torch.norm(vectors, dim=-1, keepdim=True)
        score = model(samples)
        grad1 = (score * vectors).sum(dim=-1)
        loss1 = grad1**2 * 0.5
        grad2 = torch.autograd.grad(grad1.sum(), samples, create_graph=True)[0]
        return (loss1 + torch.sum(vectors * grad2, dim=-1)).mean()

    return Network(model=model, data=lambda n, g: (randn(g, n, 4),), loss=loss, draws=True)


@FIELD.add
def langevin_energy_model() -> Network:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).squeeze(-1)

    def generate(model: Any, x: Tensor) -> Tensor:
        was_training = model.training
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad = False
        x.requires_grad = True
        noise = torch.randn_like(x)
        for _ in range(3):
            noise.normal_(0, 0.05)
            x.data.add_(noise.data)
            x.data.clamp_(min=-3.0, max=3.0)
            model(x).sum().backward()
            assert x.grad is not None
            x.grad.data.clamp_(-0.3, 0.3)
            x.data.add_(-0.5 * x.grad.data)
            x.grad.detach_()
            x.grad.zero_()
        for parameter in model.parameters():
            parameter.requires_grad = True
        model.train(was_training)
        return x.detach()

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        real = batch[0]
        fake = generate(model, torch.rand_like(real) * 2 - 1)
        real_out, fake_out = model(torch.cat([real, fake], dim=0)).chunk(2, dim=0)
        return 0.1 * (real_out**2 + fake_out**2).mean() + real_out.mean() - fake_out.mean()

    return Network(model=Energy, data=lambda n, g: (randn(g, n, 4),), loss=loss, draws=True)


@FIELD.add
def vq_gan_two_optimizers() -> Network:
    class VQGAN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Conv1d(1, 4, 2, 2), nn.ConvTranspose1d(4, 1, 2, 2)
            self.codebook = nn.Embedding(6, 4)
            self.codebook.weight.data.uniform_(-1.0 / 6, 1.0 / 6)
            self.discriminator = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv1d(4, 1, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x).transpose(1, 2)
            flat = z.reshape(-1, 4)
            d = (
                flat.pow(2).sum(1, keepdim=True)
                + self.codebook.weight.pow(2).sum(1)
                - 2 * flat @ self.codebook.weight.t()
            )
            q = self.codebook(d.argmin(1)).view(z.shape)
            commit = F.mse_loss(q.detach(), z) * 0.25 + F.mse_loss(q, z.detach())
            return self.decoder((z + (q - z).detach()).transpose(1, 2)), commit

    def step(hand: Any, batch: tuple[Tensor]) -> None:
        def generator(part: tuple[Tensor]) -> Tensor:
            out, commit = hand.model(part[0])
            return F.l1_loss(out, part[0]) + commit - 0.1 * hand.model.discriminator(out).mean()

        def discriminator(part: tuple[Tensor]) -> Tensor:
            with torch.no_grad():
                fake, _ = hand.model(part[0])
            real_logits, fake_logits = hand.model.discriminator(part[0]), hand.model.discriminator(fake)
            return 0.5 * (F.relu(1 - real_logits).mean() + F.relu(1 + fake_logits).mean())

        hand.minimize(generator, "vq")
        hand.minimize(discriminator, "disc")

    def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
        own = [*model.encoder.parameters(), *model.decoder.parameters(), *model.codebook.parameters()]
        return {
            "vq": torch.optim.Adam(own, lr=1e-2, betas=(0.5, 0.9), eps=1e-4),
            "disc": torch.optim.SGD(model.discriminator.parameters(), lr=1e-2),
        }

    return Network(model=VQGAN, data=lambda n, g: (randn(g, n, 1, 6),), optimizer=optimizers, step=step)


# Reinforcement learning and self-supervision


@FIELD.add
def dqn_target_network() -> Network:
    class DQN(nn.Module):
        def __init__(self, sync_every: int = 2) -> None:
            super().__init__()
            self.online = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            self.target = copy.deepcopy(self.online)
            for p in self.target.parameters():
                p.requires_grad = False
            self.sync_every, self.curr_step = sync_every, 0

        def forward(self, x: Tensor, model: str = "online") -> Tensor:
            return self.online(x) if model == "online" else self.target(x)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        state, action, reward, next_state, done = batch
        if model.curr_step % model.sync_every == 0:
            model.target.load_state_dict(model.online.state_dict())
        model.curr_step += 1
        td_est = model(state, model="online")[torch.arange(0, len(state)), action]
        with torch.no_grad():
            best = torch.argmax(model(next_state, model="online"), dim=1)
            next_q = model(next_state, model="target")[torch.arange(0, len(state)), best]
            td_tgt = reward + (1 - done) * 0.9 * next_q
        return F.smooth_l1_loss(td_est, td_tgt)

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        done = randint(g, 2, rows).float()
        return randn(g, rows, 4), randint(g, 2, rows), randn(g, rows), randn(g, rows, 4), done

    return Network(model=DQN, data=data, loss=loss)


@FIELD.add
def sac() -> Network:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
            self.q1 = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
            self.q2 = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
            self.q1_target, self.q2_target = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
            self.q1_target.requires_grad_(False)
            self.q2_target.requires_grad_(False)
            self.log_alpha = nn.Parameter(torch.zeros(1))

        def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_std = self.actor(obs).chunk(2, -1)
            normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
            u = normal.rsample()
            a = torch.tanh(u)
            return a, (normal.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1)

    def step(hand: Any, batch: tuple[Tensor, ...]) -> None:
        model = hand.model

        def critic(part: tuple[Tensor, ...]) -> Tensor:
            obs, actions, rewards, next_obs = part
            with torch.no_grad():
                a, logp = model.act(next_obs)
                x = torch.cat([next_obs, a], -1)
                q = torch.min(model.q1_target(x), model.q2_target(x)).squeeze(-1)
                target = rewards + 0.9 * (q - model.log_alpha.exp() * logp)
            x = torch.cat([obs, actions], -1)
            return F.mse_loss(model.q1(x).squeeze(-1), target) + F.mse_loss(model.q2(x).squeeze(-1), target)

        def actor(part: tuple[Tensor, ...]) -> Tensor:
            a, logp = model.act(part[0])
            x = torch.cat([part[0], a], -1)
            return (model.log_alpha.exp().detach() * logp - torch.min(model.q1(x), model.q2(x)).squeeze(-1)).mean()

        def temperature(part: tuple[Tensor, ...]) -> Tensor:
            with torch.no_grad():
                _, logp = model.act(part[0])
            return (-model.log_alpha * (logp - 2.0)).mean()

        hand.minimize(critic, "critic")
        hand.minimize(actor, "actor")
        hand.minimize(temperature, "alpha")
        with torch.no_grad():
            for q, t in ((model.q1, model.q1_target), (model.q2, model.q2_target)):
                for p, p_target in zip(q.parameters(), t.parameters(), strict=True):
                    p_target.data.mul_(0.9).add_(0.1 * p.data)

    def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.SGD([*model.q1.parameters(), *model.q2.parameters()], lr=0.05),
            "actor": torch.optim.SGD(model.actor.parameters(), lr=0.05),
            "alpha": torch.optim.SGD([model.log_alpha], lr=0.05),
        }

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        return randn(g, rows, 3), randn(g, rows, 2).tanh(), randn(g, rows), randn(g, rows, 3)

    return Network(model=Agent, data=data, optimizer=optimizers, step=step, draws=True)


@FIELD.add
def ppo_clipped() -> Network:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.pi, self.v = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2), nn.Linear(8, 1)

        def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = self.base(obs)
            dist = torch.distributions.Categorical(logits=self.pi(hidden))
            return self.v(hidden).squeeze(-1), dist.log_prob(actions), dist.entropy()

        def forward(self, *args: Any) -> None:
            raise NotImplementedError

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        values, log_prob, entropy = model.evaluate_actions(batch["obs"], batch["actions"])
        ratio = torch.exp(log_prob - batch["old_log_prob"])
        advantages = batch["advantages"]
        policy = -torch.min(advantages * ratio, advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
        return policy + 0.5 * F.mse_loss(batch["returns"], values) - 0.01 * torch.mean(entropy)

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {
            "obs": randn(g, rows, 4),
            "actions": randint(g, 2, rows),
            "old_log_prob": -torch.rand(rows, generator=g),
            "advantages": randn(g, rows),
            "returns": randn(g, rows),
        }

    return Network(model=ActorCritic, data=data, loss=loss)


@FIELD.add
def simclr() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        features = F.normalize(model(torch.cat(batch, dim=0)), dim=1)
        labels = torch.cat([torch.arange(len(batch[0])) for _ in range(2)], dim=0)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        similarity = torch.matmul(features, features.T)
        mask = torch.eye(len(labels), dtype=torch.bool)
        same, similarity = same[~mask].view(len(labels), -1), similarity[~mask].view(len(labels), -1)
        logits = torch.cat([similarity[same].view(len(labels), -1), similarity[~same].view(len(labels), -1)], dim=1)
        return F.cross_entropy(logits / 0.5, torch.zeros(len(labels), dtype=torch.long))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    return Network(model=model, data=lambda n, g: (randn(g, n, 6), randn(g, n, 6)), loss=loss)


@FIELD.add
def clip_logit_scale() -> Network:
    class CLIP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual, self.token_embedding = nn.Linear(6, 4), nn.Embedding(9, 4)
            self.text_projection = nn.Parameter(torch.empty(4, 4))
            nn.init.normal_(self.text_projection, std=0.5)
            self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.5))

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            image_features = self.visual(image)
            text_features = self.token_embedding(text)[torch.arange(text.shape[0]), text.argmax(-1)]
            text_features = text_features @ self.text_projection
            image_features = image_features / image_features.norm(dim=1, keepdim=True)
            text_features = text_features / text_features.norm(dim=1, keepdim=True)
            logits = self.logit_scale.exp() * image_features @ text_features.t()
            return logits, logits.t()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        per_image, per_text = model(*batch)
        labels = torch.arange(len(per_image))
        return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2

    return Network(model=CLIP, data=lambda n, g: (randn(g, n, 6), randint(g, 9, n, 4)), loss=loss)


@FIELD.add
def dino_multi_crop() -> Network:
    class DINOLoss(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, width))

        def forward(self, student_output: Tensor, teacher_output: Tensor) -> Tensor:
            student_out = (student_output / 0.5).chunk(3)
            teacher_out = F.softmax((teacher_output - self.center) / 0.3, dim=-1).detach().chunk(2)
            total: Any = 0
            terms = 0
            for iq, q in enumerate(teacher_out):
                for v, student in enumerate(student_out):
                    if v == iq:
                        continue
                    total = total + torch.sum(-q * F.log_softmax(student, dim=-1), dim=-1).mean()
                    terms += 1
            self.update_center(teacher_output)
            return total / terms

        @torch.no_grad()
        def update_center(self, teacher_output: Tensor) -> None:
            batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
            self.center = self.center * 0.9 + batch_center * 0.1

    class DINO(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
            self.teacher = copy.deepcopy(self.student)
            self.teacher.requires_grad_(False)
            self.criterion = DINOLoss(5)

        def forward(self, crops: list[Tensor]) -> Tensor:
            with torch.no_grad():
                for p, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                    t.data.mul_(0.9).add_((1 - 0.9) * p.detach().data)
            return self.criterion(self.student(torch.cat(crops)), self.teacher(torch.cat(crops[:2])))

    def data(rows: int, g: Generator) -> tuple[Tensor, ...]:
        return tuple(randn(g, rows, 6) for _ in range(3))

    return Network(model=DINO, data=data, loss=lambda model, batch: model(list(batch)))


@FIELD.add
def batch_hard_triplet() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = model(batch[0]), batch[1]
        n = inputs.size(0)
        dist = torch.pow(inputs, 2).sum(dim=1, keepdim=True).expand(n, n)
        dist = dist + dist.t()
        dist = torch.addmm(dist, inputs, inputs.t(), beta=1, alpha=-2).clamp(min=1e-12).sqrt()
        mask = targets.expand(n, n).eq(targets.expand(n, n).t())
        dist_ap, dist_an = [], []
        for i in range(n):
            dist_ap.append(dist[i][mask[i]].max().unsqueeze(0))
            others = dist[i][mask[i] == 0]
            dist_an.append(others.min().unsqueeze(0) if len(others) else dist_ap[-1] + 1)
        ap, an = torch.cat(dist_ap), torch.cat(dist_an)
        return F.margin_ranking_loss(an, ap, torch.ones_like(an), margin=0.3)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


# Language models and recurrences


@FIELD.add
def rwkv() -> Network:
    class TimeMix(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.time_decay = nn.Parameter(torch.linspace(-2, 1, width))
            self.time_first = nn.Parameter(torch.ones(width) * math.log(0.3))
            self.time_mix_k = nn.Parameter(torch.full((1, 1, width), 0.4))
            self.time_mix_r = nn.Parameter(torch.full((1, 1, width), 0.6))
            self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
            self.key, self.value, self.receptance, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

        def wkv(self, k: Tensor, v: Tensor) -> Tensor:
            w, u = -torch.exp(self.time_decay), self.time_first
            aa, bb = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
            pp, out = torch.full_like(k[:, 0], -1e38), torch.empty_like(k)
            for t in range(k.size(1)):
                ww = u + k[:, t]
                q = torch.maximum(pp, ww)
                e1, e2 = torch.exp(pp - q), torch.exp(ww - q)
                out[:, t] = (e1 * aa + e2 * v[:, t]) / (e1 * bb + e2)
                ww = pp + w
                q = torch.maximum(ww, k[:, t])
                e1, e2 = torch.exp(ww - q), torch.exp(k[:, t] - q)
                aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, q
            return out

        def forward(self, x: Tensor) -> Tensor:
            xx = self.time_shift(x)
            k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
            r = self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r))
            return self.output(torch.sigmoid(r) * self.wkv(k, self.value(x)))

    class RWKV(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.emb, self.ln0 = nn.Embedding(11, width), nn.LayerNorm(width)
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"ln1": nn.LayerNorm(width), "att": TimeMix(width)}) for _ in range(2)
            )
            self.ln_out, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)

        def forward(self, idx: Tensor) -> Tensor:
            x = self.ln0(self.emb(idx))
            for block in self.blocks:
                assert isinstance(block, nn.ModuleDict)
                x = x + block["att"](block["ln1"](x))
            return self.head(self.ln_out(x))

    def loss(model: Any, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch[:, 1:].reshape(-1))

    return Network(model=RWKV, data=lambda n, g: randint(g, 11, n, 6), loss=loss)


@FIELD.add
def griffin_recurrence() -> Network:
    class RGLRU(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.a_param = nn.Parameter(torch.rand(width) + 0.5)
            self.input_gate = nn.Parameter(torch.randn(heads, width // heads, width // heads) / 2)
            self.a_gate = nn.Parameter(torch.randn(heads, width // heads, width // heads) / 2)
            self.heads = heads

        def block_diagonal(self, x: Tensor, w: Tensor) -> Tensor:
            b, t, c = x.shape
            return torch.einsum("bthi,hij->bthj", x.view(b, t, self.heads, -1), w).reshape(b, t, c)

        def forward(self, x: Tensor, segment_pos: Tensor) -> Tensor:
            gate_x = torch.sigmoid(self.block_diagonal(x, self.input_gate))
            log_a = -8.0 * torch.sigmoid(self.block_diagonal(x, self.a_gate)) * F.softplus(self.a_param)
            a, reset = torch.exp(log_a), (segment_pos == 0)[..., None]
            multiplier = torch.where(reset, torch.ones_like(a), torch.sqrt(-torch.expm1(2 * log_a)))
            normalized = x * gate_x * multiplier
            h, out = x.new_zeros(x.shape[0], x.shape[2]), torch.zeros_like(x)
            for t in range(x.shape[1]):
                h = torch.where(reset[:, t], 0.0, a[:, t]) * h + normalized[:, t]
                out[:, t] = h
            return out

    class Griffin(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embedder, self.norm = nn.Embedding(11, width), nn.RMSNorm(width)
            self.linear_y, self.linear_x = nn.Linear(width, width), nn.Linear(width, width)
            self.conv_w, self.conv_b = nn.Parameter(torch.randn(3, width) / 2), nn.Parameter(torch.zeros(width))
            self.lru, self.linear_out = RGLRU(width, 2), nn.Linear(width, width)

        def forward(self, tokens: Tensor, segment_pos: Tensor) -> Tensor:
            x = self.embedder(tokens) * math.sqrt(8)
            h = self.norm(x)
            y, z = F.gelu(self.linear_y(h), approximate="tanh"), self.linear_x(h)
            shifted: Any = 0.0
            for shift in range(3):
                part = F.pad(z, (0, 0, shift, 0))[:, : z.shape[1]]
                shifted = shifted + part * self.conv_w[shift]
            x = x + self.linear_out(self.lru(shifted + self.conv_b, segment_pos) * y)
            return 30.0 * torch.tanh(x @ self.embedder.weight.T / 30.0)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        cut = randint(g, 4, rows, 1) + 1
        place = torch.arange(6)[None].expand(rows, -1)
        return randint(g, 11, rows, 7), torch.where(place < cut, place, place - cut)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :-1], batch[1]).flatten(0, 1), batch[0][:, 1:].flatten())

    return Network(model=Griffin, data=data, loss=loss)


@FIELD.add
def hyena_filters() -> Network:
    class HyenaFilter(nn.Module):
        def __init__(self, width: int, length: int) -> None:
            super().__init__()
            t = torch.linspace(0, 1, length)[None, :, None]
            w = 2 * math.pi * torch.arange(length)[None, :, None] / length
            self.register_buffer("z", torch.cat([t, torch.cos(w), torch.sin(w)], -1))
            self.implicit_filter = nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, width, bias=False))
            self.register_buffer("deltas", torch.linspace(1, 4, width)[None, None])
            self.bias = nn.Parameter(torch.randn(width))
            for param in self.implicit_filter.parameters():
                param._optim = {"weight_decay": 0.0}  # type: ignore[attr-defined]

        def forward(self, v: Tensor) -> Tensor:
            length = v.shape[-1]
            h = self.implicit_filter(self.z[:, :length]) * torch.exp(-self.z[:, :length, :1] * self.deltas)
            k = h[0].transpose(0, 1)
            k_f = torch.fft.rfft(k, n=2 * length) / (2 * length)
            v_f = torch.fft.rfft(v, n=2 * length)
            y = torch.fft.irfft(v_f * k_f, n=2 * length, norm="forward")[..., :length]
            return y + v * self.bias[:, None]

    class Hyena(nn.Module):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.embed, self.in_proj = nn.Embedding(9, width), nn.Linear(width, 3 * width)
            self.short_filter = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
            self.filter_fn, self.out_proj = HyenaFilter(width, 8), nn.Linear(width, 9)

        def forward(self, tokens: Tensor) -> Tensor:
            u = self.in_proj(self.embed(tokens)).transpose(1, 2)
            x0, x1, v = self.short_filter(u)[..., : u.shape[-1]].split(6, dim=1)
            return self.out_proj((self.filter_fn(v * x1) * x0).transpose(1, 2))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        special = [p for p in model.parameters() if hasattr(p, "_optim")]
        usual = [p for p in model.parameters() if not hasattr(p, "_optim")]
        groups = [{"params": usual}, {"params": special, **special[0]._optim}]  # type: ignore[attr-defined]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-5)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Network(model=Hyena, data=lambda n, g: randint(g, 9, n, 8), loss=loss, optimizer=optimizer)


@FIELD.add
def mixture_of_depths() -> Network:
    class Depth(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.router, self.block = (
                nn.Linear(width, 1, bias=False),
                nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True),
            )

        def forward(self, x: Tensor) -> Tensor:
            _, s, d = x.shape
            weights, indices = torch.topk(self.router(x).squeeze(-1), s // 2, dim=1, sorted=False)
            indices, order = torch.sort(indices, dim=1)
            weights = torch.gather(weights, 1, order)
            expanded = indices.unsqueeze(-1).expand(-1, -1, d)
            processed = self.block(torch.gather(x, 1, expanded)) * torch.sigmoid(weights).unsqueeze(-1)
            return torch.scatter_add(x, dim=1, index=expanded, src=processed)

    class Decoder(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.wte, self.layers = nn.Embedding(11, width), nn.ModuleList(Depth(width) for _ in range(2))
            self.wpe = nn.Embedding(6, width)
            self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, idx: Tensor) -> Tensor:
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(self.ln_f(x))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return Network(model=Decoder, data=lambda n, g: randint(g, 11, n, 7), loss=loss)


@FIELD.add
def switch_capacity_by_sequence() -> Network:
    class SwitchFFN(nn.Module):
        def __init__(self, width: int, experts: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
                for _ in range(experts)
            )
            self.aux_loss: Any = None
            self.z_loss: Any = None

        def forward(self, x: Tensor) -> Tensor:
            _, s, _ = x.shape
            logits = self.gate(x)
            probs = logits.softmax(-1)
            weight, route = probs.max(-1)
            one_hot = F.one_hot(route, len(self.experts)).to(x.dtype)
            capacity = math.ceil(1.0 * s / len(self.experts))
            kept = (one_hot.cumsum(1) * one_hot).sum(-1) <= capacity
            self.aux_loss = len(self.experts) * (one_hot.mean(1) * probs.mean(1)).sum(-1).mean()
            self.z_loss = torch.logsumexp(logits, -1).square().mean()
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                idx = torch.nonzero((route == i) & kept, as_tuple=True)
                if idx[0].numel():
                    out[idx] = expert(x[idx])
            return out * (weight * kept)[..., None]

    class Switch(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, width)
            self.layers = nn.ModuleList(SwitchFFN(width, 3) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11)

        def forward(self, idx: Tensor) -> Tensor:
            x = self.embed(idx)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(self.norm(x))

    def loss(model: Any, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        ce = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        layers = [m for m in model.modules() if hasattr(m, "aux_loss")]
        return ce + sum(0.1 * m.aux_loss + 0.01 * m.z_loss for m in layers)

    return Network(model=Switch, data=lambda n, g: randint(g, 11, n, 7), loss=loss)


@FIELD.add
def rotary_cache_grows() -> Network:
    class Rotary(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)
            self.max_seq_len_cached = 0

        def _set_cos_sin_cache(self, length: int, dtype: torch.dtype) -> None:
            self.max_seq_len_cached = length
            freqs = torch.outer(torch.arange(length, dtype=self.inv_freq.dtype), self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1)
            self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
            self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            length = x.shape[-2]
            if length > self.max_seq_len_cached:
                self._set_cos_sin_cache(length, x.dtype)
            return self.cos_cached[:length].to(x.dtype), self.sin_cached[:length].to(x.dtype)

    def rotate_half(x: Tensor) -> Tensor:
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    class Llama(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.embed_tokens, self.rotary_emb = nn.Embedding(11, width, padding_idx=0), Rotary(4)
            self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, 4, bias=False)
            self.v_proj, self.o_proj = nn.Linear(width, 4, bias=False), nn.Linear(width, width, bias=False)
            self.norm, self.lm_head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, 11, bias=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            b, s = input_ids.shape
            x = self.embed_tokens(input_ids)
            h = self.norm(x)
            q = self.q_proj(h).view(b, s, 2, 4).transpose(1, 2)
            k, v = (p(h).view(b, s, 1, 4).transpose(1, 2) for p in (self.k_proj, self.v_proj))
            cos, sin = self.rotary_emb(v)
            q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
            causal = torch.full((s, s), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
            mask = causal[None, None] + (1.0 - attention_mask[:, None, None].to(x.dtype)) * -1e9
            k, v = (t[:, :, None].expand(b, 1, 2, s, 4).reshape(b, 2, s, 4) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.lm_head(x + self.o_proj(out.transpose(1, 2).reshape(b, s, -1)))

    def data(rows: int, g: Generator) -> Any:
        return Samples([{"input_ids": (randint(g, 10, 3 + i % 5) + 1).tolist()} for i in range(rows)])

    def collate(features: list[Any]) -> dict[str, Tensor]:
        longest = max(len(f["input_ids"]) for f in features)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for f in features:
            ids, missing = f["input_ids"], longest - len(f["input_ids"])
            batch["input_ids"].append(ids + [0] * missing)
            batch["attention_mask"].append([1] * len(ids) + [0] * missing)
            batch["labels"].append(ids + [-100] * missing)
        return {k: torch.tensor(v, dtype=torch.int64) for k, v in batch.items()}

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        labels = batch["labels"][..., 1:].contiguous()
        total = F.cross_entropy(logits[..., :-1, :].flatten(0, 1), labels.view(-1), ignore_index=-100, reduction="sum")
        return mh.mean(total, (labels != -100).sum())

    return Network(model=Llama, data=data, collate=collate, loss=loss)


@FIELD.add
def seq2seq_generated_masks() -> Network:
    class PositionalEncoding(nn.Module):
        def __init__(self, width: int, longest: int = 12) -> None:
            super().__init__()
            self.dropout = nn.Dropout(p=0.1)
            position = torch.arange(longest).unsqueeze(1)
            div_term = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
            pe = torch.zeros(longest, 1, width)
            pe[:, 0, 0::2] = torch.sin(position * div_term)
            pe[:, 0, 1::2] = torch.cos(position * div_term)
            self.register_buffer("pe", pe)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(x + self.pe[: x.size(0)])

    class Seq2Seq(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.src, self.tgt = nn.Embedding(9, width), nn.Embedding(9, width)
            self.positional, self.generator = PositionalEncoding(width), nn.Linear(width, 9)
            self.transformer = nn.Transformer(width, 2, 1, 1, 16, dropout=0.1)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
            mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[0]) != 0
            src_pad, tgt_pad = (src == 1).transpose(0, 1), (tgt == 1).transpose(0, 1)
            out = self.transformer(
                self.positional(self.src(src) * math.sqrt(8)),
                self.positional(self.tgt(tgt) * math.sqrt(8)),
                tgt_mask=mask,
                src_key_padding_mask=src_pad,
                tgt_key_padding_mask=tgt_pad,
                memory_key_padding_mask=src_pad,
            )
            return self.generator(out).transpose(0, 1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        src, tgt = randint(g, 7, rows, 5) + 2, randint(g, 7, rows, 6) + 2
        src[: rows // 2, 3:], tgt[::2, 4:] = 1, 1
        return src, tgt

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        src, tgt = batch
        logits, labels = model(src, tgt[:, :-1]), tgt[:, 1:]
        total = F.cross_entropy(logits.reshape(-1, 9), labels.reshape(-1), ignore_index=1, reduction="sum")
        return mh.mean(total, (labels != 1).sum())

    return Network(model=Seq2Seq, data=data, loss=loss, draws=True)


@FIELD.add
def smoothed_weighted_mean() -> Network:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), ignore_index=-1, label_smoothing=0.1)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 4, rows) - 1

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return criterion(model(batch[0]).float(), batch[1])

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    return Network(model=model, data=data, loss=loss, precision="fp32")


@FIELD.add
def token_distillation() -> Network:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 9)
            teacher = nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 9)).eval()
            for p in teacher.parameters():
                p.requires_grad_(False)
            # In a list, so that the teacher is not saved with the student.
            self._teacher = [teacher]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.inference_mode():
                teacher = self._teacher[0].to(self.out.weight.dtype)(x)
            return self.out(self.rnn(self.embed(x))[0]), teacher.clone()

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        mask = torch.arange(6)[None] < randint(g, 5, rows, 1) + 1
        return {"input_ids": randint(g, 9, rows, 6), "labels": randint(g, 9, rows, 6), "attention_mask": mask.long()}

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        s_logits, t_logits = model(batch["input_ids"])
        mask = batch["attention_mask"].unsqueeze(-1).expand_as(s_logits).bool()
        s = torch.masked_select(s_logits, mask).view(-1, s_logits.size(-1))
        t = torch.masked_select(t_logits, mask).view(-1, s_logits.size(-1))
        kd = F.kl_div(F.log_softmax(s / 2, dim=-1), F.softmax(t / 2, dim=-1), reduction="sum") * 4
        labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        ce = F.cross_entropy(s_logits.transpose(1, 2), labels, reduction="sum")
        return mh.mean(0.5 * kd + 0.5 * ce, batch["attention_mask"].sum())

    return Network(model=Student, data=data, loss=loss)


# Adaptation, compression and constraints


@FIELD.add
def lora_merges_in_eval() -> Network:
    class Linear(nn.Linear):
        def __init__(self, inputs: int, outputs: int, r: int = 2) -> None:
            super().__init__(inputs, outputs)
            self.lora_A = nn.Parameter(self.weight.new_zeros((r, inputs)))
            self.lora_B = nn.Parameter(self.weight.new_zeros((outputs, r)))
            self.scaling, self.merged = 1 / r, False
            self.weight.requires_grad = False
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

        def train(self, mode: bool = True) -> Linear:
            super().train(mode)
            if mode and self.merged:
                self.weight.data -= (self.lora_B @ self.lora_A) * self.scaling
                self.merged = False
            elif not mode and not self.merged:
                self.weight.data += (self.lora_B @ self.lora_A) * self.scaling
                self.merged = True
            return self

        def forward(self, input: Tensor) -> Tensor:
            result = F.linear(input, self.weight, bias=self.bias)
            if not self.merged:
                result += (input @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling
            return result

    def model() -> nn.Module:
        network = nn.Sequential(Linear(6, 8), nn.GELU(), Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
        for n, p in network.named_parameters():
            if "lora_" not in n:
                p.requires_grad = False
        return network

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2, eps=1e-4)

    return Network(model=model, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@FIELD.add
def prefix_tuning() -> Network:
    class Prefixed(nn.Module):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.base = nn.ModuleDict(
                {"wte": nn.Embedding(11, width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}
            )
            for p in self.base.parameters():
                p.requires_grad = False
            self.register_buffer("prefix_tokens", torch.arange(3).long())
            self.prefix_encoder = nn.Embedding(3, width)
            self.trans = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 2 * width))
            self.classifier = nn.Linear(width, 3)

        def get_prompt(self, batch_size: int) -> tuple[Tensor, Tensor]:
            tokens = self.prefix_tokens.unsqueeze(0).expand(batch_size, -1)
            past = self.trans(self.prefix_encoder(tokens)).view(batch_size, 3, 2, 2, 4)
            key, value = past.permute(2, 0, 3, 1, 4)
            return key, value

        def forward(self, input_ids: Tensor) -> Tensor:
            b, s = input_ids.shape
            x = self.base["wte"](input_ids)
            q, k, v = (t.view(b, s, 2, 4).transpose(1, 2) for t in self.base["qkv"](x).chunk(3, -1))
            pk, pv = self.get_prompt(b)
            out = F.scaled_dot_product_attention(q, torch.cat([pk, k], 2), torch.cat([pv, v], 2))
            x = x + self.base["out"](out.transpose(1, 2).reshape(b, s, -1))
            return self.classifier(x[:, -1])

    return Network(model=Prefixed, data=tokens_and_classes(5), loss=classify)


@FIELD.add
def adapters_by_hooks() -> Network:
    class Adapter(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)
            nn.init.normal_(self.up.weight, std=0.3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(F.relu(self.down(x)))

    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        network = nn.Sequential(encoder, nn.Flatten(), nn.Linear(32, 3))
        for p in encoder.parameters():
            p.requires_grad_(False)
        for block in encoder.layers:
            block.adapter = Adapter(8)

            def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                return module.adapter(output)  # type: ignore[operator]

            block.register_forward_hook(hook)
            for p in block.norm1.parameters():  # type: ignore[union-attr, operator]
                p.requires_grad_(True)
        return network

    return Network(model=model, data=rows_and_classes(4, 8), loss=classify)


@FIELD.add
def quantization_aware() -> Network:
    def model() -> nn.Module:
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        def fake(symmetric: bool) -> FakeQuantize:
            scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
            dtype, low, high = (torch.qint8, -128, 127) if symmetric else (torch.quint8, 0, 255)
            return FakeQuantize(MovingAverageMinMaxObserver, low, high, dtype=dtype, qscheme=scheme)

        class QATLinear(nn.Linear):
            def __init__(self, inputs: int, outputs: int) -> None:
                super().__init__(inputs, outputs)
                self.weight_fake_quant, self.activation_post_process = fake(True), fake(False)

            def forward(self, input: Tensor) -> Tensor:
                return self.activation_post_process(F.linear(input, self.weight_fake_quant(self.weight), self.bias))

        return nn.Sequential(QATLinear(6, 8), nn.ReLU(), QATLinear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify, precision="fp32")


@FIELD.add
def pruned_weights() -> Network:
    def model() -> nn.Module:
        network = nn.Sequential(
            nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
        )
        prune.ln_structured(network[0], name="weight", amount=0.3, n=2, dim=0)
        prune.l1_unstructured(network[2], name="weight", amount=0.5)
        prune.random_unstructured(network[2], name="bias", amount=1)
        prune.global_unstructured([(network[5], "weight")], pruning_method=prune.L1Unstructured, amount=0.2)
        return network

    return Network(model=model, data=rows_and_classes(2, 8), loss=classify)


@FIELD.add
def parametrizations_cached() -> Network:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(6, 6)
            parametrize.register_parametrization(self.cell, "weight", Symmetric())
            self.inp, self.out = parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[0], 6)
            with parametrize.cached():
                for t in range(x.shape[1]):
                    h = torch.tanh(self.cell(h) + self.inp(x[:, t]))
            return self.out(h)

    return Network(model=Recurrent, data=rows_and_classes(4, 6), loss=classify)


@FIELD.add
def lazy_modules_dry_run() -> Network:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.LazyConv1d(4, 3), nn.GroupNorm(2, 4)
            self.fc1, self.fc2 = nn.LazyLinear(8), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(self.conv(x)))
            return self.fc2(F.relu(self.fc1(x.flatten(1))))

    def model() -> nn.Module:
        network = Lazy()
        with torch.no_grad():
            network(torch.zeros(1, 2, 6))
        return network

    return Network(model=model, data=rows_and_classes(2, 6), loss=classify)


@FIELD.add
def custom_function_needs_input_grad() -> Network:
    class LinearFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            ctx.save_for_backward(input, weight, bias)
            output = input.mm(weight.t())
            if bias is not None:
                output += bias.unsqueeze(0).expand_as(output)
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
            input, weight, bias = ctx.saved_tensors
            grad_input = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                grad_input = grad_output.mm(weight)
            if ctx.needs_input_grad[1]:
                grad_weight = grad_output.t().mm(input)
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = grad_output.sum(0)
            return grad_input, grad_weight, grad_bias

    class MyLinear(nn.Module):
        def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(outputs, inputs))
            if bias:
                self.bias = nn.Parameter(torch.empty(outputs))
            else:
                self.register_parameter("bias", None)
            nn.init.uniform_(self.weight, -0.5, 0.5)
            if self.bias is not None:
                nn.init.uniform_(self.bias, -0.1, 0.1)

        def forward(self, input: Tensor) -> Tensor:
            return LinearFunction.apply(input, self.weight, self.bias)

    def model() -> nn.Module:
        return nn.Sequential(MyLinear(6, 8), nn.Tanh(), MyLinear(8, 8, bias=False), nn.Tanh(), MyLinear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@FIELD.add
def private_gradients() -> Network:
    """Clips the gradient of each sample and returns a surrogate whose gradient is their mean."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        params = dict(model.named_parameters())
        detached = {k: v.detach() for k, v in params.items()}

        def one(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, p, (x.unsqueeze(0),)), y.unsqueeze(0))

        per_sample = vmap(grad(one), in_dims=(None, 0, 0))(detached, *batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()], 1).norm(dim=1)
        factor = (0.5 / (norms + 1e-6)).clamp(max=1.0)
        clipped = {k: torch.einsum("b,b...->...", factor, g) / len(batch[0]) for k, g in per_sample.items()}
        return sum((params[k] * clipped[k]).sum() for k in params)  # type: ignore[return-value]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


@FIELD.add
def checkpoint_both_ways() -> Network:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.fc, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.2)

        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            h = self.drop(F.gelu(self.fc(self.norm(x)))) * scale
            return x + (h if mask is None else h * mask[:, None])

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Linear(6, 8), nn.ModuleList(Block(8) for _ in range(4))
            self.head, self.gradient_checkpointing = nn.Linear(8, 3), True

        def forward(self, x: Tensor) -> Tensor:
            mask, x = (x[:, 0] > 0).to(x.dtype), self.embed(x)
            for i, block in enumerate(self.blocks):
                if self.gradient_checkpointing and self.training:
                    if i % 2:
                        x = checkpoint(block, x, mask, use_reentrant=False, scale=0.5)
                    else:
                        x = checkpoint(partial(block, scale=0.5), x, mask, use_reentrant=True)
                else:
                    x = block(x, mask, scale=0.5)
            return self.head(x)

    return Network(model=Deep, data=rows_and_classes(6), loss=classify, draws=True)


@FIELD.add
def compiled_submodule() -> Network:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))
            self.body.compile(backend="aot_eager")
            self.head = torch.compile(nn.Linear(8, 3), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(x)))

    return Network(model=Compiled, data=rows_and_classes(6), loss=classify, rows=11)


# Several tasks and towers


@FIELD.add
def uncertainty_weighting() -> Network:
    class MultiTask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.heads = nn.ModuleDict({"cls": nn.Linear(8, 3), "reg": nn.Linear(8, 1)})
            self.log_vars = nn.ParameterDict({k: nn.Parameter(torch.zeros(1)) for k in self.heads})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.trunk(x)
            return {name: head(h) for name, head in self.heads.items()}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        losses = {
            "cls": F.cross_entropy(out["cls"], batch["y"]),
            "reg": F.mse_loss(out["reg"].squeeze(-1), batch["z"]),
        }
        return sum(torch.exp(-model.log_vars[k]) * v + model.log_vars[k] for k, v in losses.items()).squeeze()  # type: ignore[union-attr, return-value]

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {"x": randn(g, rows, 6), "y": randint(g, 3, rows), "z": randn(g, rows)}

    return Network(model=MultiTask, data=data, loss=loss)


@FIELD.add
def grad_norm() -> Network:
    class MultiTask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.shared = nn.Linear(6, 8), nn.Linear(8, 8)
            self.head1, self.head2 = nn.Linear(8, 3), nn.Linear(8, 1)
            self.task_weights = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.relu(self.shared(torch.relu(self.trunk(x))))
            return self.head1(h), self.head2(h).squeeze(-1)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out1, out2 = model(batch[0])
        task_loss = torch.stack([F.cross_entropy(out1, batch[1]), F.mse_loss(out2, batch[2])])
        weighted = model.task_weights * task_loss
        norms = []
        for i in range(2):
            gygw = torch.autograd.grad(weighted[i], model.shared.parameters(), retain_graph=True, create_graph=True)
            norms.append(torch.norm(torch.cat([g.flatten() for g in gygw])))
        stacked = torch.stack(norms)
        return (model.task_weights.detach() * task_loss).sum() + (stacked - stacked.mean().detach()).abs().sum()

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), randint(g, 3, rows), randn(g, rows)

    return Network(model=MultiTask, data=data, loss=loss)


@FIELD.add
def towers_share_modules() -> Network:
    class Tower(nn.Module):
        def __init__(self, words: nn.Embedding, encoder: nn.Module) -> None:
            super().__init__()
            self.words, self.encoder, self.projection = words, encoder, nn.Linear(6, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return F.normalize(self.projection(self.encoder(self.words(ids)).mean(1)), dim=-1)

    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            words, encoder = nn.Embedding(11, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU())
            self.query, self.item = Tower(words, encoder), Tower(words, encoder)
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, query: Tensor, item: Tensor) -> Tensor:
            return (self.query(query) * self.item(item)).sum(-1) * self.temperature

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits = model(batch[0], batch[1])
        return F.binary_cross_entropy_with_logits(logits, batch[2].to(logits.dtype))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randint(g, 11, rows, 3), randint(g, 11, rows, 4), randint(g, 2, rows)

    return Network(model=TwoTowers, data=data, loss=loss)


# Data in other containers


@FIELD.add
def domains_by_strings() -> Network:
    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
            self.heads = nn.ModuleDict({"news": nn.Linear(8, 3), "web": nn.Linear(8, 3), "code": nn.Linear(8, 3)})

        def forward(self, x: Tensor, domains: list[str]) -> Tensor:
            h = self.body(x)
            return torch.stack([self.heads[domain](row) for row, domain in zip(h, domains, strict=True)])

    def data(rows: int, g: Generator) -> Any:
        names = ["news", "news", "web", "code", "web", "web", "news"]
        return Samples(
            [
                {"x": randn(g, 5).numpy(), "domain": names[i % 7], "id": f"doc-{i}", "y": int(randint(g, 3, 1))}
                for i in range(rows)
            ]
        )

    def loss(model: Any, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["domain"]), batch["y"])

    return Network(model=Domains, data=data, loss=loss)


@dataclass
class Example:
    """A batch with a text and an optional field."""

    pixels: Tensor
    label: Tensor
    weight: Tensor | None
    names: list[str]


@FIELD.add
def dataclass_batches() -> Network:
    def data(rows: int, g: Generator) -> Any:
        return Samples([(randn(g, 6), int(randint(g, 3, 1)), f"img{i}.png") for i in range(rows)])

    def collate(samples: list[Any]) -> Example:
        pixels, labels, names = zip(*samples, strict=True)
        return Example(torch.stack(pixels), torch.tensor(labels), None, list(names))

    def loss(model: Any, batch: Example) -> Tensor:
        out = model(batch.pixels)
        losses = F.cross_entropy(out, batch.label, reduction="none")
        return losses.mean() if batch.weight is None else (losses * batch.weight).mean()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    return Network(model=model, data=data, collate=collate, loss=loss)


class Row(NamedTuple):
    """A sample of numpy scalars and a plain number."""

    features: Any
    price: Any
    count: int
    flag: bool


@FIELD.add
def named_tuples_of_numpy_scalars() -> Network:
    def data(rows: int, g: Generator) -> Any:
        return Samples(
            [Row(randn(g, 4).numpy(), np.float32(randn(g, 1).item()), i % 5, i % 3 == 0) for i in range(rows)]
        )

    def loss(model: Any, batch: Row) -> Tensor:
        extra = torch.stack([batch.count.to(batch.price.dtype), batch.flag.to(batch.price.dtype)], -1)  # type: ignore[attr-defined]
        out = model(torch.cat([batch.features, extra], -1)).squeeze(-1)
        return F.huber_loss(out, batch.price)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))

    return Network(model=model, data=data, loss=loss)


@FIELD.add
def stateful_loss_class() -> Network:
    class DynamicLoss:
        """Weights two terms by the ratio of their last values, as dynamic weight averaging does."""

        def __init__(self) -> None:
            self.history: list[list[float]] = []

        def __call__(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            logits = model(batch[0])
            losses = [F.cross_entropy(logits, batch[1]), 0.1 * logits.square().mean()]
            weights = [1.0, 1.0]
            if len(self.history) >= 1:
                ratios = [now.item() / last for now, last in zip(losses, self.history[-1], strict=True)]
                weights = [2 * math.exp(r) / sum(math.exp(q) for q in ratios) for r in ratios]
            self.history.append([x.item() for x in losses])
            return weights[0] * losses[0] + weights[1] * losses[1]

    criterion = DynamicLoss()

    def data(rows: int, g: Generator) -> Any:
        # Every task starts without a history.
        criterion.history.clear()
        return rows_and_classes(6)(rows, g)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    return Network(model=model, data=data, loss=criterion)


# Optimizers


@FIELD.add
def lion() -> Network:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in filter(lambda p: p.grad is not None, group["params"]):
                    p.data.mul_(1 - group["lr"] * group["weight_decay"])
                    state = self.state[p]
                    if len(state) == 0:
                        state["exp_avg"] = torch.zeros_like(p)
                    update = state["exp_avg"].clone().mul_(group["betas"][0]).add(p.grad, alpha=0.1).sign_()
                    p.add_(update, alpha=-group["lr"])
                    state["exp_avg"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])

    return small(lambda model: Lion(model.parameters(), lr=1e-2))


@FIELD.add
def adan() -> Network:
    class Adan(torch.optim.Optimizer):
        """Clips by the norm of all gradients inside of the step, as the published code does."""

        def __init__(self, params: Any, lr: float = 1e-2, max_grad_norm: float = 0.5) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.98, 0.92, 0.99), "max_grad_norm": max_grad_norm})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            total = torch.zeros(1, dtype=torch.float64)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        total.add_(p.grad.pow(2).sum())
            clip = torch.clamp(self.defaults["max_grad_norm"] / (torch.sqrt(total) + 1e-8), max=1.0)
            for group in self.param_groups:
                b1, b2, b3 = group["betas"]
                group["step"] = group.get("step", 0) + 1
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state, g = self.state[p], p.grad.mul(clip.to(p.dtype))
                    if not state:
                        state.update({k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq", "exp_avg_diff")})
                        state["pre_grad"] = g.clone()
                    diff = g - state["pre_grad"]
                    state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                    state["exp_avg_diff"].mul_(b2).add_(diff, alpha=1 - b2)
                    update = g + b2 * diff
                    state["exp_avg_sq"].mul_(b3).addcmul_(update, update, value=1 - b3)
                    denom = state["exp_avg_sq"].sqrt().add_(1e-3)
                    p.addcdiv_(state["exp_avg"] + b2 * state["exp_avg_diff"], denom, value=-group["lr"])
                    state["pre_grad"].copy_(g)

    return small(lambda model: Adan(model.parameters()))


@FIELD.add
def shampoo() -> Network:
    class Shampoo(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-1, epsilon: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr, "epsilon": epsilon})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    g, order, size, state = p.grad, p.grad.ndimension(), p.grad.size(), self.state[p]
                    if len(state) == 0:
                        for i, dim in enumerate(g.size()):
                            state[f"precond_{i}"] = group["epsilon"] * torch.eye(dim, dtype=g.dtype)
                    for i, dim in enumerate(g.size()):
                        precond = state[f"precond_{i}"]
                        g = g.transpose(0, i).contiguous()
                        transposed_size = g.size()
                        g = g.view(dim, -1)
                        precond.add_(g @ g.t())
                        values, vectors = torch.linalg.eigh(precond)
                        g = vectors @ torch.diag(values.pow(-1 / order)) @ vectors.t() @ g
                        g = g.view(transposed_size).transpose(0, i)
                    p.data.add_(g.reshape(size), alpha=-group["lr"])

    return small(lambda model: Shampoo(model.parameters()))


@FIELD.add
def soap() -> Network:
    class SOAP(torch.optim.Optimizer):
        """Adam in the eigenbasis of Shampoo's preconditioners, for matrices."""

        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state, grad = self.state[p], p.grad
                    if "step" not in state:
                        state["step"], state["exp_avg"] = 0, torch.zeros_like(grad)
                        state["exp_avg_sq"] = torch.zeros_like(grad)
                        state["GG"] = [torch.eye(n, dtype=p.dtype) * 1e-2 for n in grad.shape] if p.ndim == 2 else []
                    state["step"] += 1
                    for i, gg in enumerate(state["GG"]):
                        gg.lerp_(grad @ grad.T if i == 0 else grad.T @ grad, 0.05)
                    bases = [torch.linalg.eigh(gg)[1] for gg in state["GG"]]
                    rotated = bases[0].T @ grad @ bases[1] if bases else grad
                    state["exp_avg"].lerp_(grad, 0.1)
                    state["exp_avg_sq"].mul_(0.95).add_(rotated.square(), alpha=0.05)
                    average = bases[0].T @ state["exp_avg"] @ bases[1] if bases else state["exp_avg"]
                    update = average / state["exp_avg_sq"].sqrt().add_(1e-3)
                    p.add_(bases[0] @ update @ bases[1].T if bases else update, alpha=-group["lr"])

    return small(lambda model: SOAP(model.parameters()))


@FIELD.add
def schedule_free() -> Network:
    class AdamWScheduleFree(torch.optim.Optimizer):
        """Keeps z in its state and y in the weights; `train` and `eval` switch between y and x."""

        def __init__(self, params: Any, lr: float = 0.02, betas: tuple[float, float] = (0.9, 0.99)) -> None:
            defaults = {"lr": lr, "betas": betas, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True}
            super().__init__(params, defaults)

        @torch.no_grad()
        def eval(self) -> None:
            for group in self.param_groups:
                if group["train_mode"]:
                    for p in group["params"]:
                        if "z" in self.state[p]:
                            p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["betas"][0])
                    group["train_mode"] = False

        @torch.no_grad()
        def train(self) -> None:
            for group in self.param_groups:
                if not group["train_mode"]:
                    for p in group["params"]:
                        if "z" in self.state[p]:
                            p.lerp_(end=self.state[p]["z"], weight=1 - group["betas"][0])
                    group["train_mode"] = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if not self.param_groups[0]["train_mode"]:
                raise Exception("Optimizer was not in train mode when step is called.")
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                k = group["k"]
                lr = group["lr"] * math.sqrt(1 - beta2 ** (k + 1))
                lr_max = group["lr_max"] = max(lr, group["lr_max"])
                weight = ((k + 1) ** 0.0) * (lr_max**2)
                group["weight_sum"] += weight
                ckp1 = weight / group["weight_sum"]
                for p in [p for p in group["params"] if p.grad is not None]:
                    state = self.state[p]
                    if "z" not in state:
                        state["z"], state["exp_avg_sq"] = torch.clone(p), torch.zeros_like(p)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                    normalized = p.grad.div(state["exp_avg_sq"].sqrt().add_(1e-3))
                    p.lerp_(end=state["z"], weight=ckp1)
                    p.add_(normalized, alpha=lr * (beta1 * (1 - ckp1) - 1))
                    state["z"].sub_(normalized, alpha=lr)
                group["k"] = k + 1

    return small(lambda model: AdamWScheduleFree(model.parameters()))


@FIELD.add
def prodigy() -> Network:
    class Prodigy(torch.optim.Optimizer):
        """Estimates its step size from sums over all parameters."""

        def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr, "d": d0, "d0": d0, "d_numerator": 0.0, "k": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            d, lr, d_numerator, d_denom = group["d"], group["lr"], group["d_numerator"] * 0.9, 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "s" not in state:
                    state["s"], state["p0"] = torch.zeros_like(p), p.detach().clone()
                    state["exp_avg_sq"] = torch.zeros_like(p)
                d_numerator += d * lr * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
                state["s"].mul_(0.9).add_(p.grad, alpha=d * lr)
                state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=d * d * 0.01)
                d_denom += state["s"].abs().sum().item()
            if d_denom == 0:
                return
            d = max(d, d_numerator / d_denom)
            group["d"], group["d_numerator"] = d, d_numerator
            for p in group["params"]:
                if p.grad is not None:
                    p.addcdiv_(p.grad, self.state[p]["exp_avg_sq"].sqrt().add_(d * 1e-1), value=-d * d * lr)
            group["k"] += 1

    return small(lambda model: Prodigy(model.parameters()))


@FIELD.add
def lamb() -> Network:
    class Lamb(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            device = self.param_groups[0]["params"][0].device
            one = torch.tensor(1.0, device=device)
            total = torch.zeros(1, device=device)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        total.add_(p.grad.pow(2).sum())
            clip = torch.where(total.sqrt() > 1.0, total.sqrt() / 1.0, one)
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                group["step"] = group["step"] + 1 if "step" in group else 1
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    grad, state = p.grad.div(clip.to(p.dtype)), self.state[p]
                    if len(state) == 0:
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    denom = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2 ** group["step"])).add_(group["eps"])
                    update = (state["exp_avg"] / (1 - beta1 ** group["step"])).div_(denom)
                    update.add_(p, alpha=group["weight_decay"])
                    w_norm, g_norm = p.norm(2.0), update.norm(2.0)
                    unit = torch.ones_like(w_norm)
                    ratio = torch.where(w_norm > 0, torch.where(g_norm > 0, w_norm / g_norm, unit), unit)
                    p.add_(update.mul_(ratio), alpha=-group["lr"])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return Lamb(model.parameters())

    # The clipping norm is summed in single precision.
    network = small(optimizer)
    return dataclasses.replace(network, rounding=1e-4)


@FIELD.add
def adamw_fused_with_warmup() -> Network:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-4, weight_decay=0.1, fused=True)

    def schedule(step: int, total: int) -> float:
        return min(1.0, (step + 1) / 2) * 0.5 * (1 + math.cos(math.pi * step / total))

    return dataclasses.replace(small(optimizer), schedule=schedule)


@FIELD.add
def list_of_optimizers() -> Network:
    def optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        sgd = torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True)
        return [sgd, torch.optim.AdamW(others, lr=0.01, eps=1e-4, foreach=True)]

    return small(optimizer)


@FIELD.add
def clamped_critic() -> Network:
    """A critic whose weights are clamped before each loss, as in the first Wasserstein GAN."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
        out = model(batch[0]).squeeze(-1)
        return -(out * (batch[1] > 0).to(out.dtype)).mean() + (out * (batch[1] == 0).to(out.dtype)).mean()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    return Network(model=model, data=rows_and_classes(6), loss=loss)
