"""gemma-dev's app as a person meets it: headless Chromium, the tiny Gemma, and a server on loopback."""

import base64
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import chromium
import pytest
import tiny
from playwright.sync_api import expect, sync_playwright
from serving import Server

from conftest import ASSETS, ROOT, SAMPLES

APP = ROOT / "skills" / "gemma-dev" / "assets" / "gradio_app.py"


@contextlib.contextmanager
def app(*arguments, **environment):
    """The app in a process of its own; gives what it told on stdout, and looks that a SIGTERM ends it."""
    command = [sys.executable, str(APP), "--json", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143


@pytest.fixture(scope="session")
def browser():
    microphone = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]  # it beeps
    with sync_playwright() as playwright:
        browser = chromium.launched(playwright, args=microphone)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of the demo, which has learnt colours and tones."""
    folder = tmp_path_factory.mktemp("app") / "colours"
    command = [sys.executable, str(ASSETS / "sft_train.py"), "--output", str(folder), "--max-steps", "60"]
    subprocess.run([*command, "--eval-steps", "1000"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def trained(run):
    with app("--model", run) as told:
        yield told


@pytest.fixture(scope="session")
def one_server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def connected(one_server):
    with app("--endpoint", one_server.url, "--api-key-env", "SOME_KEY", SOME_KEY="sk-secret") as told:
        yield told


@pytest.fixture
def server(one_server):
    """The server, answering as it did at first."""
    fresh = Server()
    fresh.close()
    kept = vars(one_server) | {"asked": [], "keys": []}
    names = ("thought", "words", "reasoning_key", "refusal", "cut", "pause", "hung_up")
    vars(one_server).update(kept | {name: getattr(fresh, name) for name in names})
    return one_server


class Talk:
    """A page of the app, as a person uses it."""

    def __init__(self, page, url):
        self.page, self.url = page, url
        self.box = page.get_by_test_id("textbox").first
        self.answers = page.get_by_test_id("bot")
        self.last = page.locator(".message-row").last
        self.troubles, self.outside = [], []
        page.on("console", lambda one: self.troubles.append(one.text) if one.type == "error" else None)
        page.on("pageerror", lambda one: self.troubles.append(str(one)))
        page.on("request", self._look)
        page.goto(url)
        expect(self.box).to_be_enabled()

    def _look(self, request):
        if request.url.startswith("http") and not request.url.startswith(self.url):
            self.outside.append(request.url)

    def add(self, *files):
        with self.page.expect_response(lambda answer: "/upload?" in answer.url):
            self.page.set_input_files("input[type=file]", [str(file) for file in files])
        self.page.get_by_label("Remove").first.wait_for()

    def ask(self, text):
        expect(self.box).to_be_enabled()
        self.asked = text
        self.box.fill(text)
        self.box.press("Enter")

    def answered(self, text):
        expect(self.page.get_by_test_id("user").last).to_contain_text(self.asked)
        expect(self.last).to_have_class(re.compile("bot-row"))
        expect(self.last).to_contain_text(text, timeout=20_000)
        expect(self.page.get_by_test_id("submit-button")).to_be_visible()
        expect(self.box).to_be_enabled()


@pytest.fixture
def talk(browser):
    """Opens the app; afterwards the console has had no error, and nothing was asked of another host."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, permissions=["microphone"])
    opened = []

    def open_page(told):
        opened.append(Talk(context.new_page(), told["url"]))
        return opened[-1]

    yield open_page
    context.close()
    for one in opened:
        assert one.troubles == [] and one.outside == []


# ---- a run of gemma-trainer


def test_a_picture_and_a_recording_are_understood(trained, talk):
    assert trained["model"] == "colours" and trained["takes"] == ["text", "image", "audio"]
    page = talk(trained)
    page.add(SAMPLES / "images" / "heldout-blue-0.webp")
    page.ask("What colour is this picture?")
    page.answered("blue")
    page.page.get_by_label("Clear", exact=True).click()
    expect(page.answers).to_have_count(0)
    page.add(SAMPLES / "audio" / "heldout-low-0.flac")
    page.ask("Is this tone low, middle or high?")
    page.answered("low")
    shown = page.page.get_by_label("Share").filter(visible=True)
    assert shown.count() == 0  # nothing is to be published by a click


def test_a_model_without_ears_refuses_a_recording_at_upload(browser, talk, tmp_path, media):
    processor = tiny.make_processor("gemma3")
    tiny.make_model("gemma3", processor).save_pretrained(tmp_path / "gemma3")
    processor.save_pretrained(tmp_path / "gemma3")
    with app("--model", tmp_path / "gemma3") as told:
        page = talk(told)
        assert told["takes"] == ["text", "image"]
        assert page.page.get_by_test_id("microphone-button").count() == 0
        page.page.set_input_files("input[type=file]", str(media / "one.wav"))
        expect(page.page.get_by_test_id("toast-body")).to_contain_text("Only image allowed")
        page.page.get_by_text("Settings").click()
        assert page.page.get_by_text("Thinking").count() == 0  # its template has none
        page.page.close()


# ---- a server


