# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Swaps of many servers over a real sshd: batches, a node that vanishes, a controller that is killed, two controllers."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time

import pytest
import yaml
from helpers.netns import netns_nodes
from helpers.replay import make_replay_venv
from helpers.runner import kill_controller, start_playbook

from ..conftest import ROOT, Fleet

pytestmark = pytest.mark.netns

MODELS = yaml.safe_load((ROOT / "group_vars/all/models.yml").read_text())
SPEED = {"SGLANG_REPLAY_SPEED": "60"}
GOES_ON = 240
# A node that is gone is missed within seconds, and not tried again.
IMPATIENT = {
    "ANSIBLE_TIMEOUT": "3",
    "ANSIBLE_SSH_RETRIES": "0",
    "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=60s -o ServerAliveInterval=1 -o ServerAliveCountMax=2",
}


@pytest.fixture(scope="module")
def nodes():
    with netns_nodes(4) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(nodes, replay_venv, tmp_path_factory):
    """Four nodes of four servers, all with profile nomtp."""
    folder = tmp_path_factory.mktemp("swap")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["sglang_models"]["qwen3.6-27b"]["config"]))
    made = Fleet(
        folder,
        {
            node.name: {
                **{name: value for name, value in node.inventory.items() if name.startswith("ansible_")},
                "gpus": [0, 1, 2, 3],
                "model": "qwen3.6-27b",
                "env": SPEED,
                "sglang_root": node.root,
                "sglang_engine_venv": str(replay_venv),
            }
            for node in nodes
        },
        {
            "sglang_models": {
                "qwen3.6-27b": {
                    "path": str(model), "served_name": "q", "hybrid": True, "args": {"load-format": "dummy"},
                }
            },
            "benchmark": False,
            "sglang_swap_settle_every": 1,
        },
    )  # fmt: skip
    deployed = made.run("deploy", profile="nomtp")
    assert deployed.rc == 0, deployed.stdout
    yield made
    assert made.run("stop").rc == 0


def read(node, path):
    """A JSON file of a node, empty when it is not there."""
    text = node.run(f"cat {node.root}/{path}", check=False).stdout
    return json.loads(text) if text else {}


def states(nodes):
    return {(node.name, gpu): read(node, f"run/sglang_gpu{gpu}.json") for node in nodes for gpu in range(4)}


def until(condition, seconds=GOES_ON):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


def outcomes(result):
    """The outcome of each server, as the end of a swap tells it."""
    told = next(iter(result.tasks["Tell what came of it"].values()))["msg"]
    rows = [line.split() for line in told.split("\n\n")[0].splitlines()[2:]]
    return {row[0]: "not begun" if row[1] == "not" else row[1] for row in rows}


