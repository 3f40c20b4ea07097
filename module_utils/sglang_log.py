# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the log of one boot tells: the stages of the start, the engine's own figures, and why it failed.

A boot has a log of its own, so it is read from its first byte, each time anew: nothing has to be carried from one look
to the next. Units are the log's: it prints GB and means GiB on the card, and 1e9 bytes on the host.
"""

from __future__ import annotations

import os
import re
import time

from ansible.module_utils.sglang_failures import AFTERMATH, DEATHS, ENDS, REDUCTIONS, SPECIFIC, match

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
# Moments that only failures tell apart: what fits into the card before and after them is another thing.
_PLACES = [
    (re.compile(r"Load weight end"), "memory pools"),
    (re.compile(r"Capture target verify .*graph end"), "draft graph capture"),
    *STAGES,
]
# What was asked for, from the engine's own line of its arguments: name, pattern, type.
_ARGUMENTS = re.compile(r"server_args=")
ASKED = [
    ("fraction", re.compile(r"\bmem_fraction_static'?[=:] ?([\d.]+)"), float),
    ("hicache_gb", re.compile(r"\bhicache_size'?[=:] ?(\d+)"), int),
]
_GRAPHS = re.compile(rf"Capture .*graph end\..*mem usage={_NUMBER} GB")
_SECOND_WEIGHTS = re.compile(rf"Load weight end\..*type=(\w+).*mem usage={_NUMBER} GB")
_SPLIT = re.compile(r"[\r\n]+")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_BAR = re.compile(r"\d+%\|.*\|")
_FRAME = re.compile(r"\s+File \".*\", line \d+")
_USAGE = re.compile(r"\s*\[?--[a-z]|usage: |\s+\{|\s+\[")
# What only a server at work logs. A POST is no such line: the answer 200 to a stream is logged before its first token.
_SERVED = re.compile(r"\b(?:Prefill|Decode) batch\b|\"GET /health(?:_generate)? HTTP/[\d.]+\" 200\b")
# Seconds for which other processes may be at work beside one that fails.
OUTLIVED_SECONDS = 5
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b.*")
STARTUP_BYTES = 8 << 20
TAIL_BYTES = 64 << 10
LONG_SECRET = 8  # bytes
RECENT_LINES = 40


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


def asked(lines):
    """Flags as the engine itself has understood them, by name; only what numbers of an advice are worked out from."""
    arguments = next((line for line in lines if _ARGUMENTS.search(line)), "")
    hits = ((name, pattern.search(arguments), kind) for name, pattern, kind in ASKED)
    return {name: kind(hit.group(1)) for name, hit, kind in hits if hit}


def failure(lines, release=None, stage=FIRST_STAGE, dead=None):
    """The first specific cause in a log, or None.

    ``stage``: where ``lines`` begin. ``dead``: whether a process of the server is known to have died, None to find out
    from the log: what a healthy server may log too counts only then.
    """
    found = None
    for line in lines:
        stage = next((place for pattern, place in _PLACES if pattern.search(line)), stage)
        if dead is None and died(line):
            dead = True
        if found is None and match(line, SPECIFIC, stage, release):
            found = match(line, SPECIFIC, stage, release, {**asked(lines), **figures(lines)})
        if found and (found["sure"] or dead):
            return found
    return None


def died(line):
    """Does a line say that a process of the server has died?"""
    return _is_one_of(line, DEATHS)


def _is_one_of(line, ids):
    verdict = match(line, AFTERMATH)
    return verdict is not None and verdict["id"] in ids


def since_served(lines):
    """The lines of a server that was ready without those that it outlived: after them, and before its end, it served."""
    served = None
    for line in lines:
        if _is_one_of(line, ENDS):
            break
        if _SERVED.search(line):
            served = stamp_seconds(line) or served
    if served is None:
        return lines
    late = (number for number, line in enumerate(lines) if (stamp_seconds(line) or 0) > served - OUTLIVED_SECONDS)
    return lines[next(late) :]


def cause_of_death(path, release=None):
    """Why a server is gone, from its log: ``(stage, verdict or None)``. What ended a start is no cause after ready."""
    lines = read_startup(path)
    stage = stages(lines)[-1][0]
    if stage == READY:
        tail = read_tail(path)
        began = next((number for number, line in enumerate(tail) if STAGES[-1][0].search(line)), -1)
        tail = since_served(tail[began + 1 :])
        return stage, failure(tail, release, stage=READY, dead=True) or aftermath(tail, READY)
    return stage, failure(lines, release, dead=True) or aftermath(lines)


def reductions(lines, release=None):
    """What the server got less of than was asked for, one sentence each."""
    found = {}
    for line in lines:
        verdict = match(line, REDUCTIONS, release=release)
        if verdict:
            found.setdefault(verdict["id"], verdict["cause"])
        if STAGES[-1][0].search(line):
            break
    return list(found.values())


def matter(lines, verdict, count=12):
    """The lines that a person wants to see of a failure: up to the one that names it, else the last ones."""
    kept = _without_frames([line for line in lines if not _BAR.search(line) and not _USAGE.match(line)])
    named = verdict.get("line") if verdict else None
    at = next((number for number, line in enumerate(kept) if line[:1000] == named or line.strip()[:400] == named), None)
    end = len(kept) if at is None else at + 1
    return [line[:400] for line in kept[max(0, end - count) : end]]


def _without_frames(lines):
    """The lines with only the innermost frame of each traceback."""
    kept, frame = [], None
    for line in lines:
        if _FRAME.match(line):
            frame = line
        elif frame is None or not line.startswith("    "):
            kept += [frame, line] if frame else [line]
            frame = None
    return kept


def redact(path, secrets):
    """Overwrite secrets in a log by stars, in place; how many there were. SGLang writes its API key into its log once.

    The log is open for appending in another process: nothing is moved, so nothing can be lost.
    """
    forms = {form.encode() for secret in secrets if secret for form in (secret, repr(secret)[1:-1])}
    # A short key may be a part of any word: then only where SGLang prints it.
    patterns = [b"(?<=api_key=.)%s|(?<=api_key': .)%s" % (re.escape(form), re.escape(form)) for form in forms]
    patterns += [re.escape(form) for form in forms if len(form) >= LONG_SECRET]
    if not patterns:
        return 0
    with open(path, "rb+") as stream:
        data = stream.read(STARTUP_BYTES)
        spans = {hit.span() for pattern in patterns for hit in re.finditer(pattern, data)}
        for start, end in spans:
            os.pwrite(stream.fileno(), b"*" * (end - start), start)
    return len(spans)


def aftermath(lines, stage=FIRST_STAGE):
    """What a log without a specific cause still tells of a death: the last exception, else which process died.

    ``stage``: ``READY`` where all lines are of a server that was ready: what to do about its end is another thing.
    """
    hits = [hit for hit in (match(line, AFTERMATH, stage) for line in lines) if hit]
    verdict = next((hit for hit in hits if hit["sure"]), hits[0] if hits else None)
    exception = None
    # Without a word on a death, an exception of long ago is somebody's bad request.
    for line in lines if verdict else lines[-RECENT_LINES:]:
        hit = _EXCEPTION.match(line.strip())
        if hit:
            exception = hit.group(0)[:400]
    if exception and (verdict is None or verdict["id"] in ("scheduler_exception", "child_failed")):
        return {
            "id": "exception",
            "cause": f"not a failure known here; its last exception is {exception}",
            "advice": "read the log above this line; docs/faults.md says how to add a failure",
            "line": exception,
            "sure": False,
        }
    return verdict
