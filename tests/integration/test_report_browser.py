"""Reports in a real browser: they run under their own policy, answer the pointer, fit a telephone.

Skipped where no Chromium is installed.
"""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagleray.platform.report import write_report
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), "")
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")

HOVER = """
var plot = document.querySelectorAll(".plot")[1];
var box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", {
  clientX: box.left + box.width * 0.75, clientY: box.top + box.height / 2
}));
var said = { tip: plot.querySelector(".tip").textContent, title: document.title,
  dots: plot.querySelectorAll(".pointer circle").length };
document.body.setAttribute("data-said", JSON.stringify(said));
"""
MEASURE = """
var wide = Array.from(document.querySelectorAll("main *")).filter(function (one) {
  return !one.closest(".scroll, pre, svg") && one.getBoundingClientRect().right > innerWidth + 1;
}).map(function (one) { return one.className || one.tagName; });
var shown = Array.from(document.querySelectorAll("svg.chart")).filter(function (one) {
  return one.getBoundingClientRect().width > 0;
}).map(function (one) { return one.classList.contains("narrow"); });
parent.postMessage({ inner: innerWidth, scroll: document.documentElement.scrollWidth,
  wide: wide, narrow: shown.every(Boolean), charts: shown.length }, "*");
"""
FRAME = """<!doctype html><body><iframe src="page.html" style="width:400px;height:900px"></iframe>
<script>onmessage = function (event) {
  document.body.setAttribute("data-said", JSON.stringify(event.data));
};</script></body>"""

Open = Callable[[Path], tuple[str, str]]


@pytest.fixture
def open_page(tmp_path: Path) -> Open:
    """Opens a file; gives the document as it is after its scripts ran, and what was logged."""

    def run(page: Path) -> tuple[str, str]:
        command = [
            BROWSER, "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--enable-logging=stderr", "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1200,900", "--dump-dom",
            *(["--no-sandbox"] if os.geteuid() == 0 else []), page.as_uri(),
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.communicate(timeout=50)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    return run


@pytest.fixture
def page(storage: Storage) -> Path:
    """The report of a run that had a fault and speaks ill."""
    now = iter(range(1_800_000_000, 1_900_000_000))
    runs = RunStore(storage, lambda: float(next(now)))
    run_id = runs.create("sotu", "train", {"name": "sotu"}, steps=40)
    for attempt in (1, 2):
        runs.add_event(run_id, "attempt", attempt=attempt, world_size=2)
        for step in range(20 * attempt - 19, 20 * attempt + 1):
            figures: dict[str, Any] = dict.fromkeys(
                ("data_s", "communication_s", "checkpoint_s", "eval_s"), 0.05
            )
            runs.add_metrics(
                run_id,
                {
                    "attempt": attempt, "step": step, "loss": 6 - step / 20, "grad_norm": 1.0,
                    "eval_loss": 5.5 if step % 10 == 0 else None, "lr": 1e-3, "mfu": 0.3,
                    "tokens_per_s": 2000.0, "compute_s": 0.7, "time_s": float(next(now)), **figures,
                },
            )  # fmt: skip
        runs.add_event(run_id, "checkpoint", step=20 * attempt, digest="c" * 64)
        if attempt == 1:
            runs.add_event(run_id, "fault", attempt=1, ranks=[1], message=EVIL)
    runs.update(run_id, status=RunStatus.FAILED, step=40, message=EVIL)
    return write_report(storage, run_id)


def with_probe(page: Path, probe: str, target: Path, *, is_admitted: bool = True) -> Path:
    """A copy with one more script, which the policy admits or not."""
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8")
    if is_admitted:
        text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    target.write_text(text.replace("</body>", f"<script>{probe}</script></body>"), "utf-8")
    return target


def said(document: str) -> dict[str, Any]:
    found = re.search(r'data-said="([^"]*)"', document)
    assert found is not None, document[-2000:]
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answer


def test_the_page_runs_under_its_own_policy_and_nothing_else_does(
    page: Path, open_page: Open
) -> None:
    document, log = open_page(page)
    assert 'class="tip"' in document
    assert 'class="copy"' in document
    assert "<title>owned" not in document
    assert "CONSOLE" not in log, log


def test_a_script_that_got_into_the_page_would_not_run(
    page: Path, open_page: Open, tmp_path: Path
) -> None:
    target = with_probe(page, HOVER, tmp_path / "page.html", is_admitted=False)
    document, log = open_page(target)
    assert "data-said=" not in document
    assert "Content Security Policy" in log


def test_the_pointer_is_answered_with_the_values_below_it(
    page: Path, open_page: Open, tmp_path: Path
) -> None:
    document, _ = open_page(with_probe(page, HOVER, tmp_path / "page.html"))
    answer = said(document)
    assert answer["dots"] == 2
    assert re.search(r"train  step \d\d: 4\.\d{3}\nheld-out  step 30: 5\.500", answer["tip"])
    assert answer["title"].endswith("Eagleray")


def test_a_telephone_shows_all_of_it_without_scrolling_sideways(
    page: Path, open_page: Open, tmp_path: Path
) -> None:
    with_probe(page, MEASURE, tmp_path / "page.html")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME, encoding="utf-8")
    answer = said(open_page(frame)[0])
    assert answer["inner"] == 400
    assert answer["wide"] == []
    assert answer["scroll"] <= 400
    assert answer["narrow"] is True
    assert answer["charts"] == 7
