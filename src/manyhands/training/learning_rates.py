"""Learning rates of a run: by the task's function of the step, or by a scheduler of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core import SettingsError, Task, TaskError, TorchScheduler, groups_of
from .patience import check_measured

if TYPE_CHECKING:
    from .hand import Hand


def check_schedule(task: Task, num_steps: int | None) -> None:
    """Raise for a schedule that needs a number of steps, or a metric, that the run does not have."""
    if isinstance(task.schedule, TorchScheduler):
        if task.schedule.metric is not None:
            check_measured(task.schedule.metric, task, "TorchScheduler")
    elif task.schedule is not None and num_steps is None:
        raise TaskError(
            "a schedule needs to know the number of steps",
            got="a stream of unknown length",
            remedy="pass steps= to fit",
        )


class LearningRates:
    """Sets the learning rates of every step.

    They depend on the step, the epoch, and the values measured at the ends of epochs alone, so that a resumed run
    continues with the same ones.
    """

    def __init__(self, hand: Hand, task: Task, total: int | None) -> None:
        self._hand, self._schedule, self._total = hand, task.schedule, total
        self._applied: float | None = None
        """The function's factor, or the number of the scheduler's steps, by which the current rates were set."""
        self._stepped: dict[str, _Stepped] = {}
        self._measured: dict[int, float] = {}
        """The values of the scheduler's metric, by epoch."""
        if isinstance(self._schedule, TorchScheduler):
            self._restart()

    def set(self) -> None:
        """Set the learning rates of the next step."""
        if isinstance(self._schedule, TorchScheduler):
            self._follow(self._schedule)
        elif self._schedule is not None:
            assert self._total is not None
            factor = self._schedule(self._hand.num_steps, self._total)
            if factor != self._applied:
                self._applied = factor
                for optimizer in self._hand.optimizers.values():
                    _assign(optimizer, [rate * factor for rate in _initial(optimizer)])

    def end_epoch(self, epoch: int, measured: Mapping[str, float]) -> None:
        """Store the value by which a scheduler decides after this epoch; the first replica's counts. Collective."""
        if isinstance(self._schedule, TorchScheduler) and self._schedule.metric is not None:
            value = self._hand.world.gather_objects(measured.get(self._schedule.metric))[0]
            if value is not None:
                self._measured[epoch] = value

    def state(self) -> dict[str, float]:
        """Return JSON-ready data, saved with every checkpoint."""
        return {str(epoch): value for epoch, value in self._measured.items()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Resume from what `state` returned."""
        self._measured = {int(epoch): value for epoch, value in state.items()}
        self._applied = None
        if isinstance(self._schedule, TorchScheduler):
            self._restart()

    def _restart(self) -> None:
        assert isinstance(self._schedule, TorchScheduler)
        self._stepped = {key: _Stepped(optimizer, self._schedule) for key, optimizer in self._hand.optimizers.items()}

    def _follow(self, schedule: TorchScheduler) -> None:
        wanted = self._hand.num_steps if schedule.every == "step" else self._hand.epoch
        if wanted == self._applied:
            return
        if any(stepped.count > wanted for stepped in self._stepped.values()):
            self._restart()  # the run was rolled back
        for key, stepped in self._stepped.items():
            while stepped.count < wanted:
                stepped.step(self._measured.get(stepped.count))
            _assign(self._hand.optimizers[key], stepped.rates)
        self._applied = wanted


class _Stepped:
    """A scheduler of PyTorch with an optimizer of its own, from which the learning rates are copied.

    The optimizer of the run may be sharded, captured in a CUDA graph, or on another server.
    """

    def __init__(self, optimizer: Optimizer, schedule: TorchScheduler) -> None:
        self.count = 0
        self._has_metric = schedule.metric is not None
        self._optimizer = _Rates(optimizer)
        self._before = self._others()
        self._scheduler = schedule.make(self._optimizer)
        if not isinstance(self._scheduler, LRScheduler):
            raise TaskError(
                "the function of a TorchScheduler must return a torch.optim.lr_scheduler",
                got=type(self._scheduler).__name__,
                remedy="write for example mh.TorchScheduler(lambda optimizer: StepLR(optimizer, 10))",
            )
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) is not self._has_metric:
            raise SettingsError(
                "a scheduler that follows a metric, and only such a one, needs metric=",
                got=f"{type(self._scheduler).__name__} with metric={schedule.metric!r}",
                remedy='write for example mh.TorchScheduler(ReduceLROnPlateau, metric="valid_loss")',
            )
        self._optimizer.step()  # torch warns where a scheduler is stepped before its optimizer
        self._check()

    @property
    def rates(self) -> list[float]:
        """The learning rate of every group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def step(self, measured: float | None) -> None:
        """Step the scheduler; one that follows a metric is stepped only if there is a value."""
        try:
            if not self._has_metric:
                self._scheduler.step()
            elif measured is not None:
                self._scheduler.step(measured)
        except ValueError as error:  # OneCycleLR has a last step
            raise TaskError(
                "a scheduler must accept every step of the run",
                got=f"{type(self._scheduler).__name__}, which raised: {error}",
                remedy="give it the number of steps of the run, or of epochs where it is stepped by epoch",
            ) from error
        self.count += 1
        self._check()

    def _others(self) -> list[dict[str, Any]]:
        own = ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
        return [{k: v for k, v in group.items() if k not in own} for group in self._optimizer.param_groups]

    def _check(self) -> None:
        """Raise where the scheduler changes more than learning rates."""
        for before, now in zip(self._before, self._others(), strict=True):
            changed = [name for name, value in before.items() if now.get(name) != value]
            if changed:
                raise TaskError(
                    "a scheduler may change learning rates only",
                    got=f"{type(self._scheduler).__name__}, which changes {', '.join(changed)}",
                    remedy="pass cycle_momentum=False to it, or choose another scheduler",
                )


class _Rates(Optimizer):
    """An optimizer with the hyperparameters of another one and without parameters to update."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = []
        for group, rate in zip(groups_of(optimizer), _initial(optimizer), strict=True):
            plain = {k: v for k, v in group.items() if k not in ("params", "initial_lr") and not isinstance(v, Tensor)}
            groups.append({**plain, "lr": rate, "params": [nn.Parameter(torch.zeros(0))]})
        super().__init__(groups, {k: v for k, v in optimizer.defaults.items() if not isinstance(v, Tensor)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _initial(optimizer: Optimizer) -> list[float]:
    """Return the learning rates that the groups were created with; they are stored in the groups."""
    return [group.setdefault("initial_lr", float(group["lr"])) for group in groups_of(optimizer)]


def _assign(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(groups_of(optimizer), rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
