# Shared by example-3d-parallel/run3d.sh and example-4d-parallel/run4d.sh, which source it after setting their defaults:
#
#   example         name of the example's folder
#   takes_stages    1 where PP_SIZE is a variable
#   default_modes   for MODE
#
# shellcheck shell=bash disable=SC2154 # what is not set here, the scripts set
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=benchmarks/$example/run3d.sh
if ((takes_stages)); then script=benchmarks/$example/run4d.sh; fi
variables="MODEL LAYERS NAME NNODES GPUS_PER_NODE TP_SIZE CP_SIZE MASTER_ADDR NODE_RANK MASTER_PORT CONTEXT_LENGTH"
variables+=" TOKENS_PER_RANK MIX BATCHES WARM_UP MICRO_BATCHES MODE RECOMPUTE LINK_CHANNELS SEED DRY_RUN"
if ((takes_stages)); then variables+=" PP_SIZE"; fi
instead() { # variable of training or of the other script, its value
    case $1 in
        PP_SIZE) echo "use benchmarks/example-4d-parallel/run4d.sh" ;;
        CONFIG) echo "append --config $2, whose settings win over MODEL's" ;;
        STEPS) echo "rename it to BATCHES" ;;
        RESUME) echo "let every mode begin anew without it" ;;
        DATA_SOURCE | DATA_PATH) echo "choose the documents' lengths with MIX" ;;
        CAD) echo "choose distca (balanced attention) or packed (attention at home) with MODE" ;;
        PING_PONG) if [[ $2 == 0 ]]; then echo "append --cad.ping_pong false"; else echo "append --cad.ping_pong true"; fi ;;
        BACKWARD) echo "append --cad.backward $2" ;;
        EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB) echo "append --cad.nvshmem_buffer_gb $2" ;;
        EXPERIMENT_LOG_MEMORY_USAGE) echo "read peak memory in table.md, where it always is" ;;
        ENABLE_NSYS) echo "use it with pretrain_llama.sh" ;;
    esac
}
# shellcheck source=launch_ranks.sh
source "$root/launch_ranks.sh"
refuse_unknown_variables

# --- values ---------------------------------------------------------------------------------------------------------
whole='[1-9][0-9]*'
each_counts NNODES TP_SIZE PP_SIZE CP_SIZE
each_counts_from_0 GPUS_PER_NODE NODE_RANK
each_matches "$whole" "a whole number of at least 1" LAYERS TOKENS_PER_RANK BATCHES MICRO_BATCHES LINK_CHANNELS
each_matches '0|[1-9][0-9]*' "a whole number" WARM_UP SEED MASTER_PORT
each_matches "$whole( $whole)*" "one or more whole numbers" CONTEXT_LENGTH
each_matches '(pretrain|prolong)( (pretrain|prolong))?' "pretrain, prolong or both" MIX
each_matches '0|1' "0 or 1" DRY_RUN
each_matches '[^/]*[^/.][^/]*' "a folder's name without slashes" NAME
each_matches 'none|mlp|all' "none, mlp or all" RECOMPUTE
each_matches 'tiny|8b|8b-cut|34b' "tiny, 8b, 8b-cut or 34b" MODEL
mode='(distca|packed|variable|(cp|ring|ulysses)[0-9]*|cp[0-9]*-keep)'
each_matches "all|$mode( $mode)*" "all, or some of distca, packed, variable, cp, cp-keep, ring, ulysses" MODE

# --- machines and ranks ---------------------------------------------------------------------------------------------
stages=1
if ((takes_stages)); then stages=${PP_SIZE:-2}; fi
model_ranks=$((${TP_SIZE:-1} * stages))
find_ranks "$model_ranks"
data_ranks=$((world / model_ranks))
if ((data_ranks % ${CP_SIZE:-1})); then
    fail "CP_SIZE is $CP_SIZE, which does not divide the $data_ranks ranks that TP_SIZE and PP_SIZE leave."
fi

takes_degree=0
for word in ${MODE:-$default_modes}; do
    case $word in all | cp | cp-keep | ring | ulysses) takes_degree=1 ;; esac
