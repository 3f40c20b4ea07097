# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two servers of real SGLang behind the real router change their profile under traffic, and keep what was faster."""

from __future__ import annotations

import json
import time

import pytest
import requests
from ansible.module_utils.sglang_process import wait_until
from helpers.traffic import Clients

from ..conftest import ROOT, free_ports

pytestmark = pytest.mark.engine

NAMES = ("here-cpu0", "here-cpu1")
KEY = "key of the test"
BASE = {"requires": {"device": "cpu"}, "args": {"enable-metrics": True, "max-running-requests": 48}}
PROFILES = {
    "nomtp": BASE,
    "small": {**BASE, "args": {**BASE["args"], "max-running-requests": 8}},
    "bad": {**BASE, "args": {**BASE["args"], "context-length": 999999}},
    # One request at a time: what four clients send waits in its queue.
    "slow": {**BASE, "args": {**BASE["args"], "max-running-requests": 1}},
}


def state(fleet, number):
    return json.loads((fleet.root / f"run/sglang_cpu{number}.json").read_text())


def routed_to(fleet):
    """Ports that the router sends requests to."""
    asked = {"url": f"http://127.0.0.1:{fleet.options['sglang_router_port']}/workers", "timeout": 10}
    workers = requests.get(headers={"Authorization": f"Bearer {KEY}"}, **asked).json()["workers"]
    return sorted(int(worker["url"].rpartition(":")[2]) for worker in workers if worker["status"] == "ready")


def profile_for_prometheus(fleet, name):
    return json.loads((fleet.artifacts / f"prometheus/targets/{name}.json").read_text())[0]["labels"]["profile"]


def assert_both_are_routed_to(fleet):
    # The router's own look at a server takes its time on a busy machine.
    assert wait_until(lambda: routed_to(fleet) == sorted(fleet.ports), 90), (routed_to(fleet), fleet.ports)


def clients_of(fleet, **more):
    return Clients(fleet.options["sglang_router_port"], KEY, servers=fleet.ports, **more)


@pytest.fixture(scope="module")
def deployed(local_fleet):
    port, metrics = free_ports(2)
    local_fleet.options |= {
        "sglang_profiles": PROFILES,
        "settle": [2],
        "sglang_router_enabled": True,
        "sglang_router_port": port,
        "sglang_router_metrics_port": metrics,
        "sglang_router_venv": str(ROOT / ".demo" / "router"),
    }
    first = local_fleet.run("deploy", profile="nomtp", benchmark=False, prometheus=True)
    assert first.rc == 0, first.stdout
    return first


def test_a_roll_under_traffic_takes_one_server_out_at_a_time_and_fails_no_request(deployed, local_fleet):
    with clients_of(local_fleet) as clients:
        assert wait_until(lambda: clients.answers[200] >= 20, 60)
        began = time.monotonic()
        rolled = local_fleet.run("swap", profile="small")
        wall = time.monotonic() - began
    assert rolled.rc == 0, rolled.stdout
    assert set(clients.answers) == {200}, (clients.answers, clients.wrong)
    assert clients.most_out == 1, "never both, and one at some time"
    for number, name in enumerate(NAMES):
        other = f"http://127.0.0.1:{local_fleet.ports[1 - number]}"
        left = rolled.tasks["Take the server out of the router"][name]
        assert (left["removed"], left["routable"]) == ([name], [other])
        assert rolled.tasks["Put the server behind the router"][name]["added"] == [name]
        assert rolled.tasks["Start the server"][name]["killed"] == [], "it had nothing left to do"
    assert_both_are_routed_to(local_fleet)
    results = json.loads(next((local_fleet.artifacts / "swaps").glob("*.json")).read_text())["servers"]
    assert [server["result"]["outcome"] for server in results] == ["swapped", "swapped"]
    assert [state(local_fleet, number)["profile"] for number in (0, 1)] == ["small", "small"]
    assert [profile_for_prometheus(local_fleet, name) for name in NAMES] == ["small", "small"]
    for server in results:
        spent = server["result"]["seconds"]
        # The bound is one for a busy machine; benchmarks/swap.py measures what it is.
        assert 0 < spent["batch"] - sum(spent[step] for step in ("drain", "stop", "start", "settle")) < 30, spent
        assert spent["stop"] > 0 and spent["out"] < spent["batch"]
    assert sum(server["result"]["seconds"]["batch"] for server in results) < wall

    again = local_fleet.run("swap", profile="small")
    assert again.rc == 0 and [again.changed(name) for name in NAMES] == [0, 0], again.stdout
    shown = local_fleet.run("swap", "--check --diff", profile="nomtp")
    assert shown.rc == 0, shown.stdout
    assert "max-running-requests: 8 -> 48" in next(iter(shown.tasks["Tell what will change"].values()))["msg"]
    for name in NAMES:
        (diff,) = (part for part in shown.tasks["Start the server"][name]["diff"] if "process" in part["before_header"])
        assert "\n8\n" in diff["before"] and "\n48\n" in diff["after"]
    assert [state(local_fleet, number)["profile"] for number in (0, 1)] == ["small", "small"], "nothing was touched"


