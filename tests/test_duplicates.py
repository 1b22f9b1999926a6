"""Hashes and sketches of rows: equal rows are found, near ones by the similarity of their windows."""

import random

import numpy as np
import pytest

from gemma_trainer import duplicates
from gemma_trainer.duplicates import NEAR, ROW, Table, clusters, common_windows, keys_of, sketches, windows

NONE_COMMON = np.zeros(2**duplicates.TABLE_BITS, bool)
WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in ("st", "ck", "rn", "ll", "mp")]


def texts(count, words=80, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def changed(text, share, rng):
    """The text with a share of its words replaced by new ones."""
    words = text.split()
    for at in rng.sample(range(len(words)), round(share * len(words))):
        words[at] = f"x{rng.randrange(10**6)}"
    return " ".join(words)


def similarity(one, other):
    one, other = (set(windows(text.encode()).tolist()) for text in (one, other))
    return len(one & other) / len(one | other)


def table_of(all_texts, common=NONE_COMMON):
    table, records = Table(), np.zeros(len(all_texts), ROW)
    records["row"] = [keys_of([text])[0] for text in all_texts]
    records["text"] = sketches(all_texts, common)[0]
    table.append(records)
    return table


def test_keys_tell_the_end_of_one_text_from_the_beginning_of_the_next():
    assert keys_of(["ab", "c"]) != keys_of(["a", "bc"]) and keys_of(["a"], ["b"])[1] != keys_of(["a"], ["c"])[1]
    assert keys_of(["a"], ["b"])[0] == keys_of(["a"], ["c"])[0] == keys_of(["a"])[0]


def test_a_sketch_depends_on_the_text_alone():
    mixed = ["", "short", *texts(3), "ünïcödé words in a row", "same length", ""]
    together = sketches(mixed, NONE_COMMON)[0]
    assert (together == np.concatenate([sketches([text], NONE_COMMON)[0] for text in mixed])).all()
    assert together.any(1).tolist() == [False, False, True, True, True, True, True, False]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.15, 0.3, 0.6])
def test_the_estimate_is_near_the_similarity_of_the_windows(share):
    rng = random.Random(1)
    for text in texts(10, seed=2):
        other = changed(text, share, rng)
        one, two = sketches([text, other], NONE_COMMON)[0].view(np.uint8).reshape(2, -1)
        assert abs((one == two).mean() - similarity(text, other)) < 0.2  # five times the standard error at 0.5


def test_near_rows_are_found_and_others_are_not():
    rng, originals = random.Random(3), texts(300, seed=4)
    close = [changed(text, 0.02, rng) for text in originals[:100]]  # one or two words of 80
    far = [changed(text, 0.4, rng) for text in originals[100:200]]
    assert min(map(similarity, originals, close)) > 0.85 and max(map(similarity, originals[100:], far)) < 0.7
    rows = originals + close + far
    found = {tuple(pair) for pair in table_of(rows).near().tolist()}
    assert sum((at, 300 + at) in found for at in range(100)) >= 99
    assert all(similarity(rows[a], rows[b]) > NEAR - 0.15 for a, b in found)


def test_a_prompt_template_that_all_rows_share_does_not_make_them_near():
    template = "You are given a review of a film. Say in one word whether the one who wrote it liked it or not: "
    rows = [template + payload for payload in texts(200, words=2, seed=5)]
    assert len(table_of(rows).near()) > 100
    common = common_windows(rows)
    assert not len(table_of(rows, common).near())
    shared = sketches([rows[0], rows[0] * 3, template, "", "short", texts(1)[0]], common)[1]
    assert 0.8 < shared[0] < shared[2] == 1 and shared[3:].tolist() == [0, 0, 0]


def test_near_copies_of_one_row_are_found_though_they_are_many():
    """They share their answers, too, unlike the rows of a prompt template."""
    rng, (first, *others) = random.Random(8), texts(121, words=100)
    copies = [changed(first, 0.01, rng) for _ in range(60)]
    common = common_windows([" ".join(text.split()[:20]) for text in copies + others])  # what is asked
    groups = clusters(180, table_of(copies + others, common).near())
    assert np.bincount(groups[:60]).max() >= 58 and len(set(groups[60:].tolist())) == 120


def test_copies_point_to_the_first_one_and_are_left_out_of_the_near_ones():
    rows = texts(5)
    table = table_of([*rows, rows[1], rows[1], rows[4]])
    assert table.same().tolist() == [0, 1, 2, 3, 4, 1, 1, 4] and not len(table.near())


def test_rows_without_a_text_are_like_no_other():
    table = Table()
    table.append(np.zeros(3, ROW))
    assert table.same().tolist() == [0, 1, 2] and not len(table.near())
    assert Table().same().tolist() == [] and len(Table().near()) == 0


def test_many_near_copies_are_one_cluster():
    rng, first = random.Random(6), texts(1)[0]
    rows = [changed(first, 0.02, rng) for _ in range(400)] + texts(400, seed=7)
    groups = clusters(len(rows), table_of(rows).near())
    assert np.bincount(groups[:400]).max() >= 390 and len(set(groups[400:].tolist())) == 400
