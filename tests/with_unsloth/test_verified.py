"""verify.py compares Unsloth with the plain backend, each in its own process."""

import json
import os
import subprocess
import sys

from stacks import HERE

from conftest import ASSETS


def test_the_gpu_stack_is_the_same_and_its_adapter_loads_without_unsloth(tmp_path):
    """The interpreter of the other arm is one that has the GPU stack under it."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "gpu_stack.py"} "$@"\n')
    other.chmod(0o755)
    command = [sys.executable, str(ASSETS / "verify.py"), "--against", "unsloth", "--python", str(other)]
    command += ["--steps", "5", "--repeats", "1", "--output", str(tmp_path / "v"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["verdict"] == "SAME", found["reasons"]
    assert found["labels"]["same"] and found["curves"]["loss"]["max_absolute"] < 1e-4
    assert all(loop["passed"] and loop["answers"] == 4 for loop in found["closed_loop"].values())
    record = json.loads((tmp_path / "v" / "against-1" / "run.json").read_text())
    assert record["backend"]["audit"]["import"]["backend"] == "gpu"
