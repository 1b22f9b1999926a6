"""A model in training answers prompts, and the training does not notice."""

import json
import shutil
import subprocess
import sys

import pytest
import tiny
import torch

from conftest import ASSETS, SAMPLES, ask, talk
from gemma_trainer import callbacks, checkpoints, eval_prompts
from gemma_trainer.answer_checks import CHECKS, Answer, read_checks
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import DataError, Interrupted, RowError
from gemma_trainer.eval_prompts import Prompt, read_prompts
from gemma_trainer.generation import Question, generate, prompts_of
from gemma_trainer.goals import Goal, lower_is_better
from gemma_trainer.rows import read_row
from gemma_trainer.watching import Asking, WatchAnswers

ROWS = [talk("hi", "hello there"), talk("what is it", "a house"), talk("a b c d", "e f"), talk("x", "y z")] * 2


def prompt(row, name="one", **checks):
    question = Question.of(read_row(row, name))
    return Prompt(name, question, read_checks(checks, question.expected))


def watch(trainer, prompts, every=1, tokens=6, **options):
    kept = []
    asking = Asking(every, tokens, options.pop("temperature", 0.0))
    watcher = WatchAnswers(trainer, trainer._eval_collator, prompts, asking, kept.append, **options)
    trainer.add_callback(watcher)
    return watcher, kept


