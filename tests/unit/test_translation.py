"""Messages in the user's language: the catalogue cannot rot, and costs nothing in English."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import click
import pytest

from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.messages import translation
from echelon.base.messages.catalogue import Catalogue, placeholders, read_po
from echelon.cli.launch_options import COMMON, EXAMPLES, GROUPS as LAUNCH_GROUPS
from echelon.cli.main import _run, cli
from echelon.cli.verify import GROUPS
from echelon.config.schema import RunConfig, field_docs
from echelon.config.speed_choices import speed_table
from echelon.diagnose.goodput import ITEMS as GOODPUT_ITEMS
from echelon.launch.failures.failure import ErrorRecord, Frame, RankEnd, explain
from echelon.report.page import page_texts, render_page
from echelon.report.rank_rows import RankRow
from echelon.status.board import StepPart

SOURCE = Path(translation.__file__).parents[2]
PO = SOURCE / "locale" / "zh_CN" / "LC_MESSAGES" / "echelon.po"
ENTRIES = read_po(PO.read_text(encoding="utf-8"))
# Formats rather than sentences: labels, and parts of lines that click or a format composes.
FORMATS = {
    *("where:", "do:", "logs:", "others:", "stacks:", "note:", "warning:", "[OPTIONS]", "COMMAND", "[ARGS]..."),
    *("rank {rank}", "flag {flag}", "flags {flags}", "file {place}", "env {name}", "code {call}"),
    "{rank} failed first{thread}: echelon.base.errors.{kind}: {what}",
    *("rank {rank} of {number}", "rank {rank} of {number}, on {machine}"),
    *(
        "directory {folder}",
        "set {name} to one of {names}",
        "note ({state}): {what}",
        " {seconds} s later",
        "{time} left",
        "ranks {numbers}",
        "and {number} more",
    ),
    *(f"state: {part}" for part in ("in {calls}", "at {place}", "last seen at {place}", "exited (code {number})")),
    *(f"{{amount}} {{unit}}, {{rest}} {{same}} {what}" for what in ("free", "available")),
    *(f"part: {name}" for name in (*(part.name.lower() for part in StepPart), "wait")),
    *("{number} seconds", "{number} minutes", "{number} hours", "1 minute", "1 hour"),
    *(f"{item} {{seconds}} s" for item in GOODPUT_ITEMS),
}
# Sentences that echelon verify composes of parts.
_OF_VERIFY = {
    *(
        f"{{state}} on {{part}}: {what}"
        for what in ("not loaded", "not in the checkpoint", "inf or nan, unlike in the reference run")
    ),
    "{state} on {part}: {number} elements are inf or nan, {count} in the reference run",
    *(
        f"relative difference of {{state}} {where}: {{value}}"
        for where in ("on {part}", "on rank {rank} of {number}", "between {ranks}")
    ),
    "relative difference: {value}",
    *(
        f"{{number}} of the {{count}} samples of the reference run are missing and {{cores}} {extra}"
        for extra in ("other samples are used instead", "samples are used once too often")
    ),
    *(
        f"update {{number}} has the samples that the reference run has in update {{count}}, {{cores}} update(s) {when}"
        for when in ("later", "earlier")
    ),
    *(
        f"update {{number}} has the samples that the reference run reads {{count}} samples {when}"
        for when in ("later", "earlier")
    ),
    *(
        f"{{ranks}} {call} backward without a forward pass in training mode{end}"
        for call in ("call", "calls")
        for end in ("", ", unlike the other ranks: the model is in evaluation mode there")
    ),
    *(
        f"the model is in {ours} mode, in the reference run in {theirs} mode"
        for ours, theirs in (("evaluation", "training"), ("training", "evaluation"))
    ),
    *(
        f"{{what}}: it is {how} over the {{number}} ranks"
        for how in ("summed instead of averaged", "averaged twice", "summed twice")
    ),
    "{what}, and so is the loss; {number} is the number of ranks",
    *(f"the {{number}} ranks step with different gradients{names}" for names in ("", " of {names}")),
    *(
        f"each rank steps with its own gradient{names}, which was not averaged over the {{number}} ranks"
        for names in ("", " of {names}")
    ),
    *(
        f"the {kinds} have the wrong weights in the gradient ({{numbers}}): a mean over all items, as on one process, has the weights "
        "{others}"
        for kinds in ("ranks", "micro-steps")
    ),
    *(
        f"{{what}}: it is multiplied by {factor}"
        for factor in ("the number of ranks", "1 / the number of ranks", "the square root of the number of ranks")
    ),
    *(
        f"{{what}}, where it is that of update {{number}}: the schedule is {{count}} update(s) {how}"
        for how in ("ahead", "behind")
    ),
    *(f"same {drawn} on every rank" for drawn in ("dropout masks", "random numbers")),
    *("{names} and {number} other", "{names} and {number} others", "Not compared:"),
    *("{number} tensors", "{number} updates", "one process", "dropout masks repeat", "random numbers repeat"),
    *("schedule ahead", "schedule behind", "{waiters} and {later} not restored"),
    "{waiters} and {later} and {state} not restored",
}
# Sentences that the source composes of parts; the tests below produce them.
COMPOSED = {
    *(
        f"{{ranks}} {verb} {{calls}}{inside}, but {{rest}} {{does}} not: {{it}} in a forward or backward pass"
        for verb in ("call", "calls")
        for inside in ("", " in the training loop ({loop})")
    ),
    *(
        f"resuming from {{path}}: step {{number}}, epoch {{count}}{position}"
        for position in ("", ", after {batches} batches of each process", ", after {samples} samples")
    ),
    *(
        f"global batch {{count}} = {{processes}} process{{es}} x {micro}{{samples}} samples"
        for micro in ("", "{number} micro-steps x ")
    ),
    *("ended with exit code {number}", "ended with exit code {number} {seconds} s later"),
    *("limit reached (--slow_timeout {number})",),
    "limit reached (--slow_timeout {number}, {count} times --stall_timeout)",
    "was killed by {name} (signal {number}){later}",
    "the ranks lost contact with each other; gloo aborted rank {rank} as a result",
    "goodput {part} of {seconds} s: {items}; {number} restart{s}",
    *(
        f"time {{seconds}} s, not divided, because no training loop was recorded: {{items}}{restarts}"
        for restarts in ("", "; {number} restart{s}")
    ),
    *(
        "{path} contains one run, and a comparison needs two",
        "{path} contains no run, and a comparison needs two",
        *(
            f"The same run: {{number}} update{{s}} of {{script}} on {{count}} {noun} {verb} as {{against}}."
            for noun in ("process", "processes")
            for verb in ("train", "trains")
        ),
        *(
            f"Not the same run: {difference} from {{against}}."
            for difference in ("{number} of {count} layouts differ{s}", "training on {part} differs")
        ),
        *(
            f"same, {closeness}"
            for closeness in ("bit for bit", "within rounding", "within rounding ({part} of the bound)")
        ),
        "{number} update{s}, {seconds} s",
        "{part}: {number} updates, {seconds} s",
        *(f"{{number}} process{es}, {{setting}}" for es in ("", "es")),
        "and {number} other difference{s}; --html FILE shows them",
        *_OF_VERIFY,
        "differs: update {number}, {stage}",
        "differs: before the first update, {stage}",
        "CPU cores",
        "memory (MB)",
        "the run was interrupted",
        "evaluation, waiting",
        "forward/backward, waiting",
        "{number} processes on {count} machines",
    ),
    *(f"{{number}} {what}" for what in ("restarts", "step behind", "steps behind")),
    *(f"{{number}} process{es} {what}" for es in ("", "es") for what in ("started", "restarted (restart {count})")),
    "intact: {number} files, {amount} {unit}",
    "{path} (virtual environment)",
    *(
        f"the run {end} (exit code {{number}})"
        for end in ("succeeded", "failed", "saved and exited", "was interrupted")
    ),
    *(
        f"the run is live; state{where} (echelon watch {{run}} keeps it up to date):"
        for where in ("", " of the ranks on {host}")
    ),
    *(f"{{value}} {unit}/s on this machine" for unit in ("samples", "items")),
    *(line.strip() for line in speed_table("max").splitlines()),
    *("derived from {setting}, {origin}", "derived from sharded_by: as accelerate's launcher", "default"),
    *(
        f"{{number}} {ranks} on {{count}} {machines} ({{names}}), {{backend}}"
        for ranks, machines in (("rank", "machine"), ("ranks", "machine"), ("ranks", "machines"))
    ),
    "{number} updates on {count} rank{s} against plain PyTorch on one: relative error {difference} ({dtype}, tolerance {tolerance})",
    *(
        f"training on {{number}} ranks and on 1 rank produces {what}"
        for what in ("bit-identical weights", "different weights")
    ),
    "all_reduce of {amount} {unit}: {rate} GB/s bus bandwidth; {number} measurements",
    "{path}: created a token; copy this file to all machines in the run, unless they share the home folder",
    "wrote {path}, deleted {directory}",
    *(f"{kind} or none" for kind in ("an integer", "a number", "true or false", "text")),
    *(
        f"run this {advice}"
        for advice in (
            "on a login node of the cluster, or pass --dry_run to print the script without submitting it",
            "where kubectl can reach the cluster, or omit --apply to print the manifest",
        )
    ),
    "{number} of the {count} trainable parameters received no gradient in the last backward pass: {names}. DDP waits for them "
    "and has not averaged all gradients across ranks",
    *("every check passed ({seconds} s); results: {path}", "failed: {names} ({seconds} s); results: {path}"),
    *("filled in from {source}", "filled in from {setting}, {origin}"),
    *(
        f"loader {{number}}: {place}"
        for place in (
            *(
                "evaluation",
                "at the start of epoch {count}",
                "in epoch {count}",
                "in epoch {count}, after {samples} samples",
            ),
            "in epoch {count}, after {samples} of {all} samples",
            "in epoch {count}, after {samples} of {all} samples ({batches} batches of each rank)",
        )
    ),
}
SAMPLES = {
    "is": "are",
    "has": "has",
    "was": "were",
    "does": "do",
    "it": "it is",
    "ranks": "rank 3, 5",
    "duration": "7 hours",
}
ENDINGS = {"s", "es", "is", "was", "has", "does", "verb", "it"}
"""Placeholders for words that only English needs."""
# Sentences of click (8.1 to 8.5), with `{name}` for its values.
OF_CLICK = {
    *("Usage:", "Options:", "Commands:", "Show the version and exit.", "Show this message and exit."),
    "missing argument {name}",
}
_VALUE = re.compile(r"%[.\d]*[sdrgf]")
_SPACES = re.compile(r"\s+")


def _canonical(template: str) -> str:
    """Return ``template`` with nameless placeholders and single spaces."""
    return _SPACES.sub(" ", re.sub(r"\{\w*\}", "{}", template)).strip()


@cache
def _sentences() -> tuple[frozenset[str], str]:
    """Return each string of the source as a template, and all of them as one text."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {_canonical(_escape(part)) for part in (node.value, *re.split(r"\n\s*\n", node.value))}
                if "%" in node.value:  # a line for a logger
                    found.add(_canonical(_VALUE.sub("{}", _escape(node.value))))
            elif isinstance(node, ast.JoinedStr):
                found.add(_canonical("".join(map(_part, node.values))))
    texts = {*(text.replace("``", "") for text in field_docs(RunConfig).values())}
    headings = {f"{heading}:" for heading in (*LAUNCH_GROUPS, *COMMON, *GROUPS, "Examples") if heading}
    found |= set(map(_canonical, page_texts()))
    short = {text for group in COMMON.values() for text in group.values()} | {text for _, text in EXAMPLES}
    found |= {_canonical(_escape(text)) for text in texts | headings | short}
    return frozenset(found), "\n".join(sorted(found))


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _part(node: ast.expr) -> str:
    return _escape(str(node.value)) if isinstance(node, ast.Constant) else "{}"


