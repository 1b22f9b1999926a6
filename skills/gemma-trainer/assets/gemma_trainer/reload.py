"""Whether a run's saved model is what it was at the end of training: run as `python -m gemma_trainer.reload RUN...`.

A fresh process loads it as anybody would, with transformers and PEFT alone, and asks it again what the trained model
was asked: the log-probabilities of the first batch, and the sample answers. Prints a JSON list, an object for each run.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from dataclasses import dataclass, fields
from pathlib import Path

from . import arms
from .flags import CollatorFlags, PolicyFlags
from .precision import device_type


@dataclass(frozen=True)
class Arguments(CollatorFlags, PolicyFlags):
    """The arguments of a supervised run, as its `run.json` has them."""

    @classmethod
    def of(cls, record: dict) -> Arguments:
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arms.located(record).items() if name in names})


def plain_model(folder: Path, record: dict):
    """A run's model, loaded with transformers and PEFT alone, in the precision and quantization that it was trained in.

    Returns:
        (model in eval mode, config of the base model).
    """
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from .models import base_of, nf4

    adapted = (folder / "adapter_config.json").is_file()
    base = base_of(str(folder)) if adapted else str(folder)
    dtype = getattr(torch, record["precision"].split()[0]) if adapted else torch.float32
    options = {"dtype": dtype, "device_map": {"": device_type()}}
    if record["quantization"].startswith("4-bit"):
        options["quantization_config"] = nf4(dtype)
    config = AutoConfig.from_pretrained(base)
    kind = AutoModelForCausalLM if config.model_type.endswith("_text") else AutoModelForImageTextToText
    model = kind.from_pretrained(base, **options)
    model = PeftModel.from_pretrained(model, folder) if adapted else model
    return model.eval(), config


def compare(folder: Path) -> dict:
    """{"positions", "max_difference", "mean_difference" (of the log-probabilities), "hash_same" (whether the rows make
    the same batch), "answers", "answers_same"} of a run and its saved model."""
    from . import first_batch, models, preparation

    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    held = json.loads((folder / first_batch.FILE).read_text(encoding="utf-8"))
    arguments = Arguments.of(record)
    data = preparation.load_data(arguments)
    model, config = plain_model(folder, record)
    collator = preparation.make_collators(arguments, models.load_processor(str(folder), config), config)[0]
    rows = [data.rows[index] for index in held["indices"]]
    again = first_batch.facts_of(batch := collator(rows), batch.rows)
    found = first_batch.log_probs(model, collator, rows)
    same = again["hash"] == record["first_batch"]["hash"]  # else the rows make other batches now, of other lengths
    pairs = [pair for rows in zip(held["log_probs"], found, strict=True) for pair in zip(*rows, strict=same)]
    apart = [abs(then - now) if math.isfinite(then - now) else math.inf for then, now in pairs]
    said = _answers(record, data, model, collator)
    return {
        "positions": len(apart),
        "max_difference": max(apart, default=0.0),
        "mean_difference": sum(apart) / max(len(apart), 1),
        "hash_same": same,
        "answers": len(record.get("samples") or []),
        "answers_same": sum(said),
    }


def _answers(record: dict, data, model, collator) -> list[bool]:
    """Of each sample answer of a run, whether the model gives it again."""
    from . import generation

    samples = {sample["row"]: sample["answer"] for sample in record.get("samples") or []}
    rows = data.rows if data.eval_rows is None else data.eval_rows
    found = {}
    for index in range(min(len(rows), 32)):  # among which `outcome.report` found them
        if len(found) == len(samples):
            break
        said = generation.answer(model, collator, rows[index]) or {}
        if said.get("row") in samples:
            found[said["row"]] = said["answer"] == samples[said["row"]]
    return list(found.values())


def main(folders: list[str]) -> list[dict]:
    """`compare` of each run, or {"error"} where it cannot be loaded."""
    found = []
    for folder in folders:
        try:
            found.append(compare(Path(folder)))
        except Exception as problem:  # whatever transformers and PEFT make of files that are not what they expect
            traceback.print_exc()
            line = (str(problem).strip().splitlines() or [""])[0][:200]
            found.append({"error": f"{folder} cannot be loaded ({type(problem).__name__}: {line})"})
    return found


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(main(sys.argv[1:])), file=stdout)
