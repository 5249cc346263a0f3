"""The report page in headless Chromium: what its panels show, keyboard, dark colors, and that it requests nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.report.page import render_page
from echelon.report.page_data import page_data
from echelon.report.run_folder import read_run
from echelon.status.run_files import append_line
from tests.browser import CHROMIUM, Browser, open_browser
from tests.recorded_runs import write_run
from tests.unit.report.test_failure import write_failed_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (make browser)")

PANELS = "timeline goodput loss lr grad_norm parts samples items stragglers ranks memory output hyperparameters settings environment versions"
# Number of pixels that differ from the background in a plot's canvas; an empty plot has axes of about 1,500.
INK = """[...document.querySelectorAll('.plot canvas')].map(canvas => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let ink = 0;
  for (let i = 0; i < data.length; i += 4) ink += data[i + 3] > 0 && Math.max(data[i], data[i+1], data[i+2]) - Math.min(data[i], data[i+1], data[i+2]) > 60;
  return [canvas.closest('.panel').id, ink];
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with 4 ranks, of which one is slow, two restarts and a stall."""
    parent = tmp_path_factory.mktemp("runs")
    run = write_run(parent, "run", num_ranks=4, num_steps=240, kills=(75, 150), slow_rank=2, stall_at=110)
    arguments = {"learning_rate": 3e-3, "seed": 42}
    append_line(run / "hyperparameters.jsonl", {"group": "arguments", "values": arguments, "defaults": ["seed"]})
    append_line(run / "hyperparameters.jsonl", {"group": "training", "values": {"optimizer": {"class": "AdamW"}}})
    for rank in range(2):
        (run / f"attempt_2/rank_{rank}").mkdir(parents=True)
        (run / f"attempt_2/rank_{rank}/stdout.log").write_text(f"printed by rank {rank}\n")
    return _write_page(parent / "page.html", run)


def _write_page(path: Path, *runs: Path) -> Path:
    path.write_text(render_page(page_data([read_run(run) for run in runs])))
    return path


def _text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def _count(browser: Browser, selector: str) -> int:
    return int(browser.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def test_every_panel_shows_the_data_of_the_run(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]
    assert [name for name in PANELS.split() if not _count(browser, f"#panel-{name}")] == []
    assert _count(browser, ".missing") == 0
    ink = dict(browser.run(INK))
    assert [name for name, pixels in ink.items() if pixels < 150] == []
    assert {f"panel-{name}" for name in ("loss", "lr", "grad_norm", "metric-eval_accuracy", "parts", "samples")} <= set(
        ink
    )
    assert "240" in _text(browser, "#tiles")
    # Each of the three starts: importing, then training.
    assert (_count(browser, ".lane-attempt"), _count(browser, ".lane-attempt.starting")) == (6, 3)
    assert _count(browser, ".lanes .lane-event.failure") == 2
    assert (_count(browser, ".lanes .lane-event.restart"), _count(browser, ".lanes .lane-event.stall")) == (2, 1)
    assert _count(browser, ".lane-save") == json.dumps(page_data([read_run(page.parent / "run")])).count(
        "saved checkpoint"
    )
    total = browser.run(
        "(({sum, wall}) => [+sum, +wall])(document.querySelector('.goodput-parts .total [data-sum]').dataset)"
    )
    assert total[0] == pytest.approx(total[1], rel=0.005)
    assert _count(browser, "#panel-ranks tbody tr") == 4
    assert _text(browser, "#panel-stragglers").startswith("Stragglers")
    assert "flag --num_processes" in _text(browser, "#panel-settings")
    # A loss of evaluations is drawn over the training loss.
    assert _text(browser, "#panel-loss .keys").split("\n") == ["training loss", "eval_loss"]
    assert _count(browser, "#panel-metric-eval_loss") == 0
    assert "3f2a9c1d5e7b8a6f4c2d1e0b9a8f7c6d5e4b3a2f" in _text(browser, "#panel-environment")
    assert "2.13.0" in _text(browser, "#panel-versions")


def test_the_keyboard_reaches_everything(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    order = []
    for _ in range(80):
        browser.press("Tab")
        order.append(browser.run("document.activeElement.id || document.activeElement.className"))
    wanted = ["choose-horizontalaxis-time", "theme", "smooth", "plot-loss", "plot-lr", "plot-parts", "heat", "search"]
    assert [name for name in wanted if name in order] == sorted(wanted, key=order.index) == wanted

    browser.run("document.getElementById('plot-loss').focus()")
    before = _text(browser, "#panel-loss .readout")
    browser.press("Home")
    first = _text(browser, "#panel-loss .readout")
    assert first == "step 1"
    assert _text(browser, "#panel-loss .keys").startswith("training loss\n2.")
    assert _text(browser, "#panel-lr .readout").startswith("step 1 ")  # all plots show the same step
    browser.press("ArrowRight")
    assert _text(browser, "#panel-loss .readout") == "step 2"
    browser.press("End")
    browser.press("+", text="+")
    browser.press("Home")
    zoomed = int(_text(browser, "#panel-loss .readout").split()[1])
    assert 110 <= zoomed <= 130
    browser.press("Escape")
    assert _text(browser, "#panel-loss .readout") == before
    browser.press("Home")
    assert _text(browser, "#panel-loss .readout") == first

    browser.run("document.getElementById('choose-horizontalaxis-time').focus()")
    browser.press("Enter", text="\r")
    assert browser.run("document.activeElement.id") == "choose-horizontalaxis-time"
    browser.run("document.getElementById('plot-loss').focus()")
    browser.press("Home")
    assert _text(browser, "#panel-loss .readout") == "6 s"
    browser.run("document.querySelector('.lanes .lane-event.failure').focus()")
    assert "rank 0 was killed by signal 9" in _text(browser, ".event-text")
    assert browser.problems == []


def test_dark_colors_follow_the_system_and_the_switch(browser: Browser, page: Path) -> None:
    def brightness() -> int:
        return int(browser.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"))

    browser.open(page, is_dark=True)
    assert brightness() < 40
    browser.run("document.getElementById('theme').focus()")
    browser.press("Enter", text="\r")
    assert brightness() > 200
    browser.prefer(is_dark=False)
    browser.open(page)
    assert brightness() > 200
    browser.prefer(is_dark=True)
    assert brightness() < 40
    assert dict(browser.run(INK))["panel-loss"] > 150
    assert browser.problems == []


@pytest.mark.soak
def test_a_mouse_zooms_all_plots(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.getElementById('plot-loss').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = browser.run(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('#plot-loss .u-over').getBoundingClientRect())"
    )
    y = min(box[1] + 100, 880)
    browser.mouse("mouseMoved", box[0] + box[2] / 2, y)
    browser.mouse("mousePressed", box[0] + box[2] / 2, y, button="left", clicks=1)
    browser.mouse("mouseMoved", box[0] + box[2] * 0.9, y, button="left")
    browser.mouse("mouseReleased", box[0] + box[2] * 0.9, y, button="left", clicks=1)
    browser.run("document.getElementById('plot-parts').focus()")
    browser.press("Home")
    assert 110 <= int(_text(browser, "#panel-parts .readout").split()[1]) <= 130
    assert browser.problems == []


def test_a_telephone_shows_the_page_without_sideways_scrolling(browser: Browser, page: Path) -> None:
    browser.open(page, width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("Math.min(...[...document.querySelectorAll('.panel')].map(panel => panel.offsetWidth))") > 350


def test_several_runs_are_overlaid_and_compared(browser: Browser, page: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path, "other", num_steps=60, lr=2e-3, facts={"outcome": "failed"})
    append_line(other / "metrics.jsonl", {"time": 2e9, "step": 60, "values": {"eval_samples_per_second": 2028.5}})
    browser.open(_write_page(tmp_path / "page.html", page.parent / "run", other))
    table = _text(browser, "#comparison")
    for expected in ("succeeded\tfailed", "arguments", "--lr 0.002 --epochs 3", "num_processes\t4\t1"):
        assert expected in table
    assert "torch" not in table
    # One row for each name: no value is squeezed beside the names of runs.
    widths = browser.run("[...document.querySelectorAll('#panel-values td')].map(cell => cell.clientWidth)")
    assert len(widths) == 2 * _count(browser, "#panel-values tbody tr") > 0
    assert min(widths) >= 100
    assert _text(browser, "#panel-loss .keys").split("\n") == [
        "training loss A",
        "training loss B",
        "eval_loss A",
        "eval_loss B",
    ]
    assert _count(browser, "#panel-ranks tbody tr") == 4
    browser.run("document.getElementById('choose-runofranks-1').click()")
    assert _count(browser, "#panel-ranks tbody tr") == 1
    assert "nothing to compare" in _text(browser, "#panel-stragglers")
    assert browser.problems == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_failed_run_says_why_on_top(browser: Browser, tmp_path: Path, width: int) -> None:
    browser.open(_write_page(tmp_path / "page.html", write_failed_run(tmp_path)), width=width, is_dark=width == 390)
    box = _text(browser, ".why")
    for expected in (
        "Why it failed",
        "rank 1 failed first: KeyError: 'labels'",
        "rank 1 of 2, after step 30",
        'train.py:9 in main: batch["labels"]',
        "name a key that the batch has",
        "line 19",
    ):
        assert expected in box
    assert "logs:" not in box
    place = browser.run(
        "['.why', '#tiles', '.lanes'].map(name => document.querySelector(name).getBoundingClientRect().top)"
    )
    assert place == sorted(place)
    assert (_count(browser, ".lanes .lane-event.failure"), _count(browser, ".lane-event.end")) == (1, 0)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_the_output_and_the_hyperparameters_are_shown(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert _text(browser, ".log") == "printed by rank 0"
    browser.run("document.getElementById('choose-outputof-1').click()")
    assert _text(browser, ".log") == "printed by rank 1"
    shown = "TrainingArguments learning_rate 0.003 recorded by echelon optimizer.class AdamW"
    assert " ".join(_text(browser, "#panel-hyperparameters").split()).endswith(shown)
    browser.run("document.getElementById('all-settings').click()")
    assert "seed 42" in " ".join(_text(browser, "#panel-hyperparameters").split())
    browser.run(
        "(box => { box.value = 'adamw'; box.dispatchEvent(new Event('input')); })(document.getElementById('search'))"
    )
    assert "learning_rate" not in _text(browser, "#panel-hyperparameters")
    assert "optimizer.class" in _text(browser, "#panel-hyperparameters")
    assert browser.problems == []


@pytest.mark.soak
def test_an_empty_run_says_what_is_missing(browser: Browser, tmp_path: Path) -> None:
    browser.open(_write_page(tmp_path / "page.html", tmp_path))
    assert browser.problems == []
    assert "no step records" in _text(browser, "#panel-loss")
    assert "No goodput was written" in _text(browser, "#panel-goodput")


@pytest.mark.soak
def test_texts_of_a_run_stay_text(browser: Browser, tmp_path: Path) -> None:
    text = "</script><img src=http://127.0.0.1:9/x onerror=document.title='hit'>"
    run = write_run(tmp_path, "run", num_steps=5, facts={"command": [text], "script": text, "tags": [text]})
    append_line(run / "hyperparameters.jsonl", {"group": "logged", "values": {text: text}})
    (run / "attempt_0/rank_0").mkdir(parents=True)
    (run / "attempt_0/rank_0/stdout.log").write_text(text)
    browser.open(page := _write_page(tmp_path / "page.html", run))
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.run("document.title") == "run - echelon report"
    assert "onerror" in _text(browser, ".command")


@pytest.mark.soak
def test_a_run_of_100_000_steps_opens_in_two_seconds_and_stays_smooth(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path, "long", num_ranks=8, num_steps=100_000, kills=(30_000,), slow_rank=1)
    start = time.monotonic()
    page = _write_page(tmp_path / "page.html", run)
    print(f"written in {time.monotonic() - start:.1f} s, {page.stat().st_size / 1e6:.2f} MB")
    assert page.stat().st_size < 1.5e6
    seconds = min(browser.open(page) for _ in range(2))
    frames = browser.run("""new Promise(done => {
      const box = document.querySelector('#plot-loss .u-over'), r = box.getBoundingClientRect(), times = [];
      let i = 0, last = performance.now();
      const frame = (now) => {
        if (i) times.push(now - last);
        last = now;
        box.dispatchEvent(new MouseEvent('mousemove', {clientX: r.left + r.width * i / 60, clientY: r.top + 40, bubbles: true}));
        if (++i < 60) requestAnimationFrame(frame); else done(times.sort((a, b) => a - b));
      };
      box.dispatchEvent(new MouseEvent('mouseenter', {clientX: r.left, clientY: r.top + 40}));
      requestAnimationFrame(frame);
    })""")
    print(f"opened in {seconds:.2f} s; frames: median {frames[30]:.1f} ms, largest {frames[-1]:.1f} ms")
    assert browser.problems == []
    assert seconds < 2
    assert frames[30] < 34


def test_in_a_chinese_locale_the_page_is_chinese(
    browser: Browser, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    other = write_run(tmp_path, "other", num_steps=30)
    failed = write_failed_run(tmp_path)
    for runs in ([page.parent / "run"], [other], [failed], [other, page.parent / "run"]):
        browser.open(_write_page(tmp_path / "page.html", *runs))
        assert browser.problems == []
        assert browser.run("document.documentElement.lang") == "zh-CN"
        assert "\u65f6\u95f4\u82b1\u5728\u54ea\u91cc" in _text(browser, "#time h2")
        shown = _text(browser, "body").splitlines()
        # Commands, folders, settings and the events that write_run invents stay as they are.
        prose = [line for line in shown if re.search(r"(?<![\w./=-])[A-Za-z][a-z]+ [a-z]{2,} [a-z]{2,}", line)]
        assert [
            line
            for line in prose
            if not re.search(
                r"echelon launch|train\.py|signal 9|Debian|Linux|rank 1 failed|name a key|others: rank|printed by rank",
                line,
            )
        ] == []
