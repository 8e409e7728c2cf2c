"""Keras 3 on its PyTorch backend: scripts written for tf.distribute, with the import changed.

import manyhands.keras as mhk
strategy = mhk.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([...])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
model.fit(dataset, epochs=10)
"""

from .backend import require_torch_backend

require_torch_backend()

from . import cluster_resolver, coordinator, experimental, partitioners  # noqa: E402
from .callbacks import TensorBoard  # noqa: E402
from .cluster_resolver import (  # noqa: E402
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    TPUStrategy,
)
from .coordinator import ClusterCoordinator  # noqa: E402
from .exports import export  # noqa: E402
from .inputs import DatasetCreator, DistributedInput, InputContext  # noqa: E402
from .keras_patches import install  # noqa: E402
from .mirrored import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy  # noqa: E402
from .options import (  # noqa: E402
    CommunicationImplementation,
    CommunicationOptions,
    HierarchicalCopyAllReduce,
    InputOptions,
    InputReplicationMode,
    NcclAllReduce,
    ReductionToOneDevice,
    RunOptions,
)
from .runs import RunLog  # noqa: E402
from .servers import ParameterServerStrategy, Server  # noqa: E402
from .strategy import (  # noqa: E402
    ReduceOp,
    ReplicaContext,
    Strategy,
    compute_average_loss,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    scale_regularization_loss,
)
from .tasks import as_task  # noqa: E402

install()

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Server",
    "ClusterCoordinator",
    "TPUStrategy",
    "Strategy",
    "get_strategy",
    "has_strategy",
    "get_replica_context",
    "in_cross_replica_context",
    "ReplicaContext",
    "ReduceOp",
    "compute_average_loss",
    "scale_regularization_loss",
    "TensorBoard",
    "RunLog",
    "as_task",
    "export",
    "DistributedInput",
    "InputContext",
    "DatasetCreator",
    "ClusterResolver",
    "ClusterSpec",
    "TFConfigClusterResolver",
    "SlurmClusterResolver",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "GCEClusterResolver",
    "TPUClusterResolver",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "partitioners",
    "CommunicationImplementation",
    "CommunicationOptions",
    "HierarchicalCopyAllReduce",
    "InputOptions",
    "InputReplicationMode",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RunOptions",
]
