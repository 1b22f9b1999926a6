"""The steps of evaluate.py: what is compared on which rows, and the arms' work."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from . import metadata, sources
from .cli import note
from .demo import SAMPLES
from .errors import CannotLoad, DataError, Interrupted, UsageError
from .evaluation_book import ANSWERS, Book, keep_settings, open_folder
from .evaluation_rows import Item, Rows, began_with, files_of, open_heldout, open_training, run_of, trained_on
from .files import user_path
from .generation import Question
from .goals import Goal

FORMAT = 1  # of answers.jsonl: another is not gone on with
GUARD = SAMPLES / "general.jsonl"


@dataclass
class Work:
    """An evaluation: its rows, its arms ({name: the model told}), and the names of what is measured."""

    config: object
    folder: Path
    rows: Rows
    items: list[Item]
    arms: dict[str, str]
    names: list[str]
    why: dict[str, str]
    labels: tuple[str, ...]
    goals: list[Goal]
    guard: list[Question]
    examples: tuple | None  # (rows, names) that shots are taken from
    book: Book
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        return "base" in self.arms

    def close(self) -> None:
        self.book.close()

    def tell(self, text: str) -> None:
        self.notes.append(text)
        note(text)


# ---- beginning


def begin(config) -> Work:
    """Read the rows, decide what is measured, and make the folder; no model is loaded.

    Raises:
        UsageError: no model, a metric or a figure of --require that does not exist, or a folder that is in use.
        DataError: no such data, or none of the rows can be read.
        CannotLoad: a folder of a model that is not there, or a judge that is no reward model.
    """
    if config.model is None:
        raise UsageError("--model is needed: a run's folder, or the hub id or folder of a whole model")
    if (config.limit is not None and config.limit < 1) or config.few_shot < 0:
        raise UsageError("--limit must be more than 0, and --few-shot not less")
    config = dataclasses.replace(config, against=_before(config))
    goals = _goals(config.require)
    sources.must_exist(*config.dataset, *filter(None, [config.shots_from]))
    _check_models(config)
    rows = open_heldout(config)
    items = rows.items()
    readable = [item for item in items if not item.problem]
    if not readable:
        raise DataError(f"none of {len(items):,} rows can be read. First: {items[0].name}: {items[0].problem}")
    examples = open_training(config) if config.few_shot else None
    arms = _arms(config, examples is not None)
    names, why, labels = _metrics(config, items)
    guard = _guard_questions(config, "base" in arms)
    _check_goals(goals, names, arms, config)
    folder = open_folder(config)
    book = Book(folder / ANSWERS, anew=not config.resume)
    work = Work(config, folder, rows, items, arms, names, why, labels, goals, guard, examples, book)
    try:
        _keep_settings(work)
    except UsageError:
        book.close()
        raise
    _tell(work)
    return work


def _before(config) -> str | None:
    """The other model that --model is compared with, if any: --against, else what its run began with."""
    if config.against:
        return None if config.against == "off" else config.against
    before = began_with(config.model)
    return (
        before if before and (before == "demo" or Path(before).is_dir() or metadata.HUB_ID.fullmatch(before)) else None
    )


def _check_models(config) -> None:
    """Refuse folders that cannot be what they are given for: a judge is loaded when all else is done."""
    for name in filter(None, (config.model, config.against, config.judge)):
        if name.startswith((".", "/", "~")) and not Path(name).is_dir():
            raise CannotLoad(f"{name}: no such folder")
    if config.judge and Path(config.judge).is_dir() and not metadata.is_reward_model(Path(config.judge)):
        raise CannotLoad(f"--judge {config.judge} is no reward model: give the run of reward_train.py")


def _goals(given: tuple[str, ...]) -> list[Goal]:
    try:
        return [Goal.read(text) for text in given]
    except ValueError as problem:
        raise UsageError(f"--require {str(problem).replace('gen/pass_rate', 'accuracy')}") from None


def _is_adapter(name: str) -> bool:
    return (Path(name) / "adapter_config.json").is_file()


def _arms(config, examples: bool) -> dict[str, str]:
    """The arms by name, in the order of the table, with the model that each is."""
    arms = {}
    if config.against:
        arms["base"] = config.against
    elif _is_adapter(config.model):
        arms["base"] = f"{config.model} without its adapter"
    if examples:
        count = f"{config.few_shot} example{'s' * (config.few_shot > 1)}"
        arms["few_shot"] = f"{arms.get('base', config.model)}, shown {count}"
    return arms | {"tuned": config.model}


def _metrics(config, items: list[Item]) -> tuple[list[str], dict[str, str], tuple[str, ...]]:
    """(names of what is measured, why each was chosen, the labels).

    Raises:
        UsageError: an unknown name, or one that no row can be measured by.
    """
    from . import evaluation_figures as figures
    from . import metrics

    expected = [item.expected for item in items if item.kind == "chat" and item.expected is not None]
    labels = config.labels or metrics.find_labels(expected)
    names, why = list(config.metrics) or ["auto"], {}
    if "auto" in names:
        heard = sum(any(m.kind == "audio" for m in item.question.row.media) for item in items if item.question)
        checked = sum(bool(item.checks) for item in items)
        why = metrics.choose(expected, checked / len(items), heard / len(items))
        if config.labels:
            why = dict.fromkeys(("accuracy", "macro_f1"), "--labels") | why
        told = {"choice": "rows have choices", "pair": "rows are pairs"}
        others = [name for name in (*figures.SIDES, "loss", "perplexity") if _measurable(name, labels, items)]
        why |= {name: told.get(name.split("_")[0], "rows have trained tokens") for name in others}
        names[names.index("auto") : names.index("auto") + 1] = why
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in figures.NAMES:
            raise UsageError(f"--metrics {name}: unknown; known: auto, {', '.join(figures.NAMES)}")
        if name in ("accuracy", "macro_f1") and not labels:
            raise UsageError(f"--metrics {name}: the expected answers are no few labels: name them with --labels")
        if not _measurable(name, labels, items):
            if name in ("accuracy", "macro_f1") and config.labels:
                raise UsageError("--labels: no row expects one of them")
            raise UsageError(f"--metrics {name}: no row can be measured by it")
    if config.judge and not figures.wanted_of(items, figures.ANSWER):
        raise UsageError("--judge scores answers, but no row asks for one")
    if not names:
        raise DataError("there is nothing to measure: no row has an answer, checks, choices or a pair")
    return names + ["judge"] * bool(config.judge), why, labels


def _measurable(name: str, labels: tuple[str, ...], items: list[Item]) -> bool:
    from . import evaluation_figures as figures
    from .evaluation_work import wanted_of
    from .metrics import METRICS

    if name in METRICS:
        return bool(figures.measured_by(METRICS[name], labels, items))
    return bool(wanted_of(items, figures.measure_of(name)))


def _guard_questions(config, compared: bool) -> list[Question]:
    from .eval_prompts import read_prompts

    if config.guard == "off" or not compared:
        if config.guard not in (None, "off"):
            raise UsageError("--guard looks for drift from a base: it needs --against, or a --model that is an adapter")
        return []
    return [prompt.question for prompt in read_prompts(config.guard or str(GUARD))]


def _check_goals(goals: list[Goal], names: list[str], arms: dict, config) -> None:
    from . import evaluation_figures as figures

    known = figures.known_figures(names, list(arms), bool(config.judge), config.guard != "off")
    for goal in goals:
        if goal.metric not in known:
            told = ", ".join(name for name in known if not name.endswith((".low", ".high")))
            name = goal.metric.rpartition("/")[2].split(".")[0]
            wrong = f"not measured: add --metrics {name}" if name in figures.NAMES and name not in names else "unknown"
            raise UsageError(f"--require {goal.metric}: {wrong}; known: {told}; each also with .low and .high")


def _keep_settings(work: Work) -> None:
    """Keep what the answers depend on."""
    config = work.config
    named = ("limit", "seed", "few_shot", "max_len", "max_new_tokens", "thinking", "precision", "quantize")
    settings = {"format": FORMAT} | {name: getattr(config, name) for name in named}
    settings |= {name: _identity(getattr(config, name)) for name in ("model", "against", "judge")}
    settings["dataset"] = work.rows.fingerprint
    settings["shots"] = sources.fingerprint(work.examples[1], len(work.examples[0])) if work.examples else None
    guard = config.guard or str(GUARD)
    settings["guard"] = sources.fingerprint([guard], len(work.guard)) if work.guard else "off"
    keep_settings(work.folder, settings)


def _identity(name: str | None) -> str | None:
    """What tells a model from others: a hub id; of a folder its name and what is in its files."""
    folder = user_path(name or "")
    if not name or not folder.is_dir():
        return name
    patterns = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json", "chat_template.jinja")
    files = [str(path) for pattern in patterns for path in sorted(folder.glob(pattern))]
    return f"{folder.resolve().name} {sources.fingerprint(files, len(files))}"


def _tell(work: Work) -> None:
    from .metrics import label_of

    config, failed = work.config, [item for item in work.items if item.problem]
    if failed:
        work.tell(f"{len(failed):,} of {len(work.items):,} rows cannot be read, and count as failed")
    if unasked := [item for item in work.items if item.unasked]:
        work.tell(
            f"{len(unasked):,} rows are not asked, only their loss is taken: {unasked[0].name}: {unasked[0].unasked}"
        )
    expected = [item.expected for item in work.items if item.expected is not None and item.kind == "chat"]
    named = [text for text in expected if label_of(text, work.labels) is not None]
    if "accuracy" in work.names and len(named) < len(expected):
        work.tell(f"{len(expected) - len(named):,} rows expect none of the labels, and are left out of the accuracy")
    if config.few_shot and not work.examples:
        work.tell("no few-shot arm: the run's training data are not at hand (--shots-from FILE)")
    record = run_of(config.model) or {}
    if config.dataset and trained_on(record) & files_of(config.dataset):
        work.tell("the model was trained on these rows: the figures say nothing of how it does on new ones")
    if work.rows.demo and not record.get("demo") and config.model != "demo":
        work.tell("these are the demo's rows: the figures say nothing of any other task (--dataset FILE)")
    if work.compared and not config.against and (first := began_with(config.model)):
        work.tell(f"the run went on training {first}, and base is without both trainings")
    if not work.compared:
        work.tell("evaluated alone: --against MODEL compares it with another")
    for name, why in work.why.items():
        note(f"metric   {name}: {why}")


# ---- the arms' work


def run(work: Work) -> None:
    """Have all arms do what is not in the folder yet. Models are loaded one after the other, and only where needed.

    Raises:
        Interrupted: with what to do to go on.
        OutOfMemory: not even one row at a time fits.
    """
    try:
        for arms, name in _loads(work):
            if _is_missing(work, arms):
                _answer(work, arms, name)
        if work.config.judge:
            _judge(work)
    except (KeyboardInterrupt, Interrupted) as problem:
        told = f"stopped; what was answered is kept: go on with --resume --output {work.folder}"
        raise Interrupted(told, getattr(problem, "exit_code", 130)) from None


def _loads(work: Work) -> list[tuple[list[str], str]]:
    """[(arms, the model that they are of)], in the order in which models are loaded."""
    config, first = work.config, [arm for arm in work.arms if arm != "tuned"]
    if config.against and first:
        return [(first, config.against), (["tuned"], config.model)]
    return [(list(work.arms), config.model)]


def _measures(work: Work) -> list[str]:
    from .evaluation_figures import measure_of

    return list(dict.fromkeys(map(measure_of, work.names)))


def _is_missing(work: Work, arms: list[str]) -> bool:
    """Whether anything of these arms is not in the book yet."""
    from .evaluation_work import GUARD_ANSWER, GUARD_LOG_PROBS, wanted_of

    items, book = work.items, work.book
    asked = all(book.has(arm, m, wanted_of(items, m)) for arm in arms for m in _measures(work))
    guarded = [arm for arm in arms if arm != "few_shot"] if work.guard else []
    numbers = range(len(work.guard))
    return not (asked and all(book.has(a, m, numbers) for a in guarded for m in (GUARD_ANSWER, GUARD_LOG_PROBS)))


def _answer(work: Work, arms: list[str], name: str) -> None:
    """Load a model, and have it do the work of these arms."""
    from . import evaluation_work
    from .few_shots import Shots
    from .inference import load_policy
    from .labels import Labeller

    config = work.config
    facts = _facts(config.model) or _facts(config.against)
    policy = load_policy(name, config, like=facts)  # both models asked alike, if one does not say how
    labels = facts.get("labels") or {}
    trained = labels.get("loss_on", "all-turns"), labels.get("train_reasoning", True)
    policy.collator.labeller = Labeller(policy.collator.renderer, *trained)  # for all arms what the run was trained on
    shots = Shots(work.examples[0], config.few_shot, config.seed, policy.collator) if "few_shot" in arms else None
    for arm in arms:
        off = policy.base is not None and arm != "tuned" and not config.against
        with policy.untuned() if off else contextlib.nullcontext():
            given = shots if arm == "few_shot" else None
            evaluation_work.ask(policy, arm, work.items, _measures(work), work.book, config, given)
            if work.guard and arm != "few_shot":
                evaluation_work.ask_guard(policy, arm, work.guard, work.book, config)
    del policy, shots
    _free()


def _facts(name: str | None) -> dict:
    """What a model's folder says of how it was trained."""
    return (metadata.read(Path(name)) if name else None) or {}


def _free() -> None:
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def _judge(work: Work) -> None:
    from . import evaluation_work, scorer

    left = [arm for arm in work.arms if not evaluation_work.is_judged(work.items, arm, work.book)]
    if not left:
        return
    model, collator = scorer.load(dataclasses.replace(work.config, model=work.config.judge))
    for arm in left:
        evaluation_work.judge(model, collator, work.items, arm, work.book, work.config)