def test_a_server_that_the_router_lost_keeps_the_other_one_there_and_is_put_back(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    api, key = f"http://127.0.0.1:{local_fleet.options['sglang_router_port']}/workers", {"Authorization": f"Bearer {KEY}"}

    def lose():
        listed = requests.get(api, headers=key, timeout=10).json()["workers"]
        (other,) = (worker["id"] for worker in listed if worker["url"].endswith(f":{local_fleet.ports[1]}"))
        requests.delete(f"{api}/{other}", headers=key, timeout=10).raise_for_status()

    lose()
    with clients_of(local_fleet) as clients:
        rolled = local_fleet.run("swap", "--limit here-cpu0", profile="nomtp")
    assert rolled.rc != 0 and set(clients.answers) == {200}, (clients.answers, clients.wrong, rolled.stdout)
    assert "here-cpu0 KEPT" in rolled.tasks["Tell what came of it"]["here-cpu0"]["msg"]
    reason = rolled.tasks["Fail for a server that was not swapped"]["here-cpu0"]["msg"]
    assert "router would be left with 0 of 1 other servers (here-cpu1: router " in reason, reason
    assert [state(local_fleet, number) for number in (0, 1)] == before
    same = local_fleet.run("swap", profile="small")
    assert same.rc == 0 and [same.changed(name) for name in NAMES] == [0, 1], same.stdout
    assert "here-cpu1: the router did not have it, and has it now" in same.tasks["Tell what came of it"]["here-cpu0"]["msg"]
    assert_both_are_routed_to(local_fleet)
    lose()
    # For five seconds the router has it still, as one that leaves.
    soon = local_fleet.run("swap", profile="small")
    assert soon.rc == 0 and soon.changed("here-cpu1") == 1, soon.stdout
    assert [state(local_fleet, number) for number in (0, 1)] == before
    assert_both_are_routed_to(local_fleet)


def test_what_can_not_start_is_put_back_and_routed_to_where_it_listened(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    # A new port is part of what is undone, and the inventory goes on naming it.
    (port,) = free_ports(1)
    written = local_fleet.nodes
    servers = [{"port": port}, {"port": local_fleet.ports[1]}]
    local_fleet.write({"here": {**written["here"], "servers": servers}})
    with clients_of(local_fleet) as clients:
        rolled = local_fleet.run("swap", "--limit here-cpu0", profile="bad")
    local_fleet.write(written)
    assert rolled.rc != 0
    assert set(clients.answers) == {200} and clients.most_out == 1, (clients.answers, clients.wrong, rolled.stdout)
    reason = rolled.tasks["Fail for a server that was not swapped"]["here-cpu0"]["msg"]
    assert "here-cpu0 did not become ready" in reason and "context" in reason, reason
    after = [state(local_fleet, number) for number in (0, 1)]
    assert after[1] == before[1] and [after[0][key] for key in ("launch_sha256", "port")] == [
        before[0][key] for key in ("launch_sha256", "port")
    ]
    assert_both_are_routed_to(local_fleet)
    told = rolled.tasks["Tell what came of it"]["here-cpu0"]["msg"]
    assert "here-cpu0 REVERTED" in told and "bundle: " in told
    assert profile_for_prometheus(local_fleet, "here-cpu0") == before[0]["profile"]


def test_a_gate_that_cannot_be_is_refused_before_anything_is_touched(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    few = local_fleet.run("swap", profile="slow", gate="benchmark", sglang_swap_gate_pairs=1, sglang_swap_gate_output_tokens=1)
    assert few.rc != 0 and next(iter(few.tasks["Refuse numbers that are too small"].values()))["msg"] == (
        "sglang_swap_gate_pairs is 1, expected at least 2; sglang_swap_gate_output_tokens is 1, expected at least 2"
    )
    rolled = local_fleet.run("swap", profile="slow", gate="benchmark", sglang_swap_gate_input_tokens=4000)
    assert rolled.rc != 0 and "Hold the lock of the fleet" not in rolled.tasks, rolled.stdout
    failed = rolled.tasks["Refuse requests of the gate that are longer than a context"]["here-cpu0"]["msg"]
    assert "4000" in failed and "4128" in failed and "lower sglang_swap_gate_input_tokens" in failed, failed
    assert [state(local_fleet, number) for number in (0, 1)] == before


def test_what_is_slower_by_a_benchmark_is_put_back_and_reaches_one_server_only(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    with clients_of(local_fleet, concurrency=1) as clients:
        rolled = local_fleet.run(
            "swap", profile="slow", gate="benchmark", sglang_swap_gate_pairs=5, sglang_swap_gate_concurrency=4,
            sglang_swap_gate_prompts=8, sglang_swap_gate_input_tokens=8, sglang_swap_gate_output_tokens=64,
        )  # fmt: skip
    assert rolled.rc != 0
    told = rolled.tasks["Tell what came of it"]["here-cpu0"]["msg"]
    assert "here-cpu0 REVERTED" in told and "not begun" in told, told
    assert set(clients.answers) == {200} and clients.most_out == 1, (clients.answers, clients.wrong)
    assert_both_are_routed_to(local_fleet)
    reason = rolled.tasks["Fail for a server that was not swapped"]["here-cpu0"]["msg"]
    assert "here-cpu0 is slower than before: " in reason and "tolerated is -5 %" in reason
    after = [state(local_fleet, number) for number in (0, 1)]
    assert after[1] == before[1], "its neighbour was not touched"
    assert after[0]["launch_sha256"] == before[0]["launch_sha256"] and after[0]["launched_at"] != before[0]["launched_at"]
    assert "key of the test" not in rolled.stdout
