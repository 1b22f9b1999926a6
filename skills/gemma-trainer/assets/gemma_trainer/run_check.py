"""Whether a trained model will be what it was when somebody else loads it: base, template, keys, numbers."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import metadata
from .errors import CannotLoad, EnvironmentUnfit
from .model_card import told_rows
from .runs import metrics_of, word_in

LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.weight)?")
SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """What a check found. `passed` is None where it could not be made, or where nothing is wrong but odd."""

    check: str
    passed: bool | None
    told: str


def state_of(folder: Path) -> dict | None:
    """The record of the run in a folder, None where there is none; its status is "killed" where its process is gone."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if record.get("status") == "running" and record.get("host") == platform.node() and not _alive(record.get("pid")):
        steps = [found["step"] for found in [record, *metrics_of(folder)] if isinstance(found.get("step"), int)]
        record |= {"step": max(steps, default=0)}
        why = word_in(folder) or f"its process {record.get('pid')} is gone"
        record |= {"status": "killed", "why": f"{why}: go on with --resume"}
    return record


def _alive(pid) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def inspect(folder: str) -> dict:
    """What a folder of a run, a checkpoint or an adapter holds, and whether it can be used.

    Returns:
        {"folder", "kind" ("adapter", "model" or "run"), "run" (some of its record, or None), "facts" (see
        `metadata.facts_of`, or None), "checks": [`Finding` as a dict]}.

    Raises:
        CannotLoad: nothing of the kind is there.
    """
    path = Path(folder)
    kind = (
        "adapter" if (path / "adapter_config.json").is_file() else "model" if (path / "config.json").is_file() else ""
    )
    state = state_of(path)
    if not kind and state is None:
        raise CannotLoad(f"{folder}: no run, checkpoint, adapter or model is there")
    facts = metadata.read(path)
    checks = _guarded("run", _run, path, state, kind) + _guarded("files", _files, path)
    checks += list(_checks(path, kind, facts)) if kind else []
    names = "script status why step total_steps eta_s started metrics best".split()
    run = {name: state[name] for name in names if name in state} if state else None
    return {
        "folder": folder,
        "kind": kind or "run",
        "run": run,
        "facts": facts,
        "checks": [asdict(finding) for finding in checks],
    }


def run_folder(folder: Path) -> Path:
    """The folder of the run that a model or a checkpoint belongs to: its own, or the one above."""
    return folder if (folder / "run.json").is_file() else folder.resolve().parent


def _run(path: Path, state: dict | None, kind: str) -> Iterator[Finding]:
    """Whether the run came to its end, and left a model."""
    from .checkpoints import checkpoints

    if state is None:
        if (path / "run.json").exists():
            yield Finding("run", False, "run.json is damaged")
        return
    whole, status = checkpoints(path), state.get("status")
    last = f"; the last whole checkpoint is {whole[-1].name}, which can be inspected" if whole else ""
    saved = "" if kind else f": no model has been saved yet{last}"
    if status == "running":
        yield Finding("run", None, f"it is under way{saved}")
    else:
        yield Finding("run", status == "done" and bool(kind), f"{status}: {state.get('why')}{saved}")


def _files(path: Path) -> Iterator[Finding]:
    """Whether a checkpoint is as it was written."""
    from .checkpoints import SEAL, fault_of

    if (path / SEAL).is_file():
        fault = fault_of(path, thorough=True)
        yield Finding("files", not fault, fault or "all are as they were written")


def _checks(path: Path, kind: str, facts: dict | None) -> Iterator[Finding]:
    yield from _guarded("metadata", _facts, path, kind, facts)
    base = list(_guarded("base model", _base, path, kind))
    yield from base
    config = _config(path, kind) if base[0].passed else None
    yield from _guarded("chat template", _template, path, kind, facts, config is not None)
    weights = _Weights.of(path, kind)
    if isinstance(weights, str):
        yield Finding("weights", False, weights)
        return
    if config is not None:
        yield from _guarded("keys", _keys, path, kind, config, weights)
    yield from _guarded("numbers", _numbers, kind, weights)


def _guarded(name: str, check, *given) -> list[Finding]:
    """What a check finds; a file that it cannot read is a finding, too."""
    try:
        return list(check(*given))
    except Exception as problem:
        reason = (str(problem).strip().splitlines() or [""])[0][:150]
        return [Finding(name, False, f"cannot be checked ({type(problem).__name__}: {reason})")]


def _facts(path: Path, kind: str, facts: dict | None) -> Iterator[Finding]:
    if (path / metadata.FILE).is_file():
        json.loads((path / metadata.FILE).read_text(encoding="utf-8"))["data"]["rows"]  # or it is damaged
    if facts is None:
        yield Finding("metadata", None, f"no {metadata.FILE}: made by another tool, or by an older version")
        return
    if kind == "adapter":
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        if config.get(metadata.KEY) != facts:
            told = f"adapter_config.json has lost its {metadata.KEY}, or has another; {metadata.FILE} is what lasts"
            yield Finding("metadata", None, told)
            return
    yield Finding("metadata", True, f"{facts['task']} on {told_rows(facts['data'])}")


