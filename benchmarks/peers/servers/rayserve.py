"""Ray Serve: one replica, batches of 64."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import ray
import torch
from ray import serve
from starlette.requests import Request

from ...serving_works import mlp


@serve.deployment(num_replicas=1, max_ongoing_requests=256)
class Rows:
    """{"input": [784 numbers]}."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = mlp()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.001)
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
