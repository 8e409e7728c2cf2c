"""Join tokens: a secret in a file that only its owner can read; hosts prove that they know it without sending it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...core import FileError, SettingsError, open_regular

MIN_LENGTH = 32
LIMIT = 64 << 10
"""Maximum number of bytes that are read from a token file."""
TOKEN_VARIABLE = "MANYHANDS_TOKEN"
"""The environment variable with the token itself, for hosts that share no files but get a scheduler's environment."""
_EXPIRES = "expires "


@dataclass(frozen=True)
class JoinToken:
    """The shared secret of the hosts that join a job."""

    secret: bytes = field(repr=False)
    expires: float | None = None
    """Seconds since the epoch after which no host can join with this token."""

    def prove(self, *parts: str) -> str:
        """Return an HMAC of these parts, which proves that the sender knows the secret."""
        return hmac.new(self.secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()

    def accepts(self, proof: str, *parts: str) -> bool:
        """Return whether a proof is correct; compares in constant time."""
        return hmac.compare_digest(proof.encode(), self.prove(*parts).encode())

    def rank_key(self, salt: str, generation: int) -> str:
        """Return the key, in hex, that the ranks of one generation of a job share; `salt` need not be secret."""
        return self.prove("ranks", salt, str(generation))

    @property
    def is_expired(self) -> bool:
        """Return whether the token has expired."""
        return self.expires is not None and time.time() > self.expires


def write_token(path: Path, hours: float | None = None) -> None:
    """Write a new token, which expires after `hours` if given, to a new file that only its owner can read."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SettingsError(
            "a token must be written to a new file", got=f"{path} ({error.strerror})", remedy="choose another path"
        ) from None
    limit = "" if hours is None else f"{_EXPIRES}{int(time.time() + hours * 3600)}\n"
    with os.fdopen(file, "w") as text:
        text.write(f"{secrets.token_hex(32)}\n{limit}")


def token_here(file: str) -> JoinToken:
    """Return the token from `file`, or from MANYHANDS_TOKEN if `file` is empty; raise SettingsError without a token."""
    if file:
        return read_token(Path(file))
    text = os.environ.get(TOKEN_VARIABLE, "").strip()
    if len(text) < MIN_LENGTH:
        raise SettingsError(
            f"joining hosts need a shared token of at least {MIN_LENGTH} characters, in a file or in {TOKEN_VARIABLE}",
            got=f"{len(text)} characters" if text else "no token",
            remedy=f"run export {TOKEN_VARIABLE}=$(openssl rand -hex 32) before they start, with the same value "
            "on all hosts",
        )
    return JoinToken(text.encode())


def read_token(path: Path) -> JoinToken:
    """Return the token from a file; raise SettingsError if it is expired, or if other users can read the file."""
    make = f"create one with: manyhands token {path}, and copy it to every host"
    try:
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read(LIMIT).decode().splitlines()
    except (OSError, FileError, UnicodeDecodeError) as error:
        raise SettingsError("a token file must be readable", got=f"{path} ({error})", remedy=make) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(
            "a token file must be readable by its owner only",
            got=f"{path} with mode {stat.S_IMODE(mode):o}",
            remedy=f"run chmod 600 {path}, or create a new token if another user may have read it",
        )
    if not lines or len(lines[0].strip()) < MIN_LENGTH:
        raise SettingsError(
            f"a token must have at least {MIN_LENGTH} characters", got=f"fewer characters in {path}", remedy=make
        )
    limits = [line.removeprefix(_EXPIRES) for line in lines[1:] if line.startswith(_EXPIRES)]
    if limits and not limits[0].isdecimal():
        raise SettingsError("the expiry of a token must be a number of seconds", got=repr(limits[0]), remedy=make)
    token = JoinToken(lines[0].strip().encode(), float(limits[0]) if limits else None)
    if token.is_expired:
        raise SettingsError(
            "a token must not be expired", got=str(path), remedy=make.replace("create one", "create a new one")
        )
    return token
