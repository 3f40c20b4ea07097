# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What flags and release make of a model, in bytes on one rank: a token, a state slot, the speculative buffers.

Read by sglang_memory.py. Sources, in SGLang's wheels: ``srt/model_executor/pool_configurator.py`` (price of a token; up to
0.5.10 ``model_runner_kv_cache_mixin.py`` beside it), ``srt/configs/mamba_utils.py`` (states), ``srt/server_args.py`` and
``srt/arg_groups`` (defaults).
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version


def _beside(name):
    """A file of this folder as a module: filter_plugins is on no import path, and Ansible loads its files by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


models = _beside("sglang_memory_model")
AnsibleFilterError = models.AnsibleFilterError
AnsibleTypeError = models.AnsibleTypeError

GIB = 1 << 30
GB = 1e9
OLDEST = "0.5.9"
NEWEST = "0.5.23"
# What changed between releases, with the first release that has it; group_vars/all/releases.yml shows the same.
CHANGES = {
    "overlap_sets_slots": "0.5.10",
    "hicache_on_hybrids": "0.5.10",
    "speculation_overlaps": "0.5.11",
    "gemma4_windows": "0.5.11",
    "draft_host_pool": "0.5.11",
    "buffers_follow_cap": "0.5.13",
    "lazy_extra_buffer": "0.5.13",
    "draft_weights_charged": "0.5.14",
    "draft_kv_priced": "0.5.14",
    "cap_follows_tokens": "0.5.14",
    "auto_extra_buffer": "0.5.14",
    "window_pool_by_requests": "0.5.14",
    "draft_kv_priced_windows": "0.5.15",
    "host_smaller_than_device": "0.5.15",
    "conv_windows_shared": "0.5.16",
    "fp4_workspace_priced": "0.5.16",
    "padding_slot_charged": "0.5.17",
    "hicache_size_split": "0.5.17",
    "dsa_layout_priced": "0.5.17",
    "multimodal_reserve": "0.5.18",
    "shared_indexers_elided": "0.5.18",
    "draft_host_packed": "0.5.18",
    "head_layers_read": "0.5.18",
    "draft_kv_priced_pathless": "0.5.20",
    "hicache_ratio_shrinks": "0.5.21",
    "shared_indexers_elided_hicache": "0.5.22",
}
ALIASES = {
    "tp": "tp-size", "tensor-parallel-size": "tp-size", "dp": "dp-size", "data-parallel-size": "dp-size",
    "pp": "pp-size", "pipeline-parallel-size": "pp-size", "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
}  # fmt: skip
# Bytes an element as priced, and as stored; fp4 adds a scale byte for 16 values, mxfp8 one for 32.
KV_BYTES = {
    "bf16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "mxfp8": 1 + 1 / 32,
    "fp4_e2m1": 0.5 + 1 / 16, "fp4_mx_block16": 0.5 + 1 / 16, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONV_BYTES = 2
# What --dtype may be, in bytes; auto is the checkpoint's type, and half for a checkpoint in float32.
DTYPES = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
EAGLE_LIKE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
ALGORITHMS = ("NONE", *EAGLE_LIKE, "DFLASH", "DSPARK", "FROZEN_KV_MTP", "NGRAM", "UNO")


# No figure of a card, a host or a cache is more; beyond it arithmetic in floats overflows.
MOST = 10**12


def shown(value):
    """A figure as an error shows it: a number of hundreds of digits would be the whole screen."""
    text = repr(value) if not isinstance(value, int) or abs(value) <= 10**18 else f"{'-' * (value < 0)}10^{_digits(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digits(value):
    return int(abs(value).bit_length() * math.log10(2))


# As Ansible reads a switch.
SWITCHED_ON = ("true", "yes", "on", "y", "t", "1")
SWITCHED_OFF = ("false", "no", "off", "n", "f", "0")
# Flags that are read here and in the files beside.
READ = (
    "chunked-prefill-size", "context-length", "disable-hybrid-swa-memory", "disable-overlap-schedule", "disable-radix-cache",
    "dp-size", "dtype", "enable-dp-attention", "enable-hierarchical-cache", "enable-linear-replayssm-spec", "hicache-ratio",
    "hicache-size", "kv-cache-dtype", "linear-attn-backend", "mamba-full-memory-ratio", "mamba-radix-cache-strategy",
    "mamba-ssm-dtype", "max-mamba-cache-size", "max-running-requests", "max-total-tokens", "mem-fraction-static",
    "mm-feature-transport", "page-size", "pp-size", "quantization", "speculative-algorithm", "speculative-draft-model-path",
    "speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-num-steps", "swa-full-tokens-ratio", "tp-size",
)  # fmt: skip


@functools.cache
def nearly(name):
    """The flag of READ that ``name`` is a slip of, or None. SGLang's own flags are farther from each other."""
    return next(iter(difflib.get_close_matches(name, READ, n=1, cutoff=0.92)), None)


