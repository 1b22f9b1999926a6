"""distill_dataset.py: what is asked, what becomes rows and pairs, and that the rows can be trained on."""

import base64
import io
import json

import pytest
from bad_server import BadServer, Say, distill

from conftest import SAMPLES
from gemma_trainer import server
from gemma_trainer.distilled import summary
from gemma_trainer.sources import open_rows


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server, "BACKOFF", 0.01)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return [{key: value for key, value in row.items() if key != "__source__"} for row in open_rows([str(path)])]


def said(text):
    return {"role": "assistant", "content": text}


def user(content):
    return {"role": "user", "content": content}


FORMS = [
    {"prompt": "Name a fruit, please."},
    {"instruction": "Translate this to French", "input": "good morning"},
    {"messages": [{"role": "system", "content": "Be brief."}, user("What is rain?"), said("not the teacher's")]},
    {"prompt": "How many legs has a spider?", "completion": "eight"},
    {"conversations": [{"from": "human", "value": "Sing."}, {"from": "gpt", "value": "La"},
                       {"from": "human", "value": "Louder, and in another language."}]},
    {"prompt": "Which is heavier, lead or feathers?", "chosen": "lead", "rejected": "feathers"},
]  # fmt: skip


def test_every_format_is_asked_without_the_answer_it_brings(tmp_path, capsys):
    path, output = write(tmp_path / "p.jsonl", *FORMS, {"text": "only a text"}, {"a": 1}), tmp_path / "rows.jsonl"
    with BadServer(lambda heard: f"{len(heard.body['messages'])} messages") as bad:
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, "--output", output)
    assert code == 0 and result["rows"] == 6 and result["reasons"] == {"bad_text_row": 1, "unknown_format": 1}
    rows = read(output)
    assert [row["messages"][-2]["content"] for row in rows] == [
        "Name a fruit, please.", "Translate this to French\n\ngood morning", "What is rain?",
        "How many legs has a spider?", "Louder, and in another language.", "Which is heavier, lead or feathers?",
    ]  # fmt: skip
    assert [row["messages"][-1] for row in rows] == [said(f"{count} messages") for count in (1, 1, 2, 1, 3, 1)]
    assert "not the teacher's" not in str([heard.body for heard in bad.heard])


def test_media_reach_the_server_and_the_rows(tmp_path, capsys, media):
    from PIL import Image
    from soundfile import info

    turned = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), "green").save(turned, exif=exif)
    block = {"type": "text", "text": "What is it?"}
    path = write(
        tmp_path / "p.jsonl",
        {"messages": [user([{"type": "image", "image": str(media / "red.png")}, block])]},
        {"messages": [user([{"type": "image", "image": "turned.jpg"}, block])]},
        {"messages": [user([{"type": "audio", "audio": str(media / "short.flac")}, block])]},
        {"messages": [user([{"type": "audio", "audio": str(media / "text.wav")}, block])]},
    )
    output = tmp_path / "deeper" / "rows.jsonl"
    with BadServer(lambda heard: "seen") as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--concurrency", 1)
        code, result, _ = distill(capsys, *arguments, "--output", output)
        assert code == 0 and result["rows"] == 3 and result["reasons"] == {"media_wrong_kind": 1}
    sent = [heard.body["messages"][0]["content"][0] for heard in bad.heard]
    assert sent[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert base64.b64decode(sent[0]["image_url"]["url"].split(",")[1]) == (media / "red.png").read_bytes()
    upright = Image.open(io.BytesIO(base64.b64decode(sent[1]["image_url"]["url"].split(",")[1])))
    assert upright.size == (20, 40)
    assert sent[2]["input_audio"]["format"] == "wav"
    assert info(io.BytesIO(base64.b64decode(sent[2]["input_audio"]["data"]))).frames == 6400
    assert [row["messages"][0]["content"][0] for row in read(output)][1] == {"type": "image", "image": "../turned.jpg"}

    with BadServer(lambda heard: "seen", ollama=True) as bad:
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, "--output", tmp_path / "o.jsonl")
    assert code == 0 and result["rows"] == 2 and result["reasons"] == {"media_wrong_kind": 1, "media_unsupported": 1}
    body = next(heard.body for heard in bad.heard if len(heard.body["messages"][0]["images"][0]) > 0)
    assert body["messages"][0]["content"] == "What is it?" and body["options"]["num_ctx"] == 2048 + 1024
    assert body["stream"] is False and body["truncate"] is False and bad.heard[0].path == "/api/chat"


