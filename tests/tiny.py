"""A tiny random model of every Gemma family, with its real transformers processor; built in seconds, offline.

Sizes are shrunk, classes and switches are the real ones: what the 26B has (experts, keys that serve as values) its tiny
stand-in has too. `gemma4`, the E2B kind, comes from `gemma_trainer.demo`.

    processor = tiny.make_processor("gemma3n")
    model = tiny.make_model("gemma3n", processor)
"""

from __future__ import annotations

from gemma_trainer import demo

# What each model takes. Where it has no "audio" its config says so: the real Gemma 4 processors of models without an
# audio tower carry a feature extractor all the same.
MODALITIES: dict[str, frozenset[str]] = {
    "gemma3_text": frozenset(),  # 270M, 1B
    "gemma3": frozenset({"image"}),  # 4B, 12B, 27B
    "gemma3n": frozenset({"image", "audio"}),  # E2B, E4B
    "gemma4": frozenset({"image", "audio"}),  # E2B, E4B
    "gemma4_moe": frozenset({"image"}),  # 26B-A4B
    "gemma4_dense": frozenset({"image"}),  # 31B
    "gemma4_unified": frozenset({"image", "audio"}),  # 12B
}
NAMES: tuple[str, ...] = tuple(MODALITIES)

GEMMA3_CONTROL = ("<start_of_turn>", "<end_of_turn>")
GEMMA3_MEDIA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
# Gemma 3n tells media tokens from text by their ids: the vision range follows the text, the audio range ends it all.
GEMMA3N_MEDIA = {"boi_token": "<start_of_image>", "boa_token": "<start_of_audio>"}
GEMMA3N_VISION = {"eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA3N_AUDIO = {"eoa_token": "<end_of_audio>", "audio_token": "<audio_soft_token>"}
# Gemma 3 has one token for a run of line breaks, so those around an image merge with those of the text beside it.
NEWLINES = tuple("\n" * count for count in range(2, 32))

IMAGE_TOKENS = 16  # soft tokens an image makes in gemma3 and gemma3n; the real ones make 256

# The 12B, 26B and 31B: no per-layer embeddings, images attended both ways, wide full-attention heads whose keys are
# their values. Source: transformers/models/gemma4/convert_gemma4_weights.py.
GEMMA4_LARGE = dict(
    use_bidirectional_attention="vision", attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=32,
    num_kv_shared_layers=0,
)  # fmt: skip

# No TRL ships Gemma 3n's template; this one of ours says what a template of that family must.
GEMMA3N_TEMPLATE = r"""
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for block in content -%}
            {%- if block['type'] == 'image' -%}
                {{- '<image_soft_token>' -}}
            {%- elif block['type'] == 'audio' -%}
                {{- '<audio_soft_token>' -}}
            {%- elif block['type'] == 'text' -%}
                {{- block['text'] | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set system = '' -%}
{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = render(messages[0]['content']) + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message['role'] != ('user' if loop.index0 is even else 'assistant') -%}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('user' if loop.index0 is even else 'model') + '\n' -}}
    {{- (system if loop.first else '') + render(message['content']) + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""


def make_processor(name: str, template: str | None = None):
    """The processor of the tiny model `name`; a bare tokenizer for "gemma3_text".

    Args:
        name: One of `NAMES`.
        template: Another chat template than the family's own, as Jinja text.
    """
    makers = {
        "gemma3_text": _gemma3_text_processor,
        "gemma3": _gemma3_processor,
        "gemma3n": _gemma3n_processor,
        "gemma4": demo.make_processor,
        "gemma4_moe": demo.make_processor,
        "gemma4_dense": demo.make_processor,
        "gemma4_unified": _gemma4_unified_processor,
    }
    processor = makers[name]()
    if template is not None:
        processor.chat_template = template
    return processor


def make_model(name: str, processor, seed: int = 0):
    """The tiny model `name` with random weights, in float32 on the CPU and in eval mode.

    Args:
        name: One of `NAMES`.
        processor: What `make_processor(name)` gave.
        seed: Of the weights; torch's own generator is left as it was.
    """
    import torch
    from transformers import GenerationConfig

    makers = {
        "gemma3_text": _gemma3_text_model,
        "gemma3": _gemma3_model,
        "gemma3n": _gemma3n_model,
        "gemma4": lambda tokenizer: demo.make_model(tokenizer, seed),
        "gemma4_moe": _gemma4_moe_model,
        "gemma4_dense": _gemma4_dense_model,
        "gemma4_unified": _gemma4_unified_model,
    }
    tokenizer = getattr(processor, "tokenizer", processor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = makers[name](tokenizer)
    ends = ["<end_of_turn>"] if name.startswith("gemma3") else ["<turn|>", "<|tool_response>"]
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ends)],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return model.eval()


def _gemma3_tokenizer():
    return demo.make_tokenizer(media_tokens=GEMMA3_MEDIA, control_tokens=GEMMA3_CONTROL, text_tokens=NEWLINES)


def _gemma3_text_processor():
    tokenizer = _gemma3_tokenizer()
    tokenizer.chat_template = demo.chat_template("gemma3")
    return tokenizer


def _gemma3_processor():
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(
            size={"height": 64, "width": 64}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=_gemma3_tokenizer(),
        chat_template=demo.chat_template("gemma3"),
        image_seq_length=IMAGE_TOKENS,
    )


def _gemma3n_processor():
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    tokenizer = demo.make_tokenizer(
        media_tokens=GEMMA3N_MEDIA,
        control_tokens=GEMMA3_CONTROL,
        text_tokens=NEWLINES,
        last_tokens=GEMMA3N_VISION | GEMMA3N_AUDIO,
    )
    return Gemma3nProcessor(
        feature_extractor=Gemma3nAudioFeatureExtractor(),
        # The vision tower divides each side by 32: 4 x 4 soft tokens.
        image_processor=SiglipImageProcessor(size={"height": 128, "width": 128}, do_normalize=False),
        tokenizer=tokenizer,
        chat_template=GEMMA3N_TEMPLATE,
        image_seq_length=IMAGE_TOKENS,
    )


def _gemma4_unified_processor():
    from transformers import (
        Gemma4UnifiedAudioFeatureExtractor,
        Gemma4UnifiedImageProcessor,
        Gemma4UnifiedProcessor,
        Gemma4UnifiedVideoProcessor,
    )

    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(max_soft_tokens=70),
        tokenizer=demo.make_tokenizer(),
        video_processor=Gemma4UnifiedVideoProcessor(),
        chat_template=demo.chat_template("gemma4"),
        image_seq_length=70,
    )


def _text_config(tokenizer, **more):
    """What the text configs have in common: four layers of width 64."""
    return dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=512, initializer_range=0.15,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        **more,
    )  # fmt: skip


def _gemma3_text_model(tokenizer):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_text_config(tokenizer, query_pre_attn_scalar=16)))


def _gemma3_model(tokenizer):
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8,
        vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=_text_config(tokenizer, query_pre_attn_scalar=16),
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,  # 8 x 8 patches, pooled two by two
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        initializer_range=0.15,
    )
    model = Gemma3ForConditionalGeneration(config)
    # Zeros by default: every image would look alike and the vision tower would learn nothing.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.15)
    return model


def _gemma3n_model(tokenizer):
    import torch
    from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration

    text = _text_config(
        tokenizer, vocab_size_per_layer_input=tokenizer.eoi_token_id, hidden_size_per_layer_input=16,
        num_kv_shared_layers=2, laurel_rank=8, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
    )  # fmt: skip
    # A convolutional tower without batch normalisation, as the real MobileNetV5, which comes in one size only. Layer
    # scale is off: it starts at 1e-6, which hides the blocks behind it. The last norm belongs to the features, not to
    # a classifier that nobody calls.
    vision = dict(
        architecture="convnext_atto", hidden_size=32, vocab_offset=tokenizer.eoi_token_id, vocab_size=2,
        model_args=dict(depths=[1, 1, 1, 1], dims=[8, 16, 24, 32], ls_init_value=None, head_norm_first=True),
        initializer_range=0.15,
    )  # fmt: skip
    audio = dict(
        hidden_size=32, conf_num_hidden_layers=2, conf_num_attention_heads=2, sscp_conv_channel_size=[16, 8],
        vocab_offset=tokenizer.eoa_token_id, vocab_size=2, initializer_range=0.15,
    )  # fmt: skip
    media = GEMMA3N_MEDIA | GEMMA3N_VISION | GEMMA3N_AUDIO
    config = Gemma3nConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        vision_soft_tokens_per_image=IMAGE_TOKENS,
        initializer_range=0.15,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in media.items()},
    )
    model = Gemma3nForConditionalGeneration(config)
    for layer in model.model.language_model.layers:
        # Zeros by default: nothing of the per-layer embeddings would reach the layers.
        torch.nn.init.ones_(layer.altup.correct_output_scale)
    return model


def _gemma4_moe_model(tokenizer):
    experts = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    return _gemma4_large_model(tokenizer, **experts)


def _gemma4_dense_model(tokenizer):
    return _gemma4_large_model(tokenizer)


def _gemma4_large_model(tokenizer, **text_overrides):
    from transformers import Gemma4ForConditionalGeneration

    config = demo.make_config(tokenizer, hidden_size_per_layer_input=0, **GEMMA4_LARGE, **text_overrides)
    config.audio_config = None
    config.vision_config.use_clipped_linears = False
    config.vision_config.standardize = True
    config.initializer_range = 0.15
    return Gemma4ForConditionalGeneration(config)


def _gemma4_unified_model(tokenizer):
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in demo.MEDIA_TOKENS.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    config = Gemma4UnifiedConfig(
        text_config=_text_config(tokenizer, final_logit_softcapping=30.0, **GEMMA4_LARGE),
        vision_config=dict(mm_embed_dim=32, output_proj_dims=32, mm_posemb_size=128, initializer_range=0.15),
        audio_config=dict(initializer_range=0.15),  # frames of 640 samples, as in the real model
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        initializer_range=0.15,
        **ids,
    )
    return Gemma4UnifiedForConditionalGeneration(config)
