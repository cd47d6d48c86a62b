"""`podium certify`: what somebody with hardware runs once, and sends: does it keep the promises there, and how fast.

On a machine without an accelerator it certifies the processor, and says so.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch

from podium import __version__
from podium.certify.card import write_card
from podium.certify.parts import PRECISIONS, Found, operators, rates, rates_together, trainings
from podium.certify.recipes import WORKLOADS
from podium.errors import UserError
from podium.machine import processor
from podium.machine.determinism import set_determinism
from podium.machine.device import accelerator_facts, device_name, num_devices, resolve_device, use_device
from podium.topology import usable_cores
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table

_COUNTS = (1, 2, 4)


def certify(workloads: Sequence[str], out: Path, precisions: Sequence[str], seconds: float) -> bool:
    """Try everything, print a table, and write the card in the new folder `out`; return whether all is kept."""
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        raise UserError(f"there is no workload {unknown[0]}: expected some of {', '.join(WORKLOADS)}")
    if unknown := [name for name in precisions if name not in PRECISIONS]:
        raise UserError(f"--precision {unknown[0]}: expected some of {', '.join(PRECISIONS)}")
    if out.exists():
        raise UserError(f"--out {out}: it already exists, choose another name")
    device = use_device(resolve_device("auto"))
    num_there = num_devices("auto") or len(usable_cores())
    counts = [num for num in _COUNTS if num <= num_there]
    workloads, precisions = list(workloads) or list(WORKLOADS), list(precisions) or list(PRECISIONS)
    if device.type == "cpu":
        console.say("torch finds no accelerator here: the card will be that of the processor")
    set_determinism(device, exact=True, tf32=False)
    card: dict[str, Any] = {
        "podium": __version__,
        "torch": torch.__version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "on_accelerator": device.type != "cpu",
        "device": processor.name() if device.type == "cpu" else device_name(device),
        "num_devices": num_there,
        "accelerator": accelerator_facts(device),
        "counts": counts,
    }
    found: list[Found] = []
    speeds: dict[str, dict[str, float]] = {}
    total = len(workloads) * (2 * len(precisions) + 1)
    with (
        tempfile.TemporaryDirectory(prefix="podium-certify-") as temporary,
        console.progress_display(what="certifying") as display,
    ):
        done = _counted(display.update, total)
        for workload in workloads:
            for precision in precisions:
                found.append(operators(workload, precision))
                done("operators of", f"{workload} {precision}")
                found += trainings(workload, precision, counts, Path(temporary, f"{workload}-{precision}"))
                done("trained", f"{workload} {precision}")
            speeds[workload] = {f"one, {name}": rate for name, rate in rates(workload, seconds).items()}
            if (most := counts[-1]) > 1:
                together = rates_together(workload, most, Path(temporary, f"{workload}-rates"))
                speeds[workload] |= {f"{most} instances, {name}": rate for name, rate in together.items()}
            done("measured", workload)
    good = all(one.good for one in found)
    card |= {"kept": good, "found": [asdict(one) for one in found], "samples_per_second": speeds}
    out.mkdir(parents=True)
    page = write_card(out, card)
    _tell(card, found, speeds, page)
    return good


def _counted(update: Callable[..., None], total: int) -> Callable[[str, str], None]:
    """Return what tells the display that one more of `total` is done."""
    numbers = count(1)
    return lambda what, of: update(next(numbers), total, {what: of})


def _tell(card: dict[str, Any], found: list[Found], speeds: dict[str, dict[str, float]], page: Path) -> None:
    of = "accelerator" if card["on_accelerator"] else "processor, as torch finds no accelerator here"
    rows = []
    for workload, speed in speeds.items():
        mine = [one for one in found if one.workload == workload]
        bad = next((one for one in mine if not one.good), None)
        kept = f"{sum(one.good for one in mine)} of {len(mine)}"
        shown = f"{bad.precision}: {bad.question}: no, {bad.text}" if bad else ""
        rows.append([workload, kept, *(number(speed[f"one, {name}"]) for name in ("exact", "fast")), shown])
    console.show_table(
        Table(
            f"{card['device']}, {card['num_devices']} of them",
            ["workload", "promises kept", "samples/s exact", "fast", ""],
            rows,
            f"a card of the {of}: {page} and card.json beside it",
        )
    )
