"""Opened media as the model takes them, and how many soft tokens they make; also told from a size or a length alone."""

from __future__ import annotations

import numpy as np
import torch

from .families import MEDIA_TOKENS, Family, tokenizer_of

Tensors = dict[str, torch.Tensor]


def image_features(processor, family: Family, images: list) -> tuple[Tensors, list[int]]:
    """What the image processor makes of RGB images.

    Returns:
        `pixel_values` and what else the model takes, one line an image; the soft tokens of each image.
    """
    # Tensors with their layout named: the processor guesses it else, and narrow images make it guess aloud.
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    options = family.image_options | {"input_data_format": "channels_first", "return_tensors": "pt"}
    made = processor.image_processor(images=pixels, **options)
    made.pop("num_crops", None)
    counts = made.pop("num_soft_tokens_per_image", [processor.image_seq_length] * len(images))
    return dict(made), [int(count) for count in counts]


def clip_features(processor, family: Family, clips: list[np.ndarray]) -> tuple[Tensors, list[int]]:
    """What the feature extractor makes of clips, each as it is alone.

    Given together, Gemma 3n's extractor lets some frames of a shorter clip's padding pass for sound. It is called apart
    from the text, whose max_length and padding side would reach it through the processor and cut the audio.

    Returns:
        `input_features` [clips, frames, F], `input_features_mask` [clips, frames] bool; the soft tokens of each clip.
    """
    clips = [np.pad(clip, (0, max(0, family.min_audio_samples - len(clip)))) for clip in clips]
    made = [processor.feature_extractor([clip], return_tensors="pt") for clip in clips]
    frames = max(one["input_features"].shape[1] for one in made)
    gaps = [frames - one["input_features"].shape[1] for one in made]
    pad = torch.nn.functional.pad
    features = [pad(one["input_features"], (0, 0, 0, gap)) for one, gap in zip(made, gaps, strict=True)]
    masks = [pad(one["input_features_mask"].bool(), (0, gap)) for one, gap in zip(made, gaps, strict=True)]
    mask = torch.cat(masks)
    if family.fixed_tokens:
        counts = [processor.audio_seq_length] * len(clips)
    else:
        counts = mask[:, :: family.audio_stride].sum(1).tolist()
    return {"input_features": torch.cat(features), "input_features_mask": mask}, counts


def image_tokens(processor, family: Family, width: int, height: int) -> int:
    """The soft tokens that `image_features` counts for an image of this size in pixels.

    For the sizes that Gemma 4 scales to see get_aspect_ratio_preserving_size in transformers/models/gemma4/
    image_processing_gemma4.py.
    """
    if family.fixed_tokens:
        return processor.image_seq_length
    return processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0]


def clip_tokens(processor, family: Family, samples: int) -> int:
    """The soft tokens that `clip_features` counts for a clip of so many samples, as far as the model hears it."""
    if family.fixed_tokens:
        return processor.audio_seq_length
    heard = min(samples, int(family.max_audio_seconds * processor.feature_extractor.sampling_rate))
    return processor._get_num_multimodal_tokens(audio_lengths=[heard])["num_audio_tokens"][0]


def media_text(processor, family: Family, kind: str) -> str:
    """The text that stands in a medium's slot, its soft tokens shown by one of them."""
    begin, soft, end = (getattr(tokenizer_of(processor), name) for name in MEDIA_TOKENS[kind])
    return f"{family.around_media}{begin}{soft}{end}{family.around_media}"
