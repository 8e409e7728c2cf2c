"""Jobs of several hosts: tokens, a handshake, a listener at which hosts join, and agents that run their ranks."""

from .hosts import JoinedHosts
from .join import Join
from .tls import TLS_VARIABLE, tls_here
from .token import TOKEN_VARIABLE, JoinToken, read_token, token_here, write_token

__all__ = [
    "TLS_VARIABLE",
    "TOKEN_VARIABLE",
    "Join",
    "JoinedHosts",
    "JoinToken",
    "read_token",
    "tls_here",
    "token_here",
    "write_token",
]
