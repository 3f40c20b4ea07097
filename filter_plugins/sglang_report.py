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


def plan_report(fleet):
    """A fleet's memory plan (filter sglang_fleet_plan), as text. GiB on the card, GB (1e9 bytes) on the host, a rank each."""
    if not isinstance(fleet, dict):
        raise AnsibleTypeError(f"expected the plan of a fleet, got {type(fleet).__name__}")
    card, requests, notes = [], [], []
    for name, plan in fleet["servers"].items():
        state = plan["mamba_conv_gib"] + plan["mamba_ssm_gib"]
        kv = plan["kv_gib"] + plan["swa_kv_gib"] + plan["draft_kv_gib"]
        figures = [
            plan["free_gpu_gib"],
            plan["weights_gib"],
            plan["draft_weights_gib"],
            kv,
            state,
            plan["mamba_intermediate_gib"],
        ]
        card.append([name, *(f"{figure:.2f}" for figure in [*figures, plan["left_gib"]]), "yes" if plan["fits"] else "NO"])
        slots = plan["mamba_slots"] or None
        requests.append([name, plan["max_running_requests"], plan["asked_running"], plan["kv_tokens"], slots, plan["binding"]])
    for name, plan in fleet["servers"].items():
        graphs = (
            f"{plan['graphs_gib']:.2f} GiB of graphs in {plan['graphs_boots']} earlier boot(s), activations come on top"
            if plan["graphs_gib"] is not None
            else "unknown until a first boot of this model, GPU, release and profile"
        )
        notes.append(
            (f"free: {plan['free_source']}; weights: from {plan['weights_source']}; graphs and activations: {graphs}", name)
        )
        notes += [(advice, name) for advice in plan["advice"][:1]]
        notes += [(f"note: {warning}", name) for warning in plan["warnings"]]
        if not plan["counted"]:
            notes.append(("runs already: its host pools are in use and not summed", name))
    headers = ["server", "free", "weights", "draft", "KV", "state", "spec", "left", "fits"]
    parts = ["On the card, GiB\n" + table(card, headers)] if card else []
    if requests:
        headers = ["server", "max running", "asked", "KV tokens", "slots", "bound by"]
        parts.append("Requests\n" + table(requests, headers))
    nodes = [
        [name, f"{node['host_pools_gb']:.2f}", node["available_gb"], node["cgroup_limit_gb"], "yes" if node["fits"] else "NO"]
        for name, node in fleet["nodes"].items()
    ]
    if nodes:
        parts.append("On the hosts, GB\n" + table(nodes, ["node", "pools", "available", "limit", "fits"]))
    parts += ["\n".join(suggested(name, plan["suggestion"])) for name, plan in fleet["servers"].items() if plan["suggestion"]]
    failing = {}
    for reason in fleet["reasons"]:
        name, _, why = reason.partition(": ")
        failing.setdefault(why, []).append(name)
    parts += [f"DOES NOT FIT: {_who(names, fleet['servers'])}: {why}" for why, names in failing.items()]
    said = {}
    for note, name in notes:
        said.setdefault(note, []).append(name)
    parts.append("\n".join(f"{_who(names, fleet['servers'])}: {note}" for note, names in said.items()))
    return "\n\n".join(part for part in parts if part) or "Nothing to plan: no selected server is for cuda."


def _who(names, everyone):
    return "all" if len(names) == len(everyone) and len(names) > 1 else ", ".join(names)


def suggested(name, suggestion):
    """Lines for a suggestion: the flags that give what was wanted, or why there are none and what comes nearest."""
    if suggestion["possible"]:
        plan = suggestion["plan"]
        lines = [
            f"{name}: {plan['max_running_requests']} running, {plan['kv_tokens']} KV tokens,"
            f" {plan['left_gib']:.2f} GiB left with"
        ]
        flags, lossy = suggestion["args"], suggestion["lossy"]
    else:
        lines = [f"{name}: not on this card: {'; '.join(suggestion['reasons'])}"]
        nearest = suggestion["nearest"]
        if not nearest:
            return lines
        lines.append(f"  nearest: {nearest['running']} running with")
        flags, lossy = nearest["args"], nearest["lossy"]
    lines += [f"    {flag}: {value}" for flag, value in flags.items()] or ["    the flags as they are"]
    return lines + [f"    lossy: {cost}" for cost in lossy]


def boots_report(records):
    """Planned against observed of the boots of a deploy (filter sglang_boot_record), as text; empty without plans."""
    rows, notes = [], []
    for record in _servers(records):
        compared = {row["figure"]: row for row in record["compared"]}
        if not compared:
            continue
        worst = max(compared.values(), key=lambda row: (not row["rounding"], abs(row["off"])))
        pairs = [
            f"{compared[figure]['planned']}/{compared[figure]['observed']}" if figure in compared else None
            for figure in ("kv_tokens", "mamba_slots", "max_running_requests")
        ]
        rows.append([record["server"], *pairs, f"{worst['figure']} {100 * worst['off']:+.1f} %"])
        notes += [
            f"{record['server']}: {row['figure']} planned {row['planned']}, observed {row['observed']}"
            f" ({100 * row['off']:+.1f} %)"
            for row in record["compared"]
            if row["warn"]
        ]
    if not rows:
        return ""
    headers = ["server", "KV tokens", "slots", "running", "farthest off"]
    return "\n\n".join(["Planned/observed\n" + table(rows, headers), *notes])


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
        return {
            "sglang_boots_report": boots_report,
            "sglang_deploy_report": deploy_report,
            "sglang_plan_report": plan_report,
            "sglang_status_report": status_report,
            "sglang_table": table,
        }
