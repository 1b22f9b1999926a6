"""The parts of gemma-dev's app that need no page: what is sent to a model, what is made of its answer, and errors."""

import copy
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib

import numpy as np
import pytest
import tiny
from PIL import Image
from serving import Server

from conftest import ROOT, ask

DEV = ROOT / "skills" / "gemma-dev" / "assets"
sys.path.insert(0, str(DEV))

import gradio_app  # noqa: E402
from gemma_chat import ChatError, local, media, served  # noqa: E402
from gemma_chat.parts import Part, plain, split  # noqa: E402

BOTH = ("image", "audio")
THOUGHT = "<|channel>thought\nRed?\n<channel|>"


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def last(answers):
    """The parts of a whole answer."""
    *_, whole = answers
    return whole


def user(text):
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


# ---- parts


@pytest.mark.parametrize(("raw", "parts"), [
    ("Red.<turn|>", [Part("text", "Red.")]),
    (THOUGHT + "Red.<turn|><eos>", [Part("thought", "Red?"), Part("text", "Red.")]),
    ("<|channel>thought\nRe", [Part("thought", "Re", False)]),
    ("<|channel>thought\n<channel|>Red", [Part("text", "Red")]),  # the empty thought
    ("<|tool_call>call:now{}<tool_call|><|tool_response>", [Part("call", "call:now{}")]),
    ("So: <|tool_call>call:no", [Part("text", "So:"), Part("call", "call:no", False)]),
    ("a < b, c |> d", [Part("text", "a < b, c |> d")]),
    ("<end_of_turn>", []),
])  # fmt: skip
def test_an_answer_comes_apart(raw, parts):
    assert split(raw) == parts


def test_text_cannot_act_as_control(processor):
    controls = [token for token in processor.tokenizer.get_added_vocab() if not re.match(r"<(0x|mask|unk)", token)]
    assert len(controls) > 20
    for token in [*controls, "<start_of_turn>", "<end_of_turn>"]:
        text = plain(f"a{token}b")
        assert text.replace("< ", "<") == f"a{token}b" and token not in text
    for harmless in ("a < b", "<b>bold</b>", "x <y> z", "|> <|", "f<T>(x)"):
        assert plain(harmless) == harmless


# ---- media


