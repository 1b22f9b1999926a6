"""Which column of a table is the question and which the answer: the names that people use, and a row read by them.

`plan` finds the fields of a row by its columns' names, `reshaped` gives the row in a form that `rows.read_row` or
`preferences.read_preference` takes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Fault, UsageError
from .folders import media_kind
from .rows import COLUMN, SOURCE
from .slots import MEDIA_COLUMNS, media_columns

MAP_TARGETS = (
    "system", "user", "assistant", "image", "audio", "prompt", "completion", "chosen", "rejected", "margin",
    "messages", "tools",
)  # fmt: skip
EITHER = {
    "user": ("prompt", "messages"), "prompt": ("messages",),
    "assistant": ("completion", "messages", "chosen", "rejected"), "completion": ("messages", "chosen", "rejected"),
}  # fmt: skip

# The alias table. Names are compared in lower case, with _ for spaces and dashes.
USER = ("prompt", "instruction", "question", "query", "problem", "input")
ASSISTANT = ("completion", "response", "answer", "output", "solution", "reply")
PAIRS = (  # words that are a question or an answer only beside their counterpart
    ("text", "label"), ("text", "summary"), ("text", "category"), ("text", "sentiment"), ("text", "intent"),
    ("sentence", "label"), ("document", "summary"), ("article", "summary"), ("article", "highlights"),
    ("dialogue", "summary"), ("title", "text"), ("title", "content"), ("title", "body"), ("source", "target"),
    ("src", "tgt"), ("input", "target"), ("input", "label"), ("inputs", "targets"), ("user", "assistant"),
    ("human", "assistant"), ("human", "gpt"),
)  # fmt: skip
CONTEXT = ("context", "passage")  # goes before the question
CHOSEN = ("chosen", "chosen_response", "response_chosen", "preferred", "preferred_response", "preferred_output")
REJECTED = (
    "rejected", "rejected_response", "response_rejected", "dispreferred", "non_preferred", "non_preferred_response",
    "non_preferred_output", "dispreferred_response",
)  # fmt: skip
# What an image and a clip are answered with where nothing was asked.
SHOWN = ("caption", "text", "description", "alt_text")
SPOKEN = ("transcription", "transcript", "sentence", "text", "normalized_text", "caption")
MEDIA_ALIASES = {
    "image": ("image_path", "image_file", "image_filepath", "image_url", "img", "img_path", "picture", "jpg", "png"),
    "audio": ("audio_path", "audio_file", "audio_filepath", "audio_url", "wav", "flac", "mp3"),
}
FILES = ("file_name", "file_names", "file", "path", "filename", "filepath", "file_path")  # media if their suffix is
ASKED = {"image": "Describe this image.", "audio": "Transcribe this recording."}
HUMAN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # the turns of a string in HH-RLHF


@dataclass(frozen=True)
class Plan:
    """How rows of one set of columns are read: `fields` maps a target to the columns it is made of, `unused` are the
    others."""

    format: str
    fields: dict[str, tuple[str, ...]] = field(hash=False)
    unused: tuple[str, ...] = ()

    def told(self) -> dict:
        return {target: used[0] if len(used) == 1 else list(used) for target, used in self.fields.items()}


def read_map(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """`("user=question", ...)` as (target, column) pairs; raises UsageError."""
    given: dict[str, str] = {}
    for word in words:
        target, sign, column = word.partition("=")
        if not sign or not column:
            raise UsageError(f"--map {word}: write it as target=column, such as user=question")
        if target not in MAP_TARGETS:
            raise UsageError(f"--map {word}: no target {target}; targets: {', '.join(MAP_TARGETS)}")
        if target in given:
            raise UsageError(f"--map: {target} is given twice")
        given[target] = column
    for one, others in EITHER.items():
        if both := one in given and next((other for other in others if other in given), None):
            raise UsageError(f"--map: {one} and {both} cannot both be given")
    return tuple(given.items())


def plan(row: Mapping, given: tuple[tuple[str, str], ...] = ()) -> Plan:
    """Find what the columns of a row are.

    Args:
        row: without empty values, e.g. `{"question": "2 + 2?", "answer": "4", "id": 7}`.
        given: (target, column) pairs that are not to be guessed.

    Returns:
        e.g. `Plan("columns", {"user": ("question",), "assistant": ("answer",)})`.

    Raises:
        Fault: the columns are unknown or ambiguous, or one that is given is absent.
    """
    return _plan(tuple((key, _kind(key, value)) for key, value in row.items() if key != SOURCE), given)


def _name(key) -> str:
    return re.sub(r"[\s-]+", "_", str(key).strip().lower())


def _kind(key, value) -> str:
    """What a plan depends on beside the columns' names."""
    first = value[0] if isinstance(value, list) and value else value
    if _name(key) in FILES or re.search(r"_file_names?$", _name(key)):
        return media_kind(first) or "text"
    if isinstance(first, str):
        return "hh" if isinstance(value, str) and re.match(r"\s*Human:", value) else "text"
    return "talk" if isinstance(value, list) and isinstance(first, Mapping) else "other"


