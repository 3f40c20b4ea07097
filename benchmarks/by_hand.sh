#!/usr/bin/env bash
# What one would type without this project: for each server copy a script, start it, ask until it is healthy, generate once.
# Usage: by_hand.sh SSH_OPTIONS_FILE SERVER...   with SERVER as address,port,script
# The file holds one argument of ssh a line.
set -euo pipefail
mapfile -t options < "$1"
shift
for server in "$@"; do
  IFS=, read -r address port script <<< "$server"
  name=$(basename "$script" .sh)
  # shellcheck disable=SC2029  # what the node runs is put together here
  on_node() { ssh "${options[@]}" "root@$address" "$@"; }
  on_node mkdir -p /srv/byhand
  scp -q "${options[@]}" "$script" "root@$address:/srv/byhand/"
  on_node "setsid nohup bash /srv/byhand/$name.sh > /srv/byhand/$name.log 2>&1 < /dev/null & echo \$! > /srv/byhand/$name.pid"
  until [ "$(on_node "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:$port/health")" = 200 ]; do
    sleep 1
  done
  on_node "curl -sf -H 'Content-Type: application/json' http://127.0.0.1:$port/generate" \
    "-d '{\"text\": \"The quick brown fox\", \"sampling_params\": {\"max_new_tokens\": 4}}'" > /dev/null
done
