"""The card that a certificate is: JSON with a checksum of itself, and a page that shows it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.errors import UserError
from podium.machine.atomic_files import write_files
from podium.machine.bounded_files import read_mapping
from podium.ui.page import render_page

CHECKSUM = "sha256"


def with_checksum(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card with the checksum of everything else in it."""
    body = {key: value for key, value in card.items() if key != CHECKSUM}
    return {**body, CHECKSUM: hashlib.sha256(_text(body).encode()).hexdigest()}


def write_card(folder: Path, card: Mapping[str, Any]) -> Path:
    """Write `card.json` and `card.html`; return the page's path."""
    card = with_checksum(card)
    page = render_page("card.html.j2", "podium.certify", title="Certificate", data={}, card=card)
    with write_files(folder / "card.json", folder / "card.html") as (as_json, as_page):
        text = json.dumps(card, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        as_json.write_text(text, encoding="utf-8")
        as_page.write_text(page, encoding="utf-8")
    return folder / "card.html"


def read_card(path: Path) -> dict[str, Any]:
    """Return the card in a file; raise UserError unless it is whole, as it was written."""
    card = read_mapping(path, "a card is what `podium certify` writes")
    if card is None:
        raise UserError(f"{path} does not exist: a card is what `podium certify` writes")
    if card.get(CHECKSUM) != with_checksum(card)[CHECKSUM]:
        raise UserError(f"{path} is not as `podium certify` wrote it: its checksum is another one")
    return card


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
