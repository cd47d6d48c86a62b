"""TensorBoard's event files: records while a run trains; pictures and histograms of the weights once it has ended."""

import io
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podium.contract import Prediction
from podium.errors import writing
from podium.machine.bounded_files import read_limited, write_new
from podium.recipe.sections.log import LogSection
from podium.runs.appended_file import AppendedFile
from podium.runs.folder import Run
from podium.ui import console

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

    def write(self, record: Record) -> None:
        # Imported with the first record: a training begins sooner, and this takes as long as many updates of a small
        # model.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        log: Any = event_pb2
        protos: Any = summary_pb2
        event, value = log.Event, protos.Summary.Value
        update, now = int(record["update"]), time.time()
        events = []
        if self._file is None:
            self._file = AppendedFile(self._folder / _file_name(now))
            events.append(event(wall_time=now, file_version=_VERSION))
            # Readers drop what an earlier, interrupted part of this run wrote about this update and later ones.
            begin = log.SessionLog(status=log.SessionLog.START)
            events.append(event(wall_time=now, step=update, session_log=begin))
        values = [value(tag=name, simple_value=number) for name, number in record.items() if "/" in name]
        events.append(event(wall_time=now, step=update, summary=protos.Summary(value=values)))
        self._file.append(_framed(events))

    def close(self, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()


def add_prediction(run: Run, section: LogSection, update: int, prediction: Prediction, model: nn.Module) -> None:
    """Show pictures and a histogram of every parameter in TensorBoard, where the recipe asks for it.

    They are those of `update`, in place of those shown before. Trouble is only warned of.
    """
    if section.tensorboard:
        with console.only_warned("TensorBoard shows no pictures and histograms of this run", Exception):
            _write_prediction(run.tensorboard, update, prediction, model)


def _write_prediction(folder: Path, update: int, prediction: Prediction, model: nn.Module) -> None:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    protos: Any = summary_pb2  # their classes are made when they are imported
    event: Any = event_pb2
    now, values = time.time(), []
    for picture in prediction.pictures:
        if picture.path.exists():
            title = protos.SummaryMetadata(display_name=picture.title)
            image = _image(protos.Summary, picture.path)
            values.append(protos.Summary.Value(tag=f"predict/{picture.path.stem}", metadata=title, image=image))
    for name, param in model.named_parameters():
        if param.is_floating_point() and (shown := _histogram(protos.HistogramProto, param.detach())):
            values.append(protos.Summary.Value(tag=f"weights/{name}", histo=shown))
    # No start of a session here, unlike in `TensorBoard`: it would hide the last record, which has the same update.
    events = [event.Event(wall_time=now, file_version=_VERSION)]
    # One event for each: readers refuse very long ones.
    for value in values:
        events.append(event.Event(wall_time=now, step=update, summary=protos.Summary(value=[value])))
    path = folder / f"{_file_name(now)}{_PREDICTION}"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        before = list(folder.glob(f"*{_PREDICTION}"))
        write_new(path, [_framed(events)])
        for old in before:
            old.unlink()


def write_summaries(folder: Path, summaries: Iterable[Any], update: int) -> None:
    """Write summaries of TensorBoard's plugins as an event file of their own."""
    from tensorboard.compat.proto import event_pb2

    event: Any = event_pb2
    now = time.time()
    events = [event.Event(wall_time=now, file_version=_VERSION)]
    events += [event.Event(wall_time=now, step=update, summary=summary) for summary in summaries]
    path = folder / f"{_file_name(now)}.hparams"
    with writing(path):
        write_new(path, [_framed(events)])


def _image(summary: Any, path: Path) -> Any:
    from PIL import Image

    data = read_limited(path, _MAX_PICTURE_BYTES)
    with Image.open(io.BytesIO(data)) as image:
        (width, height), channels = image.size, len(image.getbands())
    return summary.Image(width=width, height=height, colorspace=channels, encoded_image_string=data)


def _histogram(proto: Any, values: Tensor) -> Any:
    """Return the histogram of a tensor's finite values; None where there are none."""
    values = values.to("cpu", torch.float32).flatten()
    values = values[values.isfinite()]
    if values.numel() == 0:
        return None
    low, high = float(values.min()), float(values.max())
    limit = high if high > low else low + max(abs(low), 1.0) * 1e-6  # all are the same: the first bin has them
    wide = values.double()
    return proto(
        min=low,
        max=high,
        num=values.numel(),
        sum=float(wide.sum()),
        sum_squares=float(wide.square().sum()),
        bucket_limit=torch.linspace(low, limit, _BINS + 1, dtype=torch.float64)[1:].tolist(),
        bucket=torch.histc(wide, _BINS, low, limit).tolist(),
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
