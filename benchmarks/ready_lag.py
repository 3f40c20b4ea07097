# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Seconds from the engine's "fired up and ready to roll" to the playbook's `ready`, on real SGLang for the CPU.

The log's stamps are whole seconds, so the log is followed here, every 10 ms, and each line gets the time when it came.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import (
    ROOT,
    Failed,
    moment,
    playbook_events,
    print_machine,
    print_table,
    spread,
    task_results,
    wait_for_quiet,
    write_inventory,
)

POLL_SECONDS = 0.01
SLUG = "sglang_cpu0"
TASK = "Wait until the server serves"
FIRED_UP = re.compile("The server is fired up and ready to roll")
OPENED = re.compile("Uvicorn running on")
GENERATED = re.compile('"POST /generate HTTP/1.1" 200')
ASKED = re.compile('"GET /(v1/loads|server_info|get_server_info)')


class Follower(threading.Thread):
    """Notes when each line of the next boot's log came."""

    def __init__(self, logs):
        super().__init__(daemon=True)
        self.logs, self.known = logs, set(logs.glob("*.log"))
        self.lines, self.over = [], threading.Event()

    def run(self):
        while not (fresh := set(self.logs.glob("*.log")) - self.known):
            if self.over.wait(POLL_SECONDS):
                return
        rest = ""
        with open(fresh.pop(), encoding="utf-8", errors="replace") as stream:
            while not self.over.wait(POLL_SECONDS):
                *lines, rest = (rest + stream.read()).split("\n")
                now = time.time()
                self.lines += [(now, line) for line in lines]

    def first(self, pattern, since=0.0):
        return next((at for at, line in self.lines if at >= since and pattern.search(line)), None)


def one_start(inventory, root, options):
    """Seconds after "fired up" of the generation, the last answer, the module's end, and the result on the controller."""
    follower = Follower(root / "logs" / SLUG)
    follower.start()
    events = playbook_events("deploy", inventory, options)
    follower.over.set()
    follower.join()
    result = next(event for event in task_results(events) if event["event_data"]["task"] == TASK)
    fired = follower.first(FIRED_UP)
    answer = result["event_data"]["res"]
    if fired is None or answer.get("state") != "ready":
        raise Failed(f"no start was seen: log {answer.get('log')}, state {answer.get('state')}")
    # The last thing that the module does when it has decided is to write the state file.
    decided = (root / "run" / f"{SLUG}.json").stat().st_mtime
    shown = [moment(event) for event in events if event["event"] == "verbose" and "warm-up" in event.get("stdout", "")]
    return {
        "generation came back": follower.first(GENERATED, fired) - fired,
        "cap was asked": max(at for at, line in follower.lines if ASKED.search(line) and at >= fired) - fired,
        "module decided": decided - fired,
        "result at the controller": moment(result) - fired,
        "(warm-up began)": follower.first(OPENED) - fired,
        "(warm-up shown)": shown[-1] - fired if shown else float("nan"),
    }


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".demo" / "engine", help="venv of SGLang for the CPU")
    parser.add_argument("--model", type=Path, default=ROOT / ".demo" / "models" / "tiny", help="folder of the tiny model")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    if not (args.venv / "bin" / "python").exists() or not args.model.exists():
        sys.exit(f"ready_lag: no engine in {args.venv} or no model in {args.model}: run make demo, or name others")
    runs, loads = [], []
    with tempfile.TemporaryDirectory(prefix="sgf-lag-") as folder:
        root = Path(folder) / "root"
        node = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "servers": [{"port": free_port()}],
            "model": "tiny",
            "sglang_engine_device": "cpu",
            "sglang_engine_venv": str(args.venv.absolute()),
        }
        inventory = write_inventory(Path(folder) / "fleet.yml", {"here": node})
        options = {
            "sglang_root": str(root),
            "sglang_artifacts": str(Path(folder) / "artifacts"),
            "sglang_models": {"tiny": {"path": str(args.model.absolute()), "served_name": "tiny"}},
            "benchmark": False,
        }
        wait_for_quiet()
        print_machine()
        try:
            for number in range(1, args.runs + 1):
                runs.append(one_start(inventory, root, options))
                playbook_events("stop", inventory, {**options, "sglang_stop_timeout": 5})
                loads.append(wait_for_quiet(1))
                shown = ", ".join(f"{name} {seconds:+.2f}" for name, seconds in runs[-1].items())
                print(f"start {number}: {shown}, load {loads[-1]:.2f}", flush=True)
        finally:
            playbook_events("stop", inventory, {**options, "sglang_stop_timeout": 5})
    rows = [[name, *spread([run[name] for run in runs])] for name in runs[0]]
    print_table(rows, [f"s after fired up, {len(runs)} starts", "median", "min", "max"])
    print(f"load {min(loads):.2f} to {max(loads):.2f}")


if __name__ == "__main__":
    main()
