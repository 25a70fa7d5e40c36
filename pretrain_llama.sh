#!/usr/bin/env bash
# Train a LLaMA-style model with core attention disaggregation.
#
#   bash pretrain_llama.sh               on this machine: one rank per GPU, or four CPU ranks where there is no GPU
#   sbatch pretrain_llama.sh             as a Slurm job (the #SBATCH lines below are defaults; sbatch's options win)
#   salloc ... ; bash pretrain_llama.sh  inside an allocation: one rank per GPU on all of its nodes
#
# What follows the script's name goes to pretrain_llama.py as it is, so every setting can be given by dotted name:
#
#   bash pretrain_llama.sh --optimizer.lr 1e-3 --cad.tolerance 0.05     (python pretrain_llama.py --help lists all)
#
# The usual ones can also be environment variables. Each only adds the option beside it; a setting that is not given
# keeps the value of the configuration file.
#
#   which run
#     MODEL            tiny | 8b | 8b-cut | 34b        takes configs/tiny.yaml, configs/llama-8b.yaml, ...
#     CONFIG           a YAML file                     --config; instead of MODEL
#                                                      default: MODEL=8b-cut on GPUs, MODEL=tiny on CPUs
#     NAME             name of the run                 --name
#     RESUME           folder of a run, or latest      --checkpoint.resume
#   where
#     NNODES           machines                        default 1, or all nodes of the Slurm job
#     GPUS_PER_NODE    GPUs per machine, 0 for CPU     default: all that are there
#     TP_SIZE          tensor-parallel ranks           --parallel.tp
#     PP_SIZE          pipeline stages                 --parallel.pp
#     MASTER_ADDR, NODE_RANK, MASTER_PORT              for NNODES > 1 without Slurm: address of the first machine,
#                                                      number of this one (0, 1, ...), port there (default 29500)
#   what
#     STEPS            optimizer steps                 --train.steps
#     CONTEXT_LENGTH   most tokens of a document       --data.context_length
#     TOKENS_PER_RANK  tokens per rank, micro-batch    --data.tokens_per_rank
#     MICRO_BATCHES    micro-batches per step          --train.micro_batches
#     SEED             seed of weights and data        --train.seed and --data.seed
#     DATA_SOURCE      stdlib|text|jsonl|indexed|mix   --data.source
#     DATA_PATH        file, folder, prefix, mix name  --data.path
#   how attention runs
#     CAD              1 | 0                           --cad.enabled
#     PING_PONG        1 | 0                           --cad.ping_pong
#     BACKWARD         auto | keep | resend            --cad.backward
#     EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB   (by tokens)  --cad.nvshmem_buffer_gb: GiB in which rows land that travel by NVSHMEM
#   what is recorded
#     EXPERIMENT_LOG_MEMORY_USAGE         (0)          --log.memory: 1 records what CPU ranks hold, too
#     ENABLE_NSYS      1 | 0 (0)                       run under Nsight Systems; reports go to runs/nsys/
#     DRY_RUN          1 | 0 (0)                       check the settings and print the command, start nothing
#
# Usual misspellings of these are refused, and so are the benchmarks' variables and values that contradict each other.
# Where DistCA's dependencies are missing they are installed into .venv beside this script first.
#
#SBATCH --job-name=distca
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=slurm-%j.out

set -euo pipefail

CPU_TORCH=2.13.0     # the torch that is installed, by itself and first, on a machine without GPUs

# sbatch runs a copy of this script from its own folder; the project is then where the job was submitted.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $root/launch_ranks.sh && -n ${SLURM_SUBMIT_DIR:-} ]]; then root=$SLURM_SUBMIT_DIR; fi
if [[ ! -f $root/launch_ranks.sh ]]; then
    printf '%s\n' "error: The project is not in $root." "next step: submit the job from the project's folder." >&2
    exit 2
