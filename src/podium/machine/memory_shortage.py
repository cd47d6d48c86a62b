"""Recognises that memory ran out, in the many forms that this takes, and says it in a sentence."""

import errno
import resource

_TEXTS = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new thread")


def memory_shortage(error: BaseException) -> str | None:
    """Return a sentence on what to do if memory that could not be had is behind an error, else None."""
    known = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not known and not any(text in str(error).lower() for text in _TEXTS):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return (
            f"memory ran out: this process may have {limit / 1e9:.1f} GB of address space (`ulimit -v`), which is not "
            "enough for this: raise that limit"
        )
    return "memory ran out: make batch.micro or the model smaller, or have fewer samples in memory at a time"
