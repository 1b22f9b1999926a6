"""What an answer is checked for: form, words, numbers, or nearness to the expected one."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Fault

FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)
REGEX_SECONDS = 2.0
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Answer:
    """What a model said: its text without thoughts, how many tokens it took, and whether it ended by itself."""

    text: str
    tokens: int
    stopped: bool
    reasoning: str = ""


@dataclass(frozen=True)
class Check:
    """A check by its name in a prompts file, with its setting there. `expected` is the prompt's own answer, if any."""

    name: str
    setting: Any
    expected: str | None = None

    def passes(self, answer: Answer) -> bool:
        return CHECKS[self.name](answer, self.setting, self.expected)

    @property
    def wanted(self) -> str:
        """What the check looks for, for a reader."""
        if self.setting is True:
            return self.name
        return f"{self.name}: {json.dumps(self.setting, ensure_ascii=False)}"


def read_checks(given: Mapping | None, expected: str | None) -> list[Check]:
    """The checks of a prompt.

    Args:
        given: {name: setting}, of those in `CHECKS`; false turns one off. Without any but `stopped`, an expected answer
            is looked for as it is (`normalized`).
        expected: the answer that the prompt brings.

    Raises:
        Fault: an unknown check, or a setting that it cannot take.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise Fault("bad_check", "checks must be an object of checks by name")
    if unknown := [str(name) for name in given if name not in CHECKS]:
        raise Fault("bad_check", f"unknown check {unknown[0]!r}; known: {', '.join(CHECKS)}")
    wanted = {"stopped": True} | dict(given)
    if expected is not None and not set(given) - {"stopped"}:
        wanted["normalized"] = True
    checks = [Check(name, setting, expected) for name, setting in wanted.items() if setting is not False]
    for check in checks:
        _try(check)
    return checks


def _try(check: Check) -> None:
    """Find a setting that cannot be used before the run does."""
    if check.name in NEED_EXPECTED and check.setting is True and check.expected is None:
        what = "number" if check.name == "numeric" else "text"
        raise Fault("bad_check", f"{check.name} needs an answer at the end of the prompt, or the {what} itself")
    if check.name in ("max_wer", "max_cer") and not (check.expected or "").strip():
        raise Fault("bad_check", f"{check.name} needs an answer at the end of the prompt to compare with")
    if check.name in ("required", "forbidden", "required_fields"):
        given = check.setting
        if not isinstance(given, list) or not given or not all(isinstance(one, str) and one for one in given):
            raise Fault("bad_check", f"{check.name} takes a list of texts")
    if check.name in ("json", "stopped") and check.setting is not True:
        raise Fault("bad_check", f"{check.name} is true or false")
    if check.name in ("max_wer", "max_cer", "max_tokens", "max_characters"):
        is_number = isinstance(check.setting, int | float) and not isinstance(check.setting, bool)
        if not is_number or not 0 <= check.setting < math.inf:
            raise Fault("bad_check", f"{check.name} takes a number from 0 up")
    if check.name in ("exact", "normalized") and check.setting is not True and not isinstance(check.setting, str):
        raise Fault("bad_check", f"{check.name} takes true or a text")
    try:
        if check.name == "json_schema":
            schema_validator(check.setting)
        check.passes(Answer("0", 1, True))
    except Exception as problem:
        reason = (str(problem).splitlines() or [""])[0][:100]
        raise Fault("bad_check", f"{check.name} cannot be used ({reason})") from None


# ---- one function a check: answer, setting, expected text -> passed


def as_json(text: str) -> Any:
    """The JSON value of an answer, also of one in a ```json fence; raises ValueError."""
    text = text.strip()
    fenced = FENCE.match(text)
    return json.loads(fenced[1] if fenced else text, parse_constant=refuse_constant)


def refuse_constant(name: str):
    """For `json`: NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is no JSON")


def _is_json(answer: Answer, setting, expected) -> bool:
    try:
        as_json(answer.text)
    except (ValueError, RecursionError):
        return False
    return True


def schema_validator(schema):
    """The validator of a JSON Schema; raises jsonschema's SchemaError where it is none."""
    from jsonschema import validators
    from jsonschema_specifications import REGISTRY

    kind = validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema, registry=REGISTRY)  # so that no $ref is fetched


def _fits_schema(answer: Answer, schema, expected) -> bool:
    if not _is_json(answer, True, None):
        return False
    return schema_validator(schema).is_valid(as_json(answer.text))


def _has_fields(answer: Answer, fields: list[str], expected) -> bool:
    """Every field, such as `name` or `address.city`, is there and not null."""
    if not _is_json(answer, True, None):
        return False
    return all(_field(as_json(answer.text), field.split(".")) is not None for field in fields)


def _field(value, path: list[str]):
    for key in path:
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            return None
    return value


def _has_words(answer: Answer, words: list[str], expected) -> bool:
    return all(_says(answer.text, word) for word in words)


def _lacks_words(answer: Answer, words: list[str], expected) -> bool:
    return not any(_says(answer.text, word) for word in words)


def _says(text: str, word: str) -> bool:
    """Whether a text has a word or phrase, as whole words, in any case."""
    start, end = (r"\b" if re.match(r"\w", letter) else "" for letter in (word[0], word[-1]))
    return re.search(f"{start}{re.escape(word.casefold())}{end}", text.casefold()) is not None


def _matches(answer: Answer, pattern: str, expected) -> bool:
    import regex  # which can be told to give up; raises TimeoutError

    return regex.search(pattern, answer.text, timeout=REGEX_SECONDS) is not None


def _wanted(setting, expected) -> str:
    return expected if setting is True else str(setting)


def _equals(answer: Answer, setting, expected) -> bool:
    return answer.text == _wanted(setting, expected)


def normalize(text: str) -> str:
    """A text without case, punctuation and differences of white space and Unicode form, as answers are compared."""
    text = unicodedata.normalize("NFKC", text).casefold()
    kept = (" " if unicodedata.category(letter)[0] in "PZC" else letter for letter in text)
    return " ".join("".join(kept).split())


def same_text(said: str, expected: str) -> bool:
    """Whether texts are equal when normalized, or as they are where nothing is left of what is expected."""
    key = normalize(expected)
    return normalize(said) == key if key else said.strip() == expected.strip()


def _nearly_equals(answer: Answer, setting, expected) -> bool:
    return same_text(answer.text, _wanted(setting, expected))


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separated by commas or not; None where there is none."""
    found = NUMBER.findall(text.replace("\u2212", "-"))  # a minus sign that is no hyphen
    value = float(found[-1].replace(",", "")) if found else math.nan
    return value if math.isfinite(value) else None


def _is_number(answer: Answer, setting, expected) -> bool:
    """The last number of the answer is the wanted one, within `tolerance` (1e-6, absolute or relative)."""
    options = setting if isinstance(setting, Mapping) else {} if setting is True else {"value": setting}
    if unknown := set(options) - {"value", "tolerance"}:
        raise ValueError(f"unknown {min(unknown)}; known: value, tolerance")
    wanted = float(options["value"]) if "value" in options else last_number(expected or "")
    if wanted is None:
        raise ValueError("there is no number in the expected answer")
    tolerance, said = float(options.get("tolerance", 1e-6)), last_number(answer.text)
    if not (math.isfinite(wanted) and 0 <= tolerance < math.inf):
        raise ValueError("the number and its tolerance must be finite")
    return said is not None and math.isclose(said, wanted, rel_tol=tolerance, abs_tol=tolerance)


def error_rate(kind: str, said: str, expected: str) -> float:
    """Word ("wer") or character ("cer") error rate of a transcript, both sides normalized (jiwer)."""
    import jiwer

    measure = jiwer.wer if kind == "wer" else jiwer.cer
    return float(measure(normalize(expected) or " ", normalize(said))) if normalize(expected) else float(bool(said))


def _wer_within(answer: Answer, limit: float, expected) -> bool:
    return error_rate("wer", answer.text, expected) <= limit


def _cer_within(answer: Answer, limit: float, expected) -> bool:
    return error_rate("cer", answer.text, expected) <= limit


def _short(answer: Answer, limit: float, expected) -> bool:
    return answer.tokens <= limit


def _few_characters(answer: Answer, limit: float, expected) -> bool:
    return len(answer.text) <= limit


def _stopped(answer: Answer, setting, expected) -> bool:
    return answer.stopped


CHECKS: dict[str, Callable[[Answer, Any, str | None], bool]] = {
    "stopped": _stopped,  # it ended by itself, and was not cut
    "json": _is_json,
    "json_schema": _fits_schema,
    "required_fields": _has_fields,
    "required": _has_words,
    "forbidden": _lacks_words,
    "regex": _matches,
    "exact": _equals,
    "normalized": _nearly_equals,
    "numeric": _is_number,
    "max_wer": _wer_within,
    "max_cer": _cer_within,
    "max_tokens": _short,
    "max_characters": _few_characters,
}
NEED_EXPECTED = ("exact", "normalized", "numeric")