def test_the_api_is_found_out(tmp_path, capsys):
    path = write(tmp_path / "p.jsonl", {"prompt": "hello there"})
    for ollama, end, expected in [(True, "", "ollama"), (False, "", "openai"), (True, "/v1", "openai")]:
        with BadServer(lambda heard: "hi", ollama=ollama) as bad:
            arguments = ("answers", path, "--teacher", bad.url + end, "--output", tmp_path / "r.jsonl", "--overwrite")
            code, result, _ = distill(capsys, *arguments)
        assert code == 0 and result["teacher"]["api"] == expected
    with BadServer(lambda heard: "hi", models=("a", "b")) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "s.jsonl")
        code, result, _ = distill(capsys, *arguments)
        assert code == 2 and "has 2 models: a, b" in result["error"]["message"]
        assert distill(capsys, *arguments, "--teacher-model", "b")[0] == 0 and bad.heard[0].body["model"] == "b"


THOUGHTS = {
    "a field": Say("four", message={"reasoning": "2 and 2"}),
    "the older field": Say("four", message={"reasoning_content": "2 and 2"}),
    "tags": "<think>\n2 and 2\n</think>\n\nfour",
    "a tag that the prompt opened": "2 and 2</think>four",
    "Gemma's channel": "<|channel>thought\n2 and 2<channel|>four",
}


def test_thoughts_are_told_apart_however_they_come(tmp_path, capsys):
    path = write(tmp_path / "p.jsonl", *({"prompt": f"{name}?"} for name in [*THOUGHTS, "open"]))
    say = THOUGHTS | {"open": "<think>2 and 2 and"}
    with BadServer(lambda heard: say[heard.asked[:-1]]) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl")
        code, result, _ = distill(capsys, *arguments)
        rows = read(tmp_path / "rows.jsonl")
        assert code == 0 and result["reasoned"] == 6 and result["dropped"] == {"empty": 1}
        assert [row["messages"][1] for row in rows] == [said("four") | {"reasoning": "2 and 2"}] * 5
        code, result, _ = distill(capsys, *arguments, "--resume", "--reasoning", "drop")
    assert [row["messages"][1] for row in read(tmp_path / "rows.jsonl")] == [said("four")] * 5 and len(bad.heard) == 6


