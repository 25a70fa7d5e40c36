# Shared by pretrain_llama.sh and benchmarks/launch.sh, which source it: what both refuse, and how ranks are started.
# Before that they set
#
#   root         the project's folder
#   script       their name, for messages
#   variables    the names of their environment variables, with spaces
#   instead      a function: variable of another script, its value → prints what to do about it in this one
#
# shellcheck shell=bash disable=SC2034,SC2154 # set here for the scripts, or by them

CPU_RANKS=4 # ranks on a machine without GPUs

# Some schedulers set these for each machine. Python on the way to the ranks would take itself for one of them, and be
# silent where it is not the first; the ranks get their own.
unset RANK LOCAL_RANK

say() { printf '%s\n' "$*" >&2; }
fail() { # what is wrong, what to do about it
    say "error: $1"
    say "next step: ${2:-change it and start again; the head of $script lists every variable.}"
    exit 2
}
counted() { if (($1 == 1)); then printf '%s %s' "$1" "$2"; else printf '%s %ss' "$1" "$2"; fi; } # number, word

# --- variables that are none of ours --------------------------------------------------------------------------------
only_some="CONFIG RESUME STEPS DATA_SOURCE DATA_PATH CAD PING_PONG BACKWARD ENABLE_NSYS EXPERIMENT_LOG_MEMORY_USAGE"
only_some+=" EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB LAYERS MODE MIX BATCHES WARM_UP RECOMPUTE LINK_CHANNELS CP_SIZE PP_SIZE"

refuse_unknown_variables() {
    local name known meant
    while read -r name; do
        [[ -n ${!name:-} && " $variables " != *" $name "* ]] || continue
        meant=''
        for known in $variables $only_some; do
            if [[ ${name//_/} == "${known//_/}" ]]; then meant=$known; fi # DRYRUN, TPSIZE, MICROBATCHES, or the same
        done
        [[ -n $meant ]] || case $name in
            TP | TP_DEGREE | TENSOR_PARALLEL_SIZE) meant=TP_SIZE ;;
            PP | PP_DEGREE | PIPELINE_PARALLEL_SIZE) meant=PP_SIZE ;;
            CP | CP_DEGREE | CONTEXT_PARALLEL_SIZE) meant=CP_SIZE ;;
            NUM_NODES | NODE_COUNT) meant=NNODES ;;
            NGPUS | NUM_GPUS | N_GPUS | NPROC_PER_NODE | NUM_GPUS_PER_NODE) meant=GPUS_PER_NODE ;;
            NUM_STEPS | MAX_STEPS | TRAIN_STEPS | TRAIN_ITERS | ITERS) meant=STEPS ;;
            NUM_BATCHES) meant=BATCHES ;;
            SEQ_LEN | SEQ_LENGTH | MAX_SEQ_LEN | CTX_LENGTH | CONTEXT_LEN | CONTEXT) meant=CONTEXT_LENGTH ;;
            NUM_TOKENS | TOKENS | TOKENS_PER_GPU) meant=TOKENS_PER_RANK ;;
            NUM_MICRO_BATCHES | NUM_MICROBATCHES | MICRO_BATCH_SIZE) meant=MICRO_BATCHES ;;
            MODEL_SIZE | MODEL_NAME) meant=MODEL ;;
            CONFIG_FILE | CONFIG_PATH) meant=CONFIG ;;
            NUM_LAYERS | N_LAYERS) meant=LAYERS ;;
            MODES | METHOD) meant=MODE ;;
            MIXES | DATASET) meant=MIX ;;
            RUN_NAME | EXPERIMENT) meant=NAME ;;
            ENABLE_CAD | USE_CAD) meant=CAD ;;
            DATA_DIR | DATASET_PATH) meant=DATA_PATH ;;
            NSYS | ENABLE_NSIGHT) meant=ENABLE_NSYS ;;
            DP | DP_SIZE)
                fail "There is no variable $name: all ranks that other parallelism leaves are data parallel." \
                    "unset $name."
                ;;
            EXPERIMENT_*)
                fail "There is no variable $name." \
                    "unset it; EXPERIMENT_LOG_MEMORY_USAGE and EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB exist in pretrain_llama.sh."
                ;;
            DISTCA_*) fail "There is no variable $name; none of ours starts with DISTCA_." "unset $name." ;;
            *) continue ;;
        esac
        if [[ " $variables " == *" $meant "* ]]; then near_miss "$name" "$meant"; fi
        fail "$name is not a variable of ${script##*/}." "$(instead "$meant" "${!name}"), or unset $name."
    done < <(compgen -e)
}
near_miss() { fail "There is no variable $1; did you mean $2?" "unset $1, or rename it to $2."; }