@functools.lru_cache(maxsize=4096)
def _plan(columns: tuple[tuple[str, str], ...], given: tuple[tuple[str, str], ...]) -> Plan:
    kinds = dict(columns)
    if absent := [target for target, column in given if column not in kinds]:
        raise Fault("missing_field", f"no column for {', '.join(absent)} as --map says; {_columns(kinds)}")
    fields = {target: (column,) for target, column in given}
    names = {_name(key): key for key in reversed(kinds) if key not in dict(given).values()}
    for target in ("system", "tools", "margin", "loss_type"):
        if target in names:
            fields.setdefault(target, (names[target],))
    if "functions" in names:
        fields.setdefault("tools", (names["functions"],))
    if not fields.keys() & {"image", "audio"}:
        fields |= _media(names, kinds)
    names = {name: key for name, key in names.items() if (key,) not in fields.values()}
    if fields.keys() & {"user", "prompt", "assistant", "completion", "chosen", "rejected", "messages"}:
        format, body = "map", _completed(names, kinds, fields)
    else:
        format, body = _inferred(names, kinds, fields)
    body |= fields
    if "chosen" not in body:
        body.pop("margin", None)
    used = {column for columns in body.values() for column in columns}
    return Plan(format, body, tuple(key for key in kinds if key not in used))


def _media(names: dict, kinds: dict) -> dict:
    found = {}
    for kind, own in MEDIA_COLUMNS.items():
        used = [names[name] for name in own if name in names]
        used = used or [key for name, key in names.items() if re.search(r"_file_names?$", name) and kinds[key] == kind]
        used = used or [names[name] for name in MEDIA_ALIASES[kind] if name in names][:1]
        if used:
            found[kind] = tuple(sorted(used, key=list(kinds).index))
    if not found:
        for name in FILES:
            if name in names and kinds[names[name]] in MEDIA_COLUMNS:
                return {kinds[names[name]]: (names[name],)}
    return found


def _inferred(names: dict, kinds: dict, fields: dict) -> tuple[str, dict]:
    """(format, fields) of columns that nobody has explained."""
    if {"input", "preferred_output", "non_preferred_output"} <= names.keys() and kinds[names["input"]] == "other":
        pair = {"chosen": (names["preferred_output"],), "rejected": (names["non_preferred_output"],)}
        return "openai-preference", {"input": (names["input"],)} | pair
    answers = {
        target: (names[name],)
        for target, aliases in (("chosen", CHOSEN), ("rejected", REJECTED))
        for name in reversed(aliases)
        if name in names
    }
    if len(answers) == 2:
        is_hh = all(kinds[column] == "hh" for (column,) in answers.values())
        question = {"prompt": (names["prompt"],)} if "prompt" in names else _question(names, kinds)
        return "hh-rlhf" if is_hh else "preference", question | answers
    if talk := _talk(names, kinds):
        return talk
    if {"prompt", "completion"} <= names.keys():
        return "prompt-completion", {key: (names[key],) for key in ("prompt", "completion")}
    if "instruction" in names and "output" in names:
        return "alpaca", _question(names, kinds) | {"assistant": (names["output"],)}
    return _pair(names, kinds, fields)


def _talk(names: dict, kinds: dict) -> tuple[str, dict] | None:
    for name in ("messages", "conversations", "conversation", "dialogue", "dialog", "chat"):
        if name in names and (kinds[names[name]] == "talk" or name in ("messages", "conversations")):
            return "messages" if name == "messages" else "sharegpt", {"messages": (names[name],)}
    return None


