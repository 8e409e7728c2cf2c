"""Ensembles: trained networks that answer as one, in one program or apart."""

from .apart import ANSWERED, Answer, CallSeat, ProcessSeat, Seat, TeamApart
from .combination import COMBINATIONS, Combination, require_combination
from .member import Member, member_of, require_alike
from .team import Batches, Rule, Team
from .uncertainty import Calibration, calibration, mutual_information, spread

__all__ = [
    "Team",
    "TeamApart",
    "Answer",
    "ANSWERED",
    "Rule",
    "Batches",
    "Member",
    "member_of",
    "require_alike",
    "Seat",
    "ProcessSeat",
    "CallSeat",
    "Combination",
    "COMBINATIONS",
    "require_combination",
    "Calibration",
    "calibration",
    "spread",
    "mutual_information",
]