def test_a_node_that_vanishes_in_the_middle_ends_the_roll_and_takes_nobody_along(fleet, nodes):
    before = states(nodes)
    victim = nodes[2]
    results = []

    def roll(**more):
        results.append(fleet.run("swap", profile="mtp", settle=[1, 15], envvars=IMPATIENT, **more))

    rolling = threading.Thread(target=roll)
    rolling.start()

    def watched():
        """Is the victim watched now, by a task that a lost connection ends? It has answered the wait, and more than once."""
        state = read(victim, "run/sglang_gpu0.json")
        if state["profile"] != "mtp":
            return False
        return int(victim.run(f"grep -c 'POST /generate' {state['log']}", check=False).stdout or 0) >= 3

    most_out = 0

    def out():
        """Servers that are not ready now, over all nodes."""
        return sum(1 for state in states(nodes).values() if not state.get("ready_at") or state.get("stopping_at"))

    try:
        while True:
            most_out = max(most_out, out())
            if watched():
                break
            assert rolling.is_alive(), results and results[0].stdout
        victim.cut()
        rolling.join(GOES_ON)
        assert results, "the roll came to an end"
    finally:
        victim.restore()
    assert results[0].rc != 0
    assert 1 <= most_out <= 4, "a canary, then a quarter of sixteen"
    told = outcomes(results[0])
    assert told.pop("node3-gpu0") == "lost", results[0].stdout
    # node1-gpu0 was the canary, the batch after it is a server of each of four nodes; nobody else was touched.
    swapped = {name for name, outcome in told.items() if outcome == "swapped"}
    assert len(swapped) == 4 and "node1-gpu0" in swapped
    assert {outcome for name, outcome in told.items() if name not in swapped} == {"not begun"}
    after = states(nodes)
    untouched = [key for key in before if f"{key[0]}-gpu{key[1]}" not in swapped | {"node3-gpu0"}]
    assert len(untouched) == 11 and all(after[key] == before[key] for key in untouched)
    assert "node3-gpu0 was not swapped: the node of node3-gpu0 does not answer" in results[0].stdout
    assert read(nodes[0], "run/swap.lock.json") == {}, "the lock of the fleet is free"

    # Two nodes are enough for the rest: one that was there all along, and the one that was gone.
    two = "--limit node_node1,node_node3"
    there = [(name, gpu) for name, gpu in before if name in ("node1", "node3")]
    again = fleet.run("swap", two, profile="mtp", settle=[0], sglang_swap_serial="50%")
    assert again.rc == 0, again.stdout
    assert set(outcomes(again).values()) == {"swapped", "unchanged"}
    now = states(nodes)
    assert {now[key]["profile"] for key in there} == {"mtp"}
    assert now["node3", 0]["launched_at"] == after["node3", 0]["launched_at"], "it was started once: proven, not anew"

    # Two runs brought mtp, and one rollback undoes it on all.
    back = fleet.run("swap", two, rollback=True, settle=[0], sglang_swap_serial=["100%"], sglang_min_ready=9)
    assert back.rc != 0, "half of the fleet leaves the other half"
    assert "a batch of 8 would leave 8 of 16 servers serving and sglang_min_ready is 9" in back.stdout
    back = fleet.run("swap", two, rollback=True, settle=[0], sglang_swap_serial=["50%"])
    assert back.rc == 0, back.stdout
    now = states(nodes)
    assert {key: now[key]["argv"] for key in there} == {key: before[key]["argv"] for key in there}


@contextlib.contextmanager
def controller(fleet, home, server, **options):
    """A swap of one server by an ansible-playbook of its own, that is killed at the end of the block."""
    given = {"sglang_artifacts": str(fleet.artifacts), **fleet.options, **options}
    process = start_playbook(ROOT, "swap.yml", fleet.inventory, given, home / "home", "--limit", server)
    try:
        yield
    finally:
        kill_controller(process)


def another(state):
    """A profile that the server does not run: what it runs is what the test before has left."""
    return "nomtp" if state["profile"] == "mtp" else "mtp"


def begun(node, _profile=None):
    swap = read(node, "run/sglang_gpu1.swap.json")
    return bool(swap) and not swap.get("outcome")


def going(node, before):
    """Was what ran told to stop, or is it gone already?"""
    state = read(node, "run/sglang_gpu1.json")
    return begun(node) and (state.get("stopping_at") or state.get("launched_at") != before["launched_at"])


def started(node, profile):
    state = read(node, "run/sglang_gpu1.json")
    return begun(node) and not state.get("stopped_at") and state.get("profile") == profile


