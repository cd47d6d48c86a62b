"""The recipes that come with Podium, by name. Loads nothing heavy."""

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> list[tuple[str, str]]:
    """Return (name, first comment line) of every shipped recipe, sorted by name."""
    found = []
    for path in sorted(SHIPPED.glob("*/*.yaml")):
        name = path.parent.name if path.stem == "default" else f"{path.parent.name}/{path.stem}"
        first = path.read_text(encoding="utf-8").splitlines()[0]
        found.append((name, first.lstrip("# ").strip()))
    return sorted(found)
