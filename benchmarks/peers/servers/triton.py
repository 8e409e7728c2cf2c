"""Triton's own server with its Python backend, by way of pytriton: dynamic batches of 64, binary tensors and JSON."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from ...serving_works import ROW, mlp

torch.set_num_threads(1)
NETWORK = mlp()


@batch  # type: ignore[untyped-decorator]
def rows(x: Any) -> dict[str, Any]:
    """The input x, rows of 784 numbers."""
    with torch.inference_mode():
        return {"y": NETWORK(torch.from_numpy(x)).numpy()}


if __name__ == "__main__":
    port = int(sys.argv[1])
    places = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2, "http_address": "127.0.0.1"}
    with Triton(config=TritonConfig(**places)) as triton:
        triton.bind(
            model_name="rows",
            infer_func=rows,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(ROW,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )
        triton.serve()
