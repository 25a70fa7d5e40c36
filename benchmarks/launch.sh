# Shared by example-3d-parallel/run3d.sh and example-4d-parallel/run4d.sh, which source it after setting their defaults:
#
#   example         name of the example's folder
#   takes_stages    1 where PP_SIZE is a variable
#   default_modes   for MODE
#
# shellcheck shell=bash disable=SC2154 # what is not set here, the scripts set
set -euo pipefail

CPU_RANKS=4 # ranks on a machine without GPUs

say() { printf '%s\n' "$*" >&2; }
fail() { # what is wrong, what to do about it
    say "error: $1"
    say "next step: ${2:-change it and start again; the head of the script lists every variable.}"
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# sbatch runs a copy of the script from its own folder; the project is then where the job was submitted.
if [[ ! -f $root/pyproject.toml && -n ${SLURM_SUBMIT_DIR:-} ]]; then root=$SLURM_SUBMIT_DIR; fi
[[ -f $root/pyproject.toml ]] || fail "The project is not in $root." "submit the job from the project's folder."

# --- variables that are none of ours --------------------------------------------------------------------------------
near_miss() { fail "There is no variable $1; did you mean $2?" "unset $1, or rename it to $2."; }
while read -r name; do
    case $name in
        DISTCA_* | EXPERIMENT_*) fail "There is no variable $name here." "unset $name." ;;
        TP | TPSIZE | TP_DEGREE | TENSOR_PARALLEL_SIZE) near_miss "$name" TP_SIZE ;;
        PP | PPSIZE | PP_DEGREE | PIPELINE_PARALLEL_SIZE) near_miss "$name" PP_SIZE ;;
        CP | CPSIZE | CP_DEGREE | CONTEXT_PARALLEL_SIZE) near_miss "$name" CP_SIZE ;;
        NUM_NODES | N_NODES | NODE_COUNT) near_miss "$name" NNODES ;;
        NGPUS | NUM_GPUS | N_GPUS | NPROC_PER_NODE | NUM_GPUS_PER_NODE) near_miss "$name" GPUS_PER_NODE ;;
        SEQ_LEN | SEQ_LENGTH | MAX_SEQ_LEN | CTX_LENGTH | CONTEXT_LEN | CONTEXT) near_miss "$name" CONTEXT_LENGTH ;;
        NUM_TOKENS | TOKENS | TOKENS_PER_GPU) near_miss "$name" TOKENS_PER_RANK ;;
        MICROBATCHES | NUM_MICRO_BATCHES | NUM_MICROBATCHES | MICRO_BATCH_SIZE) near_miss "$name" MICRO_BATCHES ;;
        MODEL_SIZE | MODEL_NAME) near_miss "$name" MODEL ;;
        NUM_LAYERS | N_LAYERS) near_miss "$name" LAYERS ;;
        NUM_BATCHES | STEPS | NUM_STEPS | ITERS) near_miss "$name" BATCHES ;;
        MODES | METHOD) near_miss "$name" MODE ;;
        MIXES | DATASET) near_miss "$name" MIX ;;
        RUN_NAME | EXPERIMENT) near_miss "$name" NAME ;;
        DRYRUN) near_miss "$name" DRY_RUN ;;
        PP_SIZE)
            if ((! takes_stages)); then
                fail "There is no variable PP_SIZE in $example." "use benchmarks/example-4d-parallel/run4d.sh."
            fi
            ;;
        DP | DP_SIZE) fail "There is no variable $name: ranks that are left are data parallel." "unset $name." ;;
    esac
done < <(compgen -e)

# --- values ---------------------------------------------------------------------------------------------------------
each_matches() { # regular expression, words for it, names
    local pattern=$1 words=$2 name
    shift 2
    for name in "$@"; do
        [[ -z ${!name:-} || ${!name} =~ ^($pattern)$ ]] || fail "$name is '${!name}'; it must be $words."
    done
}
number='[1-9][0-9]*'
each_matches "$number" "a whole number of at least 1" \
    NNODES TP_SIZE PP_SIZE CP_SIZE LAYERS TOKENS_PER_RANK BATCHES MICRO_BATCHES LINK_CHANNELS
