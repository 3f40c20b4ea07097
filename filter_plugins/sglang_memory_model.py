# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model's config.json as the numbers that memory depends on: layers, heads, head sizes, states.

Read by sglang_memory.py. The sources of what is here are SGLang's ``configs/model_config.py`` (which layers and heads
get KV), ``configs/mamba_utils.py`` (shapes of the states) and ``configs/hybrid_arch.py`` (which classes are hybrid).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

try:
    from ansible.errors import AnsibleFilterError, AnsibleTypeError
except ImportError:  # arithmetic that a script may ask without Ansible

    class AnsibleFilterError(Exception):
        """What Ansible's own would say."""

    class AnsibleTypeError(AnsibleFilterError):
        """What Ansible's own would say."""


DENSE = {
    "ArceeForCausalLM", "BaichuanForCausalLM", "CohereForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Glm4ForCausalLM",
    "Glm4MoeForCausalLM", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM", "LlamaForCausalLM", "MiMoForCausalLM",
    "MiniMaxM2ForCausalLM", "MistralForCausalLM", "Mistral3ForConditionalGeneration", "MixtralForCausalLM",
    "OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification", "Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "SeedOssForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM",
}  # fmt: skip
MLA = {
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration",
    "MistralLarge3ForCausalLM", "LongcatFlashForCausalLM", "MiniCPM3ForCausalLM",
}  # fmt: skip
DSA = {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "LongcatFlashForCausalLM",
       "MistralLarge3ForCausalLM"}  # fmt: skip
GEMMA4 = {"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"}
MIMO_V2 = {"MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2ForConditionalGeneration"}
WINDOWED = {"GptOssForCausalLM", "LagunaForCausalLM", "Llama4ForConditionalGeneration", "MellumForCausalLM",
            *GEMMA4, *MIMO_V2}  # fmt: skip
GATED_DELTA = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
               "Qwen3_5MoeForConditionalGeneration", "InternS2PreviewForConditionalGeneration"}  # fmt: skip
MAMBA2 = {"FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"}
KDA = {"KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"}
# Their multi-token-prediction head is loaded with the model's own path as draft path (speculative_hook.py).
DRAFT_IS_TARGET = {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
                   "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM"}  # fmt: skip
# Their text config is inside another one, and so is what it says of the head.
NESTED_HEAD = {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
KNOWN = DENSE | MLA | WINDOWED | GATED_DELTA | MAMBA2 | KDA
# Read when a file names no class (hand-written geometry): the nearest class by the keys that only it has.
BY_MODEL_TYPE = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration", "qwen3_next": "Qwen3NextForCausalLM",
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "gemma4": "Gemma4ForConditionalGeneration", "nemotron_h": "NemotronHForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "kimi_linear": "KimiLinearForCausalLM",
}  # fmt: skip


class State(NamedTuple):
    """The fixed state that linear-attention and Mamba layers hold for every slot."""

    layers: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    kda: bool = False
    dtype: str | None = None

    def elements(self, tp):
        """``(conv, ssm)`` elements of one slot of one layer on one of ``tp`` ranks."""
        # Groups that do not divide are repeated until every rank has one (mamba_utils.py).
        groups = self.groups if self.groups % tp == 0 else tp
        return (
            (self.heads * self.head_dim + 2 * groups * self.state_size) // tp * (self.kernel - 1),
            self.heads // tp * self.head_dim * self.state_size,
        )


