"""Ensembles: trained networks that answer as one, in one program or in separate processes."""

from .combination import Combination, require_combination
from .comparison import MemberComparison
from .ensemble import Batches, CombinationRule, Ensemble
from .member import Member, member_of, require_alike
from .remote_members import CalledMember, EnsemblePrediction, ProcessMember, RemoteEnsemble
from .uncertainty import Calibration, calibration

__all__ = [
    "Ensemble",
    "RemoteEnsemble",
    "EnsemblePrediction",
    "CombinationRule",
    "Batches",
    "Member",
    "member_of",
    "require_alike",
    "ProcessMember",
    "CalledMember",
    "Combination",
    "require_combination",
    "MemberComparison",
    "Calibration",
    "calibration",
]