fi
script=pretrain_llama.sh
variables="MODEL CONFIG NAME RESUME NNODES GPUS_PER_NODE TP_SIZE PP_SIZE MASTER_ADDR NODE_RANK MASTER_PORT STEPS"
variables+=" CONTEXT_LENGTH TOKENS_PER_RANK MICRO_BATCHES SEED DATA_SOURCE DATA_PATH CAD PING_PONG BACKWARD ENABLE_NSYS"
variables+=" EXPERIMENT_LOG_MEMORY_USAGE EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB DRY_RUN"
instead() { # variable of the benchmarks, its value
    case $1 in
        LAYERS) echo "append --model.layers $2" ;;
        RECOMPUTE) echo "append --train.recompute $2" ;;
        WARM_UP) echo "append --optimizer.warmup_steps $2" ;;
        BATCHES) echo "rename it to STEPS" ;;
        MIX) echo "set DATA_SOURCE=mix and DATA_PATH to pretrain or prolong" ;;
        MODE) echo "set CAD to 1 (distca) or 0 (packed), use benchmarks/example-3d-parallel/run3d.sh for others" ;;
        CP_SIZE) echo "let DistCA balance attention over all data-parallel ranks without it" ;;
        LINK_CHANNELS) echo "use it with benchmarks/example-3d-parallel/run3d.sh" ;;
    esac
}
# shellcheck source=launch_ranks.sh
source "$root/launch_ranks.sh"

# --- values ---------------------------------------------------------------------------------------------------------
options=() # what pretrain_llama.py gets
given=()   # what came from the environment, to be said
option() { # variable, dotted setting ...; adds --setting VALUE for each, unless the variable is empty
    local name=$1 setting value
    value=${!name:-}
    [[ -n $value ]] || return 0
    shift
    given+=("$name=$value")
    for setting in "$@"; do
        refuse_twice "$name" "$setting"
        options+=("--$setting" "$value")
    done
}
switch() { # the same for 0 and 1
    local name=$1 value=${!1:-}
    [[ -n $value ]] || return 0
    refuse_twice "$name" "$2"
    given+=("$name=$value")
    if [[ $value == 1 ]]; then options+=("--$2" true); else options+=("--$2" false); fi
}
in_arguments() { # setting: is it among the script's own arguments?
    local argument
    for argument in ${arguments[@]+"${arguments[@]}"}; do
        if [[ $argument == "--$1" || $argument == "--$1="* ]]; then return 0; fi
    done
    return 1
}
refuse_twice() {
    if in_arguments "$2"; then fail "$1 and --$2 are both given, and say the same thing twice." "keep one of them."; fi
}

arguments=("$@")
refuse_unknown_variables
each_counts NNODES TP_SIZE PP_SIZE
each_counts_from_0 GPUS_PER_NODE NODE_RANK
each_matches '[1-9][0-9]*' "a whole number of at least 1" STEPS CONTEXT_LENGTH TOKENS_PER_RANK MICRO_BATCHES
each_matches '0|[1-9][0-9]*' "a whole number" SEED MASTER_PORT
each_matches '[0-9]*[.]?[0-9]+' "a number of GiB" EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB
each_matches '0|1' "0 or 1" CAD PING_PONG ENABLE_NSYS DRY_RUN EXPERIMENT_LOG_MEMORY_USAGE
each_matches 'auto|keep|resend' "auto, keep or resend" BACKWARD
each_matches 'stdlib|text|jsonl|indexed|mix' "stdlib, text, jsonl, indexed or mix" DATA_SOURCE
each_matches 'tiny|8b|8b-cut|34b' "tiny, 8b, 8b-cut or 34b" MODEL

# --- machines and ranks ---------------------------------------------------------------------------------------------
find_ranks $((${TP_SIZE:-1} * ${PP_SIZE:-1}))

# --- the run --------------------------------------------------------------------------------------------------------
if [[ -n ${MODEL:-} && -n ${CONFIG:-} ]]; then
    fail "MODEL and CONFIG are both set, and each names a configuration." "keep one of them."
fi
for variable in MODEL CONFIG; do
    if [[ -n ${!variable:-} ]]; then refuse_twice "$variable" config; fi
done
if ! in_arguments config; then
    model=${MODEL:-$( ((gpus > 0)) && echo 8b-cut || echo tiny)}
    config=$root/configs/llama-$model.yaml
    if [[ $model == tiny ]]; then config=$root/configs/tiny.yaml; fi
    config=${CONFIG:-$config}
    [[ -f $config ]] || fail "There is no configuration file $config." "look into $root/configs."
    options+=(--config "$config")
fi
option NAME name
option RESUME checkpoint.resume
option TP_SIZE parallel.tp
option PP_SIZE parallel.pp
option STEPS train.steps
option CONTEXT_LENGTH data.context_length
option TOKENS_PER_RANK data.tokens_per_rank
option MICRO_BATCHES train.micro_batches
option SEED train.seed data.seed
option DATA_SOURCE data.source
option DATA_PATH data.path
switch CAD cad.enabled
switch PING_PONG cad.ping_pong
option BACKWARD cad.backward
option EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB cad.nvshmem_buffer_gb
switch EXPERIMENT_LOG_MEMORY_USAGE log.memory

