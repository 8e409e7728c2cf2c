"""Management of all backends of a router: a call changes all of them, or reports which one failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson

from ...core import RequestRefused, SettingsError, fields
from ..http import BadRequest, Request
from ..limits import Limits
from ..protocols.management import PATH, read_object
from ..protocols.protocol import RestHandler, answer_failure, dump_json, require_method, shown
from .backend import Address, Backend, BackendOverloaded, BackendResponse, Lost
from .fleet import Fleet

MANAGE_SECONDS = 120.0
"""Timeout of management requests to a backend, long enough to load a model."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at the labels and splits of the backends, and for the answer to one."""


def _with(*names: str, **checks: fields.Check) -> fields.Check:
    """Return a check of objects that also have these fields, which may be None."""
    whole = fields.having(**checks, **dict.fromkeys(names, fields.maybe(fields.count)))
    return lambda value: whole(value) and value.keys() >= set(names)


_SHARE = _with("version", model=fields.text, weight=lambda value: fields.number(value) and value > 0)
_ROUTING: fields.Fields = {
    "labels": fields.named(fields.named(fields.count)),
    "splits": fields.named(fields.listed(_SHARE)),
}
_COUNTS = dict.fromkeys(("batches", "rows", "compute", "queue"), fields.number)
_VERSION = fields.having(
    version=fields.count,
    state=fields.text,
    error=fields.text,
    requests=fields.named(fields.count),
    latency=fields.listed(fields.count),
    replicas=fields.listed(fields.having(device=fields.text, rows=fields.count)),
    **_COUNTS,
)
_STATE: fields.Fields = {
    "models": fields.listed(
        _with(
            "current",
            name=fields.text,
            labels=fields.named(fields.count),
            versions=fields.listed(_VERSION),
        )
    ),
    "splits": _ROUTING["splits"],
}
"""Checks of what a backend reports about itself: one that is damaged must not affect the others."""
CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 401: "UNAUTHENTICATED"}


