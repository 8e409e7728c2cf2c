"""Networks that users write by hand. Each function contains all of its network, so that it can be read by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import manyhands as mh

from .network import Network, Registry, mean_square, randint, randn

CLASSICS = Registry("classic")


def rows_and_classes(*shape: int, classes: int = 3) -> Any:
    """Return a function that makes inputs of a shape and a class for each."""

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, *shape), randint(g, classes, rows)

    return data


def tokens_and_classes(length: int = 5, vocabulary: int = 11, classes: int = 3) -> Any:
    """Return a function that makes rows of tokens and a class for each."""

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randint(g, vocabulary, rows, length), randint(g, classes, rows)

    return data


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


@CLASSICS.add
def mlp() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def convolutional() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )

    return Network(model=model, data=rows_and_classes(3, 8, 8), loss=classify)


@CLASSICS.add
def residual_batch_norm() -> Network:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.second(self.first(x)))

    def model() -> nn.Module:
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(4), Block(4), *head)

    return Network(model=model, data=rows_and_classes(3, 6, 6), loss=classify)


@CLASSICS.add
def unet() -> Network:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
            self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
            self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.merge = nn.Conv2d(8, 4, 3, padding=1)
            self.out = nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            high = self.down1(x)
            low = self.middle(self.down2(F.max_pool2d(high, 2)))
            return self.out(F.silu(self.merge(torch.cat([self.up(low), high], dim=1))))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        return randn(g, rows, 1, 8, 8), randn(g, rows, 1, 8, 8)

    return Network(model=UNet, data=data, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@CLASSICS.add
def lstm() -> Network:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(tokens))[0][:, -1])

    return Network(model=Tagger, data=tokens_and_classes(), loss=classify)


@CLASSICS.add
def gru_packed() -> Network:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6, padding_idx=0)
            self.gru = nn.GRU(6, 5, batch_first=True)
            self.head = nn.Linear(5, 3)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            return self.head(self.gru(packed)[1][-1])

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        lengths = 1 + randint(g, 6, rows)
        tokens = (1 + randint(g, 10, rows, 6)) * (torch.arange(6) < lengths[:, None])
        return tokens, lengths, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Reader, data=data, loss=loss)


@CLASSICS.add
def mixer() -> Network:
    class Block(nn.Module):
        def __init__(self, patches: int, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.tokens = nn.Sequential(nn.Linear(patches, 8), nn.GELU(), nn.Linear(8, patches))
            self.channels = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 6, 4, stride=4)
            self.blocks = nn.Sequential(Block(4, 6), Block(4, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(dim=1))

    return Network(model=Mixer, data=rows_and_classes(3, 8, 8), loss=classify)


@CLASSICS.add
def transformer_encoder_padded() -> Network:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8, padding_idx=0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            padding = tokens == 0
            hidden = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
            kept = (~padding).unsqueeze(-1)
            return self.head((hidden * kept).sum(1) / kept.sum(1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        tokens = 1 + randint(g, 10, rows, 6)
        return tokens * (torch.arange(6) < 1 + randint(g, 6, rows)[:, None]), randint(g, 3, rows)

    return Network(model=Encoder, data=data, loss=classify)


@CLASSICS.add
def gpt_tied() -> Network:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(a.transpose(1, 2).reshape(b, t, 8))
            return x + self.mlp(self.norm2(x))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(11, 8), nn.Parameter(0.1 * torch.randn(5, 8))
            self.blocks = nn.ModuleList([Block(), Block()])
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    def loss(model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Network(model=Gpt, data=lambda n, g: randint(g, 11, n, 6), loss=loss)


@CLASSICS.add
def gpt_ignore_index_counted() -> Network:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mlp = nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.head = nn.Linear(8, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mlp(self.embed(tokens)).cumsum(dim=1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        tokens = randint(g, 11, rows, 6)
        return tokens, tokens.masked_fill(torch.arange(6) >= 2 + randint(g, 5, rows)[:, None], -100)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        total = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")
        return mh.mean(total, (batch[1] != -100).sum())

    return Network(model=Model, data=data, loss=loss)


@CLASSICS.add
def ignore_index_mean() -> Network:
    # Not a mean over samples: rows have different numbers of tokens.
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        tokens = randint(g, 11, rows, 6)
        return tokens, tokens.masked_fill(torch.arange(6) >= 2 + randint(g, 5, rows)[:, None], -100)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    return Network(model=lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), data=data, loss=loss)


@CLASSICS.add
def ignore_index_padding_in_late_rows() -> Network:
    # The first rows have no padding, so a trial on them sees a mean over samples.
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        tokens = randint(g, 11, rows, 6)
        late = (torch.arange(rows) >= rows - 3)[:, None]
        return tokens, tokens.masked_fill(late & (torch.arange(6) >= 1 + torch.arange(rows)[:, None] % 4), -100)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    return Network(model=lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), data=data, loss=loss)


@CLASSICS.add
def counted_part_without_valid_tokens() -> Network:
    # Whole rows count nothing, so a rank may have no token at all.
    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        tokens = randint(g, 11, rows, 4)
        return tokens, tokens.masked_fill((torch.arange(rows) % 6 >= 2)[:, None], -100)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        total = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")
        return mh.mean(total, (batch[1] != -100).sum())

    return Network(model=lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), data=data, loss=loss)


@CLASSICS.add
def graph_network() -> Network:
    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
            degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
            hidden = F.relu(self.first(adjacency @ nodes / degree))
            return self.head(F.relu(self.second(adjacency @ hidden / degree)).mean(dim=1))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 5, 4), (randn(g, rows, 5, 5) > 0).float(), randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Gcn, data=data, loss=loss)


@CLASSICS.add
def graph_scatter() -> Network:
    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            sent = self.message(nodes.gather(1, edges[:, 0, :, None].expand(-1, -1, 4)))
            got = torch.zeros(*nodes.shape[:2], 8, dtype=sent.dtype, device=sent.device)
            got = got.scatter_add(1, edges[:, 1, :, None].expand(-1, -1, 8), sent)
            return self.head(F.relu(got)).sum(dim=(1, 2))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 5, 4), randint(g, 5, rows, 2, 7), randn(g, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return Network(model=Messages, data=data, loss=loss)


@CLASSICS.add
def vae() -> Network:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            middle, log_var = self.encode(x).chunk(2, dim=-1)
            z = middle + torch.randn_like(middle) * (0.5 * log_var).exp()
            return self.decode(z), middle, log_var

    def loss(model: Any, x: Tensor) -> Tensor:
        out, middle, log_var = model(x)
        divergence = -0.5 * (1 + log_var - middle.square() - log_var.exp()).sum(-1)
        return ((out - x).square().sum(-1) + divergence).mean()

    return Network(model=Vae, data=lambda n, g: randn(g, n, 6), loss=loss, draws=True)


@CLASSICS.add
def vq_ema_codebook() -> Network:
    class Vq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("counts", torch.ones(5))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: Tensor) -> Tensor:
            z = self.encode(x)
            nearest = torch.cdist(z, self.codes).argmin(dim=-1)
            if self.training:
                with torch.no_grad():
                    chosen = F.one_hot(nearest, 5).to(z.dtype)
                    self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                    self.sums.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
                    self.codes.copy_(self.sums / self.counts.unsqueeze(-1))
            quantised = z + (self.codes[nearest] - z).detach()
            return self.decode(quantised)

    return Network(model=Vq, data=lambda n, g: randn(g, n, 6), loss=lambda model, x: (model(x) - x).square().mean())


@CLASSICS.add
def vq_learned_codebook() -> Network:
    class Vq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode, self.codes = nn.Linear(6, 4), nn.Linear(4, 6), nn.Embedding(5, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encode(x)
            code = self.codes(torch.cdist(z, self.codes.weight).argmin(dim=-1))
            commitment = (z - code.detach()).square().mean(-1) + (z.detach() - code).square().mean(-1)
            return self.decode(z + (code - z).detach()), commitment

    def loss(model: Any, x: Tensor) -> Tensor:
        out, commitment = model(x)
        return ((out - x).square().mean(-1) + commitment).mean()

    return Network(model=Vq, data=lambda n, g: randn(g, n, 6), loss=loss)


@CLASSICS.add
def gan() -> Network:
    def model() -> nn.Module:
        return nn.ModuleDict(
            {
                "generator": nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
                "critic": nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
            }
        )

    def optimizer(model: Any) -> dict[str, torch.optim.Optimizer]:
        return {
            name: torch.optim.SGD(model[name].parameters(), lr=0.05, momentum=0.5) for name in ("critic", "generator")
        }

    def step(hand: Any, batch: Any) -> None:
        nets = hand.model

        def critic(part: Any) -> Tensor:
            real, noise = part
            fake = nets["generator"](noise).detach()
            return (F.softplus(-nets["critic"](real)) + F.softplus(nets["critic"](fake))).mean()

        hand.minimize(critic, "critic")
        hand.minimize(lambda part: F.softplus(-nets["critic"](nets["generator"](part[1]))).mean(), "generator")

    return Network(model=model, data=lambda n, g: (randn(g, n, 4), randn(g, n, 3)), optimizer=optimizer, step=step)


@CLASSICS.add
def weight_norm() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def spectral_norm() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def orthogonal() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def own_parametrization() -> Network:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    def model() -> nn.Module:
        layer = nn.Linear(8, 8)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def autograd_function() -> Network:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() < 1)

    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Straight.apply(self.first(x)))

    return Network(model=Binary, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def sparse_embedding() -> Network:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).mean(dim=1))

    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    return Network(model=Bag, data=tokens_and_classes(), loss=classify, optimizer=optimizer)


@CLASSICS.add
def embedding_bag() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(11, 6, mode="mean"), nn.Linear(6, 3))

    return Network(model=model, data=tokens_and_classes(), loss=classify)


@CLASSICS.add
def complex_weights() -> Network:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Parameter(torch.randn(2, 5, dtype=torch.complex64))
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(x).unsqueeze(1) * self.filters
            return self.head(torch.fft.irfft(waves, n=8).flatten(1))

    return Network(model=Spectral, data=rows_and_classes(8), loss=classify)


@CLASSICS.add
def complex_weights_adam() -> Network:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Parameter(torch.randn(2, 5, dtype=torch.complex64))
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(x).unsqueeze(1) * self.filters
            return self.head(torch.fft.irfft(waves, n=8).flatten(1))

    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    # In single precision: double precision casts complex weights to real ones.
    return Network(model=Spectral, data=rows_and_classes(8), loss=classify, optimizer=optimizer, precision="fp32")


@CLASSICS.add
def parameter_hook_mask() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        mask = torch.arange(8 * 6).reshape(8, 6) % 2
        net[0].weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def parameter_hook_clamp() -> Network:
    # Clamping is not linear: it must see the gradient of the whole batch.
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def forward_hooks() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        net[0].register_forward_hook(lambda module, inputs, output: output * 2)
        net[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def backward_hook() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        net[0].register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g and g * 1 for g in inputs[:0]) or None
        )
        net[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        return net

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def running_mean_buffer() -> Network:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
            return x - self.mean

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Centre(), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def functional_batch_norm() -> Network:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("variance", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.mean, self.variance, training=self.training)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Norm(), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def instance_norm_statistics() -> Network:
    def model() -> nn.Module:
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv1d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))

    return Network(model=model, data=rows_and_classes(2, 6), loss=classify)


@CLASSICS.add
def step_counter() -> Network:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return x * torch.clamp(self.calls / 2, max=1.0)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Warm(), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def batch_norm_momentum_none() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def learned_query_attention() -> Network:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, 2, 8))
            self.embed, self.attend = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            pooled = self.attend(self.query.expand(len(x), -1, -1), hidden, hidden, need_weights=False)[0]
            return self.head(pooled.flatten(1))

    return Network(model=Pool, data=rows_and_classes(5, 4), loss=classify)


@CLASSICS.add
def cross_attention() -> Network:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(11, 8), nn.Embedding(11, 8)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.encoder(self.source(source))
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=memory.dtype)
            return self.head(self.decoder(self.target(target), memory, tgt_mask=mask))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0], batch[1][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten())

    return Network(model=Translate, data=lambda n, g: (randint(g, 11, n, 5), randint(g, 11, n, 4)), loss=loss)


@CLASSICS.add
def learned_query_attention_sequence_first() -> Network:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(3, 1, 8))
            self.attend, self.norm, self.head = nn.MultiheadAttention(8, 4), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.transpose(0, 1)
            pooled, weights = self.attend(self.query.repeat(1, len(x), 1), hidden, hidden)
            return self.head(self.norm(pooled.mean(dim=0))) + weights.mean(dim=(1, 2))[:, None]

    return Network(model=Pool, data=rows_and_classes(5, 8), loss=classify)


@CLASSICS.add
def encoder_decoder_padded() -> Network:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8, padding_idx=0)
            self.core = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            padding = source == 0
            inputs, outputs = self.embed(source), self.embed(target)
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=inputs.dtype)
            hidden = self.core(
                inputs, outputs, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
            )
            return self.head(hidden)

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
        source = (1 + randint(g, 10, rows, 5)) * (torch.arange(5) < 1 + randint(g, 5, rows)[:, None])
        return source, 1 + randint(g, 10, rows, 4)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0], batch[1][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten())

    return Network(model=Translate, data=data, loss=loss)


@CLASSICS.add
def transformer_encoder_dropout() -> Network:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(dim=1))

    return Network(model=Encoder, data=rows_and_classes(5, 8), loss=classify, draws=True)


@CLASSICS.add
def grouped_query_attention() -> Network:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
            self.out, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
            k, v = (layer(x).view(b, t, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1) for layer in (self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 16)
            return self.head((x + self.out(mixed)).mean(dim=1))

    return Network(model=Attention, data=rows_and_classes(5, 8), loss=classify)


@CLASSICS.add
def branch_by_row() -> Network:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(6, 8) for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            hidden = torch.zeros(len(x), 8, dtype=x.dtype)
            for number, branch in enumerate(self.branches):
                rows = (kind == number).nonzero().flatten()
                if len(rows):
                    hidden = hidden.index_add(0, rows, branch(x[rows]))
            return self.head(F.relu(hidden))

    def data(rows: int, g: Generator) -> tuple[Tensor, Tensor, Tensor]:
        return randn(g, rows, 6), torch.arange(rows) // 3 % 3, randint(g, 3, rows)

    def loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Network(model=Branches, data=data, loss=loss)


@CLASSICS.add
def experts_masked() -> Network:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(1)
            mixed = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, slot = (chosen == number).nonzero(as_tuple=True)
                if rows.numel():
                    mixed[rows] += weights[rows, slot, None] * expert(x[rows])
            return self.head(x + mixed)

    return Network(model=Experts, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def experts_balance_loss() -> Network:
    # The auxiliary loss couples samples: a product of two means over the batch.
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            odds = self.gate(x).softmax(-1)
            chosen = F.one_hot(odds.argmax(-1), 4).to(x.dtype)
            mixed = sum(odds[:, i : i + 1] * chosen[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))
            return self.head(x + mixed), 4 * (chosen.mean(0) * odds.mean(0)).sum()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, balance = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.01 * balance

    return Network(model=Experts, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def sometimes_unused_layer() -> Network:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.extra, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.first(x))
            # Row 0 of a batch decides; on several ranks these are different rows.
            if x[0, 0] > 0:
                hidden = hidden + self.extra(hidden)
            return self.head(hidden)

    return Network(model=Sometimes, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def layer_for_some_rows() -> Network:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.extra, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.first(x))
            chosen = x[:, 0] > 1
            if chosen.any():
                hidden = torch.where(chosen[:, None], self.extra(hidden), hidden)
            return self.head(hidden)

    return Network(model=Some, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def never_used_layer() -> Network:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.spare, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.first(x)))

    return Network(model=Never, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def frozen_layer() -> Network:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        net[2].requires_grad_(False)
        return net

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)

    return Network(model=model, data=rows_and_classes(6), loss=classify, optimizer=optimizer)


@CLASSICS.add
def hard_examples() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each.topk(max(1, len(each) // 2)).values.mean()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def contrastive() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = F.normalize(model(batch[0])), F.normalize(model(batch[1]))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    return Network(model=model, data=lambda n, g: (randn(g, n, 6), randn(g, n, 6)), loss=loss)


@CLASSICS.add
def gradient_penalty() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.1 * slope.square().sum(-1).mean()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def inplace_on_view() -> Network:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(len(x), 2, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = Shift(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden[:, 0].mul_(2)
            hidden.add_(1).relu_()
            return self.head(hidden.flatten(1))

    return Network(model=Net, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def inplace_activations() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ELU(inplace=True), nn.Linear(8, 3)
        )

    return Network(model=model, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def mixed_dtypes() -> Network:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)).double())

    return Network(model=Mixed, data=rows_and_classes(6), loss=classify, precision="fp32")


@CLASSICS.add
def dropout_before_head() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify, draws=True)


@CLASSICS.add
def dropout_everywhere() -> Network:
    def model() -> nn.Module:
        layers = (nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 8), nn.AlphaDropout(0.2))
        return nn.Sequential(*layers, nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify, draws=True)


@CLASSICS.add
def noise_in_loss() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=loss, draws=True)


@CLASSICS.add
def training_only_term() -> Network:
    # A term that couples samples and exists in training mode only.
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.first(x))
            spread = hidden.var(dim=0, correction=0).mean() if self.training else hidden.new_zeros(())
            return self.head(hidden), spread

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, spread = model(batch[0])
        return F.cross_entropy(logits, batch[1]) - 0.1 * spread

    return Network(model=Spread, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def weight_penalty_in_loss() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return classify(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def loss_reads_a_weight() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return classify(model, batch) + 0.1 * model.head.weight.abs().sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.first(x)))

    return Network(model=Net, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def shared_layer() -> Network:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            for _ in range(3):
                hidden = torch.tanh(self.again(hidden))
            return self.head(hidden)

    return Network(model=Recurrent, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def checkpointed() -> Network:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return Network(model=Net, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def item_in_forward() -> Network:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            scale = 1.0 / max(1.0, self.first.weight.norm().item())
            return self.head(torch.tanh(self.first(x)) * scale)

    return Network(model=Scaled, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def dict_batch() -> Network:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.numbers = nn.EmbeddingBag(11, 8), nn.Linear(4, 8)
            self.head = nn.Linear(16, 1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            parts = [self.text(batch["tokens"]), torch.relu(self.numbers(batch["numbers"]))]
            return self.head(torch.cat(parts, dim=-1)).squeeze(-1)

    def data(rows: int, g: Generator) -> dict[str, Tensor]:
        return {"tokens": randint(g, 11, rows, 4), "numbers": randn(g, rows, 4), "label": randn(g, rows)}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch), (batch["label"] > 0).to(batch["label"].dtype))

    return Network(model=Towers, data=data, loss=loss)


@CLASSICS.add
def diffusion() -> Network:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.net = nn.Linear(1, 8), nn.Sequential(nn.Linear(6 + 8, 16), nn.SiLU(), nn.Linear(16, 6))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.net(torch.cat([x, torch.sin(self.time(t))], dim=-1))

    def loss(model: Any, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x), 1, dtype=x.dtype), torch.randn_like(x)
        return (model((1 - t) * x + t * noise, t) - noise).square().mean()

    return Network(model=Denoiser, data=lambda n, g: randn(g, n, 6), loss=loss, draws=True)


@CLASSICS.add
def siamese_triplet() -> Network:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.triplet_margin_loss(*(model(part) for part in batch))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    return Network(model=model, data=lambda n, g: tuple(randn(g, n, 6) for _ in range(3)), loss=loss)


@CLASSICS.add
def sum_instead_of_mean() -> Network:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 0.1 * F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=loss)


@CLASSICS.add
def batch_softmax() -> Network:
    # Couples samples inside the network.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x).softmax(dim=0))

    return Network(model=Net, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def scheduled() -> Network:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Network(model=model, data=rows_and_classes(6), loss=classify, schedule=lambda step, total: 1 - step / total)


@CLASSICS.add
def state_space() -> Network:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay, self.inputs, self.outputs = nn.Parameter(torch.randn(8)), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            decay, driven = torch.sigmoid(self.decay), self.inputs(x)
            state = torch.zeros_like(driven[:, 0])
            for step in range(x.shape[1]):
                state = decay * state + driven[:, step]
            return self.outputs(state)

    return Network(model=Scan, data=rows_and_classes(5, 4), loss=classify)


@CLASSICS.add
def scalar_parameters() -> Network:
    class Scalars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(()))
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + self.shift

    return Network(model=Scalars, data=rows_and_classes(6), loss=classify)


@CLASSICS.add
def mean_square_of_one_layer() -> Network:
    return Network(model=lambda: nn.Linear(5, 3), data=lambda n, g: randn(g, n, 5), loss=mean_square)
