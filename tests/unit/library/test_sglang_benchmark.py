# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module with a server and a Python of the engine that only repeat what real ones were recorded to say."""

from __future__ import annotations

import http.server
import json
import os
import socket
import stat
import sys
import threading
from pathlib import Path

import pytest
import sglang_benchmark
from ansible.module_utils.testing import patch_module_args

DATA = Path(__file__).resolve().parents[2] / "data" / "bench_serving"
REFUSAL = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
KEY = "a-key-for-tests"


class Handler(http.server.BaseHTTPRequestHandler):
    generate = (400, {"error": {"message": REFUSAL}})

    def _send(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self._send(401, {"error": "Unauthorized"})
        else:
            self._send(200, {"object": "list", "data": [{"id": "tiny"}]})

    def do_POST(self):
        self._send(*self.generate)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        yield httpd
        httpd.shutdown()


@pytest.fixture
def engine(tmp_path):
    """A `python` that leaves recorded records where the driver would: called as `python -c DRIVER RECORDS COMMANDS`."""

    def make(name=None, script=""):
        path = tmp_path / "python"
        copy = f'cat "{DATA / name}.jsonl" > "$3"\n' if name else ""
        path.write_text(f"#!/bin/sh\n{copy}{script}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture
def run(tmp_path, capsys, server):
    (tmp_path / "model").mkdir()

    def call(check=False, **options):
        arguments = {
            "port": server.server_address[1],
            "served_model_name": "tiny",
            "tokenizer": str(tmp_path / "model"),
            "concurrencies": [1, 8],
            "output_dir": str(tmp_path / "out"),
            "label": "20250131T120000Z",
            "api_key": KEY,
            "_ansible_check_mode": check,
        }
        arguments.update(options)
        with patch_module_args(arguments), pytest.raises(SystemExit):
            sglang_benchmark.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_a_measurement_returns_a_run_for_each_concurrency_and_changes_nothing(run, engine):
    result = run(python=engine("measured"), seed=1)
    assert result["changed"] is False
    assert [each["concurrency"] for each in result["runs"]] == [1, 8]
    assert [each["seed"] for each in result["runs"]] == [1, 2]
    assert result["runs"][0]["output_tok_s"] == 404.458
    assert "--max-concurrency 8" in result["command"][1]


def test_a_concurrency_may_be_repeated_with_other_prompts_each_time(run, engine):
    """So the gate of a swap gets pairs of runs."""
    commands = run(python=engine(script="exit 1"), concurrencies=[4, 4], seed=1)["command"]
    assert ["--max-concurrency 4" in line for line in commands] == [True, True]
    assert [f"--seed {seed}" in line for seed, line in zip((1, 2), commands)] == [True, True]


def prompts(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_prompts_are_sent_and_leave_nothing_behind(run, engine, tmp_path):
    path = prompts(tmp_path, *({"prompt": f"question {number}"} for number in range(32)))
    asked = tmp_path / "asked"
    result = run(
        python=engine("measured", f'echo "$4" > {asked}; cat "$(dirname "$3")/prompts.jsonl" >> {asked}'), prompts=path
    )
    assert result["changed"] is False
    commands, *lines = asked.read_text(encoding="utf-8").splitlines()
    sent = json.loads(commands)[0][json.loads(commands)[0].index("--dataset-path") + 1]
    assert not os.path.exists(sent)
    assert json.loads(lines[0])["conversations"][0]["content"] == "question 0"
    assert len(lines) == 32
    assert "--dataset-path PROMPTS" in result["command"][0]


def test_chats_are_written_with_the_models_template(run, engine, tmp_path):
    chats = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(31)]
    path = prompts(tmp_path, {"text": "as it is"}, *chats)
    asked = tmp_path / "asked"
    answer = (
        "import json, sys\n"
        'write = lambda prompt: prompt if isinstance(prompt, str) else "<" + prompt[0]["content"] + ">"\n'
        "print(json.dumps([[write(prompt), 3] for prompt in json.load(sys.stdin)]))"
    )
    # What the driver of the tokenizer would answer: a text as it is, the content of a chat between marks.
    script = f"""case "$2" in
*apply_chat_template*) {sys.executable} -c '{answer}';;
*) cat "{DATA}/measured.jsonl" > "$3"; cat "$(dirname "$3")/prompts.jsonl" > {asked};;
esac"""
    run(python=engine(script=script), prompts=path)
    texts = [json.loads(line)["conversations"][0]["content"] for line in asked.read_text(encoding="utf-8").splitlines()]
    assert texts[:3] == ["as it is", "<question 0>", "<question 1>"]
    failing = run(python=engine(script="echo no template >&2; exit 1"), prompts=path, label="again")
    assert "cannot write" in failing["msg"] and "(no template)" in failing["msg"]


def test_bad_prompts_are_told(run, engine, tmp_path):
    assert "Cannot read /no/such (No such file" in run(python=engine("measured"), prompts="/no/such")["msg"]
    few = run(python=engine("measured"), prompts=prompts(tmp_path, {"prompt": "one"}), label="few")
    assert "has 1 prompts and concurrency 8 sends 32" in few["msg"]
    bad = run(python=engine("measured"), prompts=prompts(tmp_path, {"question": "one"}), label="bad")
    assert "line 1 has no prompt" in bad["msg"]


def test_the_stored_records_hold_no_key_of_the_server(run, engine):
    result = run(python=engine("measured"))
    stored = Path(result["raw"]).read_text(encoding="utf-8")
    assert len(stored.splitlines()) == 2
    first = (DATA / "measured.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(first)["server_info"]["api_key"] not in stored


def test_the_key_is_in_the_environment_only(run, engine):
    script = 'echo "key=$OPENAI_API_KEY"; echo "$@" | grep -c "$OPENAI_API_KEY"; exit 3'
    result = run(python=engine(script=script))
    log = Path(result["log"]).read_text(encoding="utf-8")
    assert f"key={KEY}" in log
    assert log.splitlines()[-1] == "0"
    assert KEY not in json.dumps(result)


def test_a_key_of_the_login_is_not_sent(run, engine, monkeypatch):
    monkeypatch.setattr(sglang_benchmark.Server, "check", lambda self, name: None)
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-login")
    result = run(python=engine("measured", 'echo "key=$OPENAI_API_KEY"'), api_key=None)
    assert Path(result["log"]).read_text(encoding="utf-8") == "key=\n"


def test_no_seed_takes_new_prompts(run, engine, monkeypatch):
    monkeypatch.setattr(sglang_benchmark.time, "time", lambda: 1700000000.5)
    assert [each["seed"] for each in run(python=engine("measured"))["runs"]] == [1700000000, 1700000001]


def test_a_label_is_used_once(run, engine):
    run(python=engine("measured"))
    result = run(python=engine("measured"))
    assert result["failed"] is True
    assert "20250131T120000Z.jsonl exists already" in result["msg"]


def test_check_mode_tells_the_commands_and_touches_nothing(run, tmp_path):
    result = run(check=True, python="/no/such/python", port=1)
    assert result["skipped"] is True
    assert result["changed"] is False
    assert len(result["command"]) == 2
    assert not (tmp_path / "out").exists()


def test_requests_refused_inside_the_stream_fail_with_the_servers_reason(run, engine):
    result = run(python=engine("too_long"))
    assert result["failed"] is True
    assert result["msg"] == (
        f"4 of 4 requests to http://127.0.0.1:{result_port(result)} failed at concurrency 2, the first with: {REFUSAL}"
    )
    assert result["errors"] == [REFUSAL]
    assert result["runs"][0]["failed"] == 4
    assert os.path.exists(result["raw"])


def test_a_prompt_that_is_too_long_is_named_with_the_servers_reason(run, engine, server, tmp_path):
    sent = []

    class Recorded(Handler):
        def do_POST(self):
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            super().do_POST()

    server.RequestHandlerClass = Recorded
    lines = [{"prompt": "short"} for _ in range(31)]
    lines.insert(7, {"prompt": "a longer one " * 100})
    result = run(python=engine("too_long"), prompts=prompts(tmp_path, *lines))
    told = f"{REFUSAL} (prompt 8, the longest with 1,300 characters)"
    assert result["msg"].endswith(f"failed at concurrency 2, the first with: {told}")
    assert result["errors"] == [told]
    assert [(body["text"], body["sampling_params"]["max_new_tokens"]) for body in sent] == [("a longer one " * 100, 256)]


def test_a_lost_connection_fails_with_its_error(run, engine):
    result = run(python=engine("dropped"))
    assert "4 of 16 requests" in result["msg"]
    assert result["errors"] == ["aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected"]


def test_an_answer_cut_short_fails(run, engine):
    assert "the answer ended after 245 of 1500 tokens" in run(python=engine("aborted"))["msg"]


def test_another_model_at_the_port_is_refused(run, engine):
    result = run(python=engine("measured"), served_model_name="big")
    assert "serves tiny, not big" in result["msg"]
    assert result["runs"] == []


def test_a_wrong_key_is_told(run, engine):
    assert "refused the API key (HTTP 401)" in run(python=engine("measured"), api_key="wrong")["msg"]


def test_no_server_is_told(run, engine):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = run(python=engine("measured"), port=free.getsockname()[1])
    assert "No server answers at" in result["msg"]


def test_a_missing_tokenizer_folder_is_told(run, engine):
    assert "There is no folder /no/such/model" in run(python=engine("measured"), tokenizer="/no/such/model")["msg"]


def test_a_missing_python_is_told(run):
    assert "Cannot start /no/such/python" in run(python="/no/such/python")["msg"]


def test_the_timeout_names_the_concurrency_that_was_running(run, engine):
    result = run(python=engine(script="exec sleep 20"), timeout=1)
    assert "took more than 1 s and was stopped at concurrency 1" in result["msg"]
    assert result["elapsed"] < 10


def test_a_crash_of_the_benchmark_is_told_with_its_last_lines(run, engine, monkeypatch):
    monkeypatch.setattr(Handler, "generate", (200, {"text": "fine"}))
    script = "echo Traceback; echo \"ModuleNotFoundError: No module named 'datasets'\"; exit 1"
    result = run(python=engine(script=script))
    assert "exit code 1 at concurrency 1: ModuleNotFoundError: No module named 'datasets'" in result["msg"]
    assert result["output"][0] == "Traceback"


def test_a_server_that_dies_meanwhile_is_told(run, engine, monkeypatch):
    monkeypatch.setattr(sglang_benchmark.Server, "is_up", lambda self: False)
    assert "stopped answering during the benchmark at concurrency 1" in run(python=engine(script="exit 1"))["msg"]


def test_a_missing_record_is_told(run, engine, tmp_path):
    result = run(python=engine(script="true"))
    assert "ended without a record of concurrency 1" in result["msg"]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"concurrencies": []}, "at least one number"),
        ({"concurrencies": [0]}, "each 1 or more"),
        ({"output_tokens": 1}, "output_tokens is 1: it must be at least 2"),
        ({"label": "a/b"}, "without a folder"),
    ],
)
def test_values_that_make_no_sense_are_refused(run, options, text):
    assert text in run(**options)["msg"]


def result_port(result):
    return result["command"][0].split("--base-url http://127.0.0.1:")[1].split()[0]