def test_tool_calls_are_rows_with_their_tools(tmp_path, capsys):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked = [user("Weather in Rome?"), {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]  # fmt: skip
    path = write(tmp_path / "p.jsonl", {"messages": asked[:2], "tools": [tool]}, {"messages": asked, "tools": [tool]})

    def answer(heard):
        return "Sunny." if len(heard.body["messages"]) == 3 else Say(None, message={"tool_calls": [call]})

    with BadServer(answer) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--concurrency", 1)
        assert distill(capsys, *arguments)[0] == 0
    rows = read(tmp_path / "rows.jsonl")
    assert rows[0]["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert rows[0]["tools"] == [tool] == bad.heard[0].body["tools"] and rows[1]["messages"][-1] == said("Sunny.")
    assert bad.heard[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"]}  # fmt: skip


def test_json_answers_are_parsed_mended_checked_and_counted(tmp_path, capsys):
    texts = {
        "clean": '{"name": "Ann", "age": 7}',
        "other order": '{"age": 7, "name": "Ann"}',
        "fence": 'Sure!\n```json\n{"name": "Ann", "age": 7}\n```\nAnything else?',
        "around": 'Here: {"name": "Ann", "age": 7} as you asked.',
        "comma": '{"name": "Ann", "age": 7,}',
        "broken off": '{"name": "Ann", "age',
        "other kind": '{"name": "Ann", "age": "seven"}',
        "no json": "She is seven.",
    }
    path = write(tmp_path / "p.jsonl", *({"prompt": f"{name}?"} for name in texts))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for ollama in (False, True):
        with BadServer(lambda heard: texts[heard.asked[:-1]], ollama=ollama) as bad:
            output = tmp_path / f"{ollama}.jsonl"
            arguments = ("answers", path, "--teacher", bad.url, "--output", output, "--json-schema",
                         tmp_path / "schema.json")  # fmt: skip
            code, result, told = distill(capsys, *arguments)
            assert code == 0, told
            body = bad.heard[0].body
            assert (body["format"] if ollama else body["response_format"]["json_schema"]["schema"]) == SCHEMA
        assert {row["messages"][1]["content"] for row in read(output)} == {'{"name": "Ann", "age": 7}'}
        assert result["rows"] == 5 and result["json"] == {"clean": 3, "fenced": 2, "repaired": 2, "lost": 1}
        assert result["lost_fields"] == {"age": 1} and result["dropped"] == {"wrong_json": 2, "no_json": 1}


def test_samples_are_sifted_by_checks_and_kept(tmp_path, capsys):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "What is 2 + 3?", "completion": "5", "checks": {"numeric": True}},
        {"prompt": "What is 10 * 10?", "completion": "100", "checks": {"numeric": True}},
        {"prompt": "Say something about the sea."},
    )
    answers = ["I'm sorry, but I can't help with that.", "It is 4.", "It is 5.", "So 5."]

    def answer(heard):
        return answers[heard.body["seed"] % 4]

    with BadServer(answer) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--samples", 4)
        code, result, _ = distill(capsys, *arguments)
        assert {heard.body["temperature"] for heard in bad.heard} == {0.7} and len(bad.heard) == 12
        assert code == 0 and result["dropped"] == {"check_numeric": 6} and result["refusals"] == 3
        kept = [row["messages"][1]["content"] for row in read(tmp_path / "rows.jsonl")]
        assert kept == ["It is 5.", answers[0]] and result["reasons"] == {"check_numeric": 1}
        more = ("--resume", "--keep", "all", "--drop-refusals", "--check", '{"forbidden": ["4"]}')
        code, result, _ = distill(capsys, *arguments, *more)
        assert "--drop-refusals" not in summary(result)
        kept = [row["messages"][1]["content"] for row in read(tmp_path / "rows.jsonl")]
        assert kept == ["It is 5.", "So 5."] * 2 and result["dropped"]["refusal"] == 3
        code, result, _ = distill(capsys, *arguments, "--resume", "--pairs")
    pairs = read(tmp_path / "rows.jsonl")
    assert pairs == [{"prompt": "What is 2 + 3?", "chosen": "It is 5.", "rejected": answers[0]}]
    assert result["unpaired"] == {"none_passes": 1, "all_pass": 1} and len(bad.heard) == 12


def test_what_is_no_text_for_a_row_is_dropped(tmp_path, capsys):
    calls = {name: {"tool_calls": [{"function": {"name": "f", "arguments": spelled}}]}
             for name, spelled in (("call", "{"), ("nan", '{"x": NaN}'))}  # fmt: skip
    said_of = {"half": "half \ud83d a pair", "control": "and <eos> or <|turn>", "empty": " \n", "fine": "<b>yes</b>"}
    said_of |= {name: Say(None, message=message) for name, message in calls.items()}
    path = write(tmp_path / "p.jsonl", *({"prompt": f"{name}?"} for name in said_of))
    with BadServer(lambda heard: said_of[heard.asked[:-1]]) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--samples", 2)
        code, result, _ = distill(capsys, *arguments, "--pairs")
        assert code == 3  # nor is it a wrong answer to learn from
        code, result, _ = distill(capsys, *arguments, "--resume", "--keep", "all")
    assert code == 0 and result["dropped"] == {"bad_encoding": 2, "control_text": 2, "empty": 2, "bad_tool_call": 4}
    assert [row["messages"][1]["content"] for row in read(tmp_path / "rows.jsonl")] == ["<b>yes</b>"]


def test_a_judge_picks_the_best_and_makes_pairs(tmp_path, capsys):
    path = write(tmp_path / "p.jsonl", *({"prompt": f"{word}: say more"} for word in ("apple", "harbour", "violin")))

    def answer(heard):
        if "Judge the last answer" not in heard.asked:
            return f"version {heard.body['seed']} of {heard.asked}"
        if "violin" in heard.asked:
            return "7"  # all alike
        number = int(heard.asked.split("<answer>\nversion ")[1][0])
        return {0: "I would say 9", 1: "<think>hm</think> 8/10", 2: "3"}[number]

    with BadServer(answer) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--samples", 3,
                     "--judge", bad.url)  # fmt: skip
        code, result, _ = distill(capsys, *arguments)
        assert code == 0 and result["dropped"] == {"unjudged": 2} and result["requests"]["other"] == 9
        kept = [row["messages"][1]["content"] for row in read(tmp_path / "rows.jsonl")]
        assert [text.split()[1] for text in kept] == ["1", "1", "0"]
        count = len(bad.heard)
        code, result, _ = distill(capsys, *arguments, "--resume", "--pairs", "--min-margin", 2)
        pairs = read(tmp_path / "rows.jsonl")
        assert [(p["chosen"].split()[1], p["rejected"].split()[1], p["margin"]) for p in pairs] == [("1", "2", 5.0)] * 2
        assert result["unpaired"] == {"tie": 1} and result["reasons"] == {"tie": 1}
        code, result, _ = distill(capsys, *arguments, "--resume", "--min-score", 7.5)
    assert result["rows"] == 2 and len(bad.heard) == count  # judged once
    assert result["tokens"]["in"] == 18 * 11


