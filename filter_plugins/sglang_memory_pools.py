# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one server takes on its card and on its host with given flags, and what stands in its way.

Read by sglang_memory.py. Sources, in SGLang's wheels: ``srt/model_executor/pool_configurator.py`` (price of a token),
``srt/mem_cache/kv_cache_configurator.py`` (before 0.5.16 ``srt/model_executor/model_runner_kv_cache_mixin.py``; what is
left for pools, state slots, the cap), ``srt/mem_cache/memory_pool.py`` (what is allocated), ``srt/mem_cache/pool_host``
and ``hybrid_cache/hybrid_pool_assembler.py`` (host pools).
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


def _beside(name):
    """A file of this folder as a module: filter_plugins is on no import path, and Ansible loads its files by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


weighing = _beside("sglang_memory_weights")
sizing = _beside("sglang_memory_sizes")
models = sizing.models
AnsibleFilterError = models.AnsibleFilterError
AnsibleTypeError = models.AnsibleTypeError
NEWEST = sizing.NEWEST
GIB = sizing.GIB
GB = sizing.GB
Flags = sizing.Flags
number = sizing.number
# With speculation and nothing asked, SGLang asks for this many (server_args.py, later speculative_hook.py).
SPECULATIVE_RUNNING = 48
# SGLANG_VLM_CACHE_SIZE_MB and SGLANG_MM_FEATURE_CACHE_MB as they are by default.
MULTIMODAL_CACHE_GIB = 100 / 1024
FEATURE_POOL_GIB = 1.0
# What a server's processes take of the host beside its pools, in GB: the fall of MemAvailable was 5.1 to 5.2 without host
# pools, and 5.4 to 5.5 more than the pools with them (SGLang 0.5.17, H200, one rank). It is gone when SGLang compares a
# pool with what is free. Each further rank is one scheduler more, 2.7 GiB of resident memory in the same boots.
PROCESSES_GB = 5.5
RANK_GB = 2.9
# Gone between the weights and the sizing of the pools, with and without a draft: worked out from the pools of eight boots of
# Qwen3.6-27B (SGLang 0.5.17, H200). No formula is known. A dense model on a small card showed none, so it is taken for
# hybrids alone. Earlier boots of the same kind tell it better (before_pools_gib).
HYBRID_GIB = 0.05
# A request of fewer tokens, prompt and answer, is short.
SHORT_REQUEST = 1024
# pool_host/base.py and hicache_auto_size.py.
HOST_RESERVE_GB = 10 * GIB / GB
HOST_FRACTION = 0.8
HOST_SLACK = 0.05
HICACHE_RATIO = 2.0
# What a boot has less or more than its plan: a boot that was ready is not refused the next day.
PLAN_ERROR_GIB = 0.1


def known_weights(plan, config):
    """``(target, draft, shared, warnings)`` in GiB on one rank: as given, else from the config.

    ``shared`` is what comes back of the draft's once the pools are sized: embedding and output layer of a head of its own.
    """
    model, flags, sizes, speculation, warnings = plan.model, plan.flags, plan.sizes, plan.speculation, []
    weights, draft = plan.figures.weights_gib, plan.figures.draft_weights_gib
    each = sizing.weight_bytes(flags)
    a_parameter, named = each / GIB / sizes.ranks, "32 bits" if each == 4 else "16 bits"
    counted = why = None
    wants_draft = bool(speculation.layers) and draft is None
    if weights is None or wants_draft:
        counted, why = weighing.count_parameters(model, config)
    if weights is None:
        if models.quantisation(config, model.text) or flags.given.get("quantization"):
            counted, why = None, "a quantised checkpoint's size is told by its files alone"
        if counted is None:
            raise AnsibleFilterError(f"weights_gib is not given and cannot be worked out: {why}; state weights_gib")
        weights = counted[0] * a_parameter + weighing.beside_weights(model, config) / GIB
        warnings.append(f"weights_gib is worked out from the config: {weights:.2f} GiB at {named} each")
    if wants_draft:
        draft = counted[1] * a_parameter if counted and speculation.own_head else None
        warnings.append(
            "draft_weights_gib is not given and cannot be worked out: planned as 0; state draft_weights_gib"
            if draft is None
            else f"draft_weights_gib is worked out from the config: {draft:.2f} GiB at {named} each"
        )
    draft = (draft or 0) if speculation.layers else 0
    shared = 0
    if draft and speculation.own_head and plan.release.has("draft_weights_charged"):
        shared = (weighing.shared_with_head(config, model) or 0) * a_parameter
    return weights, draft, (shared if shared <= draft else 0), warnings


class Figures(NamedTuple):
    """What a plan takes beside the model and its flags.

    From earlier boots, where known: ``graphs_gib``, what graphs took, and ``before_pools_gib``, all that was gone from the free
    memory when the pools were sized.
    """

    sglang_version: str = NEWEST
    free_gpu_gib: float | None = None
    weights_gib: float | None = None
    draft_weights_gib: float | None = None
    host_free_gb: float | None = None
    servers_on_node: int = 1
    draft_config: Mapping | None = None
    graphs_gib: float | None = None
    host_processes_gb: float | None = None
    before_pools_gib: float | None = None
    between_gib: float | None = None

    def checked(self):
        """Itself, if all of it is what it must be."""
        if self.free_gpu_gib is None:
            raise AnsibleFilterError("free_gpu_gib is not given; give the card's free memory before the weights load")
        number("free_gpu_gib", self.free_gpu_gib, above=0)
        number("servers_on_node", self.servers_on_node, least=1, whole=True)
        for name, bound in (("weights_gib", {"above": 0}), *((n, {"least": 0}) for n in self._fields if n in NOT_NEGATIVE)):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), **bound)
        if self.draft_config is not None:
            models.typed(self.draft_config, "draft_config")
        return self


NOT_NEGATIVE = ("draft_weights_gib", "host_free_gb", "graphs_gib", "host_processes_gb", "before_pools_gib", "between_gib")


class Plan:
    """One server's memory with given flags. ``rest``, ``slack`` and ``left`` in GiB, the pools in bytes.

    ``causes`` are ``(kind, sentence)`` of what stands in its way: ``card`` and ``host`` are about room and have no
    remedy in the sentence (sglang_memory_change.py works one out), ``other`` is complete. ``model``: as read for an earlier
    plan of the same config and figures.
    """

    def __init__(self, config, args, figures, model=None):
        self.model = model or models.read_model(config)
        self.figures = figures if model else figures.checked()
        self.release = sizing.Release(figures.sglang_version)
        self.flags = flags = Flags(args)
        self.free = figures.free_gpu_gib
        self.fraction = flags.share("mem-fraction-static", above=0, below=1)
        if self.fraction is None:
            raise AnsibleFilterError("args have no mem-fraction-static; SGLang's default differs by release, so write it out")
        self.state_ratio = flags.share("mamba-full-memory-ratio", 0.9, above=0)
        self.speculation = sizing.Speculation(flags, self.release, self.model, figures.draft_config)
        self.sizes = sizing.Sizes(flags, self.release, self.model, config, self.speculation)
        self.weights, self.draft_weights, self.shared, more = known_weights(self, config)
        self.warnings = [*self.release.warnings, *self.model.warnings, *self.sizes.warnings, *self.speculation.warnings, *more]
        self.warnings += [f"{name} is no flag that is read here: did you mean {meant}?" for name, meant in flags.misspelled()]
        self.causes = []
        self.slots = self.tokens = self.swa_tokens = self.running = 0
        self.reserved_state = self.reserved_buffers = 0
        self.per_request = None
        self.asked = flags.count("max-running-requests")
        self.requested = self.asked or (SPECULATIVE_RUNNING if self.speculation.algorithm else None)
        if self.requested:
            self.requested = self.requested // self.sizes.workers or 1
        self.slack = self.free * (1 - self.fraction)
        charged = self.draft_weights if self.release.has("draft_weights_charged") else 0
        self.multimodal = 0
        if self.model.multimodal and self.release.has("multimodal_reserve"):
            transport = flags.given.get("mm-feature-transport")
            self.multimodal = MULTIMODAL_CACHE_GIB + (FEATURE_POOL_GIB if transport in ("cuda_ipc", "cuda_vmm") else 0)
        before_pools = self.weights + charged + self.multimodal + self.between()
        if figures.before_pools_gib is not None:
            before_pools = figures.before_pools_gib
        self.before_pools = before_pools
        self.rest = self.free * self.fraction - before_pools
        left = self.rest * GIB
        if self.model.state:
            left = self.fit_state(left)
        if self.rest <= 0:
            reserved = (self.reserved_state + self.reserved_buffers) / GIB
            beside = f", with {reserved:.2f} GiB of state and buffers," if reserved else ""
            self.causes.append(
                ("card", f"weights of {before_pools:.2f} GiB{beside} do not fit into the {self.free * self.fraction:.2f} GiB"
                 f" that mem-fraction-static {self.fraction:g} gives")
            )  # fmt: skip
        self.fit_tokens(left)
        self.cap()
        self.pools = self.allocated()
        uncharged = self.draft_weights - charged
        self.left = self.free - (before_pools - self.multimodal) - uncharged - sum(self.pools.values())
        self.fit_card()
        self.host = host_pools(self)
        self.note_few_tokens()

    def note_few_tokens(self):
        """KV that its running requests outgrow: SGLang then lets some wait, or takes them back."""
        context = self.flags.count("context-length") or models.optional(self.model.text, "max_position_embeddings")
        each = min(context or SHORT_REQUEST, SHORT_REQUEST)
        if self.running > 0 and 0 < self.tokens < self.running * each:
            self.warnings.append(
                f"{self.tokens} KV tokens are {self.tokens // self.running} for each of {self.running} running requests:"
                " longer ones wait for one another"
            )

    @property
    def fits(self):
        return not self.causes

    def between(self):
        """GiB that are gone between the weights and the sizing of the pools."""
        told, unknown = self.figures.between_gib, self.figures.weights_gib is None
        return told if told is not None else HYBRID_GIB if self.model.state and unknown else 0

    def hinder(self, sentence):
        """A cause of the card, unless one is known: the others follow from the first."""
        if not self.causes:
            self.causes.append(("card", sentence))

    def leaves(self, kept):
        """Whether so much, and what graphs took in earlier boots, is left once the draft's shared tensors are back."""
        graphs = self.figures.graphs_gib
        return self.left + self.shared >= max(kept, -math.inf if graphs is None else graphs - PLAN_ERROR_GIB)

    def fit_card(self):
        """What no fraction reckons with: the draft's own pool, graphs."""
        if self.left < 0:
            self.hinder(f"pools and draft take {-self.left:.2f} GiB more than the card has")
        if not self.leaves(-math.inf):
            graphs = self.figures.graphs_gib
            self.hinder(f"{self.left + self.shared:.2f} GiB are left for graphs, which took {graphs:.2f} GiB in earlier boots")

    def fit_state(self, left):
        """State slots and speculative buffers; returns the bytes that KV gets."""
        flags, slot, drafts = self.flags, self.sizes.slot, self.speculation.draft_tokens
        self.per_request, warned = sizing.slots_per_request(flags, self.release, self.speculation)
        self.warnings += warned
        if flags.on("enable-linear-replayssm-spec"):
            self.warnings.append("enable-linear-replayssm-spec is not planned: its rings replace the speculative buffers")
        padding = 1 if self.release.has("padding_slot_charged") else 0
        follows = self.release.has("buffers_follow_cap")
        if drafts and not follows:
            self.reserved_buffers = drafts * slot * self.requested
            left -= self.reserved_buffers
        given = flags.count("max-mamba-cache-size")
        buffered = None
        if given:
            self.slots = given // self.sizes.workers
        elif flags.on("disable-radix-cache") and self.requested:
            self.slots = buffered = self.requested
        else:
            ratio = self.state_ratio
            budget = left * ratio / (1 + ratio)
            shared = 1 + drafts / self.per_request if follows else 1
            fixed = padding * slot * (1 + drafts) if follows else padding * slot
            self.slots = int((budget - fixed) // (slot * shared))
        if drafts and follows:
            buffered = buffered or max(0, min(self.requested, self.slots // self.per_request))
            self.reserved_buffers = (buffered + padding) * drafts * slot
            left -= self.reserved_buffers
        if self.slots <= 0:
            if self.rest > 0:
                room = max(0.0, left / GIB)
                self.hinder(f"no state slot fits: {room:.2f} GiB are left for slots of {slot / GIB:.3f} GiB and for KV")
            self.slots = 0
        self.reserved_state = (self.slots + padding) * slot
        return left - self.reserved_state

    def before_pools_of(self, tokens, slots):
        """What was gone from the free memory in a boot with these flags that had so many tokens and slots, GiB.

        None where the pools do not tell it: their size was given, or follows the requests.
        """
        sizes, flags = self.sizes, self.flags
        limit = flags.count("max-total-tokens")
        by_requests = sizes.swa_layers and self.asked and flags.on("disable-radix-cache")
        if by_requests or "fp4" in sizes.dtype or (limit and tokens >= limit // sizes.page * sizes.page):
            return None
        charged = tokens * sizes.token
        if self.model.state:
            if not slots:
                return None
            padding = 1 if self.release.has("padding_slot_charged") else 0
            requests = self.requested or 0
            if self.release.has("buffers_follow_cap"):
                running = slots if flags.on("disable-radix-cache") else slots // self.per_request
                requests = min(requests, running) + padding
            charged += (slots + padding + requests * self.speculation.draft_tokens) * sizes.slot
        return round(self.free * self.fraction - charged / GIB, 3)

    def fit_tokens(self, left):
        sizes, flags = self.sizes, self.flags

        def aligned(count):
            return int(count) // sizes.page * sizes.page

        limit = flags.count("max-total-tokens")
        by_requests = self.window_pool()
        price = sizes.token
        if by_requests:
            price, left = sizes.token - sizes.ratio * sizes.swa, left - by_requests * sizes.swa
        tokens = aligned(max(0, left) // price)
        self.tokens = min(tokens, aligned(limit)) if limit else tokens
        if limit and limit > tokens:
            self.warnings.append(f"max-total-tokens {limit} is more than the {tokens} that fit")
        if sizes.swa_layers:
            self.swa_tokens = by_requests or aligned(self.tokens * sizes.ratio)
        if self.tokens <= 0:
            over = f"{-left / GIB:.2f} GiB short" if left < 0 else f"only {left / GIB:.2f} GiB left"
            self.hinder(f"no KV token fits after weights{', state and buffers' * bool(self.model.state)}: {over}")
        elif sizes.swa_layers and self.swa_tokens <= self.model.window + sizes.page:
            pool = f"the sliding-window pool of {self.swa_tokens} tokens"
            self.hinder(f"{pool} holds no request: its window is {self.model.window}")

    def window_pool(self):
        """Window tokens where the pool is sized from the requests: no radix cache and max-running-requests given."""
        flags, sizes = self.flags, self.sizes
        applies = sizes.swa_layers and self.model.layers and self.asked and flags.on("disable-radix-cache")
        if not applies or not self.release.has("window_pool_by_requests"):
            return 0
        chunk = flags.count("chunked-prefill-size")
        if chunk is None:
            raise AnsibleFilterError("args have no chunked-prefill-size; it sizes the sliding-window pool, so write it out")
        drafts, overlap = self.speculation.draft_tokens or 1, not flags.on("disable-overlap-schedule")
        step = sizes.page
        if self.speculation.algorithm:
            topk = flags.count("speculative-eagle-topk", 1)
            step = max(flags.count("speculative-num-steps", 1) * topk, drafts) * (2 if overlap else 1)
        request = self.model.window + 128 * drafts + sizes.page + step
        tokens = request * self.requested + (2 if overlap else 1) * chunk + sizes.page
        return -(-tokens // sizes.page) * sizes.page

    def cap(self):
        """max_running_requests in force, and the resource that sets it."""
        context = self.flags.count("context-length") or models.optional(self.model.text, "max_position_embeddings")
        default = max(min(int(self.tokens / context * 512) if context else 2048, 4096), 2048)
        bounds = {"max-running-requests": self.requested or default}
        if not self.requested:
            bounds = {"engine default": default}
        if self.release.has("cap_follows_tokens"):
            bounds["kv tokens"] = self.tokens // 2
        elif self.release.has("overlap_sets_slots"):
            bounds["engine default" if self.requested else "kv tokens"] = default if self.requested else self.tokens // 2
        if self.per_request:
            bounds["state slots"] = self.slots // self.per_request
        self.running = min(bounds.values())
        self.binding = next(name for name, value in bounds.items() if value == self.running)
        if self.running <= 0:
            needs = f": {self.slots} state slots, and a request needs {self.per_request}" if self.per_request else ""
            self.hinder(f"no request can run{needs}")

    def allocated(self):
        """What is allocated, in GiB; a pool has one padding slot more than it offers."""
        sizes, slots = self.sizes, self.slots + 1 if self.slots else 0
        buffers = (self.running + 1) * sizes.buffer if self.speculation.algorithm and self.slots else 0
        return {
            "kv_gib": self.tokens * sizes.full / GIB,
            "swa_kv_gib": self.swa_tokens * sizes.swa / GIB,
            "draft_kv_gib": self.tokens * sizes.draft / GIB,
            "mamba_conv_gib": slots * sizes.conv / GIB,
            "mamba_ssm_gib": slots * sizes.ssm / GIB,
            "mamba_intermediate_gib": buffers / GIB,
        }


class Host(NamedTuple):
    """Host pools of one rank in GB, what all servers like this one on a node take, and what is a server's processes' own."""

    pools: dict
    total: float
    needed: float
    processes: float


def wants_host_pools(flags):
    """Only the switch makes pools: SGLang asks for nothing else, and sizes without it are for the day it is on."""
    return flags.on("enable-hierarchical-cache")


def host_pools(plan):
    """Pools of ``enable-hierarchical-cache``; causes and warnings go to the plan."""
    flags, sizes, release, warnings = plan.flags, plan.sizes, plan.release, plan.warnings
    host_free_gb, servers_on_node = plan.figures.host_free_gb, plan.figures.servers_on_node
    figures = {"host_kv_gb": 0.0, "host_swa_kv_gb": 0.0, "host_mamba_gb": 0.0, "host_draft_gb": 0.0, "host_index_gb": 0.0}
    size = flags.share("hicache-size", 0, least=0)
    ratio = flags.share("hicache-ratio", above=0)
    processes = plan.figures.host_processes_gb
    if processes is None:
        processes = PROCESSES_GB + RANK_GB * (sizes.ranks - 1)
    if not wants_host_pools(flags):
        return Host(figures, 0.0, processes * servers_on_node, processes)
    if flags.on("disable-radix-cache"):
        plan.causes.append(("other", "enable-hierarchical-cache does not go with disable-radix-cache: drop one of them"))
        return Host(figures, 0.0, processes * servers_on_node, processes)
    drafts = plan.speculation.layers and release.has("draft_host_pool")
    packed = drafts and release.has("draft_host_packed")
    # The split counts convolution windows as if they shared no columns.
    buffers = (plan.running + 1) * plan.speculation.draft_tokens * sizes.slot
    device = {
        "kv": plan.tokens * sizes.full,
        "swa": plan.swa_tokens * sizes.swa,
        "mamba": (plan.slots + 1) * sizes.slot + buffers if plan.model.state else 0,
    }
    if plan.model.state and not release.has("hicache_on_hybrids"):
        warnings.append("this release has no host pool for the state of hybrid models")
        device["mamba"] = 0
    if ratio is None and not size:
        ratio = HICACHE_RATIO
        if release.has("hicache_ratio_shrinks") and host_free_gb is not None:
            budget = (
                max(0, host_free_gb - processes - HOST_RESERVE_GB) * GB / plan.sizes.ranks * HOST_FRACTION * (1 - HOST_SLACK)
            )
            held = sum(device.values()) + (plan.tokens * sizes.draft if drafts else 0)
            ratio = min(ratio, budget / held) if held else ratio
            warnings.append(f"hicache-ratio is not given: this release shrinks its {HICACHE_RATIO} to {ratio:.3f} here")
    # Index keys of DSA models and an unpacked draft have as many tokens as KV and come on top of its budget.
    token = sizes.full - sizes.index + (sizes.draft if packed else 0)
    whole = sum(device.values()) or 1
    split = release.has("hicache_size_split")

    def host_slots(kind, unit, offered, page):
        share = size * (device[kind] / whole if split else 1)
        count = int(share * GB // unit) if size else int(offered * ratio)
        return (count // page + 1) * page

    tokens = host_slots("kv", token, plan.tokens, sizes.page) if device["kv"] else 0
    figures["host_kv_gb"] = tokens * token / GB
    if device["swa"]:
        figures["host_swa_kv_gb"] = host_slots("swa", sizes.swa, plan.swa_tokens, sizes.page) * sizes.swa / GB
    slots = 0
    if device["mamba"]:
        slots = host_slots("mamba", sizes.slot, plan.slots, 1)
        figures["host_mamba_gb"] = slots * sizes.slot / GB
    if drafts and not packed:
        figures["host_draft_gb"] = tokens * sizes.draft / GB
    figures["host_index_gb"] = tokens * sizes.index / GB
    total = sum(figures.values())
    for name, host, on_card in (("KV tokens", tokens, plan.tokens), ("state slots", slots, plan.slots if slots else 0)):
        if host <= on_card and on_card:
            text = f"{host} {name} on the host are no more than the {on_card} on the card"
            if release.has("host_smaller_than_device"):
                warnings.append(f"{text}: the cache below the card is of little use")
            else:
                plan.causes.append(("host", f"{text}, which this release refuses"))
    one = total * sizes.ranks
    needed = (one + processes) * servers_on_node
    if host_free_gb is not None and needed > host_free_gb - HOST_RESERVE_GB:
        several = f"{servers_on_node} x {one:.2f} GB = " if servers_on_node > 1 else ""
        own = f" and {processes * servers_on_node:.2f} GB of the servers' processes" if processes else ""
        pools = f"{several}{one * servers_on_node:.2f} GB{own}"
        plan.causes.append(
            ("host", f"host pools of {pools} do not fit: the node has {host_free_gb:.2f} GB and"
             f" {HOST_RESERVE_GB:.2f} GB of it stay free")
        )  # fmt: skip
    return Host(figures, total, needed, processes)


class FilterModule:
    """No filter of its own: this file is read by sglang_memory.py, and Ansible loads every file of this folder."""

    def filters(self):
        return {}
