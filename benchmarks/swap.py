# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a swap takes, and what it does with profiles that are no good: servers of real SGLang behind the real router.

Prints a table, and with --write renews its rows in docs/swap.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Failed, print_machine, print_table, renew, wait_for_quiet, write_inventory
from helpers.runner import run_playbook
from helpers.traffic import Clients

PAGE = ROOT / "docs" / "swap.md"
HEADERS = ["swap", "servers", "outcomes", "wall s", "out s", "own s", "out at once", "answered", "failed", "measured", "load"]
ARGS = {"enable-metrics": True, "max-running-requests": 48}
CRASH = "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS"  # SGLang's own: the scheduler raises after so many decode steps
PROFILES = {
    "nomtp": {"args": ARGS},
    "small": {"args": {**ARGS, "max-running-requests": 8}},
    "bad_context": {"args": {**ARGS, "context-length": 999999}},
    "throttled": {"args": {**ARGS, "max-running-requests": 1}},
    # Eight steps are its own warm-up, four the first request of the wait, four each of the watch.
    "first_request": {"args": ARGS, "env": {CRASH: "10"}},
    "minute_two": {"args": ARGS, "env": {CRASH: "40"}},
}
FEW = {"sglang_swap_gate_pairs": 3}  # what is several times slower is soon told
# What is swapped to, options, and what must come of it: outcomes of the first server and of every other.
ROLLS = [
    ("another profile", "small", {}, ("swapped", "swapped")),
    ("back, with a gate", "nomtp", {"gate": "benchmark"}, ("swapped", "swapped")),
    ("cannot start (context length)", "bad_context", {}, ("reverted", "not begun")),
    ("starts and is slow, with a gate", "throttled", {"gate": "benchmark", **FEW}, ("reverted", "not begun")),
    ("dies at the first request", "first_request", {}, ("reverted", "not begun")),
    ("dies while it is watched", "minute_two", {}, ("reverted", "not begun")),
    ("to what already runs", "nomtp", {}, ("unchanged", "unchanged")),
]
# A row's first two cells.
KNOWN_BY = [(roll[0], str(count)) for roll in ROLLS for count in (2, 3)]
GATE = {"sglang_swap_gate_pairs": 5, "sglang_swap_gate_concurrency": 4, "sglang_swap_gate_prompts": 8}
GATE |= {"sglang_swap_gate_input_tokens": 64, "sglang_swap_gate_output_tokens": 32}


class Fleet:
    def __init__(self, folder, engine, router, model, port, count):
        self.artifacts = folder / "artifacts"
        self.ports, self.router = [port + 2 + number for number in range(count)], port
        self.names = [f"here-cpu{number}" for number in range(count)]
        self.inventory = write_inventory(
            folder / "fleet.yml",
            {
                "here": {
                    "ansible_connection": "local",
                    "ansible_python_interpreter": sys.executable,
                    "servers": [{"port": port} for port in self.ports],
                    "model": "tiny",
                    "sglang_engine_device": "cpu",
                    "sglang_engine_venv": str(engine),
                    "sglang_root": str(folder / "root"),
                }
            },
        )
        self.options = {
            "sglang_artifacts": str(self.artifacts),
            "sglang_models": {"tiny": {"path": str(model), "served_name": "tiny"}},
            "sglang_profiles": PROFILES,
            "sglang_router_enabled": True,
            "sglang_router_venv": str(router),
            "sglang_router_port": self.router,
            "sglang_swap_settle_every": 1,
            "settle": [12, 2],
            "benchmark": False,
            **GATE,
        }

    def run(self, playbook, **options):
        return run_playbook(ROOT, f"{playbook}.yml", self.inventory, extravars={**self.options, **options}, timeout=1200)


def roll(fleet, title, profile, options, expected):
    """One row: a swap under traffic, and what came of it."""
    kept = set((fleet.artifacts / "swaps").glob("*.json"))
    with Clients(fleet.router, servers=fleet.ports) as clients:
        began = time.monotonic()
        rolled = fleet.run("swap", profile=profile, **options)
        wall = time.monotonic() - began
    fresh = set((fleet.artifacts / "swaps").glob("*.json")) - kept
    servers = json.loads(fresh.pop().read_text(encoding="utf-8"))["servers"] if fresh else []
    results = {server["name"]: server["result"] for server in servers}
    outcomes = [results.get(name, {"outcome": "unchanged"})["outcome"] for name in fleet.names]
    if outcomes != [expected[0], *[expected[1]] * (len(fleet.names) - 1)]:
        raise Failed(f"{title}: {outcomes}, expected {expected}:\n{rolled.stdout[-6000:]}")
    spent = [result["seconds"] for result in results.values() if (result.get("seconds") or {}).get("start") is not None]
    # What the swap itself adds to the drain, the start and the watch of a server, where nothing is measured.
    own = [each["batch"] - sum(each[step] or 0 for step in ("drain", "stop", "start", "settle")) for each in spent]
    out = [f"{result['seconds']['out']:.0f}" for result in results.values() if (result.get("seconds") or {}).get("out")]
    return [
        title,
        str(len(fleet.names)),
        ", ".join(dict.fromkeys(outcomes)),
        f"{wall:.0f}",
        " + ".join(out) or "-",
        " + ".join(f"{seconds:.1f}" for seconds in own) if own and "gate" not in options else "-",
        str(clients.most_out),
        str(clients.answers[200]),
        str(clients.failed),
        time.strftime("%Y-%m-%d", time.gmtime()),
        f"{os.getloadavg()[0]:.0f}",
    ], clients.wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".demo" / "engine", help="an engine for the CPU")
    parser.add_argument("--router", type=Path, default=ROOT / ".demo" / "router", help="a venv for the router, made if need be")
    parser.add_argument("--model", type=Path, default=ROOT / ".demo" / "models" / "tiny", help="the tiny model")
    parser.add_argument("--port", type=int, default=30190, help="the first of five free ports")
    parser.add_argument("--servers", type=int, choices=(2, 3), default=2, help="how many servers there are")
    parser.add_argument("--only", nargs="*", help="titles of the rolls to run, all without it")
    parser.add_argument("--busy", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--write", action="store_true", help="renew the rows in docs/swap.md")
    args = parser.parse_args()
    for needed in (args.venv / "bin" / "python", args.model / "config.json"):
        if not needed.exists():
            sys.exit(f"{needed} is not there: run `make demo` first, or name others with --venv and --model")
    if not args.busy:
        wait_for_quiet()
    print_machine()
    rows = []
    with tempfile.TemporaryDirectory(prefix="sgf-swap-") as folder:
        fleet = Fleet(Path(folder), args.venv, args.router, args.model, args.port, args.servers)
        try:
            deployed = fleet.run("deploy", profile="nomtp")
            if deployed.rc:
                raise Failed(deployed.stdout[-3000:])
            for title, *rest in ROLLS:
                if args.only and title not in args.only:
                    continue
                row, failed = roll(fleet, title, *rest)
                rows.append(row)
                print(row, *failed[:3], flush=True)
                if args.write:  # at once: the next may come to something else than expected
                    renew(PAGE, HEADERS, [row], KNOWN_BY, keys=2)
        finally:
            fleet.run("stop", sglang_stop_timeout=5)
    print_table(rows, HEADERS)


if __name__ == "__main__":
    main()
