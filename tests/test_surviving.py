"""A run that is killed at any moment can be gone on with, and ends where an unbroken one does."""

import subprocess
import sys

from conftest import ROOT


def test_three_kills(tmp_path):
    """By the clock and within writes; more of them: benchmarks/kill_resume.py --kills 20."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kill_resume.py"), "--kills", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills, then the end: the same" in done.stdout