# --- values ---------------------------------------------------------------------------------------------------------
# One that is empty or not set passes.
each_matches() { # regular expression, words for it, names
    local pattern=$1 words=$2 name
    shift 2
    for name in "$@"; do
        [[ -z ${!name:-} || ${!name} =~ ^($pattern)$ ]] || fail "$name is '${!name}'; it must be $words."
    done
}
# What is counted with here: Bash takes other words for names of variables, and lets large numbers overflow.
each_counts() { each_matches '[1-9][0-9]{0,8}' "a whole number from 1 to 999999999" "$@"; }
each_counts_from_0() { each_matches '0|[1-9][0-9]{0,8}' "a whole number from 0 to 999999999" "$@"; }

# --- machines and ranks ---------------------------------------------------------------------------------------------
gpus_here() { # GPUs of this machine, 0 where there is no driver
    if command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true; else echo 0; fi
}

find_ranks() { # tensor-parallel ranks × stages; sets launcher, nodes, gpus (of a machine), local_ranks, world
    nodes=${NNODES:-1}
    gpus=${GPUS_PER_NODE:-}
    if [[ -n ${SLURM_JOB_ID:-} ]]; then find_slurm_machines; else find_machines; fi
    local_ranks=$((gpus > 0 ? gpus : CPU_RANKS))
    world=$((nodes * local_ranks))
    if ((world % $1)); then
        local sizes=TP_SIZE
        if [[ " $variables " == *" PP_SIZE "* ]]; then sizes+=" × PP_SIZE"; fi
        fail "The $(counted "$world" rank) ($(counted "$nodes" node) × $local_ranks) cannot be divided by $sizes = $1." \
            "change ${sizes/ ×/,}, NNODES or GPUS_PER_NODE."
    fi
}