class Model(NamedTuple):
    """What a plan needs of a model; sizes are of the whole model, before tensor parallelism."""

    arch: str
    text: dict
    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_dim: int = 0
    rope_dim: int = 0
    index_dim: int = 0
    swa_layers: int = 0
    swa_heads: int = 0
    swa_dim: int = 0
    window: int = 0
    state: State | None = None
    multimodal: bool = False
    heads: int = 0
    warnings: tuple = ()

    def kv_elements(self, tp):
        """KV elements a token of one full-attention layer."""
        return self.latent_dim + self.rope_dim or max(1, self.kv_heads // tp) * (self.head_dim + self.v_head_dim)

    def swa_elements(self, tp):
        return max(1, self.swa_heads // tp) * self.swa_dim

    def check_ranks(self, tp):
        """SGLang's models assert the same when they are built: heads are cut or repeated, never cut unevenly."""
        uneven = [(self.heads, "attention heads")] if self.heads % tp else []
        if not self.latent_dim:
            for heads in dict.fromkeys((self.kv_heads, self.swa_heads or self.kv_heads)):
                uneven += [(heads, "KV heads")] if heads % tp and tp % heads else []
        if self.state and self.state.heads % tp:
            uneven.append((self.state.heads, "state heads"))
        if uneven:
            count, what = uneven[0]
            raise AnsibleFilterError(
                f"tensor-parallel size {tp} does not divide the model's {count} {what}; take a size that divides them"
            )

    @property
    def nextn_layers(self):
        """Layers of the model's own multi-token-prediction head, as far as SGLang's price of a token knows of them."""
        return optional(self.text, "num_nextn_predict_layers")

    def active_indexers(self):
        """DSA layers that hold index keys; the others reuse those of a layer before them (dsa_layer_skips_topk)."""
        text, layers = self.text, range(self.layers)
        if isinstance(text.get("indexer_types"), list):
            return sum(kind != "shared" for kind in text["indexer_types"][: self.layers])
        if text.get("index_topk_pattern"):
            return sum(letter != "S" for letter in text["index_topk_pattern"][: self.layers])
        every, offset = optional(text, "index_topk_freq", 1), optional(text, "index_skip_topk_offset", 2)
        return sum(max(layer - offset + 1, 0) % every == 0 for layer in layers)


# Every key that is read, by the type it must have; other keys are nobody's business here.
COUNTS = """
    attention_chunk_size attention_head_dim decoder_sparse_step depth embed_dim first_k_dense_replace full_attention_interval
    global_head_dim head_dim hidden_size index_head_dim index_n_heads index_skip_topk_offset index_topk index_topk_freq
    intermediate_size kv_lora_rank linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim max_position_embeddings moe_intermediate_size moe_num_experts n_groups n_routed_experts
    n_shared_experts num_attention_heads num_experts num_global_key_value_heads num_heads num_hidden_layers
    num_key_value_heads num_linear_attention_layers num_local_experts num_nextn_predict_layers
    num_sliding_attention_layers out_hidden_size q_lora_rank qk_nope_head_dim qk_rope_head_dim
    shared_expert_intermediate_size short_conv_kernel_size sliding_window spatial_merge_size ssm_state_size swa_head_dim
    swa_num_key_value_heads swa_v_head_dim v_head_dim vocab_size mamba_num_heads mamba_head_dim conv_kernel mamba_n_heads
    mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv in_channels num_position_embeddings patch_size temporal_patch_size
"""
TYPES = {
    **dict.fromkeys(COUNTS.split(), (int, "a whole number")),
    **dict.fromkeys(("tie_word_embeddings",), (bool, "true or false")),
    **dict.fromkeys(("model_type", "mamba_ssm_dtype", "dtype", "torch_dtype", "hybrid_override_pattern",
                     "quant_method"), (str, "text")),
    **dict.fromkeys(("text_config", "llm_config", "vision_config", "audio_config", "linear_attn_config",
                     "quantization_config"), (Mapping, "a mapping")),
    **dict.fromkeys(("layer_types", "layers_block_type", "hybrid_layer_pattern", "kda_layers", "mlp_only_layers",
                     "mlp_layer_types", "deepstack_visual_indexes"), (list, "a list")),
    **dict.fromkeys(("architectures", "index_topk_pattern", "indexer_types"), ((list, str), "a list or text")),
}  # fmt: skip
# Looked at first: a class that is not known is not told that its keys have the wrong type.
NAMING = ("architectures", "model_type", "text_config", "llm_config")
PARTS = ("text_config", "llm_config", "vision_config", "linear_attn_config", "quantization_config")
KINDS = ((bool, "true or false"), (int, "a number"), (float, "a number"), (str, "text"), ((list, tuple), "a list"),
         (Mapping, "a mapping"))  # fmt: skip


def kind_of(value):
    """What a value is, in a person's words: type() would name Ansible's own wrappers."""
    return next((words for types, words in KINDS if isinstance(value, types)), "empty" if value is None else "something else")


def typed(config, what="the model config", only=TYPES):
    """``config`` if every key of it that is read here, on each level, has its type or is null; else an error naming the key."""
    if not isinstance(config, Mapping):
        raise AnsibleTypeError(f"{what} is {kind_of(config)}; expected the mapping of a config.json")
    for key, value in config.items():
        if value is None or key not in TYPES or key not in only:
            continue
        wanted, words = TYPES[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is int):
            raise AnsibleTypeError(f"{key} in {what} is {value!r}; expected {words}")
        if wanted is int and value < 0:
            raise AnsibleFilterError(f"{key} in {what} is {value}; expected at least 0")
        if key in PARTS:
            typed(value, what, only)
    return config


def integer(text, key, least=1):
    """``text[key]`` as a count; an error that names a key that is missing or too small."""
    value = text.get(key)
    if value is None:
        raise AnsibleFilterError(f"the model config has no {key}; give the model's whole config.json")
    if value < least:
        raise AnsibleFilterError(f"{key} in the model config is {value}; expected at least {least}")
    return value


def optional(text, key, default=0):
    """``text[key]`` as a count where there is one."""
    return text.get(key) or default


def listed(text, key):
    value = text.get(key)
    if not value:
        raise AnsibleFilterError(f"the model config has no list {key}; give the model's whole config.json")
    return value


def quantisation(config, text):
    """The quantization_config, empty for a checkpoint that is not quantised."""
    return config.get("quantization_config") or text.get("quantization_config") or {}


def architecture(config, text):
    """``(class name, warnings)``."""
    named = config.get("architectures") or text.get("architectures")
    if named:
        arch = named if isinstance(named, str) else named[0]
        if not isinstance(arch, str) or arch not in KNOWN:
            raise AnsibleFilterError(f"model class {arch} is not one whose memory is known here; plan it by a boot")
        return arch, []
    kind = config.get("model_type") or text.get("model_type")
    if kind in BY_MODEL_TYPE:
        arch = BY_MODEL_TYPE[kind]
    elif kind:
        raise AnsibleFilterError(f"model type {kind} is not one whose memory is known here; plan it by a boot")
    elif text.get("linear_num_value_heads"):
        arch = "Qwen3NextForCausalLM"
    elif text.get("linear_attn_config"):
        arch = "KimiLinearForCausalLM"
    elif text.get("hybrid_override_pattern"):
        arch = "NemotronHForCausalLM"
    elif text.get("num_linear_attention_layers") or text.get("num_sliding_attention_layers"):
        raise AnsibleFilterError("the model config has no architectures and no layer_types; give the whole config.json")
    elif text.get("kv_lora_rank"):
        arch = "DeepseekV3ForCausalLM"
    else:
        arch = "LlamaForCausalLM"
    return arch, [f"the model config names no class; its keys are those of {arch}"]


def windowed(arch, text):
    """Sliding-window layers: their number, heads, K+V size and window, and what the full layers become."""
    layers = integer(text, "num_hidden_layers")
    if arch in MIMO_V2:
        sliding = sum(x == 1 for x in listed(text, "hybrid_layer_pattern")[:layers])
    elif arch == "Llama4ForConditionalGeneration":
        sliding = layers - layers // 4
    else:
        sliding = sum(x == "sliding_attention" for x in listed(text, "layer_types")[:layers])
    heads, dim = integer(text, "num_key_value_heads"), head_size(text)
    full = {"layers": layers - sliding}
    if arch in GEMMA4:
        # Its base keys are those of the sliding layers; `global` keys those of the full ones.
        full["kv_heads"] = optional(text, "num_global_key_value_heads", heads)
        full["head_dim"] = full["v_head_dim"] = optional(text, "global_head_dim", dim)
    swa_dim = optional(text, "swa_head_dim", dim)
    swa = {
        "swa_layers": sliding,
        "swa_heads": optional(text, "swa_num_key_value_heads", heads),
        "swa_dim": swa_dim + optional(text, "swa_v_head_dim", swa_dim),
        "window": optional(text, "sliding_window") or optional(text, "attention_chunk_size"),
    }
    return {**full, **swa}


def gated_delta(text):
    layers, every = integer(text, "num_hidden_layers"), optional(text, "full_attention_interval", 4)
    kinds = text.get("layer_types")
    linear = sum(x == "linear_attention" for x in kinds[:layers]) if kinds else layers - layers // every
    # 128 and 4 are what the config class itself fills in (configs/qwen3_next.py).
    return layers - linear, State(
        layers=linear,
        heads=integer(text, "linear_num_value_heads"),
        head_dim=optional(text, "linear_value_head_dim", 128),
        state_size=optional(text, "linear_key_head_dim", 128),
        groups=integer(text, "linear_num_key_heads"),
        kernel=optional(text, "linear_conv_kernel_dim", 4),
        dtype=text.get("mamba_ssm_dtype"),
    )


def mamba2(arch, text):
    if arch.startswith("Nemotron"):
        blocks = text.get("layers_block_type")
        if blocks:
            linear, full = (sum(x == kind for x in blocks) for kind in ("mamba", "attention"))
        else:
            pattern = listed(text, "hybrid_override_pattern")
            linear, full = (sum(x == letter for x in pattern) for letter in "M*")
        return full, State(
            layers=linear,
            heads=integer(text, "mamba_num_heads"),
            head_dim=integer(text, "mamba_head_dim"),
            state_size=integer(text, "ssm_state_size"),
            groups=integer(text, "n_groups"),
            kernel=integer(text, "conv_kernel"),
            dtype=text.get("mamba_ssm_dtype"),
        )
    layers = integer(text, "num_hidden_layers")
    if arch.startswith("Falcon"):  # every layer has both
        linear = full = layers
    else:
        linear = sum(x == "mamba" for x in listed(text, "layer_types")[:layers])
        full = layers - linear
    return full, State(
        layers=linear,
        heads=integer(text, "mamba_n_heads"),
        head_dim=integer(text, "mamba_d_head"),
        state_size=integer(text, "mamba_d_state"),
        groups=integer(text, "mamba_n_groups"),
        kernel=integer(text, "mamba_d_conv"),
        dtype=text.get("mamba_ssm_dtype") if arch.startswith("Falcon") else None,
    )


def kimi_delta(text):
    linear = text.get("linear_attn_config")
    if not linear:
        raise AnsibleFilterError("the model config has no linear_attn_config; give the model's whole config.json")
    layers = integer(text, "num_hidden_layers")
    kda = sum(layer in range(1, layers + 1) for layer in listed(linear, "kda_layers"))
    heads, dim = integer(linear, "num_heads"), integer(linear, "head_dim")
    return layers - kda, State(kda, heads, dim, dim, heads, integer(linear, "short_conv_kernel_size"), kda=True)


def head_size(text):
    size = optional(text, "head_dim") or optional(text, "attention_head_dim")
    if size:
        return size
    return integer(text, "hidden_size") // integer(text, "num_attention_heads")


def text_of(config):
    """The part of a config.json that describes the language model."""
    return config.get("text_config") or config.get("llm_config") or config


def read_model(config):
    """config.json as a :class:`Model`."""
    text = dict(text_of(typed(config, only=NAMING)))
    arch, warnings = architecture(config, text)
    typed(config)
    more = {
        "layers": None if arch.startswith("Nemotron") else integer(text, "num_hidden_layers"),
        "multimodal": "vision_config" in config or "audio_config" in config,
        "heads": optional(text, "num_attention_heads"),
    }
    if arch in GATED_DELTA:
        more["layers"], more["state"] = gated_delta(text)
    elif arch in MAMBA2:
        more["layers"], more["state"] = mamba2(arch, text)
    elif arch in KDA:
        more["layers"], more["state"] = kimi_delta(text)
    if arch in MLA | KDA:
        more["latent_dim"], more["rope_dim"] = integer(text, "kv_lora_rank"), integer(text, "qk_rope_head_dim", 0)
        if arch == "LongcatFlashForCausalLM":  # two attentions a layer
            more["layers"] *= 2
        if arch in DSA and text.get("index_topk") is not None:
            more["index_dim"] = integer(text, "index_head_dim")
        more.update(kv_heads=1, head_dim=0, v_head_dim=0)
    else:
        dim = head_size(text)
        heads = text.get("num_key_value_heads")
        more["kv_heads"] = integer(text, "num_attention_heads" if heads is None else "num_key_value_heads")
        more.update(head_dim=dim, v_head_dim=optional(text, "v_head_dim", dim))
    if arch in WINDOWED:
        more.update(windowed(arch, text))
    if more.get("state") and not more["state"].layers:
        more["state"] = None
    return Model(arch=arch, text=text, warnings=tuple(warnings), **more)


class FilterModule:
    """No filter of its own: this file is read by sglang_memory.py, and Ansible loads every file of this folder."""

    def filters(self):
        return {}
