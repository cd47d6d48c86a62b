"""The report in a real browser: what a person does with it works, looks like something, and runs no code of a run."""

import io
import re
import time
from pathlib import Path

import pytest
from PIL import Image

from podium.report.page import StudyView, compare, write_report
from podium.report.reading import find_runs, read_runs
from podium.report.solution import Target
from podium.runs.folder import open_run
from tests.support.made_runs import make_run

pytestmark = pytest.mark.slow

NASTY = "<script>hacked=1<"
WORSE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Rates × replicas with two seeds, one of them failed; two have names that would be code if they were markup."""
    folder = tmp_path_factory.mktemp("pages") / "runs"
    number = 0
    for lr in (5e-4, 1e-3, 2e-3):
        for replicas in (1, 2, 4):
            for seed in (1, 2):
                name = {0: NASTY, 1: "a&amp;b"}.get(number, f"{number:04d}")
                best = 0.05 + abs(lr - 1e-3) * 40 + 0.02 * replicas + 0.003 * seed
                make_run(
                    folder / name,
                    [f"optim.lr={lr}", f"batch.replicas={replicas}", f"seed={seed}", f"log.project={WORSE}"],
                    losses=[1.0, 0.5, 0.3, best], instances=replicas, rate=900.0 * replicas**0.9,
                    seconds_per_epoch=20 / replicas**0.9, picture=WORSE if number < 12 else "",
                    state="failed" if number == 17 else "done",
                )  # fmt: skip
                number += 1
    return folder


@pytest.fixture(scope="module")
def many(runs) -> Path:
    view = StudyView(["optim.lr", "batch.replicas"], {"optim.lr": 0.7, "batch.replicas": 0.3}, f"a study {WORSE}")
    found = read_runs(find_runs([runs]), pytest.fail)
    file = runs.parent / "many.html"
    write_report(compare(found, Target("valid/loss", 0.12), view), file, f"scan {WORSE}", ["podium", "report", WORSE])
    return file


@pytest.fixture(scope="module")
def one(runs) -> Path:
    file = runs.parent / "one.html"
    write_report(compare(read_runs([open_run(runs / NASTY)], pytest.fail)), file, NASTY)
    return file


def picture(page, *, whole: bool = False) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")


def until(page, condition: str) -> None:
    """Waits for a condition. Playwright's own way evaluates a string in the page, which its policy forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def rows(page) -> list[str]:
    return page.locator("#runs tbody tr td:first-child").all_inner_texts()


def column(page, name: str) -> list[str]:
    heads = page.locator("#runs th").all_inner_texts()
    return page.locator(f"#runs tbody tr td:nth-child({heads.index(name) + 1})").all_inner_texts()


def test_the_table_sorts_filters_and_leads_the_curves(many, open_page):
    page = open_page(many)
    assert page.locator("#count").inner_text() == "18 of 18 runs"
    best = [float(value) for value in column(page, "best valid/loss")]
    assert best == sorted(best)
    page.get_by_role("button", name="samples/s").click()
    assert page.locator("#runs th[aria-sort=ascending]").inner_text() == "samples/s"
    page.get_by_role("button", name="samples/s").click()
    assert column(page, "samples/s")[0] == "3,134"
    page.locator("#filter").fill("replicas>=2 lr<1e-3")
    until(page, "document.getElementById('count').textContent.startsWith('4 ')")
    until(page, "Curves.made[0].plot.options.lines.length === 4")
    page.locator("#runs tbody input").first.uncheck()
    until(page, "Curves.made[0].plot.options.lines.length === 3")
    page.locator("#filter").fill("failed")
    until(page, "document.getElementById('count').textContent.startsWith('1 ')")
    assert rows(page)[0].strip() == "0017"


