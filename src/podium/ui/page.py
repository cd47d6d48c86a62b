"""Self-contained HTML pages: one look, one plotting library, data embedded so that it stays data.

A page is a template that extends `base.html.j2` and lives beside whoever writes it, its numbers, which its scripts get
with `Podium.data()`, and its scripts. Files for all pages are in `pages`: the style, what
scripts share (`page.js`), the plots (`plots.js`), uPlot.

Nothing is loaded from elsewhere, and no script runs but those written into the page here, whatever a name or a value
contains: the page's Content-Security-Policy lists their checksums.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from podium import __version__

_PAGES = Path(__file__).with_name("pages")


def render_page(
    template: str,
    package: str,
    *,
    title: str,
    data: Mapping[str, Any],
    scripts: Sequence[str] = (),
    live: bool = False,
    **context: Any,
) -> str:
    """Return the page of a template in the folder `templates` of a package, as HTML.

    `data` is for `Podium.data()` in `scripts`, which are files beside the template. `live`: they may ask the server
    that the page came from.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("podium.ui", "pages")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loader = environment.loader
    assert loader is not None
    own = [loader.get_source(environment, name)[0] for name in scripts]
    theme, all_scripts = _shared("theme.js"), [_uplot(), _shared("page.js"), _shared("plots.js"), *own]
    return environment.get_template(template).render(
        title=title,
        version=__version__,
        policy=_policy([theme, *all_scripts], live=live),
        uplot_css=Markup(_shared("uplot/uPlot.min.css")),
        css=Markup(_shared("page.css")),
        theme_js=Markup(theme),
        scripts=[Markup(script) for script in all_scripts],
        data=embedded_json(data),
        **context,
    )


def embedded_json(value: Any) -> Markup:
    """Return JSON that may stand in a `<script>`: no text in it can end that. What is not finite becomes null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    # Non-ASCII characters, among them U+2028 and halves of characters, are escaped by `json` already.
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def embedded_image(data: bytes, kind: str = "png") -> str:
    """Return an image as the address of an `<img>`."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def short(value: float, digits: int = 5) -> float | int | None:
    """Return a number with few digits, as short as it can be written; None where it is not finite."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _policy(scripts: Sequence[str], *, live: bool) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _uplot() -> str:
    """Return uPlot with its licence, which has to be in every copy."""
    licence = "".join(f"// {line}\n" for line in _shared("uplot/LICENSE").strip().splitlines())
    return f"{licence}{_shared('uplot/uPlot.iife.min.js')}"


@cache
def _shared(name: str) -> str:
    return (_PAGES / name).read_text(encoding="utf-8")
