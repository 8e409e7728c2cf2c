"""The training loop, the state of a replica while it runs, and the results of a run."""

from ..core import EVENTS
from .callbacks import Callback, check_callbacks
from .check import Verdict, fails_in_parts, judge, parts_of, plan_of, record_of, take_steps, with_data
from .evaluation import evaluate, evaluating, predict
from .explain import can_explain, explain
from .hand import SCRIPT_END, Hand, hand, holding, joined_world
from .initial_weights import check_start
from .loop import CHECKPOINTS, Job, ReplicaResult, check_schedule, own_stream, train
from .memory import Account, account, held_now, host_bytes, limited, parse_bytes
from .memory_fitting import fit_in
from .metrics import Meter, check_metrics, parted
from .parameter_server_loop import check_served, has_own_optimizer, tables_in, train_served
from .partition_preview import check_pieces, outline_of
from .patience import Patience, as_patience, check_patience
from .predictor import ModelPredictor, answers, inputs_of
from .progress import View, make_view, sparkline
from .replay import PartDiffers, Replay, replay
from .roles import ProcessRole, place_here, take_part
from .run import RECORD, Run, as_weights, launch_of, new_folder, read_record
from .sample_randomness import learn_draws
from .sampling import EVERY, Breakdown, Sample, Sampler, StepTimer, breakdowns
from .schedule import follow_schedule
from .sinks import DROPPED, About, LogTo, NumberSink, Sink, SinkDispatcher, make_sinks
from .snapshot import restore_snapshot, take_snapshot
from .spans import IDLE, PHASES, Span, Spans, by_phase
from .stepping import take_step
from .stragglers import Stragglers
from .timing import Steps, gradient_squares, time_steps
from .verify import check_statistics, refuse, with_micro_statistics
from .weight_averages import Averages

__all__ = [
    "Hand",
    "hand",
    "holding",
    "SCRIPT_END",
    "joined_world",
    "Job",
    "ReplicaResult",
    "train",
    "train_served",
    "check_served",
    "check_statistics",
    "has_own_optimizer",
    "tables_in",
    "ProcessRole",
    "place_here",
    "take_part",
    "check_schedule",
    "time_steps",
    "Steps",
    "own_stream",
    "gradient_squares",
    "evaluate",
    "evaluating",
    "predict",
    "explain",
    "fit_in",
    "can_explain",
    "answers",
    "inputs_of",
    "Callback",
    "check_callbacks",
    "check_pieces",
    "outline_of",
    "check_metrics",
    "parted",
    "Meter",
    "Averages",
    "Patience",
    "as_patience",
    "check_patience",
    "Run",
    "new_folder",
    "launch_of",
    "read_record",
    "as_weights",
    "check_start",
    "EVENTS",
    "CHECKPOINTS",
    "RECORD",
    "replay",
    "Replay",
    "PartDiffers",
    "ModelPredictor",
    "Account",
    "account",
    "parse_bytes",
    "held_now",
    "host_bytes",
    "limited",
    "Verdict",
    "judge",
    "fails_in_parts",
    "plan_of",
    "parts_of",
    "record_of",
    "take_steps",
    "with_data",
    "with_micro_statistics",
    "refuse",
    "Stragglers",
    "learn_draws",
    "follow_schedule",
    "take_snapshot",
    "restore_snapshot",
    "take_step",
    "PHASES",
    "IDLE",
    "Span",
    "Spans",
    "by_phase",
    "Sample",
    "Sampler",
    "EVERY",
    "StepTimer",
    "Breakdown",
    "breakdowns",
    "View",
    "make_view",
    "sparkline",
    "Sink",
    "NumberSink",
    "About",
    "SinkDispatcher",
    "DROPPED",
    "LogTo",
    "make_sinks",
]
