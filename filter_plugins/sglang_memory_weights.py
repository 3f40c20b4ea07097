# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model's parameters as its config.json tells them, where no file tells its weights.

Read by sglang_memory.py. Counted are the classes of :data:`COUNTED`, each held against the class of the same name in
Transformers 5 (all agree to half a thousandth; tests/data/memory/parameters.json has published models). Every other class
is refused by name: its weights have to be stated.
"""

from __future__ import annotations

import functools
import importlib.util
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


sizing = _beside("sglang_memory_sizes")
models = sizing.models
integer, optional = models.integer, models.optional
AnsibleFilterError = models.AnsibleFilterError

GIB = 1 << 30


class Counting(NamedTuple):
    """How a class is counted."""

    tied: bool = False  # what the class does where the config does not say
    matrices: int = 3  # of an expert or a dense feed-forward part: gate, up, down
    vision: str | None = None


PLAIN, TIED = Counting(), Counting(tied=True)
COUNTED = {
    **dict.fromkeys((
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
        "LlamaForCausalLM", "MiniMaxM2ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM",
        "OlmoForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
        "SeedOssForCausalLM", "StableLmForCausalLM",
    ), PLAIN),
    **dict.fromkeys((
        "CohereForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "MiniCPM3ForCausalLM",
    ), TIED),
    "ArceeForCausalLM": Counting(matrices=2),
    "Starcoder2ForCausalLM": Counting(tied=True, matrices=2),
    **dict.fromkeys((
        "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ), Counting(vision="qwen3")),
}  # fmt: skip


def is_tied(model, config):
    """Whether embedding and output layer are one; None where neither config nor class tells it, or the config says both."""
    told = {part.get("tie_word_embeddings") for part in (config, model.text)} - {None}
    if not told:
        return COUNTED[model.arch].tied if model.arch in COUNTED else None
    return told.pop() if len(told) == 1 else None


def attention_parameters(model):
    """Parameters of one full-attention layer."""
    text, hidden, heads = model.text, integer(model.text, "hidden_size"), integer(model.text, "num_attention_heads")
    if model.latent_dim:
        nope, rope, latent = integer(text, "qk_nope_head_dim"), model.rope_dim, model.latent_dim
        value, query = integer(text, "v_head_dim"), optional(text, "q_lora_rank")
        wide = heads * (nope + rope)
        to_query = hidden * query + query * wide if query else hidden * wide
        return to_query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    # Gated DeltaNet models gate their attention's output with as many values as the query has.
    gate = 2 if model.arch in models.GATED_DELTA else 1
    queries, kv = heads * model.head_dim, model.kv_heads * (model.head_dim + model.v_head_dim)
    return hidden * (gate * queries + kv) + heads * model.v_head_dim * hidden


def indexer_parameters(model):
    """Parameters of one DSA indexer: its queries, its key, its heads' weights."""
    text = model.text
    heads, size = integer(text, "index_n_heads"), model.index_dim
    return optional(text, "q_lora_rank") * heads * size + integer(text, "hidden_size") * (size + heads)


def state_parameters(model):
    """Parameters of one Gated DeltaNet layer: q, k, v, the output's gate; two small gates a head; the way back."""
    state, hidden = model.state, integer(model.text, "hidden_size")
    keys, values = state.groups * state.state_size, state.heads * state.head_dim
    return hidden * (2 * keys + 2 * values + 2 * state.heads) + values * hidden


def feed_forward_parameters(model):
    """``(dense, mixture)`` parameters of one layer's feed-forward part."""
    text, hidden, matrices = model.text, integer(model.text, "hidden_size"), COUNTED[model.arch].matrices
    dense = matrices * hidden * optional(text, "intermediate_size")
    experts = next((text[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if text.get(k)), 0)
    if not experts:
        return dense, 0
    width = optional(text, "moe_intermediate_size") or integer(text, "intermediate_size")
    shared = optional(text, "shared_expert_intermediate_size") or width * optional(text, "n_shared_experts")
    return dense, matrices * hidden * (width * experts + shared) + hidden * experts


def dense_layers(text):
    """Layers of a mixture-of-experts model that have no experts."""
    layers, step = integer(text, "num_hidden_layers"), optional(text, "decoder_sparse_step", 1)
    if text.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in text["mlp_layer_types"][:layers])
    plain, first = text.get("mlp_only_layers") or [], optional(text, "first_k_dense_replace")
    return sum(layer < first or layer in plain or (layer + 1) % step != 0 for layer in range(layers))


def qwen3_vision(vision, hidden):
    """Parameters of the vision tower of Qwen3-VL and Qwen3.5: patches, positions, blocks, one merger and more of them."""
    side, depth = integer(vision, "hidden_size"), integer(vision, "depth")
    patch = optional(vision, "patch_size", 16) ** 2 * optional(vision, "in_channels", 3)
    patches = side * patch * optional(vision, "temporal_patch_size", 2)
    places = side * optional(vision, "num_position_embeddings", 2304)
    blocks = depth * (4 * side * side + 2 * side * optional(vision, "intermediate_size", 4 * side))
    merged = side * optional(vision, "spatial_merge_size", 2) ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or [])
    return patches + places + blocks + mergers * merged * (merged + optional(vision, "out_hidden_size", hidden))


MIB = 1 << 20


