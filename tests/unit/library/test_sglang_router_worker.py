# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers in and out of a router that answers as the real one was recorded to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.router import FIRST, KEY, RECORDED, SECOND, recorded_router


@pytest.fixture
def module(load, monkeypatch):
    made = load("library", "sglang_router_worker")
    monkeypatch.setattr(made, "POLL_SECONDS", 0.01)
    return made


@pytest.fixture
def router():
    with recorded_router() as made:
        yield made


def args(router, *workers, **more):
    return {
        "port": router.server_port,
        "api_key": KEY,
        "workers": [{"name": name, "url": url, "api_key": "of-the-server"} for name, url in workers],
        "timeout": 10,
        **more,
    }


BOTH = (("here-cpu0", FIRST), ("here-cpu1", SECOND))


def test_those_that_are_there_are_left_alone(module, router, call):
    answer = call(module, args(router, *BOTH), diff=True)
    assert (answer["rc"], answer["changed"], answer["added"], answer["removed"]) == (0, False, [], [])
    assert answer["routable"] == [FIRST, SECOND]
    assert answer["diff"]["before"] == answer["diff"]["after"] == f"{FIRST}\n{SECOND}\n"
    assert {method for method, _path, _body in router.asked} == {"GET"}


def test_a_new_one_is_there_when_the_module_comes_back(module, router, call):
    url = "http://127.0.0.1:41303"
    answer = call(module, args(router, ("here-cpu2", url)))
    assert (answer["changed"], answer["added"]) == (True, ["here-cpu2"])
    assert answer["routable"] == [FIRST, SECOND, url]
    labels = {"sglang_fleet_server": "here-cpu2"}
    posted = {"url": url, "runtime_type": "sglang", "labels": labels, "api_key": "of-the-server"}
    assert router.posted() == [posted], "asked once"
    assert "of-the-server" not in json.dumps(answer) and KEY not in json.dumps(answer)
    assert call(module, args(router, ("here-cpu2", url)))["changed"] is False


def test_check_mode_says_what_would_be_and_asks_for_nothing(module, router, call):
    url = "http://127.0.0.1:41303"
    answer = call(module, args(router, ("here-cpu2", url)), check=True, diff=True)
    assert (answer["changed"], answer["added"]) == (True, ["here-cpu2"])
    assert answer["diff"]["after"] == f"{FIRST}\n{SECOND}\n{url}\n"
    away = call(module, args(router, *BOTH, state="absent"), check=True, diff=True)
    assert (away["changed"], away["removed"], away["diff"]["after"]) == (True, ["here-cpu0", "here-cpu1"], "")
    assert {method for method, _path, _body in router.asked} == {"GET"}


def test_one_that_leaves_gets_no_new_request_when_the_module_comes_back(module, router, call):
    router.looks_to_forget = 1000
    router.workers[0]["load"] = 3
    answer = call(module, args(router, ("here-cpu1", SECOND), state="absent"))
    assert (answer["changed"], answer["removed"], answer["in_flight"]) == (True, ["here-cpu1"], 3)
    assert answer["routable"] == [FIRST]
    again = call(module, args(router, ("here-cpu1", SECOND), state="absent"))
    assert (again["changed"], again["removed"]) == (False, [])
    assert len(router.deleted()) == 1


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"among": ["here-cpu0"], "least": 1, "needed": ["here-cpu0"]}, None),
        ({"among": ["here-cpu9"], "least": 0}, None),
        (
            {"among": ["here-cpu0", "here-cpu9"], "least": 2},
            "router would be left with 1 of 2 other servers (here-cpu9: router does not have it) and sglang_min_ready is 2:",
        ),
        ({"needed": ["here-cpu9"]}, "here-cpu9 is needed meanwhile, and router does not have it: status.yml tells more"),
    ],
)
def test_one_goes_only_where_enough_are_left(module, router, call, server, kept, said):
    router.workers[1].update(url=server.url)
    server.statuses["/generate"] = 200
    answer = call(module, args(router, ("here-cpu1", SECOND), state="absent", keep=kept))
    assert (answer["rc"], answer.get("msg", "")[: len(said or "")]) == ((1, said) if said else (0, ""))
    assert len(router.deleted()) == (0 if said else 1)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"status": "failed"}, "router calls it failed"),
        ({"is_healthy": False}, "router calls it ready, and not healthy"),
        ({"url": None}, "it does not generate: connection refused"),
    ],
)
def test_one_that_only_seems_to_be_left_does_not_count(module, router, call, server, helpers, entry, why):
    gone = f"http://127.0.0.1:{helpers.free_port()}"
    server.statuses["/generate"] = 200
    router.workers[1].update({"url": server.url, **entry})
    router.workers[1]["url"] = router.workers[1]["url"] or gone
    leaving = args(router, ("here-cpu1", SECOND), state="absent", keep={"among": ["here-cpu0"], "least": 1})
    answer = call(module, leaving)
    assert answer["rc"] == 1 and f"left with 0 of 1 other servers (here-cpu0: {why})" in answer["msg"]
    assert call(module, leaving, check=True)["rc"] == 1
    assert router.deleted() == []


