"""Many hosts become one job: tokens, a handshake, a desk where hosts join, agents that hold their ranks."""

from .join import Join, Team
from .token import TOKEN_VARIABLE, Token, read_token, write_token

__all__ = ["TOKEN_VARIABLE", "Join", "Team", "Token", "read_token", "write_token"]