def number(what, value, least=None, above=None, most=None, below=None, whole=False):
    """``value`` as it is, or an error that names it. A bool is not a number, nor is text."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        wanted = "a whole number" if whole else "a number"
        raise AnsibleTypeError(f"{what} is {shown(value)}; expected {wanted}")
    bounds = (
        (least is None or value >= least, f"at least {least}"),
        (above is None or value > above, f"above {above}"),
        (most is None or value <= most, f"at most {most}"),
        (below is None or value < below, f"below {below}"),
        (isinstance(value, int) or math.isfinite(value), "a finite number"),
        (not math.inf > value > MOST, f"at most {MOST:.0e}".replace("+", "")),
    )
    wrong = [text for fine, text in bounds if not fine]
    if wrong:
        raise AnsibleFilterError(f"{what} is {shown(value)}; expected {' and '.join(wrong)}")
    return value


@functools.cache
def changes_in(version):
    """Which of CHANGES a release has. Comparing versions is slow, and a search plans dozens of times."""
    return {change: version >= Version(first) for change, first in CHANGES.items()}


class Release:
    """A release of SGLang as far as memory goes: ``release.has(change)``."""

    def __init__(self, text):
        self.version, self.warnings = self.read(text)
        self.changes = changes_in(self.version)

    @staticmethod
    def read(text):
        if not isinstance(text, str):
            raise AnsibleTypeError(f"sglang_version is {text!r}; expected text such as '{NEWEST}'")
        found = re.match(r"\s*v?(\d+\.\d+\.\d+(?:\.?post\d+)?)", text)
        if not found or found[1] == "0.0.0":
            return Version(NEWEST), [f"sglang_version {text!r} names no release: planned as {NEWEST}, the newest known"]
        version = Version(found[1])
        if version > Version(NEWEST):
            return version, [f"SGLang {found[1]} is newer than {NEWEST}, the newest known here: planned as {NEWEST}"]
        if version < Version(OLDEST):
            return version, [f"SGLang {found[1]} is older than {OLDEST}, the oldest known here: planned as {OLDEST}"]
        return version, []

    def has(self, change):
        return self.changes[change]


class Flags:
    """A profile's flags with SGLang's defaults, checked where they are read."""

    def __init__(self, args):
        if not isinstance(args, Mapping):
            raise AnsibleTypeError(f"args is {models.kind_of(args)}; expected a mapping of flags without dashes")
        named = {str(key).replace("_", "-"): value for key, value in args.items()}
        self.given = {ALIASES.get(key, key): value for key, value in named.items() if value is not None and value is not False}

    def on(self, name):
        value = self.given.get(name)
        return value.lower() in SWITCHED_ON if isinstance(value, str) else value is True or value == 1

    def misspelled(self):
        """``[(name, what was meant)]`` of flags that differ by a slip from one that memory depends on."""
        near = ((name, nearly(name)) for name in self.given if name not in READ)
        return [(name, meant) for name, meant in near if meant]

    def count(self, name, default=None, least=1):
        value = self.given.get(name)
        return default if value is None else number(name, value, least=least, whole=True)

    def share(self, name, default=None, **bounds):
        value = self.given.get(name)
        return default if value is None else number(name, value, **bounds)

    def choice(self, name, choices, default):
        value = self.given.get(name, default)
        if value is not default and (not isinstance(value, str) or value not in choices):
            raise AnsibleFilterError(f"{name} is {value!r}; expected one of {', '.join(sorted(choices))}")
        return value


def kv_dtype(flags, config, model):
    """``(name, warnings)`` of the KV cache's type."""
    name = flags.choice("kv-cache-dtype", ("auto", *KV_BYTES), "auto")
    if name == "fp8":
        return "fp8_e4m3", ["kv-cache-dtype fp8 is not a choice of SGLang: planned as fp8_e4m3"]
    if name != "auto":
        return name, []
    quantised = models.quantisation(config, model.text)
    scheme, inner = quantised.get("kv_cache_scheme"), quantised.get("quantization")
    eight_bits = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    told = quantised.get("kv_cache_quant_algo") or (inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None)
    if (quantised.get("quant_method") or "").startswith("modelopt") and (eight_bits or str(told).upper() == "FP8"):
        return "fp8_e4m3", []
    if model.index_dim:
        return "bfloat16", ["kv-cache-dtype auto is bfloat16 on Hopper and fp8_e4m3 on Blackwell: planned as bfloat16"]
    return ("float32" if weight_bytes(flags) == 4 else "bfloat16"), []


