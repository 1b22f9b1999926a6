"""distill_dataset.py against a server that misbehaves: what is tried again, what ends the run, and what is kept."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from bad_server import BadServer, Say, distill

from conftest import ASSETS
from gemma_trainer import server
from gemma_trainer.sources import open_rows


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server, "BACKOFF", 0.01)
    monkeypatch.setattr(server, "GRACE", 1.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def prompts(folder, *texts):
    path = folder / "prompts.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def words(count):
    """Prompts that are not alike."""
    return [f"{name}: tell me about {name * 3} number {at}" for at, name in enumerate("abcdefghijklmnopqrst"[:count])]


def answers_in(path):
    return [row["messages"][-1]["content"] for row in open_rows([str(path)])]


FIRST_TIME = {
    "429 in seconds": Say(status=429, error={"message": "slow down"}, headers={"Retry-After": "0.2"}),
    "429 by date": Say(status=429, headers={"Retry-After": format_datetime(datetime.now(UTC), usegmt=True)}),
    "500": Say(status=500, error="boom"),
    "too slow": Say("late", wait=0.9),
    "cut in the middle": Say("cut off", cut=True),
    "wrong JSON": Say(raw=b'{"choices": [{"message": '),
    "an HTML page": Say(raw=b"<html><h1>502 Bad Gateway</h1></html>", headers={"Content-Type": "text/html"}),
    "no choices": Say(raw=b'{"choices": []}'),
    "no message": Say(raw=b'{"choices": [{"message": null}]}'),
    "a list": Say(raw=b"[]"),
    "an error with status 200": Say(error={"code": 503, "message": "upstream"}),
}  # fmt: skip


def test_passing_faults_are_tried_again_and_the_rows_are_in_the_order_of_the_prompts(tmp_path, capsys):
    faults = dict(zip(words(len(FIRST_TIME)), FIRST_TIME.values(), strict=True))

    def answer(heard):
        return faults[heard.asked] if heard.number == 0 else Say(f"re: {heard.asked} ✓ \u4f60", chunked=True)

    path = prompts(tmp_path, *faults)
    with BadServer(answer) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--timeout", 0.5)
        code, result, told = distill(capsys, *arguments)
    assert code == 0, told
    assert answers_in(tmp_path / "rows.jsonl") == [f"re: {text} ✓ \u4f60" for text in faults]
    assert result["requests"] == {"answered": len(faults), "failed": 0, "not_asked": 0, "other": 0}
    assert len(bad.heard) == 2 * len(faults)
    limited = [heard.at for heard in bad.heard if heard.asked == words(1)[0]]
    assert limited[1] - limited[0] >= 0.2  # what Retry-After asked for


def test_retry_after_holds_all_requests_back(tmp_path, capsys):
    def answer(heard):
        busy = heard.asked == words(1)[0] and heard.number == 0
        return Say(status=429, headers={"Retry-After": "0.5"}) if busy else Say("yes", wait=0.05)

    with BadServer(answer) as bad:
        arguments = ("--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--concurrency", 2)
        code, _, _ = distill(capsys, "answers", prompts(tmp_path, *words(12)), *arguments)
    assert code == 0
    gaps = [two.at - one.at for one, two in zip(bad.heard, bad.heard[1:], strict=False)]
    assert max(gaps) >= 0.35 and len(bad.heard) == 13


def test_what_will_never_be_answered_fails_its_row_alone_and_is_asked_again_on_resume(tmp_path, capsys):
    long, odd, *others = words(4)
    healed = []

    def answer(heard):
        if heard.asked == long:
            said = "This model's maximum context length is 8192 tokens, however you asked for more"
            return Say(status=400, error={"message": said, "code": "context_length_exceeded"})
        if heard.asked == odd and not healed:
            return Say(status=400, error={"message": f"cannot parse: {odd}"})
        return "yes"

    output = tmp_path / "rows.jsonl"
    with BadServer(answer) as bad:
        arguments = ("answers", prompts(tmp_path, long, odd, *others), "--teacher", bad.url, "--output", output)
        code, result, told = distill(capsys, *arguments)
        assert code == 0 and result["reasons"] == {"too_long_for_teacher": 1, "http_400": 1}
        assert odd not in told and odd not in (tmp_path / "rows.rejected.jsonl").read_text()  # no text is echoed
        assert len(bad.heard) == 4  # neither was tried again
        healed.append(True)
        code, result, _ = distill(capsys, *arguments, "--resume")
    assert code == 0 and result["rows"] == 3 and result["reasons"] == {"too_long_for_teacher": 1}
    assert [heard.asked for heard in bad.heard[4:]] in ([long, odd], [odd, long])  # nothing was asked twice


@pytest.mark.parametrize(
    "said, words_told",
    [
        (Say(status=401, error={"message": "Incorrect API key provided: sk-secret-1"}), "refuses the key (HTTP 401)"),
        (Say(status=404, error="model not found"), "no model teacher-1"),
        (Say(status=308, headers={"Location": "https://x"}), "it has moved (HTTP 308)"),
        (Say(status=429, error={"code": "insufficient_quota", "message": "pay"}), "nothing left to spend"),
    ],
)
def test_what_holds_for_all_requests_ends_the_run(tmp_path, capsys, monkeypatch, said, words_told):
    monkeypatch.setenv("MY_KEY", "sk-secret-1")
    output = tmp_path / "rows.jsonl"
    with BadServer(lambda heard: said) as bad:
        arguments = ("--teacher", bad.url, "--output", output, "--api-key-env", "MY_KEY", "--concurrency", 1)
        code, result, told = distill(capsys, "answers", prompts(tmp_path, *words(9)), *arguments)
    assert code == 5 and words_told in result["error"]["message"] and len(bad.heard) == 1
    assert not (tmp_path / "rows.journal").exists()  # there is nothing to go on with
    assert bad.heard[0].headers["Authorization"] == "Bearer sk-secret-1"
    written = told + json.dumps(result) + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "sk-secret" not in written and not output.exists()


def test_a_server_that_is_gone_ends_the_run_and_what_came_is_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(server, "FAILED_IN_A_ROW", 4)
    down = threading.Event()

    def answer(heard):
        if len(bad.heard) > 5:
            down.set()
        return Say(status=503, error="gone") if down.is_set() else "yes"

    output, path = tmp_path / "rows.jsonl", prompts(tmp_path, *words(20))
    with BadServer(answer) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", output, "--retries", 1, "--concurrency", 1)
        code, result, _ = distill(capsys, *arguments)
        assert code == 5 and "4 requests in a row failed" in result["error"]["message"]
        assert "5 answers are kept" in result["error"]["message"] and not output.exists()
        assert len(bad.heard) == 5 + 4 * 2
        answer_again = len(bad.heard)
        bad.answer = lambda heard: "yes"
        code, result, _ = distill(capsys, *arguments, "--resume")
    assert code == 0 and result["rows"] == 20 and len(bad.heard) - answer_again == 15


def test_a_few_prompts_suffice_to_tell_that_a_server_is_gone(tmp_path, capsys):
    with BadServer(lambda heard: Say(status=502, raw=b"<html>")) as bad:
        arguments = ("--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--retries", 1)
        code, result, _ = distill(capsys, "answers", prompts(tmp_path, *words(3)), *arguments)
    assert code == 5 and "answered none of 3 requests: HTTP 502" in result["error"]["message"]


def test_a_judge_that_is_gone_ends_the_run_and_the_answers_are_kept(tmp_path, capsys):
    def answer(heard):
        return Say(status=503, error="busy") if "Judge the last answer" in heard.asked else "an answer"

    with BadServer(answer) as bad:
        arguments = ("--teacher", bad.url, "--judge", bad.url, "--output", tmp_path / "rows.jsonl", "--retries", 0)
        code, result, _ = distill(capsys, "answers", prompts(tmp_path, *words(3)), *arguments)
    told = result["error"]["message"]
    assert code == 5 and "answered none of 3 requests: HTTP 503" in told and "3 answers are kept" in told


def test_a_limit_that_is_reached_before_there_is_anything_is_told(tmp_path, capsys):
    prices = ("--price-in", 1000, "--price-out", 1000, "--max-new-tokens", 100, "--concurrency", 1)
    path = prompts(tmp_path, "hello there")
    with BadServer(lambda heard: "yes") as bad:
        arguments = ("--teacher", bad.url, *prices, "--output", tmp_path / "rows.jsonl")
        code, result, _ = distill(capsys, "instruct", path, *arguments, "--max-cost", 0.01)
        assert code == 3 and "--max-cost is reached before an instruction is written" in result["error"]["message"]
        judged = (*arguments, "--judge", bad.url, "--max-cost", 0.15)  # a judge's prompt is longer
        code, result, _ = distill(capsys, "answers", path, *judged)
        assert code == 3 and "--max-cost is reached before an answer is judged" in result["error"]["message"]
        assert len(bad.heard) == 1
    arguments = ("--teacher", bad.url, "--output", tmp_path / "other.jsonl", "--max-minutes", 1e-5)
    code, result, _ = distill(capsys, "answers", path, *arguments)  # where nothing listens any more
    assert code == 5 and "within --max-minutes" in result["error"]["message"]


@pytest.mark.parametrize("key", ["sk-\u201cx\u201d", "sk\nx"])
def test_a_key_that_is_none_is_told_without_it(tmp_path, capsys, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    arguments = ("--teacher", "http://x", "--output", tmp_path / "rows.jsonl")
    code, result, told = distill(capsys, "answers", prompts(tmp_path, "hello there"), *arguments)
    assert code == 2 and "OPENAI_API_KEY is no key" in result["error"]["message"] and key not in told


def test_a_server_that_is_not_up_yet_is_waited_for_and_none_is_told(tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("--teacher", f"http://me:pass@127.0.0.1:{port}", "--output", tmp_path / "rows.jsonl")
    path = prompts(tmp_path, "hello there")
    code, result, _ = distill(capsys, "answers", path, *arguments, "--retries", 1)
    assert code == 5 and "cannot be reached" in result["error"]["message"] and "pass" not in result["error"]["message"]

    bad = BadServer.__new__(BadServer)

    def later():
        time.sleep(0.15)
        bad.__init__(lambda heard: "hello", port=port)
        bad.__enter__()

    thread = threading.Thread(target=later)
    thread.start()
    code, result, _ = distill(capsys, "answers", path, *arguments, "--retries", 8)
    thread.join()
    bad.__exit__()
    assert code == 0 and result["rows"] == 1


def test_requests_are_open_at_a_time_and_keep_to_the_rate(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    with BadServer(lambda heard: "yes", wait=0.2) as bad:
        start = time.monotonic()
        code, _, _ = distill(
            capsys, "answers", prompts(tmp_path, *words(20)), "--teacher", bad.url, "--output", output,
            "--concurrency", 10,
        )  # fmt: skip
        assert code == 0 and bad.most_open == 10 and time.monotonic() - start < 20 * 0.2 / 2
    with BadServer(lambda heard: "yes") as bad:
        code, _, _ = distill(
            capsys, "answers", prompts(tmp_path, *words(10)), "--teacher", bad.url, "--output", output, "--overwrite",
            "--requests-per-minute", 1200,
        )  # fmt: skip
    gaps = [two.at - one.at for one, two in zip(bad.heard, bad.heard[1:], strict=False)]
    assert code == 0 and sum(gaps) >= 9 * 0.05 * 0.95 and sum(gaps) < 2


def test_tokens_per_minute_spread_by_what_answers_took(tmp_path, capsys):
    with BadServer(lambda heard: "yes") as bad:
        start = time.monotonic()
        code, _, _ = distill(
            capsys, "answers", prompts(tmp_path, *words(8)), "--teacher", bad.url, "--output", tmp_path / "rows.jsonl",
            "--tokens-per-minute", 24_000, "--max-new-tokens", 40, "--concurrency", 1,
        )  # fmt: skip
    taken = time.monotonic() - start
    assert code == 0 and 0.2 < taken < 4  # some 25 tokens each, at 400 a second, the first 50


def test_parts_that_a_server_does_not_take_are_left_out(tmp_path, capsys):
    def answer(heard):
        if "max_tokens" in heard.body:
            return Say(
                status=400, error={"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'."}
            )
        if "seed" in heard.body:
            return Say(status=422, error={"message": "seed: extra fields not permitted"})
        return "yes"

    with BadServer(answer) as bad:
        arguments = ("--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--concurrency", 4)
        code, result, told = distill(capsys, "answers", prompts(tmp_path, *words(8)), *arguments)
    assert code == 0 and result["rows"] == 8 and 8 + 2 <= len(bad.heard) <= 8 + 2 * 4
    assert told.count("does not take max_tokens") == 1 and bad.heard[-1].body["max_completion_tokens"] == 1024


def test_a_budget_is_kept_and_told(tmp_path, capsys):
    output, path = tmp_path / "rows.jsonl", prompts(tmp_path, *words(10))
    prices = ("--price-in", 1000, "--price-out", 1000, "--max-new-tokens", 100)
    with BadServer(lambda heard: "yes") as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", output, *prices, "--concurrency", 1)
        code, result, told = distill(capsys, *arguments, "--max-cost", 0.2)
        assert code == 0 and result["stopped_by"] == "max_cost" and result["status"] == "stopped"
        assert 0 < result["cost"] <= 0.2 and result["cost"] == pytest.approx(len(bad.heard) * 18 * 1000 / 1e6)
        assert result["requests"]["not_asked"] == 10 - result["rows"] > 0
        rows = result["rows"]
        code, result, _ = distill(capsys, *arguments, "--resume", "--max-cost", 0.2)  # what was spent before counts
        assert result["rows"] == rows == len(bad.heard)
        code, result, _ = distill(capsys, *arguments[:5], tmp_path / "none.jsonl", *prices, "--max-cost", 0.01)
        assert code == 3 and "--max-cost is reached" in result["error"]["message"]
        code, result, _ = distill(capsys, *arguments, "--resume", "--max-cost", 5)
        assert code == 0 and result["rows"] == 10 == len(bad.heard) and result["stopped_by"] is None
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, "--output", output, "--max-cost", 1)
    assert code == 2 and "--price-in" in result["error"]["message"]


def test_a_time_limit_ends_a_wait(tmp_path, capsys):
    def answer(heard):
        return "yes" if heard.asked == words(1)[0] else Say(status=429, headers={"Retry-After": "3600"})

    with BadServer(answer) as bad:
        arguments = (
            "--teacher",
            bad.url,
            "--output",
            tmp_path / "rows.jsonl",
            "--max-minutes",
            0.02,
            "--concurrency",
            1,
        )
        start = time.monotonic()
        code, result, told = distill(capsys, "answers", prompts(tmp_path, *words(3)), *arguments, "--max-minutes", 0.02)
    assert code == 0 and result["stopped_by"] == "max_minutes" and result["rows"] == 1
    assert "asks to wait 3600 s" in told and time.monotonic() - start < 10


def test_a_dry_run_asks_nothing_and_writes_nothing(tmp_path, capsys):
    path = prompts(tmp_path, *words(5))
    with BadServer(lambda heard: "yes") as bad:
        options = ("--dry-run", "--samples", 3, "--price-in", 1, "--price-out", 2, "--max-new-tokens", 100)
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, *options)
    assert code == 0 and result["requests"] == 15 and not bad.heard and list(tmp_path.iterdir()) == [path]
    assert result["max_tokens_out"] == 1500
    assert result["max_cost"] == pytest.approx((result["tokens_in"] + 2 * 1500) / 1e6)
    assert result["request"]["messages"] == [{"role": "user", "content": words(1)[0]}]


def start_run(url, folder, *options):
    command = [sys.executable, str(ASSETS / "distill_dataset.py"), "answers", str(folder / "prompts.txt"), "--teacher"]
    command += [url, "--output", str(folder / "rows.jsonl"), "--concurrency", "2", "--json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def when_heard(bad, count):
    deadline = time.monotonic() + 60
    while len(bad.heard) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(bad.heard) >= count


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_goes_on_and_ends_as_an_unbroken_one(tmp_path, capsys, number, code):
    def answer(heard):
        return f"re: {heard.asked}"

    prompts(tmp_path, *words(20))
    with BadServer(answer, wait=0.05) as bad:
        run = start_run(bad.url, tmp_path)
        when_heard(bad, 8)
        os.kill(run.pid, number)
        out, err = run.communicate(timeout=60)
        assert run.returncode == code, err
        if code > 0:
            told = json.loads(out)["error"]["message"]
            assert "answers are kept in" in told and "--resume" in told
        journal = tmp_path / "rows.journal"
        lines = journal.read_bytes().splitlines()
        assert 6 <= len(lines) - 1 < 20 and not (tmp_path / "rows.jsonl").exists()
        with journal.open("ab") as file:  # as a process leaves it that dies while it writes
            file.write(b'{"key": "abc-0", "te')
        before = len(bad.heard)
        arguments = ("answers", tmp_path / "prompts.txt", "--teacher", bad.url, "--output", tmp_path / "rows.jsonl")
        again, result, told = distill(capsys, *arguments, "--resume")
        assert again == 0, told
        assert len(bad.heard) - before == 20 - (len(lines) - 1)  # what was answered is not asked again
    assert answers_in(tmp_path / "rows.jsonl") == [f"re: {text}" for text in words(20)]
    assert result["tokens"]["in"] == 20 * 11


def test_a_journal_is_neither_lost_nor_mixed(tmp_path, capsys):
    path, output = prompts(tmp_path, *words(3)), tmp_path / "rows.jsonl"
    with BadServer(lambda heard: f"at {heard.body['temperature']}") as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", output)
        assert distill(capsys, *arguments)[0] == 0
        first = output.read_bytes()
        output.unlink()
        code, result, _ = distill(capsys, *arguments)
        assert code == 2 and "--resume goes on" in result["error"]["message"]
        code, result, _ = distill(capsys, *arguments, "--resume", "--temperature", 0.5)
        assert code == 2 and "--temperature was 0.0" in result["error"]["message"]
        code, result, _ = distill(capsys, *arguments, "--resume", "--check", '{"max_characters": 3}')
        assert code == 3 and "3 check_max_characters" in result["error"]["message"] and len(bad.heard) == 3
    code, result, _ = distill(capsys, *arguments, "--resume")  # the server is gone: it is not needed
    assert code == 0 and output.read_bytes() == first
    whole = (tmp_path / "rows.journal").read_text()
    for line in ('{"key": "a", "text": 5}', '{"key": 5, "text": "a"}', '{"key": "a", "text": "b", "tokens_in": "7"}'):
        (tmp_path / "rows.journal").write_text(f"{whole}{line}\n")
        code, result, _ = distill(capsys, *arguments, "--resume")
        assert code == 2 and "rows.journal:5 is no line" in result["error"]["message"]
    (tmp_path / "rows.journal").write_text("not mine\n")
    code, result, _ = distill(capsys, *arguments, "--resume")
    assert code == 2 and "rows.journal:1 is no line" in result["error"]["message"]
    assert (tmp_path / "rows.journal").read_text() == "not mine\n"


def test_a_huge_answer_and_one_that_is_cut_are_no_rows(tmp_path, capsys):
    long, cut, fine = words(3)

    def answer(heard):
        if heard.asked == cut:
            return Say("and so on and", finish="length")
        return "x " * 1_500_000 if heard.asked == long else "fine"

    with BadServer(answer) as bad:
        arguments = ("--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--check", '{"max_characters": 10000}')
        code, result, _ = distill(capsys, "answers", prompts(tmp_path, long, cut, fine), *arguments)
    assert code == 0 and result["dropped"] == {"check_max_characters": 1, "cut": 1} and result["rows"] == 1
