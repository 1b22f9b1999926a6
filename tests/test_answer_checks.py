"""What an answer is checked for."""

import pytest

from gemma_trainer.answer_checks import CHECKS, Answer, error_rate, last_number, read_checks
from gemma_trainer.errors import Fault

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(("text", "check", "expected", "passes"), [
    ('{"age": 7}', {"json": True}, None, True), ('```json\n{"age": 7}\n```', {"json": True}, None, True),
    ('Here: {"age": 7}', {"json": True}, None, False), ("NaN", {"json": True}, None, False),
    ("[" * 100_000, {"json": True}, None, False), ("", {"json": True}, None, False),
    ('{"age": 7}', {"json_schema": SCHEMA}, None, True), ('{"age": "7"}', {"json_schema": SCHEMA}, None, False),
    ("no", {"json_schema": SCHEMA}, None, False),
    ('{"a": {"b": [{"c": 0}]}}', {"required_fields": ["a.b.0.c"]}, None, True),
    ('{"a": {"b": null}}', {"required_fields": ["a.b"]}, None, False),
    ('[1]', {"required_fields": ["a"]}, None, False), ("no", {"required_fields": ["a"]}, None, False),
    ("A Red house", {"required": ["red", "house"]}, None, True), ("A redhouse", {"required": ["red"]}, None, False),
    ("It costs 5 €.", {"required": ["€"]}, None, True), ("I'm sorry, but", {"forbidden": ["sorry"]}, None, False),
    ("unsorry", {"forbidden": ["sorry"]}, None, True),
    ("id: AB-12", {"regex": r"[A-Z]{2}-\d+"}, None, True), ("id: ab", {"regex": r"[A-Z]{2}"}, None, False),
    ("Paris", {"exact": True}, "Paris", True), ("paris", {"exact": True}, "Paris", False),
    ("Rome", {"exact": "Rome"}, None, True),
    (" PARIS!", {"normalized": True}, "Paris", True), ("ｐａｒｉｓ", {"normalized": True}, "Paris.", True),
    ("Paris, France", {"normalized": True}, "Paris", False),
    ("so it is 1,234.5 m", {"numeric": True}, "1234.5", True), ("about 3.2", {"numeric": 3.14}, None, False),
    ("about 3.2", {"numeric": {"value": 3.14, "tolerance": 0.1}}, None, True), ("none", {"numeric": 3}, None, False),
    ("-0.5e3", {"numeric": -500}, None, True),
    ("good morning all", {"max_wer": 0.5}, "Good morning!", True), ("bad", {"max_wer": 0.5}, "good morning", False),
    ("good mornin", {"max_cer": 0.1}, "good morning", True), ("", {"max_cer": 0.5}, "good", False),
    ("abc", {"max_tokens": 3}, None, True), ("abc", {"max_tokens": 2}, None, False),
    ("abc", {"max_characters": 3}, None, True), ("abcd", {"max_characters": 3}, None, False),
])  # fmt: skip
def test_each_check(text, check, expected, passes):
    checks = read_checks({**check, "stopped": False}, expected)
    assert [one.name for one in checks] == list(check)
    assert checks[0].passes(Answer(text, tokens=3, stopped=False)) is passes


def test_an_answer_must_stop_by_itself_and_be_the_expected_one_unless_told_otherwise():
    names = [check.name for check in read_checks(None, "Paris")]
    assert names == ["stopped", "normalized"]
    assert not read_checks(None, None)[0].passes(Answer("Paris", 3, stopped=False))
    assert [check.name for check in read_checks({"json": True}, "{}")] == ["stopped", "json"]
    assert read_checks({"stopped": False, "json": False}, None) == []


@pytest.mark.parametrize(("given", "expected", "told"), [
    ({"jsn": True}, None, "unknown check 'jsn'; known: stopped, json"), (["json"], None, "must be an object"),
    ({"json": "yes"}, None, "true or false"), ({"required": "red"}, None, "a list of texts"),
    ({"required": []}, None, "a list of texts"), ({"regex": "("}, None, "regex cannot be used"),
    ({"json_schema": {"type": "objekt"}}, None, "json_schema cannot be used"),
    ({"exact": True}, None, "exact needs an answer"), ({"numeric": True}, "none", "no number in the expected"),
    ({"max_wer": 0.2}, None, "max_wer needs an answer"), ({"max_tokens": "5"}, None, "max_tokens takes a number"),
    ({"numeric": {"value": "x"}}, None, "numeric cannot be used"), ({"max_tokens": -1}, None, "from 0 up"),
    ({"numeric": {"value": 1, "tol": 2}}, None, "unknown tol; known: value, tolerance"),
    ({"max_wer": float("nan")}, "a", "from 0 up"), ({"exact": ["a"]}, None, "true or a text"),
    ({"numeric": {"value": 1, "tolerance": float("nan")}}, None, "must be finite"),
])  # fmt: skip
def test_checks_that_cannot_be_used_are_told_before_the_run(given, expected, told):
    with pytest.raises(Fault, match=told.replace("(", r"\(")):
        read_checks(given, expected)


def test_no_schema_is_fetched(monkeypatch):
    import urllib.request

    monkeypatch.setattr(urllib.request, "urlopen", lambda *given: pytest.fail("it went online"))
    schema = {"properties": {"a": {"$ref": "http://example.com/schema.json"}}}
    check = read_checks({"json_schema": schema, "stopped": False}, None)[0]
    assert check.passes(Answer("{}", 1, True))
    with pytest.raises(Exception, match="schema.json"):
        check.passes(Answer('{"a": 1}', 1, True))


def test_error_rates_are_those_of_jiwer_on_normalized_texts():
    assert error_rate("wer", "The cat sat", "the cat sat down.") == pytest.approx(0.25)
    assert error_rate("cer", "abd", "abc") == pytest.approx(1 / 3)
    assert error_rate("wer", "words", "...") == 1.0 and error_rate("wer", "", "...") == 0.0


def test_numbers_are_the_last_of_a_text():
    texts = {
        "12 or 1,000": 1000, "x": None, "it is 1.5.": 1.5, "-3": -3, "1e3": 1000,
        "\u22123": -3, "from 1-2": 2, ".5": 0.5,
        "type-1": 1, "route e66": None, "the e-1 visa": 1, "E-4": 4, "1e999": None, "a1b2": None, "1,23": 23, "": None,
    }  # fmt: skip
    assert {text: last_number(text) for text in texts} == texts
    assert set(CHECKS) >= {"json", "json_schema", "required_fields", "regex", "numeric", "max_wer", "stopped"}
