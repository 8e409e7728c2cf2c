"""Gradient synchronization between replicas: sync policies, and the gradient buckets that they reduce."""

from .auto import Auto, choose, describe_choice, forecasts, is_open
from .buckets import BucketExchange, Buckets, report_policy
from .hierarchical import acting
from .links import Links, measure_links
from .local import DiLoCo, Local, LocalSteps
from .local_averaging import Agreement, average
from .policy import POLICIES, AllReduce, Policy, PolicyCollectives, carrying, make_policy
from .policy_memory import PolicyMemory, key_of
from .policy_state import PolicyState, with_own_feedback
from .powersgd import PowerSGD
from .quantized import BF16, FP16, Coded, Int8
from .topk import TopK

__all__ = [
    "Policy",
    "AllReduce",
    "Coded",
    "BF16",
    "FP16",
    "Int8",
    "TopK",
    "PowerSGD",
    "Local",
    "LocalSteps",
    "DiLoCo",
    "Auto",
    "is_open",
    "forecasts",
    "choose",
    "describe_choice",
    "Links",
    "measure_links",
    "POLICIES",
    "make_policy",
    "carrying",
    "acting",
    "PolicyCollectives",
    "PolicyMemory",
    "key_of",
    "Buckets",
    "Agreement",
    "average",
    "BucketExchange",
    "PolicyState",
    "with_own_feedback",
    "report_policy",
]


def __dir__() -> list[str]:
    """List the names for users: the policies. The other names of `__all__` are for other packages of manyhands."""
    return ["Policy", *sorted(kind.__name__ for kind in POLICIES.values() if kind.__module__.startswith(__name__))]
