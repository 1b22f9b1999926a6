"""Opened media as the model takes them, and how many soft tokens they make; also told from a size or a length alone."""

from __future__ import annotations

import numpy as np
import torch

from .families import MEDIA_TOKENS, Family, tokenizer_of

Tensors = dict[str, torch.Tensor]
Counts = list[list[int]]  # soft tokens of each medium: one number, and one more for each crop of an image


def image_features(processor, family: Family, images: list) -> tuple[Tensors, Counts]:
    """What the image processor makes of RGB images, crops behind their image.

    Returns:
        `pixel_values` and what else the model takes, one line an image or crop; the soft tokens of each image.
    """
    # Tensors with their layout named: the processor guesses it else, and narrow images make it guess aloud.
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    made = processor.image_processor(images=pixels, input_data_format="channels_first", return_tensors="pt")
    if not family.fixed_tokens:
        counts = [[int(count)] for count in made.pop("num_soft_tokens_per_image")]
    else:
        crops = made.pop("num_crops", None)
        crops = [0] * len(images) if crops is None else crops
        counts = [[processor.image_seq_length] * (1 + int(count)) for count in crops]
    return dict(made), counts


def clip_features(processor, family: Family, clips: list[np.ndarray]) -> tuple[Tensors, Counts]:
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
        counts = [[processor.audio_seq_length]] * len(clips)
    else:
        counts = [[count] for count in mask[:, :: family.audio_stride].sum(1).tolist()]
    return {"input_features": torch.cat(features), "input_features_mask": mask}, counts


def image_tokens(processor, family: Family, width: int, height: int) -> list[int]:
    """The soft tokens that `image_features` counts for an image of this size in pixels.

    For the sizes that Gemma 4 scales to see get_aspect_ratio_preserving_size in transformers/models/gemma4/
    image_processing_gemma4.py.
    """
    if not family.fixed_tokens:
        return list(processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"])
    return [processor.image_seq_length] * (1 + _crops(processor.image_processor, width, height))


def _crops(image_processor, width: int, height: int) -> int:
    """The crops that Gemma 3's pan and scan adds; off by default."""
    if not getattr(image_processor, "do_pan_and_scan", False):
        return 0
    names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
    options = {f"pan_and_scan_{name}": getattr(image_processor, f"pan_and_scan_{name}") for name in names}
    return len(image_processor.pan_and_scan_batched(torch.empty(1, 3, height, width, device="meta"), **options))


def clip_tokens(processor, family: Family, samples: int) -> list[int]:
    """The soft tokens that `clip_features` counts for a clip of so many samples, as far as the model hears it."""
    if family.fixed_tokens:
        return [processor.audio_seq_length]
    heard = min(samples, int(family.max_audio_seconds * processor.feature_extractor.sampling_rate))
    return list(processor._get_num_multimodal_tokens(audio_lengths=[heard])["num_audio_tokens"])


def media_text(processor, family: Family, kind: str, parts: int) -> str:
    """The text that stands in a medium's slot, each run of soft tokens shown by one of them.

    Args:
        parts: 0 for a medium that could not be read, 1, or 1 and the crops of an image
            (transformers/models/gemma3/processing_gemma3.py, replace_image_token).
    """
    begin, soft, end = (getattr(tokenizer_of(processor), name) for name in MEDIA_TOKENS[kind])
    whole = f"{family.around_media}{begin}{soft}{end}{family.around_media}"
    if parts < 2:
        return whole * parts
    crops = " ".join([whole] * (parts - 1))
    return f"Here is the original image {whole} and here are some crops to help you see better {crops}"
