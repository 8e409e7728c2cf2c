"""Callbacks of Keras, which run on the first replica only; their effects and errors are sent to the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras import tree
from keras.callbacks import BackupAndRestore, Callback, CallbackList, ModelCheckpoint
from keras.src.utils.python_utils import is_default

from ..core import RunError, SettingsError
from ..distributed import Opaque
from .inputs import brought_by_all
from .model_changes import Changes, ModelSnapshot, plain_attributes
from .runs import FitTimer, RunLog

if TYPE_CHECKING:
    from .strategy import Strategy

_PER_BATCH = {
    "on_train_batch_begin": ("on_batch_begin", "on_train_batch_begin"),
    "on_train_batch_end": ("on_batch_end", "on_train_batch_end"),
    **{
        f"on_{what}_batch_{when}": (f"on_{what}_batch_{when}",)
        for what in ("test", "predict")
        for when in ("begin", "end")
    },
}
"""For each per-batch method that Keras calls on a callback list: the methods that a callback may implement for it."""


class OnceForAll(CallbackList):  # type: ignore[misc]
    """Callback list of a fit, an evaluation or a prediction that runs the callbacks on the first replica only.

    The other replicas take no part, so an evaluation in a callback runs on the first replica alone. After each call
    they receive the changes of weights, attributes, optimizer state, the stop flag and the initial epoch. An exception
    in a callback is raised on all replicas. At the end, the attributes of the callbacks are copied to all replicas.
    """

    def __init__(self, strategy: Strategy, model: Any, callbacks: Any, verbose: Any, **more: Any) -> None:
        self._strategy = strategy
        given = self._given = tree.flatten(callbacks or [])
        changing = [each for each in given if type(each) not in _LOOKING]
        per_batch = {
            what: any(not is_default(getattr(each, name)) for each in changing for name in names)
            for what, names in _PER_BATCH.items()
        }
        saves_in_between = any(isinstance(getattr(each, "save_freq", None), int) for each in given)
        is_logged = any(isinstance(each, RunLog) for each in given)
        is_first = strategy.hand.is_first
        # Only the first replica may have callbacks, but all must synchronize at the same points.
        own = (per_batch, saves_in_between, is_logged)
        self._per_batch, self._saves_in_between, is_logged = brought_by_all(strategy.hand, "call callbacks", own)[0]
        self._clock = FitTimer(strategy.hand) if is_logged else None
        if verbose == "auto" and not sys.stdout.isatty():
            # Without a terminal, every update of a progress bar would be a line; Keras recommends a line per epoch.
            verbose = 2
        strategy.failure = None
        try:
            super().__init__(
                given if is_first else None,
                add_progbar=is_first and verbose != 0,
                verbose=verbose if is_first else 0,
                model=model,
                **more,
            )
        except Exception as error:
            strategy.failure = error
        met(strategy)
        # Callbacks in another thread could not be distinguished from concurrent steps.
        self._async_train = self._async_test = self._async_predict = False

    def _once(self, name: str, *args: Any) -> None:
        hand, changes = self._strategy.hand, Changes()
        follow = self._per_batch.get(name, True)
        try:
            before = ModelSnapshot(self.model) if follow and hand.is_first and hand.size > 1 else None
            if self._strategy.failure is None:
                with self._strategy.joint.alone():
                    getattr(CallbackList, name)(self, *args)
                changes = before.changes() if before is not None else changes
        except Exception as error:
            # The other replicas learn of the failure at the next synchronization, after a step at the latest.
            self._strategy.failure = error
        if follow:
            met(self._strategy, changes).follow(hand, self.model)

    def _end(self, name: str, logs: Any) -> None:
        self._once(name, logs)
        if self._in_begin_end_block_count == 0:
            self._share_known_state()

    def _begin(self) -> None:
        if self._clock is not None:
            self._clock.begin()

    def _count(self, what: str) -> None:
        if self._clock is not None:
            self._clock.end(what)

    def _share_known_state(self) -> None:
        """Copy the first replica's callback attributes to all, such as EarlyStopping's best epoch or the history."""
        # The first replica may have callbacks that the other replicas lack; all have a history.
        groups = [self._given, [self._history] if self._history else []]
        own = [[(type(each).__name__, plain_attributes(each)) for each in group] for group in groups]
        received = self._strategy.hand.world.gather_objects(own if self._strategy.hand.is_first else None)[0]
        for mine, known, theirs in zip(groups, own, received, strict=True):
            if [name for name, _ in known] == [name for name, _ in theirs]:
                for each, (_, values) in zip(mine, theirs, strict=True):
                    vars(each).update(values)

    def on_train_begin(self, logs: Any = None) -> None:
        self._once("on_train_begin", logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._end("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._once("on_epoch_begin", epoch, logs)
        self._begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._strategy.share_memory(self.model)
        if self._clock is not None:
            waits = self._strategy.hand.world.gather_objects(self._clock.describe())
            for each in self._given:
                if isinstance(each, RunLog):
                    each.waits = waits
        self._once("on_epoch_end", epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._once("on_test_begin", logs)
        self._begin()

    def on_test_end(self, logs: Any = None) -> None:
        self._count("validation")
        self._end("on_test_end", logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._once("on_predict_begin", logs)

    def on_predict_end(self, logs: Any = None) -> None:
        self._end("on_predict_end", logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count("input")
        self._once("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._saves_in_between:
            self._strategy.share_memory(self.model)
        self._once("on_train_batch_end", batch, logs)
        self._begin()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._once("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._once("on_test_batch_end", batch, logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._once("on_predict_batch_begin", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._once("on_predict_batch_end", batch, logs)


def met(strategy: Strategy, changes: Changes | None = None) -> Changes:
    """Return the changes that the first replica's callbacks made, on all replicas, which must all call this.

    An exception that was raised on the first replica is raised on all replicas instead.
    """
    own, strategy.failure = strategy.failure, None
    packed = None if own is None else _packed(own)
    failure, received = strategy.hand.world.gather_objects((packed, changes or Changes()))[0]
    if own is not None:
        raise own
    if failure is not None:
        raise _unpacked(*failure)
    return received  # type: ignore[no-any-return]


def _packed(error: Exception) -> tuple[str, Opaque | None]:
    """Return an exception's text and its pickle.

    An exception that cannot be recreated from its arguments is pickled in parts; the pickle is None if that fails too.
    """
    for form in (error, (type(error), error.args, vars(error))):
        with contextlib.suppress(Exception):
            packed = Opaque.of(form)
            packed.open()
            return f"{type(error).__name__}: {error}", packed
    return f"{type(error).__name__}: {error}", None


def _unpacked(text: str, packed: Opaque | None) -> Exception:
    error: Exception = RunError(text)
    if packed is not None and packed.is_authentic:
        with contextlib.suppress(Exception):
            error = _made_again(packed.open())
    error.add_note("raised by a callback of the first replica")
    return error


def _made_again(form: Any) -> Exception:
    if isinstance(form, Exception):
        return form
    kind, args, values = form
    error: Exception = kind.__new__(kind)
    error.args = args
    vars(error).update(values)
    return error


class TensorBoard(Callback):  # type: ignore[misc]
    """Callback that writes logs in TensorBoard's format, without TensorFlow.

    The curves have Keras' names, such as `epoch_loss`, in log_dir/train and log_dir/validation.

    Args:
        log_dir: Folder of the logs.
        update_freq: "epoch" to write the logs of every epoch, "batch" to write those of every batch too, or a number
            of batches after which to write the logs of a batch.
    """

    def __init__(self, log_dir: str | Path = "logs", update_freq: str | int = "epoch") -> None:
        super().__init__()
        if update_freq not in ("epoch", "batch") and not isinstance(update_freq, int):
            raise SettingsError(
                'update_freq must be "epoch", "batch" or a number of batches',
                got=repr(update_freq),
                remedy='pass for example update_freq="epoch"',
            )
        self._folder, self._every = Path(log_dir), {"epoch": 0, "batch": 1}.get(str(update_freq), update_freq)
        self._num_batches = 0
        self._writers: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Write the logs of this batch if `update_freq` selects it."""
        self._num_batches += 1
        if self._every and self._num_batches % int(self._every) == 0:
            self._write("batch", logs, self._num_batches)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Write the logs of this epoch."""
        self._write("epoch", logs, epoch)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, prefix: str, logs: Mapping[str, float] | None, at: int) -> None:
        for name, value in (logs or {}).items():
            kind = "validation" if name.startswith("val_") else "train"
            self._writer(kind).add_scalar(f"{prefix}_{name.removeprefix('val_')}", value, at)

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            self._writers[kind] = SummaryWriter(str(self._folder / kind))
        return self._writers[kind]


_LOOKING = (BackupAndRestore, ModelCheckpoint, RunLog, TensorBoard)
"""Callbacks that do not change the model after a batch, so that replicas need not synchronize because of them."""