@pytest.mark.slow
def test_each_msgid_is_a_sentence_of_the_source() -> None:
    sentences, text = _sentences()

    def is_known(wanted: str) -> bool:
        # A sentence may be part of a longer one, or composed of two: `use {} or fewer, or add` and `{} --oversubscribe ...`.
        return wanted in sentences or wanted in text or _is_composed(wanted)

    gone = [
        msgid for msgid in ENTRIES if msgid not in FORMATS | OF_CLICK | COMPOSED and not is_known(_canonical(msgid))
    ]
    assert gone == [], f"the source no longer has these sentences; correct the entries in {PO.name}"


def _is_composed(wanted: str) -> bool:
    """Return whether two sentences of the source make ``wanted``, such as `use --num_processes {} or fewer, or add` + `{} ...`."""
    sentences, _ = _sentences()
    return any(
        wanted.startswith(first) and _ends(wanted[len(first) :], sentences) for first in sentences if len(first) > 12
    )


def _ends(rest: str, sentences: frozenset[str]) -> bool:
    rest = rest.strip()
    return rest in sentences or f"{{}} {rest}" in sentences


def test_placeholders_agree() -> None:
    for msgid, msgstr in ENTRIES.items():
        names = placeholders(msgid)
        assert len(set(names)) == len(names), f"{msgid}: each placeholder has a name of its own"
        assert set(placeholders(msgstr)) <= set(names), msgid
        assert set(names) - set(placeholders(msgstr)) <= ENDINGS, msgid


