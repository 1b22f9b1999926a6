"""What the one who deploys a model asks of it, saved in each of its folders: facts that stay the same all run."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from . import families, sources
from .errors import UsageError
from .files import finite, user_path, write_whole
from .model_card import card
from .runs import versions

FILE = "training_metadata.json"
KEY = "custom_metadata"  # of adapter_config.json
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
TRAINING = """epochs max_steps batch_size grad_accum lr lora_r lora_alpha lora_dropout lora_targets full seed backend
beta loss_type loss_weights label_smoothing center_rewards_coefficient""".split()


def facts_of(config, record: dict, data, model, collator, own: dict) -> dict:
    """The facts of a run. None of them changes while it goes on.

    Args:
        record: of the run, with the precision and the quantization that were decided on.
        data: `data.Data`.
        model: the model in training.
        collator: `MultimodalCollator`, whose template and markers the model is trained on.
        own: what the user adds, under "metadata".
    """
    from .fsdp import inner_model

    family = families.family_of_config(model.config)
    labels = {name: getattr(config, name) for name in ("loss_on", "train_reasoning", "thinking")}
    return finite(
        {
            "task": config.task,
            "takes": ["text", *sorted(collator.modalities)],
            "base_model": {
                "name": shown_name(config.model),
                "revision": getattr(model.config, "_commit_hash", None),
                "family": family.name,
                "architecture": type(inner_model(model)).__name__,
                "license": license_of(config.model, family),
            },
            **({"adapter": shown_name(config.adapter)} if getattr(config, "adapter", None) else {}),
            "data": {
                "names": [shown_name(name) for name in data.names],
                "fingerprint": data.fingerprint,
                "version": own.get("data_version"),
                "rows": data.size,
                "eval_rows": len(data.eval_rows or ()),
            },
            "chat_template": template_facts(collator.renderer.template),
            "tokens": _tokens(collator, family),
            "max_len": config.max_len,
            "labels": labels | {"ignored": _ignored(config)},
            "training": {name: getattr(config, name) for name in TRAINING if hasattr(config, name)}
            | {name: record.get(name) for name in ("precision", "quantization")},
            "versions": versions(),
            "metadata": own,
        }
    )


def shown_name(name: str) -> str:
    """A model or data set as others may know it: a hub id as it is, of a path its last part."""
    is_file = name.endswith(sources.SUFFIXES) or user_path(name).exists()
    is_id = HUB_ID.fullmatch(name.partition(":")[0]) and not is_file
    return name if is_id else Path(name).name or name


def license_of(model: str, family) -> str:
    """The licence of a base model: what its card says, where that is at hand, else that of the family's own weights."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    card = Path(model) / "README.md"
    try:
        if not Path(model).is_dir():
            card = Path(try_to_load_from_cache(model, "README.md") or "")
        if card.is_file() and (found := ModelCard.load(card).data.license):
            return str(found)
    except Exception:  # a card that is none: whatever is in it, the run goes on
        pass
    return family.license


def template_facts(template: str) -> dict:
    """{"version": its name in the installed TRL, or "own"; "sha256"} of a chat template."""
    import trl.chat_template_utils as known

    names = (name for name in dir(known) if name.endswith("_chat_template") and getattr(known, name) == template)
    return {"version": next(names, "own").removesuffix("_chat_template"), "sha256": template_hash(template)}


def template_hash(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()


def _tokens(collator, family) -> dict:
    """The special tokens and markers, as they are spelled, and the ids that end an answer."""
    tokenizer, markers = collator.tokenizer, collator.labeller.markers
    stops = [tokenizer.eos_token_id, markers.turn_end, markers.response]
    spelled = {name: getattr(family, name) for name in ("turn_start", "turn_end", "model_header", "tool_response")}
    return {
        "bos": tokenizer.bos_token,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
        **{name: text for name, text in (spelled | {"channel": family.channel}).items() if text},
        # A tokenizer may name tokens of media that the model has no tower for.
        **{n: tokenizer.convert_ids_to_tokens(i) for n, i in collator.soft_tokens.items() if n in collator.modalities},
        "stop_token_ids": [token for token in stops if token is not None],
    }


def _ignored(config) -> list[str]:
    """What the loss did not look at."""
    ignored = ["system, developer and user messages", "tools and tool results", "soft tokens of images and clips"]
    ignored += ["answers marked train: false", "padding"]
    if config.loss_on == "last-turn":
        ignored.append("all answers but the last")
    if not config.train_reasoning:
        ignored.append("reasoning")
    if config.paired:
        ignored.append("what both answers share")
    return ignored


def read_own(pairs: tuple[str, ...], file: str | None) -> dict:
    """What `--metadata key=value` and `--metadata-file` add; the former win.

    Raises:
        UsageError: a word without "=", or a file that is no JSON object.
    """
    own = {}
    if file:
        try:
            own = json.loads(user_path(file).read_text(encoding="utf-8-sig"))
        except OSError as problem:
            raise UsageError(f"--metadata-file {file}: {problem.strerror}") from None
        except (ValueError, RecursionError):
            raise UsageError(f"--metadata-file {file}: is not JSON") from None
        if not isinstance(own, dict):
            raise UsageError(f"--metadata-file {file}: must hold a JSON object")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--metadata {pair}: write it as key=value")
        own[key.strip()] = value
    return own


def write(folder: Path, facts: dict) -> None:
    """Write the facts beside a saved model: into `training_metadata.json`, the adapter's config, and the model card.

    PEFT warns of the key that it does not know, and drops it where it saves the adapter again; the file stays.
    """
    write_whole(folder / FILE, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    config = folder / "adapter_config.json"
    if config.is_file():
        known = json.loads(config.read_text(encoding="utf-8"))
        # PEFT writes sets in an order that changes from one process to the next.
        known |= {key: sorted(value) for key, value in known.items() if key == "target_modules" and type(value) is list}
        write_whole(config, json.dumps(known | {KEY: facts}, indent=2, sort_keys=True, ensure_ascii=False))
    write_whole(folder / "README.md", card(facts, adapter=config.is_file()))


def is_reward_model(folder: Path) -> bool:
    """Whether a folder is one of a reward model: a run of reward_train.py, an adapter, or a whole model."""
    adapter, config = (_object(folder / name) for name in ("adapter_config.json", "config.json"))
    kinds = [adapter.get("task_type"), *(config.get("architectures") or [])]
    scores = any("SEQ_CLS" in str(kind) or "SequenceClassification" in str(kind) for kind in kinds)
    return scores or (read(folder) or {}).get("task") == "reward"


def _object(path: Path) -> dict:
    """The JSON object of a file; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read(folder: Path) -> dict | None:
    """The facts of a saved model; of one without the file, those in its adapter's config; None where there are none."""
    for name, key in ((FILE, None), ("adapter_config.json", KEY)):
        path = folder / name
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError):
                continue
            facts = found.get(key) if key and isinstance(found, dict) else found
            if isinstance(facts, dict):
                return facts
    return None
