"""Exception hierarchy. Errors that the user can correct say what is required, what was given, and what to do.

ManyhandsError
├── UsageError (ValueError)      a mistake that the user can correct; nothing was started and nothing is lost
│   ├── TaskError                the task: model, loss, optimizer, step
│   ├── DataError                a dataset, a loader, a batch
│   │   └── DataWorkerLost       a process that reads data has exited; a rank that raises it is replaced
│   ├── DeviceError              devices that do not exist or cannot be used
│   ├── StrategyError            a strategy that does not exist, or that the task or the devices do not support
│   ├── SettingsError            an option, a configuration file, a task parameter
│   ├── CheckpointError          a checkpoint that is corrupt, of another program or of another model
│   ├── ArchiveError             an exported model that is corrupt or could execute code
│   ├── FileError                a file that is not a regular file, is too large, or is damaged
│   └── SendError                something that cannot be sent to a worker process
└── RunError (RuntimeError)      a failure during execution
    ├── WorkerFailed             a rank raised an exception or died: its number, the reason, its traceback
    │   └── NoProgress           a step crashed repeatedly, although ranks were replaced
    ├── PeerLost                 an operation was aborted because another rank failed
    ├── ReplicasDiffer           replicas that should have equal parameters do not
    ├── LossNotFinite            the loss became NaN or infinite
    ├── OutOfMemory              a step did not fit into memory: what used it, and what would fit
    └── RequestRefused           a served model did not answer: the code and the reason
"""

from __future__ import annotations

_CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Escapes of characters that control a terminal, except tab and newline: errors quote text from files and networks."""


class ManyhandsError(Exception):
    """Base class of all exceptions that manyhands raises on purpose."""


class UsageError(ManyhandsError, ValueError):
    """A mistake that the user can correct.

    Args:
        rule: What is required, as a clause such as "batch_size must be at least 1".
        got: What was given instead, if that is not part of the rule.
        remedy: What to do, as an imperative clause such as "pass batch_size=32".

    >>> print(UsageError("batch_size must be at least 1", got=0, remedy="pass batch_size=32"))
    batch_size must be at least 1, but got 0. Pass batch_size=32.
    """

    def __init__(self, rule: str, *, got: object = None, remedy: str = "") -> None:
        self.rule, self.got, self.remedy = rule, got, remedy
        text = rule if got is None else f"{rule}, but got {got}"
        super().__init__((f"{text}. {_as_sentence(remedy)}" if remedy else text).translate(_CONTROLS))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_usage, (type(self), self.rule, self.got, self.remedy)


_COMMANDS = ("pip", "manyhands", "torchrun", "ray")
"""Commands with which a remedy may start; they are not capitalized."""


def _as_sentence(text: str) -> str:
    """Return a clause as a sentence; a name or a command at its start keeps its case.

    >>> _as_sentence("pass batch_size=32"), _as_sentence("mh.Single() trains on one device")
    ('Pass batch_size=32.', 'mh.Single() trains on one device.')
    """
    first = text.partition(" ")[0].rstrip(",:")
    is_word = first.isalpha() and first.islower() and first not in _COMMANDS
    start = text[:1].upper() if is_word else text[:1]
    return start + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _rebuild_usage(kind: type[UsageError], rule: str, got: object, remedy: str) -> UsageError:
    return kind(rule, got=got, remedy=remedy)


class TaskError(UsageError):
    """Invalid task: model, loss, optimizer or step."""


class DataError(UsageError):
    """Invalid dataset, loader or batch."""


class DataWorkerLost(DataError):
    """A process that reads data has exited. A rank that raises this is replaced, like one that was killed."""


class DeviceError(UsageError):
    """Devices that do not exist or cannot be used."""


class StrategyError(UsageError):
    """Strategy that does not exist, or that the task or the devices do not support."""


class SettingsError(UsageError):
    """Invalid option, configuration file or task parameter."""


class CheckpointError(UsageError):
    """Checkpoint that is corrupt, was written by another program, or belongs to another model."""


class ArchiveError(UsageError):
    """Exported model that is corrupt, or that could execute code."""


class FileError(UsageError):
    """File that is not a regular file, is larger than its limit, or is damaged."""


class SendError(UsageError):
    """Object that cannot be sent to a worker process."""


class RunError(ManyhandsError, RuntimeError):
    """Failure during execution."""


class WorkerFailed(RunError):
    """A rank raised an exception or died; reports the first failure of a job, not the failures that follow from it."""

    def __init__(self, rank: int, host: str, reason: str, traceback: str = "") -> None:
        self.rank, self.host, self.reason, self.traceback = rank, host, reason, traceback
        text = f"rank {rank} on {host} failed: {reason}"
        super().__init__(f"{text}\n\n{traceback.rstrip()}" if traceback else text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.host, self.reason, self.traceback)


class NoProgress(WorkerFailed):
    """A step crashed repeatedly, so that replacing ranks does not help; the command line exits with code 70."""

    exit_code = 70


class PeerLost(RunError):
    """An operation was aborted because another rank failed, or because the membership of the job changed.

    Args:
        operation: The aborted operation, such as "all_reduce".
        line: The line of user code that called it, as `path:number`.
        who: The failed rank and the reason, as text.
        detail: The error of the connection, if there is one.
    """

    def __init__(self, operation: str, line: str, who: str, detail: str = "") -> None:
        self.operation, self.line, self.who, self.detail = operation, line, who, detail
        text = f"{operation} at {line} was aborted: {who}"
        super().__init__(f"{text} ({detail})" if detail else text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.line, self.who, self.detail)


class ReplicasDiffer(RunError):
    """Replicas that should hold equal parameters do not."""


class LossNotFinite(RunError):
    """The loss became NaN or infinite; the last good checkpoint is kept."""


class OutOfMemory(RunError):
    """A step did not fit into memory; the message lists what used it and what would fit."""


class RequestRefused(RunError):
    """A served model did not answer a request.

    Args:
        code: Name of a gRPC status code, such as "UNAVAILABLE".
        reason: The reason as text.
        retry_after: Seconds after which to try again; None if that would not help.
    """

    def __init__(self, code: str, reason: str, retry_after: float | None = None) -> None:
        self.code, self.reason, self.retry_after = code, reason, retry_after
        super().__init__(reason.translate(_CONTROLS))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.reason, self.retry_after)
