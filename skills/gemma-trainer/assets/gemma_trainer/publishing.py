"""Upload a model to the hub: what would go, what stays, whose licence goes with it. Nothing leaves without --push."""

from __future__ import annotations

import glob
import json
import re
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from . import artefacts, hub, metadata, models
from .errors import CannotLoad, UsageError
from .files import mib, user_path
from .model_card import card
from .run_check import Finding, lines_of

# What is uploaded, and nothing else: not run.json, report.html, samples.json, metrics.jsonl and export.json, which hold
# rows, answers and paths of this machine; not checkpoints, optimizer states and the base model.
UPLOADED = """README.md license* notice* adapter_config.json adapter_model*.safetensors* config.json
generation_config.json model*.safetensors model.safetensors.index.json processor_config.json preprocessor_config.json
video_preprocessor_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json
added_tokens.json chat_template.jinja chat_template.json training_metadata.json *.gguf""".lower().split()
WEIGHTS = (".safetensors", ".gguf", ".model")
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\b(ghp_|github_pat_|glpat-)[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bAIza[A-Za-z0-9_-]{35}|\bxox[abeprs]-[A-Za-z0-9-]{10,}|BEGIN [A-Z ]*PRIVATE KEY"
)
# What each licence asks of who passes on weights, or an adapter to them. Sources: https://ai.google.dev/gemma/terms,
# 3.1 (of Gemma 1 to 3n; Gemma 4 has https://ai.google.dev/gemma/apache_2), and Apache License 2.0, 4.
TERMS = {
    "gemma": "as 3.1 of the Gemma Terms of Use (ai.google.dev/gemma/terms) has it, pass on a copy of them, bind others "
    "to their use restrictions, say that the files were changed, and add a NOTICE file that says: Gemma is provided "
    "under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    "apache-2.0": "pass on a copy of the Apache License 2.0 and the notices of the base model, and say that the "
    "weights were changed",
}
LOCAL = re.compile(r"(/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\).*", re.S)  # how a path of a machine begins


def publish(config) -> dict:
    """Tell what would be uploaded, and upload it with --push."""
    folder = user_path(config.path)
    kind = artefacts.kind_of(folder)
    if kind not in ("adapter", "model", "gguf") or folder.is_file():
        raise CannotLoad(f"{config.path}: give the folder of an adapter, a whole model, or .gguf files")
    if not config.repo or not metadata.HUB_ID.fullmatch(config.repo):
        raise UsageError("--repo is required: ORG/NAME")
    files, left = files_of(folder)
    base = _base(folder, kind)
    text, made = _card(folder, kind, base)
    findings = [*_findings(folder, files, text), _licence(kind, base)]
    failed = [finding for finding in findings if finding.passed is False]
    pushed = bool(config.push and not failed)
    url = _push(config, folder, files, text if made else None) if pushed else None
    visible = "public" if config.public else "private"
    size = sum(files.values())
    lines = [f"{mib(size):>12}  {name}" for name, size in files.items()]
    lines += [f"{'made':>12}  README.md"] * made
    lines += [f"{'stays here':>12}  {', '.join(left)}"] * bool(left)
    lines += lines_of(findings)
    told = (
        f"uploaded {url}"
        if pushed
        else f"nothing was uploaded; --push uploads {mib(size)} to {config.repo} ({visible})"
    )
    lines.append("nothing was uploaded: see FAILED" if failed else told)
    return {
        "repo": config.repo,
        "private": not config.public,
        "kind": kind,
        "files": files,
        "left_out": left,
        "bytes": size,
        "card_made": made,
        "base": base,
        "checks": [asdict(finding) for finding in findings],
        "pushed": pushed,
        "url": url,
        **({"exit_code": 8} if failed else {}),
        "summary": "\n".join(lines),
    }


def files_of(folder: Path) -> tuple[dict[str, int], list[str]]:
    """({name: bytes} of the files that are uploaded, what else is in the folder)."""
    files, left = {}, []
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name.lower(), pattern) for pattern in UPLOADED):
            files[path.name] = path.stat().st_size
        else:
            left.append(path.name + "/" * path.is_dir())
    return files, left


def _base(folder: Path, kind: str) -> dict:
    """{"name", "license", "gated" (None where that is not known)} of the base model."""
    facts = (metadata.read(folder) or {}).get("base_model") or {}
    made_of = artefacts.read(folder)
    if not facts and made_of.get("model"):
        facts = (metadata.read(Path(made_of["model"])) or {}).get("base_model") or {}
    name = facts.get("name") or made_of.get("base")
    if not name and kind == "adapter":
        name = models.base_of(str(folder))
    name = metadata.shown_name(str(name)) if name else None
    licence = facts.get("license") or _family_licence(folder if kind == "model" else Path(made_of.get("model") or "-"))
    return {"name": name, "license": licence, "gated": _gated(name) if name else None}


def _family_licence(folder: Path) -> str | None:
    """The licence of the weights that a family was published with, None where the folder holds no model."""
    return models.load_config(str(folder))[1].license if (folder / "config.json").is_file() else None


def _gated(name: str) -> bool | None:
    """Whether a model on the hub is handed out on request only; None where the hub cannot say."""
    if not metadata.HUB_ID.fullmatch(name) or hub.unreachable():
        return None
    from huggingface_hub import HfApi

    try:
        return bool(HfApi().model_info(name, timeout=hub.TIMEOUT).gated)
    except Exception:  # private, gone, or no answer
        return None


