#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what the tests need, then run them.
#
#   bash tests/run.sh                        everything: ruff, mypy, all tests
#   bash tests/run.sh tests/unit -k mesh     only these tests: the arguments go to pytest
#   bash tests/run.sh --gpu [ARGUMENTS]      the tests that need a CUDA device
#   bash tests/run.sh --lint                 ruff and mypy alone
#
# Uses the active virtual environment, or a python3 that has everything, else makes .venv in this checkout (tools/install.sh:
# keeps a torch that is there, honours TORCH_INDEX_URL). Where everything can be imported, nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=all
case "${1:-}" in
"") ;;
--gpu | --lint) mode="${1#--}" && shift ;;
*) mode=selected ;;
esac

# Hundreds of processes import the same modules: they compile them once, also where the user's shell says not to keep that.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MPLBACKEND=Agg

# A python3 that can import all of it is used as it is: a machine without network may have nothing else.
needed="torch, numpy, tokenizers, sentencepiece, regex, tensorboard, yaml, pytest, pytest_timeout, xdist, hypothesis"
if [ -z "${VIRTUAL_ENV:-}" ] && [ ! -x .venv/bin/python ] && python3 -c "import $needed" 2>/dev/null; then
    VIRTUAL_ENV="$(python3 -c 'import sys; print(sys.prefix)')"
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
fi
source tools/install.sh dev

complete() { python -c "import $needed$1" 2>/dev/null; }
linters=""
[ "$mode" = all ] || [ "$mode" = lint ] && linters=", mypy, ruff"
if ! complete "$linters"; then
    echo "+ python -m pip install --editable .[dev]"
    python -m pip install --quiet --editable ".[dev]"
    complete "$linters" || { echo "error: the test environment is incomplete; see the messages of pip above" >&2; exit 2; }
fi
# The site of the documents is built where mkdocs is there; a machine without network does without.
complete ", mkdocs" || python -m pip install --quiet --editable ".[docs]" || echo "note: mkdocs is missing; the site is not built" >&2
# Likewise lm-evaluation-harness and peft: some 40 packages, looked for without importing them.
python -c "import importlib.util as u, sys; sys.exit(not (u.find_spec('lm_eval') and u.find_spec('peft')))" ||
    python -m pip install --quiet --editable ".[programs]" ||
    echo "note: lm_eval or peft is missing; their tests are skipped" >&2
python -c 'import platform, torch; print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}")'

failed=()
check() { # name, command...: run a check that may fail without ending the others
    echo "+ ${*:2}"
    "${@:2}" || failed+=("$1")
}

if [ "$mode" = all ] || [ "$mode" = lint ]; then
    check "ruff check" python -m ruff check .
    check "ruff format" python -m ruff format --check .
    check "mypy" python -m mypy
fi
case "$mode" in
# Two workers, each with neighbouring tests, so that what a file's tests share is made once; who is done first helps.
all) check "tests" python -m pytest tests -q -n 2 --dist worksteal --durations 15 "$@" ;;
# Each file in a process of its own: an error of the device stays in its process.
gpu) check "tests" python -m tests.gpu "$@" ;;
selected) check "tests" python -m pytest -q "$@" ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')" >&2
    exit 1
fi
