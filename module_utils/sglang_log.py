# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the log of one boot tells: the stages of the start, the engine's own figures, and why it failed.

A boot has a log of its own, so it is read from its first byte, each time anew: nothing has to be carried from one look
to the next. Units are the log's: it prints GB and means GiB on the card, and 1e9 bytes on the host.
"""

from __future__ import annotations

import re
import time

from ansible.module_utils.sglang_failures import AFTERMATH, SPECIFIC, match

FIRST_STAGE = "import"
READY = "ready"
# The stage that begins with a line. They come in this order, except that a draft model loads after the target's
# weights and releases allocate the host pools before or after the graphs.
STAGES = [
    (re.compile(r"Load weight begin"), "weights"),
    (re.compile(r"Mamba Cache is allocated"), "state pool"),
    (re.compile(r"KV Cache is allocated"), "KV pool"),
    (re.compile(r"Capture .*(?:CUDA|CPU|cuda|cpu) graph begin"), "graph capture"),
    (re.compile(r"Allocating .*GB host memory"), "host pools"),
    (re.compile(r"Uvicorn running on"), "warm-up"),
    (re.compile(r"The server is fired up and ready to roll"), READY),
]
# Seconds without a new stage after which a start counts as stuck. Weights may come over a slow network file system;
# graphs are compiled on first use.
STAGE_LIMITS = {
    "import": 600,
    "weights": 1800,
    "state pool": 300,
    "KV pool": 600,
    "graph capture": 1200,
    "host pools": 600,
    "warm-up": 300,
    READY: 60,
}
STAGE_NAMES = [FIRST_STAGE, *dict.fromkeys(stage for _, stage in STAGES)]

_NUMBER = r"(-?[\d.]+)"
# name, pattern, type. A name that is there already is kept: the target model's figures come before the draft's.
FIGURES = [
    ("free_gpu_gib", rf"Load weight begin\. avail mem={_NUMBER} GB", float),
    ("weights_gib", rf"Load weight end\..*mem usage={_NUMBER} GB", float),
    ("state_slots", r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+)", int),
    ("state_conv_gib", rf"Mamba Cache is allocated\..*conv_state size: {_NUMBER}GB", float),
    ("state_ssm_gib", rf"Mamba Cache is allocated\..*ssm_state size: {_NUMBER}GB", float),
    ("speculative_ssm_gib", rf"intermediate_ssm_state_cache size: {_NUMBER}GB", float),
    ("speculative_conv_gib", rf"intermediate_conv_window_cache size: {_NUMBER}GB", float),
    ("kv_tokens", r"KV Cache is allocated\..*#tokens: (\d+)", int),
    ("kv_k_gib", rf"KV Cache is allocated\..*K size: {_NUMBER} GB", float),
    ("kv_v_gib", rf"KV Cache is allocated\..*V size: {_NUMBER} GB", float),
    ("max_total_tokens", r"max_total_num_tokens=(\d+), ", int),
    ("max_running_requests", r"max_total_num_tokens=.*\bmax_running_requests=(\d+)", int),
    ("context_len", r"max_total_num_tokens=.*\bcontext_len=(\d+)", int),
    ("available_gib", rf"max_total_num_tokens=.*\bavailable_[gc]pu_mem={_NUMBER} GB", float),
    ("capped_by_slots", r"max_running_requests is capped to \d+ by the mamba state cache \(max_mamba_cache_size=(\d+)", int),
    ("slots_per_request", r"capped to \d+ by the mamba state cache .*?(\d+) state slots per request", int),
    (
        "host_kv_gb",
        rf"Allocating (?:kv hierarchical KV host pool: \d+ tokens, )?{_NUMBER} GB host memory(?:\.| for hierarchical KV)",
        float,
    ),
    ("host_state_gb", rf"Allocating {_NUMBER} GB host memory for hierarchical Mamba cache", float),
]
_FIGURES = [(name, re.compile(pattern), kind) for name, pattern, kind in FIGURES]
_GRAPHS = re.compile(rf"Capture .*graph end\..*mem usage={_NUMBER} GB")
_SECOND_WEIGHTS = re.compile(rf"Load weight end\..*type=(\w+).*mem usage={_NUMBER} GB")
_SPLIT = re.compile(r"[\r\n]+")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_BAR = re.compile(r"\d+%\|.*\|")
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b.*")
STARTUP_BYTES = 8 << 20
TAIL_BYTES = 64 << 10


def lines_of(text):
    """Lines without colour and without empty ones; each update of a progress bar is a line."""
    return [line for line in (_ANSI.sub("", line).rstrip() for line in _SPLIT.split(text)) if line]


def last_lines(lines, count=20):
    """The last lines for a message, without progress bars."""
    return [line[:400] for line in lines if not _BAR.search(line)][-count:]


def stamp_seconds(line):
    """The time that a line was logged, as seconds since the epoch (the log has local time, by the second), or None."""
    found = _STAMP.match(line)
    if not found:
        return None
    return time.mktime(time.strptime(found.group(1), "%Y-%m-%d %H:%M:%S"))


def read_startup(path):
    """The start-up part of a boot's log, as lines."""
    with open(path, "rb") as stream:
        return lines_of(stream.read(STARTUP_BYTES).decode("utf-8", "replace"))


def read_tail(path):
    """The end of a boot's log, as lines."""
    with open(path, "rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - TAIL_BYTES))
        return lines_of(stream.read().decode("utf-8", "replace"))


def stages(lines):
    """``[(stage, line)]`` in order, a stage once for each time that it begins anew; the first has no line."""
    seen = [(FIRST_STAGE, None)]
    for line in lines:
        for pattern, stage in STAGES:
            if seen[-1][0] != stage and pattern.search(line):
                seen.append((stage, line))
                break
        if seen[-1][0] == READY:
            break
    return seen


def figures(lines):
    """What the engine said of itself, by name; only what was logged."""
    found = {}
    for line in lines:
        for name, pattern, kind in _FIGURES:
            if name not in found:
                hit = pattern.search(line)
                if hit:
                    found[name] = kind(hit.group(1))
        graphs = _GRAPHS.search(line)
        if graphs:
            found["graphs_gib"] = round(found.get("graphs_gib", 0.0) + float(graphs.group(1)), 2)
        if "draft_weights_gib" not in found and "weights_gib" in found and "kv_tokens" not in found:
            again = _SECOND_WEIGHTS.search(line)
            if again and float(again.group(2)) != found["weights_gib"]:
                found["draft_weights_gib"] = float(again.group(2))
        if STAGES[-1][0].search(line):
            break
    return found


def failure(lines):
    """The first specific cause in a log, or None."""
    for line in lines:
        verdict = match(line, SPECIFIC)
        if verdict:
            return verdict
    return None


def aftermath(lines):
    """What a log without a specific cause still tells of a death: the last exception, else which process died."""
    verdict = next((hit for hit in (match(line, AFTERMATH) for line in lines) if hit), None)
    exception = None
    for line in lines:
        hit = _EXCEPTION.match(line.strip())
        if hit:
            exception = hit.group(0)[:400]
    if exception and (verdict is None or verdict["id"] in ("scheduler_exception", "child_failed")):
        return {
            "id": "exception",
            "cause": exception,
            "advice": "not a failure known here: read the log above this line",
            "line": exception,
        }
    return verdict
