# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Deploys over a real sshd: what a server survives, and what many servers of a node look like."""

from __future__ import annotations

import json
import subprocess
import threading
import time

import pytest
import yaml
from helpers.netns import netns_nodes
from helpers.runner import kill_controller, start_playbook

from ..conftest import ROOT, Fleet

pytestmark = pytest.mark.netns


MODELS = yaml.safe_load((ROOT / "group_vars/all/models.yml").read_text())


@pytest.fixture
def nodes():
    """Two bare nodes for each test: what another one left there is no part of it."""
    with netns_nodes(2) as made:
        yield made


def node_state(node, slug):
    return json.loads(node.run(f"cat {node.root}/run/{slug}.json").stdout)


def connection(node):
    """The node's connection as inventory variables."""
    return {name: value for name, value in node.inventory.items() if name.startswith("ansible_")}


def close_masters(node):
    """End the persistent ssh connections to a node, as ControlPersist does after a while."""
    found = subprocess.run(
        ["pgrep", "-f", f"ssh: .*{node.name}|ssh .*{node.address}"], capture_output=True, text=True, check=False
    )
    for pid in found.stdout.split():
        subprocess.run(["kill", pid], check=False)


@pytest.mark.engine
@pytest.mark.parametrize(("index", "pipelining"), [(0, True), (1, False)])
def test_a_server_outlives_playbook_connection_and_master(nodes, engine, tmp_path, index, pipelining):
    venv, model = engine
    node = nodes[index]
    fleet = Fleet(
        tmp_path,
        {
            node.name: {
                **connection(node),
                "servers": [{}],
                "model": "tiny",
                "sglang_root": node.root,
                "sglang_engine_device": "cpu",
                "sglang_engine_venv": str(venv),
            }
        },
        {"sglang_models": {"tiny": {"path": str(model), "served_name": "tiny"}}, "benchmark": False},
    )
    pipelined = {"ANSIBLE_PIPELINING": str(pipelining)}
    deployed = fleet.run("deploy", envvars=pipelined)
    assert deployed.rc == 0, deployed.stdout
    close_masters(node)
    time.sleep(2)
    state = node_state(node, "sglang_cpu0")
    # The state file holds the node's own pids: asked inside its pid namespace.
    assert node.run(f"cat /proc/{state['identity']['pid']}/comm").returncode == 0
    answer = node.run(
        "curl -s -H 'Content-Type: application/json' http://127.0.0.1:30000/generate"
        """ -d '{"text": "The quick", "sampling_params": {"max_new_tokens": 4, "ignore_eos": true}}'""",
        timeout=60,
    )
    assert json.loads(answer.stdout)["meta_info"]["completion_tokens"] == 4
    environment = node.run(f"tr '\\0' '\\n' < /proc/{state['identity']['pid']}/environ").stdout
    assert "SSH_" not in environment and "ANSIBLE_" not in environment
    again = fleet.run("deploy", envvars=pipelined)
    assert again.rc == 0 and again.changed(f"{node.name}-cpu0") == 0, again.stdout
    stopped = fleet.run("stop", envvars=pipelined)
    assert stopped.rc == 0, stopped.stdout
    assert "sglang" not in node.run("ps -eo args").stdout.replace("sglang_server.py", "")
    assert node.run("ls /dev/shm").stdout == ""


