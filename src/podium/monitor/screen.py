"""A view of a run, laid out for a terminal of any size. Most important first; what has no room is left out."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from podium.monitor.figures import bytes_text, measured, missing
from podium.monitor.view import InstanceRow, View
from podium.ui.console import clock_text, number
from podium.ui.curves import Curve, draw_curves
from podium.ui.visible import visible

_STATES = {"running": "bold cyan", "done": "bold green", "not started": "dim"}
_BAD = "bold red"
_COLOURS = ("cyan", "yellow", "magenta", "green")
#: a second drawing stands beside the first from this width on
_TWO_DRAWINGS = 110
_LEAST_DRAWING, _MOST_DRAWING = 6, 18
_LEAST_LOG = 3
#: how busy the host of instance 0 was, drawn after the metrics
_BUSY = {
    "system/cpu_percent": "processor, %",
    "system/accelerator_percent": "accelerator, %",
    "system/power_w": "power, W",
}
#: lines of a terminal that has room for why figures are unknown
_REASONS_FROM = 20


class Screen:
    """What is drawn: a view in `height` lines, or as many as it needs."""

    def __init__(self, view: View, height: int | None = None, help_text: str = "") -> None:
        self._view, self._height, self._help = view, height, help_text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, width = self._view, options.max_width
        height = self._height or 60
        head = _head(view, width, options.ascii_only)
        figures = _figures(view, width, reasons=height >= _REASONS_FROM)[: max(0, height - len(head) - 1)]
        left = height - len(head) - len(figures) - (1 if self._help else 0)
        # Half of the rest for curves, then instances, then the log.
        drawing = max(_LEAST_DRAWING, min(_MOST_DRAWING, left // 2))
        drawn = _drawings(view, width, drawing, options.ascii_only) if left >= _LEAST_DRAWING else []
        left -= len(drawn)
        num_rows = max(0, min(len(view.rows), left - 2 - (_LEAST_LOG if left > 8 else 0)))
        instances = _instances(view, num_rows, width) if num_rows else None
        left -= num_rows + 1 if instances else 0
        lines: list[RenderableType] = [*head, *drawn]
        if instances:
            lines.append(instances)
        if view.waiting and left > 0:
            lines.append(_cut(Text(view.waiting, "yellow" if "wait for" in view.waiting else "dim"), width))
            left -= 1
        lines += figures
        log = view.log[-max(0, left - 1) :] if left > 1 else []
        if log:
            lines.append(Text("log", "dim"))
            lines += [_cut(Text(line, "dim"), width) for line in log]
        if self._help:
            lines += [Text("")] * max(0, left - 1 - len(log)) if not log else []
            lines.append(_cut(Text(self._help, "dim"), width))
        yield from lines


def _head(view: View, width: int, ascii_only: bool) -> list[Text]:
    first = Text(no_wrap=True)
    first.append(f"{view.name}  ", "bold").append(view.state, _STATES.get(view.state, _BAD))
    if view.total_updates:
        share = min(1.0, view.update / view.total_updates)
        bar = max(4, min(24, width - len(first) - 45))
        done = round(bar * share)
        first.append("  ").append(("#" if ascii_only else "━") * done, "cyan")
        first.append(("-" if ascii_only else "━") * (bar - done), "grey37")
        first.append(f" {share:4.0%}  update {view.update:,} of {view.total_updates:,}")
    facts = []
    if view.samples_per_second:
        facts.append(f"{number(view.samples_per_second)} samples/s")
    if view.left_s is not None:
        facts.append(f"{clock_text(view.left_s)} left")
    if view.epoch is not None:
        facts.append(f"epoch {view.epoch:.4g}")
    for split in ("train", "valid"):
        names = [name for name in view.last if name.startswith(f"{split}/")]
        facts += [
            f"{split} {visible(name.partition('/')[2])} {number(view.last[name])}"
            for name in names
            if name not in ("train/lr", "train/samples_per_second")
        ]
    lines = [_cut(first, width), _cut(Text("  ".join(facts)), width)]
    return [*lines, _cut(Text(view.sentence, _BAD), width)] if view.sentence else lines


def drawings_of(view: View) -> list[tuple[str, list[Curve]]]:
    """Return what is drawn: the losses first, then the other metrics, each of training and validation together."""
    names: dict[str, list[Curve]] = {"loss": []}
    for name, points in view.curves.items():
        split, _, metric = name.partition("/")
        if split in ("train", "valid") and points:
            known = names.setdefault(metric, [])
            if len(known) < len(_COLOURS):
                known.append(Curve(visible(f"{split} {metric}"), points, _COLOURS[len(known)]))
        elif name in _BUSY and points:
            names.setdefault(_BUSY[name], []).append(Curve(_BUSY[name], points))
    order = {"loss": 0, "samples_per_second": 1, "lr": 2, **dict.fromkeys(_BUSY.values(), 3)}
    return sorted(
        ((name, curves) for name, curves in names.items() if curves), key=lambda pair: order.get(pair[0], 1.5)
    )


def _drawings(view: View, width: int, height: int, ascii_only: bool) -> list[RenderableType]:
    found = drawings_of(view)[: 2 if width >= _TWO_DRAWINGS else 1]
    if not found:
        return [Text("no records yet", "dim")]
    each = (width - 2 * (len(found) - 1)) // len(found)
    drawn = [draw_curves(curves, each, height, "update", ascii_only=ascii_only) for _, curves in found]
    lines: list[RenderableType] = []
    for parts in zip(*drawn, strict=True):
        line = Text(no_wrap=True)
        for part in parts[:-1]:
            part.pad_right(each + 2 - len(part))
            line.append_text(part)
        lines.append(_cut(line.append_text(parts[-1]), width))
    return lines


def _instances(view: View, count: int, width: int) -> Table:
    """Return the table of instances; columns that have no room are left out."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    several = len({row.host for row in view.rows}) > 1
    columns = ["instance", "host", "doing", "own samples/s", "compute", "waits", "input", "processor", "memory"]
    if width < 70:
        columns = columns[:7] if width >= 60 else ["instance", "doing", "compute", "waits", "input"]
    if not several and 60 <= width < 76:
        columns.remove("host")
    for name in columns:
        table.add_column(name, justify="left" if name in ("host", "doing") else "right", no_wrap=True)
    waited_for = min(view.rows, key=lambda row: row.waits).index if len(view.rows) > 1 else -1
    for row in _chosen(view.rows, count):
        cells = {
            "instance": str(row.index),
            "host": row.host[:20],
            "doing": f"silent {row.silent_s:.0f} s" if row.silent_s else row.doing,
            "own samples/s": "–" if row.rate is None else number(row.rate),
            "compute": f"{row.compute:.0%}",
            "waits": f"{row.waits:.0%}",
            "input": f"{row.input_wait:.0%}",
            "processor": "–" if row.cpu_percent is None else f"{row.cpu_percent:.0f} %",
            "memory": "–" if row.memory_bytes is None else bytes_text(row.memory_bytes),
        }
        style = "red" if row.silent_s else "yellow" if row.index == waited_for and "wait for" in view.waiting else ""
        table.add_row(*(cells[name] for name in columns), style=style)
    return table


def _chosen(rows: Sequence[InstanceRow], count: int) -> list[InstanceRow]:
    """Return as many rows as there is room for: first the silent ones, then those that others wait for."""
    ranked = sorted(rows, key=lambda row: (-row.silent_s, row.waits, row.index))
    return sorted(ranked[:count], key=lambda row: row.index)


def _figures(view: View, width: int, *, reasons: bool) -> list[Text]:
    """Return the figures of up to three hosts; what is unknown only of a single one, as there the reasons fit."""
    lines = []
    for host, values, unknown in view.figures[:3]:
        named = [visible(host)] if len(view.figures) > 1 else []
        lines += _filled([*named, *(f"{name} {value}" for name, value in measured(values))], width)
        if len(view.figures) == 1 and reasons:
            for names, reason in missing(values, unknown):
                lines.append(_cut(Text(f"unknown: {names}: {visible(reason)}", "dim"), width))
    return lines


def _filled(parts: Sequence[str], width: int) -> list[Text]:
    """Return the parts on as few lines as they take."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        lines[-1:] = [longer] if len(longer) <= width else [lines[-1], part]
    return [_cut(Text(line), width) for line in lines]


def _cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text
