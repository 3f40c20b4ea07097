# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where an SGLang server's memory will go, worked out before a boot; the flags that make room; what a node must pin.

Units never mix: ``_gib`` is 2^30 bytes on the card, ``_gb`` is 1e9 bytes on the host, both as SGLang's log prints them.
Everything is per rank. The files beside this one, each with its sources: ``sglang_memory_model`` (a config.json),
``_weights`` (its parameters), ``_sizes`` (a token, a state slot), ``_pools`` (one plan), ``_change`` (other flags).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path


def _beside(name):
    """A file of this folder as a module: filter_plugins is on no import path, and Ansible loads its files by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


change = _beside("sglang_memory_change")
planning = change.planning
AnsibleFilterError = planning.AnsibleFilterError
AnsibleTypeError = planning.AnsibleTypeError
HOST_RESERVE_GB = planning.HOST_RESERVE_GB
NEWEST = planning.NEWEST
number = planning.number


def in_a_sentence(name):
    """The filter ``name``, whose unknown or missing arguments are an error of one sentence."""

    def wrap(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def called(*args, **kwargs):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                known = ", ".join(list(signature.parameters)[1:]) or "no arguments"
                raise AnsibleFilterError(f"{name}: {error}; it takes {known}") from None
            return function(*args, **kwargs)

        return called

    return wrap


def switched(name, value):
    """``value`` as Ansible reads a switch, so that a filter and ``-e`` take the same."""
    text = str(value).lower()
    if isinstance(value, (bool, int, str)) and text in planning.sizing.SWITCHED_ON:
        return True
    if isinstance(value, (bool, int, str)) and text in planning.sizing.SWITCHED_OFF:
        return False
    raise AnsibleTypeError(f"{name} is {value!r}; expected true or false")


def told(plan, reasons=(), remedy=None, advice=()):
    """A plan as the mapping that people get; the keys are in sglang_memory_plan.yml."""
    return {
        "fits": plan.fits,
        "reasons": list(reasons),
        "remedy": {} if plan.fits else remedy,
        "weights_gib": round(plan.weights, 3),
        "draft_weights_gib": round(plan.draft_weights, 3),
        "before_pools_gib": round(plan.before_pools, 3),
        "rest_gib": round(plan.rest, 3),
        "slack_gib": round(plan.slack, 3),
        "left_gib": round(plan.left, 3),
        "kv_tokens": plan.tokens,
        "swa_tokens": plan.swa_tokens,
        "kv_bytes_per_token": round(plan.sizes.token),
        **{name: round(value, 4) for name, value in plan.pools.items()},
        "mamba_slots": plan.slots,
        "slot_gib": round(plan.sizes.slot / planning.GIB, 6),
        "slots_per_request": plan.per_request or 0,
        "max_running_requests": plan.running,
        "asked_running": plan.requested,
        "binding": plan.binding,
        **{name: round(value, 3) for name, value in plan.host.pools.items()},
        "host_total_gb": round(plan.host.total, 3),
        "host_processes_gb": round(plan.host.processes, 3),
        "ranks": plan.sizes.ranks,
        "advice": [sentence for _flags, sentence in advice],
        "advice_args": [flags for flags, _sentence in advice],
        "warnings": plan.warnings,
    }


def whole(search):
    """A plan with its reasons, and with what helps."""
    remedy, reasons = change.remedies(search) if search.today.causes else (None, [])
    return told(search.today, reasons, remedy, change.advise(search))


@in_a_sentence("sglang_memory_plan")
def memory_plan(
    config, args, sglang_version=NEWEST, free_gpu_gib=None, weights_gib=None, draft_weights_gib=None,
    host_free_gb=None, servers_on_node=1, draft_config=None, graphs_gib=None,
    host_processes_gb=None, before_pools_gib=None, between_gib=None,
):  # fmt: skip
    """One server's memory, per rank; the keys are in sglang_memory_plan.yml."""
    figures = planning.Figures(
        sglang_version,
        free_gpu_gib,
        weights_gib,
        draft_weights_gib,
        host_free_gb,
        servers_on_node,
        draft_config,
        graphs_gib,
        host_processes_gb,
        before_pools_gib,
        between_gib,
    )
    return whole(change.Search(config, args, figures))


