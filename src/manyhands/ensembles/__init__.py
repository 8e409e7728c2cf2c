"""Ensembles: trained networks whose predictions are combined, in one program or with each in its own process."""

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