find_slurm_machines() {
    local counted_by
    launcher=srun
    each_counts SLURM_STEP_NUM_TASKS SLURM_JOB_NUM_NODES
    each_matches '[1-9][0-9]{0,17}' "a whole number of at least 1 and at most 18 digits" SLURM_JOB_ID
    if [[ ${SLURM_STEP_NUM_TASKS:-1} -gt 1 ]]; then
        fail "srun started this script ${SLURM_STEP_NUM_TASKS} times, but it starts the ranks itself." \
            "use sbatch $script, or bash $script inside salloc."
    fi
    command -v scontrol >/dev/null 2>&1 || fail "This is a Slurm job, but Slurm's scontrol is not on PATH." \
        "add the folder of Slurm's commands to PATH, or unset SLURM_JOB_ID to use this machine alone."
    [[ -n ${SLURM_JOB_NODELIST:-} ]] || fail "This is a Slurm job, but SLURM_JOB_NODELIST does not name its machines." \
        "use sbatch $script, or bash $script inside salloc, or unset SLURM_JOB_ID to use this machine alone."
    nodes=${SLURM_JOB_NUM_NODES:-1}
    if [[ -n ${NNODES:-} && $NNODES != "$nodes" ]]; then
        fail "NNODES is $NNODES, but the Slurm job has $(counted "$nodes" node)." \
            "unset NNODES, or ask Slurm for --nodes=$NNODES."
    fi
    # Inside salloc this may be a login node, so Slurm's own count comes first; it may read h100:8.
    for counted_by in SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE; do
        [[ -z $gpus && -n ${!counted_by:-} ]] || continue
        gpus=${!counted_by##*:}
        [[ $gpus =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$counted_by is '${!counted_by}', which names no number of GPUs." \
            "set GPUS_PER_NODE to the GPUs of a machine, 0 for CPU ranks."
    done
    if [[ -z $gpus ]]; then
        gpus=$(gpus_here)
        if ((gpus == 0)); then
            say "Slurm names no GPUs for this job and this machine has none, so ranks run on CPUs; if the job's machines" \
                "have GPUs, set GPUS_PER_NODE."
        fi
    fi
}

find_machines() {
    local found
    launcher=torchrun
    found=$(gpus_here)
    gpus=${gpus:-$found}
    if ((gpus > found)); then
        fail "GPUS_PER_NODE is $gpus, but this machine has $(counted "$found" GPU)." "lower or unset GPUS_PER_NODE."
    fi
    if ((nodes > 1)) && [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
        fail "NNODES is $nodes outside Slurm, but MASTER_ADDR and NODE_RANK are not both set." \
            "start the script on each machine, with the first one's address and the machine's own number in them."
    fi
    if ((nodes > 1 && NODE_RANK >= nodes)); then
        fail "NODE_RANK is $NODE_RANK, but NNODES is $nodes; numbers start at 0."
    fi
}

# --- Python ---------------------------------------------------------------------------------------------------------
# An environment that already has everything is used as it is: first the active one, then .venv in the project.
find_python() { # sets python; fails where neither has everything
    python=python
    if has_everything python; then return 0; fi
    has_everything "$root/.venv/bin/python" || return 1
    export PATH=$root/.venv/bin:$PATH
}
has_everything() { # python
    command -v "$1" >/dev/null 2>&1 && "$1" - >/dev/null 2>&1 <<'PYTHON'
import importlib.util as util, sys
needed = "numpy yaml torch megatron.core psutil jsonargparse rich matplotlib tensorboard".split()
sys.exit(not ((3, 11) <= sys.version_info < (3, 13) and all(util.find_spec(name) for name in needed)))
PYTHON
}

# --- the command ----------------------------------------------------------------------------------------------------
asks_for_help() { # the script's arguments
    local argument
    for argument in "$@"; do
        if [[ $argument == -h || $argument == --help ]]; then return 0; fi
    done
    return 1
}

make_command() { # what each rank's Python gets; sets command, with profiler and environment where they are set
    local steps hosts cores
    if ((gpus == 0)); then
        # Several ranks share the cores; more threads than cores only get in each other's way.
        environment+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" "CUDA_VISIBLE_DEVICES=")
    fi
    if [[ $launcher == srun ]]; then
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol does not name the job's machines."
        environment+=("MASTER_ADDR=${hosts%%$'\n'*}" "MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}")
        environment+=("WORLD_SIZE=$world" "LOCAL_WORLD_SIZE=$local_ranks")
        steps=(srun "--nodes=$nodes" "--ntasks=$world" "--ntasks-per-node=$local_ranks" --kill-on-bad-exit=1)
        # Without this a task may get one core only. SLURM_JOB_CPUS_PER_NODE may read 64(x2).
        cores=${SLURM_JOB_CPUS_PER_NODE:-}
        cores=${cores%%[!0-9]*}
        if [[ -n $cores ]] && ((cores >= local_ranks)); then steps+=("--cpus-per-task=$((cores / local_ranks))"); fi
        # shellcheck disable=SC2016 # expands in each task, not here
        steps+=(bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank)
        command=(env "${environment[@]}" "${steps[@]}" ${profiler[@]+"${profiler[@]}"} "$python" "$@")
        return
    fi
    # torchrun, of the Python that was checked and not of another one on the PATH.
    steps=("$python" -m torch.distributed.run "--nproc-per-node=$local_ranks")
    if ((nodes > 1)); then
        steps+=("--nnodes=$nodes" "--node-rank=$NODE_RANK")
        steps+=("--master-addr=$MASTER_ADDR" "--master-port=${MASTER_PORT:-29500}")
    else
        steps+=(--standalone)
    fi
    command=(env ${environment[@]+"${environment[@]}"} ${profiler[@]+"${profiler[@]}"} "${steps[@]}" "$@")
}

run_ranks() { # command ...; sets status, and stopped_by to the name of the signal where one ended the run
    local run=''
    stopped_by=''
    # In the background: Bash hears a signal while it waits, but would leave a command in the foreground running.
    trap 'stop_ranks SIGINT' INT
    trap 'stop_ranks SIGTERM' TERM
    trap 'stop_ranks SIGQUIT' QUIT
    "$@" &
    run=$!
    if [[ -n $stopped_by ]]; then stop_ranks "$stopped_by"; fi # it came before there was a process to stop
    while true; do
        status=0
        wait "$run" || status=$?
        kill -0 "$run" 2>/dev/null || break # else a signal ended the wait
    done
    trap - INT TERM QUIT
    if ((status == 0)); then stopped_by=''; fi # it came too late
    if [[ -n $stopped_by ]]; then status=$((128 + $(kill -l "$stopped_by"))); fi # as Bash has it
}
stop_ranks() { # name of the signal
    stopped_by=$1
    if [[ -n $run ]]; then kill -TERM "$run" 2>/dev/null || true; fi
}