def test_axes_switch_and_all_curves_zoom_together(many, open_page):
    page = open_page(many)
    loss = "Curves.made.find(({ chart }) => chart.title === 'valid/loss').plot"
    page.locator("#metrics").scroll_into_view_if_needed()  # what is out of sight is not drawn
    assert page.evaluate(f"{loss}.options.x.label") == "epochs"
    for axis, last in (("update", 80), ("samples", 5120), ("seconds", 80), ("epoch", 4)):
        page.locator("#axis").select_option(axis)
        until(page, f"Math.max(...{loss}.options.lines.map((line) => line.x[line.x.length - 1])) === {last}")
    page.locator("#scale").select_option("log")
    until(page, f"{loss}.options.y.log && {loss}.plot")
    page.locator("#closer").click()
    views = page.evaluate("Curves.made.map(({ plot }) => plot.view && plot.view.map((at) => at.toFixed(2)).join())")
    assert len(set(views)) == 1
    assert views[0] is not None
    page.locator("#all").click()
    assert page.evaluate("Curves.made.every(({ plot }) => plot.view === null)")
    page.locator("#smoothing").fill("0.8")
    until(page, f"{loss}.options.smoothing === 0.8")
    page.locator("#metrics .area").first.focus()
    page.keyboard.press("ArrowRight")
    assert re.search(r"epochs 1\n.*: \d", page.locator("#metrics .tip").first.inner_text())


def test_two_keys_parallel_coordinates_and_scaling_are_shown(many, open_page):
    page = open_page(many)
    table = page.locator("#pivot table")
    assert table.locator("thead th").all_inner_texts() == ["replicas \\ lr", "5e-4", "0.001", "0.002"]
    assert table.locator("tbody th").all_inner_texts() == ["1", "2", "4"]
    assert table.locator("tbody b").count() == 3
    assert page.locator("#parallel svg path").count() == 18
    assert page.locator("#scaling-plots .area").count() == 2
    assert "87 %" in page.locator("#scaling table").inner_text()
    assert "core-hours" in page.locator("#solution").inner_text()
    assert "not reached" in page.locator("#solution").inner_text()


@pytest.mark.parametrize("width", [400, 1400])
def test_labels_of_parallel_coordinates_are_whole_and_do_not_lie_on_each_other(many, open_page, width):
    page = open_page(many, width=width)
    assert page.evaluate(
        """(() => {
          const outside = document.querySelector('#parallel svg').getBoundingClientRect();
          const boxes = [...document.querySelectorAll('#parallel text')].map((one) => one.getBoundingClientRect());
          const within = (box) => box.left >= outside.left - 1 && box.right <= outside.right + 1;
          const beside = (a, b) => a.right <= b.left || a.bottom <= b.top + 2;
          const apart = (a, b) => beside(a, b) || beside(b, a);
          return boxes.length > 6 && boxes.every((a, i) => within(a) && boxes.slice(i + 1).every((b) => apart(a, b)));
        })()"""
    )


def test_names_and_values_that_look_like_code_are_shown_as_text(many, one, open_page):
    for path in (many, one):
        page = open_page(path)
        assert page.evaluate("typeof hacked") == "undefined"
        assert NASTY in page.inner_text("body")
        assert page.evaluate("[...document.scripts].every((script) => !script.textContent.startsWith('hacked'))")
        assert page.locator("img[src=x]").count() == 0
    assert WORSE in open_page(many).inner_text("h1")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_screenshot_is_neither_blank_nor_of_the_wrong_theme(many, one, open_page, dark):
    for path in (many, one):
        page = open_page(path, dark=dark)
        page.evaluate("Podium.plots.forEach((plot) => plot.show())")
        shown = picture(page)
        assert shown.size == (1400, 900)
        assert len(shown.getcolors(1 << 24)) > 200
        assert (sum(shown.getpixel((5, 450))) < 200) is dark
        plots = page.locator("#metrics canvas").first
        drawn = Image.open(io.BytesIO(plots.screenshot())).convert("RGB")
        background = drawn.getpixel((drawn.width - 3, 3))
        inked = sum(count for count, colour in drawn.getcolors(1 << 24) if colour != background)
        assert 0.01 < inked / (drawn.width * drawn.height) < 0.5


def test_the_theme_can_be_switched_with_the_keyboard(one, open_page):
    page = open_page(one)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert sum(picture(page).getpixel((5, 450))) < 200


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_makes_the_page_scroll_sideways(many, one, open_page, width):
    for path in (many, one):
        page = open_page(path, width=width)
        page.evaluate("Podium.plots.forEach((plot) => plot.show())")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(
            "[...document.querySelectorAll('section')].every((one) => one.scrollWidth <= one.clientWidth + 1)"
        )


def test_a_printed_page_has_its_plots_on_white(many, open_page):
    page = open_page(many, dark=True)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("[...Podium.plots].every((plot) => plot.plot)")
    assert not page.locator(".controls").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_page_needs_nothing_from_elsewhere(many):
    html = many.read_text()
    assert many.stat().st_size < 3_000_000
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html)
