"""What differs between Gemma families: markers, media tokens, tower sizes, where LoRA goes. Data first, code last."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import CannotLoad


@dataclass(frozen=True)
class Family:
    """One family's facts. Strings are spelled as in its chat template; `None` means it has no such thing."""

    name: str
    model_types: tuple[str, ...]  # config.model_type
    turn_start: str
    turn_end: str
    model_header: str  # opens a model turn; the first trained token follows it
    tool_response: str | None  # opens a tool result inside the model turn
    tool_response_end: str | None
    channel: str | None  # opens reasoning
    channel_end: str | None
    type_ids_key: str | None  # the batch key of per-token modality ids
    type_ids: dict[str, int]  # modality -> id, transformers/processing_utils.py create_mm_token_type_ids
    lora_targets: dict[str, str]  # part of the model -> regular expression over module names
    max_audio_seconds: float | None  # what the audio tower hears


# Modules are matched as PEFT matches a `target_modules` string: re.fullmatch over the whole module name.
# The towers wrap their linears (`Gemma4ClippableLinear`), which PEFT refuses: the inner `.linear` is meant.
_GEMMA4_LORA = {
    "language": r"(?!.*_tower\.)(.*\.)?layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "vision": r".*vision_tower\..*\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.linear"
    r"|.*embed_vision\.embedding_projection",
    "audio": r".*audio_tower\.layers\..*\.(self_attn\.([qkv]_proj|post)|ffw_layer_[12]|linear_(start|end))\.linear"
    r"|.*embed_audio\.embedding_projection",
}

GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text"),
    turn_start="<|turn>",
    turn_end="<turn|>",
    model_header="<|turn>model\n",
    tool_response="<|tool_response>",
    tool_response_end="<tool_response|>",
    channel="<|channel>",
    channel_end="<channel|>",
    type_ids_key="mm_token_type_ids",
    type_ids={"image": 1, "audio": 3},
    lora_targets=_GEMMA4_LORA,
    max_audio_seconds=30.0,  # 750 soft tokens of 40 ms, transformers/models/gemma4/processing_gemma4.py
)

FAMILIES = (GEMMA4,)
KINDS = ("image", "audio")


def family_of_config(config) -> Family:
    """The family of a transformers config.

    Raises:
        CannotLoad: no supported family has this `model_type`.
    """
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise CannotLoad(f"model type {config.model_type!r} is not supported; supported: {known}")


def family_of_processor(processor) -> Family:
    """The family of a processor or a bare tokenizer, told by its turn marker.

    Raises:
        CannotLoad: the tokenizer knows no family's turn marker.
    """
    vocabulary = tokenizer_of(processor).get_vocab()
    for family in FAMILIES:
        if family.turn_start in vocabulary:
            return family
    raise CannotLoad(
        f"{type(processor).__name__} has no turn marker of a supported family "
        f"({', '.join(family.turn_start for family in FAMILIES)})"
    )


def tokenizer_of(processor):
    """The tokenizer of a processor, or the tokenizer itself where a text-only model has no processor."""
    return getattr(processor, "tokenizer", processor)


def modalities(processor, config=None) -> frozenset[str]:
    """Which of "image" and "audio" a model takes: its processor prepares it and (given a config) it has the tower."""
    able = set()
    if getattr(processor, "image_processor", None) is not None:
        able.add("image")
    if getattr(processor, "feature_extractor", None) is not None:
        able.add("audio")
    if config is not None:
        towers = {"image": "vision_config", "audio": "audio_config"}
        able = {kind for kind in able if getattr(config, towers[kind], None) is not None}
    return frozenset(able)


def audio_soft_tokens(mask) -> list[int]:
    """Soft tokens that Gemma 4's audio tower makes of each clip.

    Args:
        mask: [clips, frames] bool, the feature extractor's `input_features_mask`.

    Two stride-2 convolutions keep every second mask value each
    (transformers/models/gemma4/modeling_gemma4.py, Gemma4AudioSubSampleConvProjectionLayer).
    """
    return mask[:, ::2][:, ::2].sum(1).tolist()
