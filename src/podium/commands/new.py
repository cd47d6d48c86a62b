"""`podium new`: a folder with a workload of one's own that trains at once. Loads no torch."""

import keyword
import shutil
import sys
from pathlib import Path

from podium.errors import UserError, writing
from podium.recipe.messages import did_you_mean
from podium.ui.console import out
from podium.workloads.registry import WORKLOADS

_TEMPLATES = Path(__file__).parents[1] / "templates"
KINDS = ("regression", "classification", "language", "images")


def new(name: str, kind: str) -> None:
    """Write a folder `name` with workload, recipe, README and test, or nothing."""
    if kind not in KINDS:
        raise UserError(f"--like {kind}: expected one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    folder = Path(name)
    stem = folder.name
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise UserError(f"{stem!r} cannot be the name of a Python file: use letters, digits and _, as in my_model")
    if stem in sys.stdlib_module_names or stem in WORKLOADS or stem in ("podium", "torch", "numpy"):
        raise UserError(f"{stem} is the name of something else already: choose another, such as my_{stem}")
    if folder.exists():
        raise UserError(f"{folder} already exists: choose another name")
    source = (_TEMPLATES / f"{kind}.py.txt").read_text(encoding="utf-8")
    about = source.splitlines()[0].removeprefix('"""NAME: ').removesuffix('"""')
    about = about[0].upper() + about[1:]
    words = {"NAME": stem, "CLASS": "".join(part.capitalize() for part in stem.split("_")), "ABOUT": about}
    files = {
        f"{stem}.py": source,
        f"{stem}.yaml": _template("recipe.yaml.txt"),
        "README.md": _template("README.md.txt"),
        f"test_{stem}.py": _template("test.py.txt"),
    }
    try:
        with writing(folder):
            folder.mkdir(parents=True)
            for file, text in files.items():
                for word, replacement in words.items():
                    text = text.replace(word, replacement)
                (folder / file).write_text(text, encoding="utf-8")
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    out.print(f"{folder}: {', '.join(files)}", soft_wrap=True)
    out.print(f"next: cd {folder} && podium train {stem}.yaml", soft_wrap=True)


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
