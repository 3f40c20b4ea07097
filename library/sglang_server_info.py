#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of every SGLang server of a node, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_server_info
short_description: State of the SGLang servers of a node
description:
  - Tells of each server whether it serves, starts, hangs, died, was stopped, or has a stranger on its port, and what it
    does. One call a node, the servers are asked at the same time. Changes nothing.
options:
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  servers:
    description: The servers to look at.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {description: Name in the inventory., type: str, required: true}
      slug: {description: Stem of the server's files., type: str, required: true}
      host: {description: Address that it listens on., type: str, default: 127.0.0.1}
      port: {description: Port that it listens on., type: int, required: true}
  timeout:
    description: Seconds that one HTTP answer may take. SGLang's C(/health) takes one when all is well.
    type: float
    default: 6
  stage_limits:
    description: As for M(sglang_wait), after how many seconds without a new stage a start counts as stuck.
    type: dict
    default: {}
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
notes:
  - Runs under the engine's own Python, which has C(requests). Without it the state is told from process and log alone.
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Look at two servers
  sglang_server_info:
    root: /srv/sglang
    servers:
      - {name: node1-gpu0, slug: sglang_gpu0, port: 30000}
      - {name: node1-gpu1, slug: sglang_gpu1, port: 30001}
  vars:
    ansible_python_interpreter: /opt/sglang/venv/bin/python
"""

RETURN = r"""
servers:
  description:
    - One entry a server, in the order asked. Keys are C(name), C(state) (V(ready), V(starting), V(stuck), V(dead),
      V(stopped) or V(stranger)), C(detail) (one sentence where the state has a reason), C(stage), C(profile), C(model),
      C(release), C(pid), C(uptime_s), C(launched_at), C(running), C(waiting), C(token_usage), C(output_tok_s), C(cap),
      C(kv_tokens), C(accept_length), C(gpu_memory_gib), C(host_rss_gib), C(log) and C(started_with) (C(argv), C(env),
      C(flags), C(model_path), C(served_model_name), C(launch_sha256)). What is not known is null.
  returned: always
  type: list
  elements: dict
node:
  description: C(gpus), C(host_memory) and C(boot_id) as M(sglang_node_info) has them.
  returned: always
  type: dict
"""

import os
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_http import Client, Silent, loads, requests, server_info
from ansible.module_utils.sglang_log import (
    READY,
    STAGE_LIMITS,
    aftermath,
    cause_of_death,
    died,
    failure,
    read_startup,
    read_tail,
    stages,
    stamp_seconds,
)
from ansible.module_utils.sglang_node import gpus, host_memory
from ansible.module_utils.sglang_process import alive, boot_id, boot_seconds, command, describe, halted, listeners, members
from ansible.module_utils.sglang_state import Paths, load_state, read_secrets

GIB = 1 << 30
UNKNOWN = (
    "stage",
    "profile",
    "model",
    "release",
    "pid",
    "uptime_s",
    "launched_at",
    "running",
    "waiting",
    "token_usage",
    "output_tok_s",
    "cap",
    "kv_tokens",
    "accept_length",
    "gpu_memory_gib",
    "host_rss_gib",
    "log",
    "started_with",
    "detail",
)


def start_up(state, limits):
    """``(stage, cause)`` of a start: cause is a sentence when it will not go on by itself."""
    try:
        lines = read_startup(state["log"])
    except OSError:
        return READY, None  # whoever took the log away, HTTP still tells
    stage, line = stages(lines)[-1]
    cause = failure(lines, (state.get("record") or {}).get("release")) if stage != READY else None
    if cause or stage == READY:
        return stage, cause and cause["cause"]
    if any(died(line) for line in lines):
        return stage, aftermath(lines)["cause"]
    # Both by the clock that stamps the log, so that setting it afterwards moves neither.
    stamp = stamp_seconds(line) if line else None
    elapsed = boot_seconds() - state["launched_boot_seconds"]
    began = min(max(0.0, stamp - state["launched_epoch"]), elapsed) if stamp is not None else 0.0
    since = elapsed - began
    return stage, f"no new stage for {since:.0f} s" if since > limits[stage] else None


def serving_fault(state):
    """What the log of a server that was ready says of a process that died since, or None."""
    try:
        lines = read_tail(state["log"])
    except OSError:
        return None
    if not any(died(line) for line in lines):
        return None
    return cause_of_death(state["log"], (state.get("record") or {}).get("release"))[1]["cause"]


def probe(client, timeout):
    """``(problem, figures)``: what a server says over HTTP."""
    try:
        status = client.status("/health", timeout)
        if status != 200:
            return f"/health answers {status}", {}
        counters = loads(client, timeout) or {}
        if counters.get("cap") is None or counters.get("accept_length") is None:
            more = server_info(client, timeout)
            counters = {**more, **{key: value for key, value in counters.items() if value is not None}}
        return None, counters
    except Silent as silent:
        return str(silent), {}


def look(params, server, node_gpus):
    """One server's entry."""
    paths = Paths(params["root"], server["slug"])
    state, damage = load_state(paths.state)
    process = alive(state.get("identity"))
    entry = {"name": server["name"], "state": None, **dict.fromkeys(UNKNOWN)}
    record = state.get("record") or {}
    entry.update(
        profile=state.get("profile"),
        model=record.get("model"),
        release=record.get("release"),
        launched_at=state.get("launched_at"),
        log=state.get("log"),
        started_with={
            **{key: state.get(key) for key in ("argv", "env", "launch_sha256")},
            **{key: record.get(key) for key in ("flags", "model_path", "served_model_name")},
        }
        if state
        else None,
    )
    if process and state.get("name") != server["name"]:
        return {
            **entry,
            "state": "stranger",
            "detail": f"{paths.state} belongs to {state['name']}, which runs: two nodes share a root",
        }
    port = state["port"] if process else server["port"]  # the one it was started with; another one is drift
    ours = members(params["root"], server["name"], process.session if process else None)
    pids = {stat.pid for stat in ours}
    strangers = [listener for listener in listeners(port) if listener.pid not in pids]
    if process is None:
        by_hand = next((pid for pid in sorted(pids) if "sglang.launch_server" in command(pid)), None)
        if by_hand:
            why = f"runs as pid {by_hand}, started by hand or its state file is gone"
            return {**entry, "state": "stranger", "detail": f"{why}; {damage}" if damage else why}
        if strangers:
            return {**entry, "state": "stranger", "detail": f"port {server['port']} belongs to {describe(strangers[0])}"}
        if damage:
            return {**entry, "state": "dead", "detail": damage}
        if not state or state.get("stopped_at"):
            return {**entry, "state": "stopped", "detail": state.get("stopped_because") or None}
        return {**entry, "state": "dead", "detail": death(state)}
    entry.update(
        pid=process.pid,
        uptime_s=round(boot_seconds() - state["launched_boot_seconds"]),
        host_rss_gib=round(sum(stat.rss_bytes for stat in ours) / GIB, 2),
        gpu_memory_gib=round(sum(used["used_gib"] for gpu in node_gpus for used in gpu["processes"] if used["pid"] in pids), 2)
        if node_gpus
        else None,
    )
    entry["stage"], cause = start_up(
        state, {**STAGE_LIMITS, **{stage: float(limit) for stage, limit in params["stage_limits"].items()}}
    )
    if cause:
        return {**entry, "state": "stuck", "detail": cause + halted(state["identity"])}
    if entry["stage"] != READY:
        return {**entry, "state": "starting"}
    if requests is None:
        return {**entry, "state": "ready", "detail": "not asked over HTTP: this Python has no module requests"}
    fault = serving_fault(state)
    if fault:  # its HTTP front hangs for a minute then: there is nothing to ask it
        return {**entry, "state": "stuck", "detail": f"{fault}: stop.yml, then deploy.yml, each with --limit {server['name']}"}
    problem, counters = probe(Client(server["host"], port, read_secrets(paths).get("api-key")), params["timeout"])
    if problem:
        return {**entry, "state": "stuck", "detail": problem + halted(state["identity"])}
    entry.update((key, value) for key, value in counters.items() if key in entry and value is not None)
    return {**entry, "state": "ready"}


def death(state):
    """Why a server that nobody stopped is gone, in one sentence."""
    if not state.get("identity"):
        return "its start was cut before it was written down"
    if state["identity"].get("boot_id") != boot_id():
        return "the node was restarted since its launch"
    try:
        stage, cause = cause_of_death(state["log"], (state.get("record") or {}).get("release"))
    except OSError:
        return f"its process is gone, and so is its log{unwritten(state)}"
    if cause is None:
        told = "its process is gone without a word in its log: kill -9, or the kernel out of memory"
    else:
        told = cause["cause"]
    return f"{told} (stage {stage}){unwritten(state)}" if cause and stage != READY else told + unwritten(state)


def unwritten(state):
    """A clause for a server whose stop could not have been written down."""
    try:
        found = os.statvfs(os.path.dirname(state["log"]))
    except OSError:
        return ""
    if found.f_flag & os.ST_RDONLY:
        return "; its folder is read-only now, so a stop could not be written down"
    return "; its disk is full, so a stop may not have been written down" if found.f_bavail == 0 else ""


def main():
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "servers": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "slug": {"type": "str", "required": True},
                    "host": {"type": "str", "default": "127.0.0.1"},
                    "port": {"type": "int", "required": True},
                },
            },
            "timeout": {"type": "float", "default": 6},
            "stage_limits": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    node_gpus = gpus()
    servers = module.params["servers"]
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        entries = list(pool.map(lambda server: look(module.params, server, node_gpus), servers))
    module.exit_json(
        changed=False,
        servers=entries,
        node={"gpus": node_gpus, "host_memory": host_memory(), "boot_id": boot_id()},
    )


if __name__ == "__main__":
    main()
