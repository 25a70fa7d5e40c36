# Sourced by pretrain_llama.sh, run3d.sh, run4d.sh, tests/run.sh and .ci/run after they set root, the project's folder:
# run_module MODULE ARGUMENT ... runs one of the project's modules that need the standard library only.
# shellcheck shell=bash disable=SC2154

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

run_module() {
    local candidate
    for candidate in python "$root/.venv/bin/python" python3.12 python3.11 python3 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[12].*/bin/python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            # -P: what the user's folder holds is no module of ours.
            exec "$candidate" -P -m "$@"
        fi
    done
    printf '%s\n' "error: There is no Python 3.11 or 3.12 on PATH." \
        "next step: install one, or activate an environment that has it." >&2
    exit 2
}