def test_a_judge_sees_calls_judges_what_is_alike_once_and_its_address_is_told_without_the_password(tmp_path, capsys):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    path = write(tmp_path / "p.jsonl", {"messages": [user("Weather in Rome?")], "tools": [tool]}, {"prompt": "Sing."})

    def answer(heard):
        if "Judge the last answer" in heard.asked:
            return "8"
        return Say(None, message={"tool_calls": [call]}) if "Rome" in heard.asked else "la"

    with BadServer(answer) as bad:
        judge = bad.url.replace("//", "//me:secret@")
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--samples", 3,
                     "--judge", judge)  # fmt: skip
        code, result, told = distill(capsys, *arguments)
    asked = [heard.asked for heard in bad.heard if "Judge the last answer" in heard.asked]
    assert code == 0 and result["rows"] == 2 and len(asked) == 2 == result["requests"]["other"]
    shown = next(text for text in asked if "Rome" in text)
    assert '"weather"' in shown.split("<conversation>")[0] and '"weather"' in shown.split("<answer>")[1]
    assert result["judge"] == {"name": bad.url, "model": "teacher-1"}
    assert "secret" not in told + json.dumps(result) + (tmp_path / "rows.distill.json").read_text()


@pytest.mark.parametrize("name", ["new.jsonl", "new.rejected.jsonl", "new.distill.json"])
@pytest.mark.parametrize("flag", ["--against", "--eval-file", "--seed-rows"])
def test_no_file_that_is_read_is_written(tmp_path, capsys, name, flag):
    kept = write(tmp_path / name, {"prompt": "x y z"})
    (tmp_path / "topics.txt").write_text("cats")
    arguments = ("instruct", tmp_path / "topics.txt", "--teacher", "http://x", "--output", tmp_path / "new.jsonl",
                 "--overwrite")  # fmt: skip
    code, result, _ = distill(capsys, *arguments, flag, kept)
    assert code == 2 and "would be written" in result["error"]["message"] and "x y z" in kept.read_text()


def test_a_name_in_the_home_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with BadServer(lambda heard: "hi") as bad:
        path = write(tmp_path / "p.jsonl", {"prompt": "hello there"})
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, "--output", "~/rows.jsonl")
    assert code == 0 and (tmp_path / "rows.distill.json").is_file() and result["cost"] is None  # no price, no cost