def test_a_template_has_enough_fixed_text_to_be_recognized() -> None:
    templates = [msgid for msgid in ENTRIES if placeholders(msgid) and msgid not in FORMATS]
    short = [msgid for msgid in templates if len(re.findall(r"\w", re.sub(r"\{\w*\}", "", msgid))) < 5]
    assert short == []


@pytest.mark.slow
def test_each_template_translates_its_own_message() -> None:
    chinese = Catalogue(ENTRIES)
    for msgid, msgstr in ENTRIES.items():
        values = {name: SAMPLES.get(name, str(number + 70)) for number, name in enumerate(placeholders(msgid))}
        translated = {name: chinese.translate(value) if name == "duration" else value for name, value in values.items()}
        assert chinese.translate(msgid.format(**values)) == msgstr.format(**translated)


def test_the_catalogue_has_the_messages_that_users_meet_most() -> None:
    templates = [msgid for msgid in ENTRIES if msgid not in FORMATS | OF_CLICK]
    assert len(templates) > 350
    assert not [msgid for msgid in templates if not re.search("[\u4e00-\u9fff]", ENTRIES[msgid])]


# Warnings whose text is composed of other sentences, and those about TrainingArguments and DeepSpeed's dp engine.
_COMPOSED_WARNINGS = {
    *("base/warnings.py", "config/sources.py", "accelerator/update/batch_split_check.py", "trainer/unread_members.py"),
    *(
        "accelerator/checkpoint/checkpoint_store.py",
        "accelerator/prepare/prepare_arguments.py",
        "accelerator/update/unprepared_optimizer.py",
        "trainer/trainer_methods.py",
    ),
    *("checkpoint/background_save.py", "distributed/checks/loader_agreement.py", "engines/dp.py"),
    *("trainer/arguments/renamed.py", "trainer/data/epoch_batches.py", "accelerator/update/exact_update.py"),
}


