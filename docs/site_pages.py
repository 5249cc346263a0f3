"""Write the pages of the documentation site to build/docs, and its navigation: a hook of mkdocs.yml, and a program.

The repository's Markdown is written for its own readers, so links between files, the titles of code blocks and nested lists are
adapted. The benchmarks, the examples and the API reference are generated. Does not import echelon or torch.
"""

from __future__ import annotations

import ast
import importlib
import logging
import posixpath
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src"
TARGET = ROOT / "build" / "docs"

# Pages from files outside docs/.
OUTSIDE = {
    "examples/README.md": "examples/index.md",
    "examples/README.zh.md": "examples/index.zh.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# The home page; links to the README lead to it, too.
HOME = {"docs/home.md": "index.md", "docs/home.zh.md": "index.zh.md"}
README = {"README.md": "index.md", "README.zh.md": "index.zh.md"}

# The navigation. "folder/*" stands for the pages of a folder, those named before them in any list first. A page that does not
# exist yet is left out; a page that nobody names is an error of the strict build.
NAVIGATION: list[tuple[str, list[str | tuple[str, list[str]]]]] = [
    ("Start", ["index.md", "levels.md", "guarantees.md", "install.md", "tour.md", "report.md", "tracking.md", "faq.md", ("Examples", ["examples/index.md", "examples/*"])]),
    (
        "Guides",
        [
            (
                "Guides",
                [
                    f"guides/{name}.md"
                    for name in (
                        "one_to_many_processes", "several_machines", "slurm", "kubernetes", "ray", "sharding", "precision", "accumulation",
                        "checkpoints_and_resume", "reproducibility", "hangs", "notebooks", "deepspeed_configs", "lora",
                    )
                ] + ["guides/*"],
            ),
            ("Migrating", ["migrating/*"]),
            ("Running", ["command_line.md", "machines.md", "clusters.md", "preemption.md", "report.md", "diagnosis.md", "run_folder.md", "selftest.md"]),
            ("Training", ["verify.md", "spike_guard.md", "parity.md", "checkpoints.md", "engines.md", "parallelism.md", "averaged_weights.md", "language_models.md", "speed.md", "plan.md", "big_models.md", "data_parallel.md", "sharded_data.md", "ecosystem.md", "llamafactory_swift.md"]),
        ],
    ),
    (
        "Reference",
        [
            "command_reference.md",
            "configuration.md",
            "errors.md",
            ("API reference", ["api/index.md", "api/*"]),
            ("Compatibility", ["accelerate_compat.md", "trainer_compat.md", "side_by_side.md", "versions.md"]),
        ],
    ),
    ("Benchmarks", ["benchmarks.md"]),
    ("Design", ["architecture.md"]),
    ("Project", ["changelog.md", "contributing.md", "gpu_day.md", "translating.md", "security.md"]),
]  # fmt: skip

# The only pages of their tabs: their wide tables have the place of the navigation.
_ALONE = ("benchmarks", "architecture")

# The API reference: page -> title, introduction, and public names. `missing_names` finds a public name that is on no page.
API: dict[str, tuple[str, str, list[str]]] = {
    "distributed": (
        "echelon.distributed",
        "Level 1: your own loop on `torch.distributed`, with safety checks.",
        [
            *(
                f"echelon.distributed.{name}"
                for name in (
                    "process_group", "setup", "cleanup", "shard", "ShardedLoader", "gather", "gather_object", "reduce", "mean_over_ranks",
                    "broadcast", "broadcast_object_list", "pad_across_processes", "barrier", "agree", "rank_zero_only", "main_first",
                    "log", "log_hyperparameters", "should_stop",
                )
            ),
            "echelon.World",
        ],
    ),
    "accelerator": ("Accelerator", "Level 2: your own loop, on any devices.", ["echelon.Accelerator"]),
    "accelerator_settings": (
        "Settings of the Accelerator",
        "Objects that `Accelerator(...)` takes, and those that it returns.",
        [
            "echelon.ProjectConfiguration", "echelon.DataLoaderConfiguration", "echelon.GradientAccumulationPlugin", "echelon.FullyShardedDataParallelPlugin",
            "echelon.DeepSpeedPlugin", "echelon.ParallelismConfig", "echelon.AutocastKwargs", "echelon.DistributedDataParallelKwargs",
            "echelon.GradScalerKwargs", "echelon.InitProcessGroupKwargs", "echelon.ProfileKwargs", "echelon.DistributedType",
            "echelon.DDPCommunicationHookType", "echelon.PartialState", "echelon.accelerator.AcceleratorState", "echelon.accelerator.explain_out_of_memory", "echelon.accelerator.GradientState",
            "echelon.accelerator.AcceleratedOptimizer", "echelon.accelerator.AcceleratedScheduler",
            "echelon.accelerator.DummyOptim", "echelon.accelerator.DummyScheduler", "echelon.EMA", "echelon.SWA", "echelon.LocalSGD", "echelon.MixtureOfExperts",
        ],
    ),
    "trainer": (
        "Trainer",
        "Level 3: no loop.",
        [
            "echelon.Trainer", "echelon.Seq2SeqTrainer", "echelon.TrainOutput", "echelon.PredictionOutput", "echelon.EvalLoopOutput",
            "echelon.EvalPrediction", "echelon.BestRun", "echelon.default_data_collator", "echelon.get_scheduler",
            "echelon.NonFiniteError", "echelon.trainer.Preempted",
        ],
    ),
    "training_arguments": (
        "TrainingArguments",
        "The settings of a Trainer. [The compatibility table](../trainer_compat.md) says how each compares with transformers.",
        [
            "echelon.TrainingArguments", "echelon.Seq2SeqTrainingArguments", "echelon.IntervalStrategy", "echelon.SaveStrategy",
            "echelon.HubStrategy", "echelon.SchedulerType", "echelon.OptimizerNames", "echelon.ParallelMode",
        ],
    ),
    "callbacks": (
        "Callbacks",
        "Functions that a Trainer calls during training, and the state they see.",
        [
            "echelon.TrainerCallback", "echelon.TrainerState", "echelon.TrainerControl", "echelon.EarlyStoppingCallback",
            "echelon.ProgressCallback", "echelon.PrinterCallback", "echelon.trainer.NotebookProgressCallback",
            "echelon.DefaultFlowCallback", "echelon.CallbackHandler",
        ],
    ),
    "checkpointing": (
        "Checkpoints",
        "`Accelerator.save_state`, `load_state` and `resume` are on [the Accelerator's page](accelerator.md). [Checkpoints](../checkpoints.md) "
        "explains what a checkpoint holds. These functions read and write checkpoints directly.",
        [
            "echelon.get_last_checkpoint", "echelon.checkpoint.save.save", "echelon.checkpoint.save.Content",
            "echelon.checkpoint.read.open_verified", "echelon.checkpoint.read.newest",
        ],
    ),
    "big_models": (
        "Big models",
        "Models larger than a device. [The guide](../big_models.md) shows them in use.",
        [
            "echelon.init_empty_weights", "echelon.init_on_device", "echelon.infer_auto_device_map", "echelon.dispatch_model",
            "echelon.load_checkpoint_and_dispatch", "echelon.load_checkpoint_in_model", "echelon.cpu_offload",
            "echelon.cpu_offload_with_hook", "echelon.disk_offload", "echelon.prepare_pippy",
        ],
    ),
    "launch": (
        "Launch functions",
        "Start the ranks from Python. The command `echelon launch` does the same for scripts.",
        ["echelon.notebook_launcher", "echelon.debug_launcher", "echelon.distributed.spawn", "echelon.ray.run"],
    ),
    "data_and_seeds": (
        "Data and seeds",
        "Functions that a training loop calls.",
        [
            "echelon.set_seed", "echelon.synchronize_rng_states", "echelon.skip_first_batches", "echelon.share_dataset", "echelon.PackedDataset", "echelon.packed_attention_mask", "echelon.linear_cross_entropy",
            "echelon.find_executable_batch_size",
        ],
    ),
    "trackers": (
        "Trackers",
        "Where the values of `log` go. [Tracking](../tracking.md) shows them in use.",
        ["echelon.trackers.*"],
    ),
    "errors": (
        "Errors",
        "The base class of every error that echelon raises. [Errors](../errors.md) lists them all, with causes and remedies.",
        ["echelon.EchelonError"],
    ),
}  # fmt: skip
# The search ranks a guide above the reference of the functions that it uses.
_SEARCHED_LAST = ("---", "search: {boost: 0.1}", "---", "")
# Public modules whose names must all be on a page (`echelon` itself is read from its stub).
MODULES = ("echelon.distributed", "echelon.accelerator", "echelon.trainer", "echelon.trackers")

_COLLECTIVE = '<a href="index.html#collective">Collective</a>'
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(\s*)(`{3,})(\w*)[ \t]*(.*)$")
_ITEM = re.compile(r"^( *)([-*]|\d+\.)( +)(?=\S)")
_FILE_NAME = re.compile(r"[\w./-]+\.md")
_TABS = re.compile(r"<!-- tabs: ([\w.]+) -->\n")
_LANGUAGE_LINK = re.compile(r"^\[(中文|English)\]\([\w./-]+\)\n+", re.MULTILINE)
_MARK_OF_A_TEST = re.compile(
    r"^ *<!-- (?:not run|run by|run on|not parsed): .*?-->\n", re.MULTILINE | re.DOTALL
)  # see tests/documents.py


def documents(folder: Path = DOCS) -> list[Path]:
    """Return the Markdown files of ``docs/``."""
    return sorted(folder.rglob("*.md"))


def stage(target: Path = TARGET) -> None:
    """Write everything that mkdocs reads to ``target``; a file that did not change keeps its time."""
    made = dict(pages())
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in (".svg", ".css", ".js", ".txt", ".png", ".gif", ".webp") and path.name != "requirements.txt":
            made[path.relative_to(DOCS).as_posix()] = path.read_bytes()
    made.update(figures())
    for name, content in made.items():
        file = target / name
        if not file.exists() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    for file in [path for path in target.rglob("*") if path.is_file()]:
        if file.relative_to(target).as_posix() not in made:
            file.unlink()


def pages() -> Iterator[tuple[str, bytes]]:
    """Yield the pages, by their paths in the site."""
    sources = (
        {path.relative_to(ROOT).as_posix(): path.relative_to(DOCS).as_posix() for path in documents()} | OUTSIDE | HOME
    )
    sources |= {f"examples/{name}": f"examples/{Path(name).stem}.md" for name in examples()}
    url = repository_url()
    for source, name in sources.items():
        text = example_page(source) if source.endswith(".py") else (ROOT / source).read_text(encoding="utf-8")
        text = adapted(_TABS.sub(level_tabs, text), source, name, sources | README, url)
        if source == "benchmarks/RESULTS.md":
            text = with_figures(text)
        text = re.sub(
            r"^(!\[.*\]\()report\.png\)$",
            r"\1report.png#only-light)\n\1report-dark.png#only-dark)",
            text,
            flags=re.MULTILINE,
        )
        if name.removesuffix(".md").removesuffix(".zh") in _ALONE:
            text = f"---\nhide: [navigation]\n---\n\n{text}"
        yield name, text.encode()
    yield "command_reference.md", _beside("command_reference").page().encode()
    yield from ((f"api/{name}", text.encode()) for name, text in api_pages().items())


def repository_url() -> str | None:
    """Return the repository's address from pyproject.toml, if it states one."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"(?ms)^\[project\.urls\]$(.*?)(?=^\[|\Z)", text)
    found = dict(re.findall(r'^"?(\w+)"? *= *"([^"]+)"', section[1], re.MULTILINE)) if section else {}
    return next((found[name].rstrip("/") for name in ("Source", "Repository", "Homepage") if name in found), None)


def adapted(text: str, source: str, name: str, sources: Mapping[str, str], url: str | None) -> str:
    """Return the page ``source`` as mkdocs reads it at ``name``."""
    text = _MARK_OF_A_TEST.sub("", _LANGUAGE_LINK.sub("", text, count=1))
    return "\n".join(_with_links(_with_deep_lists(_with_titles(text.splitlines())), source, name, sources, url)) + "\n"


def _with_titles(lines: list[str]) -> Iterator[str]:
    """Write the titles of code blocks (```python train.py) as mkdocs expects them; titles that name a test's block are left out."""
    fence = ""
    for line in lines:
        if (match := _FENCE.match(line)) and (not fence or match[2] == fence):
            if not fence and match[4]:
                title = match[4] if match[3] != "diff" and re.fullmatch(r"[\w./-]+\.\w+", match[4]) else ""
                line = f"{match[1]}{match[2]}{match[3]}" + (f' title="{title}"' if title else "")
            fence = "" if fence else match[2]
        yield line


def _with_deep_lists(lines: Iterator[str]) -> Iterator[str]:
    """Indent nested lists and what belongs to an item by four columns, which Python-Markdown requires."""
    offsets: list[tuple[int, int]] = []  # of the items around a line: column of the marker, column of the text
    fence, before = "", ""
    for line in lines:
        mark = _FENCE.match(line)
        indent = len(line) - len(line.lstrip())
        item = None if fence else _ITEM.match(line)
        if line.strip() and not fence:
            inner = offsets and before.strip()  # a line right below continues its paragraph, whatever its indent
            while offsets and indent < offsets[-1][1] and (item or not inner):
                offsets.pop()
            if (
                item
                and not offsets
                and before.strip()
                and not _ITEM.match(before)
                and not before.startswith((" ", "#", "|"))
            ):
                yield ""
        depth = len(offsets)
        if line.strip() and depth:
            text = indent - offsets[-1][1]
            line = " " * (4 * depth + max(text, 0)) + line.lstrip()
        if item:
            offsets.append((indent, len(item[0])))
        if mark and (not fence or mark[2] == fence):
            fence = "" if fence else mark[2]
        yield line
        before = line


def _with_links(
    lines: Iterator[str], source: str, name: str, sources: Mapping[str, str], url: str | None
) -> Iterator[str]:
    def change(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = sources.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if _FILE_NAME.fullmatch(text):
            is_introduced = match.string.startswith((":", "\uff1a"), match.end())  # what the page is about follows
            text = _name_of_page(inside or text, found, is_chinese=name.endswith(".zh.md"), is_short=is_introduced)
        if inside is not None and not (ROOT / found).is_dir():
            default = re.sub(r"\.zh\.md$", ".md", inside)  # the plugin shows a page's language by itself
            is_translated = inside == default and inside.replace(".md", ".zh.md") in sources.values()
            # From a Chinese page to its English page, or to a heading of an English page: an address.
            if name.endswith(".zh.md") and (name.replace(".zh.md", ".md") == inside or (anchor and is_translated)):
                address = posixpath.relpath(default, posixpath.join("zh", posixpath.dirname(name))).removesuffix(".md")
                return f"[{text}]({address}.html{'#' if anchor else ''}{anchor})"
            other = default if name.endswith(".zh.md") or inside == default else f"zh/{default}"
            if other.startswith("zh/"):  # from an English page to a Chinese one: an address, not a file
                return f"[{text}]({posixpath.relpath(other, posixpath.dirname(name) or '.').removesuffix('.md')}.html)"
            link = posixpath.relpath(default, posixpath.dirname(name) or ".")
            return f"{image}[{text}]({link}{'#' if anchor else ''}{anchor})"
        return f"[{text}]({url}/blob/main/{found})" if url else text

    fence = ""
    for line in lines:
        mark = _FENCE.match(line)
        if mark and (not fence or mark[2] == fence):
            fence = "" if fence else mark[2]
        yield line if fence or mark else _LINK.sub(change, line)


def _name_of_page(file_name: str, source: str, *, is_chinese: bool, is_short: bool) -> str:
    """Return what the site calls a page that the text calls by its file: its title, or, if ``is_short``, the file's name in words."""
    chinese = ROOT / re.sub(r"(\.zh)?\.md$", ".zh.md", source)
    path = chinese if is_chinese and chinese.exists() else ROOT / source
    if is_short or not path.is_file():
        return re.sub(r"(\.zh)?\.md$", "", posixpath.basename(file_name)).replace("_", " ")
    title = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return file_name if title is None else re.split(": |\uff1a", title[1])[0]


def level_tabs(match: re.Match[str]) -> str:
    """Return the programs of a page, such as levels.md, in tabs with the headings above them."""
    text = (DOCS / match[1]).read_text(encoding="utf-8")
    found = re.findall(r"(?ms)^## ([^\n]+)$(?:(?!^## ).)*?^```python (level\d\.py)\n(.*?)^```$", text)
    return "\n".join(
        f'=== "{title.replace("`", "")}"\n\n    ```python {name}\n{textwrap.indent(code, " " * 4)}    ```\n'
        for title, name, code in found
    )


def examples() -> list[str]:
    """Return the example programs, in the order of their names."""
    return sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def example_page(source: str) -> str:
    """Return a page that shows a program below the first line of its docstring."""
    code = (ROOT / source).read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(code)) or ""
    about = said.partition("\n\n")[0].replace("\n", " ").replace("<", "&lt;")
    return f"# {Path(source).stem}\n\n{about}\n\n````python {Path(source).name}\n{code}````\n"


def public_names(module: str) -> list[str]:
    """Return the names in a module's ``__all__``, or in the stub of ``echelon``."""
    folder = SOURCE / module.replace(".", "/")
    if module == "echelon":
        tree = ast.parse((folder / "__init__.pyi").read_text(encoding="utf-8"))
        found = [(node.module, alias) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        hidden = (
            "echelon",
            "echelon._version",
            "echelon.compat.unsupported",
        )  # submodules, and names that raise when they are used
        return [str(alias.asname) for origin, alias in found if origin not in hidden]
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def defined_at(name: str) -> str:
    """Return the path of a public name's definition, which the imports of its package lead to."""
    module, _, own = name.rpartition(".")
    folder = SOURCE / module.replace(".", "/")
    files = [folder / "__init__.pyi", folder / "__init__.py", folder.with_suffix(".py")]
    for node in ast.parse(next(file for file in files if file.exists()).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == own:
                    return defined_at(f"{node.module}.{alias.name}")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if own in (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)):
            return name
    raise LookupError(f"{name} is neither defined nor imported in {module}")


def names_of(page: str) -> list[str]:
    """Return the names on a page of the API reference."""
    listed = [name for _, _, names in API.values() for name in names]
    found: list[str] = []
    for name in API[page][2]:
        module, star = name.rpartition(".")[::2]
        found += (
            [f"{module}.{each}" for each in public_names(module) if f"{module}.{each}" not in listed]
            if star == "*"
            else [name]
        )
    return found


def missing_names() -> list[str]:
    """Return the public names that no page of the API reference shows."""
    shown = {name for page in API for name in names_of(page)}
    top = {name.rpartition(".")[2] for name in shown}
    missing = [f"echelon.{name}" for name in public_names("echelon") if f"echelon.{name}" not in shown]
    return missing + [f"{module}.{name}" for module in MODULES for name in public_names(module) if name not in top]


def api_pages() -> dict[str, str]:
    """Return the pages of the API reference."""
    made = {}
    rows = []
    for page, (title, about, _) in API.items():
        lines = [*_SEARCHED_LAST, f"# {title}", "", about, ""]
        for name in names_of(page):
            lines += _reference(name)
        made[f"{page}.md"] = "\n".join(lines)
        names = ", ".join(f"[`{name.rpartition('.')[2]}`]({page}.md#{defined_at(name)})" for name in names_of(page))
        rows.append(f"| [{title}]({page}.md) | {names} |")
    made["index.md"] = "\n".join(
        [*_SEARCHED_LAST, "# API reference", "", "Every public name, with the page that describes it. The members that only scripts for Accelerate read,",
         "and modules whose paths are those of Accelerate (`echelon.utils`, `echelon.state`, ...), are in",
         "[the compatibility table](../accelerate_compat.md).", "",
         "| page | names |", "|---|---|", *rows, "",
         "## Collective", "",
         "A function marked **Collective** exchanges data between ranks. Call it on every rank, in the same order; a rank that does not call it",
         "leaves the others waiting. So do not call it inside `if accelerator.is_main_process:`: call it on every rank, and use the result on one.",
         "[Why a run hangs](../guides/hangs.md) shows what echelon reports if a rank is missing.", ""]
    )  # fmt: skip
    return made


def _reference(name: str) -> Iterator[str]:
    """Yield the directives of a public name: one for the whole, or one for each member that docs/api_members.py lists."""
    groups = _beside("api_members").MEMBERS.get(name)
    path, own = defined_at(name), name.rpartition(".")[2]
    if groups is None:
        yield from _directive(path, name, own)
        return
    direct = groups.get("", [])
    yield from _directive(
        path, name, own, f"members: [{', '.join(direct)}]", f"inherited_members: {str(bool(direct)).lower()}"
    )
    for title, members in groups.items():
        if title:
            yield from ("", f"## {title}", "")
            for member in members:
                yield from _directive(f"{path}.{member}", member, member, "heading_level: 3")


def _directive(path: str, heading: str, label: str, *options: str) -> Iterator[str]:
    yield from (f"::: {path}", "    options:", f"      heading: {heading}", f"      toc_label: {label}")
    yield from (f"      {line}" for line in options)
    yield ""


def figures() -> dict[str, bytes]:
    """Return the plots of the benchmarks."""
    draw = _beside("draw_benchmarks")
    return {f"figures/{name}.svg": svg for name, svg in draw.drawn().items()} if draw else {}


def with_figures(text: str) -> str:
    """Put each plot above the first table of its section."""
    draw = _beside("draw_benchmarks")
    parts = re.split(r"(?m)^(?=## )", text)
    for number, part in enumerate(parts):
        name = draw.names().get(part.partition("\n")[0].removeprefix("## ")) if draw else None
        if name:
            title = part.partition("\n")[0].removeprefix("## ")
            image = f"![Plot: {title}](figures/{name}-light.svg#only-light)\n![Plot: {title}](figures/{name}-dark.svg#only-dark)\n"
            parts[number] = re.sub(
                r"((?:^\|.*\n)+)", lambda match, image=image: f"{image}\n{match[1]}", part, count=1, flags=re.MULTILINE
            )
    return "".join(parts)


def _beside(module: str) -> Any:
    """Import a module of this folder, when it is needed: matplotlib is in the environment of the site only."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(DOCS))


def navigation(exists: Callable[[str], bool], folder: Callable[[str], list[str]]) -> list[Any]:
    """Return mkdocs' ``nav``: NAVIGATION with the folders filled in, without the pages that do not exist."""
    named = {
        page
        for _, entries in NAVIGATION
        for entry in entries
        for page in (entry[1] if isinstance(entry, tuple) else [entry])
    }

    def fill(entries: list[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in entries:
            if isinstance(entry, tuple):
                inner = fill(entry[1])
                found += [{entry[0]: inner}] if inner else []
            elif entry == "api/*":
                found += [f"api/{page}.md" for page in API]
            elif entry.endswith("/*"):
                found += [page for page in folder(entry[:-2]) if page not in named]
            elif exists(entry):
                found.append(entry)
        return found

    made = []
    for title, entries in NAVIGATION:
        inner = fill(list(entries))
        made += [{title: inner[0] if len(inner) == 1 and isinstance(inner[0], str) else inner}] if inner else []
    return made


def on_config(config: Any) -> Any:
    """Write the pages, and set the navigation (mkdocs calls this)."""
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it reports how long it takes to load its dictionary
    stage()

    def folder(name: str) -> list[str]:
        return [
            f"{name}/{path.name}" for path in sorted((TARGET / name).glob("*.md")) if not path.name.endswith(".zh.md")
        ]

    config.nav = navigation(lambda page: (TARGET / page).exists(), folder)
    url = repository_url()
    if url:
        config.repo_url, config.repo_name = url, "echelon"
    config.edit_uri = None
    if autorefs := config.plugins.get(
        "autorefs"
    ):  # the second language is built with the same plugins: forget the first one's pages
        for known in ("_primary_url_map", "_secondary_url_map", "_title_map", "_breadcrumbs_map", "_abs_url_map"):
            getattr(autorefs, known).clear()
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> None:
    """Leave the English pages of the Chinese site out of the search, which has them once already (mkdocs calls this)."""
    if page.file.dest_uri.startswith("zh/") and not page.file.src_uri.endswith(".zh.md"):
        page.meta["search"] = {"exclude": True}


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Turn the names of documents ("docs/parity.md"), even in docstrings, into links (mkdocs calls this)."""
    inside = 0  # of a link, or of code

    def change(match: re.Match[str]) -> str:
        nonlocal inside
        if match["tag"]:
            if re.match(r"</?(a|code|pre)\b", match["tag"]):
                inside += -1 if match["tag"].startswith("</") else 1
            return match[0]
        file = files.get_file_from_path(f"{match['name']}.md")
        if inside or file is None:
            return match[0]
        name = f"{match['name']}.md"
        is_chinese = page.file.src_uri.endswith(".zh.md")
        title = _name_of_page(name, f"docs/{name}", is_chinese=is_chinese, is_short=False)
        return f'<a href="{file.url_relative_to(page.file)}">{title}</a>'

    if page.file.src_uri.startswith("api/") and page.file.name != "index":
        html = re.sub(r"(?<=<p>)Collective(?=: )|(?<=[.;] )Collective\b", _COLLECTIVE, html)
    return re.sub(r"(?P<tag><[^>]+>)|docs/(?P<name>[\w/]+)\.md", change, html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Leave out the addresses of a page's translations (mkdocs calls this).

    The theme requests a site map beside each of them, which does not exist there: an error on the console.
    """
    return re.sub(r'<link rel="alternate"[^>]*>', "", output)


if __name__ == "__main__":
    stage()