def logged(trainer, prefix=""):
    return [entry for entry in trainer.state.log_history if any(key.startswith(prefix) for key in entry)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_training_does_not_notice(make_trainer, media, checkpointing, temperature):
    prompts = [prompt(talk("hi")), prompt(ask(media, "red.png"), "two"), prompt(ask(media, "one.wav"), "three")]
    rows = [*ROWS, ask(media, "blue.jpg"), ask(media, "short.flac")]
    found, configs = [], []
    for asked in (False, True):
        options = dict(dropout=0.2, max_steps=6, epochs=2, checkpointing=checkpointing, eval_steps=3)
        trainer = make_trainer(rows, ROWS[:2], targets="language,vision,audio", **options)
        if asked:
            _, kept = watch(trainer, prompts, temperature=temperature)
        trainer.train()
        configs.append((trainer.model.generation_config.to_dict(), trainer.model.config.to_dict()))
        losses = [(entry["loss"], entry["grad_norm"]) for entry in logged(trainer, "grad_norm")]
        evaluations = [entry["eval_loss"] for entry in logged(trainer, "eval_loss")]
        found.append((losses, evaluations, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))
    assert found[0][:2] == found[1][:2] and len(found[0][0]) == 6
    assert all(torch.equal(found[0][2][name], value) for name, value in found[1][2].items())
    assert [entry["step"] for entry in kept] == [0, 1, 2, 3, 4, 5, 6] and len(kept[0]["answers"]) == 3
    assert trainer.processing_class.tokenizer.padding_side == "left"  # as it was made
    assert configs[0] == configs[1]


def test_module_modes_stay_as_they_were(make_trainer):
    """Some modules may be in evaluation mode on purpose."""
    trainer = make_trainer(ROWS)
    trainer.train()
    trainer.model.train()
    frozen = next(module for name, module in trainer.model.named_modules() if name.endswith("vision_tower"))
    frozen.eval()
    before = [module.training for module in trainer.model.modules()]
    watcher, _ = watch(trainer, [prompt(talk("hi"))])
    watcher.ask(trainer.state)
    assert [module.training for module in trainer.model.modules()] == before


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified", "gemma3", "gemma3n", "gemma3_text"])
def test_prompts_answered_together_are_answered_as_alone(name):
    processor = tiny.make_processor(name)
    model, collator = tiny.make_model(name, processor), MultimodalCollator(processor, 512)
    rows = [talk("hi"), talk("a rather longer question than the others are, of many words", "yes")]
    if "image" in tiny.MODALITIES[name]:
        rows.append({**talk("what is it?"), "image": str(SAMPLES / "images" / "train-red-0.png")})
    if "audio" in tiny.MODALITIES[name]:
        audio = str(next((SAMPLES / "audio").iterdir()))
        rows.append({**talk("what is it?", "so", "and this?"), "audio": audio})
    questions = [Question.of(read_row(row)) for row in rows]
    together = generate(model, collator, prompts_of(collator, questions), 8)
    alone = [generate(model, collator, prompts_of(collator, [question]), 8)[0] for question in questions]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


@pytest.mark.parametrize(("row", "options", "thinking"), [
    (talk("hi"), {}, False), (talk("hi", "so", "and?"), {"thinking": "on"}, True), (talk("hi", "hello"), {}, False),
    ({"messages": [*talk("hi")["messages"], {"role": "assistant", "content": "yes", "reasoning": "so"}]},
     {}, False),  # which the template leaves out
])  # fmt: skip
def test_the_prompt_is_the_templates_own(processor, row, options, thinking):
    collator = MultimodalCollator(processor, 512, **options)
    ids = prompts_of(collator, [Question.of(read_row(row))])["input_ids"][0].tolist()
    asked = [m for i, m in enumerate(row["messages"]) if i < len(row["messages"]) - 1 or m["role"] == "user"]
    text = processor.tokenizer.apply_chat_template(
        asked, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True,
        enable_thinking=thinking,
    )  # fmt: skip
    assert ids == processor.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("stop", ["<turn|>", "<|tool_response>", "<eos>"])
def test_an_answer_ends_with_the_token_that_ends_it_in_use(processor, model, stop):
    collator = MultimodalCollator(processor, 512)
    says = processor.tokenizer("red", add_special_tokens=False)["input_ids"]
    script = [*says, processor.tokenizer.convert_tokens_to_ids(stop), *says]

    class Scripted:
        dtype, device = model.dtype, model.device

        def generate(self, input_ids, generation_config, **more):
            made, at = [], input_ids.shape[1]
            for token in script[: generation_config.max_new_tokens]:
                made.append(token)
                if token in generation_config.eos_token_id:
                    break
            return torch.tensor([[0] * at + made])

    prompts = prompts_of(collator, [Question.of(read_row(talk("hi")))])
    whole, cut = (generate(Scripted(), collator, prompts, count)[0] for count in (50, len(says)))
    assert (whole.text, whole.stopped, whole.tokens) == ("red", True, len(says))
    assert (cut.text, cut.stopped) == ("red", False)


def test_checks_and_failures_are_logged_and_nothing_is_fatal(make_trainer, media, capfd):
    prompts = [prompt(talk("hi"), "plain", stopped=False), prompt(talk("x", "y"), "wer", max_wer=0.2),
               prompt(ask(media, "page.jpg"), "broken"), prompt(talk("x"), "json", json=True)]  # fmt: skip
    trainer = make_trainer(ROWS, max_steps=2)
    watcher, kept = watch(trainer, prompts, every=2, log_answers=True)
    trainer.train()
    first, last = logged(trainer, "gen/")
    assert first["step"] == 0 and last["step"] == 2 and last["gen/failed"] == 1
    assert last["gen/pass_rate"] == 0.25 and last["gen/json"] == 0.0 and last["gen/max_wer"] == 0.0
    assert last["gen/wer"] > 0 and 0 < last["gen/share"] <= 1 and last["gen/seconds"] > 0
    assert set(last) >= {"gen/answer/plain", "gen/answer/json"}
    assert [one["prompt"] for one in kept[1]["answers"]] == ["plain", "wer", "broken", "json"]
    assert "page.jpg" not in json.dumps(kept[1]["answers"][0]) and "error" in kept[1]["answers"][2]
    told = capfd.readouterr().err
    assert told.count("1 of 4 prompts could not be answered. First: broken: ") == 1


def test_a_check_that_cannot_cope_with_an_answer_ends_no_training(make_trainer, monkeypatch):
    trainer = make_trainer(ROWS, max_steps=1)
    _, kept = watch(trainer, [prompt(talk("hi"), "one", stopped=False, regex="x")], every=9)
    monkeypatch.setitem(CHECKS, "regex", lambda *given: 1 / 0)
    trainer.train()
    assert kept[0]["answers"][0]["missed"] == ["regex"]
    monkeypatch.undo()
    slow = read_checks({"regex": "^(a|a)*$", "stopped": False}, None)[0]
    with pytest.raises(TimeoutError):
        slow.passes(Answer("a" * 40 + "b", 1, True))


def test_a_batch_that_takes_too_much_memory_is_halved(make_trainer, monkeypatch):
    trainer, sizes = make_trainer(ROWS, max_steps=1), []
    prompts = [prompt(talk("hi"), str(number), stopped=False) for number in range(8)]
    generating = trainer.model.generate

    def generate(**inputs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return generating(**inputs)

    monkeypatch.setattr(trainer.model, "generate", generate)
    _, kept = watch(trainer, prompts, every=5)
    trainer.train()
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert all(one["passed"] for one in kept[0]["answers"])


def test_a_signal_ends_the_asking_and_the_evaluation(make_trainer):
    """Whoever is preempted has half a minute to save."""
    trainer, made = make_trainer(ROWS, ROWS, max_steps=2, eval_steps=1), []
    watcher, kept = watch(trainer, [prompt(talk("hi"), "one", stopped=False)], tokens=200)

    def stopping():
        made.append(1)
        return len(made) > 5

    trainer.stopping = stopping
    watcher.ask(trainer.state)
    assert kept == [] and len(made) < 12
    trainer.stop = callbacks.StopOnSignal()
    trainer.stop.exit_code = 143
    with pytest.raises(Interrupted):  # before the first step nothing is saved
        watcher.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer.state.global_step, trainer.control.should_save = 2, False
    watcher.on_step_end(trainer.args, trainer.state, trainer.control)
    assert trainer.control.should_save and trainer.control.should_training_stop  # of this step, not of the next
    assert trainer.evaluate() == {} and logged(trainer, "eval_") == []
    trainer.stopping = lambda: False
    watcher.ask(trainer.state)
    assert len(kept) == 1 and trainer.evaluate()["eval_loss"] > 0


def test_what_a_signal_kept_from_being_measured_is_measured_when_the_run_goes_on(make_trainer, tmp_path):
    """The answers and the evaluation of step 2, in whose midst the signal came."""

    def run(resume=None, stopped_at=None):
        options = dict(max_steps=4, epochs=2, eval_steps=2, save_steps=2)
        trainer = make_trainer(ROWS, ROWS[:2], extra=[callbacks.Progress()], **options)
        trainer.args.save_total_limit = None
        trainer.stop = callbacks.StopOnSignal()
        _, kept = watch(trainer, [prompt(talk("hi"), "one")], every=2)
        trainer.stopping = lambda: trainer.state.global_step == stopped_at
        trainer.train(resume_from_checkpoint=resume)
        evaluations = [(e["step"], e["eval_loss"]) for e in logged(trainer, "eval_loss")]
        return trainer, [(entry["step"], entry["answers"]) for entry in kept], evaluations

    _, answers, evaluations = run()
    shutil.rmtree(tmp_path / "run")
    stopped, some, _ = run(stopped_at=2)
    assert stopped.state.global_step == 2 and [step for step, _ in some] == [0]
    _, others, all_evaluations = run(resume=str(tmp_path / "run" / "checkpoint-2"))
    assert some + others == answers and all_evaluations == evaluations == sorted(evaluations) and len(evaluations) == 2


def test_a_run_ends_when_its_minutes_are_over_and_tells_how_far_it_is(make_trainer):
    told = []
    state = callbacks.RunState(lambda **facts: told.append(facts))
    state.SECONDS = 0.0
    ender = callbacks.StopAfter(0.0005, callbacks.time.monotonic() - 1)
    trainer = make_trainer(ROWS, max_steps=8, epochs=3, extra=[state])
    trainer.train()
    assert [facts["step"] for facts in told] == list(range(9)) and told[-1]["total_steps"] == 8
    assert told[0]["eta_s"] is None and told[-1]["eta_s"] == 0 and told[4]["metrics"]["loss"] > 0
    trainer = make_trainer(ROWS, max_steps=8, epochs=3, extra=[ender])
    trainer.train()
    assert trainer.state.global_step == 1 and ender.why == "0.0005 minutes have passed at step 1 (--max-minutes)"
    assert checkpoints.step_of(checkpoints.checkpoints(trainer.args.output_dir)[0]) == 1


def test_a_goal_that_is_met_ends_the_run_and_the_best_step_is_kept(make_trainer, tmp_path):
    trainer = make_trainer(ROWS, max_steps=8, epochs=3, save_steps=3)
    values = iter([0.0, 0.1, 0.6, 0.3, 0.9, 0.2])

    class Figures(callbacks.transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.log_plain({"gen/pass_rate": next(values)})

    goal = callbacks.StopWhen(trainer, Goal.read("gen/pass_rate >= 0.9"))
    for callback in (Figures(), goal, callbacks.KeepBest(trainer, "gen/pass_rate")):
        trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 5 and goal.why == "gen/pass_rate is 0.9 at step 5 (--stop-when)"
    assert trainer.kept["best"] == [0.9, 5] and trainer.best_step == 5
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-5",
    }
    again = make_trainer(ROWS, max_steps=8, epochs=3, save_steps=3)  # killed before it could say that it was done
    same = callbacks.StopWhen(again, Goal.read("gen/pass_rate >= 0.9"))
    again.add_callback(same)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert again.state.global_step == 5 and same.why == goal.why
    on = make_trainer(ROWS, max_steps=8, epochs=3, save_steps=3)
    on.add_callback(callbacks.StopWhen(on, Goal.read("gen/pass_rate >= 0.95")))
    on.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert on.state.global_step == 8
    losses = [entry["step"] for entry in logged(trainer, "grad_norm")]
    assert losses == [1, 2, 3, 4, 5]  # what is logged in between takes none away


@pytest.mark.parametrize("text", ["gen/pass_rate", "x>=", "x>=many", "x>=nan", "x == 3", ">=3"])
def test_goals_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError):
        Goal.read(text)
    low = ["loss", "eval_loss", "gen/wer", "gen/cer", "gen/failed", "eval_entropy"]
    high = ["gen/pass_rate", "gen/max_wer", "eval_rewards/accuracies", "eval_mean_token_accuracy", "gen/answers"]
    assert all(map(lower_is_better, low)) and not any(map(lower_is_better, high))
    assert Goal.read("eval_loss<0.5").met(0.4) and not Goal.read("eval_loss<0.5").met(0.5)


# ---- the prompts file


def test_prompts_of_every_format(tmp_path):
    lines = [
        {"id": 7, "messages": [{"role": "user", "content": "a"}], "checks": {"json": True}},
        {"prompt": "b"},
        {"prompt": "c", "completion": "d"},
        {"instruction": "e", "output": "f", "checks": '{"max_tokens": 5}'},
        {"messages": [{"role": "user", "content": "g"}], "checks": {"json": None, "regex": "x"}},
        {"prompt": "h", "chosen": "i", "rejected": "j"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_prompts(str(tmp_path / "prompts.jsonl"))
    assert [one.name for one in found] == ["7", *(f"prompts.jsonl:{line}" for line in (2, 3, 4, 5, 6))]
    assert [one.question.expected for one in found] == [None, None, "d", "f", None, "i"]
    assert [[check.name for check in one.checks] for one in found] == [
        ["stopped", "json"], ["stopped"], ["stopped", "normalized"], ["stopped", "max_tokens"], ["stopped", "regex"],
        ["stopped", "normalized"],
    ]  # fmt: skip


@pytest.mark.parametrize(("line", "told"), [
    ({"prompt": "a", "checks": {"nope": 1}}, "prompts.jsonl:2: unknown check 'nope'"),
    ({"prompt": "a", "checks": "{"}, "prompts.jsonl:2: checks are a text that is not JSON"),
    ({"text": "raw"}, "prompts.jsonl:2: a text without turns"), ({"prompt": "a", "id": "one"}, "is that of another"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls":
     [{"function": {"name": "f", "arguments": {}}}]}]}, "its answer is a tool call"),
])  # fmt: skip
def test_prompts_that_cannot_be_asked_are_named(tmp_path, line, told):
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, [{"prompt": "x", "id": "one"}, line])))
    with pytest.raises(RowError, match=told):
        read_prompts(str(tmp_path / "prompts.jsonl"))


