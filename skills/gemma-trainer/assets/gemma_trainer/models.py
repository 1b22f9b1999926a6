"""Load a Gemma with its processor, quantize it, and choose what is trained."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from .errors import CannotLoad, EnvironmentUnfit, UsageError
from .families import family_of_config, family_of_processor

FOUR_BIT = "4-bit nf4 weights with double quantization"
PARTS = ("language", "vision", "audio")
# What is not of the language model, by words in its parameters' names.
TOWERS = {
    "vision": ("vision_tower", "embed_vision", "multi_modal_projector", "vision_embedder"),
    "audio": ("audio_tower", "embed_audio"),
}
MEDIA = {"vision": "image", "audio": "audio"}  # the kind of medium that each of these takes
# What is never quantized, by name; small beside the language model, and the first to suffer.
WHOLE = """lm_head score vision_tower audio_tower vision_embedder embed_vision embed_audio multi_modal_projector altup
router""".split()


def load_config(name: str):
    """The config and family of a model: a hub id or a folder.

    Raises:
        CannotLoad: not found, gated, offline, or not a supported Gemma; the message says what to do.
        EnvironmentUnfit: its family needs a package that is not installed.
    """
    from importlib.util import find_spec

    from transformers import AutoConfig

    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise CannotLoad(f"{name}: no such folder")
    if (Path(name) / "adapter_config.json").is_file() and not (Path(name) / "config.json").is_file():
        told = f"{name} is an adapter of {base_of(name)}, where a whole model is needed"
        raise CannotLoad(f"{told}: give that; sft_train.py and dpo_train.py go on from this with --adapter")
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as problem:  # broken files make transformers raise whatever they happen to hit
        raise CannotLoad(_advice(name, problem)) from None
    family = family_of_config(config)
    for package in family.needs:
        if find_spec(package) is None:
            raise EnvironmentUnfit(f"{name} is a {family.name} model, which needs a package: pip install {package}")
    return config, family


def is_reward(config) -> bool:
    """Whether a model's config is that of one that scores."""
    return any("SequenceClassification" in name for name in getattr(config, "architectures", None) or [])


def load_processor(name: str, config):
    """The processor of a multimodal Gemma, or the tokenizer of a text-only one.

    Raises:
        CannotLoad: the folder has none, or one of another model.
    """
    from transformers import AutoProcessor, AutoTokenizer

    text_only = not hasattr(config, "vision_config") and not hasattr(config, "audio_config")
    try:
        processor = (AutoTokenizer if text_only else AutoProcessor).from_pretrained(name)
    except Exception as problem:
        needed = "tokenizer.json" if text_only else "tokenizer.json and processor_config.json"
        raise CannotLoad(f"{name}: copy the model's own {needed} there ({_first_line(problem)})") from None
    if not text_only and not hasattr(processor, "tokenizer"):
        raise CannotLoad(f"{name} has a tokenizer but no processor (processor_config.json): copy the model's own there")
    family = family_of_config(config)
    if not text_only and family_of_processor(processor) is not family:
        raise CannotLoad(
            f"{name} is a {family.name} model, but its processor is a {type(processor).__name__} instead of a "
            f"{family.processor}: copy the model's own processor_config.json there"
        )
    return processor


def load_model(name: str, config, dtype, quantize: bool = False, reward: bool = False):
    """Load the weights.

    Args:
        name: a hub id or a folder.
        reward: with a head that scores instead of the one that speaks; a new one, unless the model has it.
        dtype: torch dtype of the weights; of the computation where they are quantized.
        quantize: 4-bit NF4 with double quantization (QLoRA, arXiv 2305.14314), on CUDA.

    Raises:
        CannotLoad: the weights cannot be found or read.
    """
    import torch

    options = {"dtype": dtype}
    if reward:
        from .reward_model import reward_class

        config.num_labels, model_class = 1, reward_class(config)
    else:
        model_class = speaking_class(config)
    if quantize:
        options["quantization_config"] = nf4(dtype)
        options["device_map"] = {"": torch.cuda.current_device()}
    if torch.cuda.device_count() > 1 and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        options["device_map"] = "auto"  # one process, several GPUs: the model is spread over them
    return loading(name, lambda: model_class.from_pretrained(name, config=config, **options))


def loading(name: str, load):
    """load(), whose errors are told as what is wrong with the model `name` (CannotLoad)."""
    from safetensors import SafetensorError

    try:
        return load()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as problem:
        if isinstance(problem, RuntimeError) and "memory" in str(problem):
            raise
        raise CannotLoad(_advice(name, problem)) from None


