# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a router is, from its state file, its process, its port and its own answer."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from ansible.module_utils.sglang_process import boot_seconds, identity
from ansible.module_utils.sglang_state import Paths, write_state
from helpers.router import FIRST, KEY, SECOND, recorded_router

SERVERS = [{"name": "here-cpu0", "url": FIRST}, {"name": "here-cpu1", "url": SECOND}]
LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.fixture
def module(load):
    return load("library", "sglang_router_info")


@pytest.fixture
def paths(tmp_path):
    made = Paths(str(tmp_path), "sglang_router")
    made.make()
    return made


def write(paths, pid, port, **more):
    write_state(
        paths.state,
        {"name": "router", "identity": identity(pid), "port": port, "launched_boot_seconds": boot_seconds() - 5,
         "launched_epoch": 1.0, "launched_at": "2026-01-01T00:00:00Z", "log": f"{paths.logs}/a.log",
         "record": {"release": "1.13.0"}, **more},
    )  # fmt: skip


def ask(call, module, paths, port, **more):
    answer = call(module, {"root": paths.root, "port": port, "api_key": KEY, "servers": SERVERS, "timeout": 2, **more})
    assert answer["rc"] == 0 and answer["changed"] is False
    return answer["router"]


def test_one_that_was_never_started(module, paths, call, helpers):
    told = ask(call, module, paths, helpers.free_port())
    assert (told["state"], told["detail"], told["pid"], told["workers"]) == ("stopped", None, None, [])


def test_a_stranger_on_its_port(module, paths, call, python):
    process, port = python(LISTEN)
    told = ask(call, module, paths, int(port))
    assert told["state"] == "stranger" and f"port {port} belongs to pid {process.pid}" in told["detail"]


def test_one_that_answers(module, paths, call, monkeypatch):
    with recorded_router() as router:
        # This very process listens for the recorded router.
        write(paths, os.getpid(), router.server_port)
        monkeypatch.setattr(module, "members", lambda *_: [module.alive(identity(os.getpid()))])
        router.workers[0].update(status="ready", is_healthy=False)
        router.workers.append({**router.workers[1], "id": "x", "url": "http://127.0.0.1:9", "labels": {}})
        told = ask(call, module, paths, router.server_port)
        assert (told["state"], told["release"], told["detail"]) == ("ready", "1.13.0", None) and told["uptime_s"] >= 5
        assert told["workers"] == [
            {"name": "here-cpu0", "url": FIRST, "state": "ready", "load": 0},
            {"name": "here-cpu1", "url": SECOND, "state": "not_ready", "load": 0},
            {"name": None, "url": "http://127.0.0.1:9", "state": "ready", "load": 0},
        ]
        router.workers.pop(0)
        assert ask(call, module, paths, router.server_port)["workers"][1] == {
            "name": "here-cpu1", "url": SECOND, "state": "absent", "load": None,
        }  # fmt: skip
        other = ask(call, module, paths, 9)
        assert other["state"] == "ready" and "the inventory says 9" in other["detail"]
        refused = ask(call, module, paths, router.server_port, api_key="wrong")
        assert refused["state"] == "stuck" and "refuses the key" in refused["detail"]
        monkeypatch.setattr(module, "requests", None)
        assert "no module requests" in ask(call, module, paths, router.server_port)["detail"]


def test_one_that_runs_and_does_not_listen(module, paths, call, python, helpers):
    process, _port = python(LISTEN)
    port = helpers.free_port()
    write(paths, process.pid, port)
    told = ask(call, module, paths, port)
    assert (told["state"], told["pid"]) == ("stuck", process.pid) and f"port {port} belongs to nobody" in told["detail"]
    with socket.create_server(("127.0.0.1", port)):
        assert "belongs to pid" in ask(call, module, paths, port)["detail"]


@pytest.mark.parametrize(
    ("log", "detail"),
    [
        ("up\nError starting router: no\n", "its process is gone: Error starting router: no"),
        ("up\n", "without a word in its log"),
        (None, "and so is its log"),
    ],
)
def test_one_that_died(module, paths, call, python, helpers, log, detail):
    process, port = python(LISTEN)
    write(paths, process.pid, int(port))
    process.kill()
    process.wait(10)
    if log:
        (Path(paths.logs) / "a.log").write_text(log)
    told = ask(call, module, paths, int(port))
    assert told["state"] == "dead" and detail in told["detail"]


def test_one_that_died_with_its_node_or_was_stopped(module, paths, call, helpers, python):
    process, port = python(LISTEN)
    write(paths, process.pid, 9)
    known = identity(process.pid)
    for more, state, detail in (
        ({"identity": {**known, "boot_id": "another"}}, "dead", "the node was restarted"),
        ({"identity": None}, "dead", "its start was cut"),
        ({"identity": None, "stopped_at": "now", "stopped_because": "maintenance"}, "stopped", "maintenance"),
    ):
        write(paths, process.pid, 9, **more)
        told = ask(call, module, paths, helpers.free_port())
        assert told["state"] == state and detail in told["detail"]
