"""Import of Keras with its PyTorch backend, or an error that explains why it failed."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from ..core import SettingsError

BACKEND = "torch"


def require_torch_backend() -> ModuleType:
    """Import Keras and return the module; raise SettingsError if it is missing or its backend is not PyTorch.

    If no backend was chosen, PyTorch becomes the backend.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", BACKEND)
    try:
        import keras
    except ImportError as error:
        if error.name != "keras":
            raise
        raise SettingsError(
            "manyhands.keras needs Keras 3, which is not installed",
            remedy="install it with pip install 'manyhands[keras]'",
        ) from None
    active = keras.config.backend()
    if active != BACKEND:
        raise SettingsError(
            "manyhands.keras needs Keras with its PyTorch backend",
            got=f"the backend {active!r}",
            remedy="set KERAS_BACKEND=torch in the environment, or import manyhands.keras before keras and tensorflow",
        )
    return keras  # type: ignore[no-any-return]