each_matches '0|[1-9][0-9]*' "a whole number" GPUS_PER_NODE WARM_UP SEED NODE_RANK MASTER_PORT
each_matches "$number( $number)*" "one or more whole numbers" CONTEXT_LENGTH
each_matches '(pretrain|prolong)( (pretrain|prolong))?' "pretrain, prolong or both" MIX
each_matches '0|1' "0 or 1" DRY_RUN
each_matches 'none|mlp|all' "none, mlp or all" RECOMPUTE
each_matches 'tiny|8b|8b-cut|34b' "tiny, 8b, 8b-cut or 34b" MODEL
mode='(distca|packed|variable|(cp|ring|ulysses)[0-9]*|cp[0-9]*-keep)'
each_matches "all|$mode( $mode)*" "all, or some of distca, packed, variable, cp, cp-keep, ring, ulysses" MODE

# --- machines and ranks ---------------------------------------------------------------------------------------------
gpus_here() { # GPUs of this machine, 0 where there is no driver
    if command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true; else echo 0; fi
}
nodes=${NNODES:-1}
gpus=${GPUS_PER_NODE:-}
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    launcher=srun
    nodes=${SLURM_JOB_NUM_NODES:-1}
    if [[ -n ${NNODES:-} && $NNODES != "$nodes" ]]; then
        fail "NNODES is $NNODES, but the Slurm job has $nodes nodes." "unset NNODES, or ask Slurm for --nodes=$NNODES."
    fi
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-}}
    if [[ -z $gpus && -n ${SLURM_GPUS_PER_NODE:-} ]]; then gpus=${SLURM_GPUS_PER_NODE##*:}; fi
    [[ -n $gpus ]] || gpus=$(gpus_here)
else
    launcher=torchrun
    found=$(gpus_here)
    gpus=${gpus:-$found}
    if ((gpus > found)); then
        fail "GPUS_PER_NODE is $gpus, but this machine has $found GPUs." "lower or unset GPUS_PER_NODE."
    fi
    if ((nodes > 1)) && [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
        fail "NNODES is $nodes outside Slurm, but MASTER_ADDR and NODE_RANK are not both set." \
            "start the script on each machine, with the first one's address and the machine's own number in them."
    fi
fi
local_ranks=$((gpus > 0 ? gpus : CPU_RANKS))
world=$((nodes * local_ranks))
stages=1
if ((takes_stages)); then stages=${PP_SIZE:-2}; fi
model_ranks=$((${TP_SIZE:-1} * stages))
if ((world % model_ranks)); then
    fail "The $world ranks ($nodes nodes × $local_ranks) are not divisible by TP_SIZE × PP_SIZE = $model_ranks." \
        "change them, NNODES or GPUS_PER_NODE."
fi
data_ranks=$((world / model_ranks))
if ((data_ranks % ${CP_SIZE:-1})); then
    fail "CP_SIZE is $CP_SIZE, which does not divide the $data_ranks ranks that TP_SIZE and PP_SIZE leave."
fi

# --- the run --------------------------------------------------------------------------------------------------------
modes=()
for word in ${MODE:-$default_modes}; do
    case $word in
        cp | ring | ulysses) modes+=("$word${CP_SIZE:-$data_ranks}") ;;
        cp-keep) modes+=("cp${CP_SIZE:-$data_ranks}-keep") ;;
        *) modes+=("$word") ;;
    esac
done
if ((gpus > 0)); then
    model=${MODEL:-8b} layers=${LAYERS:-4} context=${CONTEXT_LENGTH:-131072} tokens=${TOKENS_PER_RANK:-131072}
    batches=${BATCHES:-30}
