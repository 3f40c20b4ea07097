# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is too long is refused by its line. A token is a word here; tests/integration/local asks the real tokenizer."""

from __future__ import annotations

import json
import stat
import sys

import pytest
import sglang_benchmark_fit

WORDS = """
import json, sys
prompts = json.load(sys.stdin)
texts = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
print("a library that says something")
print(json.dumps([[text, len(text.split())] for text in texts]))
"""


@pytest.fixture
def fit(call, tmp_path, monkeypatch):
    """Call the module with prompts, one a line of the file, and a Python that counts words."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 40}', encoding="utf-8")
    (tmp_path / "words.py").write_text(WORDS, encoding="utf-8")

    def _fit(*lines, tokenizer=f"exec {sys.executable} {tmp_path / 'words.py'}", **options):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{tokenizer}\n", encoding="utf-8")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        asked = {"python": str(python), "tokenizer": str(model), "output_tokens": 4, "contexts": {"nomtp": None}, **options}
        if lines:
            path = tmp_path / "prompts.jsonl"
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            asked.update(prompts=str(path), prompts_name="job.jsonl")
        warned = []
        monkeypatch.setattr(sglang_benchmark_fit.AnsibleModule, "warn", lambda self, text: warned.append(text))
        return {**call(sglang_benchmark_fit, asked), "warned": warned}

    _fit.model = model
    return _fit


def text(words):
    return json.dumps({"prompt": " ".join(["word"] * words)})


def chat(words):
    return json.dumps({"messages": [{"role": "user", "content": " ".join(["word"] * words)}]})


def test_the_longest_prompt_is_told(fit):
    result = fit(text(3), "", chat(36), text(5))
    assert (result["rc"], result["changed"]) == (0, False)
    assert (result["line"], result["tokens"], result["context"]) == (3, 36, 40)


def test_the_line_that_is_too_long_is_refused_with_the_profile_that_is_too_small(fit):
    result = fit(text(3), "", chat(17), contexts={"small": "20", "wide": None, "exact": 21})
    assert result["rc"] == 1
    assert result["msg"] == (
        "line 3 of job.jsonl, the longest, has 17 tokens and 4 are asked for as output, 21 together, but profile small has a"
        " context of 20: shorten it, ask for less output or raise context-length in profile small (the model has 40)."
    )
    assert (result["line"], result["tokens"]) == (3, 17)


def test_random_tokens_need_no_tokenizer(fit):
    assert fit(input_tokens=36, tokenizer="exit 1")["rc"] == 0
    result = fit(input_tokens=37, tokenizer="exit 1", contexts={"small": 20, "wide": None})
    assert result["msg"] == (
        "each request of random tokens has 37 tokens and 4 are asked for as output, 41 together, but profile small has a"
        " context of 20 and profile wide has a context of 40, as the model: shorten it or ask for less output."
    )
    named = fit(input_tokens=37, contexts={"small": 20}, settings=["gate_input_tokens", "gate_output_tokens"])["msg"]
    assert named.endswith("has a context of 20: lower gate_input_tokens or lower gate_output_tokens.")


def test_a_context_that_nothing_tells_is_a_warning(fit):
    (fit.model / "config.json").write_text("{}", encoding="utf-8")
    result = fit(input_tokens=37, contexts={"small": 50, "own": None})
    assert (result["rc"], result["context"]) == (0, None)
    (warning,) = result["warned"]
    assert warning.endswith("whether requests fit profile own: context-length in the profile would tell.")
    (fit.model / "config.json").unlink()
    assert fit(input_tokens=47, contexts={"small": 50})["msg"].endswith("or raise context-length in profile small.")


def test_texts_that_cannot_be_counted_are_a_warning_and_chats_an_error(fit):
    broken = "echo it runs code of its own >&2; exit 1"
    result = fit(text(99), tokenizer=broken)
    assert (result["rc"], result["tokens"], result["line"]) == (0, None, None)
    (warning,) = result["warned"]
    assert "(it runs code of its own)" in warning and "not checked whether its texts fit" in warning
    assert "cannot write job.jsonl (it runs code of its own)" in fit(text(1), chat(1), tokenizer=broken)["msg"]
    slow = fit(chat(1), tokenizer="exec sleep 30", timeout=1)["msg"]
    assert "took more than 1 s for job.jsonl: raise timeout, or give fewer prompts." in slow


def test_prompts_are_called_what_a_person_calls_them(fit):
    assert fit("{}")["msg"].startswith("job.jsonl: line 1 has no prompt")
    assert fit(prompts="/no/such", prompts_name="job.jsonl")["msg"].startswith("Cannot read job.jsonl (No such file")
    assert fit(text(1), python="/no/such/python")["warned"][0].startswith("Cannot start /no/such/python")


@pytest.mark.parametrize(
    "config", ["[]", "{", '{"max_position_embeddings": "many", "rope_scaling": {"factor": 2.0}}', '{"rope_scaling": [1]}']
)
def test_a_config_that_is_none_is_left_to_the_check_of_the_node(fit, config):
    (fit.model / "config.json").write_text(config, encoding="utf-8")
    result = fit(input_tokens=37)
    assert (result["rc"], result["context"]) == (0, None) and result["warned"]
