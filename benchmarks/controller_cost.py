# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tasks and controller seconds of deploy, of a second deploy and of status, beside a bash loop over ssh.

Nodes are network namespaces with a real sshd, and servers are the replay at high speed, so what is left is mostly what
Ansible costs. Nodes and controller share this machine: the wall clock holds both, CPU only the controller's processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import (
    ROOT,
    Failed,
    playbook_env,
    playbook_events,
    print_machine,
    print_table,
    spread,
    task_results,
    timed,
    wait_for_quiet,
    write_inventory,
)
from helpers.netns import netns_nodes
from helpers.replay import make_replay_venv

GPUS = 4  # of a node, see tests/replay/site/pynvml.py
MASTER = ["-o", "ControlMaster=auto", "-o", "ControlPersist=60s"]


class Servers:
    """The servers of one measurement, and both ways to start them."""

    def __init__(self, count, nodes, folder, venv, speed):
        self.count, self.folder, self.venv = count, folder, venv
        self.nodes = nodes[: -(-count // GPUS)]
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"architectures": ["Replay"], "model_type": "replay"}))
        self.inventory = write_inventory(
            folder / f"fleet{count}.yml",
            {
                node.name: {
                    **node.inventory,
                    "gpus": list(range(min(GPUS, count))),
                    "model": "replay",
                    "env": {"SGLANG_REPLAY_SPEED": str(speed)},
                    "sglang_root": node.root,
                    "sglang_engine_venv": str(venv),
                }
                for node in self.nodes
            },
        )
        self.options = {
            "sglang_models": {"replay": {"path": str(model), "served_name": "replay", "hybrid": True}},
            "sglang_artifacts": str(folder / "artifacts"),
            "benchmark": False,
        }

    def count_tasks(self, playbook):
        """Results of tasks on hosts: how many ran, how many were skipped, how many changed something."""
        results = task_results(playbook_events(playbook, self.inventory, self.options))
        skipped = sum(event["event"] == "runner_on_skipped" for event in results)
        changed = sum(bool(event["event_data"].get("res", {}).get("changed")) for event in results)
        return f"{len(results) - skipped} (+{skipped} skipped)", changed

    def play(self, playbook):
        self.forget_connections()
        argv = ["ansible-playbook", f"{playbook}.yml", "-i", self.inventory, "-e", json.dumps(self.options)]
        return timed([Path(sys.executable).parent / argv[0], *argv[1:]], playbook_env(self.folder / "home"))

    def by_hand(self, scripts):
        """The bash loop, with the start scripts that a deploy had written."""
        self.forget_connections()
        first = self.nodes[0].inventory
        control = Path(first["ansible_control_path_dir"]) / "hand-%h"
        options = [*first["ansible_ssh_common_args"].split(), *MASTER, "-o", f"ControlPath={control}"]
        options += ["-i", first["ansible_ssh_private_key_file"]]
        (self.folder / "ssh_options").write_text("\n".join(options) + "\n")
        servers = [f"{node.address},{port},{script}" for node, port, script in scripts]
        return timed(["bash", ROOT / "benchmarks" / "by_hand.sh", self.folder / "ssh_options", *servers])

    def keep_scripts(self):
        """Copies of the start scripts on the nodes, with node and port."""
        kept = []
        for node in self.nodes:
            for state in sorted((node.folder / "srv" / "sglang" / "run").glob("*.json")):
                told = json.loads(state.read_text())
                script = node.folder / Path(told["script"]).relative_to("/")
                copy = self.folder / f"{node.name}_{script.name}"
                copy.write_text(script.read_text())
                kept.append((node, told["port"], copy))
        return kept[: self.count]

    def end_by_hand(self):
        for node in self.nodes:
            node.run("for file in /srv/byhand/*.pid; do kill -9 -$(cat $file); done; rm -rf /srv/byhand")

    def forget_connections(self):
        """Every run opens its connections anew."""
        for control in Path(self.nodes[0].inventory["ansible_control_path_dir"]).iterdir():
            argv = ["ssh", "-o", f"ControlPath={control}", "-O", "exit", "node"]
            subprocess.run(argv, capture_output=True, timeout=5, check=False)


def replay_seconds(node, script, port):
    """Seconds that one replay by itself needs from its start until it answers /health with 200."""
    began = time.monotonic()
    node.run(f"mkdir -p /srv/byhand; cp {script} /srv/byhand/x.sh")
    node.run("cd /srv/byhand; setsid bash x.sh > x.log 2>&1 & echo $! > /srv/byhand/x.pid")
    health = f"curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.1:{port}/health"
    while node.run(health, check=False).stdout != "200":
        if time.monotonic() - began > 60:
            raise Failed(f"the replay does not become healthy: {node.run('cat /srv/byhand/x.log').stdout[-1000:]}")
        time.sleep(0.02)
    return time.monotonic() - began


def measure(servers, runs):
    """Rows of the table for one number of servers."""
    costs = {what: [] for what in ("deploy", "second deploy", "status", "by hand")}
    # The first round is counted and not timed.
    tasks = {"deploy": servers.count_tasks("deploy")}
    scripts = servers.keep_scripts()
    tasks["second deploy"] = servers.count_tasks("deploy")
    tasks["status"] = servers.count_tasks("status")
    tasks["by hand"] = (f"{4 * len(scripts)} and polls", len(scripts))
    if tasks["second deploy"][1]:
        raise Failed(f"the second deploy changed {tasks['second deploy'][1]} things")
    servers.play("stop")
    alone = replay_seconds(servers.nodes[0], scripts[0][2], scripts[0][1])
    servers.end_by_hand()
    loads = []
    for _ in range(runs):
        loads.append(wait_for_quiet(20))
        costs["deploy"].append(servers.play("deploy"))
        costs["second deploy"].append(servers.play("deploy"))
        costs["status"].append(servers.play("status"))
        servers.play("stop")
        costs["by hand"].append(servers.by_hand(scripts))
        servers.end_by_hand()
        shown = ", ".join(f"{what} {taken[-1].wall:.1f}" for what, taken in costs.items())
        print(f"{servers.count} servers: {shown}, load before {loads[-1]:.2f}", flush=True)
    print(f"{servers.count} servers: one replay alone takes {alone:.1f} s until it is healthy", flush=True)
    for what, taken in costs.items():
        wall, least, most = spread([cost.wall for cost in taken], 1)
        cpu = spread([cost.cpu for cost in taken], 1)[0]
        count, changed = tasks[what]
        yield [servers.count, what, count, changed, wall, f"{least} to {most}", cpu]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 16], help="how many; above 4, a multiple of 4")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--speed", type=float, default=1000, help="how many times faster than recorded the replay goes")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("controller_cost: nodes are network namespaces, and this is not root: run it with sudo")
    wait_for_quiet()
    print_machine()
    rows = []
    with tempfile.TemporaryDirectory(prefix="sgf-cost-") as folder, netns_nodes(-(-max(args.servers) // GPUS)) as nodes:
        venv = make_replay_venv(Path(folder) / "venv")
        for count in args.servers:
            own = Path(folder) / str(count)
            own.mkdir()
            rows += measure(Servers(count, nodes, own, venv, args.speed), args.runs)
    print_table(rows, ["servers", "what", "task results", "changed", "wall s", "min to max", "controller CPU s"])
    print(f"median of {args.runs}, each with new ssh connections; the replay at {args.speed:g} times its recorded speed")


if __name__ == "__main__":
    main()
