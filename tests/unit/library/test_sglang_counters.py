# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module sglang_counters against a real HTTP server whose counter moves as the test says."""

from __future__ import annotations

import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{tp_rank="0"}} 3.0
sglang:num_queue_reqs{{tp_rank="0"}} 2.0
sglang:realtime_tokens_total{{mode="prefill_compute",tp_rank="0"}} 99999.0
sglang:realtime_tokens_total{{mode="decode",tp_rank="0"}} {tokens}
"""


@pytest.fixture
def metrics():
    """Serve the texts given, one for each request and the last one from then on; the port."""
    servers = []

    def _serve(texts, status=200):
        answers = itertools.chain(texts, itertools.repeat(texts[-1]))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = next(answers).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield _serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def read(load, call):
    module = load("library", "sglang_counters")

    def _read(*ports, **more):
        servers = [{"name": f"s{number}", "port": port} for number, port in enumerate(ports)]
        return call(module, {"servers": servers, "seconds": 1, "slices": 4, **more}, check=True)

    return _read


def test_a_speed_is_what_the_counter_gained(metrics, read):
    texts = [METRICS.format(tokens=tokens) for tokens in (1000, 1100, 1200, 1300, 1400)]
    answer = read(metrics(texts))
    (server,) = answer["servers"]
    assert (answer["changed"], server["detail"], server["running"], server["waiting"]) == (False, None, 3, 2)
    told = server["tok_s"]
    assert told["runs"] == 4
    # 100 tokens a slice of a quarter second, however late a busy machine takes it: never more than that speed by much.
    assert 0 < told["min"] <= told["median"] <= told["max"]
    assert told["median"] <= 100 / 0.25 * 1.5
    assert answer["seconds"] >= 1


def test_a_server_that_cannot_be_read_says_why(metrics, read, helpers):
    still = metrics([METRICS.format(tokens=7)])
    restarted = metrics([METRICS.format(tokens=700), METRICS.format(tokens=3)])
    without = metrics(["nothing"], status=404)
    other = metrics(["python_info 1.0\n"])
    answer = read(still, restarted, without, other, helpers.free_port())
    assert answer["rc"] == 0
    assert [server["detail"] for server in answer["servers"]] == [
        "it generated nothing in 1 s (3 requests running)",
        "it was restarted while it was read",
        "it has no /metrics: add enable-metrics to its profile",
        "its /metrics has no sglang:num_running_reqs: is it SGLang, with enable-metrics?",
        "connection refused",
    ]
    assert [server["tok_s"] for server in answer["servers"]] == [None] * 5


def test_before_the_first_token_there_is_no_counter(metrics, read):
    first = "\n".join(METRICS.format(tokens=0).splitlines()[:3]) + "\n"
    answer = read(metrics([first, *(METRICS.format(tokens=tokens) for tokens in (10, 20, 30, 40))]))
    assert answer["servers"][0]["tok_s"]["median"] > 0


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"slices": 0}])
def test_nothing_to_read_is_refused(read, bad):
    answer = read(1, **bad)
    assert answer["failed"] is True and "it must be at least 1" in answer["msg"]
