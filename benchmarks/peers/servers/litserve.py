"""LitServe: its batches and its fast queue, rows as JSON; it has no form for bytes."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np
import torch

from ...serving_works import chosen, max_rows


class Rows(litserve.LitAPI):  # type: ignore[misc]
    """{"input": [784 numbers]}."""

    def setup(self, device: str) -> None:
        self.model = chosen()

    # Without an annotation: LitServe takes one for a model of the request.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return np.asarray(request["input"], np.float32)

    def batch(self, inputs: list[Any]) -> Any:
        return torch.from_numpy(np.stack(inputs))

    def predict(self, batch: Any) -> Any:
        with torch.inference_mode():
            return self.model(batch)

    def unbatch(self, output: Any) -> Any:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"output": output.tolist()}


if __name__ == "__main__":
    api = Rows(max_batch_size=max_rows(), batch_timeout=0.001, enable_async=False)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True, track_requests=False)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", log_level="error", generate_client_file=False)
