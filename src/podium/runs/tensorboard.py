"""TensorBoard's event files: records while a run trains; pictures and histograms of the weights once it has ended."""

import io
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from podium.contract import Picture
from podium.errors import writing
from podium.machine.bounded_files import read_limited, write_new
from podium.runs.appended_file import AppendedFile

Record = Mapping[str, float]
_VERSION = "brain.Event:2"
#: ends the name of the file with pictures and histograms, of which a run has one
_PREDICTION = ".predict"
_BINS = 64
#: a larger picture is none that a browser shows
_MAX_PICTURE_BYTES = 64 << 20


class TensorBoard:
    """Scalars as a TensorBoard event file.

    Written at once, in TensorBoard's own record format. Its event writer waits up to two minutes, and prints a
    traceback from its thread when the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendedFile | None = None
        # Imported before training begins: it takes longer than hundreds of updates of a small model.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import record_writer  # noqa: F401

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2

    def write(self, record: Record) -> None:
        event, value = self._event.Event, self._summary.Summary.Value
        update, now = int(record["update"]), time.time()
        events = []
        if self._file is None:
            self._file = AppendedFile(self._folder / _file_name(now))
            events.append(event(wall_time=now, file_version=_VERSION))
            # Readers drop what an earlier, interrupted part of this run wrote about this update and later ones.
            begin = self._event.SessionLog(status=self._event.SessionLog.START)
            events.append(event(wall_time=now, step=update, session_log=begin))
        values = [value(tag=name, simple_value=number) for name, number in record.items() if "/" in name]
        events.append(event(wall_time=now, step=update, summary=self._summary.Summary(value=values)))
        self._file.append(_framed(events))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def write_prediction(folder: Path, update: int, pictures: Sequence[Picture], model: nn.Module) -> None:
    """Write pictures and a histogram of every parameter as those of `update`, in place of those written before."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    summary, now = summary_pb2.Summary, time.time()
    values = [
        summary.Value(tag=f"predict/{picture.title}", image=_image(summary, picture.path))
        for picture in pictures
        if picture.path.exists()
    ]
    values += [
        summary.Value(tag=f"weights/{name}", histo=_histogram(summary_pb2.HistogramProto, param.detach()))
        for name, param in model.named_parameters()
        if param.numel() > 0 and param.is_floating_point()
    ]
    # No start of a session here, unlike in `TensorBoard`: it would hide the last record, which has the same update.
    events = [event_pb2.Event(wall_time=now, file_version=_VERSION)]
    # One event for each: readers refuse very long ones.
    events += [event_pb2.Event(wall_time=now, step=update, summary=summary(value=[value])) for value in values]
    path = folder / f"{_file_name(now)}{_PREDICTION}"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        before = list(folder.glob(f"*{_PREDICTION}"))
        write_new(path, [_framed(events)])
        for old in before:
            old.unlink()


def _image(summary: Any, path: Path) -> Any:
    data = read_limited(path, _MAX_PICTURE_BYTES)
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
    return summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)


def _histogram(proto: Any, values: Tensor) -> Any:
    values = values.to("cpu", torch.float32).flatten()
    low, high = float(values.min()), float(values.max())
    if low == high:  # all are the same: one bin around them
        high = low + max(abs(low), 1.0) * 1e-6
    counts = torch.histc(values, _BINS, low, high)
    wide = values.double()
    return proto(
        min=float(values.min()),
        max=float(values.max()),
        num=values.numel(),
        sum=float(wide.sum()),
        sum_squares=float(wide.square().sum()),
        bucket_limit=torch.linspace(low, high, _BINS + 1, dtype=torch.float64)[1:].tolist(),
        bucket=counts.double().tolist(),
    )


def _file_name(now: float) -> str:
    return f"events.out.tfevents.{now:.6f}.{socket.gethostname()}"


def _framed(events: Iterable[Any]) -> bytes:
    """Return events in TensorBoard's own record format."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    for one in events:
        RecordWriter(framed).write(one.SerializeToString())
    return framed.getvalue()