def test_pictures_are_upright_opaque_and_of_eight_bits(tmp_path):
    Image.fromarray(np.full((4, 4), 257 * 100, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert set(media.picture(str(tmp_path / "deep.png")).getdata()) == {(100, 100, 100)}
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert media.picture(str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    turned = Image.new("RGB", (8, 4))
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert media.picture(str(tmp_path / "turned.jpg")).size == (4, 8)


def test_recordings_become_mono_at_the_models_rate(tmp_path):
    import soundfile

    soundfile.write(tmp_path / "stereo.flac", np.random.default_rng(0).normal(size=(44100, 2)) / 9, 44100)
    samples = media.recording(str(tmp_path / "stereo.flac"))
    assert samples.shape == (16000,) and samples.dtype == np.float32


@pytest.mark.parametrize(("file", "kinds", "told"), [
    ("page.jpg", BOTH, "page.jpg is no picture"), ("text.wav", BOTH, "text.wav is no recording"),
    ("red.png", ("audio",), "red.png: the model takes recordings"),
    ("one.wav", (), "one.wav: the model takes text alone"),
    ("notes.txt", BOTH, "notes.txt: the model takes pictures and recordings"), ("absent.png", BOTH, "is no picture"),
    ("long.wav", BOTH, "long.wav is longer than the 30 seconds"), ("none.wav", BOTH, "none.wav holds no sound"),
    ("bomb.png", BOTH, "bomb.png: the picture is too large"),
])  # fmt: skip
def test_files_that_cannot_be_used_are_told(media_files, file, kinds, told):
    with pytest.raises(ChatError, match=told) as caught:
        media.block(str(media_files / file), kinds)
    assert "\n" not in str(caught.value) and str(media_files) not in str(caught.value)


@pytest.fixture(scope="module")
def media_files(media, tmp_path_factory):
    import soundfile

    folder = shutil.copytree(media, tmp_path_factory.mktemp("more") / "media")
    soundfile.write(folder / "long.wav", np.zeros(31 * 8000), 8000)
    soundfile.write(folder / "none.wav", np.zeros(10), 16000)
    (folder / "notes.txt").write_text("notes")
    Image.new("1", (11000, 11000)).save(folder / "bomb.png")
    return folder


# ---- what the page holds, to messages


def said(role, text, files=(), title=None):
    content = [{"type": "file", "file": {"path": str(file)}} for file in files]
    content += [{"type": "text", "text": text}] if text else []
    return {"role": role, "content": content, "metadata": {"title": title} if title else None}


def test_thoughts_errors_and_questions_without_an_answer_are_not_sent_again(media):
    history = [
        said("user", "First?", [media / "red.png"]),
        said("assistant", "Hm.", title="Thinking"),
        said("assistant", "One."),
        said("user", "Broken?", [media / "page.jpg"]),
        said("assistant", "the server is gone", title="Error"),
        said("user", "Stopped?"),
    ]
    asked = {"text": "Now<turn|>?", "files": [{"path": str(media / "one.wav")}]}  # as gradio has it on a retry
    found = gradio_app.conversation(history, asked, "Be brief.", BOTH)
    assert [(turn["role"], [block.get("text", block["type"]) for block in turn["content"]]) for turn in found] == [
        ("system", ["Be brief."]), ("user", ["image", "First?"]), ("assistant", ["One."]),
        ("user", ["audio", "Now< turn|>?"]),
    ]  # fmt: skip


def test_nothing_asked_is_told():
    with pytest.raises(ChatError, match="nothing is asked"):
        gradio_app.conversation([], {"text": " ", "files": []}, "", BOTH)


def test_thoughts_are_folded_up_once_they_are_complete():
    assert gradio_app.bubble(Part("thought", "hm", False))["metadata"] == {"title": "Thinking", "status": "pending"}
    assert gradio_app.bubble(Part("thought", "hm"))["metadata"]["status"] == "done"
    assert gradio_app.bubble(Part("text", "Hi")) == {"role": "assistant", "content": "Hi"}
    assert gradio_app.failure("<b>gone</b>")["content"] == "&lt;b&gt;gone&lt;/b&gt;"


# ---- a model loaded here


@pytest.fixture(scope="module")
def chat(model_folder):
    return local.load(str(model_folder))


@pytest.mark.parametrize("thinking", ["off", "on"])
def test_the_prompt_is_that_of_the_training(processor, model, media, thinking):
    from gemma_trainer.collator import MultimodalCollator
    from gemma_trainer.generation import Question, prompts_of
    from gemma_trainer.rows import read_row

    row = ask(media, "red.png", "one.wav")
    wanted = prompts_of(MultimodalCollator(processor, thinking=thinking), [Question.of(read_row(row))])
    files = [str(media / "red.png"), str(media / "one.wav")]
    messages = gradio_app.conversation([], {"text": "What is it?", "files": files}, "", BOTH)
    found = local._prompt(processor, model, messages, thinking)
    assert found["input_ids"].tolist() == wanted["input_ids"].tolist()
    for key in ("pixel_values", "input_features"):
        assert found[key].shape == wanted[key].shape and (found[key] - wanted[key]).abs().max() < 1e-4


def test_an_answer_grows_and_is_what_the_model_generates(chat, processor, model):
    import torch

    assert (chat.kinds, chat.thinking, chat.temperature) == (BOTH, ("off", "on"), 0.0)
    answers = list(chat.answer(user("Name a fruit."), 0.0, 12, "off"))
    inputs = local._prompt(processor, model, user("Name a fruit."), "off")
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert len(answers) > 1 and answers[-1] == split(processor.tokenizer.decode(made, skip_special_tokens=False))


def test_closing_an_answer_stops_the_model(chat):
    before = threading.active_count()
    answers = chat.answer(user("Tell a long story."), 1.5, 100_000, "off")
    next(answers)
    answers.close()
    assert threading.active_count() == before


def test_a_run_speaks_with_its_weights_and_its_template(model, model_folder, processor, tmp_path):
    import torch

    from gemma_trainer import models

    own = copy.deepcopy(processor)
    own.chat_template = own.chat_template.replace("enable_thinking", "absent")
    tuned = models.add_lora(copy.deepcopy(model), "language", 4, 8, 0.0)
    tuned.peft_config["default"].base_model_name_or_path = str(model_folder)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(tmp_path / "run")
    own.save_pretrained(tmp_path / "run")
    chat = local.load(str(tmp_path / "run"))
    assert chat.name == "run" and chat.thinking == ()
    inputs = local._prompt(own, model, user("Name a fruit."), "")
    made = tuned.eval().generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    wanted = split(processor.tokenizer.decode(made, skip_special_tokens=False))
    assert last(chat.answer(user("Name a fruit."), 0.0, 8, "")) == wanted
    assert wanted != last(local.load(str(model_folder)).answer(user("Name a fruit."), 0.0, 8, "off"))


@pytest.mark.parametrize(("name", "kinds"), [
    ("gemma3_text", ()), ("gemma3", ("image",)), ("gemma3n", BOTH), ("gemma4_dense", ("image",)),
    ("gemma4_unified", BOTH),
])  # fmt: skip
def test_every_family_answers_with_what_it_takes(name, kinds, media):
    processor = tiny.make_processor(name)
    chat = local.chat_with("tiny", processor, tiny.make_model(name, processor))
    assert chat.kinds == kinds
    files = [str(media / {"image": "red.png", "audio": "one.wav"}[kind]) for kind in kinds]
    messages = gradio_app.conversation([], {"text": "What?", "files": files}, "Be brief.", kinds)
    assert list(chat.answer(messages, 1.0, 4, chat.thinking[0] if chat.thinking else ""))


def test_what_cannot_be_spoken_to_is_told(tmp_path, model_folder, processor, model):
    base = copy.deepcopy(processor)
    base.chat_template = None
    (tmp_path / "empty").mkdir()
    (tmp_path / "reward").mkdir()
    adapter = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": str(model_folder)}
    (tmp_path / "reward" / "adapter_config.json").write_text(json.dumps(adapter))
    for name, told in (
        (str(tmp_path / "absent"), "no such folder"),
        (str(tmp_path / "empty"), "no model can be loaded"),
        (str(tmp_path / "reward"), "reward model"),
        ("nobody/such-model", "cannot be loaded"),
    ):
        with pytest.raises(ChatError, match=told):
            local.load(name)
    with pytest.raises(ChatError, match="no chat template"):
        local.chat_with("base", base, model)


def test_a_conversation_that_is_too_long_and_memory_that_runs_out_are_told(chat, processor, monkeypatch):
    import torch

    with pytest.raises(
        ChatError, match=r"tokens of conversation and 200000 of answer are more than the model's 131072"
    ):
        list(chat.answer(user("Hi"), 0.0, 200_000, "off"))
    own = tiny.make_model("gemma3_text", tiny.make_processor("gemma3_text"))

    def full(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(own, "generate", full)
    chat = local.chat_with("tiny", tiny.make_processor("gemma3_text"), own)
    with pytest.raises(ChatError, match="^out of memory: clear the chat") as caught:
        list(chat.answer(user("Hi"), 0.0, 4, ""))
    assert caught.value.exit_code == 6


# ---- a served model


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_a_servers_thoughts_are_apart(server, key):
    server.reasoning_key, server.thought, server.words = key, ["Two ", "and two."], ["It is", " four."]
    found = list(served.connect(server.url, None, None).answer(user("2 + 2?"), 0.5, 99, "default"))
    assert found[-1] == [Part("thought", "Two and two."), Part("text", "It is four.")]
    assert [Part("thought", "Two", False)] in found
    assert server.asked == [
        {"model": "tiny-gemma", "messages": [{"role": "user", "content": "2 + 2?"}], "temperature": 0.5,
         "max_tokens": 99, "stream": True}
    ]  # fmt: skip


def test_thoughts_that_the_server_left_in_the_text_are_apart(server):
    server.words = ["<|chan", "nel>thought\nRed?\n<channel|>", "Red."]
    chat = served.connect(server.url, "other", None)
    assert last(chat.answer(user("?"), 1, 9, "on")) == [Part("thought", "Red?"), Part("text", "Red.")]
    assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": True} and server.asked[0]["model"] == "other"


def test_media_are_sent_as_png_and_wav(server, media):
    import base64
    import io

    import soundfile

    files = [str(media / "red.png"), str(media / "one.wav")]
    messages = gradio_app.conversation([], {"text": "What?", "files": files}, "", BOTH)
    list(served.connect(server.url, None, None).answer(messages, 1, 9, "off"))
    picture, sound, text = server.asked[0]["messages"][0]["content"]
    data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(data)).convert("RGB").getpixel((5, 5)) == (255, 0, 0)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sound["input_audio"]["data"])))
    assert (len(samples), rate, sound["input_audio"]["format"]) == (16000, 16000, "wav")
    assert text == {"type": "text", "text": "What?"}


