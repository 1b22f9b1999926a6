"""The cases of tests/data/labels.yaml and labels.jsonl: every rule of the labels, in every family, token for token."""

import functools
import json
from itertools import groupby
from pathlib import Path

import pytest
import tiny
import trl.chat_template_utils as templates
import yaml
from test_labels import with_empty_thought

from conftest import trained_runs
from gemma_trainer.collator import MultimodalCollator

DATA = Path(__file__).parent / "data"
WRITTEN = yaml.safe_load((DATA / "labels.yaml").read_text())
SHARED = [json.loads(line) for line in (DATA / "labels.jsonl").read_text().splitlines()]
MODELS = {"gemma3": ("gemma3_text", "gemma3", "gemma3n"), "gemma4": ("gemma4", "gemma4_unified", "gemma4_dense")}
REVISIONS = [name for name in ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5")
             if hasattr(templates, f"{name}_chat_template")]  # fmt: skip
SILENT = ("rows", "tokens", "trained_tokens", "padding")  # counts that no case names


@functools.cache
def processor_of(model, template=None):
    """A model's processor, with its own chat template or one that the installed TRL ships."""
    name, _, empty_thought = (template or "").partition("+")
    text = getattr(templates, f"{name}_chat_template") if template else None
    return tiny.make_processor(model, with_empty_thought(text) if empty_thought else text)


def runs_of(family, wanted):
    """The (model, template) pairs of a case. The further models of a family come with their own template only."""
    own = MODELS[family] if wanted is None else [m for m in MODELS[family] if m != "gemma3n" and family in wanted]
    names = REVISIONS if wanted is None else [name for name in wanted if name.partition("+")[0] in REVISIONS]
    return [(model, None) for model in own] + [("gemma4", name) for name in names if family == "gemma4"]


def marked(tokenizer, batch):
    """A row as text, its trained tokens in «»."""
    pairs = zip(batch["input_ids"][0].tolist(), batch["labels"][0].tolist(), strict=True)
    parts = [(trained, [token for token, _ in run]) for trained, run in groupby(pairs, lambda pair: pair[1] != -100)]
    return "".join(f"«{tokenizer.decode(ids)}»" if trained else tokenizer.decode(ids) for trained, ids in parts)


WRITTEN_RUNS = [
    pytest.param(case, model, template, id=f"{case['case']}-{template or model}")
    for case in WRITTEN
    for family in case["families"].split(", ")
    for model, template in runs_of(family, case.get("templates"))
]


@pytest.mark.parametrize(("case", "model", "template"), WRITTEN_RUNS)
def test_case(case, model, template):
    collator = MultimodalCollator(processor_of(model, template), **case.get("options", {}))
    batch = collator([case["row"]])
    counts = {name: count for name, count in collator.stats.items() if count and name not in SILENT}
    if "refused" in case:
        assert counts == {"bad_rows": 1} and batch.problems[0][1].startswith(case["refused"])
    else:
        assert marked(collator.tokenizer, batch) == case["text"]
        assert counts == case.get("counts", {})


# The shared cases do not hold for gemma4_v2, the release's own, which closes a call with <turn|>.
SHARED_RUNS = [
    pytest.param(case, model, template, id=f"{case['id']}-{template or model}")
    for case in SHARED
    for model, template in runs_of(case["family"], [case["template"]] if "template" in case else None)
    if template != "gemma4_v2"
]


@pytest.mark.parametrize(("case", "model", "template"), SHARED_RUNS)
def test_shared_case(case, model, template):
    collator = MultimodalCollator(processor_of(model, template), **case.get("options", {}))
    assert trained_runs(collator.tokenizer, collator([case["row"]])) == case["trained"]
