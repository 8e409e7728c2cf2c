"""What every way of splitting a network would cost, before paying: models, simulation, search."""

from .calibration import LOOSE, Observation, Residuals, calibrated
from .clusters import Cluster, as_cluster
from .curve import Curve, Curves, Remedy
from .efficiency import best_batch, noise_scale, steps_needed
from .estimate import Correction, Estimate, estimate, waiting, waiting_for
from .many_networks import ManyNetworksEstimate, One, many, stacking_gain
from .memory import Footprint, footprint
from .mixed_hosts import as_clusters
from .plan import SUFFIX, Comparison, Measure, Pick, Plan, compare, make_plan, read_plan, require_same
from .schedules import makespan
from .search import PlanOption, Search
from .simulate import Turn, run
from .workload import Workload

__all__ = [
    "make_plan",
    "Plan",
    "Pick",
    "Comparison",
    "compare",
    "read_plan",
    "require_same",
    "SUFFIX",
    "Measure",
    "Search",
    "PlanOption",
    "Curve",
    "Curves",
    "Remedy",
    "Cluster",
    "as_cluster",
    "as_clusters",
    "Workload",
    "Estimate",
    "estimate",
    "Footprint",
    "footprint",
    "Observation",
    "calibrated",
    "LOOSE",
    "Residuals",
    "Correction",
    "noise_scale",
    "steps_needed",
    "best_batch",
    "One",
    "ManyNetworksEstimate",
    "many",
    "stacking_gain",
    "makespan",
    "waiting",
    "waiting_for",
    "Turn",
    "run",
]
