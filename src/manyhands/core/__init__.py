"""Plain data and interfaces that all packages share: Task, Predictor, StrategySpec, errors, events."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import fields
from .errors import (
    ArchiveError,
    CheckpointError,
    DataError,
    DataWorkerLost,
    DeviceError,
    FileError,
    LossNotFinite,
    ManyhandsError,
    NoProgress,
    OutOfMemory,
    PeerLost,
    ReplicasDiffer,
    RequestRefused,
    RunError,
    SendError,
    SettingsError,
    StrategyError,
    TaskError,
    UsageError,
    WorkerFailed,
)
from .event_parts import PartReader, older_parts, parts_before
from .events import EVENTS, Event, EventLog, event, keep_event, read_events
from .files import (
    LINE_LIMIT,
    open_regular,
    opened,
    parse_json,
    read_file,
    read_json,
    read_lines,
    replace_text,
    require_format,
)
from .formatting import (
    counted,
    format_bytes,
    format_duration,
    format_number,
    format_rate,
    format_rough_duration,
    printable,
)
from .html_tables import html_curve, html_lines, html_table
from .module_state import (
    Attributes,
    Contents,
    default_dtype,
    evaluating,
    is_scripted,
    remember_buffers,
    remember_state,
    require_own_memory,
    require_tensor_state,
    saves_all,
    set_training,
    unsaved_buffers,
)
from .named_strategies import (
    ContextParallel,
    Mirrored,
    ParameterServer,
    Pipeline,
    Placed,
    Sharded,
    Single,
    TensorParallel,
    as_spec,
    check_policies_by,
)
from .predictor import Predictor, Signature, TensorSpec
from .randomness import mix, random_state, restore_random_state, seed_all, seeded
from .settings import (
    Resolved,
    ResolvedOptions,
    from_flat,
    option,
    options_of,
    require_positive,
    resolve_options,
    resolve_settings,
)
from .spec import DATA_AXES, MESH_ORDER, StrategySpec, split_settings
from .task import Mean, Task, TorchScheduler, as_task, convert, is_above_zero, mean, split_params, task_name, typed

if TYPE_CHECKING:
    from .layout_free import LayoutFree, as_written
    from .optimizers import (
        Joined,
        each_of,
        flat_slots,
        groups_of,
        has_scheduler,
        joined,
        nested_in,
        nested_slots,
        parameters_of,
    )
    from .random_operations import attention_weights, without_own_check
    from .sample_hash import stacked_keys


_LAZY = {
    "layout_free": ("LayoutFree", "as_written"),
    "sample_hash": ("stacked_keys",),
    "random_operations": ("attention_weights", "without_own_check"),
    "optimizers": (
        "Joined",
        "each_of",
        "flat_slots",
        "groups_of",
        "has_scheduler",
        "joined",
        "nested_in",
        "nested_slots",
        "parameters_of",
    ),
}


def __getattr__(name: str) -> Any:
    """Import a name of a module that needs torch when it is first used, so that `manyhands --help` starts quickly."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Contents",
    "format_bytes",
    "format_duration",
    "format_rate",
    "format_rough_duration",
    "format_number",
    "counted",
    "html_curve",
    "html_lines",
    "html_table",
    "printable",
    "Attributes",
    "Task",
    "TorchScheduler",
    "Mean",
    "mean",
    "as_task",
    "convert",
    "split_params",
    "task_name",
    "typed",
    "StrategySpec",
    "TensorParallel",
    "ContextParallel",
    "DATA_AXES",
    "MESH_ORDER",
    "Single",
    "Mirrored",
    "Sharded",
    "ParameterServer",
    "Pipeline",
    "Placed",
    "as_spec",
    "check_policies_by",
    "split_settings",
    "Resolved",
    "ResolvedOptions",
    "is_above_zero",
    "require_positive",
    "option",
    "options_of",
    "from_flat",
    "resolve_options",
    "resolve_settings",
    "Predictor",
    "Signature",
    "TensorSpec",
    "Event",
    "EventLog",
    "EVENTS",
    "event",
    "keep_event",
    "read_events",
    "older_parts",
    "PartReader",
    "parts_before",
    "fields",
    "LINE_LIMIT",
    "open_regular",
    "opened",
    "parse_json",
    "require_format",
    "read_file",
    "read_json",
    "read_lines",
    "replace_text",
    "mix",
    "seed_all",
    "seeded",
    "set_training",
    "unsaved_buffers",
    "random_state",
    "default_dtype",
    "evaluating",
    "remember_buffers",
    "is_scripted",
    "remember_state",
    "require_own_memory",
    "saves_all",
    "require_tensor_state",
    "restore_random_state",
    "LayoutFree",
    "as_written",
    "attention_weights",
    "without_own_check",
    "stacked_keys",
    "Joined",
    "joined",
    "each_of",
    "flat_slots",
    "groups_of",
    "has_scheduler",
    "nested_in",
    "nested_slots",
    "parameters_of",
    "ManyhandsError",
    "UsageError",
    "TaskError",
    "DataError",
    "DataWorkerLost",
    "DeviceError",
    "StrategyError",
    "SettingsError",
    "CheckpointError",
    "ArchiveError",
    "FileError",
    "SendError",
    "RunError",
    "WorkerFailed",
    "NoProgress",
    "PeerLost",
    "ReplicasDiffer",
    "LossNotFinite",
    "OutOfMemory",
    "RequestRefused",
]
