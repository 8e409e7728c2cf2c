"""Many networks of one structure as one program."""

from .gain import Gain, gain
from .grouping import Group, groups
from .member import Member
from .population import Population

__all__ = ["Population", "Member", "Group", "groups", "Gain", "gain"]
