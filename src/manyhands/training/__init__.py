"""The training loop, what a replica holds while it runs, and what a run leaves behind."""

from .callbacks import Callback, check_callbacks
from .check import StepRecord, Verdict, compare, one_step
from .evaluation import evaluate, predict
from .hand import Hand, hand, holding
from .loop import CHECKPOINTS, Job, Outcome, check_schedule, train
from .memory import Account, account, parse_bytes
from .predictor import ModelPredictor
from .progress import View, make_view, sparkline
from .run import EVENTS, RECORD, Run, new_folder

__all__ = [
    "Hand",
    "hand",
    "holding",
    "Job",
    "Outcome",
    "train",
    "check_schedule",
    "evaluate",
    "predict",
    "Callback",
    "check_callbacks",
    "Run",
    "new_folder",
    "EVENTS",
    "CHECKPOINTS",
    "RECORD",
    "ModelPredictor",
    "Account",
    "account",
    "parse_bytes",
    "StepRecord",
    "Verdict",
    "one_step",
    "compare",
    "View",
    "make_view",
    "sparkline",
]