def nf4(dtype):
    """The QLoRA quantization: nf4 weights, quantized constants, computation in `dtype`. The heads, the towers with
    what joins them to the text, and a mixture's router keep their 16 bits."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[rf".*\b{name}" for name in WHOLE],
    )


def quantized_linears(model) -> list[str]:
    """The names of the linear layers that `nf4` quantizes, inside any adapter.

    Source: transformers/integrations/bitsandbytes.py, replace_with_bnb_linear.
    """
    import torch

    whole = re.compile("|".join(rf".*\b{name}" for name in WHOLE))
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    return [name for name in linear if ".lora_" not in name and not whole.match(name)]


def decide_quantization(wanted: str, device: str, full: bool) -> tuple[bool, str]:
    """Whether to load in 4 bits, and why.

    Args:
        wanted: "auto" (4-bit where LoRA runs on CUDA with bitsandbytes installed), "4bit" or "none".

    Raises:
        UsageError: 4-bit together with full fine-tuning.
        EnvironmentUnfit: 4-bit without CUDA or without bitsandbytes.
    """
    from importlib.util import find_spec

    if wanted == "none" or (wanted == "auto" and (full or device != "cuda")):
        return False, "weights not quantized"
    if full:
        raise UsageError("--quantize 4bit cannot be fine-tuned in full: drop --full or use --quantize none")
    if device != "cuda":
        raise EnvironmentUnfit(f"--quantize 4bit needs an NVIDIA GPU, found {device}: use --quantize none")
    if find_spec("bitsandbytes") is None:
        if wanted == "4bit":
            raise EnvironmentUnfit("--quantize 4bit needs bitsandbytes: pip install bitsandbytes")
        return False, "weights not quantized: bitsandbytes is not installed"
    return True, FOUR_BIT


def lora_modules(model, targets: str) -> str | list[str]:
    """The modules that LoRA adapts, as PEFT's `target_modules` takes them.

    Args:
        targets: parts of the model by name, comma-separated (`language`, `vision`, `audio`, `all`), or a regular
            expression that matches whole module names or their ends, such as `q_proj|v_proj`, in any part.

    Returns:
        A regular expression for parts by name, else the names of the linear layers that match.

    Raises:
        UsageError: nothing matches (the message gives near names), or the output head does.
    """
    family = family_of_config(model.config)
    linear = _linear_names(model)
    matching = {part: re.compile(pattern) for part, pattern in family.lora_targets.items()}
    present = [part for part in PARTS if part in matching and any(map(matching[part].fullmatch, linear))]
    if not targets.strip():
        raise UsageError(f"--lora-targets is empty: name {', '.join(PARTS)} or all")
    names = [name.strip() for name in targets.split(",")]
    if set(names) <= {"all", "all-linear", *PARTS} and {"all", "all-linear"} & set(names):  # PEFT's word is the second
        names = present
    if all(name in PARTS for name in names):
        for name in names:
            if name not in present:
                raise UsageError(f"--lora-targets {name}: this model has no {name} layers")
        return "|".join(f"(?:{family.lora_targets[name]})" for name in names)
    wanted = targets.replace(",", "|") if re.fullmatch(r"[\w.]+(,[\w.]+)+", targets) else targets
    try:
        pattern = re.compile(rf"(?:.*\.)?(?:{wanted})(?:\.linear)?")  # the towers' wrappers hold the linear inside
    except re.error as problem:
        raise UsageError(f"--lora-targets is no part ({', '.join(PARTS)}, all) and no expression: {problem}") from None
    found = [name for name in linear if pattern.fullmatch(name)]
    if not found:
        raise UsageError(f"--lora-targets {targets} matches no linear layer; near names: {_near_names(linear, wanted)}")
    if any(model.get_submodule(name) is model.get_output_embeddings() for name in found):
        raise UsageError("--lora-targets matches the output head, which is tied to the embeddings: leave it out")
    if "score" in found:
        raise UsageError("--lora-targets matches the reward head, which is trained whole: leave it out")
    return found


def _linear_names(model) -> list[str]:
    import torch

    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def _near_names(linear: list[str], targets: str) -> str:
    leaves = {*PARTS, "all"} | {name.removesuffix(".linear").rpartition(".")[2] for name in linear}
    words = re.sub(r"[^\w|]", "", targets).split("|")
    near = [name for word in words for name in difflib.get_close_matches(word, leaves, 3, 0.4)]
    return ", ".join(dict.fromkeys(near)) or ", ".join(sorted(leaves)[:8])


def skeleton(config, reward: bool = False):
    """The model without weights, on the meta device: what its modules are called and how large they are."""
    import torch

    with torch.device("meta"):
        if reward:
            from .reward_model import reward_class

            config.num_labels = 1
            return reward_class(config)(config)
        return speaking_class(config).from_config(config)


def speaking_class(config):
    """The auto class of transformers that loads a model that speaks."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if config.model_type.endswith("_text") else AutoModelForImageTextToText


