"""What a .gguf file holds, and whether it is the model that it was made from; read with the `gguf` package alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .errors import CannotLoad
from .families import tokenizer_of
from .files import mib
from .run_check import Finding

# What llama.cpp calls the parameters of the language model, by what transformers calls them. Source: gguf's
# constants.py and tensor_mapping.py; a block's names follow `blk.<number>.`.
WHOLE_NAMES = {
    "embed_tokens": "token_embd",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "norm": "output_norm",
}
BLOCK_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
}
COMPARED = tuple(name for name in BLOCK_NAMES if name.startswith(("self_attn", "mlp")) and name.endswith("_proj"))
ARCHITECTURES = {"gemma3": "gemma3", "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4_unified": "gemma4"}
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)\.weight")
TOWER = re.compile("vision|audio|multi_modal")
BOUNDS = (".input_max", ".input_min", ".output_max", ".output_min")  # of clipped layers, infinite where none is set
# Where in a block of bytes its scales stand, as 16-bit floats: the only numbers of it that can fail to be one. Source:
# llama.cpp's ggml-common.h, block_q*.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
SCALES |= {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
CONTROL = ([3], [4])  # types of tokens that are found in a prompt whole: llama.cpp's CONTROL and USER_DEFINED
ROUNDING = {"F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}  # relative, of floats; of the others see `_rounding`


def open_gguf(path: str | Path):
    """A `gguf.GGUFReader`, which maps the file and reads tensors as they are asked for.

    Raises:
        CannotLoad: no such file, no GGUF, or one that is cut off.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except FileNotFoundError:
        raise CannotLoad(f"{path}: no such file") from None
    except Exception as problem:  # whatever numpy meets at a file's early end
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise CannotLoad(f"{path}: no whole GGUF file (cut off, or damaged: {reason[:120]})") from None


def value(reader, key: str, default=None):
    """The value of a metadata key: a number, a text or a list."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def rendered(template: str, messages: list[dict], tools: list | None = None) -> str:
    """The prompt that a chat template makes, as transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    how = {"chat_template": template, "add_generation_prompt": True, "bos_token": "<bos>"}
    return render_jinja_template(conversations=[messages], tools=tools, **how)[0][0]


def types_in(reader) -> str:
    """The types of a file's tensors with their share of its bytes, largest first: `Q4_K 61 %, Q6_K 38 %, F32 1 %`."""
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + tensor.n_bytes
    total = sum(sizes.values()) or 1
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / total:.0%}" for name, size in ordered)


def verify(path: str | Path, model_folder: str | Path | None = None) -> list[Finding]:
    """Look at a .gguf file, and compare it with the folder of the model that it was made from.

    Args:
        path: of a language model, or of the towers that llama.cpp calls mmproj.
        model_folder: with config.json, tokenizer, chat template and weights; without it only the file is looked at.

    Raises:
        CannotLoad: it is no whole GGUF file, or the folder holds no supported Gemma.
    """
    reader = open_gguf(path)
    towers = value(reader, "general.architecture") == "clip"
    found = [*_numbers(reader)]
    if model_folder is None:
        return [*found, *([] if towers else _alone(reader))]
    from . import models

    config, family = models.load_config(str(model_folder))
    if towers:
        return [*found, *_towers(reader, config)]
    processor = models.load_processor(str(model_folder), config)
    found += _architecture(reader, family)
    found += _tensors(reader, config)
    found += _weights(reader, Path(model_folder))
    found += _vocabulary(reader, tokenizer_of(processor), family)
    found += _template(reader, processor.chat_template)
    return found


def _numbers(reader) -> Iterator[Finding]:
    """Whether every tensor's values are numbers."""
    bad = [tensor.name for tensor in reader.tensors if not all(map(_are_numbers(tensor), _parts(tensor)))]
    size = mib(sum(tensor.n_bytes for tensor in reader.tensors))
    told = f"all {len(reader.tensors)} tensors are numbers ({size}: {types_in(reader)})"
    yield Finding("numbers", not bad, f"{len(bad)} tensors are not numbers: {bad[0]}" if bad else told)


def _parts(tensor) -> Iterator:
    """The rows of a tensor, some 16 million values at a time."""
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, 2**24 // rows.shape[-1])
    yield from (rows[start : start + step] for start in range(0, len(rows), step))


