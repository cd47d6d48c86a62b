"""The secret of a run: what hosts show one another to be let in.

Whoever starts other hosts by ssh makes a new one, and it goes to them through ssh's standard input. Elsewhere it is
given (`PODIUM_SECRET`, `--secret-file`), or made from a key that the user's home has and nobody else can read, where
hosts share homes. It is never on a command line, in a log or in a run folder, and no process inherits it that does not
need it.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from platformdirs import user_config_path

from podium.errors import UserError, system_reason

#: holds the secret itself, for jobs whose scheduler hands on the environment
VARIABLE = "PODIUM_SECRET"
_MIN_CHARACTERS, _MAX_BYTES = 16, 4096
_ADVICE = "`openssl rand -hex 32` makes a good one"


def take_secret(file: Path | None, env: MutableMapping[str, str]) -> bytes | None:
    """Return the secret that the user or a launcher has given; remove it from the environment, which others inherit."""
    given = env.pop(VARIABLE, None)
    if file is not None:
        return _checked(_read(file), str(file))
    return None if given is None else _checked(given.encode(), VARIABLE)


def new_secret() -> bytes:
    """Return a secret for one run."""
    return secrets.token_hex(32).encode()


def read_secret_line(file: int) -> bytes:
    """Return the secret that comes first on the standard input of a host which was started by ssh."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_BYTES:
        part = os.read(file, 1)  # what follows belongs to others
        if not part:
            break
        line += part
    return _checked(line, "standard input")


def meeting_purpose(hosts: Sequence[str], port: int) -> str:
    """Return what the secret is for by which the hosts of a run know each other, and those that come to it."""
    return f"hosts {' '.join(hosts)} port {port}"


def users_secret(purpose: str) -> bytes:
    """Return a secret for `purpose` from the key in the user's home, which is made when it is first needed.

    The same on all hosts that share the home, and of no use for any other purpose.
    """
    path = user_config_path("podium") / "secret"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_name(f".secret-{secrets.token_hex(8)}")
        if not path.exists():
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(new_secret())
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another host was faster: its key is taken
                os.link(aside, path)
            aside.unlink()
    except OSError as error:
        raise UserError(
            f"{path}, from which hosts know each other, cannot be written ({system_reason(error)}): "
            f"give them a secret with --secret-file or {VARIABLE}"
        ) from None
    return hmac.new(_checked(_read(path), str(path)), purpose.encode(), hashlib.sha256).hexdigest().encode()


def _read(path: Path) -> bytes:
    """Return what a file holds that belongs to the user, or to the system, and that nobody else may read."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            known = os.fstat(file.fileno())
            if not stat.S_ISREG(known.st_mode):
                raise UserError(f"{path}: expected a file with a secret in it")
            if known.st_uid not in (os.getuid(), 0):
                raise UserError(f"{path} belongs to another user: a secret must be in a file of your own")
            if known.st_mode & 0o077:
                raise UserError(f"{path} can be read by others (mode {known.st_mode & 0o777:04o}): chmod 600 {path}")
            return file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None


def _checked(text: bytes, where: str) -> bytes:
    secret = text.strip()
    if len(secret) < _MIN_CHARACTERS or len(text) > _MAX_BYTES:
        raise UserError(f"{where}: expected a secret of {_MIN_CHARACTERS} to {_MAX_BYTES} characters; {_ADVICE}")
    return secret
