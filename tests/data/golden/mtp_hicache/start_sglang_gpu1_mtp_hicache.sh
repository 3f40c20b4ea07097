#!/usr/bin/env bash
# Written by sglang-fleet for node1-gpu1, profile mtp_hicache. Changes are overwritten by the next deploy.
# Run it by hand to see a start in your own terminal; status.yml then shows the server as a stranger.
set -euo pipefail
ulimit -n "$(ulimit -Hn)"
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=1
export SGLANG_FLEET_ROOT=/srv/sglang
export SGLANG_FLEET_SERVER=node1-gpu1
exec /opt/sglang/venv/bin/python -m sglang.launch_server \
  --model-path /srv/models/Qwen3.6-27B \
  --served-model-name qwen3.6-27b \
  --host 127.0.0.1 \
  --port 30001 \
  --enable-hierarchical-cache \
  --enable-metrics \
  --hicache-size 150 \
  --mamba-radix-cache-strategy extra_buffer \
  --max-mamba-cache-size 48 \
  --max-running-requests 48 \
  --mem-fraction-static 0.92 \
  --reasoning-parser qwen3 \
  --speculative-algorithm EAGLE \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 4 \
  --speculative-num-steps 3
