"""TLS for joining: a folder with a certificate, its key and its CA. Both sides prove the certificate and the token."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ...core import SettingsError
from ...distributed import FIRST_SECONDS
from .channel import Bare, JoinTimeouts, ProtocolError
from .handshake import JoinRefused

CERTIFICATE, KEY, SIGNER = "tls.crt", "tls.key", "ca.crt"
"""The file names of Kubernetes TLS secrets."""
TLS_VARIABLE = "MANYHANDS_TLS"
"""The environment variable with the folder of the certificate, for programs that a scheduler starts on the hosts."""
FOLDER = f"a folder with {CERTIFICATE}, {KEY} and {SIGNER}"
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_RECORDS = range(20, 24)
"""Possible first bytes of a TLS record."""


class NotTls(ProtocolError):
    """Raised when the other side of a connection does not use TLS."""


class NoTls:
    """Joining without TLS: messages are authenticated by the token, but not encrypted."""

    def check(self) -> None:
        """Do nothing: without TLS there are no files to check."""

    def cover(self, sock: socket.socket, limits: JoinTimeouts, *, is_first: bool) -> Bare:
        """Return the transport layer of a connection; `is_first` is True on the coordinator's host."""
        return Bare()


@dataclass(frozen=True)
class JoinTls(NoTls):
    """Joining with TLS. The files are read for every connection, so certificates can be renewed while a job runs."""

    folder: Path

    def check(self) -> None:
        """Test a handshake of the certificate with itself; raise SettingsError if it is invalid or files are missing.

        The certificate must be valid now, for both sides of a connection.
        """
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self._context(is_first=False).wrap_bio(to_client, to_server)
        server = self._context(is_first=True).wrap_bio(to_server, to_client, server_side=True)
        try:
            for side in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLError as error:
            raise SettingsError(
                f"{self.folder / CERTIFICATE} must be valid now, for both sides, and signed by {SIGNER}",
                got=_reason(error),
                remedy="create or renew it, with the same certificate authority on every host",
            ) from None

    def cover(self, sock: socket.socket, limits: JoinTimeouts, *, is_first: bool) -> Bare:
        return Tunnel(sock, self._context(is_first=is_first), limits, self._mark() if is_first else "")

    def _context(self, *, is_first: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_first else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # A host may be joined under any of its names, so names are not checked; the token's proof covers the
        # certificate.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            if (self.folder / KEY).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SettingsError(
                    "a private key must be readable by its owner only",
                    got=f"{self.folder / KEY}, which other users can read",
                    remedy=f"run chmod 600 {self.folder / KEY}, or create a new key if another user may have read it",
                )
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password="")
            context.load_verify_locations(self.folder / SIGNER)
        except OSError as error:
            reason = _reason(error) if isinstance(error, ssl.SSLError) else error.strerror
            raise SettingsError(
                f"TLS needs {FOLDER}, in PEM format",
                got=f"{self.folder} ({reason})",
                remedy="create them as docs/clusters.md shows",
            ) from None
        if is_first:
            context.num_tickets = 0
        return context

    def _mark(self) -> str:
        text = (self.folder / CERTIFICATE).read_text()
        pem = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


class Tunnel(Bare):
    """The transport layer of a connection with TLS; one thread may send while another receives."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, limits: JoinTimeouts, mark: str) -> None:
        """Run the TLS handshake; `mark` is the digest of the first host's certificate, empty on the joining side."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=bool(mark))
        self._lock = threading.Lock()
        self._peer = str(sock.getpeername()[0])
        self._is_proved = False
        try:
            self._shake_hands(sock, limits, is_client=not mark)
        except ssl.SSLError as error:
            raise self._refused(error) from None
        shown = self._tls.getpeercert(binary_form=True) or b""
        self.binding = (mark or hashlib.sha256(shown).hexdigest(),)

    def _shake_hands(self, sock: socket.socket, limits: JoinTimeouts, *, is_client: bool) -> None:
        end = time.monotonic() + limits.answer
        # A peer without TLS waits for this side's first message, so it must be refused before its own wait ends.
        patience = limits.answer if is_client else min(FIRST_SECONDS, limits.answer / 2)
        has_received = False
        while not self._is_done(sock):
            sock.settimeout(max(0.01, min(patience, end - time.monotonic())))
            try:
                chunk = sock.recv(65536)
            except TimeoutError:
                if has_received or is_client:
                    raise TimeoutError(f"no TLS from {self._peer} in time") from None
                chunk = b"\0"
            if not chunk:
                raise ConnectionError("the connection was closed")
            if not has_received and chunk[0] not in _RECORDS:
                raise self._not_tls(is_client)
            has_received, patience = True, limits.answer
            self._incoming.write(chunk)

    def _is_done(self, sock: socket.socket) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            with contextlib.suppress(OSError):
                sock.sendall(self._outgoing.read())
        return True

    def wrapped(self, data: bytes) -> bytes:
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[self._tls.write(view) :]
            return self._outgoing.read()

    def opened(self, data: bytes) -> bytes:
        found = b""
        with self._lock:
            self._incoming.write(data)
            try:
                while chunk := self._tls.read(65536):
                    found += chunk
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise (
                    ProtocolError(f"the TLS connection to {self._peer} is broken ({_reason(error)})")
                    if self._is_proved
                    else self._refused(error)
                ) from None
        self._is_proved = self._is_proved or bool(found)
        return found

    def _not_tls(self, is_client: bool) -> Exception:
        if not is_client:
            return NotTls(f"{self._peer} was not admitted: it does not use TLS")
        return _refusal(
            "either all hosts of a job must use TLS, or none of them",
            got=f"{self._peer} without TLS",
            remedy="start the first host with tls= too, or omit it here",
        )

    def _refused(self, error: ssl.SSLError) -> JoinRefused:
        """Return the error for a failed handshake: one of the sides has rejected the certificate of the other."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return _refusal(
                f"the certificate of {self._peer} must be valid now, and signed by {SIGNER}",
                got=_reason(error),
                remedy="give all hosts certificates of one certificate authority, and renew them in time",
            )
        return _refusal(
            f"{self._peer} must accept this host's certificate",
            got=f"{_reason(error)!r}",
            remedy="give all hosts certificates of one certificate authority, and renew them in time",
        )


def _refusal(rule: str, *, got: str, remedy: str) -> JoinRefused:
    refused = JoinRefused(rule, got=got, remedy=remedy)
    refused.code = "tls"
    return refused


def _reason(error: OSError) -> str:
    """Return the reason of a TLS error as text."""
    reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error.strerror or "it failed"
    return str(reason).lower().replace("_", " ")


def tls_here(folder: str) -> NoTls:
    """Return the TLS settings of connections between hosts; NoTls if no folder is given."""
    return JoinTls(Path(folder)) if folder else NoTls()
