"""The documentation site, as ``make docs`` builds it: no request to another host, search in both languages, dark mode."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.browser import CHROMIUM, Browser, open_browser
from tests.documents import ROOT

pytestmark = pytest.mark.soak

PYTHON = ROOT / ".venv-docs" / "bin" / "python"
# What a page loads by itself, in contrast to the links that a reader follows.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)|url\([\"']?([^\"')]+)"
)


@pytest.fixture(scope="module")
def site() -> Path:
    if not PYTHON.exists() and not os.environ.get("REQUIRE_RELEASE"):
        pytest.skip("needs the environment of the site: make docs")
    done = subprocess.run(
        ["make", "--no-print-directory", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).splitlines() == ["site/index.html"]  # no warning
    return ROOT / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    with open_browser() as browser:
        yield browser


def test_every_link_in_the_built_pages_leads_somewhere(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 100
    names = {path: set(re.findall(r"\bid=\"([^\"]+)\"|\bid=([^\s>\"]+)", text)) for path, text in pages.items()}
    ids = {path: {one or other for one, other in found} for path, found in names.items()}
    missing = set()
    for path, text in pages.items():
        if path.name == "404.html":
            continue  # its links are for a server
        for target in re.findall(r"<a\b[^>]*?\bhref=\"([^\"]+)\"", text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = unquote(target).partition("#")
            found = (path.parent / file).resolve() if file else path
            if not found.exists() or (anchor and found.suffix == ".html" and anchor not in ids[found] | {"__top"}):
                missing.add(f"{path.relative_to(site)}: {target}")
    assert sorted(missing) == []


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    texts = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    found = {
        f"{path.relative_to(site)}: {one or other}"
        for path in texts
        for one, other in LOADED.findall(path.read_text(encoding="utf-8"))
        if re.match(r"(https?:)?//", one or other)
    }
    assert found == set()


@pytest.mark.parametrize("page", ["index.html", "zh/index.html", "benchmarks.html", "api/accelerator.html"])
def test_a_page_opens_as_a_file_without_errors(page: str, site: Path, browser: Browser) -> None:
    browser.open(site / page)
    # The menu of languages asks for the site map, which a browser refuses for files.
    assert [problem for problem in browser.problems if not re.search(r"/sitemap\.xml'|ERR_FAILED$", problem)] == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))] == []
    assert not browser.run("[...document.images].some(image => image.complete && image.naturalWidth === 0)")


@pytest.mark.parametrize(
    ("page", "words", "found"), [("index.html", "rendezvous", "machines"), ("zh/index.html", "检查点", "faq")]
)
def test_the_search_finds_a_page(page: str, words: str, found: str, site: Path, browser: Browser) -> None:
    browser.open(site / page)
    browser.run("document.querySelector('[data-md-toggle=search]').click()")
    browser.run(
        f"(() => {{ const box = document.querySelector('[data-md-component=search-query]'); box.focus(); box.value = {words!r};"
        "box.dispatchEvent(new Event('input', {bubbles: true})); box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})) })()"
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    wait = (
        f"new Promise((done, fail) => {{ const began = Date.now(); const look = () => {{ const found = {links};"
        "if (found.length || Date.now() - began > 30000) done(found); else setTimeout(look, 50) }; look() })"
    )
    assert any(found in link for link in browser.run(wait)), browser.problems


def test_dark_mode_follows_the_system(site: Path, browser: Browser) -> None:
    colors = []
    for is_dark in (False, True):
        browser.open(site / "benchmarks.html", is_dark=is_dark)
        scheme = browser.run("document.body.getAttribute('data-md-color-scheme')")
        plot = browser.run(
            "[...document.images].filter(image => image.offsetParent && image.src.includes('figures')).map(image => image.src)"
        )
        assert plot
        assert all(("-dark" in address) == is_dark for address in plot)
        colors.append(scheme)
    assert colors == ["default", "slate"]
