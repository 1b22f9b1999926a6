"""What is found in one row: how it is built, and what its text holds."""

import pytest

from conftest import talk
from gemma_trainer.checks import CONTROL, check_pair, check_structure, check_text, format_of, is_mojibake
from gemma_trainer.preferences import read_preference
from gemma_trainer.rows import read_row

CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TEXT_CALL = {"id": "1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "snow"}


def said(role, content="x", **more):
    return {"role": role, "content": content, **more}


def rows(*messages, **columns):
    return {"messages": list(messages), **columns}


FINE = [
    talk("Hi", "Hello"),
    rows(said("system"), *talk("Hi", "Hello", "And?", "Well.")["messages"]),
    rows(said("user"), said("assistant", "", tool_calls=[CALL]), RESULT, said("assistant")),
    rows(said("user"), said("assistant", "", tool_calls=[CALL])),
    rows(said("user"), said("assistant", "", tool_calls=[CALL, CALL]), RESULT, RESULT, said("assistant")),
    rows(said("user", "<image>What?"), said("assistant"), images=["a.png"]),
    rows(said("user", [{"type": "image"}, {"type": "text", "text": "What?"}]), said("assistant"), image="a.png"),
    {"prompt": "Hi", "completion": "Hello"},
    {"text": "Any text at all"},
]
ODD = {
    "no_answer": [rows(said("user")), rows(said("system"), said("user"))],
    "assistant_first": [rows(said("assistant"), said("user"), said("assistant"))],
    "ends_without_answer": [rows(said("user"), said("assistant"), said("user"))],
    "repeated_role": [rows(said("user"), said("user"), said("assistant")),
                      {"conversations": [{"from": r, "value": "x"} for r in ("human", "gpt", "gpt")]}],
    "empty_answer": [talk("Hi", " \n"), {"prompt": "Hi", "completion": ""}],
    "empty_message": [talk("", "Hello"), rows(said("system", " "), said("user"), said("assistant"))],
    "call_without_result": [
        rows(said("user"), said("assistant", "", tool_calls=[CALL]), said("user"), said("assistant")),
        rows(said("user"), said("assistant", "", tool_calls=[CALL, CALL]), RESULT, said("assistant")),
    ],
    "arguments_as_text": [rows(said("user"), said("assistant", "", tool_calls=[TEXT_CALL]), RESULT)],
    "unfilled_placeholder": [talk("<image>What is it?", "A cat"), talk("<audio>", "A dog")],
    "media_placed_first": [talk("What is it?", "A cat", image="a.png")],
}  # fmt: skip


def codes(found):
    return [code for code, _ in found]


@pytest.mark.parametrize("row", FINE)
def test_nothing_is_found_in_what_is_right(row):
    assert codes(check_structure(row, read_row(row))) == []


@pytest.mark.parametrize(("code", "row"), [(code, row) for code, odd in ODD.items() for row in odd])
def test_what_is_odd_about_a_row_is_named(code, row):
    assert codes(check_structure(row, read_row(row))) == [code]


@pytest.mark.parametrize(("row", "name"), [
    ({"messages": [], "prompt": "x", "completion": "y"}, "messages"),
    ({"prompt": "x", "completion": "y"}, "prompt + completion"),
    ({"instruction": "x", "output": "y"}, "instruction + output"), ({"conversations": []}, "conversations"),
    ({"prompt": "x", "chosen": "y", "rejected": "z"}, "preference"), ({"text": "x", "messages": None}, "text"),
])  # fmt: skip
def test_formats_have_names(row, name):
    assert format_of(row) == name


@pytest.mark.parametrize(("text", "found"), [
    ("<turn|> and <|image|>", ["control_text"]), ("<start_of_turn>user", ["control_text"]),
    ("a <bos> b", ["stray_bos"]),
    ("<bos><turn|>", ["stray_bos", "control_text"]), ("<|im_start|>user\nHi<|im_end|>", ["foreign_markers"]),
    ("[INST] Hi [/INST]", ["foreign_markers"]),
    ("<think>Hm</think>", ["foreign_markers"]), ("### Instruction:\nDo", ["foreign_markers"]),
    ("schÃ¶n", ["mojibake"]), ("lost \ufffd", ["mojibake"]),
    ("key AKIAIOSFODNN7EXAMPLE", ["secret"]), ("hf_" + "a" * 34, ["secret"]), ("ghp_" + "A1" * 18, ["secret"]),
    ("sk-proj-" + "a1" * 20, ["secret"]),
    ("-----BEGIN RSA PRIVATE KEY-----", ["secret"]), ("-----BEGIN PRIVATE KEY-----", ["secret"]),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P", ["secret"]),
    ("if a < b and b > c: <div>", []),
    ("a[0] ## Title\n### Notes", []), ("hf_token sk-learn sk-something-without-a-number", []),
    ("the AKIA prefix, AIza, xoxo, eyJust", []), ("Привет, мир. Größe, naïve, São Paulo, 5 €", []),
    ("価格は¥1,000 😀", []),
    ("-----BEGIN PUBLIC KEY-----", []),
])  # fmt: skip
def test_text_that_should_not_be_there_is_named(text, found):
    assert codes(check_text(text)) == found


def test_details_do_not_quote_the_text():
    for text in ("AKIAIOSFODNN7EXAMPLE", "hf_" + "a" * 34, "x <turn|> secret words"):
        assert all(
            "EXAMPLE" not in detail and "aaa" not in detail and "words" not in detail for _, detail in check_text(text)
        )


FRENCH, GERMAN, RUSSIAN = "déjà vu à l'été", "größer, schöner Füße", "Привет, мир, как дела"


@pytest.mark.parametrize(("text", "encoding"), [
    *((text, encoding) for text in (FRENCH, GERMAN) for encoding in ("cp1252", "latin-1", "mac-roman")),
    (RUSSIAN, "latin-1"), (RUSSIAN, "cp1251"),
])  # fmt: skip
def test_utf8_read_as_another_encoding_is_seen(text, encoding):
    assert not is_mojibake(text) and is_mojibake(text.encode().decode(encoding, "ignore"))


def test_every_control_token_of_every_gemma_is_known_without_a_model():
    from gemma_trainer.demo import CONTROL_TOKENS, MEDIA_TOKENS
    from gemma_trainer.families import FAMILIES

    markers = {family.turn_start for family in FAMILIES} | {family.turn_end for family in FAMILIES}
    tokens = markers | set(MEDIA_TOKENS.values()) | set(CONTROL_TOKENS) - {'<|"|>'}
    assert all(CONTROL.fullmatch(token) for token in tokens), [t for t in tokens if not CONTROL.fullmatch(t)]


@pytest.mark.parametrize(("chosen", "rejected", "margin", "found"), [
    ("Pear", "Chair", None, []), ("Pear", " Pear\n", None, ["equal_answers"]),
    ("Pear", "Chair", -1, ["negative_margin"]),
    ([said("assistant", [{"type": "text", "text": "Pear"}])], "Pear", None, ["equal_answers"]),
    ([said("assistant", "", tool_calls=[CALL])], "", None, []),
])  # fmt: skip
def test_pairs_that_teach_nothing_are_named(chosen, rejected, margin, found):
    pair = read_preference({"prompt": "A fruit?", "chosen": chosen, "rejected": rejected, "margin": margin})
    assert codes(check_pair(pair)) == found
