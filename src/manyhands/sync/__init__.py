"""How replicas agree: policies, and the buckets that carry gradients to them."""

from .buckets import Buckets
from .policy import POLICIES, AllReduce, Policy, make_policy

__all__ = ["Buckets", "Policy", "AllReduce", "POLICIES", "make_policy"]
