# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people read at the end of a playbook: plain-text tables that fit a terminal of 80 columns."""

from __future__ import annotations

import textwrap

from ansible.errors import AnsibleFilterError, AnsibleTypeError

try:
    import tabulate

    tabulate.MIN_PADDING = 0  # headers need no room beyond their own: 80 columns are few
except ImportError:
    tabulate = None

NOTHING = "-"
COLUMNS = 72  # the YAML callback shows what debug prints eight columns further right
SHOWN_LINES = 6  # of a failed server's log


def table(rows, headers):
    """A table of ``rows`` (lists as long as ``headers``); None and the empty text are a dash, numbers stand right."""
    if tabulate is None:
        raise AnsibleFilterError("tables need the Python package tabulate: pip install -r requirements.txt")
    for row in rows:
        if len(row) != len(headers):
            raise AnsibleFilterError(f"a row of {len(row)} cells under {len(headers)} headers: {row!r}")
    cells = [[NOTHING if cell is None or cell == "" else str(cell) for cell in row] for row in rows]
    digits = [[cell.removeprefix("-").replace(".", "", 1) for cell in column] for column in zip(*cells)]
    right = [all(not cell or cell.isdigit() for cell in column) for column in digits]
    align = ["right" if number else "left" for number in right]
    return tabulate.tabulate(cells, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align or None)


