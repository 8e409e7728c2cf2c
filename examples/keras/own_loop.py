"""Run a custom Keras training loop with correct gradient accumulation.

    manyhands launch own_loop.py --on cpu*2

Every micro-step adds its part of the gradient. The update is applied once, after the last micro-step, and the sums are
then cleared. The parts belong to the mean over the whole batch, so four micro-steps on two replicas learn what one
step on one device learns.

Expect a line per epoch, with a loss that falls to about 0.09 after five epochs.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import manyhands.keras as mhk  # before keras, or with KERAS_BACKEND=torch in the environment

import keras  # isort: skip

MICRO_STEPS = int(os.environ.get("MICRO_STEPS", "4"))
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images[:1500], dtype=torch.float32) / 16, torch.tensor(labels[:1500]))

strategy = mhk.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)


def step(inputs, wanted):
    """One update from a replica's part of a global batch."""
    # For this step alone: gradients are summed over its micro-steps, and nothing of the step before is in them.
    model.zero_grad()
    total = 0.0
    for x, y in zip(inputs.tensor_split(MICRO_STEPS), wanted.tensor_split(MICRO_STEPS), strict=True):
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        # The part of this micro-step in the mean over the global batch; parts are added, so nothing is averaged twice.
        loss = mhk.compute_average_loss(losses)
        loss.backward()
        total += loss.detach()
    # Here the replicas' gradients are summed as well.
    optimizer.apply([weight.value.grad for weight in model.trainable_weights], model.trainable_weights)
    return total


loader = strategy.experimental_distribute_dataset(DataLoader(data, batch_size=100, shuffle=True))
for epoch in range(int(os.environ.get("EPOCHS", "5"))):
    losses = [strategy.reduce("SUM", strategy.run(step, args=tuple(batch))) for batch in loader]
    if strategy.hand.is_first:
        print(f"epoch {epoch}: loss {float(torch.stack(losses).mean()):.6f}")
