"""Planning: predicted time and memory of every strategy for a network on a cluster, and the search for the best."""

from .calibration import Observation, Residuals, calibrated
from .clusters import Cluster, as_cluster
from .comparison import Comparison, compare
from .curve import Curve, Curves, Remedy
from .estimate import Correction, estimate
from .many_networks import ManyNetworksEstimate
from .mixed_hosts import as_clusters
from .plan import Plan, make_plan, read_plan, require_same
from .search import PlanOption, Search
from .target import BatchOption
from .workload import Workload, noise_scale

__all__ = [
    "make_plan",
    "Plan",
    "Comparison",
    "BatchOption",
    "compare",
    "read_plan",
    "require_same",
    "Search",
    "PlanOption",
    "Curve",
    "Curves",
    "Remedy",
    "Cluster",
    "as_cluster",
    "as_clusters",
    "Workload",
    "estimate",
    "Observation",
    "calibrated",
    "Residuals",
    "Correction",
    "noise_scale",
    "ManyNetworksEstimate",
]
