# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory of a whole fleet before a boot, what a boot showed of it afterwards, and both as text."""

from __future__ import annotations

import statistics

from ansible.errors import AnsibleFilterError, AnsibleTypeError
from ansible.plugins.loader import filter_loader

SCHEMA = 1
GIB = 1 << 30
# What is gone from the card before the weights load: the CUDA contexts of the scheduler and, where the model takes images,
# of the main process with its pool for them. Measured on an H200 with SGLang 0.5.17: 94.97 GiB free, 92.79 logged. It is
# taken until a boot on the very GPU, release and model has told better, and the plan says that it was taken.
ASSUMED_CONTEXT_GIB = {"multimodal": 2.18, "text": 0.6}
# Figures of a plan that a boot's log tells too: name in the plan, name in the log.
COMPARED = {
    "weights_gib": "weights_gib",
    "draft_weights_gib": "draft_weights_gib",
    "kv_tokens": "kv_tokens",
    "kv_gib": "kv_gib",
    "mamba_slots": "state_slots",
    "mamba_conv_gib": "state_conv_gib",
    "mamba_ssm_gib": "state_ssm_gib",
    "host_kv_gb": "host_kv_gb",
    "host_mamba_gb": "host_state_gb",
    "max_running_requests": "cap",
}
STATED = ("gpu_free_gib", "host_free_gb", "cgroup_limit_gb", "gpu")
TOLERANCE = 0.02
ROUNDING_GIB = 0.02  # the log prints two decimals
SUGGESTING = ("want_running", "want_context", "allow_lossy")


def plan_request(known):
    """What fleet_plan needs of one server, from what was found on its node, else from what the inventory states.

    ``known``: ``spec`` (filter sglang_launch_spec), ``found`` (module sglang_node_info, empty where no node answered),
    ``declared`` (``gpu_free_gib``, ``host_free_gb``, ``cgroup_limit_gb``, ``gpu``), ``model`` (entry of sglang_models) and
    ``checked`` (module sglang_server in state checked, empty where it did not run).
    """
    spec, found, declared, checked = known["spec"], known["found"], known["declared"] or {}, known["checked"]
    holds = checked.get("holds") or {"pids": [], "host_gb": 0.0}
    cards = [gpu for gpu in found.get("gpus") or [] if gpu["index"] in spec["gpus"]]
    model = (found.get("models") or {}).get(spec["model_path"]) or {}
    host = found.get("host_memory") or {}
    if not isinstance(declared, dict):
        raise AnsibleFilterError(f"sglang_node_memory is {declared!r}: expected a mapping such as {{gpu_free_gib: 94.9}}")
    stated = declared.get("gpu_free_gib")
    unknown = [name for name in declared if name not in STATED]
    if unknown:
        raise AnsibleFilterError(f"sglang_node_memory has an unknown key '{unknown[0]}': known are {', '.join(STATED)}")
    for name in STATED[:3]:
        value = declared.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise AnsibleFilterError(f"sglang_node_memory: {name} is {value!r}: expected a number above 0")
    return {
        "name": spec["name"],
        "node": spec["node"],
        "gpus": spec["gpus"],
        "cards": [{"index": gpu["index"], "free_gib": gpu["free_gib"]} for gpu in cards]
        or [{"index": gpu, "free_gib": stated} for gpu in spec["gpus"]],
        "held_gib": {
            gpu["index"]: sum(used["used_gib"] for used in gpu["processes"] if used["pid"] in holds["pids"]) for gpu in cards
        },
        "config": model.get("config") or known["model"].get("config"),
        "weight_bytes": model.get("weight_bytes"),
        "draft_bytes": model.get("draft_bytes"),
        "args": spec["args"],
        "kind": {
            "model": spec["model"],
            "gpu": cards[0]["name"] if cards else declared.get("gpu"),
            "release": spec["release"],
            "profile": spec["profile"],
        },
        "host": {
            "available_gb": host.get("available_gb", declared.get("host_free_gb")),
            "cgroup_limit_gb": host.get("cgroup_limit_gb", declared.get("cgroup_limit_gb")),
            "held_gb": holds["host_gb"],
        },
        "counted": checked.get("restarts", True),
    }


def _filter(name):
    return filter_loader.get(name).j2_function


def _learned(records, server, key):
    """The median of a figure over earlier boots of the same model, GPU, release and profile, and how many they were."""
    same = [
        record[key]
        for record in records
        if isinstance(record.get(key), (int, float))
        and all(value is not None and record.get(name) == value for name, value in server["kind"].items())
    ]
    return (round(statistics.median(same), 2), len(same)) if same else (None, 0)