def test_what_need_not_or_must_not_be_asked_is_left_out_before_it_is_paid_for(tmp_path, capsys, media):
    picture = {"type": "image", "image": str(media / "red.png")}
    copied = tmp_path / "copy.png"
    copied.write_bytes((media / "red.png").read_bytes())
    story = "the old keeper of the lighthouse counted every ship that passed the rocks before winter storms came"
    prompts = [
        {"prompt": "Describe how a bicycle works, for a child."},
        {"prompt": "describe  how a bicycle works, for a CHILD."},
        {"prompt": "Describe how a bicycle works, for a child!"},
        {"prompt": "What do bees do in the winter months of the year?"},
        {"prompt": "Which river flows through the city of Vienna, and where to?"},
        {"prompt": f"Continue this text in a cheerful way: {story}"},
        {"messages": [user([{"type": "image", "image": "copy.png"}, {"type": "text", "text": "Name its colour."}])]},
        {"prompt": "Explain what inflation means for savings."},
    ]
    held = [
        {"messages": [user("Which river flows through the city of Vienna, and where to?"), said("The Danube.")]},
        {"messages": [user(f"Summarize. {story.upper()}, and then she slept"), said("She counted ships.")]},
        {"messages": [user([picture, {"type": "text", "text": "What do you see?"}]), said("red")]},
    ]
    old = write(
        tmp_path / "old.jsonl", {"prompt": "What do bees do in the winter months of the year!", "completion": "x"}
    )
    path, eval_file = write(tmp_path / "p.jsonl", *prompts), write(tmp_path / "eval.jsonl", *held)
    options = ("--output", tmp_path / "rows.jsonl", "--against", old, "--eval-file", eval_file)
    with BadServer(lambda heard: "fine") as bad:
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, *options)
        assert code == 0 and {heard.asked for heard in bad.heard} == {prompts[0]["prompt"], prompts[7]["prompt"]}
        assert result["reasons"] == {
            "duplicate": 1, "near_duplicate": 1, "near_training_data": 1, "in_eval_data": 1,
            "shares_words_with_eval": 1, "shares_media_with_eval": 1,
        }  # fmt: skip
        code, result, _ = distill(capsys, "answers", path, "--teacher", bad.url, *options, "--resume", "--keep-similar")
    assert result["rows"] == 4 and len(bad.heard) == 4


def test_instructions_are_written_on_topics_until_there_are_enough(tmp_path, capsys):
    topics = tmp_path / "topics.txt"
    topics.write_text("gardens\nthe sea\n")
    seeds = write(tmp_path / "seeds.jsonl", {"prompt": "Why do leaves fall in autumn?", "completion": "To save water."})
    things = ["roses", "compost heaps", "garden sheds", "tides at night", "whales", "coral reefs", "lighthouses",
              "sailing knots", "salt", "plankton", "moss", "watering cans", "hedgehogs"]  # fmt: skip
    served = []

    def answer(heard):
        if "Write 10 different" not in heard.asked:
            return f"About that: {heard.asked}"
        assert "- Why do leaves fall in autumn?" in heard.asked
        at = len(served)
        served.append(heard.asked)
        if at == 0:
            return "no JSON at all"
        some = things[:8] if at == 1 else things[4:]
        ideas = [f"Tell me what matters most about {thing}, in words of your own." for thing in some]
        return json.dumps({"instructions": [*ideas, "why do leaves fall in  autumn?", "?"]})

    output = tmp_path / "rows.jsonl"
    with BadServer(answer) as bad:
        arguments = ("instruct", topics, "--teacher", bad.url, "--output", output, "--count", 12, "--seed-rows", seeds,
                     "--keep-similar", "--concurrency", 1)  # fmt: skip
        code, result, told = distill(capsys, *arguments)
        assert code == 0, told
        rows = read(output)
        asked = [row["messages"][0]["content"] for row in rows]
        assert len(rows) == 12 == len(set(asked)) and all("in words of your own" in text for text in asked)
        assert all(row["messages"][1]["content"] == f"About that: {row['messages'][0]['content']}" for row in rows)
        assert result["instructions_left_out"] == {"unread": 1, "odd": 2, "in_training_data": 2, "duplicate": 4}
        assert "gardens" in served[0] and "the sea" in served[1] and "Not these" in served[2]
        first, count = output.read_bytes(), len(bad.heard)
        code, result, _ = distill(capsys, *arguments, "--resume")
    assert code == 0 and output.read_bytes() == first and len(bad.heard) == count