# --- Python ---------------------------------------------------------------------------------------------------------
set_up() {
    local base='' candidate log=$root/setup.log
    for candidate in python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1; then
            base=$candidate
            break
        fi
    done
    if [[ -z $base ]]; then
        fail "There is no Python 3.11 or 3.12 with venv on PATH." "install one, or activate an environment that has it."
    fi
    say "DistCA's dependencies are missing: installing them into $root/.venv, once (output in $log)."
    : >"$log"
    if [[ ! -x $root/.venv/bin/python ]]; then in_background "making .venv" "$log" "$base" -m venv "$root/.venv"; fi
    local pip=("$root/.venv/bin/python" -m pip install --disable-pip-version-check)
    if ((gpus > 0)); then
        in_background "installing DistCA with its GPU parts" "$log" "${pip[@]}" -e "${root}[gpu]"
    else
        # By itself and first: the CPU build, where the package index has it, instead of gigabytes of CUDA libraries.
        in_background "installing torch" "$log" "${pip[@]}" "torch==$CPU_TORCH"
        in_background "installing DistCA" "$log" "${pip[@]}" -e "$root"
    fi
}

in_background() { # what is done, log, command ...: runs it with a sign of life
    local doing=$1 log=$2 pid seconds=0
    shift 2
    "$@" >>"$log" 2>&1 </dev/null &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        if [[ -t 2 ]]; then
            printf '\r  %s ... %ss ' "$doing" "$seconds" >&2
        elif ((seconds % 30 == 0)); then
            say "  $doing ... ${seconds}s"
        fi
        sleep 1
        seconds=$((seconds + 1))
    done
    if [[ -t 2 ]]; then printf '\r  %s ... %ss\n' "$doing" "$seconds" >&2; fi
    if ! wait "$pid"; then
        tail -n 5 "$log" >&2
        fail "This step of the installation failed: $doing." "read $log, then start again; what is installed stays."
    fi
}

checked=1
if ! find_python; then
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        say "DistCA's dependencies are missing; a run would install them into $root/.venv first, and check the settings."
        checked=0
    else
        set_up
        export PATH=$root/.venv/bin:$PATH
    fi
fi

# --- the command ----------------------------------------------------------------------------------------------------
environment=()
profiler=()
if [[ ${ENABLE_NSYS:-0} == 1 ]]; then
    if ! command -v nsys >/dev/null 2>&1; then
        fail "ENABLE_NSYS is 1, but nsys is not on PATH." "install Nsight Systems, or unset ENABLE_NSYS."
    fi
    report=runs/nsys/${NAME:-distca}
    if [[ $launcher == srun ]]; then report+="-rank%q{SLURM_PROCID}"; else report+="-node${NODE_RANK:-0}"; fi
    profiler=(nsys profile "--trace=cuda,nvtx,osrt" --force-overwrite=true --output="$report")
    [[ ${DRY_RUN:-0} == 1 ]] || mkdir -p runs/nsys
fi

program=("$root/pretrain_llama.py" ${options[@]+"${options[@]}"} ${arguments[@]+"${arguments[@]}"})
make_command "${program[@]}"
if ((checked)); then
    if asks_for_help ${arguments[@]+"${arguments[@]}"}; then exec "$python" "$root/pretrain_llama.py" --help; fi
    # Once and here, so that a mistake is one sentence and not a failure report of every rank.
    "$python" "${program[0]}" --check "$world" "${program[@]:1}"
fi
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
if ((gpus > 0)); then kind=GPU; else kind=CPU; fi
say "Starting $(counted "$world" "$kind rank") on $(counted "$nodes" node) through $launcher.${given[*]:+ From the environment: ${given[*]}.}"
# Not exec: the launcher's report of a failure is long, and what to do about it should come last.
run_ranks "${command[@]}"
if ((status != 0 && status != 2)); then
    if [[ -n $stopped_by ]]; then
        say "error: The run was stopped by $stopped_by."
    else
        say "error: The run ended early, with exit code $status; the log above names the rank and the step."
    fi
    say "next step: RESUME=latest goes on from the last checkpoint, if one was saved (checkpoint.save_every)."
fi
exit "$status"
