"""What all pages share: embedded data stays data, only the page's own scripts run, plots zoom, read out and redraw."""

import json
import math
import re

import pytest

from podium.ui.page import embedded_json, render_page, short

NASTY = ["</script><script>alert(1)</script>", "<!--<script>", "a & b", "\u2028\u2029", "\udcff", "]]>", "'\"\\"]


def test_embedded_json_holds_any_text_and_ends_no_element():
    text = embedded_json({"names": NASTY, "value": math.nan, "far": -math.inf})
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert text.isascii()
    assert json.loads(text) == {"names": NASTY, "value": None, "far": None}


def test_numbers_are_written_short():
    assert [short(value) for value in (0.123456789, 3.0, 1e-300, math.inf, 123456.0)] == [
        0.12346, 3, 1e-300, None, 123460,
    ]  # fmt: skip


def test_a_page_allows_its_own_scripts_only():
    html = render_page("base.html.j2", "podium.report", title="</title><script>bad()</script>", data={"x": "</script>"})
    assert "<script>bad" not in html
    policy = re.search(r'Security-Policy" content="(.*?)"', html)[1]
    assert "default-src 'none'" in policy.replace("&#39;", "'")
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert "Copyright (c)" in html  # uPlot's licence goes with it


LINES = """() => {
  const x = Array.from({ length: 50 }, (_, i) => i + 1);
  document.querySelector("main").prepend(Podium.element("div", { id: "here" }));
  window.plot = new Podium.Plot(document.getElementById("here"), {
    title: "t <b>", x: { label: "x" }, y: { label: "y" },
    lines: [{ name: "<i>a</i>", x, y: x.map((v) => 1 / v) }, { name: "b", x, y: x.map((v) => 2 / v), colour: "--c1" }],
  });
  plot.show();
}"""


COLOURS = """() => {
  const canvas = plot.plot.ctx.canvas, data = plot.plot.ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
}"""


@pytest.mark.slow
def test_a_plot_zooms_reads_out_and_takes_log_axes(tmp_path, open_page):
    path = tmp_path / "page.html"
    path.write_text(render_page("base.html.j2", "podium.report", title="plots", data={}))
    page = open_page(path)
    page.evaluate(LINES)
    area = page.locator(".plot .area")
    area.focus()
    page.keyboard.press("ArrowRight")
    assert "<i>a</i>: 1" in page.locator(".tip").inner_text()
    page.keyboard.press("+")
    assert page.evaluate("plot.view") == pytest.approx([13.25, 37.75])
    page.keyboard.press("0")
    assert page.evaluate("plot.view") is None
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    page.mouse.up()
    assert page.evaluate("plot.view") == pytest.approx([13.25, 25.5], abs=0.3)
    page.locator(".u-over").dblclick()
    assert page.evaluate("plot.view") is None
    page.evaluate("plot.set({ x: { label: 'x', log: true }, y: { label: 'y', log: true }, smoothing: 0.5 })")
    assert page.evaluate("plot.yrange[0] > 0 && plot.xrange[0] > 0")
    assert page.evaluate(COLOURS) > 5
