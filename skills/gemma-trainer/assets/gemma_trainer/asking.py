"""Rows that a model is asked, and what it says to them: what tells a trained model from another, wherever it is."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from . import arms, models, sources
from .answer_checks import normalize
from .demo import SAMPLES
from .errors import MediaError, RowError, TrainerError
from .eval_prompts import read_prompt
from .media_files import embedded, suffix_of
from .rows import SOURCE, read_row, without_none
from .run_check import run_folder, state_of
from .writing import replace_media

ASKED = 3  # rows
ANSWER_TOKENS = 64
SAME_SCORE = 0.02  # of a score: what bfloat16 leaves of it over some dozen layers
AS_SURE = 0.1  # of a mean log-probability; another model, such as the base, is further off
MAX_LEN = 8192  # tokens of a row that is asked
LARGEST = 4 * 2**20  # bytes of a row with its media that are kept beside a model


def rows_of_run(run: Path) -> list[dict]:
    """The rows that a run shows samples of, each as `portable`; as many as are still where they were."""
    record = state_of(run_folder(run)) or {}
    wanted = {sample["row"] for sample in record.get("samples") or []}
    if not wanted:
        return []
    known = arms.located(record)
    places = [known.get("eval_dataset"), known.get("dataset")]
    if record.get("demo"):
        places = [[str(path)] for path in SAMPLES.glob("*heldout.jsonl")]
    found: dict[str, dict] = {}
    for names in filter(None, places):
        with contextlib.suppress(TrainerError):  # gone, or changed since
            rows = sources.open_rows(names)
            for index in range(len(rows)):
                if len(found) == min(len(wanted), ASKED):
                    return list(found.values())
                if (name := rows.name(index)) in wanted - set(found):
                    with contextlib.suppress(RowError):  # cannot be asked, or not kept
                        found[name] = portable(rows[index], name)
    return list(found.values())


def answered_rows(run: Path) -> list[dict]:
    """The rows that a run shows samples of, as far as they are still there, with its answers then."""
    said = {sample["row"]: sample["answer"] for sample in (state_of(run_folder(run)) or {}).get("samples") or []}
    return [row | {"answer": said[row["name"]]} for row in rows_of_run(run)]


def rows_of_file(name: str) -> list[dict]:
    """The first rows of a file that can be asked; raises DataError, or RowError where none of them can."""
    rows, found, refused = sources.open_rows([name]), [], None
    for index in range(min(len(rows), 32)):
        try:
            found.append(portable(rows[index], rows.name(index)))
        except RowError as problem:
            refused = refused or problem
        if len(found) == ASKED:
            break
    if not found and refused:
        raise refused
    return found


def bundled_rows(modalities: frozenset[str]) -> list[dict]:
    """A row of text, and one for each kind of medium that a model takes."""
    found = {}
    for file in ("train.jsonl", "heldout.jsonl"):
        rows = sources.open_rows([str(SAMPLES / file)])
        for index in range(len(rows)):
            kinds = tuple(medium.kind for medium in read_row(rows[index]).media)
            if len(kinds) < 2 and set(kinds) <= modalities and kinds not in found:
                found[kinds] = portable(rows[index], rows.name(index))
    return list(found.values())


def portable(raw, name: str) -> dict:
    """{"name", "kinds" (of its media), "row"}: a row with an answer at its end, whose media are within it.

    Raises:
        RowError: it cannot be asked, a medium cannot be read, or all of it is larger than LARGEST.
    """
    question = read_prompt(without_none(raw), name).question

    def within(value, kind: str) -> str:
        held = embedded(value, kind, question.row.folder)
        if held["bytes"] is None:
            raise RowError(name, "its media are remote")
        suffix = suffix_of(held["bytes"], held["path"])[1:]
        return f"data:{kind}/{suffix};base64,{base64.b64encode(held['bytes']).decode()}"

    try:
        row = replace_media(question.answered(), within)
    except MediaError as problem:
        raise RowError(name, str(problem)) from None
    row.pop(SOURCE, None)
    if len(json.dumps(row)) > LARGEST:
        raise RowError(name, "too large to be kept beside a model")
    return {"name": name, "kinds": [medium.kind for medium in question.row.media], "row": row}


# ---- the models


def load_plain(folder: str, reward: bool = False, trained: Mapping = MappingProxyType({})):
    """A whole model with transformers alone, as its card says.

    Args:
        reward: with a head that scores.
        trained: "precision" and "quantization" of `metadata.facts_of`, in which it is loaded, where this machine has
            them; else as it is stored.

    Returns:
        (model in eval mode, {"missing_keys", "unexpected_keys", "mismatched_keys"}).

    Raises:
        CannotLoad: it cannot be read.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from .precision import device_type

    config, _ = models.load_config(folder)
    dtype = getattr(torch, str(trained.get("precision", "auto")).split()[0], "auto")
    kind, options = models.speaking_class(config), {"dtype": dtype, "output_loading_info": True}
    if reward:
        kind, options = AutoModelForSequenceClassification, options | {"num_labels": 1}
    if str(trained.get("quantization")).startswith("4-bit") and device_type() == "cuda" and find_spec("bitsandbytes"):
        options |= {"quantization_config": models.nf4(dtype), "device_map": {"": torch.cuda.current_device()}}
    elif torch.cuda.device_count() > 1:
        options["device_map"] = "auto"
    model, loaded = models.loading(folder, lambda: kind.from_pretrained(folder, **options))
    return (model if "device_map" in options else model.to(device_type())).eval(), loaded


