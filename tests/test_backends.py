"""The backend is decided before anything heavy is imported, and Unsloth is imported first or not at all."""

import subprocess
import sys
import types

import pytest

from conftest import ASSETS
from gemma_trainer import backends
from gemma_trainer.errors import EnvironmentUnfit


@pytest.fixture
def machine(monkeypatch):
    """Make this machine another: machine(device, installed, system, processor)."""

    def be(device="cpu", installed=True, system="Linux", processor="x86_64"):
        monkeypatch.setattr(backends.platform, "system", lambda: system)
        monkeypatch.setattr(backends.platform, "machine", lambda: processor)
        found = types.SimpleNamespace(origin="a file" if installed else None)
        monkeypatch.setattr(backends, "find_spec", lambda name: found)
        monkeypatch.setattr("gemma_trainer.precision.device_type", lambda: device)

    return be


def test_auto_takes_unsloth_on_cuda_where_it_is_installed(machine):
    machine("cuda")
    assert backends.decide("auto").name == "unsloth"
    machine("cuda", installed=False)
    told = "Unsloth is not installed: pip install unsloth==2026.10.9 transformers==5.17.0 trl==1.14.2 datasets==4.8.5"
    assert backends.decide("auto") == backends.Backend("hf", told)
    machine("cpu")
    assert backends.decide("auto") == backends.Backend("hf", "Unsloth does not accelerate on cpu")


def test_several_gpus_and_reward_models_are_left_to_the_plain_backend(machine, monkeypatch):
    machine("cuda")
    assert backends.decide("auto", "dpo").name == "unsloth"
    assert backends.decide("auto", "reward") == backends.Backend("hf", backends.NO_SCORES)
    with pytest.raises(EnvironmentUnfit, match="reward models are trained with --backend hf"):
        backends.decide("unsloth", "reward")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert backends.decide("auto").name == "hf"
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert backends.decide("auto").name == "hf" and backends.decide("unsloth").name == "unsloth"


def test_float32_on_a_gpu_is_left_to_the_plain_backend(machine):
    """Where Unsloth would train in bfloat16 or float16."""
    machine("cuda")
    assert backends.decide("auto", precision="fp32") == backends.Backend("hf", backends.MIXED)
    with pytest.raises(EnvironmentUnfit, match="--precision fp32 is for --backend hf"):
        backends.decide("unsloth", precision="fp32")
    assert backends.decide("auto", precision="bf16").name == "unsloth"
    machine("cpu")
    assert backends.decide("unsloth", precision="fp32").name == "unsloth"


def test_a_mac_never_imports_unsloth(machine):
    machine("mps", system="Darwin", processor="arm64")
    assert backends.decide("auto") == backends.Backend("hf", backends.ON_A_MAC)
    with pytest.raises(EnvironmentUnfit, match="MLX.*--backend hf"):
        backends.decide("unsloth")


def test_asked_for_and_not_installed_is_told_with_the_command(machine):
    machine("cuda", installed=False)
    with pytest.raises(EnvironmentUnfit, match="pip install unsloth"):
        backends.start("unsloth")


def test_what_is_patched_must_not_have_been_imported_before(machine, monkeypatch):
    machine("cpu")
    monkeypatch.setitem(sys.modules, "peft", types.ModuleType("peft"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    with pytest.raises(EnvironmentUnfit, match="peft was imported before Unsloth"):
        backends.start("unsloth")


BROKEN = """
import transformers
raise NotImplementedError("Unsloth cannot find any torch accelerator?\\nYou need a GPU.")
"""


@pytest.fixture
def broken(tmp_path):
    """A folder with an `unsloth` that imports transformers, as the real one does, and then fails."""
    (tmp_path / "unsloth").mkdir()
    (tmp_path / "unsloth" / "__init__.py").write_text(BROKEN)
    return tmp_path


START = f"""
import sys; sys.path[:0] = [{{folder!r}}, {str(ASSETS)!r}]
from gemma_trainer import backends, precision
precision.device_type = lambda: "cuda"
backend = backends.start(sys.argv[1])
print(backend.name, "|", backend.reason, "|", "transformers" in sys.modules)
"""


@pytest.mark.parametrize("raised", ["NotImplementedError", "SystemExit", "GeneratorExit"])
def test_an_import_that_fails_begins_anew_without_unsloth_under_auto(broken, raised):
    """Whatever it raises; and in a process that it has left nothing in."""
    code_file = broken / "unsloth" / "__init__.py"
    code_file.write_text(code_file.read_text().replace("NotImplementedError", raised))
    code = START.format(folder=str(broken))
    done = subprocess.run([sys.executable, "-c", code, "auto"], capture_output=True, text=True)
    why = f"Unsloth cannot be imported ({raised}: Unsloth cannot find any torch accelerator?)"
    assert done.stdout == f"hf | {why} | False\n", done.stderr
    assert done.stderr == f"{why}: going on without it\n"


def test_an_import_that_fails_is_an_error_where_unsloth_is_asked_for(broken):
    code = START.format(folder=str(broken))
    done = subprocess.run([sys.executable, "-c", code, "unsloth"], capture_output=True, text=True)
    assert done.returncode and "EnvironmentUnfit" in done.stderr and "--backend hf" in done.stderr


def test_a_script_says_so_with_exit_4(script, broken):
    done = script("sft_train.py", "--backend", "unsloth", env={"PYTHONPATH": str(broken)})
    assert done.returncode == 4 and "NotImplementedError" in done.stderr and not done.stdout