@pytest.mark.parametrize(
    ("generate", "health", "said"),
    [
        (200, None, None),
        (None, 200, None),  # ours waits behind others' requests
        (401, 200, None),
        (None, None, "it does not generate: no answer from /health within 0.3 s"),
        (500, 503, "it does not generate: /health answers 503"),
    ],
)
def test_one_that_hangs_does_not_count_and_a_busy_one_does(module, router, call, server, monkeypatch, generate, health, said):
    monkeypatch.setattr(module, "GENERATE_SECONDS", 0.1)
    monkeypatch.setattr(module, "HEALTH_SECONDS", 0.3)
    server.statuses.update({"/generate": generate, "/health": health})
    router.workers[1].update(url=server.url)
    keep = {"among": ["here-cpu0"], "least": 1, "api_keys": {"here-cpu0": "its key"}}
    answer = call(module, args(router, ("here-cpu1", SECOND), state="absent", keep=keep))
    assert answer["rc"] == (1 if said else 0) and (said or "") in answer.get("msg", "")
    assert server.keys == ["Bearer its key"] and "its key" not in json.dumps(answer)


def test_one_that_is_out_already_needs_nothing(module, router, call):
    router.workers.pop(0)
    answer = call(module, args(router, ("here-cpu1", SECOND), state="absent", keep={"needed": ["here-cpu9"], "least": 1}))
    assert (answer["rc"], answer["changed"]) == (0, False)


def test_one_that_is_leaving_is_waited_for_and_put_back(module, router, call):
    call(module, args(router, ("here-cpu1", SECOND), state="absent"))
    answer = call(module, args(router, ("here-cpu1", SECOND)))
    assert (answer["rc"], answer["added"], answer["routable"]) == (0, ["here-cpu1"], [FIRST, SECOND])
    assert router.number == 1


def test_one_that_is_known_and_not_routed_to_is_waited_for(module, router, call):
    router.workers[0].update(status="not_ready", is_healthy=False)
    router.due.append((3, lambda: router.workers[0].update(status="ready", is_healthy=True)))
    answer = call(module, args(router, *BOTH))
    assert (answer["rc"], answer["changed"], answer["routable"]) == (0, False, [FIRST, SECOND])
    assert router.posted() == []


def test_one_whose_port_changed_is_found_by_its_name(module, router, call):
    url = "http://127.0.0.1:41309"
    moved = call(module, args(router, ("here-cpu1", url)))
    assert (moved["added"], moved["removed"]) == (["here-cpu1"], ["here-cpu1"])
    assert moved["routable"] == [FIRST, url]
    gone = call(module, args(router, ("here-cpu1", SECOND), state="absent"))
    assert (gone["removed"], gone["routable"]) == (["here-cpu1"], [FIRST])


def test_a_registration_that_failed_is_tried_again(module, router, call):
    url = "http://127.0.0.1:41303"
    forgotten = router.register({"url": url})
    router.due.clear()
    router.due.append((3, lambda: router.pending.pop(forgotten)))
    answer = call(module, args(router, ("here-cpu2", url)))
    assert (answer["rc"], answer["routable"]) == (0, [FIRST, SECOND, url])


