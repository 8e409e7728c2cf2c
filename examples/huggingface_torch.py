"""Train a small Hugging Face transformer that classifies reviews as good or bad, with Hugging Face's Trainer.

`huggingface_manyhands.py` is the same task on any number of devices. Expect a validation accuracy above 0.9 after four
epochs.
"""

import os
import random

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

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


class Rows(torch.utils.data.Dataset):
    """The Trainer reads samples one by one."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


def train(lr=2e-3, batch_size=64):
    set_seed(0)
    arguments = TrainingArguments(
        "models/reviews_trainer",
        num_train_epochs=EPOCHS,
        learning_rate=lr,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        network(),
        arguments,
        train_dataset=Rows(reviews(3000, seed=1)),
        eval_dataset=Rows(reviews(500, seed=2)),
        compute_metrics=accuracy,
    )
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    for epoch, values in enumerate(measured):
        print(f"epoch {epoch + 1}  valid_loss {values['eval_loss']:.4f}  accuracy {values['eval_accuracy']:.4f}")


if __name__ == "__main__":
    train()
