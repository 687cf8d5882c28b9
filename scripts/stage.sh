#!/usr/bin/env bash
# Run one stage of a set-up, showing one line: stage.sh LOG TITLE COMMAND...
# The output goes to LOG; if the command fails, the end of LOG and its path are printed.
set -u
log=$1 title=$2
shift 2
start=$SECONDS
mkdir -p "$(dirname "$log")"
printf '%s ... ' "$title"
if "$@" > "$log" 2>&1; then
    printf '%d s\n' $((SECONDS - start))
else
    code=$?
    printf 'failed after %d s\n' $((SECONDS - start))
    tail -n 30 "$log" >&2
    printf '%s failed; the whole output is in %s\n' "$title" "$log" >&2
    exit "$code"
fi
