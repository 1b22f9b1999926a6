"""A Modelfile for Ollama: the prompt of the model's own chat template, the right stops, no system prompt.

Facts from Ollama's sources of August 2026 (v0.33.0-rc2): server/create.go, server/renderer_resolution.go,
model/renderers/gemma4.go, convert/convert.go, template/template.go.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

from . import artefacts, gguf_check, gguf_files, metadata, models
from .errors import CannotLoad, DataError, EnvironmentUnfit, UsageError
from .files import user_path, write_whole
from .run_check import Finding

VERSION = "0.33.0"
LEAST_CONTEXT = 4096  # tokens; Ollama's own, where it has little memory
# What `ollama create` converts from .safetensors: convert/convert.go, LoadModelMetadata.
CONVERTED = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration")
CONVERTED += ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
STOPS = {"gemma3": ["<end_of_turn>", "<eos>"], "gemma4": ["<turn|>", "<eos>", "<|tool_response>"]}
# Gemma 3 and 3n have no renderer of their own in Ollama. The system message goes before the first question.
GEMMA3_TEMPLATE = """\
{{- $system := .System }}
{{- range .Messages }}
{{- if eq .Role "user" }}<start_of_turn>user
{{ if $system }}{{ $system }}

{{ end }}{{ .Content }}<end_of_turn>
{{ $system = "" }}
{{- else if eq .Role "assistant" }}<start_of_turn>model
{{ .Content }}<end_of_turn>
{{ end }}
{{- end }}<start_of_turn>model
"""
USER, MODEL, SYSTEM = "What is it?", "A cat.\nOr two.", "Answer shortly."
CONVERSATIONS = {
    "one question": [{"role": "user", "content": USER}],
    "several turns": [
        {"role": "user", "content": USER},
        {"role": "assistant", "content": MODEL},
        {"role": "user", "content": "Sure?"},
    ],
    "a system message": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}],
}


def export(config) -> dict:
    """Write a Modelfile for a .gguf file or a whole model; with --create hand it to Ollama."""
    path = user_path(config.path)
    kind = artefacts.kind_of(path)
    if kind == "adapter":
        raise CannotLoad(
            f"{path} is an adapter, and Ollama takes those of Llama and Gemma 2 alone: first export.py merge, then gguf"
        )
    if kind not in ("gguf", "model"):
        raise CannotLoad(f"{path}: give a .gguf file, or the folder of a whole model")
    if not config.name or any(letter.isspace() for letter in config.name):
        raise UsageError("--name is required: what Ollama is to call the model, such as my-gemma")
    if config.create and shutil.which("ollama") is None:
        raise EnvironmentUnfit("--create: ollama is not on the PATH; leave it out, and create the model elsewhere")
    sources, folder, family, template = _gguf_sources(path) if kind == "gguf" else _model_source(path)
    findings = compare(template, family)
    wrong = [finding for finding in findings if finding.passed is False]
    if wrong:
        raise DataError(f"{path}: Ollama would ask otherwise than in training ({wrong[0].check}: {wrong[0].told})")
    with artefacts.new_folder(config.output, "ollama", config.overwrite) as staged:
        target = user_path(config.output).absolute()
        text = modelfile([os.path.relpath(source, target) for source in sources], family, template, folder)
        write_whole(staged / "Modelfile", text)
        known = {key: value for key, value in artefacts.read(path).items() if key not in ("made", "files")}
        artefacts.write(staged, known | {"made": "ollama", "name": config.name})
    command = shlex.join(["ollama", "create", config.name, "-f", str(user_path(config.output) / "Modelfile")])
    if config.create:
        _create(command)
    lines = [f"ok       {finding.check}: {finding.told}" for finding in findings]
    return {
        "output": str(user_path(config.output)),
        "sources": [str(source) for source in sources],
        "checked_with": {"ollama": VERSION},
        "checks": [asdict(finding) for finding in findings],
        "command": command,
        "created": config.create,
        "summary": "\n".join([*lines, command if not config.create else f"created  {config.name}"]),
    }


def _create(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, errors="replace")
    if done.returncode:
        last = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()] or [
            "no word of why"
        ]
        raise EnvironmentUnfit(f"ollama create failed: {last[-1][:200]}; the Modelfile is there")


def _gguf_sources(path: Path) -> tuple[list[Path], Path | None, str, str]:
    """([the file, that of its towers], the folder it was made from, "gemma3" or "gemma4", the chat template)."""
    file, towers = gguf_check.files_of(path)
    reader = gguf_files.open_gguf(file)
    name = gguf_files.value(reader, "general.architecture")
    if name not in gguf_files.ARCHITECTURES.values():
        raise CannotLoad(f"{file}: {name} is no language model of a supported Gemma")
    template = gguf_files.value(reader, "tokenizer.chat_template")
    if not template:
        raise CannotLoad(f"{file} has no chat template: make it with export.py gguf")
    made_from = artefacts.read(path).get("model")
    folder = Path(made_from) if made_from and Path(made_from).is_dir() else None
    return [file, towers] if towers else [file], folder, "gemma4" if name == "gemma4" else "gemma3", template


def _model_source(path: Path) -> tuple[list[Path], Path, str, str]:
    config, family = models.load_config(str(path))
    name = (config.architectures or ["unknown"])[0]
    if models.is_reward(config):
        raise CannotLoad(f"{path} is a reward model, which Ollama does not know: see reward_score.py")
    if name not in CONVERTED:
        raise CannotLoad(f"{path}: Ollama does not convert {name}: first export.py gguf, then this with the .gguf")
    template = models.load_processor(str(path), config).chat_template
    if not isinstance(template, str):
        raise CannotLoad(f"{path} has no chat template: copy the run's chat_template.jinja there")
    return [path], path, "gemma4" if family.name.startswith("gemma4") else "gemma3", template


# ---- the prompt


def compare(template: str, family: str) -> list[Finding]:
    """Whether Ollama asks as the chat template does, of conversations in text.

    What Ollama makes of them is written down in `prompt`; tools, reasoning and media are not compared.
    """
    large = _ends_in_empty_thought(template)
    findings = []
    for told, messages in CONVERSATIONS.items():
        try:
            own = gguf_files.rendered(template, messages)
        except Exception as problem:  # whatever a template raises on a role that it does not take
            findings.append(Finding(f"prompt, {told}", None, f"the template refuses it ({type(problem).__name__})"))
            continue
        same = own.removeprefix("<bos>") == prompt(messages, family, large)
        findings.append(Finding(f"prompt, {told}", same, "as in training" if same else "another than in training"))
    return findings


def prompt(messages: list[dict], family: str, large: bool) -> str:
    """What Ollama asks of messages in text: by `GEMMA3_TEMPLATE`, or by its renderer of Gemma 4.

    Args:
        large: of the 12B, 26B and 31B, whose prompt ends in an empty thought where thinking is off.
    """
    start, end = ("<|turn>", "<turn|>\n") if family == "gemma4" else ("<start_of_turn>", "<end_of_turn>\n")
    text, system = "", ""
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if role == "system" and family == "gemma3":
            system = f"{content}\n\n"
            continue
        text += f"{start}{'model' if role == 'assistant' else role}\n{system}{content}{end}"
        system = ""
    return f"{text}{start}model\n" + ("<|channel>thought\n<channel|>" if large else "")


def _ends_in_empty_thought(template: str) -> bool:
    return gguf_files.rendered(template, CONVERSATIONS["one question"]).endswith("<|channel>thought\n<channel|>")


def modelfile(sources: list[str], family: str, template: str, folder: Path | None) -> str:
    """The text of a Modelfile.

    Args:
        sources: the model and its towers, relative to the Modelfile.
        folder: of the model, with `generation_config.json` and the facts of its training, None where it is gone.
    """
    lines = [f"# For Ollama {VERSION} or later. Texts, turns and system messages are put as the model was trained on."]
    lines += ["FROM " + (source if " " not in source else f'"{source}"') for source in sources]
    if family == "gemma4":
        size = "large" if _ends_in_empty_thought(template) else "small"
        lines += [
            "# Tools, reasoning and images are put by Ollama's own renderer, which was not compared with training."
        ]
        lines += [f"RENDERER gemma4-{size}", "PARSER gemma4"]
    else:
        lines += ["# Tools are not covered; images stand before the text of their message."]
        lines += [f'TEMPLATE """{GEMMA3_TEMPLATE}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in STOPS[family]]
    facts = (metadata.read(folder) if folder else None) or {}
    lines.append(f"PARAMETER num_ctx {max(LEAST_CONTEXT, facts.get('max_len') or 0)}")
    lines += [f"PARAMETER {name} {number}" for name, number in _sampling(folder).items()]
    return "\n".join(lines) + "\n"


def _sampling(folder: Path | None) -> dict:
    """How a model says it is to be sampled; temperature 0 where it does not sample."""
    try:
        said = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        said = {}
    if not said:
        return {}
    if not said.get("do_sample"):
        return {"temperature": 0}
    return {name: said[name] for name in ("temperature", "top_k", "top_p") if said.get(name) is not None}
