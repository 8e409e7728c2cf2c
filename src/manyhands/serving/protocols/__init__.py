"""What clients speak, one file each."""

from .management import Management
from .open_inference_rest import OpenInferenceRest
from .protocol import Desk, RestProtocol
from .tensorflow_rest import TensorflowRest

__all__ = ["RestProtocol", "Desk", "TensorflowRest", "OpenInferenceRest", "Management"]
