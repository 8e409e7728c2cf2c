"""Ray Tune on the trials of `benchmarks.tune`, in the peers' environment; the time counts from ray.init on."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune

from benchmarks.tune_works import HIGH, LOW, plain_trial


def main() -> None:
    """Runs so many trials, and writes how long they took, with Ray's start and without."""
    asked = json.loads(sys.argv[1])
    began = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ready = time.perf_counter()

    def objective(config: dict[str, Any]) -> dict[str, float]:
        import torch

        torch.set_num_threads(1)
        return {"valid_loss": plain_trial(config["lr"], asked["width"], asked["epochs"])}

    tuner = tune.Tuner(
        objective,
        param_space={"lr": tune.loguniform(LOW, HIGH)},
        tune_config=tune.TuneConfig(num_samples=asked["trials"], metric="valid_loss", mode="min"),
        run_config=tune.RunConfig(storage_path=asked["folder"], verbose=0),
    )
    found = tuner.fit()
    end = time.perf_counter()
    told = {"seconds": end - began, "started": end - ready, "finished": len(found) - found.num_errors}
    Path(asked["target"]).write_text(json.dumps(told))
    ray.shutdown()


if __name__ == "__main__":
    main()