def weight_bytes(flags):
    """Bytes of a parameter of a checkpoint that is not quantised, as it is loaded."""
    return DTYPES[flags.choice("dtype", DTYPES, "auto")]


class Speculation:
    """Speculative decoding as the flags ask for it."""

    def __init__(self, flags, release, model, draft_config):
        name = flags.given.get("speculative-algorithm")
        if name is not None and not isinstance(name, str):
            raise AnsibleTypeError(f"speculative-algorithm is {name!r}; expected a name such as EAGLE")
        if name and name.upper() not in ALGORITHMS:
            known = ", ".join(ALGORITHMS[1:])
            raise AnsibleFilterError(f"speculative-algorithm {name} is not one whose memory is known here; known are {known}")
        self.algorithm = None if not name or name.upper() == "NONE" else name.upper()
        self.draft_tokens = self.layers = self.priced_layers = 0
        self.text = None
        self.warnings = []
        if not self.algorithm:
            return
        steps = flags.count("speculative-num-steps")
        default = {"NGRAM": 12}.get(self.algorithm)
        if self.algorithm in EAGLE_LIKE:
            many = model.arch == "LlamaForCausalLM" and self.algorithm != "STANDALONE"
            default = steps + 1 if steps else 8 if many else 4
        self.draft_tokens = flags.count("speculative-num-draft-tokens", default)
        if not self.draft_tokens:
            raise AnsibleFilterError(
                f"args have no speculative-num-draft-tokens; {self.algorithm} reads it from the draft model, so write it out"
            )
        path = bool(flags.given.get("speculative-draft-model-path"))
        self.own_head = self.algorithm in ("EAGLE", "NEXTN") and not (path and draft_config)
        if self.algorithm == "NGRAM":
            return
        if draft_config is not None:
            self.text = text = models.text_of(draft_config)
            self.layers = models.optional(text, "num_nextn_predict_layers") or models.integer(text, "num_hidden_layers")
        else:
            # 0.5.9 to 0.5.23 load one layer of a head of their own.
            self.layers = 1
            if not self.own_head or self.algorithm not in EAGLE_LIKE:
                self.warnings.append(
                    f"no draft_config: the KV of the {self.algorithm} draft is planned as one layer of the model's own size"
                )
        priced = release.has("draft_kv_priced_windows" if model.swa_layers else "draft_kv_priced")
        if priced and self.algorithm in EAGLE_LIKE:
            if path or model.arch in models.DRAFT_IS_TARGET:
                self.priced_layers = self.layers
                if self.own_head and model.arch in models.NESTED_HEAD and not release.has("head_layers_read"):
                    # These releases look for the head's one layer in the wrong place and find the model's layers.
                    self.priced_layers = models.integer(model.text, "num_hidden_layers")
                    self.warnings.append(f"speculative-draft-model-path counts {self.priced_layers} layers here: leave it out")
            elif release.has("draft_kv_priced_pathless"):
                self.priced_layers = model.nextn_layers


def slots_per_request(flags, release, speculation):
    """``(S, warnings)``: state slots that a running request needs."""
    strategy = flags.choice("mamba-radix-cache-strategy", STRATEGIES, "auto")
    overlap = not flags.on("disable-overlap-schedule")
    if speculation.algorithm and not release.has("speculation_overlaps"):
        overlap = False
    if flags.on("disable-radix-cache"):
        return 1, []
    if strategy == "auto":
        backend = flags.given.get("linear-attn-backend", "triton")
        extra = release.has("auto_extra_buffer") and overlap and backend == "triton"
        strategy = "extra_buffer" if extra else "no_buffer"
    if strategy == "no_buffer":
        if speculation.algorithm and not release.has("overlap_sets_slots"):
            return 1, ["this release turns the radix cache off: no_buffer does not go with speculation"]
        refused = ["no_buffer with speculation needs disable-overlap-schedule (releases before 0.5.14: extra_buffer)"]
        return 3, refused if speculation.algorithm and overlap else []
    if strategy == "extra_buffer_lazy":
        return 4, []
    if not release.has("overlap_sets_slots"):
        return (4 if speculation.algorithm else 5), []
    return (5 if overlap else 4), []


