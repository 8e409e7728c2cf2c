"""Train a character-level GPT to spell out numbers, in plain PyTorch on one device.

`char_gpt_manyhands.py` is the same program on any number of devices. Expect a validation loss of about 0.21 after six
epochs, and four correctly spelled numbers that were held out.
"""

import math
import os
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

EPOCHS = int(os.environ.get("EPOCHS", 6))
CHARACTERS = "\n -=0123456789abcdefghijklmnopqrstuvwxyz"  # a newline ends every text
IGNORED = -100
LONGEST = 64

ONES = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spell(number):
    if number >= 100:
        rest = f" {spell(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number >= 20:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return ONES[number]


def encode(text):
    return torch.tensor([CHARACTERS.index(character) for character in text])


def texts():
    """999 texts such as "342=three hundred forty-two"; 100 of them are held out."""
    every = [f"{number}={spell(number)}\n" for number in range(1, 1000)]
    random.Random(0).shuffle(every)
    return every[100:], every[:100]


def collate(samples):
    """Texts have different lengths, so the short ones of a batch are padded."""
    tokens = [encode(text) for text in samples]
    inputs = pad_sequence([text[:-1] for text in tokens], batch_first=True)
    targets = pad_sequence([text[1:] for text in tokens], batch_first=True, padding_value=IGNORED)
    return inputs, targets


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width, layers, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))


def loss(model, batch):
    """The mean over the characters that count, not over the texts."""
    inputs, targets = batch
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total / (targets != IGNORED).sum()


def schedule(step, total):
    """Warms up over the first tenth, then follows a cosine to a tenth."""
    warm = max(1, total // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


@torch.no_grad()
def complete(model, text):
    device = next(model.parameters()).device
    model.eval()
    while not text.endswith("\n") and len(text) < LONGEST:
        text += CHARACTERS[model(encode(text).to(device).unsqueeze(0))[0, -1].argmax()]
    return text.strip()


def train(lr=4e-3, width=64, layers=2, batch_size=32):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train_set, valid_set = texts()
    loader = DataLoader(train_set, batch_size, shuffle=True, collate_fn=collate)
    model = GPT(width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, EPOCHS * len(loader)))

    for epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            batch = [tensor.to(device) for tensor in batch]
            value = loss(model, batch)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        model.eval()
        with torch.no_grad():
            held_out = loss(model, [tensor.to(device) for tensor in collate(valid_set)])
        print(f"epoch {epoch + 1}  loss {value:.4f}  valid_loss {held_out:.4f}")
    return model


if __name__ == "__main__":
    model = train()
    for text in texts()[1][:4]:
        print(complete(model, text[: text.index("=") + 1]))
