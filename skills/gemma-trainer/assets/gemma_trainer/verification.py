"""Whether a change of the training stack is safe: the four steps of verify.py, in their order.

work = begin(config)
told = smoke(work)
runs = train(work, told)
result = conclude(work, told, runs)
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import arms, comparison, sources
from .arms import Arm, ArmFailed
from .cli import note
from .comparison import ROLES, Tolerance
from .demo import SAMPLES
from .errors import UsageError
from .files import finite, user_path, write_whole

SMOKE_STEPS = 3
ARGUMENTS, PAGE, RESULT = "arguments.json", "verify.html", "verify.json"
OWN = (ARGUMENTS, PAGE, RESULT, "*.log", "baseline-*", "against-*")  # what --overwrite removes, and nothing else
DEMO = {"batch_size": 8, "grad_accum": 1}  # as the training scripts have it for the demo's own rows
SHARED = "dataset seed max_len batch_size grad_accum lr precision quantize lora_targets".split()
ENVIRONMENT = 4  # exit code


@dataclass(frozen=True)
class Work:
    """A comparison: its two arms by role, its folder, and how long the arms train and how often."""

    arms: dict[str, Arm]
    folder: Path
    steps: int
    repeats: int
    demo: bool

    @property
    def trained(self) -> list[Arm]:
        """The arms that are trained here."""
        return [arm for arm in self.arms.values() if arm.record is None]


# ---- beginning


def begin(config) -> Work:
    """The arms, and a folder with the arguments that both are trained with.

    Raises:
        UsageError: flags that exclude each other, or a folder that is in use.
        DataError: no such data.
    """
    against = config.against or ("hf" if config.python else "unsloth")
    both = {
        "baseline": arms.arm_of("baseline", config.baseline),
        "against": arms.arm_of("against", against, config.python),
    }
    record = next((arm.record for arm in both.values() if arm.record), None)
    if record and config.steps not in (None, record["steps"]):
        raise UsageError(f"--steps {config.steps}: a run of {record['steps']} steps can only be compared with as many")
    steps = record["steps"] if record else config.steps or 20
    if steps < SMOKE_STEPS or config.repeats < 1:
        raise UsageError(f"--steps must be at least {SMOKE_STEPS}, --repeats at least 1")
    arguments = _arguments(config, record)
    sources.must_exist(*arguments["dataset"])
    work = Work(both, _folder(config), steps, config.repeats, not config.dataset and (not record or record["demo"]))
    write_whole(work.folder / ARGUMENTS, json.dumps(arguments, indent=1))
    return work


def _arguments(config, record: dict | None) -> dict:
    """The arguments of both arms: those of the run that is one of them, if any, and the flags."""
    given = {name: getattr(config, name) for name in ("model", *SHARED)}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    if record:
        return arms.arguments_of(record) | given
    if not config.dataset:
        note("No --dataset given: running the built-in demo (tiny random Gemma 4, bundled samples, offline).")
        given = {"dataset": [str(SAMPLES / "train.jsonl")], **DEMO} | given
    return {"model": "demo"} | given


def _folder(config) -> Path:
    """The comparison's folder, with nothing of an older one in it."""
    name = config.output or f"runs/verify-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder = user_path(name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / ARGUMENTS).is_file():
            raise UsageError(f"--output {folder} holds other files: choose a new or empty folder")
        if not config.overwrite:
            raise UsageError(f"--output {folder} holds a comparison already: add --overwrite, or choose another")
        named = [Path(arm).resolve() for arm in (config.baseline, config.against) if arm and Path(arm).is_dir()]
        if any(run.is_relative_to(folder.resolve()) for run in named):
            raise UsageError("--overwrite would remove a run that is to be compared: choose another --output")
        for path in [path for pattern in OWN for path in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- the steps


def smoke(work: Work) -> dict:
    """A few hundred rows and three steps of each arm that is trained; of a run, a look at what it left.

    Returns:
        {role: {"passed", "told", "looked_at", "counters"}}.

    Raises:
        ArmFailed: the baseline does not pass, or what an arm needs is not installed.
    """
    found = {role: {"passed": True, "told": ""} for role in ROLES}
    for step in (_look_at_rows, _train_briefly):  # what an arm lacks shows at the first, before any is trained
        for role, arm in work.arms.items():
            if found[role]["passed"]:
                found[role] |= _tried(step, work, arm)
    if not found["baseline"]["passed"]:
        raise ArmFailed(f"{work.arms['baseline'].told}: {found['baseline']['told']}", 8, "check")
    return found


def _tried(step, work: Work, arm: Arm) -> dict:
    try:
        return step(work, arm)
    except ArmFailed as problem:
        if arm.role == "baseline" or problem.exit_code == ENVIRONMENT:
            raise
        return {"passed": False, "told": str(problem)}


def _look_at_rows(work: Work, arm: Arm) -> dict:
    if arm.record:
        return {}
    note(f"rows     {arm.told}")
    plan = arms.train(arm, work.folder / f"{arm.role}-smoke", SMOKE_STEPS, "--dry-run")
    return {name: plan[name] for name in ("looked_at", "counters")}


def _train_briefly(work: Work, arm: Arm) -> dict:
    note(f"smoke    {arm.told}")
    if arm.record:
        return passed_smoke(Path(arm.name), arm.record["steps"])
    folder = work.folder / f"{arm.role}-smoke"
    arms.train(arm, folder, SMOKE_STEPS)
    return passed_smoke(folder, SMOKE_STEPS)


def passed_smoke(folder: Path, steps: int) -> dict:
    """{"passed", "told"}: whether a run logged its steps in order, in finite numbers, and left a whole model."""
    from . import run_check, runs

    logged = [entry for entry in runs.metrics_of(folder) if "loss" in entry]
    every = max(1, steps // 200)
    odd = [entry["step"] for entry in logged if not math.isfinite(entry["loss"] + entry.get("grad_norm", math.nan))]
    failed = [check for check in run_check.inspect(str(folder))["checks"] if check["passed"] is False]
    if [entry["step"] for entry in logged] != list(range(every, steps + 1, every)):
        told = f"steps {', '.join(str(entry['step']) for entry in logged[:10])} were logged, not 1 to {steps} in order"
    elif odd:
        told = f"loss or gradient norm of step {odd[0]} is no number"
    elif failed:
        told = f"the saved model is not whole: {failed[0]['check']}: {failed[0]['told']}"
    else:
        return {"passed": True, "told": f"{steps} steps in order, finite, and a whole model"}
    return {"passed": False, "told": told}


def train(work: Work, told: dict) -> dict[str, list[Path]] | None:
    """The run folders of each arm: of those that are trained, `repeats` of them, the arms by turns (A B B A ...).

    None where the arm that is compared with the baseline has failed, here or before, which `told` of `smoke` says then.

    Raises:
        ArmFailed: the baseline failed.
    """
    if not told["against"]["passed"]:
        return None
    found = {role: [Path(arm.name)] if arm.record else [] for role, arm in work.arms.items()}
    for number in range(1, work.repeats + 1):
        for arm in work.trained if number % 2 else work.trained[::-1]:
            folder = work.folder / f"{arm.role}-{number}"
            try:
                result = arms.train(arm, folder, work.steps, "--save-first-batch")
            except ArmFailed as problem:
                if arm.role == "baseline":
                    raise
                told["against"] = {"passed": False, "told": str(problem)}
                return None
            seconds, loss = result["timing"]["train_s"], result["metrics"]["train_loss"]
            note(f"run {number}/{work.repeats}  {arm.told}: {work.steps} steps in {seconds:.0f} s, loss {loss:.4g}")
            found[arm.role].append(folder)
    return found


def closed_loop(work: Work, runs: dict[str, list[Path]], precision: dict[str, str]) -> dict:
    """{role: `comparison.reload_verdict`, or None for a run that did not keep what is needed}."""
    first = {role: runs[role][0] for role in ROLES}
    kept = {role: folder for role, folder in first.items() if "log_probs" in _read(folder / "first_batch.json")}
    for role in first.keys() - kept.keys():
        note(f"closed loop: {first[role]} was trained without --save-first-batch: nothing to compare with")
    if not kept:
        return dict.fromkeys(ROLES)
    note("closed loop: loading what was saved with transformers and PEFT alone")
    told = arms.reload(list(kept.values()), work.folder / "closed-loop.log")
    found = dict(zip(kept, told, strict=True))
    return {role: comparison.reload_verdict(found.get(role), precision[role]) for role in ROLES}


# ---- what is found


def compare(work: Work, runs: dict[str, list[Path]]) -> dict:
    """All that `comparison.judge` wants beside the smoke test."""
    from .runs import metrics_of

    records = {role: _read(runs[role][0] / "run.json") for role in ROLES}
    logged = {role: [[e for e in metrics_of(folder) if "loss" in e] for folder in runs[role]] for role in ROLES}
    precision = {role: records[role]["precision"].split()[0] for role in ROLES}
    batches = {role: _first_batch(records[role], runs[role][0]) for role in ROLES}
    speeds, peaks = (
        {role: [figure(entries) for entries in logged[role]] for role in ROLES}
        for figure in (comparison.tokens_per_second, _peak_memory)
    )
    return {
        "labels": comparison.compare_batches(batches["baseline"], batches["against"]),
        "curves": _curves(logged, comparison.coarser(*precision.values())),
        "speed": comparison.ratio(speeds["baseline"], speeds["against"]),
        "memory": comparison.ratio(peaks["baseline"], peaks["against"]),
        "alternated": len(work.trained) == 2,
        "closed_loop": closed_loop(work, runs, precision),
        "data_same": len({records[role]["data"]["fingerprint"] for role in ROLES}) == 1,
        "versions": {role: records[role]["versions"] for role in ROLES},
        "precision": precision,
        "logged": {role: logged[role][0] for role in ROLES},
    }


def _read(path: Path) -> dict:
    """A JSON object; empty where there is no file.

    Raises:
        UsageError: it is damaged.
    """
    if not path.is_file():
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    raise UsageError(f"{path} is damaged: it holds no JSON object")


def _first_batch(record: dict, folder: Path) -> dict:
    """What is known of a run's first batch; nothing where it was made by an older version.

    Raises:
        UsageError: its file is damaged.
    """
    known, held = record.get("first_batch"), _read(folder / "first_batch.json")
    if not isinstance(known, dict) or not known.keys() >= {"rows", "hash", "trained_tokens"}:
        return {}
    if not held:
        return known
    lines = [held.get(name) for name in ("rows", "input_ids", "labels")]
    whole = all(isinstance(line, list) for line in lines) and len(lines[1]) == len(lines[2])
    if not whole or any(len(ids) != len(labels) for ids, labels in zip(*lines[1:], strict=True)):
        raise UsageError(f"{folder / 'first_batch.json'} is damaged: ids and labels do not match")
    return known | held


def _peak_memory(logged: list[dict]) -> float | None:
    """The peak while training; what comes after it, such as sample answers, is no part of it."""
    return max((entry["memory_mb"] for entry in logged if "memory_mb" in entry), default=None)


def _curves(logged: dict, precision: str) -> dict:
    *tolerances, why = comparison.CURVES[precision]
    found = {"precision": precision, "why": why}
    for name, rule in zip(("loss", "grad_norm"), tolerances, strict=True):
        curves = {role: [{e["step"]: e[name] for e in run if name in e} for run in logged[role]] for role in ROLES}
        rule = Tolerance(rule.first, rule.grows, rule.most, comparison.noise_of(curves["baseline"]))
        one, other = (curves[role][0] for role in ROLES)
        found[name] = comparison.compare_curves(one, other, rule)
        if name == "loss" and one.keys() & other.keys():
            end = max(one.keys() & other.keys())
            found["end"] = {"step": end, "baseline": one[end], "against": other[end]}
            found["end"] |= {"relative": comparison.relative(one[end], other[end]), "tolerance": rule.at(end)}
    return found


def conclude(work: Work, told: dict, runs: dict[str, list[Path]] | None) -> dict:
    """Compare, judge, and write `verify.json` and the page; returns the result with a "summary" for people.

    Args:
        told: of `smoke`.
        runs: of `train`.
    """
    from .comparison_page import summary, write_page

    facts = {"smoke": told} | (compare(work, runs) if runs else {})
    verdict, reasons = comparison.judge(facts)
    logged = facts.pop("logged", {})
    result = {
        "status": "done",
        "demo": work.demo,
        "verdict": verdict,
        "reasons": reasons,
        **({} if verdict == "SAME" else {"exit_code": 8}),
        "steps": work.steps,
        "arms": {role: {"arm": arm.name, "python": arm.python} for role, arm in work.arms.items()},
        **facts,
        "runs": {role: list(map(str, folders)) for role, folders in (runs or {}).items()},
        "report": str(work.folder / PAGE),
    }
    result = finite(result)
    write_whole(work.folder / RESULT, json.dumps(result, indent=1))
    write_page(work.folder / PAGE, result, logged)
    return result | {"summary": summary(result)}