class Sizes:
    """Bytes on one rank: of a token, of a state slot, of the buffers."""

    def __init__(self, flags, release, model, config, speculation):
        tp = flags.count("tp-size", 1)
        dp = flags.count("dp-size", 1)
        if flags.count("pp-size", 1) > 1:
            raise AnsibleFilterError("pp-size above 1 is not planned: its stages differ; give each stage's layers by a boot")
        attention_dp = dp if flags.on("enable-dp-attention") else 1
        if tp % attention_dp:
            raise AnsibleFilterError(f"dp-size {dp} does not divide tp-size {tp}; expected a divisor with dp attention")
        self.ranks, self.tp, self.workers = tp, tp // attention_dp, attention_dp
        model.check_ranks(self.tp)
        self.dtype, self.warnings = kv_dtype(flags, config, model)
        per_element = {**KV_BYTES, "float32": 4}[self.dtype]
        # Before 0.5.11 Gemma 4 has no pool of its own for windows; the flag turns it off in all releases.
        windows = model.swa_layers and not flags.on("disable-hybrid-swa-memory")
        if model.arch in models.GEMMA4 and not release.has("gemma4_windows"):
            windows = 0
        self.swa_layers = model.swa_layers if windows else 0
        layer = model.kv_elements(self.tp) * per_element
        if model.index_dim and self.dtype == "fp8_e4m3":
            # fp8 rows keep a 4-byte scale for 128 values and their rotary part in bfloat16, but for TensorRT-LLM.
            backends = {flags.given.get(f"{kind}-{part}-backend") for kind in ("nsa", "dsa") for part in ("prefill", "decode")}
            if "trtllm" not in backends:
                layer = model.latent_dim + model.latent_dim // 128 * 4 + model.rope_dim * 2
        self.layer = layer
        self.full = layer * (model.layers + (model.swa_layers if not windows else 0))
        self.swa = model.swa_elements(self.tp) * per_element * self.swa_layers
        self.draft = layer * speculation.layers
        if speculation.text and speculation.text.get("num_key_value_heads") and not speculation.text.get("kv_lora_rank"):
            heads = max(1, models.integer(speculation.text, "num_key_value_heads") // self.tp)
            self.draft = speculation.layers * heads * 2 * models.head_size(speculation.text) * per_element
        price, self.index = self.full, 0
        if model.index_dim:
            index = model.index_dim + model.index_dim // 128 * 4
            elided = release.has("shared_indexers_elided") and (
                release.has("shared_indexers_elided_hicache") or not flags.on("enable-hierarchical-cache")
            )
            self.index = index * (model.active_indexers() if elided else model.layers)
            self.full += self.index
            price = self.full
            self.draft += index * speculation.layers
            if self.dtype == "fp8_e4m3" and not release.has("dsa_layout_priced"):
                price += (model.latent_dim + model.rope_dim - layer) * model.layers
        if "fp4" in self.dtype and not model.latent_dim and release.has("fp4_workspace_priced"):
            # One prefill workspace in fp8, shared by all layers.
            price += max(1, model.kv_heads // self.tp) * model.head_dim * 2
        self.ratio = flags.share("swa-full-tokens-ratio", 0.8, above=0, most=1)
        self.draft_priced = layer * speculation.priced_layers
        if model.index_dim:
            self.draft_priced += index * speculation.priced_layers
        self.token = price + self.draft_priced + self.ratio * self.swa
        if "fp4" not in self.dtype and not self.swa_layers:
            self.token = int(self.token)
        if self.token <= 0:
            raise AnsibleFilterError(
                "the model config has no layer that keeps KV; check num_hidden_layers and its layers' kinds"
            )
        self.page = flags.count("page-size", 64 if model.index_dim else 1)
        self.slot = self.conv = self.ssm = self.buffer = 0
        if model.state:
            conv, ssm = model.state.elements(self.tp)
            asked = flags.choice("mamba-ssm-dtype", STATE_BYTES, None)
            self.state_dtype = asked or (model.state.dtype if model.state.dtype in STATE_BYTES else "float32")
            self.conv = conv * CONV_BYTES * model.state.layers
            self.ssm = ssm * STATE_BYTES[self.state_dtype] * model.state.layers
            self.slot = self.conv + self.ssm
            drafts = speculation.draft_tokens
            chain = flags.count("speculative-eagle-topk", 1) == 1
            if release.has("conv_windows_shared") and chain and not model.state.kda:
                # Windows of successive draft tokens overlap: kernel - 1 + drafts - 1 columns instead of drafts windows.
                windows = (model.state.kernel + drafts - 2) / max(1, model.state.kernel - 1) if drafts else 0
            else:
                windows = drafts
            self.buffer = drafts * self.ssm + windows * self.conv


class FilterModule:
    """No filter of its own: this file is read by sglang_memory.py, and Ansible loads every file of this folder."""

    def filters(self):
        return {}
