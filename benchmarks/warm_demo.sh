#!/usr/bin/env bash
# Seconds of `make demo` in a fresh clone: cold (installs everything), warm with stopped servers, and with running ones.
# Usage: warm_demo.sh [RUNS]   (runs of each warm kind, 3 when not given)
# Environment: PYTHON names another python3, BASE_PORT another port than the demo's 30100 (and the one after it).
set -euo pipefail
runs=${1:-3}
base=${BASE_PORT:-30100}
here=$(cd "$(dirname "$0")/.." && pwd)
for port in "$base" $((base + 1)); do
  if (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
    echo "warm_demo: something listens on port $port, where a server goes: stop it, or set BASE_PORT=…" >&2
    exit 1
  fi
done
folder=$(mktemp -d -t sgf-demo-XXXXXX)
trap 'cd / && make -s -C "$folder/clone" clean-demo > "$folder/clean.log" 2>&1 || cat "$folder/clean.log" >&2; rm -rf "$folder"' EXIT
git clone -q "$here" "$folder/clone"
cd "$folder/clone"
sed -i "s/^base_port: .*/base_port: $base/" inventory/local.yml

timed() {  # WHAT COMMAND...: run it and print a row of the table
  local what=$1 before load seconds
  shift
  load=$(cut -d' ' -f1 /proc/loadavg)
  before=$EPOCHREALTIME
  "$@" > "$folder/log" 2>&1 || { tail -40 "$folder/log" >&2; exit 1; }
  seconds=$(awk -v a="$before" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  printf '%-28s %8s %12s\n' "$what" "$seconds" "$load"
}

quiet() {  # let what came before leave the load, for up to a minute
  for _ in $(seq 12); do
    awk '{ exit $1 >= 1 }' /proc/loadavg && return
    sleep 5
  done
}

stop() { .venv/bin/ansible-playbook -i inventory/local.yml stop.yml; }

echo "$(date -u '+%F %H:%M') UTC, commit $(git rev-parse --short HEAD), $(nproc) cores, $(uname -sr)"
printf '%-28s %8s %12s\n' 'make demo' 'seconds' 'load before'
export ANSIBLE_CONFIG=$folder/clone/ansible.cfg
make_demo=(make demo ${PYTHON:+"PYTHON=$PYTHON"})
quiet
timed 'cold: nothing installed' "${make_demo[@]}"
for run in $(seq "$runs"); do
  stop > "$folder/log" 2>&1
  quiet
  timed "warm: servers stopped ($run)" "${make_demo[@]}"
done
for run in $(seq "$runs"); do
  quiet
  timed "warm: servers running ($run)" "${make_demo[@]}"
done
