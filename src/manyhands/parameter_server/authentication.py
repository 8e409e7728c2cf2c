"""ZeroMQ authentication of a listener: connections without the token are closed before their messages are read."""

from __future__ import annotations

import hmac
import secrets
import threading
from typing import Any

import zmq

WHERE = "inproc://zeromq.zap.01"
"""The address of ZeroMQ's authentication protocol (ZAP), shared by all listeners of a context."""


class TokenAuthenticator:
    """Answers ZeroMQ's authentication requests in a thread.

    A connection's username is random and its password is an HMAC of the username with the token. Every username is
    accepted once, so that intercepted credentials cannot be replayed.
    """

    def __init__(self, context: zmq.Context[Any], token: bytes) -> None:
        self._context, self._token = context, token
        self._seen_names: set[bytes] = set()
        socket = context.socket(zmq.REP)
        socket.bind(WHERE)
        self._thread = threading.Thread(target=self._watch, args=(socket,), name="authentication", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections and end the thread."""
        bell = self._context.socket(zmq.REQ)
        bell.connect(WHERE)
        bell.send(b"")
        self._thread.join()
        bell.close(linger=0)

    def _watch(self, socket: Any) -> None:
        while len(asked := socket.recv_multipart()) > 1:
            version, number, _, _, _, mechanism, *credentials = asked
            status = b"200" if mechanism == b"PLAIN" and self._admits(*credentials) else b"400"
            socket.send_multipart([version, number, status, b"", credentials[0] if status == b"200" else b"", b""])
        socket.close(linger=0)

    def _admits(self, name: bytes, password: bytes) -> bool:
        is_right = hmac.compare_digest(password, _password(self._token, name))
        if not is_right or name in self._seen_names:
            return False
        self._seen_names.add(name)
        return True


def set_credentials(socket: Any, token: bytes) -> None:
    """Set a new username and its password on a socket that is going to connect once."""
    name = secrets.token_hex(16).encode()
    socket.plain_username, socket.plain_password = name, _password(token, name)


def _password(token: bytes, name: bytes) -> bytes:
    return hmac.new(token, b"manyhands door" + name, "sha256").hexdigest().encode()
