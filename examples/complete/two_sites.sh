#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One training on two sites that a slow line connects: gradients cross it, once in each step, or, with EXCHANGE_EVERY=30,
# weights in every 30th (DiLoCo: each site is a job of its own, and survives the other; docs/many_sites.md).
#
#   SITE=0 HEAD=10.0.0.1 bash examples/complete/two_sites.sh FLAGS ...       on the nodes of the first site
#   SITE=1 HEAD=10.0.0.1 bash examples/complete/two_sites.sh FLAGS ...       on those of the second
#   LAPTOP=1 bash examples/complete/two_sites.sh                             both sites here, two processes each, tiny
# DRY_RUN=1 prints the command instead.
#
# How the line is spared:
#   layout      tensor and pipeline parallelism stay inside of a site; weights and optimizer state are divided inside of it,
#               too (HSDP: --use-torch-fsdp2 with as many optimizer instances as sites), so that gathers never cross
#   bytes       gradients are reduced inside of a site first, and cross as one sum, in bfloat16 with GRAD_BITS=16
#   latency     one exchange a step, in large pieces, beside computation; a larger global batch makes steps longer, and
#               the share of the exchange smaller
#   faults      a lost line is a lost peer: exit code 75 after TIMEOUT_MINUTES; the same command goes on from the checkpoint
#
# Variables:
#   SITE            0 or 1; HEAD, PORT: address of the first site's first node, and a port that the other site reaches
#   NODES_PER_SITE  nodes of a site (1); NODE: this node's number in its site, from 0; GPUS_PER_NODE
#   EXCHANGE_EVERY  steps between two exchanges of weights; KEY: file with the key that both sites have for them; EXCHANGE_PORT:
#                   where the first site listens for them; SITE_HEAD: address of this site's first node, where it has several
#   INTERFACE       the interface that reaches the other site, where there are several
#   DATA_PATH       prefix of the dataset ON THIS SITE: each site reads its own copy, which must be the same files
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
timeout_minutes="${TIMEOUT_MINUTES:-10}"

source "$root/examples/launch/steps.sh"

exchange_port="${EXCHANGE_PORT:-29701}"
layout=(--distributed-timeout-minutes "$timeout_minutes")
if [ -n "${EXCHANGE_EVERY:-}" ]; then
    layout+=(--use-distributed-optimizer --diloco-replicas 2 --diloco-inner-steps "$EXCHANGE_EVERY")
else
    layout+=(--use-torch-fsdp2 --num-distributed-optimizer-instances 2)
fi
if [ "${GRAD_BITS:-32}" = 16 ]; then
    layout+=(--megatron-fsdp-grad-comm-dtype bf16)
fi

start_node() { # sites' first address, port, nodes, number of this node, processes, flags ...
    run python "$root/tools/launch.py" --nproc_per_node="$5" --nnodes="$3" --node_rank="$4" --master_addr="$1" --master_port="$2" \
        "$root/pretrain_gpt.py" "${layout[@]}" "${@:6}"
}

command -v python > /dev/null || fail "there is no python; activate the environment that has torch"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ -n "${LAPTOP:-}" ]; then
    port="${PORT:-29617}" gpus="${GPUS_PER_NODE:-2}"
    tiny=(--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --train-iters 3 --eval-iters 0 --mock-data --log-interval 1
        --tokenizer-type NullTokenizer --vocab-size 60 --num-workers 0 --log-comm-volume
        --hidden-dropout 0 --attention-dropout 0)
    export MEGATRON_DEVICE=cpu
    if [ -n "${EXCHANGE_EVERY:-}" ]; then
        key="${KEY:-$(mktemp)}"
        [ -s "$key" ] || python -c "import secrets; print(secrets.token_hex(32))" > "$key"
        site=(--diloco-address "127.0.0.1:$exchange_port" --diloco-key-file "$key" "${tiny[@]}")
        start_node localhost "$((port + 1))" 1 0 "$gpus" --datacenter-id 1 "${site[@]}" "$@" > /dev/null &
        second=$!
        start_node localhost "$port" 1 0 "$gpus" --datacenter-id 0 "${site[@]}" "$@" || { kill "$second" 2> /dev/null; exit 1; }
        wait "$second"
        exit
    fi
    # When it is told to end because the first site has failed, what it says of that would be the last line.
    start_node localhost "$port" 2 1 "$gpus" "${tiny[@]}" "$@" 2> >(grep -v "told to end by SIGTERM" >&2) &
    second=$!
    start_node localhost "$port" 2 0 "$gpus" "${tiny[@]}" "$@" || { kill "$second" 2> /dev/null; exit 1; }
    wait "$second"
    exit
fi

if [ -n "${DRY_RUN:-}" ]; then
    SITE="${SITE:-0}" HEAD="${HEAD:-HEAD}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}" DATA_PATH="${DATA_PATH:-/path/to/data}"
fi
[ "${SITE:-}" = 0 ] || [ "${SITE:-}" = 1 ] || fail "SITE=${SITE:-} is neither 0 nor 1; give the number of this site"
[ -n "${HEAD:-}" ] || fail "HEAD is not set; give the address of the first site's first node"
[ -n "${GPUS_PER_NODE:-}" ] || fail "GPUS_PER_NODE is not set; give the GPUs of a node"
[ -n "${DATA_PATH:-}" ] || fail "DATA_PATH is not set; give the prefix of this site's copy of the dataset"
[ -n "${DRY_RUN:-}" ] || [ -e "$DATA_PATH.idx" ] || fail "DATA_PATH: $DATA_PATH.idx does not exist; copy the dataset to this site first"
nodes="${NODES_PER_SITE:-1}"
# Between sites there is no InfiniBand: addresses and sockets are those of the long line.
eval "$(python "$root/tools/env.py" --network ethernet ${INTERFACE:+--interface "$INTERFACE"} --format shell)"
if [ -n "${EXCHANGE_EVERY:-}" ]; then
    [ -n "${DRY_RUN:-}" ] || [ -s "${KEY:-}" ] || fail "KEY=${KEY:-} is no file with a key; make one: openssl rand -hex 32"
    start_node "${SITE_HEAD:-localhost}" "${PORT:-29500}" "$nodes" "${NODE:-0}" "$GPUS_PER_NODE" --datacenter-id "$SITE" \
        --diloco-address "$HEAD:$exchange_port" --diloco-key-file "${KEY:-KEY}" --data-path "$DATA_PATH" "$@"
    exit
fi
start_node "$HEAD" "${PORT:-29500}" $((2 * nodes)) $((SITE * nodes + ${NODE:-0})) "$GPUS_PER_NODE" \
    --data-path "$DATA_PATH" "$@"