def test_an_answer_streams_and_its_thoughts_are_apart(connected, server, talk):
    server.thought, server.words, server.pause = ["Two ", "and ", "two."], ["It ", "is ", "**four**", "."], 0.25
    page = talk(connected)
    page.ask("2 + 2?")
    thought = page.page.get_by_text("Two and two.")
    expect(thought).to_be_visible()  # while it thinks
    seen, end = set(), time.monotonic() + 20
    while "four." not in (text := page.answers.last.inner_text()) and time.monotonic() < end:
        seen.add(text)
        time.sleep(0.03)
    assert len(seen) > 2
    page.answered("It is four.")
    expect(thought).to_be_hidden()
    page.page.get_by_role("button", name="Thinking").click()
    expect(thought).to_be_visible()
    server.thought, server.pause = [], 0
    page.ask("And 3 + 3?")
    page.answered("four")
    sent = [message["content"] for message in server.asked[-1]["messages"]]
    assert sent == ["2 + 2?", "It is **four**.", "And 3 + 3?"]
    assert server.keys[-1] == "Bearer sk-secret" and "sk-secret" not in page.page.content()


def test_settings_are_sent(connected, server, talk):
    page = talk(connected)
    page.page.get_by_text("Settings").click()
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.page.get_by_label("number input for Temperature").fill("0.3")
    page.page.get_by_label("on", exact=True).check()
    page.ask("Hi")
    page.answered("Hello.")
    asked = server.asked[-1]
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."} and asked["temperature"] == 0.3
    assert asked["chat_template_kwargs"] == {"enable_thinking": True} and asked["max_tokens"] == 1024


def test_the_stop_button_stops_the_server(connected, server, talk):
    server.words, server.pause = ["word "] * 1000, 0.02
    page = talk(connected)
    page.ask("Tell a story")
    expect(page.answers.last).to_contain_text("word word")
    page.page.get_by_label("Stop").click()
    assert server.hung_up.wait(10)
    server.words, server.pause = ["Fine."], 0
    page.ask("Short, please")
    page.answered("Fine.")
    assert server.asked[-1]["messages"][1]["content"].startswith("word word")


def test_what_is_said_into_the_microphone_is_sent(connected, server, talk):
    import soundfile

    page = talk(connected)
    page.page.get_by_test_id("microphone-button").click()
    page.page.get_by_label("Start recording").click()
    page.page.wait_for_timeout(1500)
    page.page.get_by_label("Stop recording").click()
    page.page.get_by_label("Attach audio").click()
    page.ask("What was that?")
    page.answered("Hello.")
    sound = server.asked[-1]["messages"][0]["content"][0]["input_audio"]["data"]
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sound)))
    assert rate == 16000 and len(samples) > 8000 and abs(samples).max() > 0.01


def test_a_file_that_is_no_picture_is_refused_and_the_message_stays(connected, server, talk, media):
    page = talk(connected)
    page.add(media / "page.jpg")
    page.ask("What is it?")
    expect(page.page.get_by_text("page.jpg is no picture that can be read")).to_be_visible()
    expect(page.box).to_have_value("What is it?")
    page.page.get_by_label("Remove").first.click()
    page.ask("Never mind")
    page.answered("Hello.")
    assert len(server.asked) == 1 and server.asked[0]["messages"] == [{"role": "user", "content": "Never mind"}]
    page.page.set_input_files("input[type=file]", str(ROOT / "README.md"))
    expect(page.page.get_by_test_id("toast-body")).to_contain_text("Only image, audio allowed")
    refused = [one for one in page.troubles if "422" in one]  # the browser tells of the refusal
    page.troubles = [one for one in page.troubles if one not in refused]


def test_a_servers_error_is_one_line_and_the_talk_goes_on(connected, server, talk):
    server.refusal = (400, {"error": {"message": "At most <1> image, sk-secret\nTraceback (most recent call last)"}})
    page = talk(connected)
    page.ask("Hi")
    page.answered("the server says 400, At most <1> image, (key)")
    assert "Traceback" not in page.page.content()
    server.refusal = None
    page.page.get_by_label("Retry").click()
    page.answered("Hello.")
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_server_that_is_gone_is_told_in_the_page(talk):
    gone = Server()
    gone.close()
    with app("--endpoint", gone.url, "--model", "tiny") as told:
        page = talk(told)
        page.ask("Hi")
        page.answered("does not answer: is the server running?")
        page.page.close()


def test_a_question_with_a_picture_can_be_asked_again(connected, server, talk, media):
    page = talk(connected)
    page.add(media / "red.png")
    page.ask("What is it?")
    page.answered("Hello.")
    server.words = ["Red."]
    page.page.get_by_label("Retry").click()
    page.answered("Red.")
    first, second = [asked["messages"] for asked in server.asked]
    assert first == second and first[0]["content"][0]["type"] == "image_url"


def test_it_fits_a_narrow_screen(connected, server, talk):
    server.words = ["A long answer in many words, `and_some_code_that_is_rather_long_and_cannot_break(anywhere)`. " * 3]
    page = talk(connected)
    page.page.set_viewport_size({"width": 390, "height": 780})
    page.ask("Hi")
    page.answered("A long answer")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.page.get_by_test_id("submit-button")).to_be_in_viewport()


def test_a_login_is_asked_for(browser):
    gone = Server()
    gone.close()
    with app("--endpoint", gone.url, "--model", "tiny", "--login-env", "DOOR", DOOR="me:sesame") as told:
        page = browser.new_page()
        page.goto(told["url"])
        expect(page.get_by_label("password")).to_be_visible()
        assert page.get_by_test_id("submit-button").count() == 0
        page.close()
