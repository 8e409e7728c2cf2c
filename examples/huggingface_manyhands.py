"""Train a small Hugging Face transformer that classifies reviews as good or bad, on all devices of this machine.

Shows a model that computes its own loss, batches that are dicts, `predict` with named inputs, and
`run.save_pretrained`, whose folder `from_pretrained` reads. Weights are random, and nothing is downloaded.
`huggingface_torch.py` does the same with Hugging Face's Trainer.

    python huggingface_manyhands.py

Expect a validation accuracy above 0.9 after four epochs, and the model in models/reviews.
"""

import os
import random

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import manyhands as mh

EPOCHS = int(os.environ.get("EPOCHS", 4))
GOOD = ["good", "great", "fine", "lovely", "funny", "clever", "warm", "brilliant"]
BAD = ["bad", "awful", "dull", "boring", "silly", "weak", "cold", "terrible"]
PARTS = ["plot", "acting", "music", "ending", "cast", "pace"]
WORDS = {word: number for number, word in enumerate(["[PAD]", "the", "was", "not", "and", *GOOD, *BAD, *PARTS])}


def review(draw):
    """A sentence of one to three parts, such as "the plot was not dull and the cast was great", and its label."""
    words, score = [], 0
    for part in draw.sample(PARTS, draw.choice([1, 3])):
        is_good, is_turned = draw.random() < 0.5, draw.random() < 0.3
        score += 1 if is_good != is_turned else -1
        words += ["and", "the", part, "was", *["not"] * is_turned, draw.choice(GOOD if is_good else BAD)]
    return [WORDS[word] for word in words[1:]], int(score > 0)


def reviews(count, seed):
    """Reviews as a Hugging Face model takes them, padded to one length."""
    draw = random.Random(seed)
    made = [review(draw) for _ in range(count)]
    length = max(len(words) for words, _ in made)
    tokens = torch.tensor([words + [0] * (length - len(words)) for words, _ in made])
    labels = torch.tensor([label for _, label in made])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def network():
    """Random weights, from a configuration alone."""
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "max_position_embeddings": 32}
    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=len(WORDS), **sizes, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)
    )


def accuracy(logits, batch):
    return (logits.argmax(1) == batch["labels"]).float().mean()


def task(lr: float = 2e-3, batch_size: int = 64) -> mh.Task:
    return mh.Task(
        model=network,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
        schedule=lambda step, total: 1 - step / total,
        clip=1.0,  # as the Trainer does by default
        data=reviews(3000, seed=1),
        valid=reviews(500, seed=2),
        predict=lambda model, input_ids, attention_mask: model(input_ids, attention_mask).logits,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,  # of all devices together
    )


if __name__ == "__main__":
    run = mh.fit(task, mh.Mirrored(), epochs=EPOCHS)
    print(run)
    run.save_pretrained("models/reviews")  # a folder that from_pretrained reads
