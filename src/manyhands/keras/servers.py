"""ParameterServerStrategy: what of it there is, and where."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import StrategyError


def ParameterServerStrategy(cluster_resolver: Any = None, variable_partitioner: Any = None) -> NoReturn:
    """Not there in `model.fit`: servers hold the optimizer and take its steps, and Keras' loop takes them itself.

    The same model trains on servers as a task, with the roles of the same TF_CONFIG:
    `mh.fit(mhk.as_task(make_model, data, batch_size=64), mh.ParameterServer(servers=2))`.
    """
    raise StrategyError(
        "model.fit takes its steps where the model is, parameter servers take them where the weights are",
        got="ParameterServerStrategy",
        remedy="train the model as a task, with the same TF_CONFIG: "
        "mh.fit(mhk.as_task(make_model, data, batch_size=64), mh.ParameterServer(servers=2)); "
        "or use MultiWorkerMirroredStrategy",
    )
