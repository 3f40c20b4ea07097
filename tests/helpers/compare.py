# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records and locks as compare.yml keeps them, made up: figures in them are nobody's."""

from __future__ import annotations

import os

from ansible.module_utils import sglang_process

WORKLOAD = {
    "id": "0123456789ab", "name": "short", "source": "random", "prompts": None, "prompts_sha256": None, "input_tokens": 128,
    "output_tokens": 256, "prompts_per_concurrency": 4, "min_prompts": 8,
}  # fmt: skip
MTP = [
    ["--mem-fraction-static", "0.92"], ["--speculative-algorithm", "EAGLE"], ["--speculative-num-draft-tokens", "4"],
]  # fmt: skip


def run(concurrency, tok_s, accept=None, failed=0, **more):
    """One run as module sglang_benchmark returns it."""
    known = not failed
    return {
        "concurrency": concurrency,
        "requests": 4 * concurrency,
        "completed": 4 * concurrency - failed,
        "failed": failed,
        "seed": 1,
        "duration_s": 10.0 if known else None,
        "output_tok_s": tok_s if known else None,
        "total_tok_s": tok_s * 1.5 if known else None,
        "ttft_ms": {"median": 70.0 + 9 * concurrency if known else None, "p99": 90.0 + 30 * concurrency if known else None},
        "tpot_ms": {
            "median": 1000 * concurrency / tok_s if known else None,
            "p99": 1200 * concurrency / tok_s if known else None,
        },
        "accept_length": accept,
        **more,
    }


def record(profile="nomtp", runs=(), repeat=1, **more):
    """One turn's measurement of one server."""
    return {
        "schema": 1,
        "kind": "measured",
        "at": f"2026-11-29T10:{repeat:02}:00.000Z",
        "series": "2026-11-29T10:00:00.000Z",
        "server": "node1-gpu0",
        "node": "node1",
        "gpus": ["NVIDIA H200"],
        "driver": "580.95.05",
        "device": "cuda",
        "profile": profile,
        "model": "qwen3.6-27b",
        "model_path": "/srv/models/Qwen3.6-27B",
        "release": "0.5.17",
        "flags": MTP if profile.startswith("mtp") else [["--mem-fraction-static", "0.85"]],
        "env": {"CUDA_VISIBLE_DEVICES": "0"},
        "launch_sha256": f"{profile}-launch",
        "repeat": repeat,
        "workload": WORKLOAD,
        "outcome": "measured",
        "error": None,
        "measured_at": f"2026-11-29T10:{repeat:02}:00Z",
        "runs": list(runs),
        "raw": None,
        "boot": boot(profile, repeat),
        **more,
    }


def boot(profile="nomtp", repeat=1):
    """What a turn tells of its start."""
    mtp = profile.startswith("mtp")
    memory = {
        "weights_gib": (51.05, 51.05),
        "kv_gib": (22.43, 22.28),
        "mamba_ssm_gib": (3.52, 3.52),
        "kv_tokens": (367751, 365151),
    }
    if mtp:
        memory["draft_weights_gib"] = (5.53, 5.53)
    return {
        "launched_at": f"2026-11-29T10:{repeat:02}:00Z {profile}",
        "ready_s": 84.0 + repeat + 5 * mtp,
        "stages": {
            "import": 40.0 + repeat,
            "weights": 4.5,
            "state pool": 0.4,
            "KV pool": 0.5,
            "graph capture": 33.0 + 5 * mtp,
            "warm-up": 5.6,
        },
        "cap": 18 if not mtp else 16,
        "memory": [{"figure": name, "planned": planned, "observed": seen} for name, (planned, seen) in memory.items()],
    }  # fmt: skip


def curve(profile, points, repeats=3, spread=0.02, accept=None, **more):
    """Records of a profile over ``points`` (concurrency to tok/s), in ``repeats`` turns that differ by ``spread``."""
    found = []
    for repeat in range(1, repeats + 1):
        factor = 1 + spread * (repeat - 2)
        runs = [run(at, speed * factor, None if accept is None else accept * factor) for at, speed in points.items()]
        found.append(record(profile, runs, repeat, **more))
    return found


def refused(profile, error, repeat=1, **more):
    """A turn whose profile did not start."""
    known = record(profile, repeat=repeat)
    for key in ("workload", "runs", "boot", "raw", "measured_at", "outcome"):
        del known[key]
    return {**known, "kind": "refused", "error": error, **more}


def holder(server, alive=True):
    """Who holds the lock of a server: this very process, or one that it could see and that is gone."""
    told = {"schema": 1, "run": "r0", "who": "bob@desk", "since": "noon", "until": "one", "until_epoch": 2**40}
    told |= {"controller": "desk", "pid_namespace": os.readlink("/proc/self/ns/pid"), **sglang_process.identity(os.getpid())}
    told["doing"] = f"compares profiles on {server}"
    return told if alive else {**told, "start_ticks": told["start_ticks"] - 1}