else
    model=${MODEL:-tiny} layers=${LAYERS:-2} context=${CONTEXT_LENGTH:-512} tokens=${TOKENS_PER_RANK:-512}
    batches=${BATCHES:-4}
fi
# Relative to the project, where the ranks are started: results name no place on this machine.
config=configs/llama-$model.yaml
if [[ $model == tiny ]]; then config=configs/tiny.yaml; fi
name=${NAME:-$(date +%Y%m%d-%H%M%S)}
logs=benchmarks/$example/logs
# shellcheck disable=SC2206 # lists of words
own=(--output "$logs/$name" --modes "${modes[@]}" --mixes ${MIX:-pretrain prolong} --contexts $context)
own+=(--batches "$batches" --warm-up "${WARM_UP:-3}")
if [[ -n ${LINK_CHANNELS:-} ]]; then own+=(--link-channels "$LINK_CHANNELS"); fi
if [[ -n ${CP_SIZE:-} && ${modes[*]} == all ]]; then own+=(--degree "$CP_SIZE"); fi
settings=(--config "$config" --model.layers "$layers" --parallel.tp "${TP_SIZE:-1}" --parallel.pp "$stages")
settings+=(--data.tokens_per_rank "$tokens" --data.context_length "$tokens")
if [[ $model == tiny ]]; then settings+=(--model.vocabulary 256); fi
settings+=(--train.micro_batches "${MICRO_BATCHES:-$((stages > 1 ? 4 : 1))}")
settings+=(--train.recompute "${RECOMPUTE:-none}") # the same in all modes
if [[ -n ${SEED:-} ]]; then settings+=(--train.seed "$SEED" --data.seed "$SEED"); fi
program=(-m benchmarks.throughput "${own[@]}" -- "${settings[@]}" "$@")

# --- the command ----------------------------------------------------------------------------------------------------
python=python
has_everything='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "megatron.core", "rich"))))'
for candidate in python "$root/.venv/bin/python"; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$has_everything" >/dev/null 2>&1; then
        python=$candidate
        break
    fi
    if [[ $candidate != python && ${DRY_RUN:-0} != 1 ]]; then
        fail "DistCA's dependencies are missing." "run bash pretrain_llama.sh once, which installs them."
    fi
done
environment=("PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}")
if ((gpus == 0)); then environment+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" "CUDA_VISIBLE_DEVICES="); fi
if [[ $launcher == srun ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    environment+=("MASTER_ADDR=${hosts%%$'\n'*}" "MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}")
    environment+=("WORLD_SIZE=$world" "LOCAL_WORLD_SIZE=$local_ranks")
    steps=(srun "--nodes=$nodes" "--ntasks=$world" "--ntasks-per-node=$local_ranks" --kill-on-bad-exit=1)
    # shellcheck disable=SC2016 # expands in each task, not here
    steps+=(bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank "$python")
else
    steps=("$python" -m torch.distributed.run "--nproc-per-node=$local_ranks")
    if ((nodes > 1)); then
        steps+=("--nnodes=$nodes" "--node-rank=$NODE_RANK")
        steps+=("--master-addr=$MASTER_ADDR" "--master-port=${MASTER_PORT:-29500}")
    else
        steps+=(--standalone)
    fi
fi
command=(env "${environment[@]}" "${steps[@]}" "${program[@]}")
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
cd "$root"
mkdir -p "$logs/$name"
say "Starting $world ranks on $nodes node(s) through $launcher; figures and log go to $logs/$name."
printf '%q ' "${command[@]}" >"$logs/$name/command.txt"
# The progress bar needs the terminal itself; elsewhere the log is also kept in a file.
if [[ -t 2 ]]; then "${command[@]}"; else "${command[@]}" 2>&1 | tee "$logs/$name/log.txt"; fi
if ((${NODE_RANK:-0} == 0)); then
    env "${environment[@]}" "$python" -m benchmarks.throughput.sweep "$logs" --output "$logs"
    say "All runs so far: $logs/table.md and $logs/plot.png."
fi
