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
#     EXPERIMENT_LOG_MEMORY_USAGE         (0)          --log.memory: 1 records each step's peak memory
#     ENABLE_NSYS      1 | 0 (0)                       run under Nsight Systems; reports go to runs/nsys/
#     DRY_RUN          1 | 0 (0)                       print the command, start nothing
#
# A variable that looks like one of these but is none is refused, and so are values that contradict each other.
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

CPU_RANKS=4          # ranks on a machine without GPUs
CPU_TORCH=2.13.0     # the torch that is installed, by itself and first, on a machine without GPUs

say() { printf '%s\n' "$*" >&2; }
fail() { # what is wrong, what to do about it
    say "error: $1"
    say "next step: ${2:-change it and start again; the head of pretrain_llama.sh lists every variable.}"
    exit 2
}

# --- where we are ---------------------------------------------------------------------------------------------------
# sbatch runs a copy of this script from its own folder; the project is then where the job was submitted.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/pyproject.toml && -n ${SLURM_SUBMIT_DIR:-} ]]; then here=$SLURM_SUBMIT_DIR; fi
[[ -f $here/pyproject.toml ]] || fail "The project is not in $here." "submit the job from the project's folder."

# --- variables that are none of ours --------------------------------------------------------------------------------
refuse_unknown_variables() {
    local name
    while read -r name; do
        case $name in
            EXPERIMENT_LOG_MEMORY_USAGE | EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB) ;;
            EXPERIMENT_*)
                fail "There is no variable $name." \
                    "unset it; EXPERIMENT_LOG_MEMORY_USAGE and EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB exist."
                ;;
            DISTCA_*) fail "There is no variable $name; none of ours starts with DISTCA_." "unset $name." ;;
            TP | TPSIZE | TP_DEGREE | TENSOR_PARALLEL_SIZE) near_miss "$name" TP_SIZE ;;
            PP | PPSIZE | PP_DEGREE | PIPELINE_PARALLEL_SIZE) near_miss "$name" PP_SIZE ;;
            NUM_NODES | N_NODES | NODE_COUNT) near_miss "$name" NNODES ;;
            NGPUS | NUM_GPUS | N_GPUS | NPROC_PER_NODE | NUM_GPUS_PER_NODE) near_miss "$name" GPUS_PER_NODE ;;
            NUM_STEPS | MAX_STEPS | TRAIN_STEPS | TRAIN_ITERS) near_miss "$name" STEPS ;;
            SEQ_LEN | SEQ_LENGTH | MAX_SEQ_LEN | CTX_LENGTH | CONTEXT_LEN) near_miss "$name" CONTEXT_LENGTH ;;
            NUM_TOKENS | TOKENS | TOKENS_PER_GPU) near_miss "$name" TOKENS_PER_RANK ;;
            MICROBATCHES | NUM_MICRO_BATCHES | NUM_MICROBATCHES | MICRO_BATCH_SIZE) near_miss "$name" MICRO_BATCHES ;;
            MODEL_SIZE | MODEL_NAME) near_miss "$name" MODEL ;;
            CONFIG_FILE | CONFIG_PATH) near_miss "$name" CONFIG ;;
            RUN_NAME | EXPERIMENT) near_miss "$name" NAME ;;
            PINGPONG) near_miss "$name" PING_PONG ;;
            ENABLE_CAD | USE_CAD) near_miss "$name" CAD ;;
            DATA_DIR | DATASET_PATH) near_miss "$name" DATA_PATH ;;
            NSYS | ENABLE_NSIGHT) near_miss "$name" ENABLE_NSYS ;;
            DRYRUN) near_miss "$name" DRY_RUN ;;
            DP | DP_SIZE)
                fail "There is no variable $name: all ranks that TP_SIZE leaves are data parallel." "unset $name."
                ;;
            CP | CP_SIZE)
                fail "There is no variable $name: attention is balanced over all data-parallel ranks." "unset $name."
                ;;
        esac
    done < <(compgen -e)
}
near_miss() { fail "There is no variable $1; did you mean $2?" "unset $1, or rename it to $2."; }

# --- values ---------------------------------------------------------------------------------------------------------
# Each check takes names of variables; one that is empty or not set passes.
each_matches() { # regular expression, words for it, names
    local pattern=$1 words=$2 name
    shift 2
    for name in "$@"; do
        [[ -z ${!name:-} || ${!name} =~ ^($pattern)$ ]] || fail "$name is '${!name}'; it must be $words."
    done
}

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
each_matches '[1-9][0-9]*' "a whole number of at least 1" \
    NNODES TP_SIZE PP_SIZE STEPS CONTEXT_LENGTH TOKENS_PER_RANK MICRO_BATCHES
