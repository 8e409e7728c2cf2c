"""Ensemble with remote members, each in its own process or behind a server, and with a deadline for answers.

A query is sent to all members at once. The answers that arrive before the deadline are combined if they are at least a
quorum, and the result lists the members that have answered. A member whose process dies is restarted.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..core import Predictor, RequestRefused, SettingsError, Signature, TensorSpec, is_above_zero
from ..distributed import Device, World
from ..launcher import Engine, Service
from .ensemble import CombinationRule
from .member import Member

ANSWERED = "answered"
"""Name of the output that lists the members that have answered."""
AGAIN_SECONDS = 0.5
"""Minimum seconds between two attempts to restart a member's process."""
MOST_OPEN = 128
"""Maximum number of queries in flight per member; more would fill the pipe to its process, and block."""


@dataclass(frozen=True)
class EnsemblePrediction:
    """The combined prediction of a remote ensemble, with the members that have answered."""

    outputs: dict[str, Tensor]
    """The combined predictions, by output."""
    members: tuple[int, ...]
    """Numbers of the members that have answered before the deadline."""
    missing: dict[int, str]
    """For each other member, by number, why its answer is missing."""

    @property
    def is_degraded(self) -> bool:
        """Whether the answer of a member is missing."""
        return bool(self.missing)