def _card(server, records):
    """``(GiB free before the weights load, where that is from)``: the worst of the server's GPUs."""
    if not server["cards"] or any(gpu["free_gib"] is None for gpu in server["cards"]):
        raise AnsibleFilterError(
            f"{server['name']}: the free memory of its GPU is not known: let the node be asked, or state it in the inventory"
            " as sglang_node_memory: {gpu_free_gib: …, host_free_gb: …}"
        )
    free = [gpu["free_gib"] + server["held_gib"].get(gpu["index"], 0.0) for gpu in server["cards"]]
    context, boots = _learned(
        records, {**server, "kind": {k: server["kind"][k] for k in ("gpu", "model", "release")}}, "context_gib"
    )
    if context is None:
        multimodal = isinstance(server["config"], dict) and "vision_config" in server["config"]
        context = ASSUMED_CONTEXT_GIB["multimodal" if multimodal else "text"]
        source = f"{min(free):.2f} free less {context:.2f} assumed for contexts"
    else:
        source = f"{min(free):.2f} free less {context:.2f} for contexts as in {boots} earlier boot{'s' if boots > 1 else ''}"
    return round(min(free) - context, 2), source


def _draft_gib(server, ranks):
    """The draft head of a quantised checkpoint on one rank, from its files; None where the config alone tells it better.

    SGLang loads the head with an embedding and an output layer of its own and shares the target's only after the pools
    were sized (5.53 GiB for Qwen3.6-27B, whose head's own tensors are 0.79).
    """
    config = server["config"]
    if not isinstance(config, dict):
        return None
    text = config.get("text_config") or config
    if not server.get("draft_bytes") or not (config.get("quantization_config") or text.get("quantization_config")):
        return None
    try:
        copies = 1 if config.get("tie_word_embeddings", text.get("tie_word_embeddings")) else 2
        shared = copies * text["vocab_size"] * text["hidden_size"] * 2
    except (KeyError, TypeError):
        return None
    return round((server["draft_bytes"] + shared) / GIB / ranks, 3)


def plan_server(server, records, wanted):
    """One server's plan, with where its figures come from."""
    name, ranks = server["name"], max(1, len(server["gpus"]))
    if server["config"] is None:
        raise AnsibleFilterError(
            f"{name}: nothing is known of the shape of model {server['kind']['model']}: let the node be asked, or put its"
            " config.json into models.yml as config"
        )
    free, source = _card(server, records)
    weights = server["weight_bytes"]
    figures = {
        "sglang_version": server["kind"]["release"],
        "free_gpu_gib": free,
        "weights_gib": round(weights / GIB / ranks, 3) if weights else None,
        "draft_weights_gib": _draft_gib(server, ranks),
    }
    try:
        plan = _filter("sglang_memory_plan")(server["config"], server["args"], **figures)
        if wanted:
            suggestion = _filter("sglang_memory_suggest")(server["config"], server["args"], **figures, **wanted)
    except (AnsibleFilterError, AnsibleTypeError) as error:
        raise AnsibleFilterError(f"{name} can't be planned: {error.message}") from None
    graphs, boots = _learned(records, server, "graphs_gib")
    return {
        **plan,
        "free_gpu_gib": free,
        "free_source": source,
        "weights_source": "its files" if weights else "its config",
        "graphs_gib": graphs,
        "graphs_boots": boots,
        "counted": server["counted"],
        "suggestion": suggestion if wanted else None,
    }


