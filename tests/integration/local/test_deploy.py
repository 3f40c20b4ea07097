# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A deploy's life from end to end on real SGLang, in the order in which a person would live it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import requests
from ansible.module_utils import sglang_process

pytestmark = pytest.mark.engine

NAMES = ("here-cpu0", "here-cpu1")
KEY = {"Authorization": "Bearer key of the test"}


def state(fleet, number):
    return json.loads((fleet.root / f"run/sglang_cpu{number}.json").read_text())


def ours(fleet):
    """Every process of the fleet's two servers."""
    found = []
    for number, name in enumerate(NAMES):
        path = fleet.root / f"run/sglang_cpu{number}.json"
        session = (json.loads(path.read_text())["identity"] or {}).get("sid") if path.exists() else None
        found += [stat for stat in sglang_process.living() if session and stat.session == session]
        found += sglang_process.marked(str(fleet.root), name)
    return found


def generate(port, tokens=4, timeout=60, **more):
    return requests.post(
        f"http://127.0.0.1:{port}/generate",
        json={"text": "The quick", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}},
        headers=KEY,
        timeout=timeout,
        **more,
    )


@pytest.fixture(scope="module")
def deployed(local_fleet):
    """Check mode on a clean machine, then the first deploy."""
    checked = local_fleet.run("deploy", "--check --diff")
    created_by_check = local_fleet.root.exists()
    first = local_fleet.run("deploy", profile="nomtp")
    assert first.rc == 0, first.stdout
    return checked, created_by_check, first


def test_check_mode_on_a_clean_machine_tells_all_and_creates_nothing(deployed):
    checked, created, _first = deployed
    assert checked.rc == 0, checked.stdout
    assert not created
    started = checked.tasks["Start the server"]["here-cpu0"]
    assert started["changed"]
    assert "exec " in started["diff"][0]["after"] and started["diff"][0]["before"] == ""


def test_deploy_starts_servers_that_generate(deployed, local_fleet):
    _checked, _created, first = deployed
    for number, name in enumerate(NAMES):
        ready = first.tasks["Wait until the server serves"][name]
        assert ready["state"] == "ready" and ready["cap"] == 48
        assert ready["figures"]["kv_tokens"] == 8192
        assert list(ready["stage_seconds"])[0] == "import"
        assert generate(local_fleet.ports[number]).json()["meta_info"]["completion_tokens"] == 4
        record = state(local_fleet, number)
        assert record["identity"]["pid"] == ready["pid"]
        assert sglang_process.alive(record["identity"])
        assert record["identity"]["pid"] == record["identity"]["sid"], "a session of its own"
        link = local_fleet.root / f"logs/sglang_cpu{number}.log"
        assert str(link.resolve()) == record["log"] and os.stat(record["log"]).st_mode & 0o777 == 0o600


def test_the_key_is_needed_and_stands_in_no_command_line(deployed, local_fleet):
    assert requests.get(f"http://127.0.0.1:{local_fleet.ports[0]}/v1/loads", timeout=10).status_code == 401
    for stat in ours(local_fleet):
        assert "key of the test" not in sglang_process.command(stat.pid)
        assert b"key of the test" not in Path(f"/proc/{stat.pid}/environ").read_bytes()
    for path in local_fleet.root.glob("run/*.json"):
        assert "key of the test" not in path.read_text()
    for secrets in local_fleet.root.glob("run/*.secrets.yml"):
        assert secrets.stat().st_mode & 0o777 == 0o600
    assert "key of the test" not in deployed[2].stdout


def test_benchmark_of_the_deploy_is_recorded(deployed, local_fleet):
    for name in NAMES:
        (record,) = (json.loads(path.read_text()) for path in (local_fleet.artifacts / "benchmarks" / name).glob("*.json"))
        assert record["outcome"] == "measured"
        assert record["labels"]["profile"] == "nomtp" and record["labels"]["release"] == "0.5.23"
        assert [run["concurrency"] for run in record["runs"]] == [1, 4]
        assert all(run["failed"] == 0 and run["output_tok_s"] > 0 for run in record["runs"])
        (raw,) = (local_fleet.artifacts / "benchmarks" / name).glob("*.jsonl")
        assert "key of the test" not in raw.read_text()


