"""What people ask of a training that is under way, on the machine of its launcher: `podium join` and `podium leave`
leave a note in the launch's folder, which only this user can enter, and read the answer there."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from podium.errors import UserError
from podium.launch.board import Board

_POLL_S = 0.02


@dataclass
class Request:
    """A wish, and whom the answer waits for."""

    number: int
    do: Literal["join", "leave"]
    #: instances; below 0: all
    count: int
    #: the host that is to leave, where one is named
    host: str = ""
    come: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)


class Requests:
    """The launcher's side."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._seen: set[int] = set()
        self._open: list[Request] = []

    def new(self) -> Iterator[Request]:
        """Yield those that nobody has seen to yet, one after the other."""
        for number, facts in sorted(self._board.all("ask").items()):
            if number in self._seen:
                continue
            self._seen.add(number)
            do, count = facts.get("do"), facts.get("instances")
            if do in ("join", "leave") and isinstance(count, int):
                yield Request(number, do, count, str(facts.get("host") or ""))

    def refuse(self, request: Request, why: str) -> None:
        self._board.put(f"answer-{request.number}", {"refused": why})

    def await_(self, request: Request, come: Iterable[int] = (), gone: Iterable[int] = ()) -> None:
        """Answer once these train, or those do not any more."""
        request.come, request.gone = set(come), set(gone)
        self._open.append(request)

    def replaced(self, seat: int, by: int) -> None:
        """Wait for another seat, as this one was lost on its way."""
        for request in self._open:
            if seat in request.come:
                request.come = request.come - {seat} | {by}

    def give_up(self, seat: int, why: str) -> None:
        """Tell those who asked for this seat that nobody comes."""
        for request in [one for one in self._open if seat in one.come]:
            self.refuse(request, why)
            self._open.remove(request)

    def answer(self, seats: Iterable[int], sentence: str) -> None:
        """Tell those who asked for it that these seats train now."""
        training, left = set(seats), []
        for request in self._open:
            if request.come <= training and not request.gone & training:
                self._board.put(f"answer-{request.number}", {"said": sentence})
            else:
                left.append(request)
        self._open = left


def ask(board: Board, do: Literal["join", "leave"], count: int, host: str, timeout_s: float) -> str:
    """Ask the launcher whose board this is; return what it says. Raise UserError where it refuses, or says nothing."""
    number = int.from_bytes(os.urandom(6))
    try:
        board.put(f"ask-{number}", {"do": do, "instances": count, "host": host})
    except FileNotFoundError:
        raise UserError("the training has ended") from None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (answer := board.get(f"answer-{number}")) is not None:
            if "refused" in answer:
                raise UserError(str(answer["refused"]))
            return str(answer.get("said", ""))
        if not board.is_there():
            raise UserError("the training has ended")
        time.sleep(_POLL_S)
    raise UserError(f"the training has not answered within {timeout_s:g} s: see its messages")
