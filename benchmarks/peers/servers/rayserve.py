"""Ray Serve: one replica, its batches."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import ray
import torch
from ray import serve
from starlette.requests import Request

from ...serving_works import chosen, max_rows


@serve.deployment(num_replicas=1, max_ongoing_requests=256)
class Rows:
    """{"input": [784 numbers]}."""

    def __init__(self) -> None:
        self.model = chosen()

    @serve.batch(max_batch_size=max_rows(), batch_wait_timeout_s=0.001)
    async def compute(self, rows: list[Any]) -> list[Any]:
        with torch.inference_mode():
            return list(self.model(torch.from_numpy(np.stack(rows))).numpy())

    async def __call__(self, request: Request) -> Any:
        row = np.asarray((await request.json())["input"], np.float32)
        return {"output": (await self.compute(row)).tolist()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Rows.bind(), route_prefix="/predict")
    while True:
        time.sleep(60)