def test_too_many_prompts_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_prompts, "MAX_PROMPTS", 1)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="2 prompts, at most 1"):
        read_prompts(str(tmp_path / "p.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        read_prompts(str(tmp_path / "absent.jsonl"))


def test_two_ranks_share_the_prompts_and_log_what_one_does(tmp_path, processor, model):
    """Two processes with gloo: each answers half, and the figures are those of all."""
    lines = [{"id": n, "prompt": "hi " * n, "checks": {"stopped": False, "max_characters": 5 * n}} for n in range(1, 6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--max-steps", "1", "--eval-prompts-max-tokens", "3", "--eval-steps", "100", "--num-workers", "0"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
    files = ["--eval-prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "run")]
    command = [*launch, str(ASSETS / "sft_train.py"), *flags, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = [entry for entry in entries if entry["step"] == 0]  # the adapter changes nothing yet
    answers = next(entry["answers"] for entry in first if "answers" in entry)
    collator = MultimodalCollator(processor)
    expected = []
    for one in read_prompts(str(tmp_path / "prompts.jsonl")):
        said = generate(model, collator, prompts_of(collator, [one.question]), 3)[0]
        expected.append((one.name, said.text, len(said.text) <= 5 * int(one.name)))
    assert [(one["prompt"], one["answer"], one["passed"]) for one in answers] == expected
    rates = [entry["gen/pass_rate"] for entry in first if "gen/pass_rate" in entry]
    assert rates == [sum(passed for *_, passed in expected) / 5] and 0 < rates[0] < 1
