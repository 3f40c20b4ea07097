# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the nodes said, put together; what runs against what the inventory says today."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleTypeError
from sglang_status import TOLD, drift, fleet_status, router_status

ARGV = ["/venv/bin/python", "-m", "sglang.launch_server"]
FLAGS = [["--enable-metrics"], ["--mem-fraction-static", "0.85"]]
STARTED = {"argv": ARGV, "flags": FLAGS, "env": {"A": "1"}}
RUNS = {"name": "n-gpu0", "state": "ready", "pid": 42, "profile": "nomtp", "started_with": STARTED}
GONE = "enable-metrics: set -> unset"
WANTED = {"spec": {"argv": ARGV, "flags": FLAGS, "env": {"A": "1"}}}


def wanted(**changes):
    return {"spec": {**WANTED["spec"], **changes}}


def server(**more):
    answer = {"servers": [RUNS], "node": {"gpus": [], "host_memory": {"total_gb": 1.0}, "boot_id": "b"}}
    return {"name": "n-gpu0", "node": "n", "url": "http://127.0.0.1:1", "port": "1", "gpus": [0], "asked_profile": "",
            "wanted": WANTED, "answer": answer, **more}  # fmt: skip


def test_what_runs_as_asked_for_has_no_drift():
    assert drift(RUNS, WANTED, "") == []
    assert drift(RUNS, WANTED, "nomtp") == []


@pytest.mark.parametrize(
    ("today", "asked", "fragments"),
    [
        (WANTED, "mtp", ["profile: nomtp -> mtp"]),
        (wanted(flags=[["--enable-metrics"]]), "", ["mem-fraction-static: 0.85 -> unset"]),
        (wanted(flags=[["--mem-fraction-static", "0.9"]]), "", [GONE, "mem-fraction-static: 0.85 -> 0.9"]),
        (wanted(env={"B": "2"}), "", ["A: 1 -> unset", "B: unset -> 2"]),
        (wanted(argv=["/new/python", *ARGV[1:]]), "", ["engine: /venv/bin/python -> /new/python"]),
        ({"msg": "model 'm' is not known"}, "", ["today's inventory has no start for it: model 'm' is not known"]),
        ({}, "mtp", ["profile: nomtp -> mtp", "today's inventory has no start for it: unknown reason"]),
    ],
)  # fmt: skip
def test_drift_names_what_differs(today, asked, fragments):
    assert drift(RUNS, today, asked) == fragments


@pytest.mark.parametrize("told", [{}, {**RUNS, "pid": None}, {**RUNS, "started_with": None}])
def test_what_does_not_run_has_no_drift(told):
    assert drift(told, wanted(env={}), "mtp") == []


def test_a_fleet_is_servers_and_nodes():
    status = fleet_status([server()])
    (entry,) = status["servers"]
    assert list(entry) == ["name", "node", "url", "port", "gpus", *TOLD, "drift"]
    assert (entry["state"], entry["port"], entry["pid"], entry["kv_tokens"], entry["drift"]) == ("ready", 1, 42, None, [])
    assert status["nodes"] == [
        {"name": "n", "state": "reached", "detail": None, "gpus": [], "host_memory": {"total_gb": 1.0}, "boot_id": "b"}
    ]
    assert status["schema"] == 1


def test_a_node_that_did_not_answer():
    answer = {"unreachable": True, "msg": "Traceback\nssh: no route to host\n"}
    status = fleet_status([server(answer=answer), server(name="n-gpu1", answer=answer)])
    assert [(entry["state"], entry["detail"], entry["pid"]) for entry in status["servers"]] == [
        ("unreachable", "ssh: no route to host", None)
    ] * 2
    assert [(node["name"], node["state"], node["gpus"]) for node in status["nodes"]] == [("n", "unreachable", None)]


def test_an_answer_without_any_word():
    (entry,) = fleet_status([server(answer={})])["servers"]
    assert (entry["state"], entry["detail"]) == ("unreachable", "no answer")
    (entry,) = fleet_status([server(answer={"msg": ""})])["servers"]
    assert entry["state"] == "unreachable"


@pytest.mark.parametrize("servers", [{}, None, "text"])
def test_what_is_no_list_is_refused(servers):
    with pytest.raises(AnsibleTypeError, match="needs a list of servers, got"):
        fleet_status(servers)


ROUTER = {"state": "ready", "detail": None, "pid": 7, "uptime_s": 60, "launched_at": "t", "release": "1.13.0", "log": "/l",
          "workers": [{"name": "n-gpu0", "url": "http://127.0.0.1:1", "state": "ready", "load": 2}]}  # fmt: skip


def test_a_fleet_without_a_router():
    assert fleet_status([])["router"] is None


def test_a_router_that_answers():
    asked = {"node": "n", "url": "http://127.0.0.1:2", "answer": {"router": ROUTER}}
    assert fleet_status([], router=asked)["router"] == {"node": "n", "url": "http://127.0.0.1:2", **ROUTER}


def test_a_router_whose_node_does_not_answer():
    told = router_status({"node": "n", "url": None, "answer": {"unreachable": True, "msg": "Traceback\nno route to host"}})
    assert (told["state"], told["detail"], told["pid"], told["workers"]) == ("unreachable", "no route to host", None, [])
    assert set(told) == {"node", "url", *ROUTER}
    assert router_status({"node": "n", "url": None, "answer": {}})["detail"] == "no answer"


def test_a_router_of_another_kind():
    with pytest.raises(AnsibleTypeError):
        router_status([])
