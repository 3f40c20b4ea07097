#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of the router in front of a fleet, and of its workers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_router_info
short_description: State of the router of a fleet, and of its workers
description:
  - Tells whether the router answers, died, was stopped, or has a stranger on its port, and what it routes to. Changes
    nothing.
options:
  name:
    description: The router's name in messages.
    type: str
    default: router
  slug:
    description: Stem of the router's files on the node.
    type: str
    default: sglang_router
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  host:
    description: Address that the router listens on.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the router listens on.
    type: int
    required: true
  api_key:
    description: The router's key, when it has one.
    type: str
    default: ""
  servers:
    description: The servers that should be behind it, to tell which are not.
    type: list
    elements: dict
    default: []
    suboptions:
      name: {description: Name in the inventory., type: str, required: true}
      url: {description: Where the router reaches it., type: str, required: true}
  timeout:
    description: Seconds that one HTTP answer may take.
    type: float
    default: 6
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
notes:
  - Run it on the router's node under a Python that has C(requests), such as that of the router's venv. Without it the
    state is told from the process alone.
seealso:
  - module: sglang_router
  - module: sglang_router_worker
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Look at the router
  sglang_router_info:
    root: /srv/sglang
    port: 30080
    servers:
      - {name: node1-gpu0, url: "http://127.0.0.1:30000"}
  vars:
    ansible_python_interpreter: /srv/sglang/router/bin/python
"""

RETURN = r"""
router:
  description:
    - C(state) (V(ready), V(stuck), V(dead), V(stopped) or V(stranger)), C(detail) (one sentence where the state has a
      reason), C(pid), C(uptime_s), C(launched_at), C(release), C(log) and C(workers), one mapping a server that was asked
      about and one a worker beyond them. Its keys are C(name) (null for a worker that the fleet did not register), C(url),
      C(state) (the router's own word, such as V(ready), V(not_ready), V(failed) or V(draining), and V(absent) where the
      router does not know it) and C(load) (requests in flight). What is not known is null.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_http import Client, requests
from ansible.module_utils.sglang_log import read_tail
from ansible.module_utils.sglang_process import alive, boot_id, boot_seconds, describe, listeners, members
from ansible.module_utils.sglang_router_api import LABEL, Unanswered, routable, workers_of
from ansible.module_utils.sglang_state import Paths, read_state


def look(params):
    """The router as it is now."""
    state = read_state(Paths(params["root"], params["slug"]).state)
    process = alive(state.get("identity"))
    told = {
        "state": None,
        "detail": None,
        "pid": process.pid if process else None,
        "uptime_s": round(boot_seconds() - state["launched_boot_seconds"]) if process else None,
        "launched_at": state.get("launched_at"),
        "release": (state.get("record") or {}).get("release"),
        "log": state.get("log"),
        "workers": [],
    }
    port = state["port"] if process else params["port"]
    ours = {stat.pid for stat in members(params["root"], params["name"], process.session if process else None)}
    owners = listeners(port)
    strangers = [owner for owner in owners if owner.pid not in ours]
    if process is None and owners:
        return {**told, "state": "stranger", "detail": f"port {port} belongs to {describe(owners[0])}"}
    if process is None:
        ended = "dead" if state and not state.get("stopped_at") else "stopped"
        return {**told, "state": ended, "detail": death(state) if ended == "dead" else state.get("stopped_because") or None}
    if strangers or not owners:
        has = describe(strangers[0]) if strangers else "nobody"
        return {**told, "state": "stuck", "detail": f"it runs, but port {port} belongs to {has}"}
    if requests is None:
        return {**told, "state": "ready", "detail": "not asked over HTTP: this Python has no module requests"}
    try:
        listed = workers_of(Client(params["host"], port, params["api_key"]), params["name"], params["timeout"])
    except Unanswered as problem:
        return {**told, "state": "stuck", "detail": str(problem)}
    if port != params["port"]:
        told["detail"] = f"it listens on port {port}, and the inventory says {params['port']}"
    return {**told, "state": "ready", "workers": workers(listed, params["servers"])}


def workers(listed, servers):
    """One mapping a server, then one a worker that is none of them."""
    by_url = {entry["url"]: entry for entry in listed}
    named = {entry["labels"][LABEL]: entry for entry in listed if LABEL in entry["labels"]}
    rows, seen = [], set()
    for server in servers:
        entry = by_url.get(server["url"]) or named.get(server["name"])
        seen.add(entry["url"] if entry else None)
        rows.append(row(server["name"], entry, server["url"]))
    return rows + [row(entry["labels"].get(LABEL), entry, None) for entry in listed if entry["url"] not in seen]


def row(name, entry, url):
    """One worker: what the router says of it."""
    if entry is None:
        return {"name": name, "url": url, "state": "absent", "load": None}
    healthy = entry["status"] != "ready" or routable(entry)
    return {
        "name": name,
        "url": entry["url"],
        "state": entry["status"] if healthy else "not_ready",
        "load": entry.get("load"),
    }


def death(state):
    """Why a router that nobody stopped is gone, in one sentence."""
    if not state.get("identity"):
        return "its start was cut before it was written down"
    if state["identity"].get("boot_id") != boot_id():
        return "the node was restarted since its launch"
    try:
        lines = [line for line in read_tail(state["log"]) if "Error" in line]
    except OSError:
        return "its process is gone, and so is its log"
    return f"its process is gone: {lines[-1].strip()[:300]}" if lines else "its process is gone without a word in its log"


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "default": "router"},
            "slug": {"type": "str", "default": "sglang_router"},
            "root": {"type": "path", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "servers": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"name": {"type": "str", "required": True}, "url": {"type": "str", "required": True}},
            },
            "timeout": {"type": "float", "default": 6},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, router=look(module.params))


if __name__ == "__main__":
    main()
