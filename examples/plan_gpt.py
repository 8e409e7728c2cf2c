"""Plan the training of a GPT for hardware that is not available here.

    python plan_gpt.py
    manyhands plan plan_gpt.py --cluster "8 hosts x 8 H100, 400Gb/s" --precision bf16
    manyhands plan plan_gpt.py width=2048 layers=24 --cluster "8 A100" --cluster "2 hosts x 8 V100, 100Gb/s"

Shows `mh.plan` for a described cluster, and a comparison of two clusters. Nothing is trained, and the model is never
built with values.

Expect a ranked table of strategies, a curve of the speed-up over the number of devices, the number at which it
saturates and why, and a sentence that compares the two clusters.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import manyhands as mh

WORDS, LENGTH = 50_304, 1024


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def task(width: int = 768, layers: int = 12, heads: int = 12, batch_size: int = 512) -> mh.Task:
    return mh.Task(
        model=lambda: GPT(width, layers, heads),  # never built with values: planning needs no memory for it
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=torch.zeros(batch_size, LENGTH + 1, dtype=torch.long),
        batch_size=batch_size,
    )


if __name__ == "__main__":
    plan = mh.plan(task, "8 hosts x 8 H100, 400Gb/s, $2/h", precision="bf16")
    plan.show()
    print(plan.curve.reason)
    print(mh.plan(task, ["8 H100", "4 hosts x 8 V100, 100Gb/s"], precision="bf16").why())
