"""The README shows what was measured."""

from pathlib import Path

from bench.race.page import show_table

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_last_race():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert show_table(readme, (ROOT / "bench/results/race.md").read_text(encoding="utf-8")) == readme


def test_a_table_replaces_the_one_before():
    page = "# The race\n\nwhen and how\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    readme = "before\n<!-- the race -->\n| old |\n<!-- end of the race -->\nafter\n"
    shown = "before\n<!-- the race -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- end of the race -->\nafter\n"
    assert show_table(readme, page) == shown
    assert show_table(shown, page) == shown
