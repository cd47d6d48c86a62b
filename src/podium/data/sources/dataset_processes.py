"""Processes that make samples beside the training, and the thread that hands them work.

They are forked when the source is opened, before the training's own threads are busy, from a thread that has run no
operator: so no lock is held and no team of OpenMP is lost, and whatever the user's Dataset is made of is there, in a
notebook too, without pickling and without a second copy of data in memory. Requests and answers are plain numbers and
text over pipes; samples come through memory that the processes share.

torch's DataLoader would do for whole batches in the order of a sampler. Here a block of samples is divided between the
processes as each becomes free, lands in memory that is mapped once instead of with every batch, and a process that
dies is told with the samples that it was at (`bench/input.py` compares the two).
"""

import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from podium.data.source import Arrays, Field
from podium.errors import PodiumError, TrainingFailed, UserError, system_reason
from podium.machine.threads import stay_single

#: writes samples into rows: (samples, epoch, rows)
Fill = Callable[[NDArray[np.int64], int | None, Arrays], None]

_SLOT_BYTES, _MAX_PIECE = 2**20, 256
_SLOTS_EACH = 2  # one in progress, one waiting, so that no process idles between two pieces
_MAX_ANSWER_BYTES = 2**16
_REQUEST, _ANSWER = struct.Struct("<qqq"), struct.Struct("<q")
_NO_EPOCH = -1
_PR_SET_PDEATHSIG = 1
_END_S = 2.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SampleProcesses:
    """`count` processes that call `fill`; they end with this object, or with the process that made it."""

    def __init__(self, count: int, fields: Mapping[str, Field], fill: Fill, name: str) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            raise UserError(f"{name}: processes that prepare samples need Linux here; use workers = 0")
        self._keeper = _Keeper(count, fields, fill, name)
        weakref.finalize(self, self._keeper.close)

    def begin(self, samples: NDArray[np.int64], epoch: int | None, out: Arrays) -> Callable[[], None]:
        """Have the processes fill `out` and return at once; calling the result waits for the end."""
        job = self._keeper.submit(samples, epoch, out)

        def finish(alive: SampleProcesses = self) -> None:  # `alive`: they must not end before
            job.done.wait()
            if job.error is not None:
                raise job.error

        return finish

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._keeper.processes]

    def close(self) -> None:
        """End the processes."""
        self._keeper.close()


@dataclass
class _Job:
    samples: NDArray[np.int64]
    epoch: int | None
    out: Arrays
    left: int
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.done.set()


@dataclass
class _Piece:
    job: _Job
    part: slice


@dataclass
class _Process:
    pid: int
    requests: Connection
    answers: Connection
    slots: list[dict[str, NDArray]]
    free: list[int]
    #: pieces in progress by their slot, in the order in which they were sent
    under_way: dict[int, _Piece] = field(default_factory=dict)


