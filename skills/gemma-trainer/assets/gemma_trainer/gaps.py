"""Zero placeholders: what stands in the media tensors where a row has no medium, or one that could not be read.

All functions take, for each row of the batch, the indices of its media in the processor's tensors, with None for a
medium that could not be read.
"""

from __future__ import annotations

import torch

Indices = list[list[int | None]]


def place_clips(rows: Indices, tensors: dict, feature_size: int, placeholders: str) -> tuple[dict, int]:
    """The batch's clips, row by row, with an all-zero, wholly masked clip in each gap.

    A gap is a clip that could not be read or, with placeholders="rows", a row without a clip in a batch that has one;
    "needed" leaves gaps out, "always" puts one clip into a batch without any. A masked clip makes no soft token, so
    losses are the same in every mode.

    Args:
        tensors: `input_features` [clips, frames, F] and `input_features_mask` [clips, frames] of the readable clips;
            empty if there are none.

    Returns:
        (tensors in batch order, number of placeholders); no tensors where the batch needs none.
    """
    if placeholders == "needed":
        rows = [[index for index in row if index is not None] for row in rows]
    has_clips = any(rows)
    order = [index for row in rows for index in (row or ([None] if has_clips and placeholders == "rows" else []))]
    if placeholders == "always" and not has_clips:
        order = [None]
    if not order:
        return {}, 0
    if not tensors:
        tensors = {
            "input_features": torch.zeros(0, 16, feature_size),
            "input_features_mask": torch.zeros(0, 16, dtype=torch.bool),
        }
    zero = {key: value.new_zeros(1, *value.shape[1:]) for key, value in tensors.items()}
    return _take(tensors, zero, order), order.count(None)


def place_images(rows: Indices, tensors: dict, image_processor, placeholders: str) -> tuple[dict, list[int]]:
    """The batch's images, row by row, each row's zero images behind its own.

    A zero image stands for one that could not be read (but with "needed"), and with "always" makes up for a batch
    without images. The vision tower refuses an image without soft tokens, so it has the smallest size: its one soft
    token goes into the row's padding, with attention 0, where no other token sees it.

    Returns:
        (tensors in batch order, number of zero images behind each row).
    """
    behind = [0 if placeholders == "needed" else row.count(None) for row in rows]
    if placeholders == "always" and not any(rows):
        behind[0] = 1
    own = [[index for index in row if index is not None] for row in rows]
    order = [index for row, count in zip(own, behind, strict=True) for index in [*row, *[None] * count]]
    if not order:
        return {}, behind
    zero = zero_image(image_processor)
    return _take(tensors or {key: value[:0] for key, value in zero.items()}, zero, order), behind


def zero_image(image_processor) -> dict[str, torch.Tensor]:
    """A black image of one soft token, in the layout of Gemma 4's image processor: patches [1, max_patches, 3 p^2] and
    their (x, y) positions [1, max_patches, 2], -1 where there is no patch."""
    side = image_processor.pooling_kernel_size
    patches = image_processor.max_soft_tokens * side**2
    positions = torch.full((1, patches, 2), -1, dtype=torch.int64)
    positions[0, : side**2] = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    return {
        "pixel_values": torch.zeros(1, patches, 3 * image_processor.patch_size**2),
        "image_position_ids": positions,
    }


def _take(tensors: dict, zero: dict, order: list[int | None]) -> dict:
    """Lines of the tensors in the order given, `zero` for None."""
    count = len(next(iter(tensors.values())))
    if order == list(range(count)):
        return dict(tensors)
    lines = [count if index is None else index for index in order]
    return {key: torch.cat([value, zero[key]])[lines] for key, value in tensors.items()}
