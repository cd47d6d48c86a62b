"""The live line of a run, laid out for the width of the terminal: rate and time left are always on it."""

from collections.abc import Mapping

from rich.text import Text

_WIDEST_BAR, _NARROWEST_BAR = 24, 4
#: what stays on the line however narrow the terminal is
_ALWAYS = ("samples/s", "left")


def facts_text(facts: Mapping[str, str]) -> str:
    """Return facts as they stand on one line."""
    return "  ".join(f"{name} {value}" for name, value in facts.items())


def progress_line(what: str, share: float, facts: Mapping[str, str], width: int, *, ascii_only: bool = False) -> Text:
    """Return a line of at most `width` characters, with `share` (0 to 1) as a bar.

    Where it is too long the bar shrinks first, then facts go, the last ones first, then the bar, then `what`.
    """
    percent, shown = f"{100 * share:3.0f}%", dict(facts)

    def room_for_bar() -> int:
        return width - len(f"{what}  {percent}  {facts_text(shown)}")

    for name in reversed([name for name in facts if name not in _ALWAYS]):
        if room_for_bar() < _NARROWEST_BAR and len(shown) > 1:  # a single fact is cut off rather than left out
            del shown[name]
    room = room_for_bar()
    line = Text(no_wrap=True)
    if room >= -1:  # without a bar it needs one space less
        line.append(f"{what} ", "bold")
    if room >= _NARROWEST_BAR:
        bar = min(_WIDEST_BAR, room)
        done = round(bar * share)
        line.append(("-" if ascii_only else "━") * done, "cyan")
        line.append((" " if ascii_only else "━") * (bar - done), "grey23").append(" ")
    line.append(f"{percent}  {facts_text(shown)}")
    line.truncate(width, overflow="ellipsis")
    return line
