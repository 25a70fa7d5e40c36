#!/usr/bin/env bash
# DistCA against every baseline: data, context and tensor parallelism.
#
#   bash benchmarks/example-3d-parallel/run3d.sh                    on this machine: one rank per GPU, or four CPU ranks
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 benchmarks/example-3d-parallel/run3d.sh
#
# All modes train on the same documents, in one start of the ranks. Environment variables (MODE, MIX, BATCHES, ...) are in
# docs/environment.md and --help; what follows the script's name are further settings of pretrain_llama.py, such as
# --cad.tolerance 0.02. DRY_RUN=1 checks the settings, prints the command and starts nothing.
# Each run writes logs/NAME/benchmark.json, table.md and plot.png; logs/table.md and logs/plot.png are over all runs.
#
#SBATCH --job-name=distca-benchmark
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out

set -euo pipefail

# sbatch runs a copy of this script from its own folder; the project is then where the job was submitted.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ ! -f $root/scripts/python.sh ]]; then root=${SLURM_SUBMIT_DIR:-$PWD}; fi
if [[ ! -f $root/scripts/python.sh ]]; then
    printf '%s\n' "error: The project is not in $root." "next step: submit the job from the project's folder." >&2
    exit 2
fi
# shellcheck source=scripts/python.sh
source "$root/scripts/python.sh"
run_module benchmarks.throughput.launch 3d "$@"