# What was killed after the stop is the next test's.
@pytest.mark.parametrize("point", [begun, started], ids=lambda point: point.__name__)
def test_a_controller_that_is_killed_leaves_what_the_next_one_finishes(fleet, nodes, tmp_path, point):
    node, server = nodes[1], "node2-gpu1"
    before = read(node, "run/sglang_gpu1.json")
    profile = another(before)
    with controller(fleet, tmp_path, server, profile=profile, settle=[0]):
        until(lambda: point(node, profile))
    script = node.run(f"cat {node.root}/scripts/start_sglang_gpu1_previous.sh").stdout
    assert script == before["script_text"], "what ran can be started by hand"
    again = fleet.run("swap", f"--limit {server}", profile=profile, settle=[0])
    assert again.rc == 0, again.stdout
    assert outcomes(again) == {server: "swapped"}
    state = read(node, "run/sglang_gpu1.json")
    assert (state["profile"], state["stopped_at"], read(node, "run/sglang_gpu1.swap.json")["outcome"]) == (
        profile,
        None,
        "swapped",
    )
    assert len(node.run(f"ps -o pid= -s {state['identity']['sid']}").stdout.split()) >= 1
    assert "taken over" in again.stdout, "the lock of the one that was killed"


def test_a_bad_profile_taken_up_after_a_kill_goes_back_to_what_ran_before_it(fleet, nodes, tmp_path):
    node, server = nodes[1], "node2-gpu1"
    before = read(node, "run/sglang_gpu1.json")
    bad = {"profile": "mtp", "settle": [0], "sglang_server_env": {**SPEED, "SGLANG_REPLAY": "f_mem_small"}}
    with controller(fleet, tmp_path, server, **bad):
        until(lambda: going(node, before))
    again = fleet.run("swap", f"--limit {server}", **bad)
    assert again.rc != 0
    assert outcomes(again) == {server: "reverted"}, again.stdout
    after = read(node, "run/sglang_gpu1.json")
    assert [after[key] for key in ("profile", "argv", "env", "launch_sha256")] == [
        before[key] for key in ("profile", "argv", "env", "launch_sha256")
    ]
    assert "leave no memory for the hybrid model's state cache" in again.stdout


class Put:
    """A roll over the servers of node4 whose first server was put back, and that reached no other."""

    def __init__(self, fleet, nodes, settle, **env):
        self.fleet, self.nodes, self.before = fleet, nodes, states(nodes)
        self.options = {
            "profile": "mtp",
            "settle": [settle],
            "sglang_stage_limits": {"ready": 10},
            "sglang_server_env": {"SGLANG_REPLAY_SPEED": "30", **env},
            "sglang_swap_serial": ["1", "100%"],
        }

    def roll(self):
        self.rolled = self.fleet.run("swap", "--limit node_node4", **self.options)

    def check(self, why):
        rolled, after = self.rolled, states(self.nodes)
        assert rolled.rc != 0
        told = outcomes(rolled)
        first = next(iter(told))
        assert told == {name: "reverted" if name == first else "not begun" for name in told} and len(told) == 4, rolled.stdout
        failed = rolled.tasks["Fail for a server that was not swapped"].values()
        reason = next(res["msg"] for res in failed if res.get("msg"))
        assert reason.startswith(f"{first} was not swapped: {first} {why}"), reason
        changed = [f"{name}-gpu{gpu}" for name, gpu in self.before if after[name, gpu] != self.before[name, gpu]]
        assert changed == [first]
        gpu = int(first[-1])
        assert after["node4", gpu]["launch_sha256"] == self.before["node4", gpu]["launch_sha256"]
        report = next(iter(rolled.tasks["Tell what came of it"].values()))["msg"]
        (bundle,) = re.findall(r"bundle: (\S+)", report)
        assert "server.log" in self.nodes[3].run(f"tar -tzf {bundle}").stdout, "what it wrote outlives it"


def test_what_fails_its_first_request_is_put_back_and_reaches_one_server_only(fleet, nodes):
    put = Put(fleet, nodes, settle=0, SGLANG_REPLAY_FAULT="bad_generate")
    put.roll()
    put.check("did not become ready")


