"""Zero placeholders: what stands in the media tensors where a row has no medium, or one that could not be read.

All functions take, for each row of the batch, the lines of its media in the processor's tensors, with None for a
medium that could not be read.
"""

from __future__ import annotations

import torch

from .families import Family

Lines = list[list[int | None]]


def place_clips(rows: Lines, tensors: dict | None, processor, family: Family, placeholders: str) -> tuple[dict, int]:
    """The batch's clips, row by row, with an all-zero, wholly masked clip in each gap.

    A gap is a clip that could not be read or, with placeholders="rows", a row without a clip in a batch that has one;
    "needed" leaves gaps out, "always" puts one clip into a batch without any. A masked clip makes no soft token, so
    losses are the same in every mode. Gemma 3n makes soft tokens of any clip, so its gaps stay empty, and "always"
    gives it tensors without clips.

    Args:
        tensors: `input_features` [clips, frames, F] and `input_features_mask` [clips, frames] of the readable clips;
            None if there are none.

    Returns:
        (tensors in batch order, number of placeholders); no tensors where the batch needs none.
    """
    if placeholders == "needed" or family.fixed_tokens:
        rows = [[line for line in row if line is not None] for row in rows]
    has_clips = any(rows)
    gap = [None] if has_clips and placeholders == "rows" and not family.fixed_tokens else []
    order = [line for row in rows for line in (row or gap)]
    if placeholders == "always" and not has_clips and not family.fixed_tokens:
        order = [None]
    if not order and placeholders != "always":
        return {}, 0
    if not tensors:
        tensors = {
            "input_features": torch.zeros(0, 16, processor.feature_extractor.feature_size),
            "input_features_mask": torch.zeros(0, 16, dtype=torch.bool),
        }
    zero = {key: value.new_zeros(1, *value.shape[1:]) for key, value in tensors.items()}
    return _take(tensors, zero, order), order.count(None)


def place_images(rows: Lines, tensors: dict | None, processor, family: Family, placeholders: str, shortest: int):
    """The batch's images, row by row, each row's zero images behind its own.

    A zero image stands for one that could not be read (in Gemma 4; not with "needed"), and with "always" makes up for
    a batch without images, in the row of index `shortest`. The vision tower refuses an image without soft tokens, so
    it is as small as it can be, and its soft tokens go into the row's padding, with attention 0, where no other token
    sees them. In Gemma 3 and 3n these are some hundred, so only "always" has zero images there.

    Returns:
        (tensors in batch order, number of soft tokens of zero images behind each row, number of zero images).
    """
    behind = [0 if placeholders == "needed" or family.fixed_tokens else row.count(None) for row in rows]
    own = [[line for line in row if line is not None] for row in rows]
    if placeholders == "always" and not any(own) and not any(behind):
        behind[shortest] = 1
    order = [line for row, count in zip(own, behind, strict=True) for line in [*row, *[None] * count]]
    if not order:
        return {}, behind, 0
    zero, tokens = zero_image(processor, family) if None in order else ({}, 0)
    tensors = tensors or {key: value[:0] for key, value in zero.items()}
    return _take(tensors, zero, order), [count * tokens for count in behind], sum(behind)


def zero_image(processor, family: Family) -> tuple[dict[str, torch.Tensor], int]:
    """An image of one colour, as small as can be, in the layout of the family's image processor; and its soft tokens.

    In Gemma 4 it has one: patches [1, max_patches, 3 p^2] with their (x, y) positions [1, max_patches, 2], -1 where
    there is no patch; where the processor has merged them, one of side p k (k is the pooling kernel). Elsewhere it is
    an image like any other, [1, 3, height, width], and white: of zeros Gemma 3n's tower makes zeros, whose magnitude
    has no gradient (transformers/models/gemma3n/modeling_gemma3n.py, target_magnitude).
    """
    images = processor.image_processor
    if family.fixed_tokens:
        white = torch.ones(1, 3, images.size["height"], images.size["width"])
        return {"pixel_values": white}, processor.image_seq_length
    pool = images.pooling_kernel_size
    side, merged = (1, pool) if family.patches_merged else (pool, 1)
    patches = images.max_soft_tokens * side**2
    positions = torch.full((1, patches, 2), -1, dtype=torch.int64)
    positions[0, : side**2] = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    pixels = torch.zeros(1, patches, 3 * (images.patch_size * merged) ** 2)
    return {"pixel_values": pixels, "image_position_ids": positions}, 1


def _take(tensors: dict, zero: dict, order: list[int | None]) -> dict:
    """Lines of the tensors in the order given, `zero` for None."""
    count = len(next(iter(tensors.values())))
    if order == list(range(count)):
        return dict(tensors)
    if None not in order:
        return {key: value[order] for key, value in tensors.items()}
    lines = [count if line is None else line for line in order]
    return {key: torch.cat([value, zero[key].to(value.dtype)])[lines] for key, value in tensors.items()}
