"""Rows that are the same, or nearly so: hashes and MinHash sketches on disk, compared a column at a time.

A sketch is 128 minima of hashes over the 8-byte windows of a row's text, the lowest byte of each: 16 bands of 8 bytes.
Rows that agree in a band are candidates; the share of equal bytes estimates the Jaccard similarity of their windows
(standard error 0.04 at 0.8). Two rows of similarity 0.8 meet in a band with a probability of 95 %, of 0.85 with 99 %
(Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, chapter 3).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

import numpy as np
import xxhash

WIDTH, BANDS, MINIMA = 8, 16, 128
NEAR = 0.8
COMMON_SHARE, COMMON_ROWS = 0.2, 10  # a window in more rows than both is boilerplate, and says nothing about a row
TABLE_BITS = 20  # 1 MiB: what a core's cache holds
PORTION = 2**17  # characters that are looked at together, for the same reason
ROW = np.dtype([("row", "u8"), ("prompt", "u8"), ("text", "u8", BANDS)])
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads the windows' bytes over the hash


def keys_of(*parts: list[str]) -> list[int]:
    """64-bit hashes of texts up to the end of each part; never 0, which stands for no row."""
    hasher, keys = xxhash.xxh3_64(), []
    for texts in parts:
        hasher.update("\x1e".join(["", *texts]).encode("utf-8", "surrogatepass"))
        keys.append(hasher.intdigest() or 1)
    return keys


def windows(text: bytes) -> np.ndarray:
    """Hashes [bytes - 7] uint64 of a text's 8-byte windows; empty for a shorter text."""
    count = len(text) - WIDTH + 1
    if count < 1:
        return np.empty(0, np.uint64)
    return np.ndarray((count,), "<u8", text, strides=(1,)) * MIX


def common_windows(prompts: Iterable[str]) -> np.ndarray:
    """A table [2**20] bool of the windows that many prompts share, such as those of a prompt template.

    Answers are left out: where many share one, these rows are copies of each other rather than of a template.
    """
    table, seen, total = np.zeros(2**TABLE_BITS, bool), [], 0
    for text in prompts:
        seen.append(np.unique(windows(text.encode("utf-8", "surrogatepass"))))
        total += 1
    if seen:
        found, counts = np.unique(np.concatenate(seen), return_counts=True)
        table[_places(found[counts > max(COMMON_ROWS, COMMON_SHARE * total)])] = True
    return table


def _places(found: np.ndarray) -> np.ndarray:
    return (found >> np.uint64(64 - TABLE_BITS)).view(np.int64)


def sketches(texts: list[str], common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sketches [n, 16] uint64 of texts without their common windows, zeros where nothing is left of one; and the share
    [n] of their windows that are common."""
    found, some, size = [], [], 0
    for text in texts:
        some.append(text.encode("utf-8", "surrogatepass"))
        size += len(text)
        if size >= PORTION:
            found.append(_sketches(some, common))
            some, size = [], 0
    found.append(_sketches(some, common))
    return tuple(np.concatenate(part) for part in zip(*found, strict=True))


def _sketches(encoded: list[bytes], common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(text) for text in encoded], np.int64)
    found = windows(b"".join(encoded))
    kept = ~common[_places(found)]
    starts = np.cumsum(lengths) - lengths
    for back in range(1, WIDTH):  # windows that reach from one text into the next
        kept[(starts - back)[(starts >= back) & (starts - back < len(kept))]] = False
    ends = np.concatenate([[0], np.cumsum(kept)])[np.minimum(starts + lengths, len(kept))]
    result = np.zeros((len(encoded), MINIMA), np.uint8)
    filled = np.flatnonzero(np.diff(ends, prepend=0))
    if len(filled):
        offsets = np.concatenate([[0], ends[filled]]).astype(np.uint64)
        result[filled] = _minima(found[kept], offsets).astype(np.uint8)
    counts = np.maximum(lengths - WIDTH + 1, 1)
    return result.view(np.uint64), np.where(lengths < WIDTH, 0, 1 - np.diff(ends, prepend=0) / counts)


def _minima(hashes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """MinHash [n, 128] uint32 of the hashes between the offsets [n + 1].

    rensa is told to start no threads when it first looks: a process that is forked later would wait for them for ever.
    """
    name = "RAYON_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        from rensa import RMinHash

        found = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, MINIMA, 1)
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
    return np.array(found.to_rows(), np.uint32)


class Table:
    """What identifies each row, in a temporary file that is gone with the process: 144 bytes a row.

    `rows` are hashes of whole rows, `prompts` of what comes before the answer with its media; 0 where there is none.
    """

    def __init__(self):
        self.file, self.count = tempfile.TemporaryFile(prefix="gemma-rows-"), 0

    def append(self, records: np.ndarray) -> None:
        self.file.write(records.tobytes())
        self.count += len(records)

    def column(self, name: str, band: int | None = None) -> np.ndarray:
        """One column [rows] uint64."""
        found = self._records()[name]
        return np.array(found if band is None else found[:, band])

    def same(self, name: str = "row") -> np.ndarray:
        """For each row the position of the first one with the same hash: its own, where it is the first."""
        keys = self.column(name)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        own = np.arange(len(keys))
        return np.where(keys == 0, own, first[inverse])

    def near(self) -> np.ndarray:
        """Pairs [n, 2] of rows whose texts are nearly the same, copies of a row left out."""
        pairs, copies = np.empty((0, 2), np.int64), self.same() != np.arange(self.count)
        for band in range(BANDS):
            pairs = np.unique(np.concatenate([pairs, self._near_in(band, copies)]), axis=0)
        return pairs

    def _near_in(self, band: int, left_out: np.ndarray) -> np.ndarray:
        values = self.column("text", band)
        order = np.argsort(values, kind="stable")
        order = order[(values[order] != 0) & ~left_out[order]]
        values = values[order]
        new = np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]
        first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))] if len(order) else order
        # Each row is compared with the first of its bucket and with its neighbour: not with all, which may be many.
        neighbours = np.stack([order[:-1], order[1:]], 1)[~new[1:]]
        leaders = np.stack([first, order], 1)[~new]
        pairs = np.unique(np.concatenate([leaders, neighbours]), axis=0)
        return pairs[self._similar(pairs)] if len(pairs) else pairs

    def _similar(self, pairs: np.ndarray, size: int = 65_536) -> np.ndarray:
        texts, found = self._records()["text"], []
        for start in range(0, len(pairs), size):
            left, right = (
                np.ascontiguousarray(texts[pairs[start : start + size, side]]).view(np.uint8) for side in (0, 1)
            )
            found.append((left == right).mean(1) >= NEAR)
        return np.concatenate(found)

    def _records(self) -> np.ndarray:
        if not self.count:
            return np.empty(0, ROW)
        self.file.flush()
        return np.memmap(self.file, ROW, "r", shape=(self.count,))


def clusters(count: int, pairs: np.ndarray) -> np.ndarray:
    """For each of `count` rows the number of its cluster, where `pairs` [n, 2] belong together."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    return connected_components(links, directed=False)[1]
