# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""On records that sglang.bench_serving 0.5.23 wrote against a real server (long lists cut short)."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from ansible.module_utils import sglang_benchmark as benchmark

DATA = Path(__file__).resolve().parents[2] / "data" / "bench_serving"


def recorded(name):
    return benchmark.parse_records((DATA / f"{name}.jsonl").read_text(encoding="utf-8"))


def test_requests_are_a_multiple_of_the_concurrency_with_a_least_number():
    assert benchmark.number_of_requests(16, 4, 8) == 64
    assert benchmark.number_of_requests(1, 4, 8) == 8


def test_command_line_asks_for_fixed_lengths_and_never_looks_a_model_up():
    arguments = benchmark.command_line("http://127.0.0.1:1", "tiny", "/model", 8, 32, 128, 256, 7, "/out")
    flags = dict(zip(arguments, arguments[1:]))
    assert flags["--random-range-ratio"] == "1"
    assert flags["--random-input-len"] == "128"
    assert flags["--random-output-len"] == "256"
    assert flags["--model"] == flags["--tokenizer"] == "/model"
    assert flags["--num-prompts"] == "32"
    assert flags["--max-concurrency"] == flags["--warmup-requests"] == "8"
    assert flags["--seed"] == "7"


def test_texts_of_a_file_are_sent_with_an_empty_cache():
    arguments = benchmark.command_line("http://127.0.0.1:1", "tiny", "/model", 8, 32, 128, 256, 7, "/out", "/prompts")
    flags = dict(zip(arguments, arguments[1:]))
    assert (flags["--dataset-name"], flags["--dataset-path"], flags["--sharegpt-output-len"]) == ("custom", "/prompts", "256")
    assert "--flush-cache" in arguments
    # bench_serving refuses token ids with texts, and the lengths of random tokens are not those of texts.
    assert not {"--tokenize-prompt", "--random-input-len"} & set(arguments)


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"prompt": "a b"}, "a b"),
        ({"text": "a\u2028b"}, "a\u2028b"),
        ({"messages": [{"role": "user", "content": "q"}]}, [{"role": "user", "content": "q"}]),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [{"role": "user", "content": "q"}],
        ),
    ],
)
def test_prompts_are_read_in_the_forms_that_people_have(line, prompt):
    assert benchmark.read_prompts("\n" + json.dumps(line, ensure_ascii=False) + "\n\n") == {2: prompt}


@pytest.mark.parametrize(
    "line",
    [
        "[]", "3", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"messages": []}', '{"messages": "q"}',
        '{"messages": [{"role": "user", "content": ["an image"]}]}', '{"conversations": [{"from": "gpt", "value": "a"}]}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(line):
    with pytest.raises(ValueError, match="line 2 has no prompt"):
        benchmark.read_prompts('{"prompt": "good"}\n' + line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "line 2 is no JSON"),
        ('{"prompt": "cut', "line 2 is no JSON"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "line 2 has prompt and messages: which of them"),
    ],
)
def test_a_line_that_cannot_be_meant_says_why(line, said):
    with pytest.raises(ValueError, match=said):
        benchmark.read_prompts('{"prompt": "good"}\n' + line)


def test_the_dataset_has_a_line_a_text():
    (line,) = benchmark.custom_dataset(["one\ntwo"]).splitlines()
    assert json.loads(line)["conversations"][0]["content"] == "one\ntwo"


def test_an_answer_to_a_text_is_short_of_what_was_asked_of_texts():
    (record, *_rest) = recorded("measured")
    assert benchmark.failures({**record, "sharegpt_output_len": 64, "random_output_len": 1024}) == []
    assert len(benchmark.failures({**record, "sharegpt_output_len": 128, "random_output_len": 64})) == 8


def test_a_measured_run_is_summed_up_with_the_figures_of_bench_serving():
    first, second = recorded("measured")
    assert benchmark.failures(first) == []
    assert benchmark.summarise(first, seed=1) == {
        "concurrency": 1,
        "requests": 8,
        "completed": 8,
        "failed": 0,
        "seed": 1,
        "duration_s": 1.266,
        "output_tok_s": 404.458,
        "total_tok_s": 808.916,
        "input_tokens": 512,
        "output_tokens": 512,
        "ttft_ms": {"median": 8.907, "p99": 40.52},
        "tpot_ms": {"median": 2.284, "p99": 2.529},
        "accept_length": None,
    }
    assert benchmark.summarise(second, seed=2)["concurrency"] == 8


