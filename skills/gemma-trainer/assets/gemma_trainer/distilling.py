"""The steps of distill_dataset.py: prompts, what need not be asked, requests, answers, rows."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .answer_filters import Candidate, Rules, checks_of, weigh
from .asked import Asked, hashed, read_all
from .cli import note
from .distill_inputs import check_flags, read_rubric, read_rules, read_topics
from .distilled import LICENCE, Harvest, Rejected, answered_row, counted, record_path, summary, write_record, write_rows
from .errors import CannotLoad, DataError, Fault, Interrupted, RowError
from .files import user_path
from .journal import Journal, must_be_free, settings_of
from .judging import JUDGE, judge_request, read_score, reward_scores, with_calls
from .media import MediaAccess
from .metadata import is_reward_model
from .overlaps import find_overlaps
from .pacing import Budget, estimate_tokens
from .replies import Failure, Reply, Request
from .scan import Progress
from .self_instruct import A_REQUEST, IDEA, idea_request, write_instructions
from .targets import messages_row
from .teachers import make_teacher
from .writing import check_output, refuse_inputs


@dataclass
class Work:
    """A distillation under way."""

    config: object
    rules: Rules
    budget: Budget
    teacher: object
    judge: object | None  # a teacher that judges; a reward model is loaded when its turn comes
    access: MediaAccess
    path: Path  # of the journal
    rubric: str  # what a judge that is asked in words is told
    journal: Journal | None = None
    started: float = 0.0

    @property
    def temperature(self) -> float:
        if self.config.temperature is not None:
            return self.config.temperature
        return 0.0 if self.config.samples == 1 else 0.7


def answers(config) -> dict:
    """What `distill_dataset.py answers` does: the teacher's answers to prompts.

    Raises:
        UsageError, DataError, CannotLoad, Interrupted: what was answered before is in the journal.
    """
    work = begin(config, config.prompts)
    harvest = Harvest()
    prompts = sift(work, harvest, read_prompts(work, config.prompts, harvest))
    if config.dry_run:
        return forecast(work, prompts, harvest)
    with open_journal(work, {"command": "answers"}):
        return finish(work, prompts, harvest)


def instruct(config) -> dict:
    """What `distill_dataset.py instruct` does: new prompts from topics, and the teacher's answers to them; raises as
    `answers` does."""
    work = begin(config, config.seed_rows)
    harvest = Harvest()
    topics = read_topics(config.topics)
    seeds = _usable(read_all(list(config.seed_rows), work.access), "--seed-rows")
    against, held = overlapping(work)
    if config.dry_run:
        first = idea_request(topics[0], 0, [], seeds, config.seed, config.max_new_tokens)
        return forecast(work, [], harvest, first)
    told = hashed(json.dumps([topics, [asked.key for asked in seeds]]))
    with open_journal(work, {"command": "instruct", "topics": told}):
        prompts, left_out = write_instructions(
            topics,
            config.count,
            seeds,
            lambda asked: ask(work, work.teacher, asked, "instructions"),
            config.seed,
            against,
            held,
            not config.keep_similar,
            config.max_new_tokens,
        )
        if not prompts and work.budget.ended:
            raise _too_early(work, "an instruction is written")
        if not prompts:
            raise DataError(f"{work.teacher.model} wrote no instruction that can be used ({counted(left_out)})")
        if len(prompts) < config.count and not work.budget.ended:
            note(f"{len(prompts):,} instructions instead of {config.count:,}: what else comes is like what is there.")
        return finish(work, prompts, harvest, {"instructions_left_out": dict(left_out)})


# ---- before anything is asked


def begin(config, inputs: Sequence[str]) -> Work:
    """Refuse what cannot work, before anything is read."""
    check_flags(config)
    output = user_path(config.output or "rows.jsonl")
    path = output.with_name(f"{output.stem}.journal")
    if not config.dry_run:
        must_be_free(path, config.resume, config.overwrite)  # first: it tells that --overwrite costs answers
        check_output(output, config.overwrite or config.resume)
        rows = [name for name in (*inputs, *config.against, *config.eval_file) if not name.lower().endswith(".txt")]
        refuse_inputs(rows, output, output.with_name(f"{output.stem}.rejected.jsonl"), record_path(output))
    budget = Budget(config.price_in or 0.0, config.price_out or 0.0, config.max_cost, config.max_minutes)
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    teacher, judge = make_teacher("--teacher", config.teacher, config.teacher_model, config, budget), None
    if (config.judge, config.judge_model) == (config.teacher, config.teacher_model):
        judge = teacher
    elif config.judge and not is_reward_model(Path(config.judge)):
        judge = make_teacher("--judge", config.judge, config.judge_model, config, budget)
    rules, rubric = read_rules(config), read_rubric(config)
    return Work(config, rules, budget, teacher, judge, access, path, rubric, started=time.monotonic())


def read_prompts(work: Work, names: Sequence[str], harvest: Harvest) -> list[Asked]:
    """The prompts that can be asked; others, and those that --check cannot be used with, are put aside."""
    prompts = []
    for found in read_all(list(names), work.access):
        try:
            if isinstance(found, RowError):
                raise found
            checks_of(found, work.rules.checks)
            prompts.append(found)
        except RowError as problem:
            harvest.rejected.append(Rejected(problem.row, problem.code, problem.reason))
        except Fault as problem:
            harvest.rejected.append(Rejected(found.name, problem.code, str(problem)))
    return prompts


def overlapping(work: Work) -> tuple[list[Asked], list[Asked]]:
    """The rows of --against and of --eval-file."""
    config = work.config
    return tuple(
        _usable(read_all(list(names), work.access), flag)
        for names, flag in ((config.against, "--against"), (config.eval_file, "--eval-file"))
    )


def _usable(found, flag: str) -> list[Asked]:
    rows = list(found)
    kept = [row for row in rows if isinstance(row, Asked)]
    if len(kept) < len(rows):
        first = next(row for row in rows if not isinstance(row, Asked))
        note(f"{flag}: {len(rows) - len(kept):,} of {len(rows):,} rows ask nothing and are passed over; first: {first}")
    return kept


def sift(work: Work, harvest: Harvest, prompts: list[Asked]) -> list[Asked]:
    """Leave out what need not, or must not, be asked."""
    overlaps = find_overlaps(prompts, *overlapping(work), not work.config.keep_similar)
    for position, overlap in sorted(overlaps.items()):
        harvest.rejected.append(Rejected(prompts[position].name, overlap.code, overlap.reason))
    left = [asked for position, asked in enumerate(prompts) if position not in overlaps]
    if not left:
        codes = Counter(one.code for one in harvest.rejected)
        raise DataError(f"no prompt is left to ask ({counted(codes)}); the first: {harvest.rejected[0].reason}")
    return left


def requests_of(work: Work, prompts: Sequence[Asked]) -> list[Request]:
    """One request for each sample of each prompt."""
    config, schema = work.config, work.rules.schema
    return [
        Request(f"{a.key}-{n}", a.row, work.temperature, config.seed + n, config.max_new_tokens, schema)
        for a in prompts
        for n in range(config.samples)
    ]


def forecast(work: Work, prompts: list[Asked], harvest: Harvest, first: Request | None = None) -> dict:
    """What a run would ask, and what it may cost. Nothing is sent, and nothing written."""
    config, requests = work.config, requests_of(work, prompts)
    example = first or requests[0]
    count, tokens_in = len(requests), sum(estimate_tokens(request.row) for request in requests)
    if first:  # the instructions are not known yet: as long as their share of an answer
        ideas, each = -(-config.count // A_REQUEST), config.max_new_tokens // A_REQUEST
        count = ideas + config.count * config.samples
        tokens_in = ideas * estimate_tokens(first.row) + config.count * config.samples * each
    tokens_out = count * config.max_new_tokens
    if work.judge:
        tokens_in, tokens_out, count = 2 * tokens_in + tokens_out, 2 * tokens_out, 2 * count
    cost = work.budget.cost(tokens_in, tokens_out) if config.price_in is not None else None
    result = {"status": "dry-run", "prompts": len(prompts), "requests": count, "tokens_in": tokens_in,
              "max_tokens_out": tokens_out, "max_cost": cost, "rejected": len(harvest.rejected),
              "reasons": dict(Counter(one.code for one in harvest.rejected)),
              "request": work.teacher.example(example)}  # fmt: skip
    told = f", at most {cost:.4f} in all" if cost is not None else ""
    lines = [
        f"would ask {count:,} requests: about {tokens_in:,} tokens in, at most {tokens_out:,} out{told}",
        f"left out  {len(harvest.rejected):,} prompts: {counted(result['reasons'])}" if harvest.rejected else "",
        json.dumps(result["request"], indent=1, ensure_ascii=False),
    ]
    return result | {"summary": "\n".join(filter(None, lines))}


# ---- asking


def open_journal(work: Work, more: dict) -> Journal:
    """Open the journal of answers, once it is known who answers."""
    config, teacher = work.config, work.teacher
    if config.resume and teacher.model is None:
        teacher.model = settings_of(work.path).get("teacher_model")
    if teacher.model is None or not config.resume:
        teacher.open()
    schema = work.rules.schema and hashed(json.dumps(work.rules.schema))
    settings = more | {"teacher_model": teacher.model, "temperature": work.temperature, "seed": config.seed,
                       "max_new_tokens": config.max_new_tokens, "thinking": config.thinking,
                       "json_schema": schema}  # fmt: skip
    work.journal = Journal(work.path, settings, config.resume, config.overwrite)
    work.budget.spent = work.budget.cost_of(work.journal.replies.values())
    return work.journal


def ask(work: Work, teacher, requests: list[Request], what: str) -> list:
    """Ask what the journal has no answer to; what failed in an earlier run is asked again.

    Returns:
        A Reply or Failure for each request; None for one that was not made, since the run ends early.

    Raises:
        CannotLoad, Interrupted: as the teacher does; and where it has answered nothing at all.
    """
    journal = work.journal
    missing = list({request.key: request for request in requests if request.key not in journal.replies}.values())
    try:
        if missing:
            teacher.open()
            with Progress(len(missing), what) as progress:
                teacher.ask(missing, lambda request, found: (journal.add(request.key, found), progress.add(1)))
        failures = [journal.failures[request.key] for request in missing if request.key in journal.failures]
        heard = any(key.startswith(JUDGE) == (what == "judged") for key in journal.replies)
        if not heard and failures and not failures[-1].own:
            raise CannotLoad(f"{teacher.name} has answered none of {len(failures):,} requests: {failures[-1].reason}")
    except (KeyboardInterrupt, Interrupted) as problem:
        code = getattr(problem, "exit_code", 130)
        raise Interrupted(f"{'interrupted' if code == 130 else 'terminated'}: {_kept(journal)}", code) from None
    except CannotLoad as problem:
        raise CannotLoad(f"{problem}; {_kept(journal)}" if journal.replies else str(problem)) from None
    return [journal.replies.get(request.key) or journal.failures.get(request.key) for request in requests]


def _kept(journal: Journal) -> str:
    if not journal.replies:
        return "no answer had come"
    return f"{len(journal.replies):,} answers are kept in {journal.path}; --resume goes on from there"


def finish(work: Work, prompts: list[Asked], harvest: Harvest, more: dict | None = None) -> dict:
    """Ask for the answers, judge them, and write the rows."""
    config = work.config
    requests = requests_of(work, prompts)
    found = ask(work, work.teacher, requests, "answers")
    answered = _weighed(work, prompts, found, harvest)
    if work.budget.ended and not answered:
        raise _too_early(work, "a prompt is answered")
    if config.judge:
        found += _judge(work, answered)
    rejected_file = write_rows(config, harvest, answered, bool(config.judge))
    result = _result(work, prompts, found, harvest) | (more or {})
    result["rejected_file"] = str(rejected_file) if rejected_file else None
    result["record"] = str(write_record(config, result, _settings(work)))
    return result | {"summary": summary(result)}


def _too_early(work: Work, what: str) -> DataError:
    return DataError(f"--{work.budget.ended.replace('_', '-')} is reached before {what}: raise it")


def _weighed(work: Work, prompts, found: list, harvest: Harvest) -> list[tuple[Asked, list[Candidate]]]:
    """The answers of each prompt, held to the rules; prompts of which all requests failed are put aside."""
    answered, samples = [], work.config.samples
    for at, asked in enumerate(prompts):
        results = found[at * samples : (at + 1) * samples]
        candidates = [
            weigh(asked, sample, reply, work.rules, harvest.tally)
            for sample, reply in enumerate(results)
            if isinstance(reply, Reply)
        ]
        failure = next((one for one in results if isinstance(one, Failure)), None)
        if candidates:
            answered.append((asked, candidates))
        elif failure:
            harvest.rejected.append(Rejected(asked.name, failure.code, failure.reason))
    return answered


def _judge(work: Work, answered: list[tuple[Asked, list[Candidate]]]) -> list[Failure | None]:
    """Score the answers that pass; one without a score, or with too low a one, does not pass any more.

    Returns:
        What became of the requests to the judge that it did not answer.
    """
    config = work.config
    passing = [(asked, one) for asked, candidates in answered for one in candidates if one.fault is None]
    said = []
    if work.judge is not work.teacher:
        work.teacher.close()  # there may be no room for two
    if work.judge:
        work.judge.open()
        judge, longest = work.judge.model, config.max_new_tokens
        told = [(asked, with_calls(one.text, one.reply.tool_calls)) for asked, one in passing]
        requests = [judge_request(asked, text, work.rubric, judge, longest) for asked, text in told]
        said = ask(work, work.judge, requests, "judged")
        scores = [read_score(reply.text) if isinstance(reply, Reply) else None for reply in said]
    else:
        scores = reward_scores(config, [messages_row(answered_row(asked, one)) for asked, one in passing])
    for (_, candidate), score in zip(passing, scores, strict=True):
        candidate.score = score
        if score is None:
            candidate.fault = "unjudged"
        elif config.min_score is not None and score < config.min_score:
            candidate.fault = "low_score"
    if work.budget.ended and passing and all(one.score is None for _, one in passing):
        raise _too_early(work, "an answer is judged")
    unheard = [one for one in said if not isinstance(one, Reply)]
    if failed := [one for one in unheard if one]:
        note(f"{len(failed):,} answers could not be judged; first: {failed[0].reason}")
    return unheard


# ---- the result


def _settings(work: Work) -> dict:
    names = """samples max_len max_new_tokens thinking reasoning seed keep pairs min_margin min_score
    drop_refusals check json_schema rubric keep_similar against eval_file"""
    return {name: getattr(work.config, name) for name in names.split()} | {"temperature": work.temperature}


def _result(work: Work, prompts, found, harvest: Harvest) -> dict:
    config, tally, journal = work.config, harvest.tally, work.journal
    answered = sum(isinstance(one, Reply) for one in found)
    paid = journal.replies.values()
    tokens = {"in": sum(reply.tokens_in for reply in paid), "out": sum(reply.tokens_out for reply in paid),
              "estimated": sum(reply.estimated for reply in paid)}  # fmt: skip
    others = sum(key.startswith((IDEA, JUDGE)) for key in journal.replies)
    failed = sum(isinstance(one, Failure) for one in found)
    teacher = {"name": work.teacher.name, "model": work.teacher.model, "api": work.teacher.api}
    judge = (work.judge.name, work.judge.model) if work.judge else (config.judge, config.judge)
    return {
        "status": "stopped" if work.budget.ended else "done",
        "output": str(config.output),
        "rows": harvest.rows,
        "pairs": config.pairs,
        "prompts": len(prompts),
        "teacher": teacher,
        "judge": dict(zip(("name", "model"), judge, strict=True)) if config.judge else None,
        "requests": {"answered": answered, "failed": failed, "not_asked": sum(one is None for one in found),
                     "other": others},
        "tokens": tokens,
        "cost": work.budget.cost_of(paid) if config.price_in is not None else None,
        "stopped_by": work.budget.ended,
        "dropped": dict(harvest.dropped.most_common()),
        "unpaired": dict(harvest.unpaired.most_common()),
        "rejected": len(harvest.rejected),
        "reasons": dict(Counter(one.code for one in harvest.rejected).most_common()),
        "refusals": tally.refusals,
        "reasoned": tally.reasoned,
        "json": dict(tally.json),
        "lost_fields": dict(tally.lost_fields.most_common(20)),
        "journal": str(work.path),
        "seconds": round(time.monotonic() - work.started, 1),
        "licence": LICENCE.format(model=teacher["model"]),
    }  # fmt: skip
