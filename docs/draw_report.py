"""Draw the pictures of README and report.md: the top of a run's report, light and dark, in headless Chromium.

make demo
python -m docs.draw_report            # the newest run in ./echelon-runs; or python -m docs.draw_report RUN
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from echelon.report.page import render_page
from echelon.report.page_data import page_data
from echelon.report.run_folder import find_run, read_run
from tests.browser import open_browser

PICTURES = {
    False: Path(__file__).resolve().parent / "report.png",
    True: Path(__file__).resolve().parent / "report-dark.png",
}


def draw(run: Path, pictures: Mapping[bool, Path], *, height: int = 1180) -> None:
    """Write pictures of the run's report, by whether they are dark."""
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        page = Path(folder) / "report.html"
        page.write_text(render_page(page_data([read_run(run)])), encoding="utf-8")
        for is_dark, picture in pictures.items():
            browser.open(page, width=1280, height=height, is_dark=is_dark)
            browser.screenshot(picture)


if __name__ == "__main__":
    draw(find_run(*sys.argv[1:]), PICTURES)
