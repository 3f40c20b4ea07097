# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang's real router in front of two real servers, and what its clients notice of what happens behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
import requests
from ansible.module_utils import sglang_process
from helpers import balance
from helpers.traffic import Clients

from ..conftest import ROOT, free_ports

pytestmark = pytest.mark.engine

NAMES = ("here-cpu0", "here-cpu1")
SECRET = "key of the test"
KEY = {"Authorization": f"Bearer {SECRET}"}
CONCURRENCY = 4


class Router:
    """The router of the fleet, as its clients and its node see it."""

    def __init__(self, fleet, port):
        self.fleet, self.port = fleet, port
        self.path = fleet.root / "run/sglang_router.json"

    @property
    def state(self):
        return json.loads(self.path.read_text())

    def workers(self):
        """What it routes to: status by port."""
        answer = requests.get(f"http://127.0.0.1:{self.port}/workers", headers=KEY, timeout=10).json()
        return {int(worker["url"].rpartition(":")[2]): worker["status"] for worker in answer["workers"]}

    def both_ready(self):
        return self.workers() == dict.fromkeys(self.fleet.ports, "ready")


def server_state(fleet, number):
    return json.loads((fleet.root / f"run/sglang_cpu{number}.json").read_text())


def running(port):
    """Requests that a server works on."""
    loads = requests.get(f"http://127.0.0.1:{port}/v1/loads", headers=KEY, timeout=10).json()["loads"]
    return sum(entry["num_running_reqs"] for entry in loads)


@pytest.fixture(scope="module")
def router(local_fleet):
    """Two servers behind a router, as one deploy leaves them."""
    port, metrics = free_ports(2)
    local_fleet.options.update(
        sglang_router_enabled=True,
        sglang_router_port=port,
        sglang_router_metrics_port=metrics,
        sglang_router_venv=str(ROOT / ".demo" / "router"),
    )
    deployed = local_fleet.run("deploy", benchmark=False)
    assert deployed.rc == 0, deployed.stdout
    made = Router(local_fleet, port)
    made.metrics, made.deployed = metrics, deployed
    return made


def test_a_deploy_puts_its_servers_behind_the_router(router):
    assert router.both_ready()
    refused = requests.post(f"http://127.0.0.1:{router.port}/generate", json={"text": "a"}, timeout=10)
    assert refused.status_code == 401
    for port in (router.port, router.metrics):
        (listener,) = sglang_process.listeners(port)
        assert (listener.address, listener.pid) == ("127.0.0.1", router.state["identity"]["pid"])
    assert "smg_" in requests.get(f"http://127.0.0.1:{router.metrics}/metrics", timeout=10).text


def test_its_key_stands_in_no_command_line_and_no_state_file(router):
    pid = router.state["identity"]["pid"]
    assert SECRET not in sglang_process.command(pid)
    assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert SECRET not in router.path.read_text() and SECRET not in router.deployed.stdout
    assert (router.fleet.root / "run/sglang_router.secrets.yml").stat().st_mode & 0o777 == 0o600
    assert SECRET not in Path(router.state["log"]).read_text(errors="replace")
    assert [stat.pid for stat in sglang_process.marked(str(router.fleet.root), "router")] == [pid], "it is known by its mark"


def test_a_second_start_changes_nothing(router):
    before = router.state
    again = router.fleet.run("router")
    assert again.rc == 0, again.stdout
    assert [again.changed(name) for name in NAMES] == [0, 0]
    assert router.state == before


def test_other_options_restart_it_where_that_is_asked_for(router):
    pid = router.state["identity"]["pid"]
    for args in ({"cb-timeout-duration-secs": 6}, {}):
        again = router.fleet.run("router", replace=True, sglang_router_args=args)
        assert again.rc == 0, again.stdout
        argv = router.state["argv"]
        assert router.state["identity"]["pid"] != pid and "--disable-worker-overload-protection" in argv
        assert argv[argv.index("--cb-timeout-duration-secs") + 1] == ("6" if args else "5")
        pid = router.state["identity"]["pid"]


def test_options_that_it_refuses_are_one_sentence_and_it_runs_on(router):
    before = router.state
    refused = router.fleet.run("router", replace=True, sglang_router_args={"health-check-interval-secs": 0})
    assert refused.rc != 0
    said = refused.tasks["Look whether the router can be started"][NAMES[0]]["msg"]
    assert said.startswith("router: smg 1.13.0 refuses its options: ") and "Must be >= 1" in said and "\n" not in said
    assert router.state == before and router.both_ready()