REFUSED = {"error": {"message": "wrong key sk-secret\n  File x.py, line 3"}}


@pytest.mark.parametrize(("change", "told"), [
    ({"refusal": (401, REFUSED)}, r"^the server says 401, wrong key \(key\): is its key in"),
    ({"refusal": (404, {"detail": "Not Found"})}, "404, Not Found: does --endpoint end in /v1"),
    ({"refusal": (400, {"message": "at most 0 audio(s)"})}, "400, at most 0 audio"),
    ({"refusal": (500, "oops")}, "500, oops"),
    ({"refusal": (200, {"no": "stream"})}, "does not speak the OpenAI API"),
    ({"cut": True}, "broke off its answer"),
])  # fmt: skip
def test_what_a_server_says_is_told_in_one_line_without_the_key(server, change, told):
    vars(server).update(change)
    with pytest.raises(ChatError, match=told) as caught:
        list(served.connect(server.url, "m", "sk-secret").answer(user("?"), 1, 9, "default"))
    assert server.keys == ["Bearer sk-secret"]
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_is_gone_is_told(server):
    chat = served.connect(server.url, None, None)
    server.close()
    with pytest.raises(ChatError, match="does not answer: is the server running"):
        list(chat.answer(user("?"), 1, 9, "default"))


def test_closing_an_answer_hangs_up(server):
    server.words, server.pause = ["word "] * 1000, 0.01
    answers = served.connect(server.url, None, None).answer(user("?"), 1, 9, "default")
    for _ in range(5):
        next(answers)
    answers.close()
    assert server.hung_up.wait(5)


