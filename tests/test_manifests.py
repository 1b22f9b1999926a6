"""What each client reads of the skills is made from one source, and in step with it."""

import json
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import manifests


@pytest.fixture
def copy(tmp_path):
    """The files that manifests are made from, to be changed."""
    for name in ("pyproject.toml", "AGENTS.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("skills/*/SKILL.md"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_manifests_are_in_step():
    assert manifests.manifests() == {name: (ROOT / name).read_text() for name in manifests.manifests()}
    assert subprocess.run([sys.executable, str(ROOT / "scripts" / "manifests.py"), "--check"]).returncode == 0


def test_clients_find_what_they_need():
    made = {name: json.loads(text) for name, text in manifests.manifests().items() if name.endswith(".json")}
    assert made["plugin.json"]["$schema"].endswith("/1.0.0/plugin.schema.json")
    assert (ROOT / made["gemini-extension.json"]["contextFileName"]).is_file()
    market = made[".claude-plugin/marketplace.json"]
    assert market["owner"]["name"] and [plugin["source"] for plugin in market["plugins"]] == ["./"]
    assert len({content.get("version") for content in made.values()} - {None}) == 1
    skills = {path.parent.name for path in ROOT.glob("skills/*/SKILL.md")}
    assert all(f"`skills/{name}/SKILL.md`" in manifests.manifests()["AGENTS.md"] for name in skills)


def test_a_changed_description_makes_the_table_stale(copy):
    before = manifests.manifests(copy)["AGENTS.md"]
    skill = copy / "skills" / "gemma-trainer" / "SKILL.md"
    skill.write_text(skill.read_text().replace("description: Fine-tunes", "description: Trains | fine-tunes"))
    after = manifests.manifests(copy)["AGENTS.md"]
    assert after != before and "Trains \\| fine-tunes" in after
    assert after.split("\n\n")[-1] == before.split("\n\n")[-1]  # the rest is left as it is


@pytest.mark.parametrize("old, new", [('version: "', 'version: "9.'), ("name: gemma-trainer", "name: gemma-tuner")])
def test_a_skill_out_of_step_is_told(copy, old, new):
    skill = copy / "skills" / "gemma-trainer" / "SKILL.md"
    skill.write_text(skill.read_text().replace(old, new, 1))
    with pytest.raises(SystemExit, match="gemma-trainer/SKILL.md: "):
        manifests.manifests(copy)
