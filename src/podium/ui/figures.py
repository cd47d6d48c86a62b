"""One look for every picture. Matplotlib's object interface, no pyplot: no global state, no display needed."""

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from matplotlib import rc_context, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
ACCENT, SECOND, THIRD, FOURTH = "#2563eb", "#e4572e", "#0f9d78", "#a855f7"
PALETTE = (ACCENT, SECOND, THIRD, FOURTH)

_STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.constrained_layout.use": True,
}


def style() -> AbstractContextManager[None]:
    """Return the look of all pictures: `with style(): ...` around everything that draws."""
    context: AbstractContextManager[None] = rc_context(cast(Any, _STYLE))
    return context


def figure(width: float = 9.0, height: float = 5.0, *, arranged: bool = True) -> Figure:
    """Return an empty figure, in inches; use inside `style()`. Unless `arranged`, everything stays where it is put,
    and is drawn once instead of twice."""
    with rc_context({"figure.constrained_layout.use": arranged}):
        fig = Figure(figsize=(width, height), dpi=130)
    FigureCanvasAgg(fig)
    return fig


def save(fig: Figure, path: Path) -> Path:
    """Write the figure as a PNG file, with its folder where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, facecolor="white")
    return path


def to_svg(fig: Figure, name: str) -> str:
    """Return the figure as an `<svg>` element for a page: it fits any width, and follows the page's colours.

    `name` sets it apart from other figures of the page.
    """
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})  # inside `style()`, which restores them
    file = io.StringIO()
    fig.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    for colour, variable in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--line"), (ACCENT, "--accent")):
        text = text.replace(colour, f"var({variable})")
    return text[text.index("<svg") :]
