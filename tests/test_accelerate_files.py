"""The launch configurations: accelerate takes each as it is, and what they set reaches the processes that it starts."""

import os
import re
import signal
import subprocess
import time
from importlib.util import find_spec

import pytest
import tiny
import yaml

from conftest import ASSETS
from gemma_trainer.fsdp import declare_layers

FOLDER = ASSETS / "accelerate"
CONFIGS = sorted(path.name for path in FOLDER.glob("*.yaml") if "distributed_type" in path.read_text())
TYPES = {"ddp.yaml": "MULTI_GPU", "ddp-multinode.yaml": "MULTI_GPU", "ddp-cpu.yaml": "MULTI_GPU", "fsdp2.yaml": "FSDP",
         "fsdp2-cpu.yaml": "FSDP",
         "zero2.yaml": "DEEPSPEED", "zero3.yaml": "DEEPSPEED"}  # fmt: skip


def launched(name, *flags):
    """(arguments, environment) with which `accelerate launch` would start the processes."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--config_file", str(FOLDER / name), *map(str, flags), "sft_train.py", "--max-len", "512"]
    arguments, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    assert arguments.multi_gpu + arguments.use_fsdp + arguments.use_deepspeed == 1
    if not arguments.use_deepspeed:
        return arguments, prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments, prepare_deepspeed_cmd_env(arguments)[1]


def test_these_are_all():
    assert CONFIGS == sorted(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_loads_each_and_leaves_the_precision_to_the_script(name, caplog, monkeypatch):
    from accelerate.commands.config import load_config_from_file

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which accelerate would else choose, and tell
    loaded = load_config_from_file(str(FOLDER / name))
    assert str(loaded.distributed_type).endswith(TYPES[name])
    arguments, environment = launched(name, "--num_processes", 1, "--main_process_port", 0)
    assert arguments.num_processes == 1 and environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "had defaults used instead" not in caplog.text  # all values are given
    assert arguments.training_script_args == ["--max-len", "512"]


def test_the_flags_of_the_examples_win_over_the_file():
    flags = "--num_machines 8 --num_processes 64 --machine_rank 3 --main_process_ip first --main_process_port 29700"
    arguments, _ = launched("ddp-multinode.yaml", *flags.split())
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("8", "8", 3)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "first:29700")


def test_mixed_precision_no_leaves_bf16_to_the_training_arguments(monkeypatch, tmp_path):
    from transformers import TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched("ddp-cpu.yaml")[1]["ACCELERATE_MIXED_PRECISION"])
    for bf16, wanted in ((True, "bf16"), (False, "no")):
        assert TrainingArguments(tmp_path, bf16=bf16, use_cpu=True).mixed_precision == wanted


NO_AUDIO = {"Gemma4TextDecoderLayer", "Gemma4VisionEncoderLayer", "Gemma4VisionPatchEmbedder"}
WRAPPED = {
    "gemma4": NO_AUDIO | {"Gemma4AudioLayer"},
    "gemma4_unified": {"Gemma4UnifiedTextDecoderLayer"},
    "gemma3_text": {"Gemma3DecoderLayer"},
    "gemma3n": {"Gemma3nTextDecoderLayer", "TimmWrapperModel"},
    "gemma4_dense": NO_AUDIO,
    "gemma4_moe": NO_AUDIO,
    "gemma3": {"Gemma3DecoderLayer", "SiglipEncoderLayer"},
}


@pytest.mark.parametrize("family", WRAPPED)
def test_fsdp2_cuts_each_family_into_its_layers(family, monkeypatch):
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    for key, value in launched("fsdp2.yaml", "--num_processes", 2, "--main_process_port", 0)[1].items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True and not plugin.activation_checkpointing
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    model = tiny.make_model(family, tiny.make_processor(family))
    declare_layers(model)
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert {type(module).__name__ for module in model.modules() if policy(module)} >= WRAPPED[family]


@pytest.mark.parametrize("name, stage", [("zero2.yaml", 2), ("zero3.yaml", 3)])
def test_zero_leaves_batch_accumulation_and_clipping_to_the_script(name, stage, monkeypatch):
    """Also where DeepSpeed is not installed; where it is, its own class reads the result."""
    from accelerate.utils import DeepSpeedPlugin

    for key, value in launched(name, "--num_processes", 1)[1].items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    config = plugin.deepspeed_config
    assert config["bf16"]["enabled"] and config["zero_optimization"]["stage"] == stage
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert config[key] == "auto"
    assert {config["zero_optimization"][f"offload_{what}"]["device"] for what in ("optimizer", "param")} == {"none"}
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)
    if find_spec("deepspeed"):
        from deepspeed.runtime.config import DeepSpeedConfig

        batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
        assert DeepSpeedConfig(config | batch | {"gradient_clipping": 1.0}).zero_config.stage == stage


# ---- the examples for schedulers


def test_the_kubernetes_job_holds_together():
    service, claim, job = yaml.safe_load_all((FOLDER / "kubernetes-job.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    words = container["args"][0].split()
    value = {flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--") and flag != "--resume"}
    assert service["spec"] == {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": "gemma"}}
    assert job["metadata"]["name"] == "gemma" and pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(
        value["--num_machines"]
    )
    assert int(value["--num_processes"]) == spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert value["--main_process_ip"] == "gemma-0.gemma" and value["--machine_rank"] == '"$JOB_COMPLETION_INDEX"'
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and volumes["memory"]["emptyDir"]["medium"] == "Memory"
    assert mounts["memory"] == "/dev/shm"
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert words[0] == "exec" and "--resume" in words and value["--output"].startswith(mounts["shared"])


def test_the_skypilot_task_starts_the_launcher_on_each_machine(tmp_path):
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task["workdir"] == "." and (ASSETS.parent / "assets" / "accelerate" / "skypilot.yaml").is_file()
    ranks = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1"}
    ranks["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"
    words = run_with_fakes(tmp_path, ["bash", "-c", task["run"]], task["envs"] | ranks)["accelerate"][0].split()
    assert words[words.index("--num_processes") + 1] == "16"
    assert words[words.index("--main_process_ip") + 1] == "10.0.0.1"
    assert words[words.index("--machine_rank") + 1] == "1" and words[-1] == "--resume"


FAKES = {  # what stands in for the scheduler's commands: each writes down what it was called with
    "accelerate": "trap 'echo TERM >> $TOLD/signals; exit 1' TERM\n[ $WAITS ] && { sleep 60 & wait $!; }\nexit 0",
    "scontrol": 'if [ "$1" = show ]; then echo first; echo second; fi',
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec env SLURM_NODEID=0 "$@"',
}


def run_with_fakes(folder, command, environment, signalled=False):
    """Run a scheduler's script with fakes in the place of its commands; what these were called with."""
    (folder / "bin").mkdir()
    for name, body in FAKES.items():
        (folder / "bin" / name).write_text(f'#!/bin/bash\necho "$*" >> $TOLD/{name}\n{body}\n')
        (folder / "bin" / name).chmod(0o755)
    env = {**os.environ, **environment, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TOLD": str(folder)}
    process = subprocess.Popen(command, env=env | ({"WAITS": "1"} if signalled else {}))
    if signalled:
        deadline = time.monotonic() + 30
        while not (folder / "accelerate").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=30)
    told = {path.name: path.read_text().splitlines() for path in folder.iterdir() if path.is_file()}
    return told | {"code": code}


