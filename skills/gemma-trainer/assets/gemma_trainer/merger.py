"""The steps of export.py merge: refuse what cannot be merged, write the model aside, check it, put it in its place."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from . import artefacts, merge_check, metadata, models
from .asking import answered_rows
from .cli import note
from .errors import EnvironmentUnfit, OutOfMemory, UsageError
from .files import mib, user_path, write_whole
from .merging import Merge, base_folder
from .run_check import Finding, lines_of
from .tensors import size_in_bytes, stored_files, write_files

DTYPES = {"auto": None, "bf16": "BF16", "fp32": "F32"}
NAMES = {"BF16": "bfloat16", "F32": "float32"}
SPARE = 64 * 2**20  # bytes of all that is beside the weights
FROM_4_BIT = (
    "The adapter was trained beside 4-bit weights and is merged into those of full precision: answers may differ a "
    "little from the run's."
)
PROCESSOR = """tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json
chat_template.jinja chat_template.json processor_config.json preprocessor_config.json
video_preprocessor_config.json""".split()


def merge(config) -> dict:
    """Merge an adapter into its base; `config` is `export.MergeFlags`. Returns the result."""
    run = user_path(config.run)
    limit = size_in_bytes(config.shard_size) if config.shard_size else None
    with artefacts.new_folder(config.output, "merge", config.overwrite) as folder:
        facts = metadata.read(run) or {}
        base, name = base_folder(run, config.base, facts)
        if base.resolve() == user_path(config.output).resolve():
            raise UsageError(f"--output {config.output} is the base model's folder: choose another")
        job = Merge(run, base, DTYPES[config.dtype], limit)
        check_room(folder, job.size)
        if str((facts.get("training") or {}).get("quantization")).startswith("4-bit"):
            note(FROM_4_BIT)
        note(f"Merging {run} into {name}: {mib(job.size)}.")
        write_files(folder, job.files)
        write_configs(folder, run, base, job)
        findings, samples = verify(config, folder, run, base, job, facts)
        passed = not any(finding.passed is False for finding in findings)
        if passed:
            made = record(config, run, base, name, job, facts)
            made |= {"checks": [asdict(finding) for finding in findings], "samples": samples}
            describe(folder, facts, made)
            artefacts.write(folder, made)
    return result(config.output, job, findings, passed)


def check_room(folder: Path, needed: int) -> None:
    """Refuse a disk that a model of `needed` bytes does not fit on (EnvironmentUnfit)."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        told = f"the merged model takes {mib(needed + SPARE)} with all beside it, {mib(free)} are free"
        raise EnvironmentUnfit(f"not enough disk for --output: {told}. Free some, or choose another place")


def write_configs(folder: Path, run: Path, base: Path, job: Merge) -> None:
    """Write what belongs beside the weights: the base's configs, and the run's own processor and chat template."""
    own = run if (run / "tokenizer.json").is_file() else base
    for place, names in ((base, ["generation_config.json"]), (own, PROCESSOR)):
        for path in (place / name for name in names):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    if job.reward:
        job.config.architectures, job.config.num_labels = [job.architecture], 1
        write_whole(folder / "config.json", job.config.to_json_string())
    else:
        shutil.copyfile(base / "config.json", folder / "config.json")
    if job.dtype:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_whole(folder / "config.json", json.dumps(_retyped(known, NAMES[job.dtype]), indent=2) + "\n")


def _retyped(known, dtype: str):
    """A config with another dtype, also in the configs within it."""
    if not isinstance(known, dict):
        return known
    return {key: dtype if key in ("dtype", "torch_dtype") and value else _retyped(value, dtype)
            for key, value in known.items()}  # fmt: skip


def verify(config, folder: Path, run: Path, base: Path, job: Merge, facts: dict) -> tuple[list[Finding], list[dict]]:
    """(findings about the merged model, rows with the adapter's answers to them)."""
    findings = [merge_check.files(folder, job, base), merge_check.change(job)]
    told = "" if config.logits else "left out (--no-logits)"
    if config.logits and not merge_check.enough_memory(job.size):
        told = f"left out: {mib(job.size)} of weights, and less memory is free"
    if told:
        findings.append(Finding("logits", None, f"{told}; `export.py check` asks the model later"))
    if told or any(finding.passed is False for finding in findings):
        return findings, answered_rows(run)
    try:
        found, samples = merge_check.compare(folder, run, base, job, facts)
    except (MemoryError, RuntimeError) as problem:
        if isinstance(problem, RuntimeError) and "memory" not in str(problem):
            raise
        raise OutOfMemory("out of memory as the models were compared: --no-logits leaves that out") from None
    return findings + found, samples


def record(config, run: Path, base: Path, name: str, job: Merge, facts: dict) -> dict:
    """What `export.json` says of a merge, without its checks."""
    known = facts.get("base_model") or {}
    snapshot = base.name if base.parent.name == "snapshots" else None  # of the hub's cache
    return {
        "made": "merge",
        "task": facts.get("task") or ("reward" if job.reward else "sft"),
        "run": metadata.shown_name(config.run),
        "base": metadata.shown_name(name) if config.base or not known else known["name"],
        "base_revision": snapshot or (None if config.base else known.get("revision")),
        "license": metadata.license_of(name, models.load_config(str(base))[1]),
        "architecture": job.architecture,
        "dtype": sorted({tensor.dtype for held in stored_files(base).values() for tensor in held})
        if job.dtype is None
        else [job.dtype],
        "files": {name: sum(tensor.size for tensor in held) for name, held in job.files.items()},
        "changed": job.changed,
        "added": job.added,
        "quantization": (facts.get("training") or {}).get("quantization"),
        "versions": metadata.versions(),
    }


def describe(folder: Path, facts: dict, made: dict) -> None:
    """Write the model card, and the facts of the run with how the model was made of it."""
    merged = {name: made[name] for name in ("run", "base", "base_revision", "dtype", "changed", "versions")}
    if facts:
        metadata.write(folder, facts | {"merged": merged})
        return
    from huggingface_hub import ModelCardData  # an adapter of another tool

    head = ModelCardData(
        base_model=made["base"] if "/" in made["base"] else None,
        base_model_relation="finetune",
        library_name="transformers",
        license=made["license"],
    ).to_yaml()
    told = f"`{made['base']}` with the LoRA adapter `{made['run']}` merged into its weights."
    write_whole(folder / "README.md", f"---\n{head}\n---\n\n# {made['run']}, merged\n\n{told}\n")


def result(output: str, job: Merge, findings: list[Finding], passed: bool) -> dict:
    """What is printed."""
    lines = lines_of(findings)
    written = f"merged   {output} ({mib(job.size)} in {len(job.files)} files)"
    lines.append(written if passed else "nothing was written")
    return {
        "status": "done" if passed else "failed",
        "sound": passed,
        "merged": output if passed else None,
        "architecture": job.architecture,
        "size": job.size,
        "files": list(job.files),
        "changed": job.changed,
        "checks": [asdict(finding) for finding in findings],
        "summary": "\n".join(lines),
    } | ({} if passed else {"exit_code": 8})
