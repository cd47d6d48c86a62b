"""`podium recipes`: what is shipped, all or some. Loads no torch."""

from collections.abc import Sequence

from podium.errors import UserError
from podium.recipe.messages import did_you_mean
from podium.recipe.shipped import shipped_recipes
from podium.ui.console import show_table
from podium.ui.table import Table
from podium.workloads.registry import announced


def list_recipes(words: Sequence[str]) -> None:
    """List the shipped recipes whose name or first line has all of the words."""
    shipped = shipped_recipes()
    found = [
        [name, about] for name, about in shipped if all(word.lower() in f"{name} {about}".lower() for word in words)
    ]
    if not found:
        known = {part for name, _ in shipped for part in (name, *name.split("/"))}
        hint = next(filter(None, (did_you_mean(word, known) for word in words)), "")
        raise UserError(f"no shipped recipe has {' '.join(words)}{hint or ' (`podium recipes` lists them all)'}")
    others = [f"{name} ({point.dist.name})" if point.dist is not None else name for name, point in announced().items()]
    note = f"Workloads of installed packages, for recipes of your own: {', '.join(others)}" if others else ""
    show_table(Table("", ["recipe", "what it does"], found, note))
