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
    running, stages, speeds, notes = [], {}, [], []
    waited = any(server.get("outcome") for server in _servers(servers))
    for server in _servers(servers):
        name, spec, outcome = server["name"], server.get("spec") or {}, server.get("outcome") or {"state": "not reached"}
        ready = outcome["state"] == "ready"
        figures = (outcome.get("figures") or {}) if ready else {}
        running.append(
            [
                name,
                spec.get("url"),
                spec.get("profile"),
                outcome["state"],
                outcome.get("pid") if ready else None,
                outcome["timeline"][-1]["at_s"] if ready else None,
                figures.get("kv_tokens"),
                outcome.get("cap") if ready else None,
            ]
        )
        if ready:
            stages[name] = outcome["stage_seconds"]
            notes += capped(name, spec.get("asked_running"), outcome.get("cap"), figures)
        elif outcome["state"] == "failed":
            notes.append(f"{name} FAILED: {outcome['msg']}")
        benchmark = server.get("benchmark") or {}
        for run in benchmark.get("runs") or []:
            figures = [run["output_tok_s"], run["ttft_ms"]["median"], run["tpot_ms"]["median"], run.get("accept_length")]
            shown = [None if figure is None else f"{figure:.1f}" for figure in figures]
            speeds.append([name, run["concurrency"], *shown, benchmark.get("measured_at")])
        if server.get("benchmark_error"):
            notes.append(f"{name} serves, but its benchmark failed: {server['benchmark_error']}")
    headers = ["server", "URL", "profile", "state", "pid", "ready s", "KV tokens", "max running"]
    parts = [table(running, headers)] if waited else []
    if stages:
        names = list(dict.fromkeys(stage for spent in stages.values() for stage in spent))
        rows = [[name, *(spent.get(stage) for stage in names)] for name, spent in stages.items()]
        parts.append("Seconds by stage\n" + table(rows, ["server", *names]))
    if speeds:
        headers = ["server", "at once", "tok/s", "TTFT", "TPOT", "accepted", "measured"]
        parts.append("Benchmark (TTFT and TPOT: median, ms)\n" + table(speeds, headers))
    return "\n\n".join(parts + notes)


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
    servers, notes = [], []
    for server in _servers(status["servers"]):
        state = server["state"]
        if state == "starting":
            state = f"starting: {server['stage']}"
        busy = None if server["running"] is None else f"{server['running']}/{server['waiting']}"
        servers.append(
            [
                server["name"],
                state,
                server["profile"],
                server["release"],
                server["pid"],
                duration(server["uptime_s"]),
                busy,
                server["cap"],
                server["output_tok_s"],
            ]
        )
        for detail in [server["detail"], *server["drift"]]:
            if detail:
                notes.append(f"{server['name']}: {detail}")
    memory = [
        [
            server["name"],
            None if server["token_usage"] is None else f"{100 * server['token_usage']:.0f} %",
            server["kv_tokens"],
            server["accept_length"],
            server["gpu_memory_gib"],
            server["host_rss_gib"],
            "yes" if server["drift"] else "no" if server["state"] == "ready" else None,
        ]
        for server in status["servers"]
    ]
    parts = [
        table(servers, ["server", "state", "profile", "release", "pid", "up", "run/wait", "cap", "tok/s"]),
        table(memory, ["server", "KV used", "KV tokens", "accepted", "GPU GiB", "RSS GiB", "drift"]),
    ]
    return "\n\n".join(parts + (["\n".join(notes)] if notes else []))


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