def _question(names: dict, kinds: dict) -> dict:
    """The fields before the answer; empty where there are none. Raises Fault for several questions."""
    if talk := _talk(names, kinds) if "prompt" not in names else None:
        return talk[1]
    found = [name for name in _known(names, USER) if not (name == "input" and "instruction" in names)]
    if len(found) > 1:
        raise _ambiguous("question", [names[name] for name in found], kinds)
    if not found:
        return {}
    fields = {"user": (names[found[0]],)}
    if found[0] == "instruction" and "input" in names:
        fields["user"] += (names["input"],)
    elif found[0] in ("question", "query") and (before := [names[name] for name in CONTEXT if name in names]):
        fields["user"] = (before[0], *fields["user"])
    return fields | ({"history": (names["history"],)} if "history" in names else {})


def _known(names: dict, aliases: tuple[str, ...]) -> list[str]:
    """The names that are aliases; where none is, those that end with one: customer_question."""
    exact = [name for name in dict.fromkeys(aliases) if name in names]
    return exact or [name for name in names if name.endswith(tuple(f"_{alias}" for alias in aliases))]


def _answer(names: dict, kinds: dict, aliases: tuple[str, ...]) -> dict:
    found = [names[name] for name in _known(names, aliases)]
    if len(found) > 1:
        raise _ambiguous("answer", found, kinds)
    return {"assistant": (found[0],)} if found else {}


def _pair(names: dict, kinds: dict, fields: dict) -> tuple[str, dict]:
    question, answer = _question(names, kinds), _answer(names, kinds, ASSISTANT)
    if question and answer:
        return "columns", question | answer
    media = fields.keys() & {"image", "audio"}
    if media and not question:
        said = (SHOWN if "image" in media else ()) + (SPOKEN if "audio" in media else ())
        if found := _answer(names, kinds, ASSISTANT + said) or _answer(names, kinds, ("label",)):
            return "media and text", found
    pairs = [(names[one], names[other]) for one, other in PAIRS if one in names and other in names]
    if len(pairs) > 1:
        raise _ambiguous("question or the answer", list(dict.fromkeys(sum(pairs, ()))), kinds)
    if pairs:
        return "columns", {"user": (pairs[0][0],), "assistant": (pairs[0][1],)}
    if "text" in names and not question and not media:
        return "text", {"text": (names["text"],)}
    raise Fault("unknown_format", f"it is not known which column is the question and which the answer; {_help(kinds)}")


def _completed(names: dict, kinds: dict, fields: dict) -> dict:
    """What --map leaves to be found: the question or the answer that goes with what it names."""
    body = {}
    if not fields.keys() & {"user", "prompt", "messages"}:
        body |= _question(names, kinds)
    if pair := fields.keys() & {"chosen", "rejected"}:
        for target, aliases in (("chosen", CHOSEN), ("rejected", REJECTED)):
            found = [names[name] for name in aliases if name in names][:1]
            body |= {target: tuple(found)} if found and target not in pair else {}
    elif not fields.keys() & {"assistant", "completion", "messages"}:
        body |= _answer(names, kinds, ASSISTANT + SHOWN + SPOKEN) or _answer(names, kinds, ("label",))
        if "assistant" not in body:
            raise Fault("missing_field", f"it is not known which column is the answer; {_help(kinds)}")
    return body


def _ambiguous(what: str, found: list[str], kinds: dict) -> Fault:
    return Fault("unknown_format", f"more than one column may be the {what} ({_words(found)}); {_help(kinds)}")


def _help(kinds: dict) -> str:
    return f"{_columns(kinds)}; say it with --map user=COLUMN assistant=COLUMN"


def _columns(kinds) -> str:
    return f"columns: {_words(list(kinds))}"


def _words(keys: list) -> str:
    """Column names for a message; those of a table without a header are data, which messages never quote."""
    words = [key for key in map(str, keys) if COLUMN.fullmatch(key)]
    more = [f"{len(keys) - len(words[:12])} more"] if len(keys) > len(words[:12]) else []
    return ", ".join(words[:12] + more) or "none"


# ---- a row by its plan


