"""What differs between Gemma families: markers, media tokens, towers, where LoRA goes. Data first, code last."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import CannotLoad

# The tokenizer's attributes that name a medium's begin, soft and end token; all families use the same names.
MEDIA_TOKENS = {
    "image": ("boi_token", "image_token", "eoi_token"),
    "audio": ("boa_token", "audio_token", "eoa_token"),
}
# Per-token modality ids: transformers/processing_utils.py, create_mm_token_type_ids; gemma3n/processing_gemma3n.py.
TYPE_IDS = {"image": 1, "audio": 3}


@dataclass(frozen=True)
class Family:
    """One family's facts. Strings are spelled as in its chat template; `None` means it has no such thing."""

    name: str
    model_types: tuple[str, ...]  # config.model_type, with media towers first
    processor: str  # class name of its processor; a text-only model has a bare tokenizer
    turn_start: str
    turn_end: str
    model_header: str  # opens a model turn; the first trained token follows it
    type_ids_key: str  # the batch key of per-token modality ids
    lora_targets: dict[str, str]  # part of the model -> regular expression over module names
    slots: dict[str, str]  # kind of medium -> the tokenizer's attribute that names what the chat template writes for it
    tool_response: str | None = None  # opens a tool result inside the model turn
    tool_response_end: str | None = None
    channel: str | None = None  # opens reasoning
    channel_end: str | None = None
    around_media: str = ""  # what the processor puts before and behind a medium's tokens
    fixed_tokens: bool = False  # every image, and every clip, takes the processor's `*_seq_length` soft tokens
    image_options: dict[str, bool] = field(default_factory=dict)  # what a plain call of the processor sets
    patches_merged: bool = False  # the image processor merges patches as far as the model pools them
    audio_stride: int = 1  # frames of audio a soft token
    min_audio_samples: int = 1  # a shorter clip makes no frame, and is filled up with silence
    needs: tuple[str, ...] = ()  # packages beyond those of every family
    license: str = "gemma"  # of the published weights, as the hub names it
    max_audio_seconds: float = 30.0  # what the model hears: 750 soft tokens of 40 ms, 188 of 160 ms in Gemma 3n


# Modules are matched as PEFT matches a `target_modules` string: re.fullmatch over the whole module name.
_LANGUAGE = r"(?!.*_tower\.)(.*\.)?layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    processor="Gemma3Processor",
    turn_start="<start_of_turn>",
    turn_end="<end_of_turn>",
    model_header="<start_of_turn>model\n",
    type_ids_key="token_type_ids",
    slots={"image": "boi_token"},
    around_media="\n\n",
    fixed_tokens=True,
    image_options={"do_pan_and_scan": False},  # whatever the image processor's own setting, gemma3/processing_gemma3.py
    lora_targets={
        "language": _LANGUAGE,
        "vision": r".*vision_tower\..*\.(self_attn\.([qkv]|out)_proj|mlp\.fc[12])",
    },
)

GEMMA3N = Family(
    name="gemma3n",
    model_types=("gemma3n",),
    processor="Gemma3nProcessor",
    turn_start="<start_of_turn>",
    turn_end="<end_of_turn>",
    model_header="<start_of_turn>model\n",
    type_ids_key="token_type_ids",
    slots={"image": "image_token", "audio": "audio_token"},
    around_media="\n\n",
    fixed_tokens=True,
    needs=("timm",),  # its vision tower
    min_audio_samples=513,  # a frame of 32 ms and one sample, transformers/models/gemma3n/feature_extraction_gemma3n.py
    lora_targets={
        "language": _LANGUAGE,
        "vision": r".*embed_vision\.embedding_projection",  # the tower itself is convolutions
        "audio": r".*audio_tower\.conformer\..*\.(attn\.[qkv]_proj|attention\.post|ffw_layer_[12]|linear_(start|end))"
        r"|.*embed_audio\.embedding_projection",
    },
)

_GEMMA4 = dict(
    license="apache-2.0",
    turn_start="<|turn>",
    turn_end="<turn|>",
    model_header="<|turn>model\n",
    tool_response="<|tool_response>",
    tool_response_end="<tool_response|>",
    channel="<|channel>",
    channel_end="<channel|>",
    type_ids_key="mm_token_type_ids",
    slots={"image": "image_token", "audio": "audio_token"},
)

GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text"),
    processor="Gemma4Processor",
    **_GEMMA4,
    # Two convolutions of stride 2, transformers/models/gemma4/modeling_gemma4.py, Gemma4AudioSubSampleConvProjection.
    audio_stride=4,
    # The towers wrap their linears (`Gemma4ClippableLinear`), which PEFT refuses: the inner `.linear` is meant.
    lora_targets={
        "language": _LANGUAGE,
        "vision": r".*vision_tower\..*\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.linear"
        r"|.*embed_vision\.embedding_projection",
        "audio": r".*audio_tower\.layers\..*\.(self_attn\.([qkv]_proj|post)|ffw_layer_[12]|linear_(start|end))\.linear"
        r"|.*embed_audio\.embedding_projection",
    },
)

GEMMA4_UNIFIED = Family(
    name="gemma4_unified",
    model_types=("gemma4_unified", "gemma4_unified_text"),
    processor="Gemma4UnifiedProcessor",
    **_GEMMA4,
    patches_merged=True,
    lora_targets={  # no towers: patches and frames are projected straight into the language model
        "language": _LANGUAGE,
        "vision": r".*embed_vision\.(patch_dense|multimodal_embedder\.embedding_projection)",
        "audio": r".*embed_audio\.embedding_projection",
    },
)

FAMILIES = (GEMMA3, GEMMA3N, GEMMA4, GEMMA4_UNIFIED)


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
    """The family of a processor, told by its class, or of a bare tokenizer, told by its turn marker.

    Raises:
        CannotLoad: no family's processor, and no family's turn marker in the vocabulary.
    """
    classes = {cls.__name__ for cls in type(processor).__mro__}
    vocabulary = tokenizer_of(processor).get_vocab()
    for family in FAMILIES:
        if family.processor in classes and family.turn_start in vocabulary:
            return family
    for family in FAMILIES:
        if processor is tokenizer_of(processor) and family.turn_start in vocabulary:
            return family
    raise CannotLoad(
        f"{type(processor).__name__} is no processor of a supported family with its turn marker "
        f"({', '.join(f'{family.processor}: {family.turn_start}' for family in FAMILIES)})"
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
