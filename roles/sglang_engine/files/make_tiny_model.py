# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Make a tiny Qwen3 model with random weights: a real folder that SGLang loads in a second and that answers nonsense.

    <venv>/bin/python make_tiny_model.py FOLDER [--maker SHA256] [--check]

Prints {"changed": ...} as JSON. A folder that this version of the maker made is left alone. The same version makes
the same bytes: weights come from a fixed seed. The vocabulary has 512 tokens, of which 0 to 2 are special; generation
stops at token 2 (<|im_end|>), so a request of a fixed length needs `ignore_eos`.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

MARKER = "sglang_fleet_model.json"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512
CONTEXT = 4096
SEED = 20
SHARDS = 2

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Enough different words for the tokenizer to learn its vocabulary from; what they say has no meaning here.
CORPUS = """
A server holds weights and a cache of keys and values. Requests wait in a queue until the scheduler admits them.
The first token takes a prefill over the whole prompt; every later token takes one decoding step and reads the cache.
When memory runs out the engine evicts the oldest prefix, and a draft model may propose several tokens at once.
Hello there, how are you today? What is the capital of France, and which river runs through it? Answer in one sentence.
def main(): return {"name": "value", "count": 12345, "ratio": 0.6789, "items": [1, 2], "enabled": true, "missing": null}
Operators start nodes one by one, wait for health, send a probe, measure throughput, compare it and keep a record.
"""


def is_current(folder, maker):
    """True when this version of the maker made this folder."""
    try:
        return json.loads((folder / MARKER).read_text(encoding="utf-8"))["maker"] == maker
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(folder):
    """A byte-level BPE tokenizer: every text can be encoded, and every token but the special ones is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 2, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        sys.exit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}: CORPUS is too short")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": None,
            "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def weight_shapes():
    """Name and shape of each tensor, layer by layer."""
    hidden, middle, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "self_attn.q_norm.weight", (head,)
        yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "mlp.gate_proj.weight", (middle, hidden)
        yield prefix + "mlp.up_proj.weight", (middle, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, middle)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def write_weights(folder):
    """Random bf16 weights in two shards with an index, like a real model's; a missing shard is then a real fault."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in weight_shapes():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            # As large as keeps activations near 1: the output then varies with the prompt.
            tensors[name] = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)
    names = list(tensors)
    per_shard = -(-len(names) // SHARDS)
    weight_map = {}
    for shard in range(SHARDS):
        part = names[shard * per_shard : (shard + 1) * per_shard]
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file({name: tensors[name] for name in part}, str(folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def make(folder, maker):
    """Build the model beside `folder` and move it into place: nobody sees half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir(mode=0o755)
        write_json(new / "config.json", CONFIG)
        write_json(new / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0})
        write_tokenizer(new)
        write_weights(new)
        write_json(new / MARKER, {"maker": maker})
        for path in new.iterdir():
            path.chmod(0o644)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--maker", default="by hand", help="what this version of the maker is known by")
    parser.add_argument("--check", action="store_true", help="only say whether the folder would be made")
    args = parser.parse_args()
    folder = Path(os.path.abspath(args.folder.expanduser()))
    if is_current(folder, args.maker):
        changed = False
    elif folder.exists() and not (folder / MARKER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"{folder} was not made by this maker: name another folder, or remove it")
    else:
        changed = True
        if not args.check:
            make(folder, args.maker)
    print(json.dumps({"changed": changed, "folder": str(folder)}))


if __name__ == "__main__":
    main()
