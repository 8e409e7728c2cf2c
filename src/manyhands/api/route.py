"""Public function `route`: start a router in front of several servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import SettingsError
from ..serving import Listen, ServingLog
from .serve import as_log, as_options

if TYPE_CHECKING:
    from ..serving import Router


def route(
    backends: str | Sequence[str],
    *,
    backend_ca: str | Path | None = None,
    listen: Listen | None = None,
    log: ServingLog | str | Path | None = None,
) -> Router:
    """Start a router in front of several servers; return when it listens.

    Args:
        backends: Servers such as "a:8500,b:8500", with their gRPC ports; HTTP and management use the next two ports
            ("a:8500/8601/8602" for other ports). A name may resolve to several hosts, and is resolved repeatedly.
        backend_ca: File with the certificate authority of the backends, if they use TLS. The router presents its own
            certificate to them.
        listen: Addresses, ports, tokens, TLS and limits, as for `mh.serve`. The backends must have the same tokens as
            the router.
        log: Folder for the event log and the access log, or `mh.serving.ServingLog(log=...)`.

    Example:
        router = mh.route("a:8500,b:8500", listen=mh.serving.Listen(token=token))
        router.wait()
    """
    from ..serving import Router, RouteSettings, ServingTls

    listen, log = as_options(Listen, listen), as_log(log)
    for name, value in (("manage_grpc", listen.manage_grpc), ("traces", log.traces or None)):
        if value is not None:
            raise SettingsError(
                f"a router does not have the option {name}", got=f"{name}={value}", remedy="pass it to the servers"
            )
    return Router(
        RouteSettings(
            backends=tuple(part.strip() for part in backends.split(","))
            if isinstance(backends, str)
            else tuple(backends),
            backend_tls=ServingTls.of(listen.cert, listen.key, backend_ca) if backend_ca is not None else None,
            listen=listen,
            log=log,
        )
    ).start()
