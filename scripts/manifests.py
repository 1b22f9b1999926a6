#!/usr/bin/env python3
"""Write the manifests of every client from one source: the front matter of each SKILL.md, and pyproject.toml.

Claude Code and Codex read `.claude-plugin/`, Cursor and other clients of Agent Plugins 1.0 `plugin.json`, Gemini CLI
`gemini-extension.json`, agents without skills the table in `AGENTS.md`. `--check` writes nothing, names what is stale,
and exits 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json"  # without it a client must refuse plugin.json
TABLE = re.compile(r"(?m)^\| skill \|.*\n(\|.*\n)+")


def read_skills(root: Path) -> list[dict]:
    """The front matter of each skill, by name.

    Raises:
        SystemExit: a skill has no front matter, another name than its folder, or another version than the project.
    """
    version = project_of(root)["version"]
    skills = []
    for path in sorted((root / "skills").glob("*/SKILL.md")):
        found = re.match(r"---\n(.*?\n)---\n", path.read_text(encoding="utf-8"), re.S)
        if not found:
            sys.exit(f"{path}: no front matter")
        skill = yaml.safe_load(found[1])
        if skill["name"] != path.parent.name:
            sys.exit(f"{path}: its name is {skill['name']}, its folder's is {path.parent.name}")
        if skill["metadata"]["version"] != version:
            sys.exit(f"{path}: version {skill['metadata']['version']}, but pyproject.toml has {version}")
        skills.append(skill)
    return skills


def project_of(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def manifests(root: Path = ROOT) -> dict[str, str]:
    """{path from the root: text that it should have}."""
    project, skills = project_of(root), read_skills(root)
    name, version, about = project["name"], project["version"], project["description"]
    facts = {"name": name, "version": version, "description": about, "license": project["license"]}
    owner = {"name": f"the authors of {name}"}
    plugin = {"name": name, "source": "./", "description": about, "version": version}
    texts = {
        "plugin.json": {"$schema": SCHEMA, **facts},
        "gemini-extension.json": {
            "name": name,
            "version": version,
            "description": about,
            "contextFileName": "AGENTS.md",
        },
        ".claude-plugin/plugin.json": facts | {"author": owner},
        ".claude-plugin/marketplace.json": {
            "name": name,
            "owner": owner,
            "description": about,
            "plugins": [plugin],
        },
    }
    made = {path: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for path, content in texts.items()}
    return made | {"AGENTS.md": _agents((root / "AGENTS.md").read_text(encoding="utf-8"), skills)}


def _agents(text: str, skills: list[dict]) -> str:
    """AGENTS.md with its table made anew."""
    lines = [f"| {s['name']} | `skills/{s['name']}/SKILL.md` | {_one_line(s['description'])} |\n" for s in skills]
    table = "| skill | path | when to read it |\n|---|---|---|\n" + "".join(lines)
    return TABLE.sub(lambda _: table, text, count=1)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is stale")
    check, stale = parser.parse_args().check, []
    for name, text in manifests().items():
        path = ROOT / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    told = "stale (run scripts/manifests.py)" if check else "written"
    print("\n".join(f"{told}: {name}" for name in stale) or "all manifests are in step")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