@pytest.mark.parametrize("reported, expected", [(2.5, 2.5), (0, None), (None, None)])
def test_acceptance_length_is_null_without_speculation(reported, expected):
    record = dict(recorded("measured")[0], accept_length=reported)
    assert benchmark.summarise(record, seed=1)["accept_length"] == expected


def test_releases_without_the_key_have_no_acceptance_length():
    record = recorded("measured")[0]
    del record["accept_length"]
    assert benchmark.summarise(record, seed=1)["accept_length"] is None


@pytest.mark.parametrize(
    "name, failed, requests, text",
    [
        ("too_long", 4, 4, benchmark.NO_TEXT),
        ("partly", 12, 16, benchmark.NO_TEXT),
        ("aborted", 4, 4, "the answer ended after 245 of 1500 tokens"),
        ("dropped", 4, 16, "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected"),
    ],
)
def test_every_kind_of_failed_request_is_found(name, failed, requests, text):
    record = recorded(name)[0]
    found = benchmark.failures(record)
    assert found == [text] * failed
    run = benchmark.summarise(record, seed=1)
    assert (run["requests"], run["completed"], run["failed"]) == (requests, requests - failed, failed)


def test_bench_serving_itself_calls_refused_requests_completed():
    assert recorded("too_long")[0]["completed"] == 4


def test_a_run_with_failures_has_no_figures():
    run = benchmark.summarise(recorded("partly")[0], seed=1)
    assert run["output_tok_s"] is None
    assert run["ttft_ms"] == run["tpot_ms"] == {"median": None, "p99": None}


def test_what_is_stored_has_no_secrets_and_is_strict_json():
    record = recorded("measured")[0]
    key = record["server_info"]["api_key"]
    stored = json.dumps(benchmark.storable(record, seed=5), allow_nan=False)
    assert key and key not in stored
    assert json.loads(stored)["sglang_version"] == "0.5.23"
    assert json.loads(stored)["seed"] == 5
    assert json.loads(stored)["request_rate"] == "inf"


def test_not_a_number_is_stored_as_null():
    record = dict(recorded("measured")[0], p99_ttft_ms=float("nan"))
    assert benchmark.storable(record, seed=1)["p99_ttft_ms"] is None
    assert benchmark.summarise(record, seed=1)["ttft_ms"]["p99"] is None


def test_a_line_cut_off_by_a_kill_is_left_out():
    text = (DATA / "measured.jsonl").read_text(encoding="utf-8")
    assert len(benchmark.parse_records(text[:-100])) == 1


@pytest.mark.parametrize("first, ran", [("measured", 2), ("too_long", 1), ("dropped", 1)])
def test_the_driver_stops_at_a_run_with_failures(tmp_path, monkeypatch, first, ran):
    calls = []
    line = (DATA / f"{first}.jsonl").read_text(encoding="utf-8").splitlines()[0]
    output = tmp_path / "records.jsonl"

    def run_module(name, run_name, alter_sys):
        calls.append((name, run_name, list(sys.argv)))
        with open(output, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    monkeypatch.setitem(sys.modules, "runpy", types.SimpleNamespace(run_module=run_module))
    monkeypatch.setattr(sys, "argv", ["-c", str(output), json.dumps([["--seed", "1"], ["--seed", "2"]])])
    exec(benchmark.DRIVER, {})
    assert len(calls) == ran
    assert calls[0] == ("sglang.bench_serving", "__main__", ["bench_serving", "--seed", "1"])


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"text_config": {"max_position_embeddings": 262144}, "max_position_embeddings": 1}, 262144),
        ({"max_position_embeddings": 2048, "seq_length": 8192}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        # Whose figure is the stretched one already.
        ({"max_position_embeddings": 163840, "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096}}, 163840),
        ({"max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}, 131072),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        ({"hidden_size": 64}, None),
    ],
)
def test_a_models_context_is_what_sglang_makes_of_its_config(config, context):
    assert benchmark.model_context(config) == context


@pytest.mark.parametrize(
    ("contexts", "own", "said"),
    [
        ({"a": 100}, 4096, None),
        ({"a": None}, None, None),
        ({"a": 99, "b": 98}, 100, "raise context-length in profile a and b (the model has 100)."),
        ({"a": 99}, None, "raise context-length in profile a."),
        ({"a": 99, "b": None}, 99, "profile b has a context of 99, as the model: shorten it or ask for less output."),
        ({"a": 50}, 99, "profile a has a context of 50: shorten it or ask for less output."),
    ],
)
def test_only_what_helps_is_advised(contexts, own, said):
    told = benchmark.misfit("it", 60, 40, contexts, own)
    assert told is None if said is None else told.endswith(said)
