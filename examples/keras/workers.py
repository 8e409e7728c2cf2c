"""Train a Keras model on several workers: every worker runs the same script, and TF_CONFIG names its index.

    TF_CONFIG='{"cluster": {"worker": ["host1:7777", "host2:7777"]}, "task": {"type": "worker", "index": 0}}' python workers.py
    TF_CONFIG='{"cluster": {"worker": ["host1:7777", "host2:7777"]}, "task": {"type": "worker", "index": 1}}' python workers.py

Without TF_CONFIG, run `manyhands launch workers.py --hosts 2 --join host1:7777 --token-file token` on every host.

Expect one line with the number of replicas and the loss, about 0.09 after five epochs.
"""  # noqa: E501

import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import manyhands.keras as mhk  # before keras, or with KERAS_BACKEND=torch in the environment

import keras  # isort: skip

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images[:1500], dtype=torch.float32) / 16, torch.tensor(labels[:1500]))

strategy = mhk.MultiWorkerMirroredStrategy()
with strategy.scope():
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(64, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        optimizer=keras.optimizers.SGD(0.2, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

os.makedirs("runs", exist_ok=True)
# Global batches; every worker reads only its own samples of each.
loader = DataLoader(data, batch_size=100, shuffle=True)
history = model.fit(
    strategy.experimental_distribute_dataset(loader),
    epochs=int(os.environ.get("EPOCHS", "5")),
    verbose=0,
    shuffle=False,
    callbacks=[keras.callbacks.BackupAndRestore("runs/backup")],
)
model.save("runs/workers.keras")
if strategy.hand.is_first:
    print(f"{strategy.num_replicas_in_sync} replicas, loss {history.history['loss'][-1]:.6f}")
