"""BentoML: a service with adaptive batching, one worker."""

from __future__ import annotations

import bentoml
import numpy as np
import torch

from ...serving_works import chosen, max_rows


@bentoml.service(workers=1, traffic={"timeout": 30})
class Rows:
    """{"x": [[784 numbers]]}."""

    def __init__(self) -> None:
        self.model = chosen()

    @bentoml.api(batchable=True, max_batch_size=max_rows(), max_latency_ms=1000)
    def predict(self, x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.model(torch.from_numpy(x.astype(np.float32))).numpy()