@functools.cache
def vision_waste(side, depth, feed, grid, merged, out):
    """Bytes that a vision tower in 16 bits takes beyond its tensors.

    PyTorch's allocator (c10/cuda/CUDACachingAllocator.cpp) takes 2 MiB at a time for tensors up to 1 MiB, 20 MiB for those
    below 10 MiB, and 2 MiB multiples above, and fills what is left of a block where a later tensor fits. A tower's
    tensors are of the middle kind; those of a language model are mostly multiples of 2 MiB.
    """
    blocks = {True: [], False: []}
    taken = asked = 0
    layer = [3 * side * side, 3 * side, side * side, side, feed * side, feed, feed * side, *[side] * 5]
    for size in [grid, *layer * depth, merged * merged, merged, merged * out, out]:
        size = -(-size * 2 // 512) * 512
        small = size <= MIB
        block = min((left for left in blocks[small] if left >= size), default=None)
        if block is None:
            block = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            taken += block
        else:
            blocks[small].remove(block)
        if block - size >= (512 if small else MIB + 1):
            blocks[small].append(block - size)
        asked += size
    return taken - asked


def beside_weights(model, config):
    """Bytes on one rank that come with the weights and that no checkpoint has: rotary tables, and the allocator's rounding.

    ``Load weight end`` counts them. The rotary tables are cosines and sines in 32 bits for every position
    (``layers/rotary_embedding/base.py``), one for all layers. Qwen3.6-27B: 64 MiB of them, 32 MiB of rounding.
    """
    text = model.text
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {}
    share = next((part["partial_rotary_factor"] for part in (rope, text) if part.get("partial_rotary_factor")), None)
    share = share or (0.25 if model.arch in models.GATED_DELTA else 1)
    size = model.rope_dim or int(model.head_dim * (share if isinstance(share, (int, float)) else 1))
    total = optional(text, "max_position_embeddings") * size * 4
    vision = config.get("vision_config")
    if vision and model.arch in COUNTED and COUNTED[model.arch].vision and not models.quantisation(config, text):
        side, depth = integer(vision, "hidden_size"), integer(vision, "depth")
        grid = side * optional(vision, "num_position_embeddings", 2304)
        merged = side * optional(vision, "spatial_merge_size", 2) ** 2
        feed, out = optional(vision, "intermediate_size", 4 * side), optional(vision, "out_hidden_size", text["hidden_size"])
        total += vision_waste(side, depth, feed, grid, merged, out)
    return total


def count_parameters(model, config):
    """``(target, draft)`` parameters, or None with a reason for what the config does not tell.

    Norms and biases are left out: less than a thousandth. ``draft`` is a multi-token-prediction head of one layer.
    """
    text, arch = model.text, model.arch
    if arch not in COUNTED:
        return None, f"the parameters of {arch} are not counted here"
    for key in ("vocab_size", "hidden_size", "num_attention_heads"):
        if not text.get(key):
            return None, f"the model config has no {key}"
    if isinstance(config.get("vision_config"), Mapping) and not COUNTED[arch].vision:
        return None, f"the vision tower of {arch} is not counted here"
    if config.get("audio_config"):
        return None, f"the audio tower of {arch} is not counted here"
    if is_tied(model, config) is None:
        return None, "the model config says two things of tie_word_embeddings"
    hidden, layers = text["hidden_size"], integer(text, "num_hidden_layers")
    embedding = text["vocab_size"] * hidden * (1 if is_tied(model, config) else 2)
    dense, mixture = feed_forward_parameters(model)
    if not dense and not mixture:
        return None, "the model config has no intermediate_size"
    if not mixture:
        feed = layers * dense
    else:
        without = dense_layers(text)
        if without and not dense:
            return None, "the model config has no intermediate_size"
        feed = without * dense + (layers - without) * mixture
    full = layers - model.state.layers if model.state else layers
    attention = attention_parameters(model)
    total = embedding + feed + full * attention
    if model.state:
        total += model.state.layers * state_parameters(model)
    indexer = indexer_parameters(model) if model.index_dim else 0
    if indexer:
        total += indexer * model.active_indexers()
    if COUNTED[arch].vision and config.get("vision_config"):
        total += qwen3_vision(config["vision_config"], hidden)
    # The head: two hidden states become one, one layer, an embedding and an output layer of its own.
    draft = 2 * hidden * hidden + attention + indexer + (mixture or dense) + embedding
    return (total, draft), None


def shared_with_head(config, model=None):
    """Parameters that SGLang loads beside a head's own tensors: embedding and output layer. None where nothing tells them.

    It shares the model's own only after the pools were sized (Qwen3.6-27B: 5.53 GiB, of which 4.74 come back).
    """
    model = model or models.read_model(config)
    tied, text = is_tied(model, config), model.text
    if tied is None or not text.get("vocab_size") or not text.get("hidden_size"):
        return None
    return text["vocab_size"] * text["hidden_size"] * (1 if tied else 2)


def loaded_share(config, args):
    """How many bytes a byte of the checkpoint's files becomes: 2 for one in 16 bits that ``dtype`` loads as float32."""
    text = models.text_of(config)
    if models.quantisation(config, text):
        return 1
    told = next((part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)), "bfloat16")
    stored = sizing.DTYPES.get(told, 2)
    return sizing.weight_bytes(sizing.Flags(args)) / stored


class FilterModule:
    """No filter of its own: this file is read by sglang_memory.py, and Ansible loads every file of this folder."""

    def filters(self):
        return {}
