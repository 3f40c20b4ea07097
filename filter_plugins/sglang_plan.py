# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory of a whole fleet before a boot, what a boot showed of it afterwards, and both as text."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path

from ansible.errors import AnsibleFilterError, AnsibleTypeError


def _beside(name):
    """A file of this folder as a module: filter_plugins is on no import path, and Ansible loads its files by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


memory = _beside("sglang_memory")
change, planning = memory.change, memory.planning

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
# Flags that change what is gone from the card before the pools are sized: a boot without the same teaches nothing of it.
LOADING = (
    "cpu-offload-gb", "dp-size", "draft-quantization", "dtype", "enable-dp-attention", "enable-lora", "enable-multimodal",
    "ep-size", "language-only", "load-format", "lora-paths", "max-lora-rank", "max-loras-per-batch", "mm-feature-transport",
    "quantization", "speculative-algorithm", "speculative-draft-model-path", "speculative-draft-model-quantization",
    "torchao-config", "tp-size",
)  # fmt: skip
# Weights that earlier boots told are not believed where the files at hand say something else: the model was exchanged.
SAME_WEIGHTS = 0.05
# Of another's process on the card, GiB from which on it is named: a desktop or a monitor takes less.
OTHERS_GIB = 1
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
    where = f"{spec['name']}: sglang_node_memory of {spec['node']}"
    if not isinstance(declared, dict):
        raise AnsibleFilterError(f"{where} is {declared!r}: expected a mapping such as {{gpu_free_gib: 94.9}}")
    stated, entry = declared.get("gpu_free_gib"), known["model"]
    unknown = [name for name in declared if name not in STATED]
    if unknown:
        raise AnsibleFilterError(f"{where} has an unknown key '{unknown[0]}': known are {', '.join(STATED)}")
    for name in STATED[:3]:
        value = declared.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value <= planning.sizing.MOST):
            raise AnsibleFilterError(f"{where}: {name} is {planning.sizing.shown(value)}: expected a number above 0")
    if declared.get("gpu") is not None and not isinstance(declared["gpu"], str):
        raise AnsibleFilterError(f"{where}: gpu is {declared['gpu']!r}: expected the GPU's name as the driver tells it")
    return {
        "name": spec["name"],
        "node": spec["node"],
        "gpus": spec["gpus"],
        "cards": [{"index": gpu["index"], "free_gib": gpu["free_gib"]} for gpu in cards]
        or [{"index": gpu, "free_gib": stated} for gpu in spec["gpus"]],
        "held_gib": {
            gpu["index"]: sum(used["used_gib"] for used in gpu["processes"] if used["pid"] in holds["pids"]) for gpu in cards
        },
        "others": [
            {"gpu": gpu["index"], **used} for gpu in cards for used in gpu["processes"] if used["pid"] not in holds["pids"]
        ],
        "unreachable": bool(found.get("unreachable")),
        "config": model.get("config") or entry.get("config"),
        "weight_bytes": model.get("weight_bytes"),
        "draft_bytes": model.get("draft_bytes"),
        "stated_weights_gib": entry.get("weights_gib"),
        "stated_draft_gib": entry.get("draft_weights_gib"),
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
            "runs": bool(holds["pids"]),
        },
        "counted": checked.get("restarts", True),
    }


def _loading(args):
    given = planning.Flags(args).given
    return {name: given[name] for name in LOADING if name in given}


def _learned(records, server, key, digits=2):
    """The median of a figure over earlier boots of the same model, GPU, release and profile, and how many they were."""
    same = [
        record[key]
        for record in records
        if isinstance(record.get(key), (int, float))
        and not isinstance(record[key], bool)
        # Below 0 another process gave memory back in the meantime, and the boot tells nothing.
        and 0 <= record[key] < planning.sizing.MOST
        and all(value is not None and record.get(name) == value for name, value in server["kind"].items())
    ]
    return (round(statistics.median(same), digits), len(same)) if same else (None, 0)


def _card(server, records):
    """``(GiB free before the weights load, where that is from)``: the worst of the server's GPUs."""
    if not server["cards"] or any(gpu["free_gib"] is None for gpu in server["cards"]):
        why = "the free memory of its GPU is not known: let the node be asked, or state it"
        if server["unreachable"]:
            why = f"{server['node']} could not be reached: state its memory"
        raise AnsibleFilterError(
            f"{server['name']}: {why} in the inventory as sglang_node_memory: {{gpu_free_gib: …, host_free_gb: …}}"
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
    # A card that has not even room for contexts is planned as an empty one: its plan says what does not fit.
    return round(max(min(free) - context, 0.01), 2), source


def _weights(server, ranks):
    """``(weights GiB, where they are from, draft GiB)`` on one rank; None where the config has to tell it.

    Files win over what models.yml states, and that over the config. A quantised checkpoint's draft head is its own tensors
    and the embedding and output layer that SGLang loads beside them (filter_plugins/sglang_memory_weights.py).
    """
    config, stated, draft = server["config"], server["stated_weights_gib"], server["stated_draft_gib"]
    weighing = planning.weighing
    weights, source = (stated / ranks, "models.yml") if stated else (None, "its config")
    if server["weight_bytes"]:
        loaded = weighing.loaded_share(config, server["args"])
        weights, source = server["weight_bytes"] * loaded / GIB / ranks, "its files"
        weights += weighing.beside_weights(planning.models.read_model(config), config) / GIB
    draft = draft / ranks if draft is not None else None
    if server["draft_bytes"] and planning.models.quantisation(config, planning.models.text_of(config)):
        beside = weighing.shared_with_head(config)
        draft = (server["draft_bytes"] + beside * 2) / GIB / ranks if beside is not None else draft
    return weights, source, draft


def _loaded(server, records, weights):
    """``(figures, boots)``: what earlier boots that loaded the same told of what is gone before the pools are sized."""
    kind = {name: server["kind"][name] for name in ("gpu", "model", "release")}
    same = {**server, "kind": {**kind, "loading": _loading(server["args"])}}
    before, boots = _learned(records, same, "before_pools_gib", digits=3)
    target = _learned(records, same, "weights_gib")[0]
    if before is None or target is None or (server["weight_bytes"] and abs(target / weights - 1) > SAME_WEIGHTS):
        return {}, 0
    draft = _learned(records, same, "draft_weights_gib")[0]
    return {"weights_gib": target, "before_pools_gib": before, **({} if draft is None else {"draft_weights_gib": draft})}, boots


def _inputs(server, records, host_gb):
    """``(inputs, told)``: what the memory filters take of one server, and what is told beside its plan."""
    name, ranks = server["name"], max(1, len(server["gpus"]))
    free, source = _card(server, records)
    if server["config"] is None:
        raise AnsibleFilterError(
            f"{name}: nothing is known of the shape of model {server['kind']['model']}: let the node be asked, or put its"
            " config.json into models.yml as config"
        )
    model = planning.models.read_model(server["config"])
    weights, weights_source, draft = _weights(server, ranks)
    graphs, boots = _learned(records, server, "graphs_gib")
    figures = {
        "sglang_version": server["kind"]["release"], "free_gpu_gib": free, "weights_gib": weights,
        "draft_weights_gib": draft, "graphs_gib": graphs, "between_gib": planning.HYBRID_GIB if model.state else 0,
    }  # fmt: skip
    learned, loaded_boots = _loaded(server, records, weights)
    figures.update(learned)
    if learned:
        weights_source = f"{loaded_boots} earlier boot{'s' if loaded_boots > 1 else ''}, with all else before the pools"
    flags = planning.Flags(server["args"]).given
    if planning.sizing.Release(figures["sglang_version"]).has("hicache_ratio_shrinks") and not (
        flags.get("hicache-size") or flags.get("hicache-ratio")
    ):
        # An unset ratio shrinks to what the node has; all other sums are the node's own.
        figures["host_free_gb"] = host_gb
    if server["host"].get("runs"):
        figures["host_processes_gb"] = 0  # the new processes take what the old ones have
    told = {
        "free_gpu_gib": free, "free_source": source, "weights_source": weights_source, "graphs_gib": graphs,
        "graphs_boots": boots, "counted": server["counted"],
    }  # fmt: skip
    return {"config": server["config"], "args": server["args"], **figures}, told


def _others(server):
    """What of a card's memory is another's, as a reason of its own: no flag of the server's gets it back."""
    others = [used for used in server["others"] if (used["used_gib"] or 0) >= OTHERS_GIB]
    told = [f"pid {used['pid']} holds {used['used_gib']:.2f} GiB of GPU {used['gpu']}" for used in others]
    who = ("end them if nobody needs them", "these are") if len(told) > 1 else ("end it if nobody needs it", "it is")
    return [f"{', '.join(told)}: {who[1]} not this server's, {who[0]}"] if told else []


def _named(name, function, *args, **kwargs):
    """``function``'s answer, or its error with the server's name before it."""
    try:
        return function(*args, **kwargs)
    except (AnsibleFilterError, AnsibleTypeError) as error:
        raise AnsibleFilterError(f"{name}: {error.message.removeprefix(f'{name}: ')}") from None


class _Node:
    """Servers of one node, and the host memory that they share."""

    def __init__(self, name, servers):
        self.name, self.servers, self.host = name, servers, servers[0]["host"]
        self.limit = self.host.get("cgroup_limit_gb")
        self.available = self._with_held(server for server in servers if server["counted"])

    def _with_held(self, servers):
        """What is available once these servers have given back what they hold; None where nobody tells."""
        if self.host.get("available_gb") is None:
            return None
        return round(self.host["available_gb"] + sum(server["host"].get("held_gb") or 0.0 for server in servers), 2)

    def seen_by(self, server):
        """What ``server`` finds available when the processes of all others are up; None where nobody tells."""
        others = [other for other in self.servers if other is not server and other["counted"] and not other["host"].get("runs")]
        taken = sum(planning.PROCESSES_GB + planning.RANK_GB * (max(1, len(other["gpus"])) - 1) for other in others)
        bounds = [bound for bound in (self.available, self.limit) if bound is not None]
        return None if self.available is None else max(0, round(min(bounds) - taken, 2))

    def room(self):
        """What all of the node's servers could share, were they all started anew."""
        bounds = [bound for bound in (self._with_held(self.servers), self.limit) if bound is not None]
        return min(bounds) if self._with_held(self.servers) is not None else None

    def sum(self, inputs, plans):
        """The filter sglang_memory_node over the servers that start, with what is available; None where none of it matters."""
        counted = [server["name"] for server in self.servers if server["counted"] and server["name"] in plans]
        chosen = [plans[name] for name in counted]
        if self.available is None:
            pinned = sum(plan["host_total_gb"] * plan["ranks"] for plan in chosen)
            if not pinned:
                return None
            reason = (
                "its free host memory is not known and a profile takes host pools: let the node be asked, or state it in the"
                " inventory as sglang_node_memory: {gpu_free_gib: …, host_free_gb: …}"
            )
            summed = {"fits": False, "host_total_gb": round(pinned, 3), "host_pools_gb": round(pinned, 3), "reasons": [reason]}
            summed["host_processes_gb"] = sum(plan["host_processes_gb"] for plan in chosen)
        else:
            bounds = {"host_free_gb": self.available, "cgroup_limit_gb": self.limit}
            summed = memory.memory_node(chosen, **bounds)
            processes = summed["host_processes_gb"]
            if summed["fits"]:
                _drop_advice([inputs[name] for name in counted], chosen, {**bounds, "load_peak_gb": processes})
            else:
                pooled = [inputs[name] for name, plan in zip(counted, chosen) if plan["host_total_gb"]]
                summed = memory.memory_node(chosen, **bounds, remedy=_remedy(pooled, {**bounds, "load_peak_gb": processes}))
        return {**summed, "available_gb": self.available, "cgroup_limit_gb": self.limit}


def _sums(plans):
    return [{"host_total_gb": plan.host.total, "ranks": plan.sizes.ranks} for plan in plans]


def _drop_advice(inputs, plans, bounds):
    """Advice that all of a node's servers can't follow at once is none: host pools follow what is on the card."""
    for number in reversed(range(max((len(plan["advice_args"]) for plan in plans), default=0))):
        told = [plan["advice_args"][number : number + 1] for plan in plans]
        followed = [_raw(one, flags[0] if flags else {}) for one, flags in zip(inputs, told)]
        if not memory.memory_node(_sums(followed), **bounds)["fits"]:
            for plan in plans:
                del plan["advice"][number : number + 1], plan["advice_args"][number : number + 1]


def _remedy(pooled, bounds):
    """The ``hicache-size`` that fits a node if each of its servers with host pools has it, as half a sentence."""

    def at(size):
        return [_raw(one, {"hicache-size": size}) for one in pooled]

    def fits(size):
        return memory.memory_node(_sums(at(size)), **bounds)["fits"]

    size = change.most(1, int(bounds["host_free_gb"]), fits)
    if size is None or any(kind == "host" for plan in at(size) for kind, _text in plan.causes):
        return "no hicache-size fits: leave enable-hierarchical-cache out, or deploy fewer servers with it"
    return f"hicache-size {size} fits" if len(pooled) == 1 else f"hicache-size {size} on each of its {len(pooled)} servers fits"


def _raw(inputs, flags):
    figures = {name: value for name, value in inputs.items() if name in planning.Figures._fields}
    return planning.Plan(inputs["config"], {**inputs["args"], **flags}, planning.Figures(**figures))


def fleet_plan(servers, records=None, want_running=None, want_context=None, allow_lossy=False, tolerant=False):
    """The plans of all servers, and of their nodes' host memory; the keys are in sglang_fleet_plan.yml.

    ``servers``: results of :func:`plan_request`. ``records``: earlier boots. With ``want_running`` each plan has a
    ``suggestion``, which leaves every other server of its node an equal share of the host. A server that can't be planned
    (a model class that is not known, say) is an error, or with ``tolerant`` an entry of ``unplanned`` with the reason.
    """
    if not isinstance(servers, list):
        raise AnsibleTypeError(f"sglang_fleet_plan needs a list of servers, got {planning.models.kind_of(servers)}")
    wanted = {}
    if want_running is not None or want_context is not None:
        if want_running is None:
            raise AnsibleFilterError(
                "want_context goes with want_running: how many requests of that length are to run at once?"
            )
        planning.number("want_running", want_running, least=1, whole=True)
        wanted = {"want_running": want_running, "allow_lossy": allow_lossy}
        if want_context is not None:
            planning.number("want_context", want_context, least=1, whole=True)
            wanted["want_context"] = want_context
    nodes = {}
    for server in servers:
        nodes.setdefault(server["node"], []).append(server)
    nodes = {name: _Node(name, here) for name, here in nodes.items()}
    plans, inputs, unplanned = {}, {}, {}
    for server in servers:
        name = server["name"]
        try:
            inputs[name], told = _named(name, _inputs, server, records or [], nodes[server["node"]].seen_by(server))
            plans[name] = {**_named(name, memory.memory_plan, **inputs[name]), **told, "suggestion": None}
            plans[name]["reasons"] += _others(server) if plans[name]["reasons"] else []
        except AnsibleFilterError as error:
            if not tolerant:
                raise
            unplanned[name] = error.message
    reasons = [f"{name}: {reason}" for name, plan in plans.items() if plan["counted"] for reason in plan["reasons"]]
    summed = {}
    for name, node in nodes.items():
        here = [server["name"] for server in node.servers if server["name"] in plans]
        if wanted:
            pooled = sum(planning.wants_host_pools(planning.Flags(inputs[server]["args"])) for server in here)
            room = node.room()
            if room is not None:
                # What is told of pools is rounded, and a sum of rounded figures must fit too.
                room = max(0, room - sum(plans[server]["host_processes_gb"] + 0.01 for server in here))
            share = {"host_free_gb": room, "servers_on_node": max(1, pooled), "host_processes_gb": 0}
            for server in here:
                asked = {**inputs[server], **share, **wanted}
                try:
                    plans[server]["suggestion"] = _named(server, memory.memory_suggest, **asked)
                except AnsibleFilterError as error:
                    if not tolerant:
                        raise
                    why = error.message.removeprefix(f"{server}: ")
                    plans[server]["warnings"].append(f"no flags are suggested: {why}")
        told = node.sum(inputs, plans) if here else None
        if told:
            summed[name] = told
            reasons += [f"{name}: {reason}" for reason in told["reasons"]]
    return {
        "schema": SCHEMA, "fits": not reasons, "reasons": reasons, "servers": plans, "nodes": summed, "unplanned": unplanned,
    }  # fmt: skip


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


def _before_pools(request, figures):
    """What was gone from the card when the pools of a boot were sized, worked out from their sizes; None if it can't be."""
    told = {"sglang_version": request["kind"]["release"], "free_gpu_gib": figures["free_gpu_gib"]}
    told.update(weights_gib=figures["weights_gib"], draft_weights_gib=figures.get("draft_weights_gib"))
    try:
        plan = _raw({"config": request["config"], "args": request["args"], **told}, {})
        return plan.before_pools_of(figures["kv_tokens"], figures.get("state_slots"))
    except (AnsibleFilterError, AnsibleTypeError):
        return None  # a boot of what can't be planned


def boot_record(known, plan=None):
    """What is kept of a boot: the plan, what was seen, and what only a boot can tell.

    ``known``: as for plan_request, and ``ready`` (result of module sglang_wait). ``plan``: the server's own, if one was made.
    """
    request, ready, plan = plan_request(known), known["ready"], plan or {}
    figures = ready.get("figures") or {}
    free = [gpu["free_gib"] + request["held_gib"].get(gpu["index"], 0.0) for gpu in request["cards"] if gpu["free_gib"]]
    context = graphs = before = None
    if free and figures.get("free_gpu_gib") is not None and request["kind"]["gpu"]:
        context = round(min(free) - figures["free_gpu_gib"], 2)
        # Another process has given memory back between the two: nothing is learned from that.
        context = context if context >= 0 else None
    if figures.get("graphs_gib") is not None:
        graphs = figures["graphs_gib"]
    if figures.get("free_gpu_gib") and figures.get("kv_tokens") and figures.get("weights_gib") and request["config"]:
        before = _before_pools(request, figures)
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
        "loading": _loading(request["args"]),
        "weights_gib": figures.get("weights_gib"),
        "draft_weights_gib": figures.get("draft_weights_gib"),
        "before_pools_gib": before,
        "stage_seconds": ready.get("stage_seconds"),
        "elapsed": ready.get("elapsed"),
    }


class FilterModule:
    """Registers the filters."""

    def filters(self):
        filters = {
            "sglang_plan_request": plan_request,
            "sglang_fleet_plan": fleet_plan,
            "sglang_compare_boot": compare_boot,
            "sglang_boot_record": boot_record,
        }
        return {name: memory.in_a_sentence(name)(function) for name, function in filters.items()}
