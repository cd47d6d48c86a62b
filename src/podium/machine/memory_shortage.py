"""Recognises that memory ran out, in the many forms that this takes, and says it in a sentence."""

import errno
import resource

from podium.errors import UserError

#: below it, libraries that torch loads end the process before anybody can say why
_LEAST_BYTES = 1 << 30
_TEXTS = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new thread")


def memory_shortage(error: BaseException) -> str | None:
    """Return a sentence on what to do if memory that could not be had is behind an error, else None."""
    known = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not known and not any(text in str(error).lower() for text in _TEXTS):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return f"memory ran out: {_too_little(limit)}"
    return "memory ran out: make batch.micro or the model smaller, or have fewer samples in memory at a time"


def check_address_space() -> None:
    """Raise UserError where a limit on memory is so low that torch cannot be loaded."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
        raise UserError(f"there is too little memory: {_too_little(limit)}")


def _too_little(limit: int) -> str:
    return (
        f"this process may have {limit / 1e9:.1f} GB of address space (`ulimit -v`), which is not enough for this: "
        "raise that limit"
    )