class MemberHandle(ABC):
    """Base class of handles of remote members, which answer queries asynchronously."""

    def __init__(self) -> None:
        self._num_open = 0
        self._counting = threading.Lock()

    def ask(self, inputs: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Send a query to the member; return a future of its outputs.

        The future has an error if the query cannot be sent, or if MOST_OPEN earlier queries are unanswered.
        """
        answer: Future[dict[str, Tensor]]
        try:
            if self._num_open >= MOST_OPEN:
                raise RuntimeError(f"{self._num_open} earlier queries are unanswered")
            answer = self._asked(inputs)
        except Exception as error:
            answer = Future()
            answer.set_exception(error)
            return answer
        with self._counting:
            self._num_open += 1
        answer.add_done_callback(self._is_done)
        return answer

    def _is_done(self, answer: Future[dict[str, Tensor]]) -> None:
        with self._counting:
            self._num_open -= 1

    @abstractmethod
    def _asked(self, inputs: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Send a query to the member; return a future of its outputs. `ask` limits the queries in flight."""

    @abstractmethod
    def close(self) -> None:
        """Release the member and its resources."""


class ProcessMember(MemberHandle):
    """Handle of a member in its own process on a device; if the process dies, the next query restarts it."""

    def __init__(self, engine: Engine, member: Member, device: Device) -> None:
        super().__init__()
        self._engine, self._make, self._device = engine, _MemberServiceFactory(member), device
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._service: Service = engine.start_service(self._make, device)

    def _asked(self, inputs: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        with self._lock:
            if not self._service.is_alive and time.monotonic() - self._started_at > AGAIN_SECONDS:
                self._started_at = time.monotonic()
                self._service = self._engine.start_service(self._make, self._device)
            return self._service.call("answer", inputs)

    def ready(self) -> None:
        """Wait until the member's process can answer queries."""
        self._service.call("is_ready").result()

    @property
    def pid(self) -> int:
        """The ID of the member's process."""
        return int(self._service.call("process").result())

    def close(self) -> None:
        self._service.kill()


class CalledMember(MemberHandle):
    """Handle of a member that is queried by calling a function, such as the client of a server, in a thread."""

    def __init__(self, call: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str) -> None:
        super().__init__()
        self._call = call
        self._pool = ThreadPoolExecutor(8, thread_name_prefix=f"manyhands-{name}")

    def _asked(self, inputs: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        return self._pool.submit(self._call, inputs)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class RemoteEnsemble(Predictor):
    """Ensemble whose members run in other processes or behind servers; may be used by several threads.

    `ensemble.ask(inputs)` returns an EnsemblePrediction, which lists the members that have answered. As a Predictor,
    the ensemble returns them in the output "answered": for every row of the inputs, a row with a bool per member.

    Args:
        handles: Handles of the members.
        rule: How predictions are combined.
        signature: The signature of the members.
        deadline: Seconds to wait for answers.
        quorum: Number of members that must answer before the deadline, otherwise a query raises RequestRefused; by
            default more than half.

    Raises:
        SettingsError: The quorum or the deadline is out of range.
    """

    def __init__(
        self,
        handles: Sequence[MemberHandle],
        rule: CombinationRule,
        signature: Signature,
        *,
        deadline: float = 1.0,
        quorum: int | None = None,
    ) -> None:
        enough = len(handles) // 2 + 1 if quorum is None else quorum
        if isinstance(enough, bool) or not isinstance(enough, int) or not 1 <= enough <= len(handles):
            raise SettingsError(
                f"quorum must be between 1 and {len(handles)}",
                got=repr(enough),
                remedy="pass a number of members in this range",
            )
        if not is_above_zero(deadline):
            raise SettingsError(
                "deadline must be above 0 seconds", got=repr(deadline), remedy="pass for example deadline=1.0"
            )
        self._handles, self._rule, self.deadline, self.quorum = list(handles), rule, deadline, enough
        outputs = {**rule.signature(signature).outputs, ANSWERED: TensorSpec("bool", (None, len(handles)))}
        self.signature = Signature(signature.inputs, outputs)

    def __repr__(self) -> str:
        return f"RemoteEnsemble of {len(self._handles)}, {self.quorum} of which must answer within {self.deadline:g} s"

    @property
    def handles(self) -> list[MemberHandle]:
        """The handles of the members, in order of their numbers."""
        return self._handles

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        answer = self._ask(inputs)
        rows = len(next(iter(inputs.values())))
        mask = torch.tensor([number in answer.members for number in range(len(self._handles))])
        return {**answer.outputs, ANSWERED: mask.expand(rows, -1).clone()}

    def ask(self, inputs: Any) -> EnsemblePrediction:
        """Return the combined prediction for inputs, with the members that have answered.

        Raises:
            RequestRefused: Fewer members than the quorum have answered before the deadline.
        """
        return self._ask(self.checked(inputs))

    def close(self) -> None:
        """Release all members: stop their processes, and end their threads."""
        for handle in self._handles:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, inputs: dict[str, Tensor]) -> EnsemblePrediction:
        end = time.monotonic() + self.deadline
        asked = {handle.ask(inputs): number for number, handle in enumerate(self._handles)}
        open_ = set(asked)
        while open_ and (left := end - time.monotonic()) > 0:
            open_ -= wait(open_, left, FIRST_COMPLETED).done
        answered: dict[int, dict[str, Tensor]] = {}
        missing = {asked[future]: f"no answer within {self.deadline:g} s" for future in open_}
        for future, number in asked.items():
            if future in open_:
                continue
            if (error := future.exception()) is not None:
                missing[number] = (str(error) or type(error).__name__).splitlines()[0]
            else:
                answered[number] = future.result()
        if len(answered) < self.quorum:
            reasons = "; ".join(f"member {number}: {reason}" for number, reason in sorted(missing.items()))
            raise RequestRefused(
                "UNAVAILABLE", f"only {len(answered)} of {self.quorum} required members answered ({reasons})", 1.0
            )
        numbers = sorted(answered)
        answers = {
            name: torch.stack([answered[number][name] for number in numbers]) for name in self._rule.combinations
        }
        with torch.no_grad():
            outputs = self._rule.combined(answers, None if len(numbers) == len(self._handles) else numbers)
        return EnsemblePrediction(outputs, tuple(numbers), missing)


class _MemberServiceFactory:
    """Function, as an object that can be pickled, that creates the service in a member's process."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __call__(self, world: World) -> _Answering:
        return _Answering(self._member, world.device)


class _Answering:
    def __init__(self, member: Member, device: torch.device) -> None:
        self._member, self._device = member, device
        member.model.to(device).eval()

    @torch.no_grad()
    def answer(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the member's predictions for inputs, copied to the CPU."""
        moved = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        return {name: tensor.cpu() for name, tensor in self._member.answer(moved).items()}

    def is_ready(self) -> bool:
        """Return True; the call returns when the process has started and loaded the member."""
        return True

    def process(self) -> int:
        """Return the ID of this process."""
        import os

        return os.getpid()