# ---- the script


def test_the_header_names_what_is_imported_in_the_projects_versions():
    header = re.search(r"^# /// script\n(.*?)^# ///$", (DEV / "gradio_app.py").read_text(), re.M | re.S)[1]
    found = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["requires-python"] == project["requires-python"]
    assert set(found["dependencies"]) <= {*project["dependencies"], *project["optional-dependencies"]["app"]}
    assert set(project["optional-dependencies"]["app"]) <= set(found["dependencies"])


HEAVY = "torch transformers peft gradio librosa soundfile PIL numpy httpx gemma_trainer".split()


@pytest.mark.parametrize(("arguments", "code", "told"), [
    (["--help"], 0, ""), ([], 2, "give --model or --endpoint"), (["--no-such-flag"], 2, "unrecognized"),
    (["--model", "demo", "--port", "0"], 2, "expected 1 to 65535"), (["--endpoint", "localhost"], 2, "expected http"),
    (["--model", "demo", "--share"], 2, "--login-env"), (["--model", "demo", "--login-env", "NO_SUCH"], 2, "USER:PASS"),
    (["--model", "./absent"], 5, "no such folder"),
])  # fmt: skip
def test_wrong_flags_answer_without_heavy_imports(arguments, code, told, capsys, monkeypatch):
    watch = f"""
import sys, runpy
sys.argv = ['gradio_app.py', *{[*arguments, "--json"]!r}]
try:
    runpy.run_path({str(DEV / "gradio_app.py")!r}, run_name='__main__')
finally:
    print('loaded:', sorted({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True)
    assert done.returncode == code and "loaded: []" in done.stderr and "Traceback" not in done.stderr
    if code:
        assert told in done.stderr and json.loads(done.stdout)["exit_code"] == code


def test_the_demo_alone_needs_the_other_skill(tmp_path):
    copied = tmp_path / "gemma-dev" / "assets"
    shutil.copytree(DEV, copied, ignore=shutil.ignore_patterns("__pycache__"))
    alone = "import sys; sys.modules['gemma_trainer'] = None; import gradio_app; sys.exit(gradio_app.main())"
    command = [sys.executable, "-c", alone, "--model", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copied)
    assert done.returncode == 5 and "demo needs the gemma-trainer skill beside this one" in done.stderr