def _base_name(path: Path, kind: str) -> str:
    from . import models

    return models.base_of(str(path)) if kind == "adapter" else str(path)


def _config(path: Path, kind: str):
    from . import models

    return models.load_config(_base_name(path, kind))[0]


def _base(path: Path, kind: str) -> Iterator[Finding]:
    """Whether the base model is there, also by the name that the adapter has for it."""
    from . import models

    name = _base_name(path, kind)
    try:
        config, _ = models.load_config(name)
    except (CannotLoad, EnvironmentUnfit) as problem:
        yield Finding("base model", False, str(problem).splitlines()[0])
        return
    yield Finding("base model", True, f"{name} ({config.model_type})")
    named = models.adapter_config(str(path)).base_model_name_or_path if kind == "adapter" else name
    if named != name:
        told = f"adapter_config.json names {named}, which is gone: write {Path(name).resolve()} there"
        yield Finding("base's name", False, told)
    elif kind == "adapter" and Path(named).is_dir():
        yield Finding("base's name", None, f"{named} is a folder of this machine: who gets the adapter needs it, too")


def _template(path: Path, kind: str, facts: dict | None, based: bool) -> Iterator[Finding]:
    found = path / "chat_template.jinja"
    if not found.is_file():
        told = "no chat_template.jinja: it must be that of the base model that was trained on"
        yield Finding("chat template", False if facts else None, told)
        return
    own = metadata.template_hash(found.read_text(encoding="utf-8"))
    known = facts["chat_template"]["sha256"] if facts else None
    if known and known != own:
        yield Finding("chat template", False, f"it is not the one that was trained on (sha256 {known[:16]})")
    else:
        told = f"sha256 {own[:16]}" + ("" if known else "; nothing says whether it was trained on")
        yield Finding("chat template", True if known else None, told)
    if not based or kind != "adapter":
        return
    with contextlib.suppress(Exception):  # the base's own template cannot be read: nothing to compare
        theirs = _template_of(_base_name(path, kind))
        if theirs and metadata.template_hash(theirs) != own:
            told = "the base model's is another: whoever serves the adapter must take the one that is saved with it"
            yield Finding("base's template", None, told)


def _template_of(model: str) -> str | None:
    from transformers import AutoTokenizer

    beside = Path(model) / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    found = AutoTokenizer.from_pretrained(model).chat_template
    return found.get("default") if isinstance(found, dict) else found


class _Weights:
    """The tensors of a folder, by name, read one at a time."""

    def __init__(self, files: list[Path]):
        from safetensors import safe_open

        self.files = {path: safe_open(path, "pt") for path in files}
        self.names = {name: path for path, opened in self.files.items() for name in opened.keys()}  # noqa: SIM118

    @classmethod
    def of(cls, path: Path, kind: str) -> _Weights | str:
        """The weights, or why they cannot be read."""
        files = sorted(path.glob("adapter_model*.safetensors" if kind == "adapter" else "model*.safetensors"))
        if not files:
            return "no .safetensors file with weights"
        index = path / "model.safetensors.index.json"
        if kind == "model" and index.is_file():
            try:
                wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                return f"{index.name} is damaged"
            if absent := sorted(wanted - {file.name for file in files}):
                return f"{absent[0]} is missing"
        try:
            weights = cls(files)
            return weights if weights.names else "the weights are empty"
        except Exception as problem:
            return f"the weights cannot be read ({type(problem).__name__}: cut off?)"

    def shape(self, name: str) -> list[int]:
        return self.files[self.names[name]].get_slice(name).get_shape()

    def tensor(self, name: str):
        return self.files[self.names[name]].get_tensor(name)


def _keys(path: Path, kind: str, config, weights: _Weights) -> Iterator[Finding]:
    """Whether every tensor has a place in the base model, of its shape, and none is missing."""
    try:
        expected, optional, modules = _expected(path, kind, config)
    except ValueError as problem:  # nothing in the base is what the adapter is for
        yield Finding("keys", False, f"the adapter does not fit the base model ({str(problem).splitlines()[0][:150]})")
        return
    except (RuntimeError, NotImplementedError) as problem:  # kinds of adapters that compute as they are made
        yield Finding("keys", None, f"cannot be checked ({type(problem).__name__})")
        return
    strange = [name for name in weights.names if name not in expected]
    absent = [name for name in expected if name not in weights.names and name not in optional]
    misshapen = [n for n in weights.names if n in expected and list(weights.shape(n)) != expected[n]]
    if strange:
        told = f"{len(strange)} of {len(weights.names)} keys have no place in the base model, and would be passed over "
        yield Finding("keys", False, f"{told}in silence: {strange[0]}{near_name(strange[0], modules)}")
    elif absent:
        told = f"{len(absent)} of {len(expected)} keys are missing, and would stay as they are in the base: {absent[0]}"
        yield Finding("keys", False, told)
    elif misshapen:
        yield Finding("keys", False, f"{len(misshapen)} keys have another shape than in the base: {misshapen[0]}")
    else:
        yield Finding("keys", True, f"all {len(weights.names)} keys have their place in the base model")