def reshaped(row: Mapping, plan: Plan, asked: str | None = None) -> tuple[dict, list[str]]:
    """A row in a form that `rows.read_row` takes, or `preferences.read_preference` where it holds two answers.

    Args:
        asked: the user's words where a row is only media and their text; by default those of ASKED.

    Returns:
        (row, notes), e.g. `({"prompt": "2 + 2?", "completion": "4"}, ["numbers were written as text"])`.

    Raises:
        Fault: a value that no text can be made of.
    """
    fields, notes = plan.fields, []
    new = {SOURCE: row.get(SOURCE)}
    for target in ("system", "tools", "margin", "loss_type"):
        if target in fields:
            new[target] = row[fields[target][0]]
    for kind, own in MEDIA_COLUMNS.items():
        values = [value for column in fields.get(kind, ()) for value in _media_values(row[column], column, kind)]
        new |= {own[1]: values} if values else {}
    if "text" in fields:
        return new | {"text": row[fields["text"][0]]}, notes
    prompt = _prompt(row, fields, new, asked, notes)
    if "chosen" in fields:
        answers = {target: row[fields[target][0]] for target in ("chosen", "rejected") if target in fields}
        return new | prompt | {target: _side(value) for target, value in answers.items()}, notes
    target = next((target for target in ("assistant", "completion") if target in fields), None)
    if target:
        said = _text(row, fields[target], notes)
        if "messages" in prompt:
            prompt["messages"] = prompt["messages"] + [{"role": "assistant", "content": said}]
        else:
            prompt["completion"] = said
    return new | prompt, notes


def _media_values(value, column: str, kind: str) -> list:
    values = media_columns({kind: value})[kind]
    if _name(column) in FILES or re.search(r"_file_names?$", _name(column)):  # `datasets` reads them like this
        return [item.replace("\\", "/") if isinstance(item, str) else item for item in values]
    return values


def _prompt(row: Mapping, fields: dict, new: dict, asked: str | None, notes: list[str]) -> dict:
    """What comes before the answers: `{"messages"}`, `{"prompt"}`, or nothing for whole conversations."""
    if "input" in fields:  # OpenAI's preference files
        given = row[fields["input"][0]]
        if isinstance(given, Mapping) and given.get("tools"):
            new["tools"] = given["tools"]
        return {"messages": given["messages"]}
    if "messages" in fields:
        return {"messages": row[fields["messages"][0]]}
    target = next((target for target in ("user", "prompt") if target in fields), None)
    if target:
        question = _text(row, fields[target], notes)
        question = _open_turns(question) if _is_hh(question) else question
        if "history" in fields:
            return {"messages": [*_history(row[fields["history"][0]]), {"role": "user", "content": question}]}
        return {"prompt": question}
    kind = next((kind for kind in ASKED if f"{kind}s" in new), None)
    if kind is None or "chosen" in fields:
        return {}
    question = asked or ASKED[kind]
    notes.append(f'no question in the row, so "{question}" was asked')
    return {"prompt": question}


def _text(row: Mapping, columns: tuple[str, ...], notes: list[str]):
    """The text of one or several columns, or the messages that a single one holds."""
    if len(columns) == 1 and isinstance(row[columns[0]], list | Mapping):
        value = row[columns[0]]
        value = [value] if isinstance(value, Mapping) else value
        if all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value):
            return value
    texts = []
    for column in columns:
        value = row[column]
        if isinstance(value, bool | int | float):
            notes.append("numbers were written as text")
            value = json.dumps(value)
        if not isinstance(value, str):
            raise Fault("wrong_type", f"the column {_words([column])} holds a {type(value).__name__}, not a text")
        texts.append(value)
    return "\n\n".join(text for text in texts if text)


def _history(value) -> list[dict]:
    """Alpaca's earlier rounds, `[[question, answer], ...]`, as messages."""
    value = json.loads(value) if isinstance(value, str) else value
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Fault("wrong_type", "history must be a list of [question, answer] pairs")
    return [
        {"role": role, "content": said}
        for pair in value
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_hh(value) -> bool:
    return isinstance(value, str) and re.match(r"\s*Human:", value) is not None


def _side(value):
    return _hh_turns(value) if _is_hh(value) else value


def _hh_turns(text: str) -> list[dict]:
    """A conversation in one string, as HH-RLHF has them, as messages.

    Example:
        "\\n\\nHuman: Hi\\n\\nAssistant: Hello" gives user "Hi", assistant "Hello".
    """
    pieces = HUMAN.split(text)[1:]
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _open_turns(text: str) -> list[dict]:
    """The same of a prompt, which may end with the head of the answer to come."""
    turns = _hh_turns(text)
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns
