#!/usr/bin/env bash
# Train on several machines under SLURM:  sbatch slurm.sh --model google/gemma-4-E2B-it --dataset /shared/rows.jsonl
# What follows slurm.sh are flags of sft_train.py. Change the lines below to fit; SCRIPT, SKILL, CONFIG, RUN and HF_HOME
# may also be set outside. All of them must lie on a disk that all machines share.
#SBATCH --job-name=gemma
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
# Activate the environment with assets/requirements.txt here. Not tried on a cluster.

# SLURM runs a copy of this file, so that its own place says nothing.
SKILL=${SKILL:-/shared/gemma-trainer}
SCRIPT=${SCRIPT:-sft_train.py}
CONFIG=${CONFIG:-ddp-multinode.yaml} # or fsdp2.yaml, zero2.yaml, zero3.yaml
RUN=${RUN:-/shared/runs/$SLURM_JOB_ID} # the same after a requeue, where the job keeps its number
export HF_HOME=${HF_HOME:-/shared/huggingface}
export HF_HUB_OFFLINE=1 # download the model once, before: 64 processes that do it together get in each other's way
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds that a checkpoint may take, within the 300 of --signal

read -r MASTER < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # the first line
PORT=$((20000 + SLURM_JOB_ID % 20000)) # another for each job that shares a machine
export SKILL SCRIPT CONFIG RUN MASTER PORT
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it over from sbatch
export PID_FILE=/tmp/gemma-$SLURM_JOB_ID.pid GPUS=${SLURM_GPUS_ON_NODE:-8}

stopped=
# Five minutes before the time is up SLURM signals this shell alone, which has each launcher hand the signal on to its
# processes: they write a checkpoint.
stop() {
    stopped=1
    srun --overlap --ntasks-per-node=1 --cpus-per-task=1 bash -c 'kill -TERM "$(cat "$PID_FILE")"' || true
}
trap stop TERM

# One launcher on each machine, which starts a process for each GPU.
srun --kill-on-bad-exit=1 bash -c '
    echo $$ > "$PID_FILE"
    exec accelerate launch --config_file "$SKILL/assets/accelerate/$CONFIG" \
        --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * GPUS)) --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$MASTER" --main_process_port "$PORT" \
        "$SKILL/assets/$SCRIPT" --output "$RUN" --resume "$@"' launch "$@" &
step=$!
code=0
wait $step || code=$?
if [[ $stopped ]]; then # the signal ended that wait
    code=0
    wait $step || code=$?
    if ((code)); then scontrol requeue "$SLURM_JOB_ID"; fi # and --resume goes on from the checkpoint
fi
exit "$code"
