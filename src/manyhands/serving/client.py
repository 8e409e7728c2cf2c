"""Python client of an inference server: arrays in, arrays out, in binary form, over persistent connections."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import math
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np

from ..core import DataError, RequestRefused, SettingsError, Signature, TensorSpec
from .dtypes import BY_OPEN, BY_TORCH, Array
from .security import ServingTls
from .texts import as_array, is_text, pack, unpack

MAX_ANSWER = 1 << 30
"""Maximum bytes of an answer, four times the default limit of a request."""
MAX_ANSWER_TEXTS = 1 << 22
"""Maximum strings of an answer."""
_MAX_HEAD = 8 << 20
_MAX_REASON = 1000
"""Maximum characters of a server's error text in an exception."""
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Client:
    """Client of an inference server, usable from any number of threads.

    - `url`: address for requests; any server of the Open Inference Protocol with binary tensors works. Several
      addresses, separated by commas, are those of routers with the same servers: if one fails, the next is asked;
    - `manage`: management address of a manyhands server: `models`, `load`, `label`, `split`, `rollback`;
    - `token`, `manage_token`: bearer tokens for requests and for management;
    - `timeout`: seconds for an answer, within which requests to an overloaded or unreachable server are retried;
    - `ca`: CA of the server's certificate, if the system does not trust it; `cert`, `key`: the client's certificate.

        client = mh.serving.Client("http://127.0.0.1:8501")
        client("digits", images)
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8501",
        *,
        manage: str = "http://127.0.0.1:8502",
        token: str | None = None,
        manage_token: str | None = None,
        timeout: float = 30.0,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        tls = ServingTls.of(cert, key, ca) or ServingTls()
        self._wire = _Wire(url, token, timeout, tls)
        self._manage = _Wire(manage, manage_token, timeout, tls)

    def __call__(self, model: str, inputs: Any, *, version: int | None = None, key: str | None = None) -> Any:
        """Send a request and return an array, or a dict of arrays if there are several outputs.

        `inputs` is an array or tensor, rows first, or a dict of them by name; requests with equal `key` get the same
        share of a traffic split.
        """
        path = f"/v2/models/{quote(model, safe='')}" + ("" if version is None else f"/versions/{version}")
        named = inputs if isinstance(inputs, Mapping) else self._only_input(path, inputs)
        listed, blobs = [], []
        for name, value in named.items():
            array, kind = _as_bytes(name, value)
            blobs.append(pack(map(_encoded, array.flat)) if is_text(array) else array.tobytes())
            parameters = {"binary_data_size": len(blobs[-1])}
            listed.append({"name": name, "shape": array.shape, "datatype": kind, "parameters": parameters})
        text = json.dumps({"inputs": listed, "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        if key is not None:
            headers["X-Manyhands-Key"] = key
        head, body = self._wire.send("POST", f"{path}/infer", b"".join([text, *blobs]), headers)
        try:
            return _outputs(int(head.get("inference-header-content-length", len(body))), body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise RequestRefused(
                "INTERNAL", f"the server's answer is not one of the protocol: {type(error).__name__}: {error}"
            ) from error

    def metadata(self, model: str) -> Any:
        """Return the names, types and shapes of a model's inputs and outputs, as the server reports them."""
        return self._wire.json("GET", f"/v2/models/{quote(model, safe='')}")

    def signature(self, model: str) -> Signature:
        """Return a model's inputs and outputs as tensor specs."""
        metadata = self.metadata(model)
        sides = [{one["name"]: _spec(one) for one in metadata[side]} for side in ("inputs", "outputs")]
        return Signature(*sides)

    def is_ready(self) -> bool:
        """Return whether the server is ready."""
        try:
            self._wire.once("GET", "/v2/health/ready", b"", {})
        except (RequestRefused, OSError, http.client.HTTPException):
            return False
        return True

    def models(self) -> Any:
        """Return everything that is served, with versions, labels, traffic splits and metrics."""
        return self._manage.json("GET", "/manage/models")

    def load(self, model: str, version: int | None = None) -> Any:
        """Load a version, or the versions that the server's policy selects."""
        return self._act(model, "load", {} if version is None else {"version": version})

    def unload(self, model: str) -> Any:
        """Unload all versions of a model."""
        return self._act(model, "unload", {})

    def label(self, model: str, label: str, version: int | None) -> Any:
        """Assign a label to a version; None removes the label."""
        return self._act(model, "label", {"label": label, "version": version})

    def split(self, model: str, shares: Sequence[Mapping[str, Any]]) -> Any:
        """Split a name's traffic: `[{"version": 1, "weight": 9}, {"version": 2, "weight": 1}]`; [] ends the split."""
        return self._act(model, "split", {"shares": list(shares)})

    def rollback(self, model: str) -> Any:
        """Roll back to the version before the current one."""
        return self._act(model, "rollback", {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this thread's connections."""
        self._wire.close()
        self._manage.close()

    def _only_input(self, path: str, value: Any) -> dict[str, Any]:
        metadata = self._wire.json("GET", path, is_kept=True)["inputs"]
        if len(metadata) != 1:
            names = ", ".join(one["name"] for one in metadata)
            raise DataError(f"the inputs must be a dict with {names}", got="one array", remedy="pass such a dict")
        kind = BY_OPEN[metadata[0]["datatype"]].numpy
        # float64 is the default of lists and numpy arrays, so it may be converted; a tensor's dtype is deliberate.
        is_loose = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == np.float64)
        return {metadata[0]["name"]: np.asarray(value, kind) if is_loose and kind.kind == "f" else value}

    def _act(self, model: str, act: str, value: Mapping[str, Any]) -> Any:
        body = json.dumps(value).encode()
        return self._manage.json("POST", f"/manage/models/{quote(model, safe='')}/{act}", body)


class _Wire:
    """Connections to one address, one per thread."""

    def __init__(self, url: str, token: str | None, timeout: float, tls: ServingTls) -> None:
        self._servers = [urlsplit(each.strip()) for each in url.split(",")]
        if not all(parts.scheme in ("http", "https") and parts.hostname for parts in self._servers):
            raise SettingsError(
                "the address of a server must be http://host:port",
                got=repr(url),
                remedy=f"write http://{url}" if ":" in url and "/" not in url else "write http://127.0.0.1:8501",
            )
        self._timeout, self._tls = timeout, tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._local = threading.local()
        self._kept: dict[str, Any] = {}

    def json(self, method: str, path: str, body: bytes = b"", *, is_kept: bool = False) -> Any:
        """Return a JSON answer; with `is_kept` it is requested once and cached."""
        if is_kept and path in self._kept:
            return self._kept[path]
        kind = {"Content-Type": "application/json"} if body else {}
        value = json.loads(self.send(method, path, body, kind)[1] or b"null")
        if is_kept:
            self._kept[path] = value
        return value

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[dict[str, str], bytes]:
        """Send a request, with retries until there is an answer, a permanent refusal or the timeout."""
        end = time.monotonic() + self._timeout
        wait = 0.02
        for num in itertools.count(1):
            try:
                return self.once(method, path, body, headers)
            except RequestRefused as refusal:
                if refusal.code != "UNAVAILABLE" or time.monotonic() + wait > end:
                    raise
            except ssl.SSLCertVerificationError as error:
                raise SettingsError(
                    "the server's certificate must be signed by a known authority",
                    got=error.verify_message,
                    remedy='pass ca="ca.pem" with the certificate of its authority',
                ) from None
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() + wait > end:
                    raise RequestRefused(
                        "UNAVAILABLE",
                        f"{self._server.geturl()} cannot be reached: {error}; is that where manyhands serve listens?",
                    ) from None
            self._ask_next()
            if num % len(self._servers) == 0:
                time.sleep(wait)
                wait = min(2 * wait, 1.0)
        raise AssertionError("the loop ends by a return or an exception")

    def once(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[dict[str, str], bytes]:
        """Send one request and return the response; redirects are not followed, so the token stays with this server."""
        connection = self._connection()
        # Typed as a class, called as a factory.
        connection.response_class = partial(_BoundedResponse, seconds=self._timeout)  # type: ignore[assignment]
        connection.request(method, path, body, {**self._headers, **headers})
        try:
            response = connection.getresponse()
            if (response.length or 0) > MAX_ANSWER:
                raise _too_large()
            answer = response.read()
        except RequestRefused:
            # The rest of the answer is not read.
            self.close()
            raise
        head = {name.lower(): value for name, value in response.getheaders()}
        if response.status == 200:
            return head, answer
        code = _CODES.get(response.status, "UNKNOWN")
        retry = float(head["retry-after"]) if head.get("retry-after", "").isdecimal() else None
        reason = _reason(answer) or f"status {response.status}"
        if response.status == 401:
            reason += "; pass token= with the server's" if not self._headers else "; the server's token is another one"
        raise RequestRefused(code, reason, retry)

    def close(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    @property
    def _server(self) -> SplitResult:
        """The server that this thread asks."""
        return self._servers[getattr(self._local, "index", 0)]

    def _ask_next(self) -> None:
        """Ask the next server from now on."""
        if len(self._servers) > 1:
            self.close()
            self._local.index = (getattr(self._local, "index", 0) + 1) % len(self._servers)

    def _connection(self) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            where, port = str(self._server.hostname), self._server.port
            if self._server.scheme == "https":
                context = self._tls.for_client
                connection = http.client.HTTPSConnection(where, port, timeout=self._timeout, context=context)
            else:
                connection = http.client.HTTPConnection(where, port, timeout=self._timeout)
            self._local.connection = connection
        return connection


class _BoundedResponse(http.client.HTTPResponse):
    """A response whose bytes, from the status line on, have a limit and one deadline for all of them."""

    def __init__(self, sock: Any, *args: Any, seconds: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_BoundedReader(sock, self.fp.detach(), seconds))


class _BoundedReader(io.RawIOBase):
    """Read from a socket until a limit or a deadline; a socket's own timeout applies to each read only."""

    def __init__(self, sock: Any, raw: io.RawIOBase, seconds: float) -> None:
        self._socket, self._raw, self._seconds = sock, raw, seconds
        self._end, self._num_left = time.monotonic() + seconds, MAX_ANSWER + _MAX_HEAD
        self._has_read = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        # The first read has the socket's timeout, which is the same.
        if self._has_read:
            left = self._end - time.monotonic()
            if left <= 0:
                raise TimeoutError("the answer is not complete in time")
            self._socket.settimeout(left)
        self._has_read = True
        num = self._raw.readinto(buffer)
        self._num_left -= num or 0
        if self._num_left < 0:
            raise _too_large()
        return num

    def close(self) -> None:
        if not self.closed:
            self._socket.settimeout(self._seconds)
            self._raw.close()
        super().close()


def _too_large() -> RequestRefused:
    return RequestRefused("RESOURCE_EXHAUSTED", f"the server's answer has more than {MAX_ANSWER:,} bytes")


def _spec(metadata: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(None if int(size) < 0 else int(size) for size in metadata["shape"])
    return TensorSpec(BY_OPEN[metadata["datatype"]].torch, shape)


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])[:_MAX_REASON]
    except (ValueError, KeyError, TypeError, RecursionError):
        return answer[:200].decode(errors="replace")


def _as_bytes(name: str, value: Any) -> tuple[Array, str]:
    """Return an array as bytes, and the protocol's name of its element type."""
    dtype = str(getattr(value, "dtype", ""))
    if dtype.startswith("torch."):
        value, dtype = value.detach().cpu().contiguous(), dtype.removeprefix("torch.")
        if dtype == "bfloat16":
            import torch

            value = value.view(torch.uint16)
    if isinstance(value, list | tuple) or dtype.startswith(("object", "<U", "|S")):
        strings = np.asarray(value, object)
        if strings.size and all(isinstance(item, str | bytes) for item in strings.flat):
            return strings, BY_TORCH["bytes"].open
    array = np.ascontiguousarray(value)
    kind = BY_TORCH.get(dtype or array.dtype.name)
    if kind is None:
        raise DataError(
            f"input {name!r} must contain numbers, bools or strings", got=dtype or array.dtype.name, remedy="convert it"
        )
    return array.astype(kind.numpy, copy=False), kind.open


def _encoded(item: str | bytes) -> bytes:
    return item.encode() if isinstance(item, str) else bytes(item)


def _texts(items: list[bytes]) -> Array:
    """Return strings as str if all of them are text, else as bytes; the protocol has one type for both."""
    try:
        return np.fromiter([item.decode() for item in items], object, len(items))
    except UnicodeDecodeError:
        return as_array(items, (len(items),))


def _outputs(size: int, body: bytes) -> Any:
    raw, outputs = memoryview(body)[size:], {}
    for one in json.loads(body[:size])["outputs"]:
        kind = BY_OPEN[one["datatype"]]
        dtype = kind.numpy
        if kind.is_text:
            num = one["parameters"]["binary_data_size"]
            array = _texts(unpack(raw[:num], math.prod(one["shape"]), BY_TORCH["bytes"], MAX_ANSWER_TEXTS))
            raw = raw[num:]
        elif "data" in one:
            array = np.array(one["data"], dtype)
        else:
            num = one["parameters"]["binary_data_size"]
            array = np.frombuffer(raw[:num], dtype).copy()
            raw = raw[num:]
        outputs[one["name"]] = array.reshape(one["shape"])
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs
