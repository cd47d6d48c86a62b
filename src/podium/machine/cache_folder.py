"""Where Podium keeps what it can create or download again: simulated data, data sets, measured choices."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder(*parts: str) -> Path:
    """Return the cache folder (`$PODIUM_CACHE` or the user's own) or one below it; whoever writes there creates it."""
    root = os.environ.get("PODIUM_CACHE")
    return (Path(root) if root else user_cache_path("podium")).joinpath(*parts)