def test_without_waiting_it_is_accepted_and_no_more(module, router, call):
    router.looks_to_join = None
    answer = call(module, args(router, ("here-cpu2", "http://127.0.0.1:41303"), wait=False))
    assert (answer["changed"], answer["routable"]) == (True, [FIRST, SECOND])


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        status = self.server.statuses.get(self.path, 404)
        if status is None:  # it hangs
            self.server.ended.wait(10)
            return
        body = b'{"text": "a"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers.get("Authorization"))
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """A server behind the router, answering `statuses` by path; `url` is where."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    made.daemon_threads, made.ended = True, threading.Event()
    made.statuses, made.keys, made.url = {}, [], f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.ended.set()
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        ({"/v1/models": 401}, "it refuses the key that it was registered with: sglang_api_key is not the one"),
        ({"/v1/models": 200, "/health": 503}, "/health answers 503"),
        ({"/v1/models": 200, "/health": 200}, "the router's log has the reason"),
    ],
)
def test_one_that_the_router_never_takes_is_a_sentence(module, router, call, server, statuses, why):
    router.looks_to_join = None
    server.statuses.update(statuses)
    answer = call(module, args(router, ("here-cpu2", server.url), timeout=1))
    assert answer["rc"] == 1
    assert answer["msg"].startswith(f"router does not route to here-cpu2 ({server.url}) after 1 s: ") and why in answer["msg"]


def test_one_that_is_not_there_is_a_sentence(module, router, call, helpers):
    router.looks_to_join = None
    answer = call(module, args(router, ("here-cpu2", f"http://127.0.0.1:{helpers.free_port()}"), timeout=1))
    assert "from this node it gives no answer either: connection refused" in answer["msg"]


def test_only_those_that_serve(module, router, call, server, helpers):
    server.statuses["/health"] = 200
    dead = f"http://127.0.0.1:{helpers.free_port()}"
    answer = call(module, args(router, ("here-cpu2", server.url), ("here-cpu3", dead), ready_only=True))
    assert (answer["rc"], answer["added"]) == (0, ["here-cpu2"])
    assert answer["skipped"] == [{"name": "here-cpu3", "detail": "connection refused"}]


def test_a_url_that_the_router_does_not_take(module, router, call):
    answer = call(module, args(router, ("here-cpu2", "gpu")))
    assert answer["rc"] == 1 and "it answered 400: Invalid value for field 'worker_url'" in answer["msg"]


def test_one_that_it_will_not_let_go(module, router, call):
    known = router.workers[0]["id"]
    router.faults[f"/workers/{known}"] = {"status": 500, "body": {"error": "no"}}
    answer = call(module, args(router, ("here-cpu1", SECOND), state="absent"))
    assert answer["msg"] == f"router did not take out {SECOND}: it answered 500: no"


def test_one_that_it_forgot_meanwhile_is_out(module, router, call):
    known = router.workers[0]["id"]
    router.faults[f"/workers/{known}"] = RECORDED["not_found"]
    router.due.append((2, lambda: router.workers.pop(0)))
    answer = call(module, args(router, ("here-cpu1", SECOND), state="absent"))
    assert (answer["rc"], answer["routable"]) == (0, [FIRST])


def test_no_router_routes_nothing(module, call, helpers, warned):
    port = helpers.free_port()
    asked = {"port": port, "workers": [{"name": "n", "url": FIRST}]}
    out = call(module, {**asked, "state": "absent"})
    assert (out["rc"], out["changed"], out["routable"]) == (0, False, [])
    assert "nothing is routed" in warned[0]
    kept = call(module, {**asked, "state": "absent", "keep": {"among": ["n"], "least": 1}})
    assert kept["rc"] == 1 and "gives no answer (connection refused)" in kept["msg"]
    into = call(module, asked)
    assert into["rc"] == 1 and f"router at http://127.0.0.1:{port} gives no answer (connection refused)" in into["msg"]


def test_a_wrong_key_is_a_sentence(module, router, call):
    answer = call(module, args(router, *BOTH, api_key="wrong"))
    assert answer["rc"] == 1 and "refuses the key" in answer["msg"] and "wrong" not in answer["msg"]


def test_something_else_on_the_port(module, call, server):
    asked = {"port": server.server_port, "workers": [{"name": "n", "url": FIRST}], "state": "absent"}
    answer = call(module, asked)
    assert answer["rc"] == 1 and "is it SGLang's router?" in answer["msg"]