def _are_numbers(tensor):
    """A function that tells of some rows whether all their values are numbers."""
    import numpy as np

    finite = (lambda found: ~np.isnan(found)) if tensor.name.endswith(BOUNDS) else np.isfinite
    return lambda rows: bool(finite(_scales(rows, tensor.tensor_type)).all())


def _scales(rows, kind):
    """The floats in rows of a tensor: all of them, or of a type in blocks the scales of each block."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    if kind.name in ("F32", "F16"):
        return rows
    offsets = SCALES.get(kind.name)
    if offsets is None:
        return dequantize(rows, kind)
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[kind][1])
    return np.concatenate([blocks[:, at : at + 2].copy().view(np.float16) for at in offsets])


def _alone(reader) -> Iterator[Finding]:
    """What can be said of a file without its model: that it is a Gemma's, with a chat template."""
    name = value(reader, "general.architecture")
    yield Finding("architecture", name in ARCHITECTURES.values(), f"{name}")
    template = value(reader, "tokenizer.chat_template")
    told = "is there; whether it is the model's is not known" if template else "none: servers would guess one"
    yield Finding("chat template", None if template else False, told)


def _architecture(reader, family) -> Iterator[Finding]:
    name, wanted = value(reader, "general.architecture"), ARCHITECTURES[family.name]
    told = name if name == wanted else f"it is {name}, and the model {wanted}"
    yield Finding("architecture", name == wanted, told)


