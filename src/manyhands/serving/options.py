"""Options of servers and routers, one class per concern; `manyhands serve --help` is made from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import SettingsError, is_above_zero, option, require_positive
from .limits import Limits
from .security import ServingTls, is_loopback


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Listening: addresses, ports, access, encryption and limits of a server or router."""

    host: str = option("127.0.0.1", "Address to listen on; 127.0.0.1 by default. Other addresses need a token.")
    http: int = option(8501, "HTTP port for requests; 8501 by default, 0 for any free port.")
    grpc: int = option(8500, "Port for gRPC; 8500 by default, 0 for any free port.")
    manage: int = option(8502, "Port for management; 8502 by default, 0 for any free port.")
    manage_host: str = option(
        "127.0.0.1", "Address for management; 127.0.0.1 by default. A router needs an address that it can reach."
    )
    manage_grpc: int | None = option(None, "Port for management over gRPC; by default none.")
    token: str | None = option(None, "Token that clients must send as Authorization: Bearer.", secret=True)
    manage_token: str | None = option(None, "Token for management, which must differ from the other.", secret=True)
    allow: tuple[str, ...] = option(
        (),
        "Additional host names of this server, and origins of web pages that may send requests, such as "
        "https://a.example. No other origin may use management.",
        metavar="NAME,URL",
    )
    cert: Path | None = option(None, "Certificate (PEM) for TLS on all ports.", metavar="FILE")
    key: Path | None = option(None, "Key of the certificate (PEM).", metavar="FILE")
    client_ca: Path | None = option(
        None, "Require client certificates of this certificate authority (PEM).", metavar="FILE"
    )
    timeout: float = option(30.0, "Timeout of a request in seconds; 30 by default.")
    queue_mib: int = option(1024, "MiB of request bodies that may wait before requests are rejected; 1024 by default.")
    drain: float = 25.0
    """Seconds for in-flight requests to finish when a version is unloaded or the server stops."""
    grace: float = 1.0
    """Seconds in which a stopping server keeps connections open, so that clients learn of the end from a response."""
    limits: Limits = None  # type: ignore[assignment]
    """Limits of requests and connections; by default those that follow from `queue_mib`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", self.limits or Limits.holding(self.queue_mib))
        self._require_tokens()
        if self.tls is not None:
            self.tls.for_server  # noqa: B018 - an unreadable certificate raises at once
        for name in ("http", "grpc", "manage", "manage_grpc"):
            port: Any = getattr(self, name)
            if port is not None and not (isinstance(port, int) and 0 <= port < 65536):
                raise SettingsError(
                    f"{name} must be a port number", got=repr(port), remedy=f"pass for example {name}=8501"
                )
        if not is_above_zero(self.timeout):
            raise SettingsError("timeout must be above 0", got=repr(self.timeout), remedy="pass a number of seconds")

    @functools.cached_property
    def tls(self) -> ServingTls | None:
        """TLS of all listeners; None without a certificate."""
        return ServingTls.of(self.cert, self.key, self.client_ca)

    def _require_tokens(self) -> None:
        needed = (
            ("a server", self.host, self.token, "MANYHANDS_TOKEN"),
            ("management", self.manage_host, self.manage_token, "MANYHANDS_MANAGE_TOKEN"),
        )
        for what, host, token, variable in needed:
            if not is_loopback(host) and not token:
                raise SettingsError(
                    f"{what} that is reachable from other hosts needs a token",
                    got=f"host={host}",
                    remedy=f"set {variable}, or listen on 127.0.0.1",
                )
        if self.token and self.token == self.manage_token:
            raise SettingsError(
                "the tokens for requests and for management must differ",
                got="the same value for both",
                remedy="set MANYHANDS_MANAGE_TOKEN to another value",
            )


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Batching: how requests are joined into batches, and how many may wait."""

    max_rows: int = option(
        64, "Maximum rows of a batch that joins requests; 64 by default. A larger request is computed in parts."
    )
    sizes: tuple[int, ...] = option(
        (), "Batch sizes to pad to, ascending, such as 1,8,64; the last one is the maximum.", metavar="N,N"
    )
    bulk_rows: int = option(
        8192,
        "Maximum rows of a batch of one large request while no other request waits; 8192 by default. Fewer if rows "
        "are large or take long; with sizes there are no larger batches.",
    )
    queue_rows: int = option(
        1024,
        "Rows that may wait before requests are rejected; 1024 by default. A single request may have four times as "
        "many if no other waits.",
    )

    def __post_init__(self) -> None:
        require_positive(max_rows=self.max_rows, bulk_rows=self.bulk_rows, queue_rows=self.queue_rows)
        if self.sizes and (list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1):
            raise SettingsError(
                "sizes must be ascending numbers of at least 1",
                got=self.sizes,
                remedy="pass for example sizes=(1, 8, 64)",
            )
        if self.sizes and self.sizes[-1] != self.max_rows:
            raise SettingsError(
                "the largest of sizes must equal max_rows",
                got=f"{self.sizes[-1]} and {self.max_rows}",
                remedy="pass both with the same value",
            )

    def padded(self, rows: int) -> int:
        """Return the number of rows, including padding, that are computed for this many.

        >>> Batching(max_rows=8, sizes=(1, 4, 8)).padded(3)
        4
        """
        return next((size for size in self.sizes if size >= rows), rows)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Rollout: which versions are served, and how a new one replaces the old one.

    For some seconds a new version is compared with the previous one, and rolled back if it fails or is slow.
    """

    versions: str = option(
        "latest", "Versions to serve: latest (default), latest:2, all, or numbers such as 1,3.", metavar="TEXT"
    )
    probation: float = option(
        30.0, "Seconds in which a new version that fails or is slow is rolled back; 30 by default, 0 for none."
    )
    unload_first: bool = option(
        False,
        "Unload the old version before the new one is loaded, if both do not fit into memory; requests are rejected "
        "during that time.",
    )
    warmup: Path | None = option(
        None,
        "Folder with requests (NAME.jsonl) that every new version of NAME computes before it takes over.",
        metavar="FOLDER",
    )
    record: Path | None = option(
        None, "Write the first requests of each model to this folder, for a later warm-up.", metavar="FOLDER"
    )
    state: Path | None = option(
        None,
        "Folder in which labels, splits and rollbacks are kept for a restart; by default .serving in the folder of "
        "models.",
        metavar="FOLDER",
    )
    num_requests: int = 20
    """Minimum number of requests for a decision about a rollback."""
    max_failed: float = 0.1
    """Maximum share of requests that fail in the model."""
    max_slowdown: float = 5.0
    """Maximum ratio of the 90th percentile latency to the old version's."""
    poll: float = 1.0
    """Seconds between two scans of the folder of models."""

    def __post_init__(self) -> None:
        if not is_above_zero(self.poll):
            raise SettingsError("poll must be above 0", got=repr(self.poll), remedy="pass a number of seconds")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas: how models are computed."""

    precision: str = option("fp32", "fp32 (default), or bf16 to compute in bfloat16 where that is safe.")
    compile: bool = option(False, "Compile networks when they are loaded, if that makes them faster.")
    trust_python: bool = option(
        False,
        "Execute predictor.py of versions in the folder of models, outside the sandbox and with the rights of the "
        "server. Use it if you trust everyone who can write to the folder.",
    )

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise SettingsError(
                "precision must be fp32 or bf16", got=repr(self.precision), remedy='pass precision="bf16"'
            )


@dataclass(frozen=True, kw_only=True)
class ServingLog:
    """Logging: what a server or router writes about events and requests."""

    log: Path | None = option(None, "Write events.jsonl and access.jsonl to this folder.", metavar="FOLDER")
    traces: bool = option(False, "Emit an OpenTelemetry span for every request.")
