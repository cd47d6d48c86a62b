"""Terminals may be closed while a run goes on."""

import errno
import os
import termios


def leave_closed_terminal() -> None:
    """Discard what goes to a terminal that has been closed, where every write would be an error."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # any other: it is not a terminal
                discarded = os.open(os.devnull, os.O_WRONLY)
                os.dup2(discarded, stream)
                os.close(discarded)