@in_a_sentence("sglang_memory_suggest")
def memory_suggest(
    config, args, want_running=24, want_context=8192, allow_lossy=False, sglang_version=NEWEST, free_gpu_gib=None,
    weights_gib=None, draft_weights_gib=None, host_free_gb=None, servers_on_node=1, draft_config=None, graphs_gib=None,
    host_processes_gb=None, before_pools_gib=None, between_gib=None,
):  # fmt: skip
    """Flags that let ``want_running`` requests of ``want_context`` tokens run; the keys are in sglang_memory_suggest.yml."""
    number("want_running", want_running, least=1, whole=True)
    number("want_context", want_context, least=1, whole=True)
    allow_lossy = switched("allow_lossy", allow_lossy)
    figures = planning.Figures(
        sglang_version,
        free_gpu_gib,
        weights_gib,
        draft_weights_gib,
        host_free_gb,
        servers_on_node,
        draft_config,
        graphs_gib,
        host_processes_gb,
        before_pools_gib,
        between_gib,
    )
    found = change.suggest(config, args, figures, want_running, want_context, allow_lossy)

    def as_told(answer):
        flags = {**planning.Flags(args).given, **answer["args"]}
        return {**answer, "plan": whole(change.Search(config, flags, figures, answer["plan"]))}

    beside = {name: as_told(found[name]) if found[name] else None for name in ("nearest", "more")}
    return {**as_told(found), **beside}


@in_a_sentence("sglang_memory_node")
def memory_node(plans, host_free_gb=None, cgroup_limit_gb=None, load_peak_gb=0, remedy="lower hicache-size"):
    """Host memory of all servers of a node against what the node has; the keys are in sglang_memory_node.yml."""
    if not isinstance(plans, (list, tuple)):
        raise AnsibleTypeError(f"sglang_memory_node needs a list of plans, got {planning.models.kind_of(plans)}")
    if host_free_gb is None:
        raise AnsibleFilterError("host_free_gb is not given; give the node's available memory in GB")
    room = number("host_free_gb", host_free_gb, least=0)
    bound = "the node's available memory"
    if cgroup_limit_gb is not None and number("cgroup_limit_gb", cgroup_limit_gb, least=0) < room:
        room, bound = cgroup_limit_gb, "the limit of its cgroup"
    number("load_peak_gb", load_peak_gb, least=0)
    servers, processes = [], 0
    for index, plan in enumerate(plans):
        if not isinstance(plan, Mapping) or "host_total_gb" not in plan:
            raise AnsibleTypeError(f"plan {index} has no host_total_gb; expected results of sglang_memory_plan")
        total = number(f"host_total_gb of plan {index}", plan["host_total_gb"], least=0)
        servers.append(total * number(f"ranks of plan {index}", plan.get("ranks", 1), least=1, whole=True))
        processes += number(f"host_processes_gb of plan {index}", plan.get("host_processes_gb", 0), least=0)
    pinned = sum(servers)
    total = pinned + load_peak_gb + processes
    reserve = HOST_RESERVE_GB if pinned else 0
    reasons = []
    if (pinned or load_peak_gb) and total > room - reserve:
        terms = " + ".join(f"{size:.2f}" for size in servers if size)
        loading = f" + {load_peak_gb:.2f} GB while loading" if load_peak_gb else ""
        several = sum(map(bool, [*servers, load_peak_gb])) > 1
        summed = f"{terms} GB{loading}" + (f" = {pinned + load_peak_gb:.2f} GB" if several else "")
        summed += f" and {processes:.2f} GB of the servers' processes" if processes else ""
        kept = f", of which {reserve:.2f} GB stay free" if reserve else ""
        reasons.append(f"host pools {summed} do not fit into {bound}, {room:.2f} GB{kept}: {remedy}")
    return {
        "fits": not reasons, "host_total_gb": round(pinned + load_peak_gb, 3), "host_pools_gb": round(pinned, 3),
        "host_processes_gb": round(processes, 3), "reasons": reasons,
    }  # fmt: skip


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_memory_plan": memory_plan,
            "sglang_memory_suggest": memory_suggest,
            "sglang_memory_node": memory_node,
        }
