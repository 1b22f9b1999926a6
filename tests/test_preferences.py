"""Preference rows of every accepted form, read into a prompt with two answers."""

import pytest

from gemma_trainer.errors import RowError
from gemma_trainer.preferences import read_preference


def said(role, text):
    return {"role": role, "content": text}


HELLO = [said("user", "Hi"), said("assistant", "Hello."), said("user", "Name a fruit")]
PEAR, CHAIR = said("assistant", "Pear"), said("assistant", "Chair")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Name a fruit", "chosen": "Pear", "rejected": "Chair"},
        {"prompt": [said("user", "Name a fruit")], "chosen": [PEAR], "rejected": CHAIR, "margin": None},
        {"prompt": "Name a fruit", "chosen": [HELLO[2], PEAR], "rejected": [HELLO[2], CHAIR]},
        {"chosen": [HELLO[2], PEAR], "rejected": [HELLO[2], CHAIR]},
        {"instruction": "Name a fruit", "chosen": "Pear", "rejected": "Chair"},
        {"conversations": [{"from": "human", "value": "Name a fruit"}], "chosen": {"from": "gpt", "value": "Pear"},
         "rejected": {"from": "gpt", "value": "Chair"}},
    ],
)  # fmt: skip
def test_every_form_gives_the_same_pair(row):
    pair = read_preference(row)
    assert pair.shared == 1 and pair.margin is None
    assert pair.chosen.messages == [HELLO[2], PEAR] and pair.rejected.messages == [HELLO[2], CHAIR]


def test_answers_of_the_prompt_are_context_and_stay_shared():
    pair = read_preference(
        {"prompt": HELLO, "chosen": "Pear", "rejected": "Chair", "margin": "0.5", "system": "Be brief."}
    )
    assert pair.shared == 4 and pair.margin == 0.5
    assert [m.get("train", True) for m in pair.chosen.messages] == [True, True, False, True, True]
    whole = read_preference({"chosen": [*HELLO, PEAR], "rejected": [*HELLO, CHAIR]})
    assert whole.shared == 3 and whole.rejected.messages[-1] == CHAIR


def test_equal_conversations_still_end_in_an_answer():
    pair = read_preference({"chosen": [*HELLO, PEAR], "rejected": [*HELLO, PEAR]})
    assert pair.shared == 3 and pair.chosen.messages == pair.rejected.messages


def test_both_answers_get_the_prompts_media():
    pair = read_preference({"prompt": "<image>What is it?", "image": "a.png", "chosen": "Pear", "rejected": "Chair"})
    assert (
        [medium.value for medium in pair.chosen.media] == [medium.value for medium in pair.rejected.media] == ["a.png"]
    )
    assert pair.chosen.messages[0]["content"][0] == {"type": "image"}


def test_the_media_of_both_answers_are_the_pairs():
    shown = [said("assistant", [{"type": "image", "image": name}]) for name in ("b.png", "c.png")]
    pair = read_preference({"prompt": "<image>Draw", "image": "a.png", "chosen": shown[:1], "rejected": shown[1:]})
    assert [medium.value for medium in pair.media] == ["a.png", "b.png", "c.png"]


@pytest.mark.parametrize(("row", "code"), [
    ({"prompt": "Name a fruit", "chosen": "Pear"}, "missing_field"),
    ({"messages": [*HELLO, PEAR]}, "wrong_task"),
    ({"chosen": "Pear", "rejected": "Chair"}, "no_common_prompt"),
    ({"chosen": [HELLO[0], PEAR], "rejected": [HELLO[2], CHAIR]}, "no_common_prompt"),
    ({"prompt": "Hi", "chosen": [HELLO[2], PEAR], "rejected": [HELLO[2], CHAIR]}, "no_common_prompt"),
    ({"prompt": [*HELLO, PEAR], "chosen": "!", "rejected": "?"}, "no_common_prompt"),
    ({"prompt": "Hi", "chosen": "a", "rejected": "b", "margin": "much"}, "bad_value"),
    ({"prompt": "Hi", "chosen": [], "rejected": "b"}, "missing_field"),
    ({"prompt": "Hi", "chosen": 3, "rejected": "b"}, "missing_field"),
])  # fmt: skip
def test_what_is_no_pair_is_named_by_kind(row, code):
    with pytest.raises(RowError, match="^row") as found:
        read_preference(row)
    assert found.value.code == code