each_matches '0|[1-9][0-9]*' "a whole number" GPUS_PER_NODE SEED NODE_RANK MASTER_PORT
each_matches '[0-9]*[.]?[0-9]+' "a number of GiB" EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB
each_matches '0|1' "0 or 1" CAD PING_PONG ENABLE_NSYS DRY_RUN EXPERIMENT_LOG_MEMORY_USAGE
each_matches 'auto|keep|resend' "auto, keep or resend" BACKWARD
each_matches 'stdlib|text|jsonl|indexed|mix' "stdlib, text, jsonl, indexed or mix" DATA_SOURCE
each_matches 'tiny|8b|8b-cut|34b' "tiny, 8b, 8b-cut or 34b" MODEL

# --- machines and ranks ---------------------------------------------------------------------------------------------
gpus_here() { # GPUs of this machine, 0 where there is no driver
    if command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true; else echo 0; fi
}

nodes=${NNODES:-1}
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    launcher=srun
    if [[ ${SLURM_STEP_NUM_TASKS:-1} -gt 1 ]]; then
        fail "srun started this script ${SLURM_STEP_NUM_TASKS} times, but it starts the ranks itself." \
            "use sbatch pretrain_llama.sh, or bash pretrain_llama.sh inside salloc."
    fi
    nodes=${SLURM_JOB_NUM_NODES:-1}
    if [[ -n ${NNODES:-} && $NNODES != "$nodes" ]]; then
        fail "NNODES is $NNODES, but the Slurm job has $nodes nodes." "unset NNODES, or ask Slurm for --nodes=$NNODES."
    fi
    # Inside salloc this may be a login node, so Slurm's own count comes first; it may read h100:8.
    gpus=${GPUS_PER_NODE:-}
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-}}
    if [[ -z $gpus && -n ${SLURM_GPUS_PER_NODE:-} ]]; then gpus=${SLURM_GPUS_PER_NODE##*:}; fi
    [[ -n $gpus ]] || gpus=$(gpus_here)
else
    found=$(gpus_here)
    gpus=${GPUS_PER_NODE:-$found}
    if ((gpus > found)); then
        fail "GPUS_PER_NODE is $gpus, but this machine has $found GPUs." "lower or unset GPUS_PER_NODE."
    fi
    launcher=torchrun
    if ((nodes > 1)) && [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
        fail "NNODES is $nodes outside Slurm, but MASTER_ADDR and NODE_RANK are not both set." \
            "start the script on each machine, with the first one's address and the machine's own number in them."
    fi
    if ((nodes > 1 && NODE_RANK >= nodes)); then
        fail "NODE_RANK is $NODE_RANK, but NNODES is $nodes; numbers start at 0."
    fi
fi
local_ranks=$((gpus > 0 ? gpus : CPU_RANKS))
world=$((nodes * local_ranks))
model_ranks=$((${TP_SIZE:-1} * ${PP_SIZE:-1}))
if ((world % model_ranks)); then
    fail "The $world ranks ($nodes nodes × $local_ranks) are not divisible by TP_SIZE × PP_SIZE = $model_ranks." \
        "change TP_SIZE, PP_SIZE, NNODES or GPUS_PER_NODE."
fi

# --- the run --------------------------------------------------------------------------------------------------------
if [[ -n ${MODEL:-} && -n ${CONFIG:-} ]]; then
    fail "MODEL and CONFIG are both set, and each names a configuration." "keep one of them."
fi
for variable in MODEL CONFIG; do
    if [[ -n ${!variable:-} ]]; then refuse_twice "$variable" config; fi
done
if ! in_arguments config; then
    model=${MODEL:-$( ((gpus > 0)) && echo 8b-cut || echo tiny)}
    config=$here/configs/llama-$model.yaml
    if [[ $model == tiny ]]; then config=$here/configs/tiny.yaml; fi
    config=${CONFIG:-$config}
    [[ -f $config ]] || fail "There is no configuration file $config." "look into $here/configs."
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
# An environment that already has everything is used as it is: first the active one, then .venv beside this script.
has_everything() { # python
    command -v "$1" >/dev/null 2>&1 && "$1" - >/dev/null 2>&1 <<'PYTHON'
import importlib.util as util, sys
needed = "numpy yaml torch megatron.core psutil jsonargparse rich matplotlib tensorboard".split()
sys.exit(not ((3, 11) <= sys.version_info < (3, 13) and all(util.find_spec(name) for name in needed)))
PYTHON
}

set_up() {
    local base='' candidate log=$here/setup.log
    for candidate in python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1; then
            base=$candidate
            break
        fi
    done
    if [[ -z $base ]]; then
        fail "There is no Python 3.11 or 3.12 with venv on PATH." "install one, or activate an environment that has it."
    fi
    say "DistCA's dependencies are missing: installing them into $here/.venv, once (output in $log)."
    : >"$log"
    if [[ ! -x $here/.venv/bin/python ]]; then in_background "making .venv" "$log" "$base" -m venv "$here/.venv"; fi
    local pip=("$here/.venv/bin/python" -m pip install --disable-pip-version-check)
    if ((gpus > 0)); then
        in_background "installing DistCA with its GPU parts" "$log" "${pip[@]}" -e "${here}[gpu]"
    else
        # By itself and first: the CPU build, where the package index has it, instead of gigabytes of CUDA libraries.
        in_background "installing torch" "$log" "${pip[@]}" "torch==$CPU_TORCH"
        in_background "installing DistCA" "$log" "${pip[@]}" -e "$here"
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

python=python
if has_everything python; then
    :
elif has_everything "$here/.venv/bin/python"; then
    export PATH=$here/.venv/bin:$PATH
elif [[ ${DRY_RUN:-0} == 1 ]]; then
    say "DistCA's dependencies are missing; a run would install them into $here/.venv first."
else
    set_up
    export PATH=$here/.venv/bin:$PATH
fi

# --- the command ----------------------------------------------------------------------------------------------------
environment=()
if ((gpus == 0)); then
    # Several ranks share the cores; more threads than cores only get in each other's way.
    environment+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" "CUDA_VISIBLE_DEVICES=")
fi

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

program=("$here/pretrain_llama.py" ${options[@]+"${options[@]}"} ${arguments[@]+"${arguments[@]}"})
if [[ $launcher == srun ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    environment+=("MASTER_ADDR=${hosts%%$'\n'*}" "MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}")
    environment+=("WORLD_SIZE=$world" "LOCAL_WORLD_SIZE=$local_ranks")
    steps=(srun "--nodes=$nodes" "--ntasks=$world" "--ntasks-per-node=$local_ranks" --kill-on-bad-exit=1)
    # Without this a task may get one core only. SLURM_JOB_CPUS_PER_NODE may read 64(x2).
    cores=${SLURM_JOB_CPUS_PER_NODE:-}
    cores=${cores%%[!0-9]*}
    if [[ -n $cores ]] && ((cores >= local_ranks)); then steps+=("--cpus-per-task=$((cores / local_ranks))"); fi
    # shellcheck disable=SC2016 # expands in each task, not here
    steps+=(bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank)
    command=(env "${environment[@]}" "${steps[@]}" ${profiler[@]+"${profiler[@]}"} "$python" "${program[@]}")
else
    # torchrun, of the Python that was checked and not of another one on the PATH.
    steps=("$python" -m torch.distributed.run "--nproc-per-node=$local_ranks")
    if ((nodes > 1)); then
        steps+=("--nnodes=$nodes" "--node-rank=$NODE_RANK")
        steps+=("--master-addr=$MASTER_ADDR" "--master-port=${MASTER_PORT:-29500}")
    else
        steps+=(--standalone)
    fi
    command=(env ${environment[@]+"${environment[@]}"} ${profiler[@]+"${profiler[@]}"} "${steps[@]}" "${program[@]}")
fi

if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
for argument in ${arguments[@]+"${arguments[@]}"}; do
    if [[ $argument == -h || $argument == --help ]]; then exec "$python" "$here/pretrain_llama.py" --help; fi
done
# Once and here, so that a mistake is one sentence and not a failure report of every rank.
"$python" "${program[0]}" --check "$world" "${program[@]:1}"
if ((gpus > 0)); then kind=GPU; else kind=CPU; fi
say "Starting $world $kind ranks on $nodes node(s) through $launcher.${given[*]:+ From the environment: ${given[*]}.}"
# Not exec: the launcher's report of a failure is long, and what to do about it should come last.
trap 'kill -TERM "$run" 2>/dev/null || true' INT TERM
"${command[@]}" &
run=$!
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do # a signal ended the first wait
    status=0
    wait "$run" || status=$?
done
if ((status != 0 && status != 2)); then
    say "error: The run ended early, with exit code $status; the log above names the rank and the step."
    say "next step: RESUME=latest goes on from the last checkpoint, if one was saved (checkpoint.save_every)."
fi
exit "$status"