def wrapped(text):
    """A sentence in as many lines as a terminal of 80 columns needs; words, names and paths stay whole."""
    return textwrap.fill(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _servers(servers):
    if not isinstance(servers, list):
        raise AnsibleTypeError(f"expected a list of servers, got {str(servers)[:40]!r}")
    return servers


def deploy_report(servers):
    """What a deploy or a benchmark did, as text.

    ``servers``: one mapping a server with ``name``, ``spec`` (filter sglang_launch_spec), ``outcome`` (module sglang_wait,
    or what failed before it; empty where nothing was waited for), ``benchmark`` (``runs`` and ``measured_at`` of role
    sglang_benchmark, or empty) and ``benchmark_error``.
    """
    servers = _servers(servers)
    running, capacity, stages, speeds, notes, failed, less = [], [], {}, [], [], [], []
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
            less += reduced(name, spec.get("asked_running"), outcome)
        elif outcome["state"] == "failed":
            failed.append((name, outcome))
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
    if less:
        parts.append("Less than was asked for\n" + "\n".join(less))
    if failed:
        # What failed before a launch has no stage.
        rows = [
            [name, short(told.get("stage") or ""), duration(told.get("elapsed")), told.get("cause_id") or told.get("cause")]
            for name, told in failed
        ]
        if any(told.get("stage") for _name, told in failed):
            parts.append(
                "Failed, in which stage and how long after the launch\n" + table(rows, ["server", "stage", "after", "cause id"])
            )
        notes += [failure(name, told) for name, told in failed]
    return "\n\n".join(parts + notes)


def failure(name, told):
    """Lines for a server that did not become ready: why, what to do, the lines of its log that matter, the rest's places."""
    if not told.get("stage"):
        return f"{name} FAILED: {told['msg']}"
    why = told["cause"] if told.get("outcome") else told["msg"]  # sglang_server's cause is a word, its sentence the message
    lines = [f"{name} FAILED: {why}", f"  do:     {told['advice']}"]
    lines += [f"  | {line}" for line in (told.get("lines") or [])[-SHOWN_LINES:]]
    lines += [f"  log:    {told['log']}"] if told.get("log") else []
    lines += [f"  bundle: {told['bundle']}"] if told.get("bundle") else []
    lines += [f"  left:   {told['left']}"] if told.get("left") else []
    return "\n".join(lines)


def reduced(name, asked, outcome):
    """Sentences for what a server that serves got less of than was asked for."""
    figures = outcome.get("figures") or {}
    sentences = capped(name, asked, outcome.get("cap"), figures)
    context, tokens = figures.get("context_len"), figures.get("kv_tokens")
    if context and tokens and tokens < context:
        sentences.append(f"{name}: a request may have {context} tokens, but {tokens} fit: KV cache")
    return sentences + [f"{name}: {sentence}" for sentence in outcome.get("reductions") or []]


def short(stage):
    """A stage's name as narrow as a table needs it."""
    return {
        "state pool": "state",
        "KV pool": "KV",
        "memory pools": "pools",
        "graph capture": "graphs",
        "host pools": "host",
    }.get(stage, stage)


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
    if status.get("router"):
        parts.append(router_report(status["router"]))
    return "\n\n".join(parts + (["\n".join(notes)] if notes else []))


def router_report(router):
    """The state of a router (filter sglang_router_status), as text: a line, its reason, and a table of its workers."""
    if not isinstance(router, dict):
        raise AnsibleTypeError(f"expected the state of a router, got {type(router).__name__}")
    about = f" (pid {router['pid']}, up {duration(router['uptime_s'])})" if router["pid"] else ""
    text = f"Router {router['url']} on {router['node']}: {router['state']}{about}"
    if router["detail"]:
        text += f": {router['detail']}"
    rows = [
        [worker["name"] or "not of this fleet", worker["url"], worker["state"], worker["load"]] for worker in router["workers"]
    ]
    return text + ("\n" + table(rows, ["server", "URL for the router", "routed", "in flight"]) if rows else "")


def plan_report(fleet):
    """A fleet's memory plan (filter sglang_fleet_plan), as text. GiB on the card, GB (1e9 bytes) on the host, a rank each."""
    if not isinstance(fleet, dict):
        raise AnsibleTypeError(f"expected the plan of a fleet, got {str(fleet)[:40]!r}")
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
            (name, f"free: {plan['free_source']}; weights: from {plan['weights_source']}; graphs and activations: {graphs}")
        )
        notes += [(name, advice) for advice in plan["advice"][:1]]
        notes += [(name, f"note: {warning}") for warning in plan["warnings"]]
        if not plan["counted"]:
            notes.append((name, "runs already: its host pools are in use and not summed"))
    headers = ["server", "free", "weights", "draft", "KV", "state", "spec", "left", "fits"]
    parts = ["On the card, GiB\n" + table(card, headers)] if card else []
    if requests:
        headers = ["server", "max running", "asked", "KV tokens", "slots", "bound by"]
        parts.append("Requests\n" + table(requests, headers))
    nodes = []
    for name, node in fleet["nodes"].items():
        figures = [node["host_pools_gb"], node["available_gb"], node["cgroup_limit_gb"]]
        cells = [None if figure is None else f"{figure:.2f}" for figure in figures]
        nodes.append([name, *cells, "yes" if node["fits"] else "NO"])
    if nodes:
        parts.append("On the hosts, GB\n" + table(nodes, ["node", "pools", "available", "limit", "fits"]))
    wishes = {name: suggested(plan["suggestion"]) for name, plan in fleet["servers"].items() if plan["suggestion"]}
    parts += [
        "\n".join([wrapped(f"{who}: {first}"), *map(wrapped_flag, flags)])
        for who, (first, *flags) in _same(wishes.items(), wishes)
    ]
    failing = [(name, why) for name, _, why in (reason.partition(": ") for reason in fleet["reasons"])]
    parts += [wrapped(f"DOES NOT FIT: {who}: {why}") for who, why in _same(failing, fleet["servers"])]
    everyone = {**fleet["servers"], **fleet["unplanned"]}
    missing = [(name, why.removeprefix(f"{name}: ")) for name, why in fleet["unplanned"].items()]
    parts += [wrapped(f"NOT PLANNED: {who}: {why}") for who, why in _same(missing, everyone)]
    parts.append("\n".join(wrapped(f"{who}: {note}") for who, note in _same(notes, fleet["servers"])))
    return "\n\n".join(part for part in parts if part) or "Nothing to plan: no selected server is for cuda."


def _same(pairs, everyone):
    """``(names, said)`` of pairs ``(name, said)``: what is said of several is said once, in the order of the first."""
    of = {}
    for name, said in pairs:
        of.setdefault(tuple(said) if isinstance(said, list) else said, []).append(name)
    return [("all" if len(names) == len(everyone) and len(names) > 1 else ", ".join(names), said) for said, names in of.items()]


def wrapped_flag(line):
    return textwrap.fill(line, COLUMNS, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)


def suggested(suggestion):
    """A sentence and lines below it: flags that give what was wanted, or why there are none and what comes nearest."""
    found = suggestion if suggestion["possible"] else suggestion["nearest"]
    refused = "" if suggestion["possible"] else f"not on this card: {'; '.join(suggestion['reasons'])}"
    if not found:
        return [refused]
    plan = found["plan"]
    figures = [f"{plan['max_running_requests']} running, {plan['kv_tokens']} KV tokens, {plan['left_gib']:.2f} GiB left"]
    if plan["host_total_gb"]:
        figures.append(f"{plan['host_total_gb'] * plan['ranks']:.2f} GB on the host")
    with_these = f"{', '.join(figures)} with{'' if found['args'] else ' the flags as they are'}"
    first = [with_these] if suggestion["possible"] else [refused, f"nearest: {with_these}"]
    flags = [f"{flag}: {value}" for flag, value in found["args"].items()]
    more = suggestion.get("more")
    if more:
        plan, args = more["plan"], ", ".join(f"{flag} {value}" for flag, value in more["args"].items())
        flags.append(f"more: {plan['max_running_requests']} running fit, {plan['kv_tokens']} KV tokens, with {args}")
    return [*first, *flags, *(f"lossy: {cost}" for cost in found["lossy"])]


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


