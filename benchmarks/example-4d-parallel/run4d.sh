#!/usr/bin/env bash
# DistCA's pipeline ticks against 1F1B: data, context, tensor and pipeline parallelism.
#
#   bash benchmarks/example-4d-parallel/run4d.sh                    on this machine: one rank per GPU, or four CPU ranks
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 benchmarks/example-4d-parallel/run4d.sh
#
# All modes train on the same documents, in one start of the ranks. Environment variables:
#
#   NNODES           machines (1, or those of the Slurm job)
#   GPUS_PER_NODE    GPUs per machine, 0 for CPU ranks (all that are there)
#   TP_SIZE          tensor-parallel ranks (1)
#   PP_SIZE          pipeline stages (2)
#   CP_SIZE          ranks of a context-parallel group (with MODE=all every size, else all data-parallel ranks)
#   MODEL            tiny | 8b | 8b-cut | 34b (8b on GPUs, tiny on CPUs): shape from configs/
#   LAYERS           layers of it (4; on CPUs 2)
#   CONTEXT_LENGTH   longest document, in tokens; several, with spaces, are run one after the other (131072; CPUs 512)
#   TOKENS_PER_RANK  tokens per data-parallel rank and micro-batch (131072; on CPUs 512)
#   MIX              pretrain, prolong or "pretrain prolong" (both), in their long-context versions
#   BATCHES          measured global batches (30; on CPUs 4), after WARM_UP (3)
#   MICRO_BATCHES    per step (4)
#   MODE             all, or some of distca packed variable cp cp-keep ring ulysses (distca packed)
#   RECOMPUTE        none | mlp | all: what is computed again in backward (none; baselines: with all, mlp)
#   LINK_CHANNELS    limit every NCCL transfer to so many channels, as a network would (no limit)
#   SEED             of weights and documents
#   NAME             folder of the run in logs/ (date and time); NAME-2 where there is one already
#   MASTER_ADDR, NODE_RANK, MASTER_PORT   for NNODES > 1 without Slurm
#   DRY_RUN          1 checks the settings, prints the command and starts nothing
#
# What follows the script's name are further settings of pretrain_llama.py, such as --cad.tolerance 0.02.
# Each run writes logs/NAME/benchmark.json, table.md and plot.png; logs/table.md and logs/plot.png are over all runs.
#
#SBATCH --job-name=distca-benchmark
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out

set -euo pipefail

example=example-4d-parallel takes_stages=1 default_modes="distca packed"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# sbatch runs a copy of this script from its own folder; the project is then where the job was submitted.
if [[ ! -f $here/../launch.sh ]]; then here=${SLURM_SUBMIT_DIR:-$PWD}/benchmarks/$example; fi
if [[ ! -f $here/../launch.sh ]]; then
    printf '%s\n' "error: There is no $here." "next step: submit the job from the project's folder." >&2
    exit 2
fi
# shellcheck source=benchmarks/launch.sh
source "$here/../launch.sh"