def _expected(path: Path, kind: str, config) -> tuple[dict[str, list[int]], set[str], list[str]]:
    """(shape of each key that a folder should hold, those that it need not, the base's module names), from a model
    without weights."""
    from . import models

    named = models.adapter_config(str(path)) if kind == "adapter" else None
    reward = str(getattr(named, "task_type", "")).endswith("SEQ_CLS")
    model = models.skeleton(config, reward or models.is_reward(config))
    modules = [name for name, _ in model.named_modules()]
    if named is None:
        shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
        tied = {name for name in shapes if "embed" in name or "lm_head" in name}  # of which one is saved
        return shapes, tied, modules
    import torch
    from peft import get_peft_model, get_peft_model_state_dict

    with torch.device("meta"):
        adapted = get_peft_model(model, named)
    needed = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    found = get_peft_model_state_dict(adapted, save_embedding_layers=True)  # as PEFT does it sometimes
    return {name: list(value.shape) for name, value in found.items()}, set(found) - set(needed), modules


def near_name(key: str, modules) -> str:
    """What the base calls the module that a key most likely means."""
    found = LORA.fullmatch(key)
    module = found["module"] if found else key.removeprefix("base_model.model.").rpartition(".")[0]
    same = [name for name in modules if name.rpartition(".")[2] == module.rpartition(".")[2]]
    near = difflib.get_close_matches(module, same, 1, 0)
    return f" (the base has {near[0]})" if near else ""


def _numbers(kind: str, weights: _Weights) -> Iterator[Finding]:
    def wrong(tensor) -> bool:
        tensor = tensor.float()  # of which the smallest types know no NaN
        return bool(tensor.isnan().any() if kind == "model" else not tensor.isfinite().all())

    bad = [name for name in weights.names if wrong(weights.tensor(name))]  # the bounds of whole models may be infinite
    told = f"{len(bad)} tensors are not numbers: {bad[0]}" if bad else f"all {len(weights.names)} tensors are numbers"
    yield Finding("numbers", not bad, told)
    changes = [name for name in weights.names if (found := LORA.fullmatch(name)) and found["side"] == "B"]
    if kind == "adapter" and changes:
        changed = sum(bool(weights.tensor(name).any()) for name in changes)
        none = "all of its updates are zero: it answers as the base model does"
        yield Finding("change", changed > 0, f"{changed} of {len(changes)} updates are not zero" if changed else none)


def summary(result: dict) -> str:
    """A result of `inspect` in a few lines for a person."""
    lines = [f"folder   {result['folder']} ({result['kind']})"]
    for told in (_told_run(result["run"] or {}), _told_facts(result["facts"] or {})):
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):  # what others have written there
            lines += list(told)
    return "\n".join([*lines, *lines_of(Finding(**check) for check in result["checks"])])


def lines_of(findings: Iterable[Finding]) -> list[str]:
    """Findings for a reader, a line each."""
    marks = {True: "ok", False: "FAILED", None: "note"}
    return [f"{marks[finding.passed]:<8} {finding.check}: {finding.told}" for finding in findings]


def _told_run(run: dict) -> Iterator[str]:
    if not run:
        return
    steps = f"step {run.get('step', 0)} of {run['total_steps']}" if "total_steps" in run else "no step yet"
    left = f", {run['eta_s']} s to go" if run.get("eta_s") else ""
    yield f"run      {run.get('status')}, begun {run.get('started')}; {steps}{left}"
    metrics = run.get("metrics", {})
    names = ("loss", "train_loss", "eval_loss", "gen/pass_rate")
    shown = [f"{name} {metrics[name]:.4g}" for name in names if isinstance(metrics.get(name), float)]
    if shown:
        yield f"metrics  {', '.join(shown)}"
    if best := run.get("best"):
        yield f"best     step {best['step']}: {best['metric']} {best['value']:.4g}"


def _told_facts(facts: dict) -> Iterator[str]:
    if not facts:
        return
    base, data = facts["base_model"], facts["data"]
    yield f"task     {facts['task']} on {', '.join(data['names'])}: {told_rows(data)}"
    yield f"data     fingerprint {data['fingerprint']}, version {data.get('version') or 'unknown'}"
    yield f"base     {base['name']}, revision {base.get('revision') or 'unknown'}, {base.get('license')}"
    for key, value in facts.get("metadata", {}).items():
        yield f"         {key}: {value}"
