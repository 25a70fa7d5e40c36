#!/usr/bin/env bash
# Run the tests; what follows goes to pytest: bash tests/run.sh tests/plan -k routes
# Without anything all of them but those marked "matrix", in four processes side by side, files that start ranks first.
# Each process keeps to one core (tests/conftest.py). With two cores there are two on each, as some tests wait.
# What is missing is installed into .venv beside the project's folders first, with what development needs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/python.sh
source scripts/python.sh
python=$(run_module distca.train.launch.installation dev)
PATH=$(dirname "$(command -v "$python")"):$PATH
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the same files again
# The tests start processes of their own; more threads than cores only get in each other's way.
if [[ $# == 0 ]]; then
    set -- --numprocesses 4 --dist loadfile --no-loadscope-reorder
fi
OMP_NUM_THREADS=1 exec "$python" -m pytest "$@"