def test_a_stranger_on_its_port_is_named_and_left_alone(router):
    before = router.state
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        refused = router.fleet.run("router", replace=True, sglang_router_port=port)
        said = refused.tasks["Look whether the router can be started"][NAMES[0]]["msg"]
        assert refused.rc != 0 and said.startswith(f"router: port {port} is taken by pid {os.getpid()}")
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert router.state == before


def test_a_router_that_was_killed_gets_its_servers_again(router, tmp_path):
    pid = router.state["identity"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert sglang_process.wait_until(lambda: sglang_process.alive(router.state["identity"]) is None, 20)
    told = router.fleet.run("status", status_json=str(tmp_path / "status.json"))
    assert told.rc == 0, told.stdout
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["router"]["state"] == "dead" and [server["state"] for server in status["servers"]] == ["ready", "ready"]
    again = router.fleet.run("router", "--limit here-cpu0")
    assert again.rc == 0, again.stdout
    assert again.tasks["Put every server behind the router that serves"][NAMES[0]]["added"] == list(NAMES)
    assert router.both_ready() and router.state["identity"]["pid"] != pid


def test_status_shows_the_router_and_its_workers(router, tmp_path):
    told = router.fleet.run("status", status_json=str(tmp_path / "status.json"), strict=True)
    assert told.rc == 0, told.stdout
    shown = json.loads((tmp_path / "status.json").read_text())["router"]
    assert (shown["state"], shown["url"], shown["release"]) == ("ready", f"http://127.0.0.1:{router.port}", "1.13.0")
    assert shown["pid"] == router.state["identity"]["pid"]
    assert [(worker["name"], worker["state"]) for worker in shown["workers"]] == [(name, "ready") for name in NAMES]
    assert f"Router http://127.0.0.1:{router.port} on here: ready" in told.tasks["Tell the state of the fleet"][NAMES[0]]["msg"]


def test_a_server_that_is_killed_costs_no_request_that_is_not_streamed(router):
    # A stream that has begun can't be sent again: what was in flight on the dead server ends with an error, and nothing else.
    first, second = router.fleet.ports
    identity = server_state(router.fleet, 1)["identity"]
    with Clients(router.port, SECRET, tokens=200) as plain, Clients(router.port, SECRET, tokens=200, stream=True) as streams:
        assert sglang_process.wait_until(lambda: running(second) >= 2, 60, pause=0.02)
        os.kill(identity["pid"], signal.SIGKILL)
        assert sglang_process.wait_until(lambda: router.workers()[second] != "ready", 60)
        enough = plain.answers[200] + 8
        assert sglang_process.wait_until(lambda: plain.answers[200] >= enough and streams.answers[200] >= 8, 120)
    assert set(plain.answers) == {200}, (plain.answers, plain.wrong)
    cut = sum(count for outcome, count in streams.answers.items() if outcome != 200)
    assert cut <= CONCURRENCY and all("stream_error" in told for told in streams.wrong), (streams.answers, streams.wrong)
    assert router.workers()[first] == "ready"


def test_stopping_the_fleet_stops_the_router(router):
    stopped = router.fleet.run("stop", sglang_stop_timeout=5)
    assert stopped.rc == 0, stopped.stdout
    assert stopped.tasks["Stop the router"][NAMES[0]]["killed"] == []
    assert sglang_process.marked(str(router.fleet.root), "router") == []
    assert sglang_process.listeners(router.port) == sglang_process.listeners(router.metrics) == []
    again = router.fleet.run("router", state="stopped")
    assert again.rc == 0 and [again.changed(name) for name in NAMES] == [0, 0], again.stdout


def test_a_burst_is_spread_over_all_servers(router):
    argv = router.state["argv"]
    flags = ("policy", "balance-abs-threshold", "balance-rel-threshold", "load-monitor-interval")
    options = {flag: argv[argv.index(f"--{flag}") + 1] for flag in flags}
    assert options["policy"] == "cache_aware"
    share, inside = balance.measure(ROOT / ".demo" / "router", options, balance.PROMPTS["unlike each other"], 15)
    # With smg's own settings it is 0.6.
    assert share > 0.8, (share, inside)
