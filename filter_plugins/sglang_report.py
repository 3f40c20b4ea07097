# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people read at the end of a playbook: plain-text tables that fit a terminal of 80 columns."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError, AnsibleTypeError

try:
    import tabulate

    tabulate.MIN_PADDING = 0  # headers need no room beyond their own: 80 columns are few
except ImportError:
    tabulate = None

NOTHING = "-"


def table(rows, headers):
    """A table of ``rows`` (lists as long as ``headers``); None and the empty text are a dash, numbers stand right."""
    if tabulate is None:
        raise AnsibleFilterError("tables need the Python package tabulate: pip install -r requirements.txt")
    for row in rows:
        if len(row) != len(headers):
            raise AnsibleFilterError(f"a row of {len(row)} cells under {len(headers)} headers: {row!r}")
    cells = [[NOTHING if cell is None or cell == "" else str(cell) for cell in row] for row in rows]
    right = [all(cell == NOTHING or cell.replace(".", "", 1).isdigit() for cell in column) for column in zip(*cells)]
    align = ["right" if number else "left" for number in right]
    return tabulate.tabulate(cells, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align or None)


def _servers(servers):
    if not isinstance(servers, list):
        raise AnsibleTypeError(f"expected a list of servers, got {type(servers).__name__}")
    return servers


def deploy_report(servers):
    """What a deploy or a benchmark did, as text.

    ``servers``: one mapping a server with ``name``, ``spec`` (filter sglang_launch_spec), ``outcome`` (module sglang_wait,
    or what failed before it; empty where nothing was waited for), ``benchmark`` (``runs`` and ``measured_at`` of role
    sglang_benchmark, or empty) and ``benchmark_error``.
    """
    servers = _servers(servers)
    running, capacity, stages, speeds, notes = [], [], {}, [], []
    for server in servers:
        name, spec, outcome = server["name"], server.get("spec") or {}, server.get("outcome") or {"state": "not reached"}
        ready = outcome["state"] == "ready"
        pid = outcome.get("pid") if ready else None
        running.append([name, spec.get("url"), spec.get("profile"), outcome["state"], pid])
        if ready:
            figures = outcome.get("figures") or {}
            stages[name] = {"ready": outcome["timeline"][-1]["at_s"], **outcome["stage_seconds"]}
            capacity.append(
                [
                    name,
                    outcome.get("cap"),
                    spec.get("asked_running"),
                    figures.get("kv_tokens"),
                    figures.get("state_slots"),
                    figures.get("available_gib"),
                ]
            )
            notes += capped(name, spec.get("asked_running"), outcome.get("cap"), figures)
        elif outcome["state"] == "failed":
            notes.append(f"{name} FAILED: {outcome['msg']}")
        benchmark = server.get("benchmark") or {}
        for run in benchmark.get("runs") or []:
            figures = [run["output_tok_s"], run["ttft_ms"]["median"], run["tpot_ms"]["median"], run.get("accept_length")]
            shown = [None if figure is None else f"{figure:.1f}" for figure in figures]
            speeds.append([name, run["concurrency"], *shown, moment(benchmark.get("measured_at"))])
        if server.get("benchmark_error"):
            notes.append(f"{name} serves, but its benchmark failed: {server['benchmark_error']}")
    parts = []
    if any(server.get("outcome") for server in servers):
        parts.append(table(running, ["server", "URL", "profile", "state", "pid"]))
    if capacity:
        headers = ["server", "max running", "asked", "KV tokens", "state slots", "free GiB"]
        parts.append("What each can hold\n" + table(capacity, headers))
    if stages:
        names = list(dict.fromkeys(stage for spent in stages.values() for stage in spent))
        rows = [[name, *(spent.get(stage) for stage in names)] for name, spent in stages.items()]
        parts.append("Seconds to ready, and in each stage\n" + table(rows, ["server", *(short(name) for name in names)]))
    if speeds:
        headers = ["server", "at once", "tok/s", "TTFT", "TPOT", "accepted", "measured"]
        parts.append("Benchmark (TTFT and TPOT: median, ms)\n" + table(speeds, headers))
    return "\n\n".join(parts + notes)


def short(stage):
    """A stage's name as narrow as a table needs it."""
    return {"state pool": "state", "KV pool": "KV", "graph capture": "graphs", "host pools": "host"}.get(stage, stage)


def capped(name, asked, got, figures):
    """A sentence for a server that runs fewer requests than its profile asks for, and why."""
    if not asked or not got or int(got) >= int(asked):
        return []
    sentence = f"{name}: asked for {asked} running, got {got}"
    if figures.get("slots_per_request"):
        sentence += f": state cache ({figures.get('state_slots')} slots, {figures['slots_per_request']} a request)"
    return [sentence]


def status_report(status):
    """The state of a fleet (filter sglang_fleet_status), as text."""
    states, loads, notes = [], [], []
    for server in _servers(status["servers"]):
        name, state = server["name"], server["state"]
        if state == "starting":
            state = f"starting {short(server['stage'])}"
        drifted = "yes" if server["drift"] else "no" if server["pid"] else None
        up = duration(server["uptime_s"])
        states.append([name, state, server["profile"], server["release"], server["pid"], up, drifted])
        loads.append(
            [
                name,
                server["running"],
                server["waiting"],
                server["cap"],
                server["output_tok_s"],
                server["accept_length"],
                None if server["token_usage"] is None else f"{100 * server['token_usage']:.0f} %",
                server["gpu_memory_gib"],
                server["host_rss_gib"],
            ]
        )
        notes += [f"{name}: {detail}" for detail in [server["detail"], *server["drift"]] if detail]
    parts = [
        table(states, ["server", "state", "profile", "release", "pid", "up", "drift"]),
        table(loads, ["server", "run", "wait", "cap", "tok/s", "accepted", "KV used", "GPU GiB", "RSS GiB"]),
    ]
    return "\n\n".join(parts + (["\n".join(notes)] if notes else []))


def moment(utc):
    """A record's time as narrow as a table needs it: 2026-11-29T16:14:54Z as 11-29 16:14Z."""
    return f"{utc[5:10]} {utc[11:16]}Z" if utc else None


def duration(seconds):
    """Seconds as people say them: 45s, 12m, 3h05m, 2d04h."""
    if seconds is None:
        return None
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{int(seconds) % 60:02}s" if minutes else f"{int(seconds)}s"


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"sglang_deploy_report": deploy_report, "sglang_status_report": status_report}