class RouterManagement(RestHandler):
    """The `/manage/models…` interface over all backends, and `/manage/backends`."""

    prefix = "/manage"

    def __init__(self, limits: Limits, token: str | None) -> None:
        self.fleet: Fleet | None = None
        self._limits, self._token = limits, token
        self._routing: Mapping[str, Any] | None = None
        """Labels and traffic splits that the backends have, whichever router set them; None if they are unknown."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def handle(self, request: Request) -> None:
        task = asyncio.ensure_future(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def admit(self, backend: Backend) -> None:
        """Give a new backend the labels and traffic splits of the other backends, or the last known ones."""
        await self._look()
        wanted = self._routing
        if wanted is None:
            return
        try:
            own = await self._routing_of(backend)
        except RequestRefused:
            if not wanted["labels"] and not wanted["splits"]:
                return
            raise
        for model, act, value in changes(own, wanted):
            await self._forward(backend, model, act, value)

    async def keep_looking(self) -> None:
        """Ask a backend for its labels and splits again and again: another router may have changed them."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        for backend in self.fleet.up if self.fleet is not None else ():
            with contextlib.suppress(RequestRefused):
                self._routing = await self._routing_of(backend)
                return

    async def state(self) -> dict[str, Any]:
        """Return the merged state of all backends in a single server's format, and the backends."""
        assert self.fleet is not None
        asked = list(self.fleet.up)
        states = await asyncio.gather(*(self._state_of(backend) for backend in asked), return_exceptions=True)
        reachable = [state for state in states if isinstance(state, dict)]
        return {
            "ready": bool(self.fleet.up),
            **merged(reachable),
            "backends": [
                {
                    "address": str(backend.address),
                    "up": backend.is_up,
                    "reason": backend.reason,
                    "busy": backend.num_busy,
                    "answered": backend.num_answered,
                    "lost": backend.num_lost,
                }
                for backend in self.fleet.backends.values()
            ],
        }

    async def _answer(self, request: Request) -> None:
        try:
            request.answer(200, dump_json(await self._act(request)))
        except BadRequest as error:
            self.refuse(request, RequestRefused("INVALID_ARGUMENT", error.reason), error.status)
        except RequestRefused as refusal:
            self.refuse(request, refusal)
        except Exception as error:
            answer_failure(request, error)

    async def _act(self, request: Request) -> dict[str, Any]:
        if request.path == "/manage/models":
            require_method(request, "GET", "HEAD")
            return await self.state()
        match = PATH.fullmatch(request.path)
        if match is None and request.path != "/manage/backends":
            raise BadRequest(404, "Not Found")
        require_method(request, "POST")
        value = read_object(request, self._limits)
        async with self._turn:
            return await (self._change(match["name"], match["act"], value) if match else self._backends(value))

    async def _backends(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """`{"add": "c:8500"}` or `{"remove": "c:8500"}`."""
        assert self.fleet is not None
        for act, change in (("add", self.fleet.add), ("remove", self.fleet.remove)):
            if act in value:
                try:
                    change(Address.parse(str(value[act])))
                except SettingsError as error:
                    raise RequestRefused("INVALID_ARGUMENT", error.rule) from None
        await self.fleet.look_up()
        return {"backends": [str(address) for address in self.fleet.backends]}

    async def _change(self, model: str, act: str, value: Mapping[str, Any]) -> dict[str, Any]:
        assert self.fleet is not None
        backends = self.fleet.up
        if not backends:
            raise RequestRefused("UNAVAILABLE", "no backend is ready", 1.0)
        before = await asyncio.gather(*(self._state_of(backend) for backend in backends))
        if act == "label" and value.get("version") is not None:
            for backend, state in zip(backends, before, strict=True):
                require_version(backend, state, model, value.get("version"))
        answers = await asyncio.gather(
            *(self._forward(backend, model, act, value) for backend in backends), return_exceptions=True
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            await self._put_back(backends, before, model, act, value)
            raise failures[0]
        await self._look()
        return {**dict(answers[0]), "backends": len(backends)}  # type: ignore[arg-type]

    async def _put_back(
        self,
        backends: Sequence[Backend],
        before: Sequence[Mapping[str, Any]],
        model: str,
        act: str,
        value: Mapping[str, Any],
    ) -> None:
        """Restore the previous label or traffic split on all backends after one of them failed."""
        for backend, state in zip(backends, before, strict=True):
            labels: dict[str, int] = next((each["labels"] for each in state["models"] if each["name"] == model), {})
            old: dict[str, Any]
            if act == "label":
                old = {"label": value.get("label"), "version": labels.get(shown(value.get("label"), 64))}
            elif act == "split":
                old = {"shares": state["splits"].get(model, [])}
            else:
                continue
            await asyncio.gather(self._forward(backend, model, act, old), return_exceptions=True)

    async def _forward(self, backend: Backend, model: str, act: str, value: Mapping[str, Any]) -> dict[str, Any]:
        path = f"/manage/models/{quote(model, safe='')}/{act}"
        return await self._ask(backend, "POST", path, orjson.dumps(value))

    async def _state_of(self, backend: Backend) -> dict[str, Any]:
        return _required(backend, await self._ask(backend, "GET", "/manage/models", b""), _STATE)

    async def _routing_of(self, backend: Backend) -> dict[str, Any]:
        return _required(backend, await self._ask(backend, "GET", "/manage/routing", b"", LOOK_SECONDS), _ROUTING)

    async def _ask(
        self, backend: Backend, method: str, path: str, body: bytes, seconds: float = MANAGE_SECONDS
    ) -> dict[str, Any]:
        token = f"Authorization: Bearer {self._token}\r\n" if self._token else ""
        host, kind = backend.address.host, "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{token}{kind}Content-Length: {len(body)}\r\n\r\n".encode()
        try:
            answer = await backend.fetch(head, body, seconds, manage=True)
        except (Lost, BackendOverloaded, TimeoutError):
            raise RequestRefused(
                "UNAVAILABLE", f"{backend.address} cannot be managed on port {backend.address.manage}", 1.0
            ) from None
        if answer.status != 200:
            code = CODES.get(answer.status, "FAILED_PRECONDITION")
            raise RequestRefused(code, f"{backend.address}: {_error(answer)}")
        try:
            content = orjson.loads(answer.body)
        except ValueError:
            content = None
        return _required(backend, content, {})


def _required(backend: Backend, content: Any, checks: fields.Fields) -> dict[str, Any]:
    """Return what a backend has answered; raise RequestRefused unless it is an object whose fields pass the checks."""
    if not isinstance(content, dict) or not fields.holds(content, checks):
        reason = f"{backend.address} has sent an answer of another form; it must be a server of the same version"
        raise RequestRefused("FAILED_PRECONDITION", reason)
    return content


def changes(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the model, action and body of the calls after which a server has the wanted labels and splits.

    >>> list(changes({"labels": {"m": {"old": 1}}, "splits": {}}, {"labels": {"m": {"new": 2}}, "splits": {}}))
    [('m', 'label', {'label': 'old', 'version': None}), ('m', 'label', {'label': 'new', 'version': 2})]
    """
    for model in {**own["labels"], **wanted["labels"]}:
        have, need = own["labels"].get(model, {}), wanted["labels"].get(model, {})
        for label in {**have, **need}:
            if have.get(label) != need.get(label):
                yield model, "label", {"label": label, "version": need.get(label)}
    for name in {**own["splits"], **wanted["splits"]}:
        if own["splits"].get(name) != wanted["splits"].get(name):
            yield name, "split", {"shares": wanted["splits"].get(name, [])}


def require_version(backend: Backend, state: Mapping[str, Any], model: str, version: Any) -> None:
    """Raise RequestRefused before a label is set anywhere if a backend does not serve the version."""
    for each in state["models"]:
        if each["name"] == model and any(
            one["version"] == version and one["state"] == "AVAILABLE" for one in each["versions"]
        ):
            return
    raise RequestRefused("FAILED_PRECONDITION", f"{backend.address} does not serve version {version} of {model}")


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of several servers into one, adding up their metrics."""
    models: dict[str, dict[str, Any]] = {}
    splits: dict[str, Any] = {}
    for state in states:
        splits.update(state["splits"])
        for model in state["models"]:
            into = models.setdefault(model["name"], {**model, "versions": {}})
            into["current"] = model["current"] if into["current"] is None else into["current"]
            for version in model["versions"]:
                number = version["version"]
                known = into["versions"].get(number)
                into["versions"][number] = version if known is None else _added(known, version)
    listed = [
        {**model, "versions": [model["versions"][n] for n in sorted(model["versions"])]} for model in models.values()
    ]
    return {"models": listed, "splits": splits}


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": one["version"],
        "state": one["state"] if one["state"] != "AVAILABLE" else other["state"],
        "error": one["error"] or other["error"],
        "requests": dict(Counter(one["requests"]) + Counter(other["requests"])),
        "latency": [a + b for a, b in zip(one["latency"], other["latency"], strict=True)],
        **{name: one[name] + other[name] for name in ("batches", "rows", "compute", "queue", "replicas")},
    }


def _error(answer: BackendResponse) -> str:
    try:
        return str(orjson.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}"