def test_second_deploy_changes_nothing(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    again = local_fleet.run("deploy", profile="nomtp")
    assert again.rc == 0, again.stdout
    assert [again.changed(name) for name in NAMES] == [0, 0]
    assert [state(local_fleet, number) for number in (0, 1)] == before
    assert "tok/s" in again.tasks["Tell what runs"]["here-cpu0"]["msg"], "shows the last measurement"
    checked = local_fleet.run("deploy", "--check")
    assert [checked.changed(name) for name in NAMES] == [0, 0]


def test_status_as_table_and_json(deployed, local_fleet, tmp_path):
    told = local_fleet.run("status", status_json=str(tmp_path / "status.json"), strict=True)
    assert told.rc == 0, told.stdout
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["schema"] == 1 and [node["name"] for node in status["nodes"]] == ["here"]
    assert [server["name"] for server in status["servers"]] == list(NAMES)
    for number, server in enumerate(status["servers"]):
        assert (server["state"], server["profile"], server["release"], server["cap"]) == ("ready", "nomtp", "0.5.23", 48)
        assert server["pid"] == state(local_fleet, number)["identity"]["pid"]
        assert server["drift"] == [] and server["host_rss_gib"] > 0.5
    assert "here-cpu1" in told.tasks["Tell the state of the fleet"]["here-cpu0"]["msg"]


def test_status_names_drift(deployed, local_fleet, tmp_path):
    told = local_fleet.run("status", status_json=str(tmp_path / "status.json"), sglang_server_args={"max-running-requests": 7})
    assert told.rc == 0, told.stdout
    status = json.loads((tmp_path / "status.json").read_text())
    assert [server["drift"] for server in status["servers"]] == [["max-running-requests: 48 -> 7"]] * 2


def test_benchmark_playbook_measures_what_runs(deployed, local_fleet):
    measured = local_fleet.run("benchmark", "--limit here-cpu0")
    assert measured.rc == 0, measured.stdout
    assert len(list((local_fleet.artifacts / "benchmarks" / "here-cpu0").glob("*.json"))) == 2


def test_a_busy_server_is_left_running_by_a_deploy(deployed, local_fleet):
    before = state(local_fleet, 0)
    answers = []
    clients = [
        threading.Thread(target=lambda: answers.append(generate(local_fleet.ports[0], tokens=1000, timeout=300)))
        for _ in range(120)
    ]
    for client in clients:
        client.start()
    time.sleep(2)
    again = local_fleet.run("deploy", "--limit here-cpu0", benchmark=False)
    assert again.rc == 0 and again.changed("here-cpu0") == 0, again.stdout
    for client in clients:
        client.join(300)
    assert [answer.status_code for answer in answers] == [200] * 120
    assert state(local_fleet, 0)["identity"] == before["identity"]


def test_a_server_whose_log_was_removed_is_still_known_to_serve(deployed, local_fleet, tmp_path):
    before = state(local_fleet, 0)
    Path(before["log"]).rename(f"{before['log']}.away")
    try:
        again = local_fleet.run("deploy", "--limit here-cpu0", benchmark=False)
        told = local_fleet.run("status", "--limit here-cpu0", status_json=str(tmp_path / "status.json"))
    finally:
        Path(f"{before['log']}.away").rename(before["log"])
    assert again.rc == 0 and again.changed("here-cpu0") == 0, again.stdout
    assert told.rc == 0, told.stdout
    (server,) = json.loads((tmp_path / "status.json").read_text())["servers"]
    assert (server["state"], server["pid"]) == ("ready", before["identity"]["pid"])


def test_an_empty_limit_is_not_the_whole_fleet(deployed, local_fleet):
    refused = local_fleet.run("stop", "--limit ''")
    assert refused.rc != 0 and "--limit is empty" in refused.stdout
    assert generate(local_fleet.ports[0]).status_code == 200


def test_check_mode_shows_what_a_refused_change_would_be(deployed, local_fleet):
    shown = local_fleet.run("deploy", "--check --diff --limit here-cpu0", sglang_server_args={"max-running-requests": 7})
    assert shown.rc == 0, shown.stdout
    (_script, process) = shown.tasks["Start the server"]["here-cpu0"]["diff"]
    assert "48" in process["before"] and "\n7\n" in process["after"]
    assert "without --check this is refused" in shown.stdout


def test_other_flags_over_running_servers_are_refused(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    refused = local_fleet.run("deploy", sglang_server_args={"max-running-requests": 7})
    assert refused.rc != 0
    said = refused.tasks["Look on the node whether the server can be started"]["here-cpu0"]["msg"]
    for word in ("here-cpu0 runs profile nomtp", "--max-running-requests", "swap.yml", "-e replace=true"):
        assert word in said
    assert [state(local_fleet, number) for number in (0, 1)] == before


def test_a_flag_that_the_release_does_not_know_is_refused_before_anything_stops(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    refused = local_fleet.run("deploy", replace=True, sglang_server_args={"no-such-flag": 1})
    assert refused.rc != 0
    said = refused.tasks["Look on the node whether the server can be started"]["here-cpu0"]["msg"]
    assert "0.5.23" in said and "--no-such-flag" in said
    assert [state(local_fleet, number) for number in (0, 1)] == before


def test_a_server_that_was_killed_is_told_and_started_again_alone(deployed, local_fleet, tmp_path):
    other = state(local_fleet, 1)
    os.kill(state(local_fleet, 0)["identity"]["pid"], signal.SIGKILL)
    time.sleep(3)
    told = local_fleet.run("status", status_json=str(tmp_path / "status.json"), strict=True)
    assert told.rc != 0
    states = [server["state"] for server in json.loads((tmp_path / "status.json").read_text())["servers"]]
    assert states == ["dead", "ready"]
    again = local_fleet.run("deploy", benchmark=False)
    assert again.rc == 0, again.stdout
    assert (again.changed("here-cpu0") > 0, again.changed("here-cpu1")) == (True, 0)
    assert state(local_fleet, 1) == other
    assert generate(local_fleet.ports[0]).status_code == 200


def test_stop_of_one_lets_its_request_finish_and_leaves_nothing(deployed, local_fleet):
    answers = []
    files = [Path(path) for path in state(local_fleet, 1)["shared_memory"]]
    assert files and all(path.exists() for path in files), "SGLang leaves a file in /dev/shm even after a clean stop"
    request = threading.Thread(target=lambda: answers.append(generate(local_fleet.ports[1], tokens=1500)))
    request.start()
    time.sleep(1)
    stopped = local_fleet.run("stop", "--limit here-cpu1")
    request.join(60)
    assert stopped.rc == 0 and stopped.changed("here-cpu1") == 1, stopped.stdout
    assert answers[0].json()["meta_info"]["completion_tokens"] == 1500
    assert stopped.tasks["Stop the server"]["here-cpu1"]["killed"] == []
    assert not [stat for stat in ours(local_fleet) if stat.session == state(local_fleet, 1)["identity"]["sid"]]
    assert not any(path.exists() for path in files)
    assert sglang_process.listeners(local_fleet.ports[1]) == []
    again = local_fleet.run("stop", "--limit here-cpu1")
    assert again.rc == 0 and again.changed("here-cpu1") == 0
    assert generate(local_fleet.ports[0]).status_code == 200, "its neighbour serves on"


def test_a_stranger_on_the_port_is_named_and_left_alone(deployed, local_fleet, tmp_path):
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", local_fleet.ports[1]))
        stranger.listen()
        refused = local_fleet.run("deploy", "--limit here-cpu1")
        assert refused.rc != 0
        said = refused.tasks["Look on the node whether the server can be started"]["here-cpu1"]["msg"]
        assert f"port {local_fleet.ports[1]} is taken by pid {os.getpid()}" in said
        told = local_fleet.run("status", "--limit here-cpu1", status_json=str(tmp_path / "status.json"))
        assert told.rc == 0, told.stdout
        (server,) = json.loads((tmp_path / "status.json").read_text())["servers"]
        assert server["state"] == "stranger" and f"pid {os.getpid()}" in server["detail"]


def test_stop_during_a_start_leaves_no_orphan(deployed, local_fleet):
    # The engine's own answer to SIGTERM at this moment is to leave its children behind.
    told = []
    deploying = threading.Thread(target=lambda: told.append(local_fleet.run("deploy", "--limit here-cpu1", benchmark=False)))
    launched = state(local_fleet, 1)["launched_at"]
    deploying.start()
    assert sglang_process.wait_until(lambda: state(local_fleet, 1)["launched_at"] != launched, 60)
    session = sglang_process.wait_until(lambda: (state(local_fleet, 1)["identity"] or {}).get("sid"), 30)
    assert sglang_process.wait_until(
        lambda: len([stat for stat in sglang_process.living() if stat.session == session]) >= 3, 120
    ), "the children are up"
    stopped = local_fleet.run("stop", "--limit here-cpu1", sglang_stop_timeout=10)
    deploying.join(120)
    assert stopped.rc == 0, stopped.stdout
    assert not [stat for stat in sglang_process.living() if stat.session == session]
    assert "it was stopped by" in told[0].tasks["Wait until the server serves"]["here-cpu1"]["msg"]


def test_stop_leaves_nothing(deployed, local_fleet):
    files = [Path(path) for path in state(local_fleet, 0)["shared_memory"]]
    stopped = local_fleet.run("stop")
    assert stopped.rc == 0, stopped.stdout
    assert ours(local_fleet) == []
    assert [sglang_process.listeners(port) for port in local_fleet.ports] == [[], []]
    assert not any(path.exists() for path in files)