@pytest.mark.slow
def test_each_warning_is_in_the_catalogue() -> None:
    known = {_canonical(msgid) for msgid in ENTRIES}
    missing = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("warn", "warn_here"):
                (text, *_) = node.args
                found = "".join(map(_part, text.values)) if isinstance(text, ast.JoinedStr) else ""
                found = _escape(text.value) if isinstance(text, ast.Constant) else found
                first = _canonical(found.split("\n")[0])
                if first not in known and name not in _COMPOSED_WARNINGS:
                    missing.append(f"{name}:{node.lineno}: {first}")
    assert missing == []


def _commands(group: click.Command, context: click.Context) -> list[tuple[str, click.Command]]:
    found = [(context.command_path, group)]
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            one = group.get_command(context, name)
            assert one is not None
            found += _commands(one, click.Context(one, parent=context, info_name=name))
    return found


def test_all_of_launchs_help_is_translated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _speak_chinese(monkeypatch)
    for argv in (["launch", "--help"], ["launch", "--help-all"], ["--help"]):
        assert _run(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("\u7528\u6cd5\uff1aechelon")
        prose = [line for line in lines if re.search(r"[a-z]{3,} [a-z]{3,} [a-z]{3,} [a-z]", line)]
        assert [line for line in prose if "echelon launch" not in line] == []


def test_the_help_of_each_command_is_in_the_catalogue() -> None:
    missing, chinese = [], Catalogue(ENTRIES)
    for path, one in _commands(cli, click.Context(cli, info_name="echelon")):
        context = click.Context(one)
        records = [p.get_help_record(context) for p in one.params if isinstance(p, click.Option)]
        texts = [re.sub(r"\s+\[[^\]]*\]$", "", record[1]) for record in records if record is not None]
        texts += [paragraph.replace("\b", "") for paragraph in re.split(r"\n\s*\n", one.help or "")]
        texts = [_SPACES.sub(" ", text).strip() for text in texts]
        missing += [f"{path}: {text}" for text in texts if text and chinese.translate(text) == text]
    assert missing == []


# Messages that a new user saw half in Chinese, with a part of the expected translation, or None for English.
_SEEN: dict[str, str | None] = {
    "  where: rank 1 of 2, /tmp/run/noprep_dl.py:10": "rank 1\uff08\u5171 2 \u4e2a\uff09\uff0c/tmp/run/noprep_dl.py:10",
    "rank 0: in gather of float32[]; step 4, train.py:3": None,
    "    rank 0: in reduce(mean) of float32[4]; at train.py:10: values = reduce(values)": "    rank 0\uff1a\u5728 reduce(mean) of float32[4] \u4e2d\uff1b\u4f4d\u4e8e train.py:10: values = reduce(values)",
    "    ranks 1-3: step 4, training; last seen at /tmp/train.py:3": "    rank 1-3\uff1astep 4\uff0c\u8bad\u7ec3\uff1b\u6700\u540e\u4f4d\u4e8e /tmp/train.py:3",
    "    rank 2: exited (code 1)": "    rank 2\uff1a\u5df2\u9000\u51fa\uff08\u9000\u51fa\u7801 1\uff09",
    "    rank 2: ValueError: it is broken; at train.py:3": None,
    "  where: a tensor of 2, /tmp/run/train.py:10": None,
    "mixed_precision='fp7' is not one of no, fp16, bf16, fp8": "\u4e0d\u662f no, fp16, bf16, fp8 \u4e4b\u4e00",
    "parity='exakt' is not one of off, exact, bitwise": "\u4e0d\u662f off, exact, bitwise \u4e4b\u4e00",
    "parity='exakt' is not the name of a parity": None,
    "  do:    set mixed_precision to one of no, fp16": "\u628a mixed_precision \u8bbe\u4e3a no, fp16 \u4e4b\u4e00",
    "  do:    use one of these": "\u5e94\u4e3a\u5176\u4e2d\u4e4b\u4e00",
    "  do:    use one of the columns of the data set": None,
    "TrainingArguments has no setting 'lerning_rate'": "\u6ca1\u6709\u540d\u4e3a 'lerning_rate' \u7684\u914d\u7f6e\u9879",
    "GPT has no parameter or buffer weight": None,
    "'a.b' has no '='": "'a.b' \u91cc\u7f3a\u5c11 '='",
    "0,1 names accelerators, but this machine has no accelerator that torch can use": "0,1 \u5199\u4e86\u52a0\u901f\u5668",
    "0,1 picks accelerators, but this machine has no accelerator that torch can use": None,
    "  where: directory /tmp/run": "\uff1a\u76ee\u5f55 /tmp/run",
    "  where: the middle of a file": None,
    "zero_stage=3 would have no effect: the model is not sharded": "\u6a21\u578b\u6ca1\u6709\u5206\u7247",
    "zero_stage=3 would have no effect: the moon is full": None,
    "max_steps='x' is not an integer": "max_steps='x' \u4e0d\u662f\u6574\u6570",
    "  do:    do what no catalogue knows": None,
}


@pytest.mark.parametrize(("english", "expected"), _SEEN.items())
def test_a_message_is_translated_completely_or_not_at_all(english: str, expected: str | None) -> None:
    shown = Catalogue(ENTRIES).translate_lines(english)
    assert shown == english if expected is None else expected in shown
    assert not _is_mixed(shown)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, *(pytest.param(shift, marks=pytest.mark.soak) for shift in (1, 2))])
