"""Public function `route`: start a router in front of several servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..serving import Router


def route(
    backends: str | Sequence[str],
    *,
    host: str = "127.0.0.1",
    http: int = 8501,
    grpc: int = 8500,
    manage: int = 8502,
    manage_host: str = "127.0.0.1",
    token: str | None = None,
    manage_token: str | None = None,
    allow: Sequence[str] = (),
    cert: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    backend_ca: str | Path | None = None,
    timeout: float = 30.0,
    queue_mib: int = 1024,
    log: str | Path | None = None,
) -> Router:
    """Start a router in front of several servers; return when it listens.

    Args:
        backends: Servers such as "a:8500,b:8500", with their gRPC ports; HTTP and management use the next two ports
            ("a:8500/8601/8602" for other ports). A name may resolve to several hosts, and is resolved repeatedly.
        backend_ca: Certificate authority of the backends, if they use TLS; the router presents its own certificate.
        host, http, grpc, manage, manage_host, allow, cert, key, client_ca, timeout, queue_mib, log: As for `mh.serve`.
        token, manage_token: Access tokens of the router, which the backends must accept too.

    Example:
        router = mh.route("a:8500,b:8500", token=token)
        router.wait()
    """
    from ..serving import Limits, Router, RouteSettings, ServingTls

    tls = ServingTls.of(cert, key, client_ca)
    settings = RouteSettings(
        backends=tuple(part.strip() for part in backends.split(",")) if isinstance(backends, str) else tuple(backends),
        host=host,
        http=http,
        grpc=grpc,
        manage=manage,
        manage_host=manage_host,
        token=token,
        manage_token=manage_token,
        allow=tuple(allow),
        tls=tls,
        backend_tls=ServingTls.of(cert, key, backend_ca) if backend_ca is not None else None,
        timeout=timeout,
        limits=Limits.holding(queue_mib),
        log=Path(log) if log is not None else None,
    )
    return Router(settings).start()
