"""Callbacks run once, on the first replica; what they change in the model all the others get from it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from keras.callbacks import BackupAndRestore, CallbackList, ModelCheckpoint
from keras.src.utils.python_utils import is_default

from .boards import TensorBoard
from .runs import RunLog

if TYPE_CHECKING:
    from .strategy import Strategy

_BATCHES = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}

_LOOKING = (BackupAndRestore, ModelCheckpoint, RunLog, TensorBoard)
"""What changes nothing after a batch, so that nobody has to ask whether it did."""


class OnceForAll(CallbackList):  # type: ignore[misc]
    """The callbacks of a fit, an evaluation or a prediction.

    On the first replica they see a model that is theirs alone: an evaluation in a callback happens there only. After
    each call the others follow: weights, the optimizer's state, whether to stop, the epoch to begin with.
    """

    def __init__(self, strategy: Strategy, model: Any, callbacks: Any, verbose: Any, **more: Any) -> None:
        self._strategy = strategy
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
        changing = [each for each in given if type(each) not in _LOOKING]
        per_batch = {
            what: any(not is_default(getattr(each, name)) for each in changing for name in names)
            for what, names in _BATCHES.items()
        }
        saves_in_between = any(isinstance(getattr(each, "save_freq", None), int) for each in given)
        is_first = strategy.hand.is_first
        # Callbacks may be given to the first replica alone; when to meet is for all the same.
        self._per_batch, self._saves_in_between = strategy.hand.world.gather_objects((per_batch, saves_in_between))[0]
        if verbose == "auto" and not sys.stdout.isatty():
            # Under launch every move of a bar would be a line; Keras itself recommends a line per epoch there.
            verbose = 2
        super().__init__(
            list(given) if is_first else None,
            add_progbar=is_first and verbose != 0,
            verbose=verbose if is_first else 0,
            model=model,
            **more,
        )
        # In another thread they could not be told from the steps that go on meanwhile.
        self._async_train = self._async_test = self._async_predict = False

    def _once(self, name: str, *args: Any, follow: bool = True) -> None:
        before = self._strategy.versions(self.model)
        with self._strategy.alone():
            getattr(CallbackList, name)(self, *args)
        if follow:
            self._strategy.follow_first(self.model, before)

    def on_train_begin(self, logs: Any = None) -> None:
        self._once("on_train_begin", logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._once("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._once("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._strategy.share_memory(self.model)
        self._once("on_epoch_end", epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._once("on_test_begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._once("on_test_end", logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._once("on_predict_begin", logs)

    def on_predict_end(self, logs: Any = None) -> None:
        self._once("on_predict_end", logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._once("on_train_batch_begin", batch, logs, follow=self._per_batch["train"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._saves_in_between:
            self._strategy.share_memory(self.model)
        self._once("on_train_batch_end", batch, logs, follow=self._per_batch["train"])

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._once("on_test_batch_begin", batch, logs, follow=self._per_batch["test"])

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._once("on_test_batch_end", batch, logs, follow=self._per_batch["test"])

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._once("on_predict_batch_begin", batch, logs, follow=self._per_batch["predict"])

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._once("on_predict_batch_end", batch, logs, follow=self._per_batch["predict"])
