# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP client against a server that answers what it is told to, and against none."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible.module_utils.sglang_http import Client, Silent, loads, metric, server_info
from helpers.replay import RECORDINGS

DATA = Path(__file__).resolve().parents[2] / "data" / "http"
CUT = object()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.server.asked.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
        status, body, seconds = self.server.answers.get(self.path, (404, '{"detail": "Not Found"}', 0))
        time.sleep(seconds)
        self.send_response(status)
        data = b"half" if body is CUT else body.encode()
        self.send_header("Content-Length", str(len(data) + (100 if body is CUT else 0)))
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # of a client that waited no longer
            self.wfile.write(data)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """A server whose `answers` map a path to (status, body, seconds) and whose `asked` lists what came."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.answers, made.asked = {}, []
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def client(server):
    return Client("127.0.0.1", server.server_port)


def test_a_good_answer(client, server):
    server.answers["/health"] = (200, "", 0)
    server.answers["/x"] = (200, '{"a": [1]}', 0)
    assert client.status("/health", 5) == 200
    assert client.json("/x", 5) == {"a": [1]}


@pytest.mark.parametrize(
    "answer", [(500, '{"a": 1}', 0), (401, '{"error": "Unauthorized"}', 0), (200, "<html>", 0), (200, "", 0)]
)
def test_an_answer_that_is_no_json_of_status_200_is_none(client, server, answer):
    server.answers["/x"] = answer
    assert client.json("/x", 5) is None
    assert client.status("/x", 5) == answer[0]


def test_nobody_there_is_refused(helpers):
    with pytest.raises(Silent, match="^connection refused$"):
        Client("127.0.0.1", helpers.free_port()).status("/health", 5)


def test_a_late_answer_is_none(client, server):
    server.answers["/health"] = (200, "", 3)
    started = time.monotonic()
    with pytest.raises(Silent, match=re.escape("no answer from /health within 0.2 s")):
        client.status("/health", 0.2)
    assert time.monotonic() - started < 2


def test_an_answer_that_ends_too_early_is_silence(client, server):
    server.answers["/x"] = (200, CUT, 0)
    with pytest.raises(Silent, match="/x"):
        client.json("/x", 5)


def test_a_connection_that_is_closed_without_an_answer_was_cut():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_each():
            connection, _peer = listener.accept()
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=close_each)
        thread.start()
        with pytest.raises(Silent, match="^connection to /health was cut$"):
            Client("127.0.0.1", listener.getsockname()[1]).status("/health", 5)
        thread.join()


@pytest.mark.parametrize(
    ("host", "base"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fd00::2", "http://[fd00::2]:1"),
        ("node.example", "http://node.example:1"),
    ],
)
def test_where_a_server_is_asked(host, base):
    assert Client(host, 1).base == base


def test_the_key_is_sent_and_no_proxy_is_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server.answers["/x"] = (200, "{}", 0)
    assert Client("127.0.0.1", server.server_port, "secret").json("/x", 5) == {}
    assert Client("127.0.0.1", server.server_port).json("/x", 5) == {}
    keys = [headers.get("Authorization") for _method, _path, headers, _body in server.asked]
    assert keys == ["Bearer secret", None]


def test_any_request_gives_its_status_and_its_answer(client, server):
    server.answers["/x"] = (409, '{"error": "there"}', 0)
    server.answers["/y"] = (200, "OK", 0)
    assert client.ask("POST", "/x", 5, {"a": 1}) == (409, {"error": "there"})
    assert client.ask("GET", "/y", 5) == (200, "OK")
    assert [(method, path, body) for method, path, _headers, body in server.asked] == [
        ("POST", "/x", b'{"a": 1}'),
        ("GET", "/y", b""),
    ]


def test_a_generation_that_came(client, server):
    server.answers["/generate"] = (200, '{"text": " jumps over the lazy"}', 0)
    assert client.generate(5) is None
    method, path, _headers, body = server.asked[0]
    assert (method, path) == ("POST", "/generate")
    assert json.loads(body)["sampling_params"] == {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((500, "CUDA error", 0), "/generate answered 500: CUDA error"),
        ((401, '{"error": "Unauthorized"}', 0), '/generate answered 401: {"error": "Unauthorized"}'),
        ((200, "<html>", 0), "/generate answered 200 without a text: <html>"),
        ((200, "{}", 0), "/generate answered 200 without a text: {}"),
        ((200, "[1]", 0), "/generate answered 200 without a text: [1]"),
        ((200, '{"text": null}', 0), "/generate answered with NoneType for a text"),
        ((200, '{"text": ["a"]}', 0), "/generate answered with list for a text"),
    ],
)
def test_a_generation_that_did_not_come_says_what_came(client, server, answer, problem):
    server.answers["/generate"] = answer
    assert client.generate(5) == problem


def recorded(name, kind):
    return (RECORDINGS / name / f"{kind}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "release", "cap", "kv_tokens"),
    [
        ((DATA / "v1_loads.body").read_text(), "0.5.23", 2048, 8192),
        (recorded("e96_nomtp", "loads"), "0.5.17", 18, 241196),
        (recorded("e96_mtp_hicache", "loads"), "0.5.17", 4, 365151),
        (recorded("q27_mtp", "loads"), "0.5.17", 4, 1040851),
    ],
)
def test_counters_of_a_real_server(client, server, body, release, cap, kv_tokens):
    server.answers["/v1/loads?include=all"] = (200, body, 0)
    assert loads(client, 5) == {
        "release": release,
        "running": 0,
        "waiting": 0,
        "token_usage": 0.0,
        "output_tok_s": 0.0,
        "cap": cap,
        "kv_tokens": kv_tokens,
        "accept_length": None,
    }


def test_counters_of_several_ranks_are_put_together(client, server):
    entry = {"num_running_reqs": 1, "num_waiting_reqs": 2, "token_usage": 0.25, "gen_throughput": 10.04,
             "max_running_requests": 8, "max_total_num_tokens": 100}  # fmt: skip
    more = {**entry, "token_usage": 0.5, "speculative": {"accept_length": 2.5}}
    server.answers["/v1/loads?include=all"] = (200, json.dumps({"version": "1", "loads": [entry, more]}), 0)
    assert loads(client, 5) == {
        "release": "1", "running": 2, "waiting": 4, "token_usage": 0.5, "output_tok_s": 20.1, "cap": 16, "kv_tokens": 200,
        "accept_length": 2.5,
    }  # fmt: skip


def test_a_metric_is_summed_over_the_samples_that_have_its_labels():
    text = (RECORDINGS / "e96_mtp_hicache" / "metrics.txt").read_text(encoding="utf-8")
    assert metric(text, "sglang:realtime_tokens_total", mode="decode") == 9.0
    assert metric(text, "sglang:realtime_tokens_total", mode="prefill_compute") == 105.0
    assert metric(text, "sglang:realtime_tokens_total", mode="none") is None
    assert metric(text, "sglang:realtime_tokens") is None
    ranks = 'a{r="0",x="say \\"hi\\", {b}"} 1\na{r="1"} 2.5e1\na 4\n# a 9\na_total{r="0"} 7\n'
    assert [metric(ranks, "a"), metric(ranks, "a", r="1"), metric(ranks, "a", r="0")] == [30.0, 25.0, 1.0]


def test_the_text_of_a_path(client, server):
    server.answers["/metrics"] = (200, "a 1", 0)
    assert client.text("/metrics", 5) == "a 1"
    assert client.text("/other", 5) is None


@pytest.mark.parametrize("body", ["{}", '{"loads": []}', "null", "no json", "[1, 2]", '"text"'])
def test_counters_that_are_none(client, server, body):
    server.answers["/v1/loads?include=all"] = (200, body, 0)
    assert loads(client, 5) is None


def test_a_release_without_counters(client):
    assert loads(client, 5) is None
    assert server_info(client, 5) == {}


@pytest.mark.parametrize(
    ("body", "release", "cap", "kv_tokens", "model", "path"),
    [
        ((DATA / "server_info.body").read_text(), "0.5.23", 2048, 8192, "/srv/sglang/model/qwen3", "/server_info"),
        (recorded("e96_nomtp", "server_info"), "0.5.17", 18, 241196, "qwen3.6-27b", "/server_info"),
        (recorded("q27_mtp", "server_info"), "0.5.17", 4, 1040851, "qwen3.6-27b", "/get_server_info"),
    ],
)
def test_the_cap_in_force_is_not_the_argument(client, server, body, release, cap, kv_tokens, model, path):
    server.answers[path] = (200, body, 0)
    told = server_info(client, 5)
    assert (told["release"], told["cap"], told["kv_tokens"], told["served_model_name"]) == (release, cap, kv_tokens, model)
    assert told["model_path"] == json.loads(body)["model_path"]
    assert told["accept_length"] is None


def test_the_acceptance_length_since_the_start(client, server):
    server.answers["/server_info"] = (200, '{"internal_states": [{"avg_spec_accept_length": 2.75}]}', 0)
    assert server_info(client, 5)["accept_length"] == 2.75


@pytest.mark.parametrize("body", ["[1]", '"text"', '{"internal_states": []}'])
def test_server_info_of_something_else(client, server, body):
    server.answers["/server_info"] = (200, body, 0)
    assert server_info(client, 5).get("cap") is None