def test_what_dies_while_it_is_watched_is_put_back_and_reaches_one_server_only(fleet, nodes):
    put, node = Put(fleet, nodes, settle=GOES_ON), nodes[3]
    rolling = threading.Thread(target=put.roll)
    rolling.start()

    def watched():
        """The pid of what was started, once it has answered the wait and the watch."""
        state = read(node, "run/sglang_gpu0.json")
        if state == put.before["node4", 0] or not state.get("identity"):
            return None
        answered = int(node.run(f"grep -c 'POST /generate' {state['log']}", check=False).stdout or 0)
        return state["identity"]["pid"] if answered >= 3 else None

    try:
        pid = until(lambda: watched() or not rolling.is_alive())
        assert pid is not True, put.rolled.stdout
        node.run(f"kill -9 {pid}")
    finally:
        rolling.join(2 * GOES_ON)
    put.check("became ready, and died")


def test_another_engine_model_and_port_are_a_swap_and_go_back(fleet, nodes, tmp_path):
    node, server = nodes[3], "node4-gpu3"
    other = make_replay_venv(tmp_path / "other")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["sglang_models"]["qwen3.6-27b"]["config"]))
    models = {"other": {"path": str(model), "served_name": "other", "hybrid": True, "args": {"load-format": "dummy"}}}
    before = read(node, "run/sglang_gpu3.json")
    written, fleet.options["sglang_models"] = fleet.nodes, fleet.options["sglang_models"] | models
    # As a person does it: in the inventory.
    changed = {"gpus": [3], "port": 31999, "model": "other"}
    kept = {key: value for key, value in written[node.name].items() if key != "gpus"} | {"sglang_engine_venv": str(other)}
    fleet.write({**written, node.name: {**kept, "servers": [*({"gpus": [gpu]} for gpu in range(3)), changed]}})
    for serial in ("0", "1,12.5%"):
        refused = fleet.run("swap", f"--limit {server}", profile=before["profile"], sglang_swap_serial=serial)
        (said,) = {answer["msg"] for answer in refused.tasks["Refuse batches that are none"].values()}
        assert refused.rc != 0 and said.startswith(f"sglang_swap_serial is {serial.replace(',', ', ')}: expected servers at a")
    shown = fleet.run("swap", f"--limit {server} --check", profile=before["profile"])
    assert shown.rc == 0, shown.stdout
    (closing,) = (answer["msg"] for answer in shown.tasks["Tell that nothing came of it"].values())
    assert closing.startswith(f"nothing was changed; without --check:\n{server}:\n") and "-> 31999" in closing
    assert read(node, "run/sglang_gpu3.json") == before
    swapped = fleet.run("swap", f"--limit {server}", profile=before["profile"], settle=[0])
    assert swapped.rc == 0, swapped.stdout
    told = next(iter(swapped.tasks["Tell what will change"].values()))["msg"]
    assert (
        f"port: {before['port']} -> 31999" in told
        and "model: qwen3.6-27b -> other" in told
        and f"-> {other}/bin/python" in told
    )
    state = read(node, "run/sglang_gpu3.json")
    assert (state["port"], state["argv"][0], state["record"]["model"]) == (31999, f"{other}/bin/python", "other")
    assert "31999" in node.run("ss -ltn").stdout and str(before["port"]) not in node.run("ss -ltn").stdout
    back = fleet.run("swap", f"--limit {server}", rollback=True, settle=[0])
    assert back.rc == 0, back.stdout
    fleet.write(written)
    assert read(node, "run/sglang_gpu3.json")["launch_sha256"] == before["launch_sha256"]


