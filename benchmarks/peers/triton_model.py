"""What the real Triton computes in benchmarks.triton; lies as `model.py` in its folder, for its Python backend."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton_python_backend_utils as backend

from benchmarks.serving_works import mlp


class TritonPythonModel:
    """`mlp` is the network, `adder` adds the number of its version, the others answer with what came."""

    def initialize(self, args: dict[str, str]) -> None:
        torch.set_num_threads(1)
        self.name, self.version = args["model_name"], int(args["model_version"])
        self.network = mlp()
        self.inputs = [one["name"] for one in json.loads(args["model_config"])["input"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [backend.InferenceResponse(self.answer(request)) for request in requests]

    def answer(self, request: Any) -> list[Any]:
        inputs = {name: backend.get_input_tensor_by_name(request, name) for name in self.inputs}
        if self.name in ("echo", "numbers"):
            outputs = {f"{name}_out": tensor.to_dlpack() for name, tensor in inputs.items()}
        else:
            x = torch.from_dlpack(inputs["x"].to_dlpack())
            with torch.inference_mode():
                y = self.network(x) if self.name == "mlp" else x + self.version
            outputs = {"output": y.clone().__dlpack__()}
        return [backend.Tensor.from_dlpack(name, tensor) for name, tensor in outputs.items()]