def add_lora(model, targets: str, r: int, alpha: int, dropout: float):
    """Wrap a model with LoRA adapters on the layers that `targets` names (see `lora_modules`); the head of a reward
    model is trained whole, beside them."""
    from peft import LoraConfig, get_peft_model

    scores = hasattr(model, "score")
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=lora_modules(model, targets),
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        modules_to_save=["score"] if scores else None,
    )
    return get_peft_model(model, config)


def adapter_config(adapter: str):
    """The PEFT config of an adapter; raises CannotLoad where there is none."""
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(adapter)
    except Exception as problem:
        raise CannotLoad(f"{adapter}: no adapter can be loaded ({_first_line(problem)})") from None


def base_of(adapter: str) -> str:
    """The base model that an adapter belongs to, as its config names it; where that folder has moved, the one in it.

    Raises:
        CannotLoad: no adapter is there.
    """
    base = adapter_config(adapter).base_model_name_or_path
    beside = [place / "base-model" for place in (Path(adapter), Path(adapter).resolve().parent)]  # a checkpoint's run
    moved = [place for place in beside if place.is_dir()]
    return str(moved[0]) if not Path(base).is_dir() and moved else base


def load_adapter(model, adapter: str):
    """Wrap a model with an adapter that is to be trained on.

    Raises:
        CannotLoad: the adapter cannot be read, or belongs to another model.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    try:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        known = get_peft_model_state_dict(model, save_embedding_layers=True)
        foreign = [name for name in load_peft_weights(adapter, device="cpu") if name not in known]
    except Exception as problem:
        raise CannotLoad(f"adapter {adapter} does not fit the model ({_first_line(problem)})") from None
    if foreign:  # PEFT passes them over, and the bare model would be taken for the adapted one
        raise CannotLoad(f"adapter {adapter} does not fit the model: it has no {foreign[0]}")
    return model


def load_scorer(name: str, precision):
    """(model, processor) of a reward model: a run's folder, or a folder or hub id of a whole model.

    Raises:
        CannotLoad: it is no reward model, or cannot be loaded.
    """
    adapted = (Path(name) / "adapter_config.json").is_file()
    base = base_of(name) if adapted else name
    config, _ = load_config(base)
    if not ("SEQ_CLS" in str(adapter_config(name).task_type) if adapted else is_reward(config)):
        raise CannotLoad(f"{name} has no reward head: give the folder of a run of reward_train.py")
    model = load_model(base, config, precision.torch_dtype, reward=True)
    if adapted:
        model = load_adapter(model, name)
    return model.to(precision.device).eval(), load_processor(name, config)


def describe_trained(model) -> dict:
    """Parameter counts and, per part of the model, how many modules carry adapters."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapted = {name.split(".lora_")[0] for name in trained if ".lora_" in name}
    parts = dict.fromkeys(PARTS, 0)
    for name in adapted:
        part = next((part for part, keys in TOWERS.items() if any(key in name for key in keys)), "language")
        parts[part] += 1
    counts = [(p.numel(), p.requires_grad, ".experts." in name) for name, p in model.named_parameters()]
    total, trainable = sum(n for n, _, _ in counts), sum(n for n, trains, _ in counts if trains)
    trains = ", ".join(f"LoRA on {n} {part} layers" for part, n in parts.items() if n) or "all weights"
    if adapted and any(".score." in name for name in trained):
        trains += " and the reward head"
    # A mixture's experts are three-dimensional parameters, no linear layers.
    if frozen := sum(n for n, trains_too, expert in counts if expert and not trains_too):
        trains += f" (not on the experts, {frozen / total:.0%} of all weights)"
    return {"trainable_parameters": trainable, "total_parameters": total, "trains": trains}


def trained_kinds(model) -> set[str]:
    """The kinds of media whose tower, or what joins it to the text, is trained: of "image" and "audio"."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {MEDIA[part] for part, keys in TOWERS.items() if any(key in name for name in trained for key in keys)}


def _advice(name: str, problem: Exception) -> str:
    text = str(problem).lower()
    if "gated" in text or "401" in text or "403" in text:
        return f"{name} is gated: accept its licence on its model page, then log in with `hf auth login`"
    if Path(name).is_dir():
        return f"{name} is a folder, but no model can be loaded from it ({_first_line(problem)})"
    return (
        f"{name} cannot be loaded: no such folder, not in the local cache, and not to be had from the hub (offline?).\n"
        f"Give the folder of a downloaded model, or go online and run `hf download {name}` once."
    )


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:200]
