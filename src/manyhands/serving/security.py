"""Access control and encryption of serving: bearer tokens, allowed hosts and origins, TLS."""

from __future__ import annotations

import hmac
import ipaddress
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from socket import gethostname
from typing import Any

from ..core import SettingsError


@dataclass(frozen=True, kw_only=True)
class ServingTls:
    """TLS files: a certificate with its key, and the CA that must have signed the peer's certificate.

    For a server, `ca` verifies client certificates and makes them mandatory; for a client, it verifies the server's.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise SettingsError(
                "a certificate and its key must be passed together",
                got=f"cert={self.cert}, key={self.key}",
                remedy='pass both: cert="server.pem", key="server.key"',
            )
        for name in ("cert", "key", "ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise SettingsError(
                    f"{name} must be a file", got=f"{str(path)!r}, which is not a file", remedy="correct the path"
                )

    @classmethod
    def of(cls, cert: str | Path | None, key: str | Path | None, ca: str | Path | None) -> ServingTls | None:
        """Create the settings from file names; return None if none is given."""
        paths = [Path(each) if each is not None else None for each in (cert, key, ca)]
        return cls(cert=paths[0], key=paths[1], ca=paths[2]) if any(paths) else None

    @cached_property
    def for_server(self) -> ssl.SSLContext:
        """The SSL context of an HTTPS listener."""
        if self.cert is None:
            raise SettingsError(
                "a server with TLS needs a certificate",
                got="only a client_ca",
                remedy='pass cert="server.pem", key="server.key"',
            )
        return self._server_context("http/1.1")

    @cached_property
    def for_grpc_server(self) -> ssl.SSLContext:
        """The SSL context of a gRPC listener."""
        return self._server_context("h2")

    @cached_property
    def for_client(self) -> ssl.SSLContext:
        """The SSL context for a connection to a server; without a `ca`, the system's default CAs are used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is None:
            context.load_default_certs()
        self._load(context)
        return context

    def grpc_client(self) -> Any:
        """Return gRPC channel credentials made from these files."""
        import grpc

        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def _server_context(self, protocol: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        self._load(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise SettingsError(
                "cert and key must be matching PEM files, and the key must not be encrypted",
                got=f"{self.cert.name if self.cert else ''}: {getattr(error, 'reason', None) or error}",
                remedy="pass the server's certificate, followed by those of its authorities, and its own key",
            ) from None
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(
                "the certificate authority must be a PEM file of certificates",
                got=f"{self.ca.name if self.ca else ''}: {getattr(error, 'reason', None) or error}",
                remedy="pass the certificate of the authority that signs the peer's certificate",
            ) from None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None else None


def is_loopback(host: str) -> bool:
    """Return whether an address is only reachable from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessToken:
    """Bearer token that clients must send, compared in constant time."""

    def __init__(self, token: str | None, name: str = "token") -> None:
        self._bearer = f"Bearer {token}".encode() if token else b""
        self._name = name

    @property
    def is_set(self) -> bool:
        """Whether clients must send a token."""
        return bool(self._bearer)

    @property
    def reason(self) -> str:
        """Error text for a client that sent no valid token."""
        return f"this server requires a {self._name}: send the header Authorization: Bearer ..."

    def is_valid(self, header: bytes) -> bool:
        """Return whether the value of an Authorization header is valid."""
        return not self._bearer or hmac.compare_digest(header, self._bearer)


class Sites:
    """Decide which web pages may use a listener: those of its own origin, and those that the operator allows.

    A browser sends requests to servers on its own machine for any page that asks it to. It marks them with `Origin`
    and `Sec-Fetch-Site`. A page with a host name that resolves to this machine (DNS rebinding) is recognised by the
    `Host` header, which names the page's server instead of this one. No browser omits it.

    Args:
        host: The address the listener is bound to; it is a valid `Host`, as `localhost` is on a loopback address.
        allowed: Further names a client may use for this server, and origins such as `https://app.example`.
        checks_host: Whether `Host` must be one of these. A listener with a token does not need that: no page has it.
        takes_pages: Whether pages of the allowed origins may use the listener.
    """

    def __init__(
        self, host: str, allowed: Sequence[str] = (), *, checks_host: bool = True, takes_pages: bool = True
    ) -> None:
        own = (
            {host.strip("[]").lower(), *LOOPBACK_NAMES} if is_loopback(host) else {host.lower(), gethostname().lower()}
        )
        self._hosts = own | {name.lower() for name in allowed if "://" not in name}
        self._origins = {name.lower().rstrip("/") for name in allowed if "://" in name and takes_pages}
        self._checks_host = checks_host
        self._remedy = "; the operator can allow it: --allow" if takes_pages else " by this listener"

    def refusal(self, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Return the status and the reason for which a request is refused, or None."""
        host = headers.get(b"host")
        if self._checks_host and host is not None and not self._knows(host):
            return 421, f"this server is not known as {_shown(host)}; the operator can allow the name: --allow NAME"
        origin = headers.get(b"origin")
        if origin is not None:
            if self._is_own(origin, host):
                return None
            return 403, f"requests from the web page {_shown(origin)} are refused{self._remedy}"
        site = headers.get(b"sec-fetch-site")
        if site is not None and site not in (b"same-origin", b"none"):
            return 403, f"requests from other web pages are refused (Sec-Fetch-Site: {_shown(site)})"
        return None

    def _knows(self, host: bytes) -> bool:
        name = _without_port(host.decode("latin1").lower())
        # DNS rebinding does not apply to IP addresses.
        return name in self._hosts or _is_address(name)

    def _is_own(self, origin: bytes, host: bytes | None) -> bool:
        text = origin.decode("latin1").lower()
        return text in self._origins or (host is not None and text.partition("://")[2] == host.decode("latin1").lower())


_BRACKETED = re.compile(r"\[([0-9a-f:.]+)\](?::[0-9]{1,5})?")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin1"))


def _without_port(host: str) -> str:
    """Return the name in a Host header.

    >>> _without_port("[::1]:8502"), _without_port("localhost:8502"), _without_port("[localhost]x")
    ('::1', 'localhost', '[localhost]x')
    """
    if bracketed := _BRACKETED.fullmatch(host):
        return bracketed[1]
    return host.partition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    # Python takes any text after a percent sign for the name of an interface.
    return "%" not in name
