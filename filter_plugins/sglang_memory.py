# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where an SGLang server's memory will go, worked out before a boot; the flags that make room; what a node must pin.

Units never mix: ``_gib`` is 2^30 bytes on the card, ``_gb`` is 1e9 bytes on the host, both as SGLang's log prints them.
Everything is per rank. Sources, in SGLang's wheels: ``srt/model_executor/pool_configurator.py`` (price of a token),
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


def _beside(name):
    """A file of this folder as a module: filter_plugins is on no import path, and Ansible loads its files by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


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
# pool_host/base.py and hicache_auto_size.py.
HOST_RESERVE_GB = 10 * GIB / GB
HOST_FRACTION = 0.8
HOST_SLACK = 0.05
HICACHE_RATIO = 2.0
# What a Plan takes beside model and flags.
CARD_FIGURES = ("sglang_version", "free_gpu_gib", "weights_gib", "draft_weights_gib", "draft_config")


def known_weights(model, config, flags, sizes, weights_gib, draft_gib, speculation):
    """``(target, draft, warnings)`` in GiB on one rank: as given, else from the config."""
    warnings = []
    if weights_gib is not None:
        number("weights_gib", weights_gib, above=0)
    if draft_gib is not None:
        number("draft_weights_gib", draft_gib, least=0)
    if not speculation.layers:
        draft_gib = 0
    wants_draft = draft_gib is None
    if weights_gib is not None and not wants_draft:
        return weights_gib, draft_gib or 0, warnings
    counted, why = models.count_parameters(model, config)
    quantised = config.get("quantization_config") or model.text.get("quantization_config") or flags.given.get("quantization")
    if weights_gib is None:
        if quantised or counted is None:
            why = "a quantised checkpoint's size is told by its files alone" if quantised else why
            raise AnsibleFilterError(f"weights_gib is not given and cannot be worked out: {why}; give the size of its files")
        weights_gib = counted[0] * 2 / GIB / sizes.ranks
        warnings.append(f"weights_gib is worked out from the config: {weights_gib:.2f} GiB in bfloat16")
    if wants_draft:
        draft_gib = 0
        if counted and speculation.own_head:
            draft_gib = counted[1] * 2 / GIB / sizes.ranks
            warnings.append(f"draft_weights_gib is worked out from the config: {draft_gib:.2f} GiB in bfloat16")
        else:
            warnings.append("draft_weights_gib is not given and cannot be worked out: planned as 0")
    return weights_gib, draft_gib or 0, warnings


class Plan:
    """One server's memory. ``rest`` and ``slack`` in GiB, the pools in bytes."""

    def __init__(self, config, args, sglang_version, free_gpu_gib, weights_gib, draft_weights_gib, draft_config):
        self.model = models.read_model(config)
        self.release = sizing.Release(sglang_version)
        self.flags = flags = Flags(args)
        if draft_config is not None and not isinstance(draft_config, Mapping):
            raise AnsibleTypeError(f"draft_config is a {type(draft_config).__name__}; expected the draft's config.json")
        if free_gpu_gib is None:
            raise AnsibleFilterError("free_gpu_gib is not given; give the card's free memory before the weights load")
        self.free = number("free_gpu_gib", free_gpu_gib, above=0)
        self.fraction = flags.share("mem-fraction-static", above=0, below=1)
        if self.fraction is None:
            raise AnsibleFilterError("args have no mem-fraction-static; SGLang's default differs by release, so write it out")
        self.speculation = sizing.Speculation(flags, self.release, self.model, draft_config)
        self.sizes = sizing.Sizes(flags, self.release, self.model, config, self.speculation)
        self.weights, self.draft_weights, more = known_weights(
            self.model, config, flags, self.sizes, weights_gib, draft_weights_gib, self.speculation
        )
        self.warnings = [*self.release.warnings, *self.model.warnings, *self.sizes.warnings, *self.speculation.warnings, *more]
        self.reasons = []
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
        self.rest = self.free * self.fraction - self.weights - charged - self.multimodal
        left = self.rest * GIB
        if self.model.state:
            left = self.fit_state(left)
        if self.rest <= 0:
            least = math.ceil((self.weights + charged + self.multimodal) / self.free * 1000) / 1000
            raised = f"raise mem-fraction-static above {least:.3f}" if least < 1 else "take a larger card or more ranks"
            self.reasons.append(
                f"weights of {self.weights + charged:.2f} GiB leave {self.rest:.2f} GiB of the "
                f"{self.free * self.fraction:.2f} GiB that mem-fraction-static {self.fraction} gives: {raised}"
            )
        self.fit_tokens(left)
        self.cap()

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
            ratio = flags.share("mamba-full-memory-ratio", 0.9, above=0)
            budget = left * ratio / (1 + ratio)
            shared = 1 + drafts / self.per_request if follows else 1
            fixed = padding * slot * (1 + drafts) if follows else padding * slot
            self.slots = int((budget - fixed) // (slot * shared))
        if drafts and follows:
            buffered = buffered or max(0, min(self.requested, self.slots // self.per_request))
            self.reserved_buffers = (buffered + padding) * drafts * slot
            left -= self.reserved_buffers
        if self.slots <= 0:
            self.reasons.append(
                f"no state slot fits: {max(0.0, left / GIB):.2f} GiB are left for slots of {slot / GIB:.3f} GiB and for KV"
            )
            self.slots = 0
        self.reserved_state = (self.slots + padding) * slot
        return left - self.reserved_state

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
            if self.swa_tokens <= self.model.window + sizes.page:
                self.reasons.append(
                    f"the sliding-window pool of {self.swa_tokens} tokens holds no request: its window is {self.model.window}"
                )
        if self.tokens <= 0:
            over = f"{-left / GIB:.2f} GiB short" if left < 0 else f"only {left / GIB:.2f} GiB left"
            self.reasons.append(f"no KV token fits after weights{', state and buffers' * bool(self.model.state)}: {over}")

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
        if self.running <= 0 and not self.reasons:
            needs = f": {self.slots} state slots, and a request needs {self.per_request}" if self.per_request else ""
            self.reasons.append(f"no request can run{needs}")

    def pools(self):
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


def host_pools(plan, host_free_gb, servers_on_node):
    """Pools of ``enable-hierarchical-cache`` in GB: ``(figures, reasons, warnings)``."""
    flags, sizes, release = plan.flags, plan.sizes, plan.release
    figures = {"host_kv_gb": 0.0, "host_swa_kv_gb": 0.0, "host_mamba_gb": 0.0, "host_draft_gb": 0.0, "host_index_gb": 0.0}
    if not (flags.on("enable-hierarchical-cache") or "hicache-size" in flags.given or "hicache-ratio" in flags.given):
        return figures, [], []
    if flags.on("disable-radix-cache"):
        return figures, ["enable-hierarchical-cache does not go with disable-radix-cache"], []
    reasons, warnings = [], []
    size = flags.share("hicache-size", 0, least=0)
    ratio = flags.share("hicache-ratio", above=0)
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
            budget = max(0, host_free_gb - HOST_RESERVE_GB) * GB / plan.sizes.ranks * HOST_FRACTION * (1 - HOST_SLACK)
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
                reasons.append(f"{text}, which this release refuses: raise hicache-size or hicache-ratio")
    if host_free_gb is not None:
        number("host_free_gb", host_free_gb, least=0)
        one = total * sizes.ranks
        need, has = one * servers_on_node, host_free_gb - HOST_RESERVE_GB
        if need > has:
            reasons.append(
                f"host pools of {servers_on_node} x {one:.2f} GB = {need:.2f} GB do not fit: "
                f"the node has {host_free_gb:.2f} GB and {HOST_RESERVE_GB:.2f} GB of it stay free; lower hicache-size"
            )
    return figures, reasons, warnings


def advise(plan):
    """The changes that help, the most helpful first, each with its figure."""
    if not plan.per_request or not plan.slots or not plan.running:
        return []
    slot, drafts, needs = plan.sizes.slot, plan.speculation.draft_tokens, plan.per_request
    follows = plan.release.has("buffers_follow_cap")
    advice = []
    spare = (plan.requested or 0) - plan.running
    if drafts and not follows and spare > 0:
        freed = spare * drafts * slot / GIB
        advice.append(f"max-running-requests {plan.running} frees {freed:.1f} GiB of speculative buffers")
    if plan.binding == "state slots" and spare > 0:
        # As many as half of the KV tokens pay for; buffers of requests that never run pay as well.
        buffered = plan.running if follows else plan.requested
        purse = plan.tokens / 2 * plan.sizes.token + slot * (plan.slots + drafts * buffered)
        running = min(plan.requested, int(purse / (slot * (needs + drafts))))
        cost = slot * (running * needs - plan.slots + drafts * (running - buffered))
        kept = plan.tokens - math.ceil(cost / plan.sizes.token)
        if running > plan.running:
            workers = plan.sizes.workers
            advice.append(
                f"max-running-requests {running * workers} with max-mamba-cache-size {running * needs * workers} runs "
                f"{running} instead of {plan.running} and leaves {kept} of {plan.tokens} KV tokens"
            )
    return advice


def memory_plan(
    config, args, sglang_version=NEWEST, free_gpu_gib=None, weights_gib=None, draft_weights_gib=None,
    host_free_gb=None, servers_on_node=1, draft_config=None,
):  # fmt: skip
    """One server's memory, per rank; the keys are in sglang_memory_plan.yml."""
    number("servers_on_node", servers_on_node, least=1, whole=True)
    plan = Plan(config, args, sglang_version, free_gpu_gib, weights_gib, draft_weights_gib, draft_config)
    pools = plan.pools()
    host, reasons, warnings = host_pools(plan, host_free_gb, servers_on_node)
    left = plan.free - plan.weights - plan.draft_weights - sum(pools.values())
    if left < 0 and not plan.reasons:
        reasons.insert(0, f"pools and draft take {-left:.2f} GiB more than the card has: lower mem-fraction-static")
    reasons = plan.reasons + reasons
    return {
        "fits": not reasons,
        "reasons": reasons,
        "weights_gib": round(plan.weights, 3),
        "draft_weights_gib": round(plan.draft_weights, 3),
        "rest_gib": round(plan.rest, 3),
        "slack_gib": round(plan.slack, 3),
        "left_gib": round(left, 3),
        "kv_tokens": plan.tokens,
        "swa_tokens": plan.swa_tokens,
        "kv_bytes_per_token": round(plan.sizes.token),
        **{name: round(value, 4) for name, value in pools.items()},
        "mamba_slots": plan.slots,
        "slot_gib": round(plan.sizes.slot / GIB, 6),
        "slots_per_request": plan.per_request or 0,
        "max_running_requests": plan.running,
        "asked_running": plan.requested,
        "binding": plan.binding,
        **{name: round(value, 3) for name, value in host.items()},
        "host_total_gb": round(sum(host.values()), 3),
        "ranks": plan.sizes.ranks,
        "advice": advise(plan),
        "warnings": plan.warnings + warnings,
    }


LOSSY = {"mamba-ssm-dtype": "the state cache in bfloat16", "kv-cache-dtype": "the KV cache in fp8"}


def options_for(plan, allow_lossy):
    """Sets of flags to try, those that cost nothing first, then those that change least."""
    state, sizes = plan.model.state, plan.sizes
    lossless, lossy = [{}], []
    if plan.per_request == 5 and plan.release.has("lazy_extra_buffer"):
        lossless.append({"mamba-radix-cache-strategy": "extra_buffer_lazy"})
    if allow_lossy:
        lossy += [{"mamba-ssm-dtype": "bfloat16"}] if state and sizes.state_dtype == "float32" else []
        lossy += [{"kv-cache-dtype": "fp8_e4m3"}] if sizes.dtype in ("bfloat16", "bf16") else []
        lossy += [{**lossy[0], **lossy[1]}] if len(lossy) == 2 else []
    return [*lossless, *({**change, **free} for change in lossy for free in lossless)]


def memory_suggest(config, args, want_running=24, want_context=8192, allow_lossy=False, **figures):
    """Flags that let ``want_running`` requests of ``want_context`` tokens run; the keys are in sglang_memory_suggest.yml.

    ``figures``: what sglang_memory_plan takes beside the flags.
    """
    number("want_running", want_running, least=1, whole=True)
    number("want_context", want_context, least=1, whole=True)
    if not isinstance(allow_lossy, bool):
        raise AnsibleTypeError(f"allow_lossy is {allow_lossy!r}; expected true or false")
    today = memory_plan(config, args, **figures)
    given = Flags(args).given
    card = {name: figures[name] for name in CARD_FIGURES if name in figures}
    probe = Plan(config, args, **{**dict.fromkeys(CARD_FIGURES), "sglang_version": NEWEST, **card})
    options, workers = options_for(probe, allow_lossy), probe.sizes.workers

    # What runs already with what was given needs no other flags: freed buffers would only become tokens.
    enough = today["max_running_requests"] >= want_running and today["kv_tokens"] >= want_running * want_context
    if today["fits"] and enough and "max-running-requests" in given:
        return {"possible": True, "args": {}, "plan": today, "lossy": [], "reasons": [], "nearest": None}

    def attempt(running, option):
        """``(works, flags, plan)`` of ``running`` requests with the flags of ``option``."""
        flags = {**given, **option, "max-running-requests": running * workers}
        need = running * want_context
        limit = Flags(flags).count("max-total-tokens")
        if limit and limit < need:
            flags["max-total-tokens"] = need
        if probe.model.state:
            per_request = sizing.slots_per_request(Flags(flags), probe.release, probe.speculation)[0]
            flags["max-mamba-cache-size"] = running * per_request * workers
        plan = memory_plan(config, flags, **figures)
        return plan["fits"] and plan["max_running_requests"] >= running and plan["kv_tokens"] >= need, flags, plan

    def answer(running, option):
        _works, flags, plan = attempt(running, option)
        return {
            "args": {name: value for name, value in flags.items() if given.get(name) != value},
            "plan": plan,
            "lossy": [f"{name} {value}: {LOSSY[name]} costs accuracy" for name, value in option.items() if name in LOSSY],
        }

    chosen = next((option for option in options if attempt(want_running, option)[0]), None)
    if chosen is not None:
        return {"possible": True, **answer(want_running, chosen), "reasons": [], "nearest": None}
    plan, need = attempt(want_running, {})[2], want_running * want_context
    reasons = list(plan["reasons"])
    if plan["kv_tokens"] < need:
        reasons.append(
            f"{want_running} requests x {want_context} tokens want {need} KV tokens; {plan['kv_tokens']} fit beside the rest"
        )
    elif plan["max_running_requests"] < want_running:
        reasons.append(f"{plan['max_running_requests']} of {want_running} requests would run: {plan['binding']} cap them")
    if not allow_lossy and len(options_for(probe, True)) > len(options):
        reasons.append("allow_lossy lets a narrower type of state or KV cache be tried")
    most, nearest = 0, None
    for option in options:
        low, high = most, want_running
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if attempt(middle, option)[0] else (low, middle)
        if low > most:
            most, nearest = low, {"running": low, **answer(low, option)}
    return {"possible": False, "args": {}, "plan": today, "lossy": [], "reasons": reasons, "nearest": nearest}


def memory_node(plans, host_free_gb=None, cgroup_limit_gb=None, load_peak_gb=0):
    """Host memory of all servers of a node against what the node has; the keys are in sglang_memory_node.yml."""
    if not isinstance(plans, (list, tuple)):
        raise AnsibleTypeError(f"sglang_memory_node needs a list of plans, got {type(plans).__name__}")
    if host_free_gb is None:
        raise AnsibleFilterError("host_free_gb is not given; give the node's available memory in GB")
    room = number("host_free_gb", host_free_gb, least=0)
    bound = "the node's available memory"
    if cgroup_limit_gb is not None and number("cgroup_limit_gb", cgroup_limit_gb, least=0) < room:
        room, bound = cgroup_limit_gb, "the limit of its cgroup"
    number("load_peak_gb", load_peak_gb, least=0)
    servers = []
    for index, plan in enumerate(plans):
        if not isinstance(plan, Mapping) or "host_total_gb" not in plan:
            raise AnsibleTypeError(f"plan {index} has no host_total_gb; expected results of sglang_memory_plan")
        total = number(f"host_total_gb of plan {index}", plan["host_total_gb"], least=0)
        servers.append(total * number(f"ranks of plan {index}", plan.get("ranks", 1), least=1, whole=True))
    pinned = sum(servers)
    total = pinned + load_peak_gb
    reserve = HOST_RESERVE_GB if pinned else 0
    reasons = []
    if total > room - reserve:
        terms = " + ".join(f"{size:.2f}" for size in servers)
        loading = f" + {load_peak_gb:.2f} GB while loading" if load_peak_gb else ""
        kept = f", of which {reserve:.2f} GB stay free" if reserve else ""
        reasons.append(
            f"host pools {terms} GB{loading} = {total:.2f} GB do not fit into {bound}, {room:.2f} GB{kept}: lower hicache-size"
        )
    return {
        "fits": not reasons, "host_total_gb": round(total, 3), "host_pools_gb": round(pinned, 3), "reasons": reasons,
    }  # fmt: skip


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_memory_plan": memory_plan,
            "sglang_memory_suggest": memory_suggest,
            "sglang_memory_node": memory_node,
        }
