"""The secret that artifacts are signed with, where it comes from, and signatures.

Whoever has it can run code in every job that uses it. Nothing is opened before its signature was checked; what is in
it is not known here (see `store`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SECRET = "INITOPT_CACHE_KEY"
"""The environment variable with the secret itself."""

FILE = "INITOPT_CACHE_KEY_FILE"
"""The environment variable with the name of the file that holds it."""

_LEAST = 32
_MOST = 4096
"""Bytes of a secret."""

SIGNATURE = 32
"""Bytes of a signature (HMAC-SHA256)."""


class SigningKeyError(ValueError):
    """A secret that can't be used. The message names the variable or the file, and the way out."""


@dataclass(frozen=True)
class SigningKey:
    """A secret that signs and checks. Its `repr` does not show it."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < _LEAST:
            raise SigningKeyError(f"the secret has {len(self.secret)} bytes: it must have at least {_LEAST}")

    @classmethod
    def find(cls) -> SigningKey:
        """The secret of this user or job: from INITOPT_CACHE_KEY, else from a key file, which is made if it is missing.

        The variable is any text of at least 32 bytes without blanks around it, such as 64 hex digits; the text is the
        secret as it stands, it is not decoded. The file is INITOPT_CACHE_KEY_FILE, else
        `${XDG_CONFIG_HOME:-~/.config}/initopt/cache.key`; its text counts the same way, so that the content of the file
        can be the variable elsewhere. Raises SigningKeyError for a secret that is too short, a file that others can
        read, that is not the caller's own, or that can't be read or made.
        """
        text = os.environ.get(SECRET)
        if text is not None:
            secret = os.fsencode(text).strip()
            if len(secret) < _LEAST:
                raise SigningKeyError(
                    f"{SECRET} has {len(secret)} bytes: it must have at least {_LEAST}. "
                    "`openssl rand -hex 32` makes one; without the variable a key file is used"
                )
            return cls(secret)
        path = _path()
        found = _read(path)
        if found is None:
            _make(path)
            # Another rank's, if it was there first.
            found = _read(path)
        if found is None:
            raise SigningKeyError(f"{path} is gone again: is something removing it? Set {SECRET} instead")
        return cls(found)

    @cached_property
    def name(self) -> bytes:
        """Eight bytes that tell this secret from others without giving it away."""
        return self.sign(b"name")[:8]

    def sign(self, *fields: bytes) -> bytes:
        """The signature of these fields, in this order, none of whose bytes could count as another's."""
        made = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in _framed(fields):
            made.update(part)
        return made.digest()

    def check(self, signature: bytes, *fields: bytes) -> bool:
        """Whether `signature` is that of the fields. Takes as long for a wrong one as for a right one."""
        return hmac.compare_digest(signature, self.sign(*fields))


def _framed(fields: tuple[bytes, ...]) -> Iterable[bytes]:
    yield len(fields).to_bytes(8, "big")
    for one in fields:
        yield len(one).to_bytes(8, "big")
        yield one


def _path() -> Path:
    named = os.environ.get(FILE)
    if named:
        return Path(named)
    try:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError as error:
        raise SigningKeyError(f"there is no home folder for a key file: set {SECRET} or {FILE}") from error
    return Path(config) / "initopt" / "cache.key"


def _read(path: Path) -> bytes | None:
    """The secret in the file, None if there is no file. A link counts as what it leads to."""
    try:
        # A pipe under this name must not hold up the start.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SigningKeyError(
            f"the key file {path} can't be read: {error.strerror}. Set {SECRET}, or name another file by {FILE}"
        ) from error
    try:
        # Asked of the open file: the name may lead elsewhere by now.
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise SigningKeyError(f"the key file {path} is not a regular file: name another one by {FILE}")
        if about.st_uid != os.geteuid():
            raise SigningKeyError(
                f"the key file {path} belongs to user {about.st_uid}, not to you ({os.geteuid()}): "
                f"who owns it can run code in your job. Name one of your own by {FILE}"
            )
        if about.st_mode & 0o077:
            raise SigningKeyError(
                f"the key file {path} has mode {stat.S_IMODE(about.st_mode):04o}: others can read or change it, and so "
                f"run code in your job. `chmod 600 {path}`, and if they may have read it, remove it for a new one"
            )
        secret = os.read(file, _MOST + 1).strip()
    finally:
        os.close(file)
    if not _LEAST <= len(secret) <= _MOST:
        raise SigningKeyError(
            f"the key file {path} has {len(secret)} bytes: a secret has {_LEAST} to {_MOST}. Remove it for a new one"
        )
    return secret


def _make(path: Path) -> None:
    """Write a new secret, unless somebody else has done so meanwhile. The file is complete when its name is there."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(file, "wb") as opened:
                os.fchmod(opened.fileno(), 0o600)
                opened.write(secrets.token_hex(_LEAST).encode() + b"\n")
            os.link(aside, path)
        except FileExistsError:
            return
        finally:
            os.unlink(aside)
    except OSError as error:
        raise SigningKeyError(
            f"the key file {path} can't be made: {error.strerror}. Set {SECRET}, or name another file by {FILE}"
        ) from error