def test_a_teacher_without_new_ideas_is_not_asked_for_ever(tmp_path, capsys):
    (tmp_path / "topics.txt").write_text("gardens")
    same = json.dumps({"instructions": ["Name three garden tools."]})
    with BadServer(lambda heard: same if "Write 10" in heard.asked else "Spade, fork, hoe.") as bad:
        arguments = ("instruct", tmp_path / "topics.txt", "--teacher", bad.url, "--output", tmp_path / "rows.jsonl")
        code, result, told = distill(capsys, *arguments, "--count", 5)
    assert code == 0 and result["rows"] == 1 and "1 instructions instead of 5" in told and len(bad.heard) == 1 + 3 + 1


def test_the_rows_pass_the_check(tmp_path, capsys):
    import dataset_prep

    from gemma_trainer import cli

    output = tmp_path / "rows.jsonl"
    with BadServer(lambda heard: f"It is about {len(heard.asked)} letters, I think.") as bad:
        arguments = ("answers", SAMPLES / "train.jsonl", "--teacher", bad.url, "--output", output, "--keep-similar")
        code, result, _ = distill(capsys, *arguments)
    assert code == 0 and result["rows"] > 20
    checks = ["check", str(output), "--model", "demo", "--num-workers", "1", "--json"]
    assert cli.run_commands(dataset_prep.COMMANDS, "", "", checks) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["verdict"].startswith("READY") and not checked["counts"].get("bad_rows")
    assert checked["counts"]["rows"] == result["rows"]
    assert len(open_rows([str(tmp_path)])) == result["rows"]  # the record beside the rows is no data


@pytest.mark.parametrize(
    "options, code, told",
    [
        ((), 2, "--teacher is needed"),
        (("--teacher", "ftp://x"), 2, "begins with http"),
        (("--teacher", "demo", "--teacher-model", "x"), 2, "is the model itself"),
        (("--teacher", "http://x", "--pairs"), 2, "--samples of 2"),
        (("--teacher", "http://x", "--keep", "best"), 2, "need a --judge"),
        (("--teacher", "http://x", "--check", "{"), 2, "must be a JSON object"),
        (("--teacher", "http://x", "--check", '{"nonsense": 1}'), 2, "unknown check"),
        (("--teacher", "http://x", "--json-schema", "absent.json"), 3, "absent.json"),
        (("--teacher", "http://x", "--judge", "http://x", "--rubric", "absent.txt"), 3, "absent.txt"),
        (("--teacher", "http://[::1"), 2, "cannot be read"),
        (("--teacher", "http://localhost:99999"), 2, "cannot be read"),
        (("--teacher", "https://x/v1?version=2"), 2, "cannot be read"),
        (("--teacher", "http://x", "--judge", "ftp://x"), 2, "--judge: a server's address"),
        (("--teacher", "http://x", "--rubric", "r.txt"), 2, "for a --judge"),
        (("--teacher", "http://x", "--judge-model", "m"), 2, "for a --judge"),
        (("--teacher", "http://x", "--judge", "http://x", "--min-margin", "1"), 2, "needs --pairs"),
        (("--teacher", "http://x", "--pairs", "--samples", "2", "--keep", "all"), 2, "give one of them"),
        (("--teacher", "http://x", "--temperature", "inf"), 2, "--temperature must be"),
        (("--teacher", "http://x", "--price-in", "1"), 2, "belong together"),
        (("--teacher", "http://x", "--samples", "0"), 2, "--samples must be"),
        (("--teacher", "http://x", "--against", "absent.jsonl"), 3, "absent.jsonl"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_done(tmp_path, capsys, options, code, told):
    path = write(tmp_path / "p.jsonl", {"prompt": "hello there"})
    found, result, _ = distill(capsys, "answers", path, "--output", tmp_path / "rows.jsonl", *options)
    assert found == code and told in result["error"]["message"] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/absent"}}},
        {"properties": {"a": {"$ref": "https://example.com/a.json"}}},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_refers_to_nothing_is_told_before_it_is_paid_for(tmp_path, capsys, schema):
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    path = write(tmp_path / "p.jsonl", {"prompt": "hello there"})
    arguments = ("answers", path, "--teacher", "http://x", "--output", tmp_path / "rows.jsonl")
    code, result, _ = distill(capsys, *arguments, "--json-schema", tmp_path / "schema.json")
    assert code == 3 and "no JSON Schema" in result["error"]["message"]