def fleet_plan(servers, records=None, want_running=None, want_context=None, allow_lossy=False, tolerant=False):
    """The plans of all servers, and of their nodes' host memory.

    ``servers``: one mapping a server with ``name``, ``node``, ``gpus`` (indices), ``cards`` (``index`` and ``free_gib`` of
    them), ``held_gib`` (by GPU index: what of it the running server will give back), ``config`` (config.json),
    ``weight_bytes``, ``draft_bytes`` (of the model's own draft head), ``args``, ``kind`` (``model``, ``gpu``, ``release``,
    ``profile``), ``host`` (``available_gb``, ``cgroup_limit_gb``, ``held_gb``) and ``counted`` (false for one that runs
    unchanged: its pools are in use already).
    ``records``: earlier boots. With ``want_running`` each plan has a ``suggestion``. A server that can't be planned (a model
    class that is not known, say) is an error, or with ``tolerant`` an entry of ``unplanned`` with the reason.
    """
    if not isinstance(servers, list):
        raise AnsibleTypeError(f"sglang_fleet_plan needs a list of servers, got {type(servers).__name__}")
    wanted = {}
    if want_running is not None or want_context is not None:
        if want_running is None:
            raise AnsibleFilterError(
                "want_context goes with want_running: how many requests of that length are to run at once?"
            )
        wanted = {"want_running": want_running, "allow_lossy": allow_lossy}
        if want_context is not None:
            wanted["want_context"] = want_context
    plans, unplanned = {}, {}
    for server in servers:
        try:
            plans[server["name"]] = plan_server(server, records or [], wanted)
        except AnsibleFilterError as error:
            if not tolerant:
                raise
            unplanned[server["name"]] = error.message
    servers = [server for server in servers if server["name"] in plans]
    nodes, reasons = {}, []
    for name, plan in plans.items():
        if plan["counted"]:
            reasons += [f"{name}: {reason}" for reason in plan["reasons"]]
    for node in dict.fromkeys(server["node"] for server in servers):
        here = [server for server in servers if server["node"] == node]
        counted = [plans[server["name"]] for server in here if server["counted"]]
        host = here[0]["host"]
        if host.get("available_gb") is None:
            if any(plan["host_total_gb"] for plan in counted):
                raise AnsibleFilterError(
                    f"{node}: its free host memory is not known and a profile takes host pools: let the node be asked, or state"
                    " it in the inventory as sglang_node_memory: {gpu_free_gib: …, host_free_gb: …}"
                )
            continue
        available = host["available_gb"] + sum(server["host"].get("held_gb") or 0.0 for server in here if server["counted"])
        summed = _filter("sglang_memory_node")(
            counted, host_free_gb=round(available, 2), cgroup_limit_gb=host.get("cgroup_limit_gb")
        )
        nodes[node] = {**summed, "available_gb": round(available, 2), "cgroup_limit_gb": host.get("cgroup_limit_gb")}
        reasons += [f"{node}: {reason}" for reason in summed["reasons"]]
    return {
        "schema": SCHEMA,
        "fits": not reasons,
        "reasons": reasons,
        "servers": plans,
        "nodes": nodes,
        "unplanned": unplanned,
    }


def compare_boot(plan, figures, cap=None):
    """Planned against observed: ``[{"figure", "planned", "observed", "off", "rounding", "warn"}]``.

    What the log did not tell is left out. ``figures``: of module sglang_wait; ``cap``: the running server's own word.
    ``off`` is a share of what was observed. ``rounding`` marks GiB and GB that differ by less than a log of two decimals
    shows. ``warn`` is set above 2 % for all others.
    """
    seen = {**figures, "cap": cap if cap is not None else figures.get("max_running_requests")}
    if "kv_k_gib" in seen and "kv_v_gib" in seen:
        seen["kv_gib"] = round(seen["kv_k_gib"] + seen["kv_v_gib"], 2)
    rows = []
    for planned_name, observed_name in COMPARED.items():
        planned, observed = plan.get(planned_name), seen.get(observed_name)
        if planned is None or observed is None or (not planned and not observed):
            continue
        off = (planned - observed) / observed if observed else 1.0
        close = planned_name.endswith(("_gib", "_gb")) and abs(planned - observed) <= ROUNDING_GIB + 1e-9
        rows.append(
            {
                "figure": planned_name,
                "planned": planned,
                "observed": observed,
                "off": round(off, 4),
                "rounding": close,
                "warn": abs(off) > TOLERANCE and not close,
            }
        )
    return rows


def boot_record(known, plan=None):
    """What is kept of a boot: the plan, what was seen, and what only a boot can tell.

    ``known``: as for plan_request, and ``ready`` (result of module sglang_wait). ``plan``: the server's own, if one was made.
    """
    request, ready, plan = plan_request(known), known["ready"], plan or {}
    figures = ready.get("figures") or {}
    free = [gpu["free_gib"] + request["held_gib"].get(gpu["index"], 0.0) for gpu in request["cards"] if gpu["free_gib"]]
    context = graphs = None
    if free and figures.get("free_gpu_gib") is not None and request["kind"]["gpu"]:
        context = round(min(free) - figures["free_gpu_gib"], 2)
    if figures.get("graphs_gib") is not None:
        graphs = figures["graphs_gib"]
    return {
        "schema": SCHEMA,
        "server": request["name"],
        "node": request["node"],
        "launched_at": ready.get("launched_at"),
        "outcome": ready.get("outcome"),
        **request["kind"],
        "planned": plan,
        "observed": {**figures, "cap": ready.get("cap")},
        "compared": compare_boot(plan, figures, ready.get("cap")) if plan else [],
        "context_gib": context,
        "graphs_gib": graphs,
        "stage_seconds": ready.get("stage_seconds"),
        "elapsed": ready.get("elapsed"),
    }


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_plan_request": plan_request,
            "sglang_fleet_plan": fleet_plan,
            "sglang_compare_boot": compare_boot,
            "sglang_boot_record": boot_record,
        }
