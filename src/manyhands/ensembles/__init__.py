"""Ensembles: trained networks that answer as one, in one program or in separate processes."""

from .combination import COMBINATIONS, Combination, require_combination
from .member import Member, member_of, require_alike
from .remote_members import ANSWERED, Answer, CallSeat, MemberHandle, ProcessSeat, TeamApart
from .team import Batches, CombinationRule, Team
from .uncertainty import Calibration, calibration, mutual_information, spread

__all__ = [
    "Team",
    "TeamApart",
    "Answer",
    "ANSWERED",
    "CombinationRule",
    "Batches",
    "Member",
    "member_of",
    "require_alike",
    "MemberHandle",
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