def swap_report(servers):
    """The end of a swap, as text: what each server runs now, and of each that was not swapped, why.

    ``servers``: ``name``, ``result`` (``outcome``, ``why``, ``bundle``, ``gate``, ``seconds``), ``to`` and
    ``now``, an entry of module sglang_server_info, empty where the node does not answer.
    """
    rows, notes = [], []
    # Columns that say the same of every server tell nothing and are left out: 72 columns are few.
    differing = [
        key for key in ("release", "model") if len({server["now"].get(key) for server in _servers(servers)} - {None}) > 1
    ]
    for server in servers:
        result, now = server["result"], server["now"]
        seconds = result.get("seconds") or {}
        state = now.get("state") or "unreachable"
        shown = [now.get("profile"), *(now.get(key) for key in differing), state, seconds.get("drain"), seconds.get("out")]
        rows.append([server["name"], result["outcome"], *shown])
        if result.get("why"):
            notes.append(wrapped(f"{server['name']} {result['outcome'].upper()}: {result['why']}"))
            notes += [f"  bundle: {result['bundle']}"] if result.get("bundle") else []
        elif now.get("detail"):
            notes.append(wrapped(f"{server['name']}: {now['detail']}"))
        if result.get("gate"):
            notes.append(wrapped(f"{server['name']}: {result['gate']['sentence']}, {result['gate']['verdict']}"))
        if result.get("note"):
            notes.append(wrapped(f"{server['name']}: {result['note']}"))
    headers = ["server", "outcome", "runs", *differing, "state", "drain s", "out s"]
    return "\n\n".join([table(rows, headers), *(["\n".join(notes)] if notes else [])])


def _called(boot):
    return boot.get("profile") if isinstance(boot, dict) else boot


def history_report(records, limit=50):
    """Who changed what when, newest last, as text. ``records``: lines of history of nodes, or of the controller's records."""
    rows, notes = [], []
    # A node remembers what the controller has a record of too; the node, which comes first, says it best.
    unique = {}
    for record in records:
        unique.setdefault((record["server"], record["what"], record.get("run") or record["at"]), record)
    ordered = sorted(unique.values(), key=lambda record: (record["at"], record["server"]))
    for record in ordered[-int(limit) :]:
        before, after = record.get("before"), record.get("after")
        what = " -> ".join(str(_called(boot) or "-") for boot in (before, after) if boot is not None)
        if isinstance(before, dict) and isinstance(after, dict):
            more = [key for key in ("release", "model", "port") if before.get(key) != after.get(key)]
            what += "".join(f", {key} {before.get(key)} -> {after.get(key)}" for key in more)
        at = f"{record['at'][:10]} {record['at'][11:19]}Z"
        rows.append([at, record["server"], record.get("who"), record["what"], what])
        # A name tells a profile; what else changed has none.
        if record.get("changes") and _called(before) == _called(after):
            notes.append(wrapped(f"{at} {record['server']}: {'; '.join(map(str, record['changes']))}"))
        if record.get("why"):
            notes.append(wrapped(f"{at} {record['server']}: {record['why']}"))
    if not rows:
        return "Nothing is known of any change of the selected servers."
    parts = [table(rows, ["when", "server", "who", "outcome", "what"])]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def moment(utc):
    """A record's time as narrow as a table needs it: 2026-11-29T16:14:54Z as 11-29 16:14Z."""
    return f"{utc[5:10]} {utc[11:16]}Z" if utc else None


def duration(seconds):
    """Seconds as people say them: 45s, 12m, 3h05m, 2d04h."""
    if seconds is None:
        return None
    seconds = round(seconds)  # as sentences beside the tables do
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{seconds % 60:02}s" if minutes else f"{seconds}s"


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_boots_report": boots_report,
            "sglang_deploy_report": deploy_report,
            "sglang_history_report": history_report,
            "sglang_plan_report": plan_report,
            "sglang_router_report": router_report,
            "sglang_status_report": status_report,
            "sglang_swap_report": swap_report,
            "sglang_table": table,
        }