done
if [[ -n ${CP_SIZE:-} ]] && ((!takes_degree)); then
    fail "CP_SIZE is $CP_SIZE, but no mode of '${MODE:-$default_modes}' takes it." \
        "unset it, or add cp, cp-keep, ring or ulysses to MODE."
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
# shellcheck disable=SC2206 # lists of words
own=(--modes "${modes[@]}" --mixes ${MIX:-pretrain prolong} --contexts $context --batches "$batches")
own+=(--warm-up "${WARM_UP:-3}")
if [[ -n ${LINK_CHANNELS:-} ]]; then own+=(--link-channels "$LINK_CHANNELS"); fi
if [[ -n ${CP_SIZE:-} && ${modes[*]} == all ]]; then own+=(--degree "$CP_SIZE"); fi
settings=(--config "$config" --model.layers "$layers" --parallel.tp "${TP_SIZE:-1}" --parallel.pp "$stages")
settings+=(--data.tokens_per_rank "$tokens" --data.context_length "$tokens")
if [[ $model == tiny ]]; then settings+=(--model.vocabulary 256); fi
settings+=(--train.micro_batches "${MICRO_BATCHES:-$((stages > 1 ? 4 : 1))}")
settings+=(--train.recompute "${RECOMPUTE:-none}") # the same in all modes
if [[ -n ${SEED:-} ]]; then settings+=(--train.seed "$SEED" --data.seed "$SEED"); fi
# A file is named from where the user stands.
previous=''
for argument in "$@"; do
    if [[ $previous == --config && $argument != /* && -f $argument ]]; then
        argument=$PWD/$argument
        argument=${argument#"$root/"}
    fi
    settings+=("$argument")
    previous=$argument
done

# --- Python and the check -------------------------------------------------------------------------------------------
checked=1
if ! find_python; then
    if [[ ${DRY_RUN:-0} != 1 ]]; then
        fail "DistCA's dependencies are missing." "run bash pretrain_llama.sh once, which installs them."
    fi
    say "DistCA's dependencies are missing, so the settings are not checked; bash pretrain_llama.sh installs them."
    checked=0
fi
cd "$root"
logs=benchmarks/$example/logs
environment=("PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}")
if ((checked)); then
    if asks_for_help "$@"; then
        sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$script"
        exec "$python" pretrain_llama.py --help
    fi
    # Once and here, so that a mistake is one sentence and not a failure report of every rank.
    env "${environment[@]}" "$python" -m benchmarks.throughput --check "$world" --output "$logs" "${own[@]}" \
        -- "${settings[@]}"
fi

# --- the folder -----------------------------------------------------------------------------------------------------
# logs/NAME, or the first free one of NAME-2, NAME-3, ..., as training does. The first machine makes it; mkdir fails where
# a run that started at the same moment was first.
base=$logs/${NAME:-$(date +%Y%m%d-%H%M%S)}
folder=$base
first_machine=1
if [[ $launcher == torchrun ]] && ((nodes > 1 && NODE_RANK > 0)); then first_machine=0; fi
take_folder() {
    if [[ ${DRY_RUN:-0} == 1 ]]; then [[ ! -e $folder ]]; else mkdir "$folder" 2>/dev/null; fi
}
if ((first_machine)); then
    [[ ${DRY_RUN:-0} == 1 ]] || mkdir -p "$logs"
    for ((number = 2; ; number++)); do
        if take_folder; then break; fi
        [[ -e $folder ]] || fail "The folder $root/$folder cannot be made." "look at who may write to $root/$logs."
        folder=$base-$number
    done
fi

# --- the command ----------------------------------------------------------------------------------------------------
make_command -m benchmarks.throughput --output "$folder" "${own[@]}" -- "${settings[@]}"
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
say "Starting $(counted "$world" rank) on $(counted "$nodes" node) through $launcher; figures and log go to $folder."
if ((!first_machine)); then exec "${command[@]}"; fi # the first machine's ranks write the figures
printf '%q ' "${command[@]}" >"$folder/command.txt"
# The progress bar needs the terminal itself; elsewhere the log is also kept in a file.
if [[ -t 2 ]]; then
    run_ranks "${command[@]}"
else
    # Ctrl-C reaches tee, too, but it goes on until the ranks have said their last.
    exec 3> >(trap '' INT TERM && exec tee "$folder/log.txt")
    tee=$!
    run_ranks "${command[@]}" >&3 2>&1 3>&-
    exec 3>&-
    wait "$tee" || status=$((status ? status : 1)) # the log could not be written
fi
if [[ -n $stopped_by ]]; then
    say "error: The run was stopped by $stopped_by."
    say "next step: start again; every start begins anew and takes a folder of its own."
fi
if ((status)); then exit "$status"; fi
env "${environment[@]}" "$python" -m benchmarks.throughput.sweep "$logs" --output "$logs"
say "All runs so far: $logs/table.md and $logs/plot.png."
