"""The prompt that Ollama makes is the one that was trained; what it does not take is said."""

import hashlib
import json
import shutil
from pathlib import Path

import export
import llama_stand_in as stand_in
import pytest
import tiny

from gemma_trainer import artefacts, demo, gguf_check, ollama
from gemma_trainer.errors import CannotLoad, DataError, EnvironmentUnfit, UsageError

# What Go's text/template (1.27) makes of this very template, given the values that Ollama gives it.
GO_TEMPLATE = "0db12f28f265b747"
GO_MADE = {
    "one question": "<start_of_turn>user\nWhat is it?<end_of_turn>\n<start_of_turn>model\n",
    "several turns": "<start_of_turn>user\nWhat is it?<end_of_turn>\n"
    "<start_of_turn>model\nA cat.\nOr two.<end_of_turn>\n"
    "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
    "a system message": "<start_of_turn>user\nAnswer shortly.\n\nWhat is it?<end_of_turn>\n<start_of_turn>model\n",
    "system, several turns": "<start_of_turn>user\nAnswer shortly.\n\nWhat is it?<end_of_turn>\n<start_of_turn>model\n"
    "A cat.\nOr two.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
}


@pytest.fixture
def whole(model_folder, tmp_path):
    return Path(shutil.copytree(model_folder, tmp_path / "a model"))


def flags(path, output, **more):
    return export.OllamaFlags(**({"path": str(path), "output": str(output), "name": "mine"} | more))


@pytest.mark.parametrize("template", [demo.chat_template("gemma3"), tiny.GEMMA3N_TEMPLATE], ids=["gemma3", "gemma3n"])
def test_the_template_for_gemma3_makes_the_trained_prompt(template):
    assert hashlib.sha256(ollama.GEMMA3_TEMPLATE.encode()).hexdigest()[:16] == GO_TEMPLATE, "record GO_MADE anew"
    talks = dict(ollama.CONVERSATIONS)
    talks["system, several turns"] = [talks["a system message"][0], *talks["several turns"]]
    for name, messages in talks.items():
        assert ollama.prompt(messages, "gemma3", large=False) == GO_MADE[name]
    assert [finding.passed for finding in ollama.compare(template, "gemma3")] == [True] * 3


def test_a_gguf_file_gets_a_modelfile_with_its_towers_renderer_and_stops(whole, tmp_path):
    place = tmp_path / "files"
    place.mkdir()
    stand_in.write(whole, place / "m-Q8_0.gguf")
    stand_in.write_towers(place / "mmproj-m.gguf")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    (whole / "generation_config.json").write_text(json.dumps(sampling))
    (whole / "training_metadata.json").write_text(json.dumps({"max_len": 6000}))
    artefacts.write(place, {"made": "gguf", "model": str(whole), "samples": []})
    result = export.ollama(flags(place, tmp_path / "out"))
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "FROM ../files/m-Q8_0.gguf", "FROM ../files/mmproj-m.gguf", "RENDERER gemma4-small", "PARSER gemma4",
        'PARAMETER stop "<turn|>"', 'PARAMETER stop "<eos>"', 'PARAMETER stop "<|tool_response>"',
        "PARAMETER num_ctx 6000", "PARAMETER temperature 1.0", "PARAMETER top_k 64", "PARAMETER top_p 0.95",
    ]  # fmt: skip
    assert result["command"] == f"ollama create mine -f {tmp_path}/out/Modelfile" and not result["created"]
    assert artefacts.kind_of(tmp_path / "out") == "ollama"
    checked = gguf_check.check(export.CheckFlags(path=str(tmp_path / "out")))
    assert checked["sound"] and {"weights", "vision", "audio"} <= {check["check"] for check in checked["checks"]}


def test_the_large_models_prompt_ends_in_an_empty_thought(whole, tmp_path):
    file = whole / "chat_template.jinja"
    file.write_text(
        file.read_text() + "{%- if add_generation_prompt %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}"
    )
    export.ollama(flags(whole, tmp_path / "out"))
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert "RENDERER gemma4-large" in text and 'FROM "../a model"' in text


def test_a_template_that_ollama_does_not_follow_is_refused(whole, tmp_path):
    file = whole / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|turn>model\\n", "<|turn>assistant\\n"))
    with pytest.raises(DataError, match="otherwise than in training"):
        export.ollama(flags(whole, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_ollama_does_not_take_is_refused(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfit, match="not on the PATH"):
        export.ollama(flags(whole, tmp_path / "out", create=True))
    with pytest.raises(UsageError, match="--name is required"):
        export.ollama(flags(whole, tmp_path / "out", name="my model"))
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(
        json.dumps(config | {"architectures": ["Gemma4UnifiedForConditionalGeneration"]})
    )
    with pytest.raises(CannotLoad, match="first export.py gguf"):
        export.ollama(flags(whole, tmp_path / "out"))
    (whole / "adapter_config.json").write_text("{}")
    with pytest.raises(CannotLoad, match="Llama and Gemma 2 alone"):
        export.ollama(flags(whole, tmp_path / "out"))


def test_create_runs_ollama_with_the_modelfile(whole, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "ollama"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@" > "$0.said"\ngrep -q RENDERER "$4" || exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    assert export.ollama(flags(whole, tmp_path / "out", create=True))["created"]
    assert Path(f"{program}.said").read_text() == f"create mine -f {tmp_path}/out/Modelfile\n"
    program.write_text("#!/bin/sh\necho 'Error: unsupported architecture' >&2\nexit 1\n")
    with pytest.raises(EnvironmentUnfit, match="unsupported architecture"):
        export.ollama(flags(whole, tmp_path / "out", create=True, overwrite=True))
