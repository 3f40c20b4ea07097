#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_benchmark_fit
short_description: Refuse requests of a benchmark that are longer than a context
description:
  - Tells before any server is started or stopped whether what M(sglang_benchmark) would send fits into the context of each
    profile, tokens of the request and of its answer together, and fails with one sentence where it does not.
  - Tokens of prompts are counted by the model's own tokenizer, as the server and C(sglang.bench_serving) count them. Random
    tokens are as many as O(input_tokens).
  - A context that nothing tells is not checked, and texts are not counted whose tokenizer needs code of its own. Either is
    a warning, and the measurement then finds what is too long.
options:
  python:
    description: The Python of the engine. The default is the Python that runs this module.
    type: path
  tokenizer:
    description: The folder of the model, for its tokenizer and its C(config.json). Nothing is downloaded.
    type: path
    required: true
  contexts:
    description: C(context-length) by name of the profile, null for a profile that leaves it to the model.
    type: dict
    required: true
  prompts:
    description: A file on the node with the prompts, as M(sglang_benchmark) takes it. Without it the tokens are random.
    type: path
  prompts_name:
    description: What a person calls that file. The default is its path.
    type: str
  input_tokens:
    description: Tokens in each request. Not read with O(prompts).
    type: int
    default: 128
  output_tokens:
    description: Tokens to generate for each request.
    type: int
    default: 256
  settings:
    description: Names of the variables that O(input_tokens) and O(output_tokens) come from, to be told which to lower.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds for the tokenizer.
    type: int
    default: 1800
  env:
    description: More environment for the tokenizer, such as what the engine needs to be imported.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    support: full
    details: It never changes anything, and does the same.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    support: full
    platforms: posix
seealso:
  - module: sglang_benchmark
author: sglang-fleet contributors
"""

EXAMPLES = r"""
- name: Refuse prompts that are longer than the context of a profile
  sglang_benchmark_fit:
    tokenizer: /srv/models/qwen
    prompts: /srv/prompts.jsonl
    output_tokens: 256
    contexts: {nomtp: 32768, mtp:}
  vars:
    ansible_python_interpreter: /srv/sglang/venv/bin/python
"""

RETURN = r"""
tokens:
  description: Tokens of the longest request. V(null) where they could not be counted.
  returned: always
  type: int
line:
  description: The line of O(prompts) that has them. V(null) without O(prompts).
  returned: always
  type: int
context:
  description: The model's own context. V(null) where its C(config.json) does not tell.
  returned: always
  type: int
"""

import json
import os
import sys

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_benchmark import BenchmarkError, misfit, model_context, offline, prompts_of, tokenized


def own_context(folder):
    """The context of the model in a folder, None where nothing tells."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        return model_context(config)
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # a model without a good config does not start, and the node's own check says so better


def longest(module, asked, name):
    """`(line, tokens)` of the longest prompt; `(None, None)` and a warning where texts cannot be counted."""
    prompts = prompts_of(asked["prompts"], name)
    python = asked["python"] or sys.executable
    try:
        written = tokenized(list(prompts.values()), python, asked["tokenizer"], offline(asked["env"]), asked["timeout"], name)
    except BenchmarkError as error:
        # Texts are sent as they are, and bench_serving's tokenizer may run code of the model; chats are written by ours.
        if not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise
        module.warn(f"{error} So it is not checked whether its texts fit the context.")
        return None, None
    counts = {line: tokens for line, (_text, tokens) in zip(prompts, written)}
    line = max(counts, key=counts.get)
    return line, counts[line]


def main():
    module = AnsibleModule(
        argument_spec=dict(
            python=dict(type="path"),
            tokenizer=dict(type="path", required=True),
            contexts=dict(type="dict", required=True),
            prompts=dict(type="path"),
            prompts_name=dict(type="str"),
            input_tokens=dict(type="int", default=128),
            output_tokens=dict(type="int", default=256),
            settings=dict(type="list", elements="str", default=[]),
            timeout=dict(type="int", default=1800),
            env=dict(type="dict", default={}),
        ),
        supports_check_mode=True,
    )
    asked = module.params
    name = asked["prompts_name"] or asked["prompts"]
    own = own_context(asked["tokenizer"])
    contexts = {profile: int(given) if given else None for profile, given in asked["contexts"].items()}
    unknown = [profile for profile, given in contexts.items() if not (given or own)]
    if unknown:
        module.warn(
            f"{asked['tokenizer']}/config.json does not tell the model's context, so it is not checked whether requests fit"
            f" profile {', '.join(unknown)}: context-length in the profile would tell."
        )
    line, tokens = None, asked["input_tokens"]
    try:
        if asked["prompts"]:
            line, tokens = longest(module, asked, name)
    except BenchmarkError as error:
        module.fail_json(msg=str(error))
    what = f"line {line} of {name}, the longest," if asked["prompts"] else "each request of random tokens"
    found = {"line": line, "tokens": tokens, "context": own}
    ways = [f"lower {setting}" for setting in asked["settings"]]
    refused = misfit(what, tokens, asked["output_tokens"], contexts, own, ways) if tokens is not None else None
    if refused:
        module.fail_json(msg=refused, **found)
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
