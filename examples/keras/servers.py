"""Train a Keras model with parameter servers: every task runs the same script, and TF_CONFIG names its role.

    export CLUSTER='{"chief": ["host1:7777"], "worker": ["host2:7777", "host3:7777"], "ps": ["host4:7777"]}'
    TF_CONFIG="{\"cluster\": $CLUSTER, \"task\": {\"type\": \"chief\", \"index\": 0}}" python servers.py   # on host1
    TF_CONFIG="{\"cluster\": $CLUSTER, \"task\": {\"type\": \"worker\", \"index\": 0}}" python servers.py  # and so on

Workers compute gradients, servers apply updates, and the chief runs the callbacks and writes the files. Without a
cluster, as in `manyhands launch servers.py --on cpu*2`, every replica is a worker and the server of its share.

Expect one line with the number of workers and the loss, about 0.2 after five epochs.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import manyhands.keras as mhk  # before keras, or with KERAS_BACKEND=torch in the environment

import keras  # isort: skip

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images[:1500], dtype=torch.float32) / 16, torch.tensor(labels[:1500]))

strategy = mhk.ParameterServerStrategy(mhk.TFConfigClusterResolver())
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

os.makedirs("runs", exist_ok=True)
history = model.fit(
    DataLoader(data, batch_size=100, shuffle=True),
    epochs=int(os.environ.get("EPOCHS", "5")),
    verbose=0,
    callbacks=[keras.callbacks.CSVLogger("runs/servers.csv"), keras.callbacks.ModelCheckpoint("runs/servers.keras")],
)
if strategy.hand.is_first:
    print(f"{strategy.num_replicas_in_sync} workers, loss {history.history['loss'][-1]:.6f}")
