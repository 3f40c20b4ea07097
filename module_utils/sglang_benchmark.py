# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What `sglang.bench_serving` is asked, and what its JSONL records say.

Every figure is bench_serving's own (percentiles too). Only flags and keys that are in 0.5.9 to 0.5.23 are used.
"""

from __future__ import annotations

import json
import math
import os
import subprocess

# Importing bench_serving takes longer than a short benchmark: one process runs its command line for each concurrency.
# It stops at the first run with a failed request: against a dead server each further run would wait a minute for it.
# Arguments: the JSONL that the runs append to, and the command lines as JSON.
DRIVER = """
import json, runpy, sys
output, command_lines = sys.argv[1], json.loads(sys.argv[2])
for command_line in command_lines:
    sys.argv = ["bench_serving"] + command_line
    runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
    with open(output) as file:
        record = json.loads(file.readlines()[-1])
    if any(record["errors"]) or not all(record["ttfts"]):
        break
"""

# Kept out of the stored record: server_info holds the server's API keys, the other two are large and unread.
NOT_STORED = ("server_info", "generated_texts", "itls")

# bench_serving counts tokens when a chunk brings text, so a last token without text is missed when the server
# streams increments; an answer is called short only below this part of what was asked.
LEAST_OUTPUT = 0.95

NO_TEXT = "the server answered without any text, see its log"

# Writes prompts as the server gets them and counts their tokens as it does, chats as its own chat endpoint would, with the
# model's template; a tokenizer adds the first token itself. No tokenizer needs torch, which takes most of the import.
# Argument: the model's folder. In: a JSON list of texts and of lists of messages. Out: for each a text and its tokens.
PROMPT_DRIVER = """
import json, sys
sys.modules["torch"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
texts = []
for prompt in json.load(sys.stdin):
    if isinstance(prompt, str):
        texts.append(prompt)
        continue
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    start = tokenizer.bos_token
    texts.append(text[len(start):] if start and text.startswith(start) else text)
json.dump([[text, len(ids)] for text, ids in zip(texts, tokenizer(texts)["input_ids"])], sys.stdout)
"""


class BenchmarkError(Exception):
    """What was asked can't be measured; the text is one sentence for a person, `errors` are those of requests."""

    def __init__(self, text, errors=()):
        super().__init__(text)
        self.errors = list(dict.fromkeys(errors))


def number_of_requests(concurrency, per_concurrency, least):
    """How many requests to send at this concurrency."""
    return max(concurrency * per_concurrency, least)


def command_line(
    base_url, served_model_name, tokenizer, concurrency, requests, input_tokens, output_tokens, seed, output_file, prompts=None
):
    """The arguments of one `python -m sglang.bench_serving`; `prompts` is a file of texts, without it tokens are random."""
    return [
        "--backend",
        "sglang",
        "--base-url",
        base_url,
        # Without --model it would look the served name up on the model hub.
        "--model",
        tokenizer,
        "--served-model-name",
        served_model_name,
        "--tokenizer",
        tokenizer,
        *(_texts(prompts, output_tokens) if prompts else _random(input_tokens, output_tokens)),
        "--num-prompts",
        str(requests),
        "--max-concurrency",
        str(concurrency),
        "--warmup-requests",
        str(concurrency),
        "--seed",
        str(seed),
        "--disable-tqdm",
        # The only place where a failed request shows.
        "--output-details",
        "--output-file",
        output_file,
    ]


def _random(input_tokens, output_tokens):
    # Token ids: as text, the server would count other lengths than the ones asked for.
    words = ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1"]
    return [*words, "--random-input-len", str(input_tokens), "--random-output-len", str(output_tokens)]


def _texts(path, output_tokens):
    # Runs share their texts, and no run may find those of the run before in the prefix cache.
    return ["--dataset-name", "custom", "--dataset-path", path, "--sharegpt-output-len", str(output_tokens), "--flush-cache"]


# What a line of a file of prompts may have.
FORMS = ("prompt", "text", "messages", "conversations")


def read_prompts(text):
    """Prompts of a JSONL file by line: texts as they are, chats as lists of messages. ValueError names the first bad line.

    A line has one of `prompt` or `text` (a string), `messages` (of `role` and `content`), or `conversations` (the same, or
    ShareGPT's `from` and `value`), of which what comes before the first answer is taken.
    """
    prompts = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError(f"line {number} is no JSON") from None
        given = [key for key in FORMS if key in entry] if isinstance(entry, dict) else []
        if len(given) > 1:
            raise ValueError(f"line {number} has {' and '.join(given)}: which of them is to be sent?")
        try:
            prompts[number] = _prompt(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"line {number} has no {', '.join(FORMS[:-1])} or {FORMS[-1]} to send") from None
    if not prompts:
        raise ValueError("it holds no line")
    return prompts


def _prompt(entry):
    for key in ("prompt", "text"):
        if key in entry:
            if not isinstance(entry[key], str) or not entry[key].strip():
                raise ValueError(key)
            return entry[key]
    messages = []
    for turn in entry.get("messages") or entry["conversations"]:
        role = {"human": "user", "gpt": "assistant"}.get(turn.get("from"), turn.get("from")) or turn["role"]
        content = turn["content"] if "content" in turn else turn["value"]
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a turn without text")
        if role == "assistant":
            break
        messages.append({"role": role, "content": content})
    if not messages:
        raise ValueError("no question")
    return messages


def prompts_of(path, name=None):
    """What `read_prompts` finds in a file, which a person knows as `name`. BenchmarkError where it can't be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return read_prompts(file.read())
    except OSError as error:
        raise BenchmarkError(f"Cannot read {name or path} ({error.strerror}): set prompts to a file on the node.") from error
    except ValueError as error:
        raise BenchmarkError(f"{name or path}: {error}: each line is a JSON mapping with one of these.") from error


def tokenized(prompts, python, model, environment, timeout, name):
    """`(text, tokens)` of each prompt, by the model's own tokenizer. BenchmarkError where it can't be told."""
    try:
        done = subprocess.run(
            [python, "-c", PROMPT_DRIVER, model],
            input=json.dumps(prompts),
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(
            f"The tokenizer of {model} took more than {timeout} s for {name}: raise timeout, or give fewer prompts."
        ) from error
    except OSError as error:
        raise BenchmarkError(f"Cannot start {python} ({error.strerror}): set python to that of an installed engine.") from error
    if done.returncode != 0:
        raise BenchmarkError(
            f"The tokenizer of {model} cannot write {name} ({last_line(done.stderr)}):"
            " chats need a model with a chat template, any prompt a tokenizer without code of its own."
        )
    return [tuple(pair) for pair in json.loads(done.stdout.splitlines()[-1])]


def offline(env):
    """The environment of whatever runs beside the server: nothing of the login's own, nothing that goes out."""
    environment = dict(os.environ)
    # A key of the login's own is not for this server, and CI mode would empty the server's cache.
    for name in ("OPENAI_API_KEY", "API_KEY", "SGLANG_IS_IN_CI"):
        environment.pop(name, None)
    environment.update(
        {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }
    )
    environment.update({name: str(value) for name, value in env.items()})
    return environment


# As SGLang's get_context_length goes through them.
CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def model_context(config):
    """Tokens of context that SGLang gives a model without `context-length`; None where its config.json does not tell."""
    parts = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((part for part in parts if isinstance(part, dict)), config)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    stretched = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    factor = (rope.get("factor") or 1) if stretched else 1
    return next((int(factor * text[key]) for key in CONTEXT_KEYS if text.get(key) is not None), None)


def misfit(what, tokens, output_tokens, contexts, own, ways=()):
    """The sentence that refuses a request longer than a context, None where it fits.

    `what`: who has so many `tokens`. `contexts`: context-length by profile, None where it has none. `own`: the model's context,
    None where it is not known. `ways`: how to send less, where settings do.
    """
    total = tokens + output_tokens
    small = {profile: asked or own for profile, asked in contexts.items() if total > (asked or own or total)}
    if not small:
        return None
    told = [f"profile {name} has a context of {has}{'' if contexts[name] else ', as the model'}" for name, has in small.items()]
    ways = list(ways) or ["shorten it", "ask for less output"]
    # A profile that has the model's whole context, or that would need more, has nothing to raise.
    if all(contexts[name] for name in small) and total <= (own or total):
        ways.append(f"raise context-length in profile {' and '.join(small)}{f' (the model has {own})' if own else ''}")
    return (
        f"{what} has {tokens} tokens and {output_tokens} are asked for as output, {total} together, but {' and '.join(told)}: "
        f"{', '.join(ways[:-1])} or {ways[-1]}."
    )


def custom_dataset(texts):
    """The lines of bench_serving's dataset `custom`. It sends the first turn and wants a second one to be there."""
    return "".join(json.dumps({"conversations": [{"content": text}, {"content": "-"}]}) + "\n" for text in texts)


def parse_records(text):
    """The records of bench_serving's JSONL; a line cut off by a kill is left out."""
    records = []
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def failures(record):
    """One sentence for each request that did not bring what it was asked for.

    An error inside a stream that began with HTTP 200 (an input longer than the context) is counted by bench_serving as
    completed, with all its tokens; only the missing first token tells.
    """
    asked = record.get("sharegpt_output_len") or record["random_output_len"]
    found = []
    for error, ttft, tokens in zip(record["errors"], record["ttfts"], record["output_lens"]):
        if error:
            found.append(last_line(error))
        elif not ttft:
            found.append(NO_TEXT)
        elif tokens < asked * LEAST_OUTPUT:
            found.append(f"the answer ended after {tokens} of {asked} tokens")
    return found


def summarise(record, seed):
    """The figures of one run, as the module returns them."""
    requests = len(record["errors"])
    failed = len(failures(record))

    def figure(key):
        # With failures among the answers bench_serving's figures are wrong, usually far too good.
        value = record.get(key)
        return None if failed or value is None or not math.isfinite(value) else round(value, 3)

    return {
        "concurrency": record["max_concurrency"],
        "requests": requests,
        "completed": requests - failed,
        "failed": failed,
        "seed": seed,
        "duration_s": figure("duration"),
        "output_tok_s": figure("output_throughput"),
        "total_tok_s": figure("total_throughput"),
        "input_tokens": figure("total_input_tokens"),
        "output_tokens": figure("total_output_tokens"),
        "ttft_ms": {"median": figure("median_ttft_ms"), "p99": figure("p99_ttft_ms")},
        "tpot_ms": {"median": figure("median_tpot_ms"), "p99": figure("p99_tpot_ms")},
        # Servers without speculation say null or 0.
        "accept_length": figure("accept_length") or None,
    }


def storable(record, seed):
    """The record without secrets and bulk, as strict JSON (bench_serving writes Infinity and NaN)."""
    kept = {key: _strict(value) for key, value in record.items() if key not in NOT_STORED}
    kept["sglang_version"] = (record.get("server_info") or {}).get("version")
    kept["seed"] = seed
    kept["failed"] = len(failures(record))
    return kept


def last_line(text):
    """The last line of a traceback or of an output that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _strict(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value
