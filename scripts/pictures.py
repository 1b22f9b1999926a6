#!/usr/bin/env python3
"""Make the README's pictures of the built-in demo, docs/report.png and docs/app.png: make pictures

The demo is trained (half a minute), its report is opened, and gemma-dev's app is asked about a held-out picture, in
headless Chromium.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import chromium

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "skills" / "gemma-trainer" / "assets"
APP = ROOT / "skills" / "gemma-dev" / "assets" / "gradio_app.py"
DOCS = ROOT / "docs"
LARGEST = 150_000  # bytes
QUESTION, FILE, ANSWER = "What colour is this picture?", "images/heldout-green-0.jpg", "green"


def write(name: str, shot: bytes) -> None:
    """A screenshot as a PNG of few colours, which is a fourth as large."""
    from PIL import Image

    path = DOCS / name
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(128).save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path}: {path.stat().st_size:,} bytes, more than {LARGEST:,}")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def picture_of_report(browser, run: Path) -> bytes:
    page = browser.new_page(viewport={"width": 1000, "height": 1010})
    page.goto((run / "report.html").as_uri())
    page.evaluate("root => { document.body.innerHTML = document.body.innerHTML.replaceAll(root, '') }", f"{ROOT}/")
    return page.screenshot()


def picture_of_app(browser, run: Path) -> bytes:
    command = [sys.executable, str(APP), "--model", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as app:
        try:
            page = browser.new_page(viewport={"width": 900, "height": 1010})
            page.goto(json.loads(app.stdout.readline())["url"])
            page.set_input_files("input[type=file]", str(TRAINER / "samples" / FILE))
            page.get_by_label("Remove").first.wait_for()
            page.get_by_test_id("textbox").fill(QUESTION)
            page.get_by_test_id("textbox").press("Enter")
            page.get_by_test_id("bot").get_by_text(ANSWER).wait_for()
            page.get_by_label("Retry").wait_for()
            page.get_by_text("Settings").click()
            page.get_by_text("Thinking").wait_for()
            page.wait_for_timeout(500)  # while it unfolds
            page.mouse.move(0, 0)
            return page.screenshot()
        finally:
            app.terminate()


def main() -> None:
    from playwright.sync_api import sync_playwright

    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        run = Path(place) / "colours-and-tones"
        subprocess.run([sys.executable, str(TRAINER / "sft_train.py"), "--output", str(run)], check=True)
        browser = chromium.launched(playwright)
        write("report.png", picture_of_report(browser, run))
        write("app.png", picture_of_app(browser, run))
        browser.close()


if __name__ == "__main__":
    main()
