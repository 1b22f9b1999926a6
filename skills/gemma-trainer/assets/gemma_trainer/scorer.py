"""The steps of reward_score.py: rows, model, scores."""

from __future__ import annotations

import contextlib
from pathlib import Path

from . import sources
from .cli import note
from .demo import SAMPLES
from .errors import DataError, UsageError
from .files import user_path
from .preferences import share_preferred
from .writing import RowsWriter, check_output, refuse_inputs

SHOWN = 5  # rows without a score that are told by name


def open_rows(config) -> sources.Rows:
    """The rows that are to be scored, or the bundled pairs; the output is looked at, too."""
    if config.model is None:
        raise UsageError("--model is needed: the run folder of reward_train.py")
    names = list(config.dataset)
    if not names:
        note("No --dataset given: scoring the bundled held-out pairs.")
        names = [str(SAMPLES / "preferences-heldout.jsonl")]
    if config.output:
        if Path(config.output).suffix.lower() != ".jsonl":
            raise UsageError(f"--output {config.output}: the name must end in .jsonl")
        check_output(user_path(config.output), config.overwrite)
        refuse_inputs(names, user_path(config.output))
    return sources.open_rows(names)


def load(config):
    """(model, collator) of the reward model."""
    from . import families, models
    from .collator import MultimodalCollator
    from .precision import choose

    model, processor = models.load_scorer(config.model, choose(config.precision))
    modalities = families.modalities(processor, model.config)
    collator = MultimodalCollator(
        processor,
        config.max_len,
        on_bad_media="skip",
        modalities=modalities,
        media_root=config.media_root,
        allow_remote_media=config.allow_remote_media,
    )
    return model, collator


def score(config, model, collator, rows) -> dict:
    """Score all rows, write the scores, and return the result."""
    from .scoring import score_rows

    read = (row for part in rows.parts for row in part.read(0, len(part)))
    found, failed, scores, margins = 0, [], [], []
    with RowsWriter(Path(config.output), config.overwrite) if config.output else contextlib.nullcontext() as writer:
        for line in score_rows(model, collator, read, config.batch_size):
            found += 1
            if writer:
                writer.write(line)
            if "error" in line:
                failed.append(f"{line['row']}: {line['error']}")
                continue
            scores += [value for key, value in line.items() if key != "row"]
            if "chosen" in line:
                margins.append(line["chosen"] - line["rejected"])
        if not scores:
            raise DataError(f"none of {found} rows can be scored" + (f". First: {failed[0]}" if failed else ""))
    mean = sum(scores) / len(scores)
    result = {"status": "done", "model": config.model, "rows": found, "failed": len(failed), "mean_score": mean}
    if margins:
        mean_margin = sum(margins) / len(margins)
        result |= {"pairs": len(margins), "accuracy": share_preferred(margins), "margin": mean_margin}
    if collator.stats["truncated"]:
        result |= {name: collator.stats[name] for name in ("truncated", "cut_to_nothing")}
    if failed:
        result["problems"] = failed[:SHOWN]
    if config.output:
        result["output"] = config.output
    return result | {"summary": _summary(result)}


def _summary(result: dict) -> str:
    rows, failed = result["rows"], result["failed"]
    lines = [f"scores   {rows - failed:,} of {rows:,} rows, {result['mean_score']:.3f} on average"]
    if "pairs" in result:
        told = f"the chosen answer scores higher in {result['accuracy']:.1%}, by {result['margin']:.3f} on average"
        lines.append(f"pairs    {result['pairs']:,}: {told}")
    if cut := result.get("truncated"):
        lost = f", {result['cut_to_nothing']:,} of them before their answer" if result["cut_to_nothing"] else ""
        lines.append(f"cut      {cut:,} answers were longer than --max-len{lost}: raise it")
    if failed:
        lines.append(f"failed   {failed:,}: {'; '.join(result['problems'])}" + (" ..." if failed > SHOWN else ""))
    if "output" in result:
        lines.append(f"written  {result['output']}")
    return "\n".join(lines)
