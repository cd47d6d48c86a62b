"""Where instances meet, as text and as an object. Loads nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Where instances meet: at a socket in a folder of one host, or at an address, to which they show a secret."""

    folder: Path | None = None
    address: str = LOOPBACK
    port: int = 0
    secret: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None else f"{self.address}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Meeting":
        """Return what `str` has written; the secret is not part of it."""
        if text.startswith("/"):
            return cls(folder=Path(text))
        address, _, port = text.rpartition(":")
        return cls(address=address, port=int(port))