@pytest.mark.parametrize("signalled", [False, True])
def test_the_slurm_script_launches_once_a_node_and_is_queued_again_before_its_time_is_up(tmp_path, signalled):
    job = {"SLURM_JOB_ID": str(900_000_000 + os.getpid()), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2",
           "SLURM_GPUS_ON_NODE": "4", "SKILL": "/skill", "RUN": "/shared/run"}  # fmt: skip
    command = ["bash", str(FOLDER / "slurm.sh"), "--dataset", "my rows.jsonl"]
    told = run_with_fakes(tmp_path, command, job, signalled)
    (words,) = told["accelerate"]
    assert words.startswith(
        "launch --config_file /skill/assets/accelerate/ddp-multinode.yaml --num_machines 2 --num_processes 8 "
        "--machine_rank 0 --main_process_ip first --main_process_port "
    )
    assert words.endswith("/skill/assets/sft_train.py --output /shared/run --resume --dataset my rows.jsonl")
    requeued = [line for line in told["scontrol"] if line.startswith("requeue")]
    if signalled:
        assert told["signals"] == ["TERM"] and requeued == [f"requeue {job['SLURM_JOB_ID']}"] and told["code"] == 1
    else:
        assert told["code"] == 0 and not requeued and "signals" not in told


def test_the_samples_of_flags_in_the_files_are_flags_of_the_scripts():
    """What the examples say after the script's name."""
    import sft_train

    from gemma_trainer import cli

    known = set(cli.build_parser(sft_train.Config, "", "")._option_string_actions)
    for path in FOLDER.iterdir():
        text = path.read_text().replace("\\\n", " ").replace("\n#  ", " ")
        for line in re.findall(r"(?:sft_train\.py|\$SCRIPT\")([^\n]*)", text):
            for flag in re.findall(r"(?<!\S)--[a-z-]+", line):
                assert flag in known, f"{path.name}: {flag}"
