"""A tiny random Gemma 4 with text, vision and audio towers, made in seconds without a download.

Everything but its size is the real thing: `Gemma4ForConditionalGeneration`, `Gemma4Processor`, a Gemma tokenizer with
Gemma 4's control tokens, and the chat template that the installed TRL ships. It serves the built-in demo, `--model
demo`, and the tests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from pathlib import Path

SAMPLES = Path(__file__).resolve().parent.parent / "samples"

# Named special tokens of Gemma 4 (attribute on the tokenizer -> token), and its other control tokens.
# Source: the Gemma 4 chat template, and transformers/models/gemma4/processing_gemma4.py for the media tokens.
MEDIA_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
CONTROL_TOKENS = [
    "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|video|>",
]  # fmt: skip

# Enough English for short sentences to stay short in tokens; the samples' own text is added to it.
CORPUS = """The quick brown fox jumps over the lazy dog. What is the capital of Italy? Answer in one word, please.
What colour is this picture? Which tone is in the recording? The weather in the city is sunny, with some rain.
Name a fruit that is green. Read this. Say it again. Give the result of two and two. I do not know. Yes. No.
system user model tool thought call response value declaration description parameters properties required type"""


def make_tokenizer(
    vocab_size: int = 1024,
    media_tokens=MEDIA_TOKENS,
    control_tokens=CONTROL_TOKENS,
    text_tokens=(),
    last_tokens=None,
    corpus=(),
):
    """Train a byte-fallback BPE tokenizer with a Gemma family's special tokens, Gemma 4's unless told otherwise.

    Args:
        vocab_size: Tokens in all, `last_tokens` not counted.
        media_tokens: Attribute on the tokenizer -> special token.
        control_tokens: Further special tokens, without a name.
        text_tokens: Ordinary text that is always one token, such as the runs of line breaks in Gemma 3.
        last_tokens: As `media_tokens`, but placed in this order after the whole vocabulary (Gemma 3n).
        corpus: Texts to train on beside the samples'.

    Returns a `transformers.GemmaTokenizer` with `image_token`, `audio_token` and so on set. No merge crosses a line
    break or a word break, as in Gemma's own vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("▁", "merged_with_next")]
    )
    reserved = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *media_tokens.values(), *control_tokens, *text_tokens]
    reserved += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=reserved,
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["\n", "▁"],
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS, *_sample_texts(), *corpus], trainer)
    learned = json.loads(backend.to_str())["model"]
    controls = {f"control_{i}": token for i, token in enumerate(control_tokens)}
    tokenizer = GemmaTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        extra_special_tokens=media_tokens | (last_tokens or {}) | controls,
        padding_side="left",
        add_bos_token=True,
        model_max_length=131072,
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in text_tokens])
    return tokenizer


def chat_template(name: str = "gemma4") -> str:
    """The chat template `name` ("gemma4", "gemma4_v5", ...) as the installed TRL ships it.

    Raises:
        KeyError: the installed TRL has no template of that name.
    """
    import trl.chat_template_utils as templates

    try:
        return getattr(templates, f"{name}_chat_template")
    except AttributeError:
        raise KeyError(f"the installed TRL ships no chat template named {name!r}") from None


@functools.cache
def _sample_texts() -> tuple[str, ...]:
    path = SAMPLES / "train.jsonl"
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()


def make_processor(template: str = "gemma4"):
    """A `Gemma4Processor` of ordinary settings, but 70 soft tokens an image (the smallest Gemma 4 knows)."""
    from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor

    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=70),
        tokenizer=make_tokenizer(),
        video_processor=Gemma4VideoProcessor(),
        chat_template=chat_template(template),
        image_seq_length=70,
    )


def make_config(tokenizer, **text_overrides):
    """A `Gemma4Config` of the E2B kind: per-layer embeddings, shared key-values, vision and audio towers."""
    from transformers import Gemma4Config

    text = dict(
        vocab_size=len(tokenizer), vocab_size_per_layer_input=len(tokenizer), hidden_size=64, intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
        hidden_size_per_layer_input=16, num_kv_shared_layers=2, sliding_window=512, final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.15,  # the usual 0.02 leaves a head of 64 dimensions too faint to be sure of anything
    )  # fmt: skip
    vision = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, position_embedding_size=1024, use_clipped_linears=True, initializer_range=0.15,
    )  # fmt: skip
    audio = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, subsampling_conv_channels=[128, 8],
        output_proj_dims=64, initializer_range=0.15,
    )  # fmt: skip
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in MEDIA_TOKENS.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    return Gemma4Config(
        text_config=text | text_overrides,
        vision_config=vision,
        audio_config=audio,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        **ids,
    )


def make_model(tokenizer, seed: int = 0, reward: bool = False, **text_overrides):
    """A random-weight `Gemma4ForConditionalGeneration` of some 0.5 M parameters, in float32 on the CPU; with `reward`
    the same with a head that scores."""
    import torch
    from transformers import Gemma4ForConditionalGeneration, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gemma4ForConditionalGeneration(make_config(tokenizer, **text_overrides))
    stops = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<turn|>", "<|tool_response>"])]
    model.generation_config = GenerationConfig(
        eos_token_id=stops, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    return (_with_score(model, make_config(tokenizer, **text_overrides), seed) if reward else model).eval()


def _with_score(model, config, seed: int):
    import torch

    from .reward_model import reward_class

    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scoring = reward_class(config)(config)
    scoring.model.load_state_dict(model.model.state_dict())
    return scoring


@contextlib.contextmanager
def written():
    """The tiny model in a folder that is there for as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(write_model(folder))


def write_model(folder: str | Path, seed: int = 0) -> Path:
    """Write the tiny model with its processor to `folder`, as `from_pretrained` reads it."""
    folder = Path(folder)
    processor = make_processor()
    make_model(processor.tokenizer, seed).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
