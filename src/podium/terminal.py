"""Terminals may be closed while a run goes on."""

import errno
import os
import termios


def leave_closed_terminal() -> None:
    """Sends to nowhere what goes to a terminal that is no more, where every write would be an error."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # another one: it is no terminal
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
