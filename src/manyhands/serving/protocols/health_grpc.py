"""gRPC's own health protocol, which orchestrators ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .grpc_service import GrpcService, Method
from .messages import make_messages

SERVING, NOT_SERVING = 1, 2
MESSAGES = make_messages(
    "grpc.health.v1", {"HealthCheckRequest": ["service 1 string"], "HealthCheckResponse": ["status 1 int32"]}
)


class Health(GrpcService):
    """`grpc.health.v1.Health/Check`: of the whole server, or of a model by its name."""

    name = "grpc.health.v1.Health"

    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        return {"Check": (self._check, MESSAGES["HealthCheckRequest"], MESSAGES["HealthCheckResponse"])}

    async def _check(self, request: Any, context: Any) -> Any:
        catalogue = self.gateway.catalogue
        ready = self.gateway.is_ready and catalogue.is_ready
        if request.service in catalogue.models:
            ready = self.gateway.is_ready and catalogue.models[request.service].is_alive
        return MESSAGES["HealthCheckResponse"](status=SERVING if ready else NOT_SERVING)
