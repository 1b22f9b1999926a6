"""Solved examples stand before a question as earlier turns, as many as there is room for."""

import json
import shutil

import pytest

from conftest import ask, talk
from gemma_trainer import few_shots, sources
from gemma_trainer.collator import MultimodalCollator


@pytest.fixture
def shots(processor, media):
    def make(rows, count=2, max_length=2048):
        return few_shots.Shots(rows, count, 0, MultimodalCollator(processor, max_length, on_bad_media="skip"))

    return make


def test_examples_stand_before_the_question_and_behind_the_system(shots):
    pool = [talk("two?", "2"), talk("three?", "3"), talk("four?", "4")]
    raw = {"messages": [{"role": "system", "content": "Be short."}, *talk("two?", "2")["messages"]]}
    (row,), count = shots(pool).before(raw)
    said = [(m["role"], m["content"], m.get("train", True)) for m in row["messages"]]
    assert count == 2 and said[0] == ("system", "Be short.", True) and said[-2:] == [
        ("user", "two?", True), ("assistant", "2", True),
    ]  # fmt: skip
    assert {words for _, words, _ in said[1:-2]} == {"three?", "3", "four?", "4"}  # not the question's own answer
    assert [trained for role, _, trained in said[1:-2] if role == "assistant"] == [False, False]
    assert shots(pool).before({"text": "no turns"}) == ([{"text": "no turns"}], 0)


def test_examples_have_the_questions_kinds_of_media_and_are_found_from_anywhere(shots, media, tmp_path):
    kinds = [talk("text?", "t"), ask(media, "absent.png"), talk("see", "red", image="red.png"), ask(media, "one.wav")]
    pool = tmp_path / "pool.jsonl"
    pool.write_text("\n".join(map(json.dumps, kinds)))
    shutil.copy(media / "red.png", tmp_path)
    (row,), count = shots(sources.open_rows([str(pool)]), 1).before(ask(media, "blue.jpg", answer="blue"))
    assert count == 1 and row["messages"][0]["content"][0] == {"type": "image", "image": str(tmp_path / "red.png")}


def test_fewer_examples_where_they_do_not_fit(shots):
    pool = [talk(f"{'word ' * 20}{n}", "yes") for n in range(4)]
    raw = talk("question", "answer")
    counts = [shots(pool, 3, room).before(raw)[1] for room in (2048, 120, 20)]
    assert counts[0] == 3 and 0 < counts[1] < 3 and counts[2] == 0
    rows, count = shots(pool, 3, 120).before(raw, talk("question", "a much longer answer " * 10))
    assert count < counts[1] or count == 0 and len(rows) == 2
