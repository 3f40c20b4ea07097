# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A serving fleet of real SGLang changes its profile under traffic, and keeps the old one where the new is slower."""

from __future__ import annotations

import json
import time

import pytest
from helpers.traffic import Traffic

pytestmark = pytest.mark.engine

NAMES = ("here-cpu0", "here-cpu1")
KEY = "key of the test"
BASE = {"requires": {"device": "cpu"}, "args": {"enable-metrics": True, "max-running-requests": 48}}
PROFILES = {
    "nomtp": BASE,
    "small": {**BASE, "args": {**BASE["args"], "max-running-requests": 8}},
    # Threads that wait for each other at every step: twenty times slower on a model of this size.
    "slow": {**BASE, "env": {"OMP_NUM_THREADS": "4"}},
}


def state(fleet, number):
    return json.loads((fleet.root / f"run/sglang_cpu{number}.json").read_text())


def url(fleet, number):
    return f"http://127.0.0.1:{fleet.ports[number]}"


@pytest.fixture(scope="module")
def deployed(local_fleet):
    local_fleet.options |= {"sglang_profiles": PROFILES, "settle": [2]}
    first = local_fleet.run("deploy", profile="nomtp", benchmark=False)
    assert first.rc == 0, first.stdout
    return first


def test_a_roll_under_traffic_takes_one_server_out_at_a_time_and_fails_no_request(deployed, local_fleet):
    began = time.monotonic()
    with Traffic([url(local_fleet, 0), url(local_fleet, 1)], key=KEY) as traffic:
        rolled = local_fleet.run("swap", profile="small")
    wall = time.monotonic() - began
    assert rolled.rc == 0, rolled.stdout
    assert traffic.failed == [] and traffic.answered > 50
    assert traffic.most_out == 1, "never both, and one at some time"
    results = json.loads(next((local_fleet.artifacts / "swaps").glob("*.json")).read_text())["servers"]
    assert [server["result"]["outcome"] for server in results] == ["swapped", "swapped"]
    assert [state(local_fleet, number)["profile"] for number in (0, 1)] == ["small", "small"]
    out = sum(server["result"]["seconds"]["out"] for server in results)
    starts = sum(rolled.tasks["Wait until the server serves"][name]["elapsed"] for name in NAMES)
    assert starts < out < wall

    again = local_fleet.run("swap", profile="small")
    assert again.rc == 0 and [again.changed(name) for name in NAMES] == [0, 0], again.stdout
    shown = local_fleet.run("swap", "--check --diff", profile="nomtp")
    assert shown.rc == 0, shown.stdout
    assert "max-running-requests: 8 -> 48" in next(iter(shown.tasks["Tell what will change"].values()))["msg"]
    for name in NAMES:
        (diff,) = (part for part in shown.tasks["Start the server"][name]["diff"] if "process" in part["before_header"])
        assert "\n8\n" in diff["before"] and "\n48\n" in diff["after"]
    assert [state(local_fleet, number)["profile"] for number in (0, 1)] == ["small", "small"], "nothing was touched"


def test_what_is_slower_by_a_benchmark_is_put_back_and_reaches_one_server_only(deployed, local_fleet):
    before = [state(local_fleet, number) for number in (0, 1)]
    rolled = local_fleet.run(
        "swap", profile="slow", gate="benchmark", sglang_swap_gate_pairs=3, sglang_swap_gate_concurrency=4,
        sglang_swap_gate_prompts=8, sglang_swap_gate_input_tokens=16, sglang_swap_gate_output_tokens=16,
    )  # fmt: skip
    assert rolled.rc != 0
    reason = rolled.tasks["Fail for a server that was not swapped"]["here-cpu0"]["msg"]
    assert "here-cpu0 is slower than before: " in reason and "tolerated is -5 %" in reason
    after = [state(local_fleet, number) for number in (0, 1)]
    assert after[1] == before[1], "its neighbour was not touched"
    assert after[0]["launch_sha256"] == before[0]["launch_sha256"] and after[0]["launched_at"] != before[0]["launched_at"]
    told = rolled.tasks["Tell what came of it"]["here-cpu0"]["msg"]
    assert "here-cpu0 REVERTED" in told and "not begun" in told
    assert "key of the test" not in rolled.stdout
