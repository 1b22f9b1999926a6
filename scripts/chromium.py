"""Find a Chromium for tests and pictures, or fetch one from npm: python scripts/chromium.py [FOLDER]

With a FOLDER, one is put there where the machine has none. Playwright's own download is taken where it is installed
(`playwright install chromium`); the npm package is for Linux on x86-64, and for where only npm and pip are let through.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# https://github.com/Sparticuz/chromium: headless Chromium for servers, compressed, with the libraries that they lack.
PACKAGE = "@sparticuz/chromium@153.0.0"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """The Chromium to run: $CHROMIUM, that of this environment, Playwright's own, or one on the PATH."""
    if named := os.environ.get("CHROMIUM"):
        return named
    own = Path(sys.prefix) / "chromium" / "chromium"
    return str(own) if own.is_file() else _of_playwright() or next(filter(None, map(shutil.which, NAMES)), None)


def _of_playwright() -> str | None:
    home = {"Darwin": "Library/Caches", "Windows": "AppData/Local"}.get(platform.system(), ".cache")
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / home / "ms-playwright")
    names = ("chrome", "headless_shell", "chrome-headless-shell", "Chromium", "chrome.exe")
    return next((str(path) for name in names for path in cache.glob(f"chromium*/**/{name}") if path.is_file()), None)


def launched(playwright, **options):
    """A headless browser of Playwright's, run with the Chromium that is found."""
    path = found()
    libraries = Path(path).parent / "lib"
    environment = dict(os.environ)
    if libraries.is_dir():
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [environment.get("LD_LIBRARY_PATH"), str(libraries)]))
    return playwright.chromium.launch(executable_path=path, env=environment, **options)


def fetch(folder: Path) -> None:
    """Put a Chromium from npm into `folder`, with the libraries that it needs in `folder`/lib."""
    import brotli

    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit("no Chromium here: run `playwright install chromium`, or name one in the variable CHROMIUM")
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=place, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(place).glob("*.tgz"))) as package:
            package.extractall(place, filter="data")
        files = Path(place) / "package" / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        libraries = Path(place) / "libraries.tar"
        libraries.write_bytes(brotli.decompress((files / "al2023.tar.br").read_bytes()))
        with tarfile.open(libraries) as packed:
            packed.extractall(folder, filter="data")
        part = folder / "chromium.part"
        part.write_bytes(brotli.decompress((files / "chromium.br").read_bytes()))
        part.chmod(0o755)
        part.rename(folder / "chromium")


if __name__ == "__main__":
    if len(sys.argv) > 1 and not found():
        fetch(Path(sys.argv[1]))
    print(found() or "none found")
