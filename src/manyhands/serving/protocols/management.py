"""Management over HTTP, on a separate listener: status, loading, labels, splits and rollback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from ...core import ManyhandsError, RequestRefused
from ..http import BadRequest, Request
from ..limits import Limits
from ..saved_state import TrafficShare
from ..version import Version
from .protocol import InferenceGateway, RestProtocol, answer_failure, dump_json, parse_json, require_method, shown

PATH = re.compile(r"/(?:manage|v2/repository)/models/(?P<name>[^/]+)/(?P<act>load|unload|rollback|label|split)")
MAX_WEIGHT = 1e9


class Management(RestProtocol):
    """`/manage/models[/NAME/load|unload|rollback|label|split]`, `/manage/routing`, and Triton's paths for loading."""

    prefix = "/manage"

    def __init__(self, gateway: InferenceGateway) -> None:
        super().__init__(gateway)
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: Request) -> None:
        if request.path == "/manage/models":
            require_method(request, "GET", "HEAD")
            request.answer(200, dump_json(self.state()))
            return
        if request.path == "/manage/routing":
            require_method(request, "GET", "HEAD")
            request.answer(200, dump_json(self.routing()))
            return
        match = PATH.fullmatch(request.path)
        if match is None:
            raise BadRequest(404, "Not Found")
        require_method(request, "POST")
        value = read_object(request, self.gateway.limits)
        task = asyncio.ensure_future(self._answer(request, getattr(self, f"_{match['act']}"), match["name"], value))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def state(self) -> dict[str, Any]:
        """Everything that is served, with figures. Other threads may call it while models are loaded."""
        catalogue = self.gateway.catalogue
        return {
            "ready": self.gateway.is_ready and catalogue.is_ready,
            "models": [
                {
                    "name": model.name,
                    "current": model.current.number if model.current is not None else None,
                    "labels": model.labels,
                    "versions": [_described(version) for _, version in sorted(model.versions.items())],
                }
                for model in list(catalogue.models.values())
            ],
            "splits": self.routing()["splits"],
        }

    def routing(self) -> dict[str, Any]:
        """Labels and traffic splits only, which routers compare often."""
        catalogue = self.gateway.catalogue
        return {
            "labels": {model.name: model.labels for model in catalogue.models.values() if model.labels},
            "splits": {name: [vars(share) for share in shares] for name, shares in catalogue.splits.items()},
        }

    async def _answer(
        self,
        request: Request,
        act: Callable[[str, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]],
        name: str,
        value: dict[str, Any],
    ) -> None:
        try:
            request.answer(200, dump_json(await act(name, value)))
        except RequestRefused as refusal:
            self.refuse(request, refusal)
        except ManyhandsError as error:
            self.refuse(request, RequestRefused("INTERNAL", str(error).partition("\n")[0]))
        except Exception as error:
            answer_failure(request, error)

    async def _load(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        require_no_parameters(value.get("parameters"))
        await self.gateway.catalogue.load(name, _number(value.get("version")))
        current = self.gateway.catalogue.model(name).current
        return {"current": current.number if current is not None else None}

    async def _unload(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        await self.gateway.catalogue.unload(name)
        return {}

    async def _rollback(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        return {"current": await self.gateway.catalogue.roll_back(name)}

    async def _label(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        label, version = value.get("label"), _number(value.get("version"))
        if not isinstance(label, str) or "version" not in value:
            raise RequestRefused(
                "INVALID_ARGUMENT",
                'a label is set with {"label": "stable", "version": 3}, and removed with "version": null',
            )
        await self.gateway.catalogue.set_label(name, label, version)
        return {"labels": self.gateway.catalogue.model(name).labels}

    async def _split(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        shares, given = [], value.get("shares") or []
        for one in given if isinstance(given, list) else [given]:
            weight: Any = one.get("weight") if isinstance(one, dict) else None
            if type(weight) not in (int, float) or not 0 <= weight <= MAX_WEIGHT:
                rule = f'shares must be {{"model"?, "version"?, "weight"}}, with weights from 0 to {MAX_WEIGHT:g}'
                raise RequestRefused("INVALID_ARGUMENT", f"{rule}, but got {shown(weight, 20)}")
            shares.append(
                TrafficShare(shown(one.get("model") or name, 256), _number(one.get("version")), float(weight))
            )
        self.gateway.catalogue.set_split(name, shares)
        await self.gateway.catalogue.save(name)
        return {"shares": [vars(share) for share in shares]}


def require_no_parameters(parameters: object) -> None:
    """Raise RequestRefused if a model is to be loaded with another configuration, or with other files."""
    if parameters:
        raise RequestRefused(
            "INVALID_ARGUMENT",
            "a model is loaded as it is in the server's folder, but got parameters (such as config); omit them, and "
            "export a new version instead",
        )


def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the JSON object of a request for management; raises BadRequest where it is none.

    Web pages can send other kinds of bodies to any server. Triton's client names no kind where it loads a model.
    """
    usual = b"application/json" if request.path.startswith("/v2/") else b""
    kind = request.headers.get(b"content-type", usual).partition(b";")[0].strip().lower()
    body = request.content(limits.head)
    if kind != b"application/json" and (body or b"content-type" in request.headers):
        raise BadRequest(
            415, f"the content-type must be application/json, but got {kind[:40].decode('latin1') or 'none'}"
        )
    value = parse_json(body, limits.head) if body else {}
    if not isinstance(value, dict):
        raise BadRequest(400, "the body must be an object")
    return value


def _number(value: Any) -> int | None:
    if value is None or (type(value) is int and 0 <= value < 2**63):
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) <= 18:
        return int(value)
    raise RequestRefused("INVALID_ARGUMENT", f"a version must be a whole number, but got {shown(value, 20)!r}")


def _described(version: Version) -> dict[str, Any]:
    metrics = version.metrics
    return {
        "version": version.number,
        "state": version.state,
        "error": version.detail,
        "requests": dict(metrics.codes),
        "latency": metrics.latency.copy(),
        "batches": metrics.batches.num,
        "rows": int(metrics.batches.total),
        "compute": metrics.compute,
        "queue": version.num_queued,
        "replicas": [{"device": str(r.device), "pid": r.pid, "rows": r.num_rows} for r in version.replicas],
    }