class _Keeper:
    """The thread that forks the processes, hands them pieces of work and copies what they made.

    The system ends a process with the thread that forked it, so this thread stays as long as they are needed.
    """

    def __init__(self, count: int, fields: Mapping[str, Field], fill: Fill, name: str) -> None:
        self._fill, self._name, self._count = fill, name, count
        self._fields = dict(fields)
        sample_bytes = max(1, sum(field.num_bytes for field in fields.values()))
        self._piece = max(1, min(_MAX_PIECE, _SLOT_BYTES // sample_bytes))
        self.processes: list[_Process] = []
        self._waiting: deque[_Piece] = deque()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._broken: Exception | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._parent = os.getpid()
        self._lock = threading.RLock()  # collecting garbage may close the source at any point
        self._closed = False
        started = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(started,), name="podium-samples", daemon=True)
        self._thread.start()
        started.wait()
        if problem := self._problem():
            self.close()
            raise problem

    def _problem(self) -> Exception | None:
        return self._broken

    def submit(self, samples: NDArray[np.int64], epoch: int | None, out: Arrays) -> _Job:
        job = _Job(samples, epoch, out, left=len(samples))
        with self._lock:
            if self._closed or self._broken is not None:
                job.fail(self._broken or RuntimeError("the processes that prepare samples have ended"))
                return job
            self._jobs.put(job)
            os.write(self._wake_write, b".")
        return job

    def close(self) -> None:
        if os.getpid() != self._parent:
            return  # a forked process must not end its siblings
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.write(self._wake_write, b".")
        if threading.current_thread() is not self._thread:  # whichever thread found the source to be garbage
            self._thread.join()

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _keep(self, started: threading.Event) -> None:
        try:
            stay_single()
            self._fork_all()
        except OSError as error:
            self._broken = UserError(
                f"{self._name}: {self._count} processes that prepare samples cannot be started: "
                f"{system_reason(error)}; use fewer workers"
            )
        started.set()
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        by_fd = {process.answers.fileno(): process for process in self.processes}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        try:
            while True:
                self._hand_out()
                for fd, _ in poll.poll():
                    if fd != self._wake_read:
                        if not self._take_answer(by_fd[fd]):
                            poll.unregister(fd)
                        continue
                    os.read(fd, 4096)
                    if not self._take_jobs():
                        return
        except Exception as error:  # whoever waits for samples raises it
            self._break(error)
        finally:
            self._end_all()
            self._break(self._broken or RuntimeError("the processes that prepare samples have ended"))
            with self._lock:
                self._closed = True
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _take_jobs(self) -> bool:
        """Divide new work into pieces; return whether there is more to come."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if self._broken is not None:
                job.fail(self._broken)
                continue
            count = len(job.samples)
            if count == 0:
                job.done.set()
            # Several pieces for each process, so that all finish at about the same time.
            size = max(1, min(self._piece, -(-count // (4 * self._count))))
            self._waiting.extend(_Piece(job, slice(first, min(first + size, count))) for first in range(0, count, size))
        return not self._closed

    def _hand_out(self) -> None:
        while self._waiting:
            process = max(self.processes, key=lambda process: len(process.free), default=None)
            if process is None or not process.free:
                return
            piece = self._waiting.popleft()
            if piece.job.error is not None:
                continue
            slot, epoch = process.free.pop(), piece.job.epoch
            samples = np.ascontiguousarray(piece.job.samples[piece.part], np.int64)
            process.under_way[slot] = piece
            header = _REQUEST.pack(slot, _NO_EPOCH if epoch is None else epoch, len(samples))
            with suppress(BrokenPipeError):  # it has died, as its answers will show
                process.requests.send_bytes(header + samples.tobytes())

    def _take_answer(self, process: _Process) -> bool:
        """Take what a process has made; return whether it is still alive."""
        try:
            answer = process.answers.recv_bytes(_MAX_ANSWER_BYTES)
        except (EOFError, ConnectionResetError):
            self._break(self._death(process))
            return False
        (slot,) = _ANSWER.unpack_from(answer)
        piece = process.under_way.pop(slot, None)
        if piece is None:
            return True  # another process has died, and nobody waits for this any more
        job = piece.job
        if problem := answer[_ANSWER.size :]:
            job.fail(_error(json.loads(problem)))
        elif job.error is None:
            count = piece.part.stop - piece.part.start
            for name, rows in process.slots[slot].items():
                job.out[name][piece.part] = rows[:count]
            job.left -= count
            if job.left == 0:
                job.done.set()
        process.free.append(slot)
        return True

    def _death(self, process: _Process) -> Exception:
        how = "ended"
        with suppress(ChildProcessError):
            _, status = os.waitpid(process.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        samples = [piece.job.samples[piece.part] for piece in process.under_way.values()]
        process.pid = 0
        numbers = [str(number) for number in (samples[0].tolist() if samples else ())]
        shown = ", ".join([*numbers[:4], *(["…"] if len(numbers) > 4 else [])])
        at = f" while it prepared sample{'s' if len(numbers) > 1 else ''} {shown}" if numbers else ""
        return TrainingFailed(
            f"a process that prepares samples of {self._name} {how}{at}: if the system ran out of memory, use fewer "
            "workers; with workers = 0 an error in a sample shows itself; checkpoints are kept"
        )

    def _break(self, error: Exception) -> None:
        """Let everybody who waits for samples, now or later, know why there are none."""
        with self._lock:
            self._broken = self._broken or error
        for process in self.processes:
            for piece in process.under_way.values():
                piece.job.fail(self._broken)
            process.under_way.clear()
        while self._waiting:
            self._waiting.popleft().job.fail(self._broken)
        while not self._jobs.empty():
            self._jobs.get().fail(self._broken)

    def _end_all(self) -> None:
        alive = [process for process in self.processes if process.pid]
        for process in alive:
            with suppress(OSError):
                process.requests.send_bytes(b"")
        for process in alive:
            process.requests.close()
            with suppress(EOFError, OSError):  # answers that nobody waits for any more, until it has ended
                while process.answers.poll(_END_S) and process.answers.recv_bytes(_MAX_ANSWER_BYTES):
                    pass
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process.pid, 0)
            process.answers.close()

    # --- the processes ---------------------------------------------------------------------------------------------

    def _fork_all(self) -> None:
        for _ in range(self._count):
            slots = _shared_slots(self._fields, self._piece)
            requests, to_requests = Pipe(duplex=False)
            from_answers, answers = Pipe(duplex=False)
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):
                    stream.flush()  # or both processes would write what is in its buffer
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
                pid = os.fork()
            if pid == 0:
                self._serve(requests, answers, slots, [to_requests, from_answers])
            requests.close()
            answers.close()
            self.processes.append(_Process(pid, to_requests, from_answers, slots, list(range(_SLOTS_EACH))))

    def _serve(
        self, requests: Connection, answers: Connection, slots: list[dict[str, NDArray]], others: list[Connection]
    ) -> NoReturn:
        """Make samples until asked to end; runs in the forked process."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
            for number in _IGNORED:  # the training decides when to stop, and these processes end with it
                signal.signal(number, signal.SIG_IGN)
            for other in others:
                other.close()
            with Path(os.devnull).open() as nothing:
                os.dup2(nothing.fileno(), 0)
            stay_single()
            threadpool_limits(1, user_api="blas")  # as `own_generators` has it; libraries were loaded by sample 0
            while request := requests.recv_bytes():
                slot, epoch, count = _REQUEST.unpack_from(request)
                samples = np.frombuffer(request, np.int64, count, _REQUEST.size)
                problem = self._made(samples, None if epoch == _NO_EPOCH else epoch, slots[slot])
                answers.send_bytes(_ANSWER.pack(slot) + problem)
            code = 0
        except (EOFError, BrokenPipeError):
            code = 0  # nobody is left to make samples for
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(BaseException):
                    stream.flush()
            os._exit(code)

    def _made(self, samples: NDArray[np.int64], epoch: int | None, rows: Arrays) -> bytes:
        """Make samples; return nothing, or what went wrong."""
        try:
            self._fill(samples, epoch, rows)
            return b""
        except PodiumError as error:
            told = {"kind": type(error).__name__, "text": str(error)[: _MAX_ANSWER_BYTES // 8]}
        except Exception:
            told = {"kind": "", "text": traceback.format_exc()[-_MAX_ANSWER_BYTES // 8 :]}
        return json.dumps(told).encode()


def _shared_slots(fields: Mapping[str, Field], num_samples: int) -> list[dict[str, NDArray]]:
    """Return room for pieces of `num_samples`, in memory that forked processes share; it has no name to be left over
    and does not count against the size of /dev/shm."""
    sizes = {name: -(-field.num_bytes * num_samples // 64) * 64 for name, field in fields.items()}
    slots = []
    for _ in range(_SLOTS_EACH):
        memory = mmap.mmap(-1, max(1, sum(sizes.values())))
        start, slot = 0, {}
        for name, of in fields.items():
            count = num_samples * int(np.prod(of.shape, dtype=np.int64))
            slot[name] = np.frombuffer(memory, of.dtype, count, start).reshape(num_samples, *of.shape)
            start += sizes[name]
        slots.append(slot)
    return slots


def _error(told: Mapping[str, str]) -> Exception:
    kinds = {"UserError": UserError, "TrainingFailed": TrainingFailed}
    return kinds.get(told["kind"], RuntimeError)(told["text"])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
