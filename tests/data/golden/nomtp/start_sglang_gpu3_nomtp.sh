#!/usr/bin/env bash
# Written by sglang-fleet for node1-gpu3, profile nomtp. Changes are overwritten by the next deploy.
# Run it by hand to see a start in your own terminal; status.yml then shows the server as a stranger.
set -euo pipefail
ulimit -n "$(ulimit -Hn)"
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=3
export SGLANG_FLEET_ROOT=/srv/sglang
export SGLANG_FLEET_SERVER=node1-gpu3
exec /opt/sglang/venv/bin/python -m sglang.launch_server \
  --model-path /srv/models/Qwen3.6-27B \
  --served-model-name qwen3.6-27b \
  --host 127.0.0.1 \
  --port 30003 \
  --enable-metrics \
  --mamba-radix-cache-strategy extra_buffer \
  --max-mamba-cache-size 90 \
  --max-running-requests 48 \
  --mem-fraction-static 0.85 \
  --reasoning-parser qwen3