def test_no_known_message_is_translated_by_half(shift: int) -> None:
    chinese = Catalogue(ENTRIES)
    sentences, _ = _sentences()
    values = ("'v'", "rank 2", "a.toml, /tmp/b.py")  # of each message, one at a time
    short = sorted(text for text in sentences if len(text) < 400)
    filled = {text.replace("{}", values[(i + shift) % len(values)]) for i, text in enumerate(short)}
    pages = [page for folder in ("", "guides") for page in (SOURCE.parents[1] / "docs" / folder).glob("*.md")]
    filled |= {line for page in pages for line in _output(page.read_text(encoding="utf-8"))}
    shown = {text: chinese.translate_lines(text) for text in filled if not re.search(_CHINESE, text)}
    assert sum(text != translated for text, translated in shown.items()) > 400
    assert [translated for translated in shown.values() if _is_mixed(translated)] == []


_CHINESE = "[\u4e00-\u9fff]"
# Not English: quoted values, commands, the arguments of flags, terms that Chinese text uses too, and another library's exception.
_CODE = re.compile(
    r"'[^']*'|\"[^\"]*\"|`[^`]*`|\b(?:echelon|accelerate|pip|rm|chmod|python|kubectl) [^\u4e00-\u9fff]*|--\w+ \w+|"
    r"\b[a-z_]+ number \d+(?: of [a-z]+\d*\[)?|\b[a-z_]+ of [a-z]+\d*\[|\brank [\d, -]+ in\b|\b(?:world size|state dict|local rank|srun task|fork|hostfile)\b|\b(?!echelon)\w+Error: .*"
)


