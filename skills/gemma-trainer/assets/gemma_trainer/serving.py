"""How vLLM, MLX and LiteRT take a model: the exact commands, and what of an adapter vLLM would refuse or pass over.

The facts are of the versions named here, read from their sources; a later one may take more.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from . import artefacts, metadata, models
from .errors import CannotLoad
from .families import family_of_config, modalities
from .files import user_path
from .run_check import LORA, Finding, lines_of

VERSIONS = {"vllm": "0.33.0", "mlx-vlm": "0.7.10", "mlx-lm": "0.32.2", "litert-torch": "0.10.0"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
LAYER = r"layers\.(?P<number>\d+)\.(self_attn\.(?P<attention>[qkvo])_proj|mlp\.(gate|up|down)_proj{more})"
PER_LAYER = "|per_layer_input_gate|per_layer_projection|router\\.proj"


@dataclass(frozen=True)
class Served:
    """How vLLM names the modules of a class of models (its models/*.py: `hf_to_vllm_mapper`, `get_mm_mapping`)."""

    renames: dict[str, str]  # beginnings of names, applied in this order, each to what the one before gave
    language: str  # regular expression of the modules that take LoRA
    towers: str = ""  # of those that do so with --enable-tower-connector-lora


_MEDIA = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_GEMMA4 = r"language_model\.model\.(" + LAYER.format(more=PER_LAYER) + "|per_layer_model_projection)"
SERVED = {
    "Gemma3ForCausalLM": Served({}, r"model\." + LAYER.format(more="")),
    "Gemma3ForConditionalGeneration": Served(
        _MEDIA | {"model.vision_tower.": "vision_tower."},
        r"language_model\.model\." + LAYER.format(more=""),
        r"vision_tower\.vision_model\.encoder\.layers\.\d+\.(self_attn\.([qkv]|out)_proj|mlp\.fc[12])",
    ),
    "Gemma4ForCausalLM": Served(
        {"model.language_model.": "model."},
        r"model\.(" + LAYER.format(more=PER_LAYER) + "|per_layer_model_projection)",
    ),
    "Gemma4ForConditionalGeneration": Served(
        {
            "model.vision_tower": "vision_tower",
            "model.embed_vision": "embed_vision",
            "model.audio_tower.": "audio_tower.",
            "model.embed_audio.": "embed_audio.",
            **_MEDIA,
            "model": "language_model.model",
        },
        _GEMMA4,
        r"(vision|audio)_tower\.(?!.*vision_model).+|embed_(vision|audio)\.embedding_projection",
    ),
    "Gemma4UnifiedForConditionalGeneration": Served(
        {
            "model.embed_audio.": "embed_audio.",
            "model.embed_vision.": "embed_vision.",
            "model.vision_embedder.": "vision_embedder.",
            **_MEDIA,
            "model": "language_model.model",
        },
        _GEMMA4,
        r"embed_(vision|audio)\.embedding_projection",
    ),
}
WITHOUT_LORA = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")  # which implement no SupportsLoRA
# Keys of adapter_config.json with values that vLLM refuses: vllm/lora/peft_helper.py.
REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of LoRA layers",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # init_lora_weights that leave the base as it is
# What became of an update, and why.
FATES = {
    "served": "are served",
    "tower": "of the towers: served with --enable-tower-connector-lora, which vLLM calls experimental",
    "refused": "have a name that no layer of the server ends in: it refuses the adapter",
    "experts": "of a mixture's experts: the server refuses them as they are saved",
    "embedding": "of embeddings or the head: the server refuses the adapter",
    "shared": "of keys and values in layers that share those of others: the server has none there, and drops them",
    "half": "of keys that serve as values, too: the server changes the keys, and leaves the values the base's",
    "dropped": "have no layer of their name in the server, which passes them over: it answers as the base there",
}
GOOD = {"served": True, "tower": None}


def vllm(config) -> dict:
    """What vLLM does with an adapter or a model, and the line that serves it."""
    folder = user_path(config.path)
    kind = artefacts.kind_of(folder)
    if kind not in ("adapter", "model"):
        raise CannotLoad(f"{config.path}: vLLM serves an adapter or a whole model, and there is a {kind}")
    name = config.name or folder.resolve().name
    base = models.base_of(str(folder)) if kind == "adapter" else str(folder)
    base_config, family = models.load_config(base)
    towers = False
    if kind == "adapter":
        findings, towers = _adapter_findings(folder, base_config)
    else:
        findings = _model_findings(base_config)
    findings += _template_finding(folder)
    served = all(finding.passed is not False for finding in findings)
    given = ["vllm", "serve", base if kind == "adapter" else str(folder)]
    if kind == "adapter":
        rank = next((rank for rank in RANKS if rank >= _rank(_adapter_config(folder))), RANKS[-1])
        given += ["--enable-lora", "--lora-modules", f"{name}={folder}", "--max-lora-rank", str(rank)]
        given += ["--enable-tower-connector-lora"] * towers
    else:
        given += ["--served-model-name", name]
    if (folder / "chat_template.jinja").is_file():
        given += ["--chat-template", str(folder / "chat_template.jinja")]
    if family.name.startswith("gemma4"):
        given += ["--enable-auto-tool-choice", "--tool-call-parser", "gemma4", "--reasoning-parser", "gemma4"]
        if hasattr(base_config, "vision_config"):
            given += ["--limit-mm-per-prompt", '{"video": 0}']  # nothing here trains on video
    remedy = f"export.py merge {config.path} --output merged, then export.py vllm merged"
    if any("reward_score.py" in finding.told for finding in findings):
        remedy = "score with reward_score.py"
    elif kind == "model":
        remedy = "ask it with transformers, or a server that has its class"
    return _told(kind, shlex.join(given) if served else None, findings, "vllm", None if served else remedy)


def _told(kind: str, command: str | None, findings: list[Finding], tool: str, remedy: str | None) -> dict:
    lines = lines_of(findings)
    lines += [command] if command else [f"remedy   {remedy}"] * bool(remedy)
    return {
        "kind": kind,
        "checked_with": {tool: VERSIONS[tool]},
        "checks": [asdict(finding) for finding in findings],
        "command": command,
        **({"remedy": remedy} if remedy else {}),
        **({} if command else {"exit_code": 8}),
        "summary": "\n".join(lines),
    }


def _model_findings(config) -> list[Finding]:
    name = (config.architectures or ["unknown"])[0]
    known = name in SERVED or name in WITHOUT_LORA
    told = f"{name} is served" if known else f"{name} is no class that vLLM {VERSIONS['vllm']} has"
    if models.is_reward(config):
        told = "a reward model, which scores and does not speak: see reward_score.py"
    return [Finding("class", known, told)]


def _template_finding(folder: Path) -> list[Finding]:
    if (folder / "chat_template.jinja").is_file():
        return []
    return [Finding("chat template", None, "no chat_template.jinja here: the served model's own is taken")]


# ---- what becomes of an adapter


def _adapter_config(folder: Path) -> dict:
    try:
        return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise CannotLoad(f"{folder}/adapter_config.json is damaged") from None


def _rank(adapter: dict) -> int:
    return max([int(adapter.get("r") or 1), *(adapter.get("rank_pattern") or {}).values()])


def _adapter_findings(folder: Path, config) -> tuple[list[Finding], bool]:
    """(findings, whether it changes towers that can be served) of an adapter on a base of this config."""
    adapter = _adapter_config(folder)
    name = _class_of(config)
    findings = _config_findings(adapter, name)
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return [*findings, Finding("files", False, "no adapter_model.safetensors, the one file vLLM reads")], False
    if name not in SERVED:
        return findings, False
    updates = _updates(file)
    fates = fates_of(updates, config, name)
    counted = Counter(fates.values())
    for fate in (fate for fate in FATES if counted[fate]):
        first = next(update for update in updates if fates[update] == fate)
        example = "" if fate == "served" else f" (such as {first})"
        told = f"{counted[fate]} of {len(updates)} updates {FATES[fate]}{example}"
        findings.append(Finding("updates", GOOD.get(fate, False), told))
    if not counted["served"] + counted["tower"]:
        findings.append(Finding("prefix", False, "no update has a place in the server: it would answer as the base"))
    return findings, bool(counted["tower"])


def _class_of(config) -> str:
    """The class that vLLM takes for a base model, which is named as that of transformers."""
    named = (getattr(config, "architectures", None) or [""])[0]
    if named in SERVED or named in WITHOUT_LORA:
        return named
    return type(models.skeleton(config)).__name__


def _config_findings(adapter: dict, name: str) -> list[Finding]:
    """What of adapter_config.json vLLM refuses."""
    found = [told for key, told in REFUSED.items() if adapter.get(key)]
    if adapter.get("peft_type") not in (None, "LORA"):
        found.append(f"adapters of type {adapter['peft_type']}")
    if adapter.get("bias") not in (None, "none"):
        found.append("adapters with biases")
    start = adapter.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        found.append(f"init_lora_weights {start}, which changes the base model")
    whole = [module for module in adapter.get("modules_to_save") or [] if module not in ("score", "classifier")]
    if whole:
        found.append(f"whole trained modules ({', '.join(whole)})")
    if adapter.get("trainable_token_indices"):
        found.append("trained tokens")
    if _rank(adapter) > RANKS[-1]:
        found.append(f"rank {_rank(adapter)}, over {RANKS[-1]}")
    findings = [Finding("adapter", False, f"vLLM takes no {told}") for told in found]
    if "SEQ_CLS" in str(adapter.get("task_type")):
        findings.append(Finding("adapter", False, "a reward adapter, which scores and does not speak: reward_score.py"))
    if name not in SERVED:
        findings.append(Finding("class", False, f"vLLM {VERSIONS['vllm']} takes no LoRA for {name}"))
    return findings


def _updates(file: Path) -> list[str]:
    """The names of the modules that an adapter changes, without PEFT's prefix, and of other tensors in it."""
    from safetensors import safe_open

    names = []
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118
            found = LORA.fullmatch(key) or re.fullmatch(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight", key)
            module = found["module"] if found else key.removeprefix("base_model.model.")
            if not (found and found["side"] == "B"):
                names.append(module)
    return names


def fates_of(updates: list[str], config, name: str) -> dict[str, str]:
    """What vLLM does with each update: a key of `FATES`.

    Args:
        updates: names of modules as transformers, and PEFT, spell them.
        config: of the base model.
        name: of its class, a key of `SERVED`.
    """
    import torch

    served = SERVED[name]
    linear = [name for name, module in models.skeleton(config).named_modules() if isinstance(module, torch.nn.Linear)]
    known = {name.rpartition(".")[2] for name in linear} - {"lm_head"}
    text = config.get_text_config()
    shared = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    one = getattr(text, "attention_k_eq_v", False)

    def fate(update: str) -> str:
        named = _renamed(update, served.renames)
        last = named.rpartition(".")[2]
        if re.search(r"\.experts\b", named):
            return "experts"
        if last in ("embed_tokens", "embed_tokens_per_layer", "lm_head") or "lora_embedding" in named:
            return "embedding"
        if last not in known:
            return "refused"
        found = re.fullmatch(served.language, named)
        if not found:
            return "tower" if served.towers and re.fullmatch(served.towers, named) else "dropped"
        number, part = int(found["number"] or 0), found["attention"]
        if number >= text.num_hidden_layers:
            return "dropped"
        if number >= shared and part in ("k", "v"):
            return "shared"
        return "half" if one and part == "k" and text.layer_types[number] == "full_attention" else "served"

    return {update: fate(update) for update in updates}


def _renamed(module: str, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        if module.startswith(old):
            module = new + module[len(old) :]
    return module


# ---- devices

MLX_VLM = "mlx_vlm.convert --hf-path {path} --mlx-path {output} -q --q-bits 4"
MLX_LM = "mlx_lm.convert --hf-path {path} --mlx-path {output} -q --q-bits 4"
LITERT = "litert-torch export_hf --model={path} --output_dir={output} --task={task}"


def mlx(config) -> dict:
    """The commands that make a model for MLX (Apple Silicon) of a merged one, and ask it something."""
    folder, base_config, family = _whole_model(config.path, "MLX")
    kinds = modalities(models.load_processor(str(folder), base_config), base_config)
    tool = "mlx-vlm" if kinds else "mlx-lm"
    output = f"{folder.resolve().name}-mlx"
    paths = {"path": shlex.quote(str(folder)), "output": shlex.quote(output)}
    ask = f"{tool.replace('-', '_')}.generate --model {paths['output']} --prompt 'Hello!' --max-tokens 256"
    if "image" in kinds:
        ask += " --image picture.png"
    lines = [f"pip install {tool}=={VERSIONS[tool]}", (MLX_VLM if kinds else MLX_LM).format(**paths), ask]
    findings = [Finding("class", True, f"{family.name} ({', '.join(['text', *sorted(kinds)])})")]
    findings.append(Finding("weights", None, "the language model in 4 bits; the towers stay whole"))
    if tool == "mlx-lm":
        findings.pop()
    findings.append(_template_kept(folder))
    return _told("model", "\n".join(lines), findings, tool, None)


def litert(config) -> dict:
    """The commands that make a .litertlm file (phones, browsers) of a merged model."""
    folder, base_config, family = _whole_model(config.path, "LiteRT")
    kinds = modalities(models.load_processor(str(folder), base_config), base_config)
    task = "text_generation"
    if kinds:
        hears = "audio" in kinds and family.name == "gemma4"  # the one family whose audio encoder is exported
        task = "multimodal_lm" if hears else "image_text_to_text"
    output = f"{folder.resolve().name}-litert"
    line = LITERT.format(path=shlex.quote(str(folder)), output=shlex.quote(output), task=task)
    text = base_config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", 0):  # asserted in its model_ext/exportables.py
        line += " --externalize_embedder=True"
    findings = [Finding("class", True, f"{family.name}, as {task}, weights in 8 bits")]
    if "audio" in kinds and task != "multimodal_lm":
        findings.append(Finding("audio", None, f"no audio encoder of {family.name} is exported: it will not hear"))
    findings.append(_template_kept(folder))
    lines = [f"pip install litert-torch=={VERSIONS['litert-torch']}", line]
    return _told("model", "\n".join(lines), findings, "litert-torch", None)


def _template_kept(folder: Path) -> Finding:
    there = (folder / "chat_template.jinja").is_file()
    told = "chat_template.jinja goes along" if there else "no chat_template.jinja in the folder: copy the run's there"
    return Finding("chat template", True if there else False, told)


def _whole_model(path: str, tool: str):
    """(folder, config, family) of a whole model that speaks; CannotLoad, with what to do, for anything else."""
    folder = user_path(path)
    kind = artefacts.kind_of(folder)
    if kind == "adapter":
        raise CannotLoad(f"{path} is an adapter of PEFT, which {tool} does not read: first export.py merge it")
    if kind != "model":
        raise CannotLoad(f"{path}: {tool} takes the folder of a whole model, and there is a {kind}")
    facts = metadata.read(folder) or {}
    config, _ = models.load_config(str(folder))
    if facts.get("task") == "reward" or models.is_reward(config):
        raise CannotLoad(f"{path} is a reward model, which {tool} does not know: see reward_score.py")
    return folder, config, family_of_config(config)