def test_a_second_swap_is_refused_with_who_swaps_and_since_when(fleet, nodes, tmp_path):
    profile = another(read(nodes[1], "run/sglang_gpu1.json"))
    with controller(fleet, tmp_path, "node2-gpu1", profile=profile, settle=[4 * GOES_ON]):
        held = until(lambda: begun(nodes[1]) and read(nodes[0], "run/swap.lock.json"))
        states_before = states(nodes[2:])
        # Of a server that serves, and of the one that the first has out: that it is starting is no reason.
        second = fleet.run("swap", "--limit node_node4,node2-gpu1", profile="mtp")
        others = [
            fleet.run("deploy", "--limit node4-gpu0", profile=another(states_before["node4", 0]), replace=True),
            fleet.run("deploy", "--limit node4-gpu0", profile=another(states_before["node4", 0])),
            fleet.run("stop", "--limit node4-gpu0"),
        ]
        shown = fleet.run("deploy", "--limit node4-gpu0 --check", profile=another(states_before["node4", 0]), replace=True)
        idle = fleet.run("deploy", "--limit node4-gpu0", profile=states_before["node4", 0]["profile"])
        after = states(nodes[2:])
    for refused in (second, *others):
        assert refused.rc != 0
        said = next(iter(refused.tasks["Refuse to touch what is being swapped"].values()))["msg"]
        assert f"{held['who']} swaps this fleet since {held['since']}" in said and "so nothing was touched" in said
        assert "-e take_over=true" in said
    assert shown.rc == 0 and "without --check this is refused: " in shown.stdout, "warned of, and not refused"
    assert idle.rc == 0, "what changes nothing needs no lock"
    assert after == states_before

    # A holder on a controller that nobody can look at is believed, until someone says otherwise.
    lock = {**held, "pid_namespace": "pid:[1]"}
    nodes[0].run(["sh", "-c", f"cat > {nodes[0].root}/run/swap.lock.json <<'E'\n{json.dumps(lock)}\nE"])
    taken = fleet.run("swap", "--limit node2-gpu1", profile=profile, settle=[0], take_over=True)
    assert taken.rc == 0, taken.stdout
    assert read(nodes[1], "run/sglang_gpu1.json")["profile"] == profile


def test_a_swap_that_began_while_this_one_looked_is_seen_before_anything_is_touched(fleet, nodes, tmp_path):
    node, server, log = nodes[3], "node4-gpu0", tmp_path / "log"
    before = states(nodes)
    # The look at the flags waits, so that there is time between the first look at the lock and the second.
    node.run(f"rm {node.root}/cache/flags-*.json")
    hold = f"setsid flock -o {node.root}/cache/flags.lock sleep 300"
    held = node.run(f"{hold} > /dev/null 2>&1 < /dev/null & echo $!").stdout.strip()
    # A task is written down when it has ended: the one before.
    last_before_it = "Work out what the server is started with"
    results = []

    def roll():
        profile = another(before["node4", 0])
        results.append(fleet.run("swap", f"--limit {server}", {"ANSIBLE_LOG_PATH": str(log)}, profile=profile, settle=[0]))

    rolling = threading.Thread(target=roll)
    rolling.start()
    try:
        until(lambda: log.exists() and last_before_it in log.read_text().partition("profiles are being compared")[2])
        holder = {"run": "another", "who": "bob@elsewhere", "since": "2026-01-01T00:00:00Z", "until": "2099-01-01T00:00:00Z"}
        lock = json.dumps({**holder, "until_epoch": 4070908800, "controller": "elsewhere", "pid": 1})
        nodes[0].run(["sh", "-c", f"cat > {nodes[0].root}/run/swap.lock.json <<'E'\n{lock}\nE"])
    finally:
        node.run(f"kill {held}")
        rolling.join(GOES_ON)
        nodes[0].run(f"rm {nodes[0].root}/run/swap.lock.json")
    assert results and results[0].rc != 0
    said = results[0].tasks["Refuse to touch what is being swapped"][server]["msg"]
    assert said.startswith("bob@elsewhere swaps this fleet since 2026-01-01T00:00:00Z"), said
    assert "Hold the lock of the fleet" not in results[0].tasks and states(nodes) == before


def test_history_tells_who_changed_what_when(fleet, nodes):
    told = fleet.run("history", "--limit node2-gpu1,node4-gpu0,node4-gpu1,node4-gpu2,node4-gpu3")
    assert told.rc == 0, told.stdout
    text = next(iter(told.tasks["Tell who changed what, and when"].values()))["msg"]
    assert "nomtp -> mtp" in text and "reverted" in text and "swapped" in text
    assert "leave no memory for the hybrid model's state cache" in " ".join(text.split())
