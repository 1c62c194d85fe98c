#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what the project needs into the Python environment that is active, or into .venv beside this checkout.
#
#   source tools/install.sh [EXTRAS]       EXTRAS: for example "plot" or "dev"; afterwards `python` is the environment's
#
# torch: one that is there is kept. On a machine with an NVIDIA GPU pip's ordinary torch is installed; on one without, the
# CPU build (a plain `pip install torch` would fetch gigabytes of CUDA packages there). TORCH_INDEX_URL names another source.

megatron_torch_version="${TORCH_VERSION:-2.13.0}"
megatron_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

megatron_run() { # echo a command, then run it
    printf '+%s\n' "$(printf ' %q' "$@")"
    "$@"
}

megatron_choose_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        return
    fi
    local base="${PYTHON:-python3}" options=()
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: Python 3.11 or newer is needed, $base is $("$base" --version 2>&1); name another with PYTHON=/path/to/python3" >&2
        return 2
    fi
    if [ ! -x "$megatron_root/.venv/bin/python" ]; then
        # A torch that is already on this machine is used, not installed a second time.
        "$base" -c 'import torch' 2>/dev/null && options=(--system-site-packages)
        megatron_run "$base" -m venv "${options[@]}" "$megatron_root/.venv" || return 2
    fi
    # shellcheck disable=SC1091
    source "$megatron_root/.venv/bin/activate"
}

megatron_install_torch() {
    if python -c 'import torch' 2>/dev/null; then
        return
    fi
    local pip=(python -m pip install --quiet)
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        megatron_run "${pip[@]}" --index-url "$TORCH_INDEX_URL" torch
    elif nvidia-smi >/dev/null 2>&1 || [ "$(uname -s)-$(uname -m)" != "Linux-x86_64" ]; then
        megatron_run "${pip[@]}" torch
    else # Linux without a GPU: the CPU build where pip is configured to find it, else from PyTorch's own CPU index
        megatron_run "${pip[@]}" "torch==$megatron_torch_version+cpu" 2>/dev/null ||
            megatron_run "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu torch
    fi
}

megatron_install() {
    local extras="${1:-}" modules="torch numpy tokenizers sentencepiece regex tensorboard yaml megatron.core"
    case "$extras" in
    plot) modules="$modules matplotlib" ;;
    dev) modules="$modules matplotlib pytest hypothesis tiktoken transformers" ;;
    esac
    megatron_choose_environment || return
    export PYTHONPATH="$megatron_root${PYTHONPATH:+:$PYTHONPATH}"
    # Everything there already (a second run, or a machine without network): nothing to do.
    if python -c "import ${modules// /, }" 2>/dev/null; then
        return
    fi
    if ! megatron_install_torch; then
        echo "error: PyTorch could not be installed, as pip says above; name another source with TORCH_INDEX_URL=URL, or" \
            "install torch yourself and start again" >&2
        return 2
    fi
    megatron_run python -m pip install --quiet --editable "$megatron_root${extras:+[$extras]}"
}

megatron_install "$@"
