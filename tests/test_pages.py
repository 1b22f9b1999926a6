"""The pages of both skills name scripts, commands and flags that exist, and files that are there."""

import re
import runpy
import shlex

import pytest

from conftest import ROOT
from gemma_trainer import cli

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("skills/*/SKILL.md")), *sorted(ROOT.glob("skills/*/references/*.md"))]
SCRIPTS = {path.name: path for path in ROOT.glob("skills/*/assets/*.py")}
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE = re.compile(r"```\w*\n(.*?)```|((?:^ {4}\S.*\n)+)|`([^`]+)`", re.S | re.M)
SCRIPT = re.compile(r"(?:^|[\s/])(\w+\.py)((?:\s[^\n]*)?)$")
VLLM = {"--chat-template", "--enable-tower-connector-lora"}  # flags that tests/test_serving.py holds against its source


def commands(text):
    """(script, words behind it) of each command in a page's code that names a script of ours with flags or words."""
    for fenced, indented, inline in CODE.findall(text):
        lines = re.sub(r"\\\n\s*", " ", fenced or indented).splitlines() or [" ".join(inline.split())]
        for line in lines:
            found = SCRIPT.search(re.split(r"\s#\s|\s[|>&]\s", line)[0].rstrip())
            if found and found[1] in SCRIPTS:
                yield found[1], shlex.split(found[2])


def parsers(script):
    """{command: parser} of a script; the command is "" where there is but one."""
    known = runpy.run_path(str(SCRIPTS[script]))
    if "build_parser" in known:  # a script that needs no library
        return {"": known["build_parser"]()}
    flags = {name: flags for name, (_, flags, _) in known.get("COMMANDS", {}).items()} or {"": known["Config"]}
    return {name: cli.build_parser(one, "", "") for name, one in flags.items()}


def parser_of(script, words):
    """(the parser of a command, the words behind the command)."""
    known = parsers(script)
    if "" in known:
        return known[""], words
    command, *rest = words or [next(iter(known))]
    assert all(one in known for one in command.split("|")), f"{script} has no command {command}"
    return known[command.split("|")[0]], rest


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_flag_in_a_command_exists(page):
    wrong = []
    for script, words in commands(page.read_text()):
        if not words or words[0] == "...":
            continue
        parser, rest = parser_of(script, words)
        known = parser._option_string_actions
        given = [word.split("=")[0] for word in rest if word.startswith("--")]
        wrong += [f"{script} {flag}" for flag in given if flag not in known]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_flag_named_alone_exists_somewhere(page):
    known = {flag for script in SCRIPTS for one in parsers(script).values() for flag in one._option_string_actions}
    alone = set(re.findall(r"`(--[a-z-]+)(?![\w])", page.read_text()))  # those of other tools have underscores
    assert alone <= known | VLLM


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_named_pages_are_there(page):
    text = page.read_text()
    linked = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert not [link for link in linked if link and not (page.parent / link).exists()]
    skill = next((parent for parent in page.parents if (parent / "SKILL.md").is_file()), None)
    named = re.findall(r"`?(references/\w+\.md)`?", text) if skill else []
    assert not [name for name in named if not (skill / name).is_file()]


def test_long_pages_begin_with_their_contents():
    for page in ROOT.glob("skills/*/references/*.md"):
        lines = page.read_text().splitlines()
        if len(lines) > 100:
            assert any(line.startswith("Contents") for line in lines[:12]), page.name
