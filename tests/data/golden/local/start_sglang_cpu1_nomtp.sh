#!/usr/bin/env bash
# Written by sglang-fleet for local-cpu1, profile nomtp. Changes are overwritten by the next deploy.
# Run it by hand to see a start in your own terminal; status.yml then shows the server as a stranger.
set -euo pipefail
ulimit -n "$(ulimit -Hn)"
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS=1
export SGLANG_FLEET_ROOT=/srv/sglang
export SGLANG_FLEET_SERVER=local-cpu1
export SGLANG_USE_CPU_ENGINE=1
export TRANSFORMERS_OFFLINE=1
exec /srv/sglang/engine/bin/python -m sglang.launch_server \
  --model-path /srv/sglang/models/tiny \
  --served-model-name tiny \
  --host 127.0.0.1 \
  --port 30101 \
  --device cpu \
  --enable-metrics \
  --max-running-requests 48 \
  --max-total-tokens 8192 \
  --mem-fraction-static 0.85 \
  --reasoning-parser qwen3 \
  --sleep-on-idle
