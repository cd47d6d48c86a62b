"""How large reports are, how long `podium report` takes, and how long a browser needs: 1, 50 and 2,000 runs.

    python -m bench.reports [--out bench/results/reports.md]

The runs are folders as a training writes them, with made-up numbers: 400 records and 40 validations each, 9 metrics,
one picture of 1,200 x 800 pixels in each. The page is opened from its file in headless Chromium, started afresh for
each.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from podium.recipe.loading import load_recipe, to_yaml

_COUNTS = (1, 50, 2000)
_RECORDS, _PER_EPOCH, _ROUNDS = 400, 10, 3
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


def make_runs(folder: Path, count: int) -> None:
    """Write the folders of `count` runs: rates × replicas × seeds."""
    recipe = to_yaml(load_recipe("neuron/quick", []).tree())
    noise = np.random.default_rng(1)
    pixels = np.kron(noise.integers(0, 255, (80, 120, 3), dtype=np.uint8), np.ones((10, 10, 1), dtype=np.uint8))
    picture = folder / "picture.png"
    Image.fromarray(pixels).save(picture)
    for number in range(count):
        path = folder / "runs" / f"{number:04d}"
        (path / "pictures").mkdir(parents=True)
        lr, replicas, seed = 1e-4 * 1.5 ** (number % 10), 2 ** (number // 10 % 5), number // 50
        text = recipe
        for key, value in (("  lr", lr), ("  replicas", replicas), ("seed", seed)):
            text = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, count=1, flags=re.MULTILINE)
        (path / "recipe.yaml").write_text(text)
        floor, rate = 0.02 + 0.01 * abs(math.log(lr / 1e-3)) + 0.002 * replicas, 900.0 * replicas**0.9
        wiggle = noise.normal(0, 0.03, (_RECORDS, 2))
        lines = []
        for index in range(1, _RECORDS + 1):
            epoch = index / _PER_EPOCH
            loss = floor + math.exp(-epoch / 6) * (1 + float(wiggle[index - 1, 0]))
            record = {
                "update": index * 50, "epoch": epoch, "samples": index * 50 * 64 * replicas,
                "train/loss": loss, "train/lr": lr * (1 - index / (_RECORDS + 1)),
                "train/samples_per_second": rate * (1 + float(wiggle[index - 1, 1])),
                "time/input_wait_s": 0.001 * abs(float(wiggle[index - 1, 1])), "time/total_s": epoch * 2e4 / rate,
                "device/cpu_percent": 95 + 10 * float(wiggle[index - 1, 1]), "train/mae": loss / 2,
            }  # fmt: skip
            if index % _PER_EPOCH == 0:
                record |= {"valid/loss": loss * 1.1, "valid/mae": loss * 0.6}
            lines.append(json.dumps(record))
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        total = _RECORDS / _PER_EPOCH * 2e4 / rate
        summary: dict[str, Any] = {
            "state": "done", "updates": _RECORDS * 50, "total_updates": _RECORDS * 50, "epochs": _RECORDS / _PER_EPOCH,
            "samples": _RECORDS * 50 * 64 * replicas, "samples_per_second": rate, "cpu_percent": 96.0,
            "valid": {"last": {"loss": floor * 1.1}, "best": {"loss": floor * 1.1, "update": _RECORDS * 50}},
            "seconds": {"startup": 2.0, "train": total - 6, "valid": 4.0, "total": total}, "num_parameters": 431_683,
            "topology": {"hosts": 1, "instances": replicas, "replicas": replicas, "stages": 1},
            "weights_sha256": f"{number:064x}", "recipe_sha256": f"{number:064x}",
            "written": "2026-01-01T00:00:00+00:00",
        }  # fmt: skip
        (path / "summary.json").write_text(json.dumps(summary))
        environment = {"started": "2026-01-01T00:00:00+00:00", "device": "cpu", "threads_per_replica": 1}
        (path / "environment.json").write_text(json.dumps(environment))
        shutil.copy(picture, path / "pictures" / "picture.png")
        listed = {"pictures": [{"title": "A picture", "path": "picture.png", "caption": ""}], "tables": []}
        (path / "pictures" / "prediction.json").write_text(json.dumps(listed))


def write_page(folder: Path, file: Path) -> float:
    """Run `podium report` and return how many seconds it took."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "podium", "report", str(folder), "--out", str(file), "--target", "valid/loss=0.05"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


#: milliseconds until the page is loaded, until all of it is drawn, and for a filter, an axis and a zoom to be drawn
_TIMES = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const took = async (action) => {
    const began = performance.now();
    action();
    await frame();
    await frame();
    return performance.now() - began;
  };
  const loaded = performance.getEntriesByType("navigation")[0].loadEventEnd;
  const drawn = await took(() => Podium.plots.forEach((plot) => plot.show()));
  const over = document.getElementById("axis");
  over.value = "seconds";
  const axis = await took(() => over.dispatchEvent(new Event("change")));
  const zoom = await took(() => document.getElementById("closer").click());
  const filter = document.getElementById("filter");
  let filtered = null;
  if (filter) {
    const many = document.getElementById("count").textContent;
    const began = performance.now();
    filter.value = "replicas=4"; filter.dispatchEvent(new Event("input"));
    while (document.getElementById("count").textContent === many) await frame();
    await frame();
    filtered = performance.now() - began;
  }
  return { loaded, drawn, axis, zoom, filtered };
}"""


def times_in_browser(file: Path) -> dict[str, float | None]:
    """Return the milliseconds that a new browser needs for a page, medians of several."""
    from playwright.sync_api import sync_playwright

    found = []
    for _ in range(_ROUNDS):
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(file.resolve().as_uri(), timeout=120_000)
            found.append(page.evaluate(_TIMES))
            browser.close()
    names = found[0]
    return {name: None if names[name] is None else statistics.median(one[name] for one in found) for name in names}


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/reports.md"))
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for count in _COUNTS:
            folder = Path(temporary) / str(count)
            folder.mkdir()
            make_runs(folder, count)
            file = folder / "report.html"
            seconds = write_page(folder / "runs", file)
            times = times_in_browser(file)
            shown = ["–" if value is None else f"{value:,.0f} ms" for value in times.values()]
            rows.append([f"{count:,}", f"{file.stat().st_size / 1e6:.2f} MB", f"{seconds:.1f} s", *shown])
            print(" | ".join(rows[-1]), flush=True)
            shutil.rmtree(folder)
    columns = ["runs", "page", "`podium report`", "loaded", "all plots drawn", "another axis", "zoom", "filter"]
    lines = [" | ".join(cells) for cells in (columns, ["---:"] * len(columns), *rows)]
    table = "\n".join(f"| {line} |" for line in lines)
    how = f"{platform.machine()}, {os.cpu_count()} cores, headless Chromium without a GPU, medians of {_ROUNDS}"
    what = f"Each run has {_RECORDS} records of 9 metrics and one picture."
    out.write_text(f"# Reports\n\nMeasured on {how}; [how](../reports.py). {what}\n\n{table}\n")


if __name__ == "__main__":
    main()