def _card(folder: Path, kind: str, base: dict) -> tuple[str, bool]:
    """(the text of README.md, whether it was made here because there is none)."""
    readme = folder / "README.md"
    if readme.is_file():
        return readme.read_text(encoding="utf-8", errors="replace"), False
    facts = metadata.read(folder)
    if facts and kind != "gguf":
        return card(facts, adapter=kind == "adapter"), True
    from huggingface_hub import ModelCardData

    front = ModelCardData(
        base_model=base["name"] if base["name"] and "/" in base["name"] else None,
        base_model_relation="quantized" if kind == "gguf" else "adapter" if kind == "adapter" else "finetune",
        library_name={"gguf": "gguf", "adapter": "peft"}.get(kind, "transformers"),
        license=base["license"],
        tags=["gemma"],
    ).to_yaml()
    what = {"gguf": "Files for llama.cpp and Ollama", "adapter": "A LoRA adapter"}.get(kind, "A model")
    return f"---\n{front}\n---\n\n# {folder.resolve().name}\n\n{what}, made from `{base['name']}`.\n", True


def _findings(folder: Path, files: dict[str, int], text: str) -> list[Finding]:
    """What must not leave this machine, and what others will miss."""
    weights = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    findings = [Finding("weights", bool(weights), f"{len(weights)} files" if weights else "none are there")]
    secret, path = [], []
    for name in files:
        if name.endswith(WEIGHTS) or name == "tokenizer.json":
            continue
        content = (folder / name).read_text(encoding="utf-8", errors="replace")
        secret += [name] if SECRET.search(content) else []
        path += [name] if _names_a_path(name, content) else []
    if secret:
        findings.append(
            Finding("secrets", False, f"{', '.join(secret)} holds what looks like a token or key: take it out")
        )
    if path:
        told = f"{', '.join(path)} names a folder of this machine, which others lack: write the hub id there"
        findings.append(Finding("paths", False, told))
    front = re.match(r"---\n.*?\n---\n", text, re.S)
    told = "with metadata" if front else "README.md has no metadata (--- license, base_model ---)"
    findings.append(Finding("card", bool(front), told))
    if not any(name.endswith(".gguf") for name in files) and "chat_template.jinja" not in files:
        findings.append(Finding("chat template", False, "no chat_template.jinja: copy the run's there"))
    return findings


def _names_a_path(name: str, content: str) -> bool:
    """Whether a base model is named by its place on a machine, or a value in some JSON is such a place."""
    if name == "README.md":
        found = re.match(r"---\n(?:.*\n)*?base_model: *[\"']?([^\"'\n]+)", content)
        return bool(found) and not metadata.HUB_ID.fullmatch(found[1].strip())
    try:
        values = [json.loads(content)] if name.endswith(".json") else []
    except (ValueError, RecursionError):
        return False
    while values:
        value = values.pop()
        if isinstance(value, dict):
            base = value.get("base_model_name_or_path")
            if base and (not metadata.HUB_ID.fullmatch(str(base)) or Path(base).is_dir()):
                return True
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str) and LOCAL.fullmatch(value) and len(re.split(r"[/\\]+", value)) > 3:
            return True
    return False


def _licence(kind: str, base: dict) -> Finding:
    """Whose licence goes with what is uploaded, as the base model's card has it, or else its family."""
    licence, name = base["license"], base["name"] or "its base model"
    gated = {True: ", which is gated", False: ", which is not gated", None: ""}[base["gated"]]
    if licence is None:
        told = f"not known of {name}{gated}: read it before anything leaves this machine"
    else:
        part = "which this adapter changes" if kind == "adapter" else "whose weights are in these files"
        told = f"{licence}, of {name}{gated}, {part}: {TERMS.get(licence, 'its terms go along')}. Read it there first"
    return Finding("licence", None, told)


def _push(config, folder: Path, files: dict[str, int], made: str | None) -> str:
    """Upload; returns where it is. A repository that is public already must be meant with --public.

    Raises:
        CannotLoad: no token, offline, or the hub refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise CannotLoad("--push needs a token of the hub: hf auth login (or HF_TOKEN)")
    if problem := hub.unreachable():
        raise CannotLoad(f"--push: the hub cannot be asked ({problem})")
    api = HfApi()
    try:
        if not config.public and _is_public(api, config.repo):
            raise UsageError(f"{config.repo} is a public repository: say --public if that is meant")
        url = api.create_repo(config.repo, private=not config.public, exist_ok=True)
        if made is not None:
            api.upload_file(path_or_fileobj=made.encode(), path_in_repo="README.md", repo_id=config.repo)
        api.upload_folder(folder_path=folder, repo_id=config.repo, allow_patterns=[glob.escape(name) for name in files])
    except HfHubHTTPError as problem:
        raise CannotLoad(f"--push: the hub refuses ({_first_line(problem)})") from None
    except (*_transport_errors(), OSError) as problem:
        raise CannotLoad(f"--push: not finished ({_first_line(problem)}): run it again, it goes on") from None
    return str(url)


def _transport_errors() -> list[type[Exception]]:
    """What the library under the hub's client raises where the line breaks: httpx, of newer clients httpx2."""
    from importlib import import_module
    from importlib.util import find_spec

    return [import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)]


def _is_public(api, repo: str) -> bool:
    """Whether a repository is there and public."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return not api.repo_info(repo).private
    except RepositoryNotFoundError:
        return False


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:150]
