"""Flags, config files, exit codes and where output goes."""

import json
from dataclasses import dataclass

import pytest

from gemma_trainer import cli
from gemma_trainer.errors import DataError, Diverged, Interrupted, UsageError
from gemma_trainer.flags import CollatorFlags, TrainingFlags


@dataclass(frozen=True)
class Config(CollatorFlags, TrainingFlags):
    pass


def parse(*argv):
    return cli.parse(Config, "what it does", "an example", list(argv))


def test_flags_become_a_frozen_config_with_the_documented_defaults():
    config = parse("--dataset", "a.jsonl", "b", "--max-len", "512", "--full", "--no-train-reasoning")
    assert (config.dataset, config.max_len, config.full, config.train_reasoning) == (("a.jsonl", "b"), 512, True, False)
    assert (parse().max_len, parse().lora_r, parse().lora_alpha, parse().max_bad_media) == (2048, 16, 32, 0.05)
    with pytest.raises(AttributeError):
        config.max_len = 1


@pytest.mark.parametrize(("argv", "told"), [
    (["--max-len", "abc"], "--max-len: invalid int value: 'abc'"), (["--max-length", "5"], "unrecognized arguments"),
    (["--quantize", "8bit"], "'auto', '4bit', 'none'"), (["--max-len", "0"], "--max-len must be more than 0"),
    (["--seed", "-1"], "--seed must lie between"), (["--lr", "inf"], "--lr must be more than 0"),
    (["--max-steps", "0"], "--max-steps must be more than 0"),
    (["--test-size", "1.5"], "--test-size must lie between 0 and 0.99"), (["--lr", "-1"], "--lr must be more than 0"),
    (["--config", "absent.json"], "--config absent.json: No such file"), (["--dataset"], "expected at least one"),
])  # fmt: skip
def test_wrong_flags(argv, told):
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert told in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [
    ("c.json", '{"max-len": 77, "dataset": ["a", "b"], "full": true, "train_reasoning": false, "model": null}'),
    ("c.toml", 'max_len = 77\ndataset = ["a", "b"]\nfull = true\ntrain-reasoning = false\n'),
    ("c.yaml", "max_len: 77\ndataset: [a, b]\nfull: true\ntrain_reasoning: false\n"),
])  # fmt: skip
def test_config_files_and_that_the_command_line_wins(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = parse("--config", str(tmp_path / name), "--lr", "0.5")
    assert (config.max_len, config.dataset, config.full, config.train_reasoning) == (77, ("a", "b"), True, False)
    assert parse("--config", str(tmp_path / name), "--max-len", "9").max_len == 9
    again = parse("--config", str(tmp_path / name), "--dataset", "c", "--dataset", "d", "--train-reasoning")
    assert again.dataset == ("c", "d") and again.train_reasoning is True


def test_facts_in_a_config_file_are_key_and_value(tmp_path):
    (tmp_path / "c.yaml").write_text("metadata: {owner: me, --version: 3}\n")
    assert parse("--config", str(tmp_path / "c.yaml")).metadata == ("owner=me", "--version=3")
    (tmp_path / "c.yaml").write_text("metadata: {}\n")
    assert parse("--config", str(tmp_path / "c.yaml")).metadata == ()
    for content, told in (("5: x", "unknown key 5"), ("eval_dataset: {a: 1}", "must not be an object")):
        (tmp_path / "c.yaml").write_text(content)
        with pytest.raises(UsageError, match=told):
            parse("--config", str(tmp_path / "c.yaml"))


def test_a_signal_is_swallowed_by_no_one():
    with pytest.raises(Interrupted):
        try:
            raise Interrupted("terminated", 143)
        except Exception:
            pass


def test_yamls_words_on_and_off_are_no_booleans_for_a_choice(tmp_path):
    (tmp_path / "c.yaml").write_text("thinking: on\ngradient_checkpointing: off\n")
    config = parse("--config", str(tmp_path / "c.yaml"))
    assert (config.thinking, config.gradient_checkpointing) == ("on", "off")
    (tmp_path / "c.json").write_text('{"lr": false}')
    with pytest.raises(UsageError, match="--lr: invalid float value: 'off'"):
        parse("--config", str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("text", "told"), [("{oops", "cannot be parsed"), ('{"colour": 1}', "unknown key 'colour'"), ("[1]", "object")]
)
def test_broken_config_files(tmp_path, text, told):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match=told):
        parse("--config", str(tmp_path / "c.json"))


def run(work, *argv, capsys):
    code = cli.run_script(work, Config, "d", "e", list(argv))
    return code, capsys.readouterr()


@pytest.mark.parametrize(("error", "code"), [
    (DataError("rows.jsonl:3: bad"), 3), (Diverged("nan"), 7), (Interrupted("stopped", 143), 143),
    (KeyboardInterrupt(), 130), (MemoryError(), 6), (RuntimeError("CUDA out of memory. Tried to allocate"), 6),
    (ModuleNotFoundError("No module named 'x'"), 4), (OSError(28, "No space left on device"), 4),
    (RuntimeError("PytorchStreamWriter failed writing file data/1"), 4),
    (ZeroDivisionError("secret"), 1),
])  # fmt: skip
def test_errors_become_exit_codes_and_short_messages(error, code, capsys):
    def work(config):
        print("chatter")
        raise error

    found, shown = run(work, capsys=capsys)
    assert found == code and shown.out == "" and "Traceback" not in shown.err
    told = shown.err.split("error: ")[1]
    assert len(told.splitlines()) <= 2 and "secret" not in told
    found, shown = run(work, "--json", capsys=capsys)
    assert json.loads(shown.out)["exit_code"] == code


def test_json_and_debug_may_stand_in_the_config_file(tmp_path, capsys):
    (tmp_path / "c.json").write_text('{"json": true, "debug": true}')

    def work(config):
        raise DataError("rows.jsonl:3: bad")

    code, shown = run(work, "--config", str(tmp_path / "c.json"), capsys=capsys)
    assert json.loads(shown.out)["exit_code"] == code == 3 and "Traceback" in shown.err


def test_the_result_alone_goes_to_stdout(capsys):
    def work(config):
        print("chatter")
        return {"status": "done", "summary": "in words"}

    assert run(work, capsys=capsys)[1].out == "in words\n"
    assert json.loads(run(work, "--json", capsys=capsys)[1].out) == {"status": "done"}