def said_by(model, collator, row: dict, reward: bool = False) -> dict:
    """What a model makes of a row: {"score"}; or {"answer", "log_prob"}, the mean of its tokens' log-probabilities.
    Empty where it cannot be asked."""
    if reward:
        from .scoring import score_rows

        found = next(iter(score_rows(model, collator, [row], 1)))
        return {"score": found["score"]} if "score" in found else {}
    from .generation import answer

    said = answer(model, collator, row, ANSWER_TOKENS)
    if said is None:
        return {}
    return {"answer": said["answer"], "log_prob": log_prob_of(model, collator, row, said["answer"])}


def log_prob_of(model, collator, row: dict, answer: str) -> float | None:
    """The mean log-probability of the tokens of an answer to a row."""
    from .first_batch import log_probs

    told = row | {"messages": [*row["messages"][:-1], {"role": "assistant", "content": answer}]}
    found = log_probs(model, collator, [told])[0]
    return sum(found) / len(found) if found else None


def logits_of(model, collator, row: dict, reward: bool = False):
    """The last logits of a row, [up to 16, vocabulary]; of a reward model the products that its score is the sum of,
    [hidden size]: a score near zero is no measure of their rounding. float32, on the CPU."""
    import torch

    batch = collator([row])
    media = {key: batch[key].to(model.dtype) for key in ("pixel_values", "input_features") if key in batch}
    inputs = {key: value.to(model.device) for key, value in (batch | media).items() if key != "labels"}
    with torch.no_grad():
        if reward:
            heard = []
            with model.score.register_forward_pre_hook(lambda head, given: heard.append(given[0])):
                model(**inputs)
            return model.score(torch.diag(heard[0].flatten(0, -2)[-1]))[:, 0].float().cpu()
        found = model(**inputs, logits_to_keep=16, use_cache=False).logits[0]
    return found.float().cpu()


def asked_again(model, collator, sample: dict) -> dict:
    """{"name", "same" (whether a model says to a sample's row what was said before), "apart" (how much surer, or less
    sure, it is of that; or how far its score is from that), and "said", what it says}.

    Args:
        sample: with what `said_by` gave.
    """
    row, name = sample["row"], sample["name"]
    said = said_by(model, collator, row, "score" in sample)
    if "score" in sample:
        apart = abs(said["score"] - sample["score"]) if said else math.inf
        return {"name": name, "same": apart <= SAME_SCORE * max(1, abs(sample["score"])), "apart": apart, "said": said}
    same, known = "answer" in said and normalize(said["answer"]) == normalize(sample["answer"]), sample.get("log_prob")
    found = log_prob_of(model, collator, row, sample["answer"]) if said and known is not None else None
    return {"name": name, "same": same, "apart": None if found is None else abs(found - known), "said": said}
