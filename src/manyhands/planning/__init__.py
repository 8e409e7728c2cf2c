"""What every way of splitting a network would cost, before paying: models, simulation, search."""

from .calibration import Observation, Residuals, calibrated
from .clusters import Cluster, as_cluster
from .estimate import Estimate, estimate, waiting, waiting_for
from .memory import Footprint, footprint
from .schedules import makespan
from .simulate import Turn, run
from .workload import Workload

__all__ = [
    "Cluster",
    "as_cluster",
    "Workload",
    "Estimate",
    "estimate",
    "Footprint",
    "footprint",
    "Observation",
    "calibrated",
    "Residuals",
    "makespan",
    "waiting",
    "waiting_for",
    "Turn",
    "run",
]
