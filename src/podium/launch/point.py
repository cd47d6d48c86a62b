"""Where an instance meets the others: at a service of Podium's, or at the store of torch's launcher."""

import socket
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from podium.errors import UserError
from podium.launch.environment import Place
from podium.launch.meeting import Meeting
from podium.launch.private_folder import launch_folder, private_folder
from podium.launch.secret import VARIABLE, users_secret
from podium.launch.service import MeetingService, listen_at, listen_in
from podium.launch.sockets import listening_store
from podium.launch.store import MeetingStore, nobody_listens


class MeetingPoint:
    """Opens connections to where instances meet; and what they meet at, if that is for this instance to keep.

    Connections last as long as this object does.
    """

    def __init__(self, place: Place, secret: bytes | None) -> None:
        self._place = place
        self._meeting: Meeting | None = None
        if place.meets_at == "folder":
            self._meeting = Meeting(folder=private_folder() / place.folder)
        elif place.meets_at == "service":
            secret = secret or (users_secret(place.purpose) if place.purpose else None)
            if secret is None:
                raise UserError(f"{VARIABLE} is missing: the launcher hands it to its instances")
            self._meeting = Meeting(address=place.address, port=place.port, secret=secret)
        self._kept = ExitStack()
        #: torch's wrappers around a store in Python do not keep it alive
        self._stores: list[dist.Store] = []

    def open(self, timeout_s: float) -> dist.Store:
        """Open what this instance keeps, and return its own connection; one sentence where that cannot be done."""
        place = self._place
        try:
            if place.index == 0 and not place.launcher_has_store:
                self._keep()
            return self.connect(timeout_s)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            where = self._meeting or f"{place.address}:{place.port}"
            raise UserError(f"{where}, where the instances meet, cannot be used: {reason}") from None

    def _keep(self) -> None:
        place, meeting = self._place, self._meeting
        if meeting is None:
            self._stores.append(listening_store(place.address, place.port))
        elif meeting.folder is not None:
            folder = self._kept.enter_context(launch_folder(meeting.folder.name))
            self._kept.callback(MeetingService(listen_in(folder), b"").close)
        else:
            self._kept.callback(MeetingService(listen_at(meeting.address, meeting.port), meeting.secret).close)

    def connect(self, timeout_s: float) -> dist.Store:
        """Return a connection of its own, which belongs to this attempt alone."""
        place = self._place
        if self._meeting is not None:
            store: dist.Store = MeetingStore(self._meeting, timeout_s)
        else:
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._stores.append(store)
        return dist.PrefixStore(f"attempt-{place.attempt}", store)

    def is_closed(self) -> bool:
        """Return whether the host where instances meet says that nobody listens there any more."""
        if self._meeting is not None:
            return nobody_listens(self._meeting, 2)
        try:
            with socket.create_connection((self._place.address, self._place.port), timeout=2):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End what this instance keeps."""
        self._kept.close()


def early_log_folder(place: Place) -> Path:
    """Return where an instance writes before there is a run folder."""
    return Path(place.launch_folder) if place.launch_folder else private_folder()
