#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Words that the scripts in examples/ share; they source this file. With DRY_RUN=1 `run` prints its command alone.

fail() { # one sentence, before anything has started
    echo "error: $*" >&2
    exit 2
}

step() { printf '\n=== %s\n' "$*"; }

run() { # print a command, run it, and say how long it took if that was longer than two seconds
    printf '+%s\n' "$(printf ' %q' "$@")"
    [ -z "${DRY_RUN:-}" ] || return 0
    local started=$SECONDS
    "$@"
    [ $((SECONDS - started)) -lt 3 ] || printf '  (%d s)\n' $((SECONDS - started))
}
