"""Where Podium keeps what cannot be made again, such as which code a user has run here."""

import os
from pathlib import Path

from platformdirs import user_state_path


def state_folder(*parts: str) -> Path:
    """Return the state folder (`$PODIUM_STATE` or the user's own) or one below it; whoever writes there creates it."""
    root = os.environ.get("PODIUM_STATE")
    return (Path(root) if root else user_state_path("podium")).joinpath(*parts)
