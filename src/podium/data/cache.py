"""Where Podium keeps what it can make or fetch again: simulated data, downloads, measured choices."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder(*parts: str) -> Path:
    """The cache folder (`$PODIUM_CACHE` or the user's own), with `parts` below it; created by whoever writes there."""
    root = os.environ.get("PODIUM_CACHE")
    return (Path(root) if root else user_cache_path("podium")).joinpath(*parts)
