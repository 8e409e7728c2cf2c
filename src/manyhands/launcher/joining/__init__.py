"""Many hosts become one job: tokens, a handshake, a desk where hosts join, agents that hold their ranks."""

from .join import Join, Team
from .tls import TLS_VARIABLE, tls_here
from .token import TOKEN_VARIABLE, Token, read_token, token_here, write_token

__all__ = [
    "TLS_VARIABLE",
    "TOKEN_VARIABLE",
    "Join",
    "Team",
    "Token",
    "read_token",
    "tls_here",
    "token_here",
    "write_token",
]
