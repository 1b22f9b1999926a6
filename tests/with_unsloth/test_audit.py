"""What Unsloth changes is seen, and what it must not change is refused."""

import json
import subprocess
import sys

from stacks import HERE, call

from conftest import ASSETS

ARGUMENTS = f"""
import json, sys
sys.argv = sys.argv[1:]
sys.path[:0] = [{str(HERE)!r}, {str(ASSETS)!r}]
from gemma_trainer import backends
if sys.argv[0] == "unsloth":
    import gpu_stack
    gpu_stack.install({str(ASSETS)!r})
backends.start(sys.argv[0])
from gemma_trainer import arguments, precision, preference_trainers
options = dict(max_length=512, batch_size=3, grad_accum=5, lr=1e-4, epochs=2, max_steps=None, steps=40, seed=7,
               save_steps=None, eval_steps=None, evaluate=True, workers=0, report_to=[], checkpointing=False)
chosen = precision.choose("fp32", "cpu")
dpo = dict(beta=0.1, loss_type=["sigmoid"], loss_weights=None, label_smoothing=0.0)
dpo = preference_trainers.dpo_arguments("out", chosen, **options, **dpo)
made = [arguments.sft_arguments("out", chosen, **options), dpo]
print(json.dumps([one.to_dict() for one in made], default=str))
"""
# What Unsloth's configs add, and what of theirs has no effect on what is trained.
OWN = """push_to_hub_token vllm_sampling_params unsloth_num_chunks unsloth_logit_chunk_multiplier max_seq_length
unsloth_grpo_mini_batch context_parallel_size context_parallel_backend context_parallel_rotate_method""".split()
HARMLESS = {"dataset_num_proc", "eval_accumulation_steps", "torch_empty_cache_steps", "loss_type"}


def test_no_default_of_unsloths_configs_gets_through():
    """Unsloth changes batch, accumulation, rate, seed, optimizer, decay and warm-up, of all trainers of TRL."""
    shown = []
    for backend in ("hf", "unsloth"):
        done = subprocess.run([sys.executable, "-c", ARGUMENTS, backend], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        shown.append(json.loads(done.stdout.splitlines()[-1]))
    for plain, unsloth in zip(*shown, strict=True):
        assert set(unsloth) - set(plain) <= set(OWN) and set(plain) <= set(unsloth)
        other = [name for name in plain if plain[name] != unsloth[name] and name not in HARMLESS]
        assert not {name: (plain[name], unsloth[name]) for name in other}


BF16 = f"""
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, {str(HERE)!r})
import gpu_stack
gpu_stack.install({str(ASSETS)!r})
from gemma_trainer import backends
plain = backends.start
def start(*args):
    backend = plain(*args)
    import unsloth_zoo.device_type
    unsloth_zoo.device_type.device_is_bf16_supported = lambda *args: True
    return backend
backends.start = start
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_number_format_that_unsloth_changes_is_refused(tmp_path):
    """On a GPU with bfloat16 it would train a float32 run in that."""
    script = [str(ASSETS / "sft_train.py"), "--backend", "unsloth", "--output", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", BF16, *script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 4 and "Unsloth turned bf16 on, against --precision" in done.stderr


def test_a_reward_model_is_never_the_model_that_speaks():
    done = call("cpu", "reward_train.py", "--max-steps", "2")
    assert done.returncode == 4 and "Unsloth loads the model that speaks" in done.stderr
    done = subprocess.run(
        [sys.executable, str(ASSETS / "reward_train.py"), "--dry-run", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0


def audit(stack, **env):
    done = call(stack, "doctor.py", "--audit", "--model", "demo", "--json", env=env)
    return done.returncode, json.loads(done.stdout)


def test_the_audit_tells_what_does_not_accelerate():
    code, found = audit("hf")
    assert code == 0 and found["verdict"] == "NOT" and found["model"]["of_unsloth"] == 0 < found["model"]["all"]
    code, found = audit("cpu")
    assert code == 4 and found["verdict"] == "NOT" and found["import"]["backend"] == "cpu"
    assert found["adapters"]["of_unsloth"] == 0


def test_the_audit_says_accelerated_where_all_is_patched_and_compiled():
    """torch.compile included, which has a compiler for a CPU, too."""
    code, found = audit("gpu", UNSLOTH_COMPILE_DISABLE="0")
    assert code == 0 and found["verdict"] == "ACCELERATED" and not found["reasons"], found
    assert found["makes_logits"] is False


def test_the_audit_tells_a_trainer_that_unsloth_has_not_rewritten():
    done = call("gpu", "doctor.py", "--audit", "--model", "demo", "--json", env={"GPU_STACK_PLAIN_TRL": "1"})
    found = json.loads(done.stdout)
    assert found["verdict"] == "PARTLY" and "has not rewritten it" in found["reasons"][0]
    assert found["trainer"]["of_unsloth"] is False
