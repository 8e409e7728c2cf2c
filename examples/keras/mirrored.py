"""Train a Keras model on all devices of one machine.

    python mirrored.py                                  # restarts itself on all devices
    manyhands launch mirrored.py --on cpu*2

A script written for tf.distribute.MirroredStrategy, with the import changed. The batch size is that of all replicas
together, so the result does not depend on their number, up to rounding.

Expect one line with the number of replicas, the loss and the accuracy, about 0.87 after five epochs, and the model in
runs/digits.keras.
"""

import os

import manyhands.keras as mhk  # before keras, or with KERAS_BACKEND=torch in the environment

import keras  # isort: skip
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
train, test = slice(0, 1500), slice(1500, None)

strategy = mhk.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

os.makedirs("runs", exist_ok=True)
model.fit(
    images[train],
    labels[train],
    batch_size=100,
    epochs=int(os.environ.get("EPOCHS", "5")),
    verbose=0,
    callbacks=[keras.callbacks.ModelCheckpoint("runs/digits.keras", monitor="loss", save_best_only=True)],
)
loss, accuracy = model.evaluate(images[test], labels[test], verbose=0)
if strategy.hand.is_first:
    print(f"{strategy.num_replicas_in_sync} replicas, loss {loss:.6f}, accuracy {accuracy:.4f}")
