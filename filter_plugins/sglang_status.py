# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a fleet from what its nodes said, as data for people and programs."""

from __future__ import annotations

from ansible.errors import AnsibleTypeError
from ansible.plugins.loader import filter_loader

SCHEMA = 1
# What sglang_server_info tells of a server, in the order of the JSON. Unknown is null, never left out.
TOLD = (
    "state", "detail", "stage", "profile", "model", "release", "pid", "uptime_s", "launched_at", "running", "waiting",
    "token_usage", "output_tok_s", "cap", "kv_tokens", "accept_length", "gpu_memory_gib", "host_rss_gib", "log",
)  # fmt: skip
TOLD_OF_ROUTER = ("state", "detail", "release", "pid", "uptime_s", "launched_at", "log")


def drift(told, wanted, asked_profile):
    """What a running server was started with against what the inventory says now: one fragment a difference.

    ``told``: the server as sglang_server_info has it. ``wanted``: its launch spec of today, for the profile that the
    inventory names or, where it names none, the one that runs. ``asked_profile``: the profile that the inventory names.
    """
    if told.get("pid") is None or not told.get("started_with"):
        return []
    was = told["started_with"]
    changes = []
    if asked_profile and asked_profile != told["profile"]:
        changes.append(f"profile: {told['profile']} -> {asked_profile}")
    if "spec" not in wanted:
        return [*changes, f"today's inventory has no start for it: {wanted.get('msg', 'unknown reason')}"]
    spec = wanted["spec"]
    if spec["argv"][0] != was["argv"][0]:
        changes.append(f"engine: {was['argv'][0]} -> {spec['argv'][0]}")
    changes += filter_loader.get("sglang_flag_changes").j2_function(was["flags"] or [], spec["flags"])
    before, after = was["env"] or {}, spec["env"]
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            changes.append(f"{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}")
    return changes


def router_status(asked):
    """The router as one mapping; what is not known is null.

    ``asked``: ``node``, ``url`` and ``answer``, the result of sglang_router_info on that node.
    """
    if not isinstance(asked, dict):
        raise AnsibleTypeError(f"sglang_router_status needs a mapping, got {type(asked).__name__}")
    told = asked["answer"].get("router")
    entry = {"node": asked["node"], "url": asked["url"], **{key: (told or {}).get(key) for key in TOLD_OF_ROUTER}}
    if told is None:
        why = (str(asked["answer"].get("msg") or "").strip() or "no answer").splitlines()[-1]
        entry.update(state="unreachable", detail=why)
    return {**entry, "workers": (told or {}).get("workers") or []}


def fleet_status(servers, router=None):
    """The fleet as ``{"schema": 1, "servers": […], "nodes": […], "router": …}``.

    ``servers``: one mapping a server with ``name``, ``node``, ``url``, ``gpus``, ``port``, ``asked_profile``, ``wanted``
    (result of sglang_launch_spec) and ``answer`` (result of sglang_server_info on its node, the same for all its servers).
    ``router``: what router_status takes, or None where the fleet has none.
    """
    if not isinstance(servers, list):
        raise AnsibleTypeError(f"sglang_fleet_status needs a list of servers, got {str(servers)[:40]!r}")
    entries, nodes = [], {}
    for server in servers:
        answer = server["answer"]
        reached = "servers" in answer
        why = None if reached else (str(answer.get("msg") or "").strip() or "no answer").splitlines()[-1]
        told = next((entry for entry in answer.get("servers", []) if entry["name"] == server["name"]), {})
        entry = {
            "name": server["name"],
            "node": server["node"],
            "url": server["url"],
            "port": int(server["port"]),
            "gpus": list(server["gpus"]),
            **{key: told.get(key) for key in TOLD},
            "drift": drift(told, server["wanted"], server["asked_profile"]),
        }
        if not reached:
            entry.update(state="unreachable", detail=why)
        entries.append(entry)
        nodes[server["node"]] = {
            "name": server["node"],
            "state": "reached" if reached else "unreachable",
            "detail": why,
            **{key: (answer.get("node") or {}).get(key) for key in ("gpus", "host_memory", "boot_id")},
        }
    return {
        "schema": SCHEMA,
        "servers": entries,
        "nodes": list(nodes.values()),
        "router": router_status(router) if router else None,
    }


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"sglang_fleet_status": fleet_status, "sglang_router_status": router_status}
