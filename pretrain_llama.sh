#!/usr/bin/env bash
# Train a LLaMA-style model with core attention disaggregation.
#
#   bash pretrain_llama.sh               on this machine: one rank per GPU, or four CPU ranks where there is no GPU
#   sbatch pretrain_llama.sh             as a Slurm job (the #SBATCH lines below are defaults; sbatch's options win)
#   salloc ... ; bash pretrain_llama.sh  inside an allocation: one rank per GPU on all of its nodes
#
# What follows the script's name goes to pretrain_llama.py as it is, so every setting can be given by dotted name:
#
#   bash pretrain_llama.sh --optimizer.lr 1e-3 --cad.tolerance 0.05
#
# The usual ones can also be environment variables: TP_SIZE=2 STEPS=20 bash pretrain_llama.sh. --help lists both, and so
# do docs/environment.md and docs/settings.md. DRY_RUN=1 checks the settings, prints the command and starts nothing.
# Where DistCA's dependencies are missing they are installed into .venv beside this script first.
#
#SBATCH --job-name=distca
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=slurm-%j.out
# Five minutes before the time is over, or at preemption, the run saves; then the job goes on from there.
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

set -euo pipefail
trap '' USR1 # it would end a job that only begins; Python listens to it as soon as it runs

# sbatch runs a copy of this script from its own folder; the project is then where the job was submitted.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $root/scripts/python.sh && -n ${SLURM_SUBMIT_DIR:-} ]]; then root=$SLURM_SUBMIT_DIR; fi
if [[ ! -f $root/scripts/python.sh ]]; then
    printf '%s\n' "error: The project is not in $root." "next step: submit the job from the project's folder." >&2
    exit 2
fi
# shellcheck source=scripts/python.sh
source "$root/scripts/python.sh"
run_module distca.train.launch.pretrain "$@"