def test_a_label_is_not_part_of_a_value() -> None:
    note = "--cpu after the script was passed to train.py, not to the launcher; put launcher flags before the script: "
    note += "echelon launch --cpu ... train.py"
    chinese = Catalogue(ENTRIES)
    assert chinese.translate_lines(f"note: {note}") == ENTRIES["note:"] + chinese.translate(note)
    assert "note:" not in chinese.translate_lines(f"echelon: note: {note}")


def _is_mixed(shown: str) -> bool:
    lines = [_CODE.sub("", line) for line in shown.split("\n") if re.search(_CHINESE, line)]
    return any(re.search(r"(?<![\w./=-])[a-z]{2,} [a-z]{2,}(?![\w/=(])", line) for line in lines)


def _output(page: str) -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "zh_CN"),
        ({"LANG": "zh"}, "zh_CN"),
        ({"LANG": "zh_Hans"}, "zh_CN"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN.utf8"}, "zh_CN"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh_CN"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en:zh_CN"}, None),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, None),
        ({"LANG": "zh_TW.UTF-8"}, None),
        ({"LANG": "de_DE.UTF-8"}, None),
        ({}, None),
    ],
)
def test_the_locale_decides(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert translation.language() == expected


def test_a_terminal_that_cannot_show_chinese_gets_english(monkeypatch: pytest.MonkeyPatch) -> None:
    _speak_chinese(monkeypatch)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert translation.translate("remove one of them") == "remove one of them"


def test_a_logger_without_handlers_speaks_the_users_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logger = logging.getLogger("echelon.a_test")
    monkeypatch.setattr(logger, "propagate", False)  # pytest has handlers above it
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    _speak_chinese(monkeypatch)
    for text in ("no checkpoint in %s: starting from scratch", "what no catalogue knows, 100 %% of %s"):
        get_logger("echelon.a_test").warning(text, tmp_path)
    chinese = ENTRIES["no checkpoint in {path}: starting from scratch"].format(path=tmp_path)
    assert capsys.readouterr().err.splitlines() == [chinese, f"what no catalogue knows, 100 % of {tmp_path}"]
    logger.addHandler(handler := logging.FileHandler(tmp_path / "log.txt"))
    try:
        get_logger("echelon.a_test").warning("no checkpoint in %s: starting from scratch", tmp_path)
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log.txt").read_text() == f"no checkpoint in {tmp_path}: starting from scratch\n"


def test_errors_are_translated_when_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError(
        "300 processes on 2 cores: the limit is 8 per core",
        where="flag --num_processes, rank 1",
        do="use --num_processes 16 or fewer, or add --oversubscribe to start them anyway",
    )
    english = str(error)
    assert english.splitlines()[1] == "  where: flag --num_processes, rank 1"
    _speak_chinese(monkeypatch)
    assert str(error).splitlines() == [
        "2 \u4e2a CPU \u6838\u4e0a\u6709 300 \u4e2a\u8fdb\u7a0b\uff1a\u4e0a\u9650\u662f\u6bcf\u6838 8 \u4e2a",
        "  \u4f4d\u7f6e\uff1a\u547d\u4ee4\u884c\u53c2\u6570 --num_processes, rank 1",
        "  \u5efa\u8bae\uff1a\u7528 --num_processes 16 \u6216\u66f4\u5c11\uff0c\u6216\u52a0\u4e0a --oversubscribe \u5f3a\u884c\u542f\u52a8",
    ]
    assert error.in_english() == english


def test_a_report_keeps_the_users_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ErrorRecord(
        time_ns=1,
        type="ValueError",
        message="remove one of them {x}",
        frames=(Frame(file="a.py", line=3, function="f"),),
    )
    what, _, do = explain([RankEnd(rank=0, exit_code=1, record=record)], logs="above")
    _speak_chinese(monkeypatch)
    assert (
        translation.translate_lines(what) == "rank 0 \u6700\u5148\u51fa\u9519\uff1aValueError: remove one of them {x}"
    )
    assert translation.translate_lines(do).startswith("\u4fee\u6b63\u8fd9\u4e2a\u9519\u8bef")


def test_an_error_of_echelon_is_translated_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "backward() got a loss that does not require grad\n  where: rank 0\n  do:    reduce it, for example with loss.mean()"
    record = ErrorRecord(time_ns=1, type="echelon.base.errors.UsageError", message=message)
    what, where, do = explain([RankEnd(rank=0, exit_code=1, record=record)], logs="above")
    assert (where, do) == ("rank 0 of 1", "reduce it, for example with loss.mean()\n  logs:  above")
    _speak_chinese(monkeypatch)
    assert translation.translate_lines(what).endswith(ENTRIES["backward() got a loss that does not require grad"])


def test_english_loads_no_catalogue() -> None:
    program = (
        "import sys; from echelon.base.errors import ConfigError; calls = []; "
        "sys.setprofile(lambda *event: calls.append(event)); str(ConfigError('a', do='b')); sys.setprofile(None); "
        "assert len(calls) < 1000, len(calls); "  # 370,000 with the catalogue
        "print(sorted({'echelon.base.messages.catalogue', 'gettext'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


def test_all_texts_of_the_report_page_are_in_the_catalogue() -> None:
    assert [text for text in page_texts() if text not in ENTRIES] == ["rank", "Loss"]


def test_the_report_page_has_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"title": "a run", "runs": []}
    _clear(monkeypatch)
    english = render_page(data)
    assert '<html lang="en">' in english
    assert '"texts":{}' in english
    assert not re.search(_CHINESE, english)
    _speak_chinese(monkeypatch)
    chinese = render_page(data)
    assert '<html lang="zh-CN">' in chinese
    assert ENTRIES["Skip to the report"] in chinese
    (texts,) = re.findall(r'"texts":(\{.*?\})\}</script>', chinese)
    assert json.loads(texts)["Where the time went"] == ENTRIES["Where the time went"]


# What the terms do not apply to: code, commands, flags, placeholders, and compounds with another meaning.
_NO_TERMS = re.compile(
    r"`[^`]*`|'[^']*'|\"[^\"]*\"|--[\w-]+|\{[^}]*\}|\w+\([^)]*\)(?:\.\w+)?|\w+\.\w+|\w+=\w*|\b[A-Z_]{3,}\b|\w*_\w*|"
    r"\bechelon checkpoint \w+|\bdevice map\b|\bunsharded\b|\baccelerator = "
)


def _terms() -> list[tuple[str, list[str], list[str]]]:
    page = (SOURCE.parents[1] / "docs" / "translating.md").read_text(encoding="utf-8")
    table = page.partition("<!-- terms: ")[2].partition("<!-- end of terms -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    found = [(row[0], [row[1], *row[2].split("\u3001")], row[3].split("\u3001")) for row in rows[2:]]
    return [(english, [w for w in words if w], [w for w in wrong if w]) for english, words, wrong in found]


@pytest.mark.slow
def test_translations_obey_the_table_of_terms() -> None:
    terms = _terms()
    assert len(terms) > 35
    faults = []
    for msgid, msgstr in ENTRIES.items():
        text = _NO_TERMS.sub(" ", msgid)
        for english, words, wrong in terms:
            is_used = re.search(rf"(?<![\w-]){english}(?:s|es)?(?![\w-])", text)
            if is_used and not any(word in msgstr for word in words):
                faults.append(f"{english} is {words[0]}: {msgid} -> {msgstr}")
            faults += [f"{english} is {words[0]}, not {word}: {msgstr}" for word in wrong if word in msgstr]
    assert faults == []


_PAGES = sorted((SOURCE.parents[1] / "docs").rglob("*.zh.md")) + [SOURCE.parents[1] / "README.zh.md"]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_chinese_pages_obey_the_table_of_terms_and_mark_links_to_english_pages(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`]*`", "``", prose)
    wrong = [word for _, _, words in _terms() for word in words]
    assert [word for word in wrong if word in prose] == []
    unmarked = []
    for match in re.finditer(r"\[([^\]]*)\]\(([\w./]+)\.md(?:#[^)]*)?\)", prose):
        is_english = not match[2].endswith(".zh") and not (page.parent / f"{match[2]}.zh.md").exists()
        if is_english and not prose[match.end() :].startswith(("\uff08\u82f1\u6587", "\uff0c\u82f1\u6587")):
            unmarked.append(match[0])
    assert unmarked == []


# Reports with every kind of stall, failure and time, as the launcher prints them.
_REPORTS = (
    "seed='abc' is not an integer or none",
    "stall (a missing rank): rank 1 has not reached the collective, and rank 0 waits for other ranks",
    "  where: no progress for 30 s (--stall_timeout 30); the run continues (--on_stall)",
    "  where: limit reached (--slow_timeout 600, 10 times --stall_timeout); the run stops (--on_stall)",
    "  where: limit reached (--slow_timeout 600); the run restarts (--on_stall)",
    "  do:    find out why this rank does not call the collective; every rank must call the same collectives",
    "stall (a stopped process): ranks 0-2, 5 are stopped (SIGSTOP), and ranks 3-4 wait for other ranks",
    "stall (a rank that does not answer): rank 3 is blocked by native code that holds the GIL",
    "stall (a phase that takes too long): rank 3 has been saving a checkpoint for 10 minutes, and rank 1 waits for other ranks",
    "stall (a phase that takes too long): rank 3 has been computing for 90 seconds, and rank 1 waits for other ranks",
    "stall (uneven data): rank 0 has exited, and rank 1 waits for other ranks",
    "stall (uneven data): rank 0 has left the training loop (train.py:12), but ranks 1-3 are still training",
    "stall (different shapes): rank 2 does not make the same call as the other ranks: ranks 0-1, 3 in all_reduce number 6 of "
    "float[4], rank 2 in all_reduce number 6 of float[9]",
    "stall (different collectives): rank 0 calls gather of float32[4] in the training loop (train.py:9), but rank 1 does not: it "
    "is in a forward or backward pass",
    "stall (unknown): ranks 0-1 wait for each other at the same line",
    "note (slow, but alive): rank 1 is slow, but alive, and rank 0 waits for other ranks",
    "  others: rank 0 failed with the same error; ranks 2-3 were killed by SIGSEGV (signal 11) 0.2 s later".replace(
        "were", "was"
    ),
    "  others: rank 0 stopped by echelon; rank 4 ended with exit code 15 12.5 s later; rank 5 failed 0.1 s later with ValueError: bad",
    "  others: the ranks lost contact with each other; gloo aborted rank 1 as a result",
    "2 ranks on 1 machine (cpu), gloo",
    "12 updates on 2 ranks against plain PyTorch on one: relative error 3.6e-16 (float64, tolerance 1e-12)",
    "2 epochs of 130 samples in batches of 24: each sample once per epoch",
    "rank 1 was killed after update 10; the ranks resumed from update 8 and ended with identical weights",
    "all_reduce of 16.0 MB: 0.60 GB/s bus bandwidth; 15 measurements",
    "training on 2 ranks and on 1 rank produces bit-identical weights",
    "every check passed (27.1 s); results: echelon-test-20261126-104040.json",
    "goodput 85.0% of 12.3 s: compute 10.0 s, data wait 2.0 s, lost steps 0.3 s; 1 restart",
)


@pytest.mark.parametrize("line", _REPORTS)
def test_reports_are_translated(line: str) -> None:
    shown = Catalogue(ENTRIES).translate_lines(line)
    assert re.search(_CHINESE, shown), shown
    assert not _is_mixed(shown)
    assert [number for number in re.findall(r"\d+", line) if number not in re.findall(r"\d+", shown)] == []


def test_the_parts_of_a_step_are_translated() -> None:
    shown = Catalogue(ENTRIES).translate(
        "41 steps, ms per step, min / median / max across ranks: data 0.5 (rank 2) / 0.6 / 0.7 (rank 1), backward 2.0, wait 0.0"
    )
    assert shown.endswith(
        "\u6570\u636e 0.5 (rank 2) / 0.6 / 0.7 (rank 1), \u53cd\u5411\u4f20\u64ad 2.0, \u7b49\u5f85 0.0"
    )
    slow = "rank 0 is slow: other 25.2 ms per step (median 0.9); the other ranks wait for it for up to 24.0 ms per step"
    assert Catalogue(ENTRIES).translate(slow).startswith("rank 0 \u6162\uff1a\u5176\u4ed6 \u6bcf\u4e2a step 25.2 ms")


def test_a_line_of_the_live_view_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    _speak_chinese(monkeypatch)
    what = "slow: code outside the model 51 ms per step (median 36)"
    shown = RankRow(rank=1, what=what, step=3, phase="communication, waiting", place="train.py:9").to_text()
    assert shown == (
        "rank 1: \u6162\uff1a\u6a21\u578b\u4e4b\u5916\u7684\u4ee3\u7801 \u6bcf\u4e2a step 51 ms\uff08\u4e2d\u4f4d\u6570 36\uff09; step 3; "
        "\u901a\u4fe1\uff0c\u5728\u7b49\u5176\u4ed6 rank; \u4f4d\u4e8e train.py:9"
    )


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


def _speak_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
