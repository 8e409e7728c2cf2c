"""TensorFlow Serving's ModelService over gRPC: model status, and reloading the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ...core import RequestRefused
from ..folder import VersionPolicy
from .grpc_service import GrpcService, Method
from .tensorflow_messages import MESSAGES

STATES = {"START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50}
UNKNOWN = 2


class ModelService(GrpcService):
    """The service `tensorflow.serving.ModelService`."""

    name = "tensorflow.serving.ModelService"
    managing = ("HandleReloadConfigRequest",)

    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        return {
            "GetModelStatus": (self._status, MESSAGES["GetModelStatusRequest"], MESSAGES["GetModelStatusResponse"]),
            "HandleReloadConfigRequest": (
                self._reload, MESSAGES["ReloadConfigRequest"], MESSAGES["ReloadConfigResponse"],
            ),
        }  # fmt: skip

    async def _status(self, request: Any, context: Any) -> Any:
        spec = request.model_spec
        model = self.gateway.catalogue.model(spec.name)
        number = spec.version.value if spec.HasField("version") else None
        if spec.version_label:
            number = model.find(label=spec.version_label).number
        shown = [model.versions[n] for n in sorted(model.versions, reverse=True) if number in (None, n)]
        if not shown:
            raise RequestRefused("NOT_FOUND", f"Could not find version {number} of model {spec.name}")
        return MESSAGES["GetModelStatusResponse"](
            model_version_status=[
                {
                    "version": version.number,
                    "state": STATES[version.state],
                    "status": {"error_code": UNKNOWN if version.error else 0, "error_message": version.error},
                }
                for version in shown
            ]
        )

    async def _reload(self, request: Any, context: Any) -> Any:
        """Replace the list of models; it can only name models in the server's own folder."""
        if request.config.WhichOneof("one") != "model_config_list":
            raise RequestRefused("INVALID_ARGUMENT", "ServerConfig must use model_config_list")
        policies: dict[str, VersionPolicy | None] = {}
        labels: dict[str, dict[str, int]] = {}
        for config in request.config.model_config_list.config:
            if config.name in policies:
                raise RequestRefused("INVALID_ARGUMENT", f"Illegal to list model {config.name[:64]} multiple times")
            if config.base_path and PurePosixPath(config.base_path).name != config.name:
                raise RequestRefused(
                    "INVALID_ARGUMENT", f"the base_path of model {config.name[:64]} must end with its name"
                )
            policies[config.name] = policy_of(config.model_version_policy)
            labels[config.name] = dict(config.version_labels)
        await self.gateway.catalogue.reload(policies, labels)
        return MESSAGES["ReloadConfigResponse"](status={"error_code": 0})


def policy_of(policy: Any) -> VersionPolicy | None:
    """Return a model's version policy; None for the server's default."""
    kind = policy.WhichOneof("one")
    if kind is None:
        return None
    if kind == "latest":
        return VersionPolicy(policy.latest.num_versions or 1)
    if kind == "all":
        return VersionPolicy(0)
    if not policy.specific.versions:
        raise RequestRefused("INVALID_ARGUMENT", "a specific version policy must name at least one version")
    return VersionPolicy(0, frozenset(policy.specific.versions))
