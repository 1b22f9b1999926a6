"""Tokenizing word by word gives what tokenizing the whole gives, for every family's tokenizer."""

import copy
import pickle
import random

import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gemma_trainer import words
from gemma_trainer.families import family_of_processor, tokenizer_of
from gemma_trainer.rendering import Renderer
from gemma_trainer.words import Words

FAMILIES = ["gemma3_text", "gemma3", "gemma3n", "gemma4", "gemma4_unified"]
PARTS = [*" a▁>.é雪🙂\n\t\u00a0", "  ", "the", "red", "What is", "\n\n", "> <", "</", "▁▁", "1,000"]


def whole(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def texts(seed, count, parts):
    rng = random.Random(seed)
    return ["".join(rng.choices(parts, k=rng.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_words_are_what_the_whole_text_is(name):
    processor = tiny.make_processor(name)
    renderer = Renderer(processor, family_of_processor(processor))
    known, tokenizer = renderer.words, tokenizer_of(processor)
    assert known.joined is not None
    for text in texts(name, 3000, [*PARTS, *renderer.control_ids]):
        assert known.encode(text) == whole(tokenizer, text), text
    assert len(known) > 50
    again = pickle.loads(pickle.dumps(renderer)).words
    assert again.encode("What is red?") == whole(tokenizer, "What is red?") and again.tokenizer is not tokenizer


class Stub:
    """A fast tokenizer with a vocabulary of a few letters, and merges of one's own."""

    def __init__(self, *merges, added=(), **options):
        letters = ["<unk>", *"ab<>▁"]
        vocabulary = {token: i for i, token in enumerate([*letters, *("".join(merge) for merge in merges)])}
        self.backend_tokenizer = Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>", **options))
        self.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
        self.backend_tokenizer.add_tokens(list(added))


def test_a_token_that_reaches_over_a_space_is_kept():
    stub = Stub(("▁", "<"), (">", "▁<"), ("▁", "a"), ("a", "b"))
    known = Words(stub, {})
    assert known.joined == [">"]
    for text in texts(0, 2000, [" ", "a", "b", "<", ">", "> <"]):
        assert known.encode(text) == whole(stub, text), text
    assert len(known.encode("> <")) == 1


def test_a_tokenizer_that_is_built_otherwise_is_asked_for_the_whole_text():
    split = Stub(("a", "b"))
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    other = Stub(("a", "b"))
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    strips = Stub(("a", "b"), added=[AddedToken("<a>", lstrip=True)])
    for stub in (split, other, strips, Stub(("a", "b"), end_of_word_suffix="b")):
        known = Words(stub, {})
        assert known.joined is None
        assert known.encode("ab <a> b") == whole(stub, "ab <a> b")
    assert Words(Stub(("a", "b")), {"<a>": 7}).joined is None  # a control token that the tokenizer would take apart


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "MAX_WORDS", 3)
    stub = Stub(("a", "b"))
    known = Words(stub, {})
    long = "ab" * words.MAX_LETTERS
    for text in (f"a b {long} ab ba aab", "aab ba"):
        assert known.encode(text) == whole(stub, text)
    assert len(known) == 3 and long not in known
    assert copy.deepcopy(known).encode("a b") == whole(stub, "a b")