def gpu_fleet(node, replay_venv, tmp_path, **options):
    """Four servers of a node with four GPUs, each a replay at high speed."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS["sglang_models"]["qwen3.6-27b"]["config"]))
    return Fleet(
        tmp_path,
        {
            node.name: {
                **connection(node),
                "gpus": [0, 1, 2, 3],
                "model": "qwen3.6-27b",
                "env": {"SGLANG_REPLAY_SPEED": "40"},
                "sglang_root": node.root,
                "sglang_engine_venv": str(replay_venv),
            }
        },
        {
            "sglang_models": {
                "qwen3.6-27b": {
                    "path": str(model),
                    "served_name": "qwen3.6-27b",
                    "hybrid": True,
                    "args": {"load-format": "dummy"},
                }
            },
            "benchmark": False,
            **options,
        },
    )


def test_four_gpus_of_a_replay_from_deploy_to_stop(nodes, replay_venv, tmp_path):
    node = nodes[0]
    fleet = gpu_fleet(node, replay_venv, tmp_path)
    names = [f"{node.name}-gpu{gpu}" for gpu in range(4)]
    refused = fleet.run("deploy", profile="mtp_hicache")
    assert refused.rc != 0
    said = refused.tasks["Plan the memory of every server and node"][names[0]]["msg"]
    assert "nothing was touched" in said and " GB = 621." in said and "-e plan=warn" in said, "four times 155 GB of host pools"
    assert " on each of its 4 servers fits" in said or "no hicache-size fits" in said
    assert "sglang_gpu" not in node.run(f"ls {node.root}/run", check=False).stdout

    # The flags of the recording: 24 slots and 20 GB of host pools a server.
    recorded = {"max-mamba-cache-size": 24, "hicache-size": 20}
    deployed = fleet.run("deploy", profile="mtp_hicache", plan="warn", sglang_server_args=recorded)
    assert deployed.rc == 0, deployed.stdout
    for gpu, name in enumerate(names):
        ready = deployed.tasks["Wait until the server serves"][name]
        assert list(ready["stage_seconds"]) == [
            "import", "weights", "state pool", "KV pool", "graph capture", "host pools", "warm-up",
        ]  # fmt: skip
        assert (ready["figures"]["kv_tokens"], ready["cap"]) == (365151, 4)
        state = node_state(node, f"sglang_gpu{gpu}")
        assert state["env"]["CUDA_VISIBLE_DEVICES"] == f"GPU-replay-{gpu}"
        assert "--mamba-radix-cache-strategy" in state["argv"]
    said = deployed.tasks["Tell what runs"][names[0]]["msg"]
    assert "asked for 48 running, got 4: state cache (24 slots, 5 a request)" in said
    assert "Planned/observed" in said
    for name in names:
        (record,) = (json.loads(path.read_text()) for path in (fleet.artifacts / "boots" / name).glob("*.json"))
        off = {row["figure"]: abs(row["off"]) for row in record["compared"]}
        assert off["kv_tokens"] < 0.01 and off["mamba_slots"] == off["max_running_requests"] == 0
        assert not any(row["warn"] for row in record["compared"]), record["compared"]
        assert record["context_gib"] == 2.18 and record["gpu"] == "replay of a 96 GB GPU"

    again = fleet.run("deploy", profile="mtp_hicache", sglang_server_args=recorded)
    assert again.rc == 0, again.stdout
    assert [again.changed(name) for name in names] == [0] * 4, "pools in use already are not summed again"

    told = fleet.run("status", "--limit node1-gpu1,node1-gpu2", status_json=str(tmp_path / "status.json"))
    assert told.rc == 0, told.stdout
    status = json.loads((tmp_path / "status.json").read_text())
    assert [server["name"] for server in status["servers"]] == names[1:3]
    assert {server["state"] for server in status["servers"]} == {"ready"}
    assert len(status["nodes"][0]["gpus"]) == 4

    stopped = fleet.run("stop", "--limit node1-gpu0")
    assert [stopped.changed(name) for name in names] == [1, 0, 0, 0]
    stopped = fleet.run("stop")
    assert stopped.rc == 0, stopped.stdout
    assert [stopped.changed(name) for name in names] == [0, 1, 1, 1]
    assert "replay::" not in node.run("ps -eo stat,args | grep -v ^Z").stdout


def test_a_start_that_fails_is_cleaned_up_and_keeps_no_other_from_starting(nodes, replay_venv, tmp_path):
    node = nodes[0]
    fleet = gpu_fleet(node, replay_venv, tmp_path)
    recordings = ("e96_nomtp", "f_mem_small", "f_port_used")
    servers = [
        {"gpus": [gpu], "env": {"SGLANG_REPLAY_SPEED": "40", "SGLANG_REPLAY": name}} for gpu, name in enumerate(recordings)
    ]
    fleet.write(
        {
            node.name: {
                **connection(node),
                "servers": servers,
                "model": "qwen3.6-27b",
                "sglang_root": node.root,
                "sglang_engine_venv": str(replay_venv),
            }
        }
    )
    deployed = fleet.run("deploy")
    assert deployed.rc != 0
    assert node_state(node, "sglang_gpu0")["stopped_at"] is None
    report = deployed.tasks["Tell what runs"]["node1-gpu0"]["msg"]
    assert "the weights leave no memory for the hybrid model's state cache (-2.97 GiB)" in report
    assert "was taken by another process during the start" in report
    for slug in ("sglang_gpu1", "sglang_gpu2"):
        state = node_state(node, slug)
        assert state["stopped_because"].startswith("did not start: ")
        assert not node.run(f"ps -o pid= -s {state['identity']['sid']}", check=False).stdout.strip(), "nothing left"
    told = fleet.run("status", status_json=str(tmp_path / "status.json"))
    status = json.loads((tmp_path / "status.json").read_text())
    assert told.rc == 0, told.stdout
    assert [server["state"] for server in status["servers"]] == ["ready", "stopped", "stopped"]
    assert fleet.run("stop").rc == 0


def test_a_wait_goes_on_after_the_connection_was_cut(nodes, replay_venv, tmp_path):
    node = nodes[0]
    fleet = gpu_fleet(node, replay_venv, tmp_path)
    results = []
    deploying = threading.Thread(
        target=lambda: results.append(
            fleet.run(
                "deploy",
                "--limit node1-gpu0",
                profile="nomtp",
                sglang_server_env={"SGLANG_REPLAY_SPEED": "3"},
                sglang_progress_every=2,
            )
        )
    )
    deploying.start()
    assert _until(lambda: "launched_at" in node.run(f"cat {node.root}/run/sglang_gpu0.json", check=False).stdout, 60)
    time.sleep(4)
    node.cut()
    time.sleep(12)
    node.restore()
    deploying.join(180)
    assert results and results[0].rc == 0, results and results[0].stdout
    assert results[0].tasks["Wait until the server serves"]["node1-gpu0"]["state"] == "ready"
    assert fleet.run("stop").rc == 0


def test_a_disk_that_fills_up_is_the_cause_and_a_stop_still_works(nodes, replay_venv, tmp_path):
    node = nodes[1]
    node.run(f"mkdir -p {node.root} && mount -t tmpfs -o size=96m tmpfs {node.root}")
    try:
        fleet = gpu_fleet(node, replay_venv, tmp_path, sglang_server_env={"SGLANG_REPLAY_SPEED": "2"})
        name = f"{node.name}-gpu0"
        results = []
        deploying = threading.Thread(target=lambda: results.append(fleet.run("deploy", f"--limit {name}", profile="nomtp")))
        deploying.start()
        running = f"grep -q '\"launching\": false' {node.root}/run/sglang_gpu0.json && pgrep -f '[r]eplay::scheduler'"
        assert _until(lambda: node.run(running, check=False).returncode == 0, 60)
        node.run(f"dd if=/dev/zero of={node.root}/ballast bs=64k 2>/dev/null; true", timeout=30)
        deploying.join(120)
        answer = results[0].tasks["Wait until the server serves"][name]
        assert answer["cause_id"] == "disk_full", results[0].stdout
        assert "sglang.launch_server" not in node.run("ps -eo args").stdout, "a stop works all the same"
        told = fleet.run("status", f"--limit {name}", status_json=str(tmp_path / "status.json"))
        assert told.rc == 0, told.stdout
        (server,) = json.loads((tmp_path / "status.json").read_text())["servers"]
        assert server["state"] == "stopped", "written over the old state, in the room that it has"
        node.run(f"rm {node.root}/ballast && mount -o remount,ro {node.root}")
        refused = fleet.run("deploy", f"--limit {name}", profile="nomtp")
        said = refused.tasks["Look on the node whether the server can be started"][name]["msg"]
        assert "can't be written" in said and "choose another sglang_root" in said
    finally:
        node.run(f"umount -l {node.root}")


@pytest.mark.parametrize("seconds", [0.3, 2.5])
def test_a_deploy_after_its_controller_was_killed_converges(nodes, replay_venv, tmp_path, seconds):
    """Killed with all its processes, before the launch is written down and while it waits."""
    node = nodes[0]
    fleet = gpu_fleet(node, replay_venv, tmp_path)
    options = {"sglang_artifacts": str(fleet.artifacts), **fleet.options}
    controller = start_playbook(ROOT, "deploy.yml", fleet.inventory, options, tmp_path / "home")
    assert _until(lambda: node.run(f"ls {node.root}/run/*.lock", check=False).returncode == 0, 90)
    time.sleep(seconds)
    kill_controller(controller)
    deployed = fleet.run("deploy")
    assert deployed.rc == 0, deployed.stdout
    for gpu in range(4):
        logs = node.run(f"ls {node.root}/logs/sglang_gpu{gpu}").stdout.split()
        mains = node.run(f"pgrep -fc '^{replay_venv}.*--port {30000 + gpu}( |$)'", check=False).stdout.strip()
        assert (len(logs), mains) == (1, "1"), "nothing is started twice"
    assert fleet.run("stop").rc == 0
    assert "sglang.launch_server" not in node.run("ps -eo args").stdout


def test_an_unreachable_node_is_a_state_and_not_an_end(nodes, replay_venv, tmp_path):
    first, second = nodes
    fleet = gpu_fleet(first, replay_venv, tmp_path)
    fleet.write(
        {
            node.name: {**connection(node), "gpus": [0], "sglang_root": node.root, "sglang_engine_venv": str(replay_venv)}
            for node in (first, second)
        }
    )
    second.cut()
    try:
        told = fleet.run(
            "status", status_json=str(tmp_path / "status.json"), envvars={"ANSIBLE_TIMEOUT": "3", "ANSIBLE_SSH_RETRIES": "0"}
        )
    finally:
        second.restore()
    status = json.loads((tmp_path / "status.json").read_text())
    assert {server["name"]: server["state"] for server in status["servers"]} == {
        "node1-gpu0": "stopped",
        "node2-gpu0": "unreachable",
    }, told.stdout
    assert {node["name"]: node["state"] for node in status["nodes"]} == {"node1": "reached", "node2": "unreachable"}


def _until(condition, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.3)
    return False
