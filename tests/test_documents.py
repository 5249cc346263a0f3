"""The documents: links lead somewhere, code blocks say whether they run, and the site shows every page and every public name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.documents import PYTHON, ROOT, SHELL, Block, anchors, blocks, broken_links, documents, named_documents

SOURCES = sorted(
    path for folder in ("src", "tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)
CHINESE = [path for path in documents() if path.name.endswith(".zh.md")]
PARSERS = {"json": json.loads, "yaml": lambda text: list(yaml.safe_load_all(text)), "toml": tomllib.loads}
LANGUAGES = {*PYTHON, *SHELL, *PARSERS, "text", "diff", "ini", "dockerfile", "jsonl"}


def _by_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def script(name: str) -> ModuleType:
    """Import a program of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.mark.parametrize("page", documents(), ids=_by_name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_reported() -> None:
    page = ROOT / "docs" / "tour.md"
    text = "[a](parity.md) [b](parity.md#limitations) [c](nothing.md)\n[d](parity.md#nothing) [e](https://example.org) `[f](g.md)`\n```\n[h](i.md)\n```"
    assert list(broken_links(page, text)) == [
        "tour.md:1: there is no nothing.md",
        "tour.md:2: parity.md has no heading #nothing",
    ]
    assert "three-levels" in anchors(ROOT / "README.md")


def test_documents_that_the_source_names_exist() -> None:
    found = [
        problem for path in SOURCES for problem in named_documents(_by_name(path), path.read_text(encoding="utf-8"))
    ]
    examples = ("tests/test_documents.py", "tests/unit/test_packaging.py")  # they name documents that do not exist
    assert [problem for problem in found if not problem.startswith(examples)] == []


def test_a_document_that_does_not_exist_is_reported() -> None:
    text = 'see docs/nothing.md\n(docs/parity.md, "Limitations") docs/parity.md#limitations\ndocs/parity.md#none, docs/parity.md, "None"'
    assert list(named_documents("a.py", text)) == [
        "a.py:1: there is no docs/nothing.md",
        "a.py:3: docs/parity.md has no heading none",
        "a.py:3: docs/parity.md has no heading None",
    ]


def problems(block: Block) -> Iterator[str]:
    """Yield what is wrong with a code block, without running it."""
    if block.language not in LANGUAGES:
        yield f"{block}: its language is {block.language!r}; one of {', '.join(sorted(LANGUAGES))}"
    if block.mark == "run by":
        test = ROOT / block.reason
        if not test.is_file() or Path(block.page).name not in test.read_text(encoding="utf-8"):
            yield f"{block}: {block.reason} is no test that names {Path(block.page).name}"
    elif block.mark == "run on" and not re.fullmatch(r"[2-4] processes", block.reason):
        yield f"{block}: run on: 2 (or 3, or 4) processes"
    elif block.mark and len(block.reason) < 11:
        yield f"{block}: the reason is too short"
    if block.language in PARSERS and block.mark != "not parsed":
        try:
            PARSERS[block.language](block.text)
        except (ValueError, yaml.YAMLError) as error:
            yield f"{block}: {error}"


@pytest.mark.parametrize("page", documents(), ids=_by_name)
def test_every_code_block_has_a_language_and_says_if_it_does_not_run(page: Path) -> None:
    assert [problem for block in blocks(page) for problem in problems(block)] == []


def test_a_wrong_code_block_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\na\n```\n<!-- not run: why -->\n```python\na\n```\n<!-- run by: tests/none.py -->\n```bash\na\n```\n"
        "```json\n{\n```\n<!-- not run: needs two machines -->\n```python\nb\n```\n"
    )
    first, second, third, fourth, fifth = (list(problems(block)) for block in blocks(page))
    assert "its language is ''" in first[0]
    assert "too short" in second[0]
    assert "is no test that names page.md" in third[0]
    assert "page.md:12" in fourth[0]
    assert fifth == []


@pytest.mark.parametrize("page", CHINESE, ids=_by_name)
def test_a_chinese_page_shows_the_code_of_the_english_page(page: Path) -> None:
    """It may add commands, such as those that choose a mirror."""
    english = page.with_name(page.name.replace(".zh.md", ".md"))
    assert english.exists()
    ours, theirs = _code(page), _code(english)
    shown = iter(ours)
    assert [text for _, text in theirs if not any(text == other for _, other in shown)] == [], (
        "missing, or in another order"
    )
    known = {text for _, text in theirs}
    assert [text for language, text in ours if text not in known and language not in SHELL] == []


def _code(page: Path) -> list[tuple[str, str]]:
    """Return the languages and texts of a page's blocks, without comments and Chinese strings."""
    kinds = (*PYTHON, *SHELL, *PARSERS)
    found = [
        (block.language, re.sub(r"[ \t]*#.*", "", block.text)) for block in blocks(page) if block.language in kinds
    ]
    return [(language, re.sub(r'"[^"\n]*[^\x00-\x7f][^"\n]*"', '"..."', text)) for language, text in found]


def test_the_api_reference_shows_every_public_name() -> None:
    site = script("site_pages")
    assert site.missing_names() == []
    names = [name for page in site.API for name in site.names_of(page)]
    assert len(names) == len(set(names)) > 80
    assert site.defined_at("echelon.Accelerator") == "echelon.accelerator.accelerator.Accelerator"
    for name in names:
        site.defined_at(name)  # raises for a name that is not there
    dropped = site.API.pop("accelerator")
    assert site.missing_names() == ["echelon.Accelerator", "echelon.accelerator.Accelerator"]
    assert "Accelerator" in dropped[0]


# Public methods that the API reference does not show, each for a reason.
NOT_SHOWN = {
    "echelon.Accelerator": {
        "clear",  # Accelerate's name for free_memory
        "deepspeed_ulysses_dl_adapter", "lomo_backward",  # not supported
        "trim_for_metrics",  # gather_for_metrics calls it
        "verify_device_map",  # prepare calls it
    },
    "echelon.Trainer": {
        "autocast_smart_context_manager", "compute_loss_context_manager", "store_flos",
        "set_initial_training_values",  # the training loop calls them
        "get_cp_size", "get_sp_size", "get_tp_size",  # the sizes come from parallelism_config
    },
}  # fmt: skip


def test_the_api_reference_shows_members_that_exist_and_every_method() -> None:
    members = script("api_members").MEMBERS
    for name, groups in members.items():
        module, _, own = name.rpartition(".")
        shown = [member for listed in groups.values() for member in listed]
        assert len(shown) == len(set(shown)), name
        described = getattr(importlib.import_module(module), own)
        known = {key for base in described.__mro__ for key in (*vars(base), *vars(base).get("__annotations__", {}))}
        known |= {found for base in described.__mro__ for found in re.findall(r"self\.(\w+)\b", _source_of(base))}
        assert set(shown) - known == set(), name
        if name in NOT_SHOWN:
            methods = {
                key for key in dir(described) if not key.startswith("_") and inspect.isroutine(getattr(described, key))
            }
            assert methods - set(shown) == NOT_SHOWN[name], name


def _source_of(described: type) -> str:
    return inspect.getsource(described) if described.__module__.startswith("echelon.") else ""


def test_the_navigation_of_the_site_shows_every_page() -> None:
    site = script("site_pages")
    made = {name for name, _ in _staged(site)}
    folders = {
        name: sorted(page for page in made if page.startswith(f"{name}/") and not page.endswith(".zh.md"))
        for name in _folders(made)
    }
    shown = set(_flat(site.navigation(made.__contains__, lambda name: folders.get(name, []))))
    assert {name for name in made if name.endswith(".md") and not name.endswith(".zh.md")} - shown == set()


def _folders(names: set[str]) -> set[str]:
    return {name.partition("/")[0] for name in names if "/" in name}


def _flat(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _flat(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _flat(part)


def _staged(site: ModuleType) -> Iterator[tuple[str, bytes]]:
    yield from site.pages()


def test_pages_are_adapted_to_the_site() -> None:
    site = script("site_pages")
    sources = {
        "docs/a.md": "a.md",
        "docs/b.md": "b.md",
        "docs/b.zh.md": "b.zh.md",
        "README.md": "index.md",
        "examples/x.py": "examples/x.md",
    }

    def adapted(text: str, source: str = "docs/a.md", url: str | None = None) -> str:
        return site.adapted(text, source, sources[source], sources, url)

    assert (
        adapted("[b](b.md#c) [r](../README.md) [x](../examples/x.py)")
        == "[b](b.md#c) [r](index.md) [x](examples/x.md)\n"
    )
    assert adapted("[b](docs/b.md) [b](docs/b.zh.md)", "README.md") == "[b](b.md) [b](zh/b.html)\n"
    assert adapted("[b](a.md)", "docs/b.zh.md") == "[b](a.md)\n"
    assert adapted("[b](b.md) [b](b.zh.md#c)", "docs/b.zh.md") == "[b](../b.html) [b](b.md#c)\n"
    sources |= {"docs/a.zh.md": "a.zh.md"}
    assert adapted("[b](a.md#b) [b](a.md)", "docs/b.zh.md") == "[b](../a.html#b) [b](a.md)\n"
    assert adapted("[b](b.md#c)", "docs/b.zh.md") == "[b](../b.html#c)\n"
    assert adapted("[s](../src/c.py)") == "s\n"
    assert adapted("[s](../src/c.py)", url="https://e.org/r") == "[s](https://e.org/r/blob/main/src/c.py)\n"
    assert adapted("<!-- not run: a reason -->\n```python level1\n[b](b.md)\n```\n```python t.py\n```") == (
        '```python\n[b](b.md)\n```\n```python title="t.py"\n```\n'
    )
    assert (
        adapted("text:\n- a\n  more\n  - b\n\n  still a\n- c\n\nend")
        == "text:\n\n- a\n    more\n    - b\n\n    still a\n- c\n\nend\n"
    )
    sources |= {"docs/tour.md": "tour.md", "docs/tour.zh.md": "tour.zh.md"}
    # Links that are named after a file have the page's title on the site.
    assert (
        adapted("[docs/report.md](report.md#a), [tour.md](tour.md): a")
        == "[The report of a run](report.md#a), [tour](tour.md): a\n"
    )
    assert adapted("[tour.zh.md](tour.zh.md)", "docs/b.zh.md") == "[\u5341\u5206\u949f\u4e0a\u624b](tour.md)\n"
    assert adapted("1. a\n\n   ```python\n   x\n   ```\n2. b") == "1. a\n\n    ```python\n    x\n    ```\n2. b\n"


@pytest.mark.parametrize("name", ["index.md", "index.zh.md"])
def test_the_home_page_shows_the_programs_of_levels_in_tabs(name: str) -> None:
    page = dict(_staged(script("site_pages")))[name].decode()
    assert len(re.findall(r'^=== ".*[123].*"$', page, re.MULTILINE)) == 3
    programs = [block for block in blocks(ROOT / "docs" / "levels.md") if block.title.startswith("level")]
    assert [program.title for program in programs] == ["level1.py", "level2.py", "level3.py"]
    for program in programs if name == "index.md" else []:
        assert textwrap.indent(program.text, " " * 4) in page
    assert "report.png#only-light" in page
    assert "report-dark.png#only-dark" in page


def test_every_table_of_the_benchmarks_has_a_plot() -> None:
    draw = script("draw_benchmarks")
    read = draw.tables((ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"))
    assert draw.PLOTS.keys() <= read.keys()
    for heading, rows in read.items():
        assert draw.points(draw.plot_of(heading, rows), rows), heading
    assert draw.names().keys() == read.keys()
    table = "## T\n\n| | wall, s | min - max |\n|---|---:|---:|\n| `a` | 1,200.5 | 3 - 4.5 |\n| b |  | |\n"
    plot = draw.Plot(name="t", values={"wall, s": "s"}, span="min - max", unit="s")
    assert draw.points(plot, draw.tables(table)["T"]) == [("a", [1200.5], (3.0, 4.5))]
    assert draw.plot_of("T", draw.tables(table)["T"]).values == {
        "wall, s": "wall, s"
    }  # a section that PLOTS does not name
