"""Client protocols, one file each."""

from .grpc_service import GrpcListener, GrpcService, Method
from .health_grpc import Health
from .management import Management
from .open_inference_grpc import OpenInferenceGrpc
from .open_inference_rest import OpenInferenceRest
from .protocol import InferenceGateway, RestProtocol
from .tensorflow_grpc import PredictionService
from .tensorflow_models_grpc import ModelService
from .tensorflow_rest import TensorflowRest

REST = (TensorflowRest, OpenInferenceRest)
GRPC = (OpenInferenceGrpc, Health, PredictionService, ModelService)

__all__ = [
    "REST",
    "GRPC",
    "RestProtocol",
    "GrpcService",
    "GrpcListener",
    "Method",
    "InferenceGateway",
    "TensorflowRest",
    "OpenInferenceRest",
    "Management",
]