def _tensors(reader, config) -> Iterator[Finding]:
    """Whether each parameter of the language model has its tensor, of its shape."""
    found = {tensor.name: list(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
    wanted = _wanted(config)
    rows = len(value(reader, "tokenizer.ggml.tokens") or ())
    for name in ("token_embd.weight", "per_layer_token_embd.weight"):
        if name in wanted:  # the converter cuts and pads tables to the tokens that there are
            wanted[name] = [rows, *wanted[name][1:]]
    absent = [name for name in wanted if name not in found]
    misshapen = [name for name in wanted if name in found and found[name] != wanted[name]]
    if absent:
        told = f"{len(absent)} of {len(wanted)} tensors of the language model are missing: {absent[0]}"
    elif misshapen:
        name = misshapen[0]
        told = f"{len(misshapen)} tensors have another shape: {name} is {found[name]}, not {wanted[name]}"
    else:
        told = f"all {len(wanted)} tensors looked for are there, in their shapes"
    yield Finding("tensors", not absent and not misshapen, told)


def _wanted(config) -> dict[str, list[int]]:
    """{tensor's name: its shape} of a language model, from the model without weights."""
    from . import models

    wanted = {}
    for name, parameter in models.skeleton(config).named_parameters():
        if translated := gguf_name(name):
            wanted[translated] = list(parameter.shape)
    return wanted


def gguf_name(name: str) -> str | None:
    """What llama.cpp calls a parameter of the language model, None where that is not looked for.

    Example: "model.language_model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight".
    """
    if TOWER.search(name) or not name.endswith(".weight"):
        return None
    if found := LAYER.fullmatch(name):
        block = BLOCK_NAMES.get(found[2])
        return f"blk.{found[1]}.{block}.weight" if block else None
    whole = WHOLE_NAMES.get(name.removesuffix(".weight").rpartition(".")[2])
    return f"{whole}.weight" if whole else None


def _weights(reader, folder: Path) -> Iterator[Finding]:
    """Whether the first and the last block hold the folder's own weights, as well as their types can say."""
    import numpy as np
    from gguf.quants import dequantize

    stored = _stored(folder)
    last = int(value(reader, f"{value(reader, 'general.architecture')}.block_count", 1)) - 1
    worst, strange = ("", -1.0), []
    for tensor in reader.tensors:
        if tensor.name not in stored or not tensor.name.startswith(("blk.0.", f"blk.{last}.")):
            continue
        own = stored[tensor.name]().float().numpy()
        kept = dequantize(tensor.data, tensor.tensor_type)
        off = float(np.linalg.norm(kept - own) / (np.linalg.norm(own) or 1)) if kept.shape == own.shape else 2.0
        worst = max(worst, (tensor.name, off), key=lambda item: item[1])
        if off > _rounding(tensor.tensor_type):
            strange.append((tensor.name, off))
    if strange:
        told = f"{strange[0][0]} is not the folder's: off by {strange[0][1]:.1%}, more than its type explains"
        yield Finding("weights", False, told)
    elif worst[0]:
        yield Finding("weights", True, f"first and last block are the folder's, to {worst[1]:.2g} of their size")
    else:
        yield Finding("weights", None, "no weights in the folder to compare with")


def _stored(folder: Path) -> dict:
    """{tensor's name: a function that reads it} of the folder's linear layers."""
    from safetensors import safe_open

    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = safe_open(file, "pt")
        for name in opened.keys():  # noqa: SIM118
            layer = LAYER.fullmatch(name)
            if layer and layer[2] in COMPARED and not TOWER.search(name):
                stored[gguf_name(name)] = lambda opened=opened, name=name: opened.get_tensor(name)
    return stored


def _rounding(kind) -> float:
    """How far weights of a type may be from what they were made from, relative to their size: four times the step of
    a number of so many bits, which is some two times what is seen of each type."""
    from gguf.constants import GGML_QUANT_SIZES

    if kind.name in ROUNDING:
        return ROUNDING[kind.name]
    numbers, size = GGML_QUANT_SIZES[kind]
    return 2 ** (2 - 8 * size / numbers)


def _vocabulary(reader, tokenizer, family) -> Iterator[Finding]:
    """Whether the tokens are the tokenizer's, and those that steer a conversation stand at their ids."""
    tokens = value(reader, "tokenizer.ggml.tokens") or []
    own = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if len(tokens) < len(own):
        yield Finding("vocabulary", False, f"it has {len(tokens):,} tokens, the model {len(own):,}")
        return
    markers = (family.turn_start, family.turn_end, family.tool_response, family.channel, tokenizer.eos_token)
    moved = [text for text in markers if text in own and tokens[own.index(text)] != text]
    # llama.cpp stores the spaces of some tokens as they are, and fills gaps with names of its own.
    pairs = zip(own, tokens, strict=False)
    differ = sum(text is not None and text.replace("▁", " ") != other.replace("▁", " ") for text, other in pairs)
    if moved or differ > len(own) // 100:
        what = f"{moved[0]} is not at its id" if moved else f"{differ:,} of {len(own):,} tokens are others"
        yield Finding("vocabulary", False, f"another vocabulary: {what}")
        return
    types = value(reader, "tokenizer.ggml.token_type") or []
    plain = [text for text in markers if text in own and types[own.index(text) :][:1] not in CONTROL]
    if plain:
        told = f"{plain[0]} is no control token in it: llama.cpp would take it as letters"
        yield Finding("vocabulary", False, told)
        return
    named = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    wrong = [name for name, token in named.items() if value(reader, f"tokenizer.ggml.{name}_token_id") != token]
    told = f"{wrong[0]}_token_id is not {named[wrong[0]]}" if wrong else f"{len(tokens):,} tokens, markers in place"
    yield Finding("vocabulary", not wrong, told)


def _template(reader, own: str | dict | None) -> Iterator[Finding]:
    own = own.get("default") if isinstance(own, dict) else own
    theirs = value(reader, "tokenizer.chat_template")
    if theirs == own:
        yield Finding("chat template", True, "the model's own, letter for letter")
    else:
        told = "is not the model's own" if theirs else "is missing"
        yield Finding("chat template", False, f"{told}: prompts would not be those that were trained")


def _towers(reader, config) -> Iterator[Finding]:
    """Whether the file of the towers has those of the model, of its sizes."""
    width = config.get_text_config().hidden_size
    for kind in ("vision", "audio"):
        own = getattr(config, f"{kind}_config", None)
        has = bool(value(reader, f"clip.has_{kind}_encoder", False))
        if (own is not None) != has:
            yield Finding(kind, False, f"the model has {'one' if own else 'none'}, the file {'one' if has else 'none'}")
        elif has:
            size = value(reader, f"clip.{kind}.projection_dim")
            kept = value(reader, f"clip.{kind}.projector_type") or value(reader, "clip.projector_type")
            told = f"{kept}, joins the text at width {size}" + ("" if size == width else f", and the model at {width}")
            yield Finding(kind, size == width, told)
