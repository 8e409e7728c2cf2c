"""MLServer: its adaptive batching, over the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import torch
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from ...serving_works import chosen, max_rows


class Rows(MLModel):  # type: ignore[misc]
    """The input x, rows of 784 numbers."""

    async def load(self) -> bool:
        self.network = chosen()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32)
        with torch.inference_mode():
            answer = self.network(torch.from_numpy(rows)).numpy()
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", answer)])


async def main(port: int) -> None:
    """Serves in this process: its parallel workers are no faster with one model on two cores."""
    settings = Settings(
        host="127.0.0.1", http_port=port, grpc_port=port + 1, metrics_port=port + 2, parallel_workers=0, debug=False
    )
    server = MLServer(settings)
    model = ModelSettings(name="rows", implementation=Rows, max_batch_size=max_rows(), max_batch_time=0.001)
    await server.start([model])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
