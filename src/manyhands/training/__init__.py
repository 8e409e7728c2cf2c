"""The training loop, the state of a replica while it runs, and the results of a run."""

from .callbacks import Callback, check_callbacks
from .carried_numbers import differing, number_slots, numbers_of
from .check import judge
from .embedding_tables import SavedRows
from .evaluation import evaluate, predict
from .explain import can_explain, explain, without_values
from .hand import SCRIPT_END, Hand, hand, holding, joined_world, probe_of
from .host_comparison import local_sources
from .initial_weights import check_start, start_from
from .job import CHECKPOINTS, Job, ReplicaResult
from .learning_rates import LearningRates, check_schedule
from .loop import TrainingLoop, train
from .memory import parse_bytes
from .memory_fitting import fit_in
from .memory_limit import host_bytes
from .metrics import Meter, check_metrics, parted
from .one_device_checks import changes_parameters, fails_in_parts, keeps_state
from .partition_preview import check_pieces, outline_of
from .patience import Patience, check_patience
from .predictor import answers, input_name, inputs_of
from .recovery import RecoveryState, Rollback
from .replay import Replay, replay
from .restored_objects import HeldState, left_alone
from .run import RECORD, Run, as_weights, launch_of, new_folder, read_record
from .sample_randomness import learn_draws
from .sampling import EVERY, Breakdown, Sample, Sampler, profile_event
from .snapshot import restore_snapshot, take_snapshot
from .start_trial import StartTrial
from .step import compute, take_step
from .stepping import Stepper
from .timing import Steps, gradient_squares, time_steps
from .trial import NUM_SAMPLES
from .trial_steps import parts_of, plan_of, record_of, take_steps, with_data
from .verdict import Verdict
from .verify import check_statistics, refuse, take_split_steps, with_micro_statistics

__all__ = [
    "Hand",
    "hand",
    "holding",
    "SCRIPT_END",
    "joined_world",
    "probe_of",
    "Job",
    "ReplicaResult",
    "train",
    "check_statistics",
    "check_schedule",
    "time_steps",
    "Steps",
    "without_values",
    "start_from",
    "TrainingLoop",
    "RecoveryState",
    "Rollback",
    "StartTrial",
    "profile_event",
    "Stepper",
    "SavedRows",
    "compute",
    "gradient_squares",
    "evaluate",
    "predict",
    "explain",
    "fit_in",
    "can_explain",
    "answers",
    "input_name",
    "inputs_of",
    "Callback",
    "check_callbacks",
    "check_pieces",
    "outline_of",
    "check_metrics",
    "parted",
    "Meter",
    "Patience",
    "check_patience",
    "Run",
    "new_folder",
    "launch_of",
    "read_record",
    "local_sources",
    "as_weights",
    "check_start",
    "CHECKPOINTS",
    "RECORD",
    "replay",
    "Replay",
    "parse_bytes",
    "host_bytes",
    "Verdict",
    "judge",
    "keeps_state",
    "fails_in_parts",
    "plan_of",
    "parts_of",
    "record_of",
    "take_steps",
    "take_split_steps",
    "changes_parameters",
    "with_data",
    "with_micro_statistics",
    "refuse",
    "learn_draws",
    "NUM_SAMPLES",
    "left_alone",
    "HeldState",
    "differing",
    "number_slots",
    "numbers_of",
    "LearningRates",
    "take_snapshot",
    "restore_snapshot",
    "take_step",
    "Sample",
    "Sampler",
    "EVERY",
    "Breakdown",
]
