"""pytriton: Triton itself before a Python function, with its dynamic batches, over the Open Inference Protocol."""

from __future__ import annotations

import signal
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from ...serving_works import ROW, chosen, max_rows

NETWORK = chosen()


@batch  # type: ignore[untyped-decorator]
def rows(x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The input x, rows of 784 numbers."""
    with torch.inference_mode():
        return {"y": NETWORK(torch.from_numpy(x)).numpy()}


if __name__ == "__main__":
    # Only an interrupt lets it stop its server.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(sys.argv[1]),
        allow_grpc=False,
        allow_metrics=False,
        exit_timeout_secs=2,
    )
    with Triton(config=settings) as server:
        server.bind(
            model_name="rows",
            infer_func=rows,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(ROW,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(10,))],
            config=ModelConfig(max_batch_size=max_rows()),
        )
        server.serve()
