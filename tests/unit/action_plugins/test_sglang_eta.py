# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_eta: which records a date is made from."""

from __future__ import annotations

import datetime
import json
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail
from helpers.compare import record, run

SERVER = {
    "name": "node1-gpu0", "node": "node1", "gpus": 1, "model": "qwen3.6-27b", "profile": "nomtp", "asked_profile": "",
}  # fmt: skip


@pytest.fixture
def act(load, monkeypatch, tmp_path):
    plugin = load("action_plugins", "sglang_eta")
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def _act(**args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        asked = {"samples": 1000, "output_tokens": 256, "servers": [SERVER], "folders": [str(tmp_path)], **args}
        action._task = SimpleNamespace(args=asked)
        return action.run(None, {})

    return _act


def write(folder, kind, name, content):
    path = folder / kind / "node1-gpu0" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def benchmark(speed, **labels):
    return {
        "schema": 1, "measured_at": "2026-11-29T09:00:00Z", "outcome": "measured", "error": None, "server": "node1-gpu0",
        "labels": {
            "node": "node1", "profile": "nomtp", "model": "qwen3.6-27b", "release": "0.5.17", "launch_sha256": "x",
            "gpus": ["NVIDIA H200"], **labels,
        },
        "asked": {"input_tokens": 128, "output_tokens": 256, "prompts_per_concurrency": 4, "min_prompts": 8},
        "runs": [run(16, speed)],
    }  # fmt: skip


def test_a_date_has_the_controllers_zone(act):
    told = act(tok_s=10.0)
    at = datetime.datetime.fromisoformat(told["eta"]["finish"]["at"])
    assert at.utcoffset() == datetime.datetime.now().astimezone().utcoffset()
    assert told["servers"] == [] and told["eta"]["hours"]["median"] == round(25600 / 3600, 2)


def test_a_benchmark_counts_where_nothing_was_compared(act, tmp_path):
    write(tmp_path, "benchmarks", "1", benchmark(500.0))
    write(tmp_path, "benchmarks", "2", benchmark(9.0, comparison="2026-11-29T10:00:00.000Z"))
    write(tmp_path, "benchmarks", "3", {**benchmark(8.0), "outcome": "failed"})
    write(tmp_path, "benchmarks", "4", "{cut")
    assert act()["eta"]["tok_s"]["median"] == 500.0
    write(tmp_path, "compare", "1", record(runs=[run(16, 600.0)], launch_sha256="x"))
    assert act()["eta"]["tok_s"]["median"] == 600.0


def test_the_profile_is_the_one_asked_for_or_booted_last_or_the_inventorys(act, tmp_path):
    write(tmp_path, "compare", "1", record("nomtp", [run(16, 100.0)]))
    write(tmp_path, "compare", "2", record("mtp", [run(16, 200.0)]))
    assert act()["servers"][0]["profile"] == "nomtp"
    boot = {"schema": 1, "server": "node1-gpu0", "gpu": "NVIDIA H200", "profile": "mtp"}
    write(tmp_path, "boots", "20260101T000000Z", {**boot, "profile": "older"})
    write(tmp_path, "boots", "20260102T000000Z", boot)
    assert act()["eta"]["tok_s"]["median"] == 200.0
    assert act(servers=[{**SERVER, "asked_profile": "nomtp"}])["eta"]["tok_s"]["median"] == 100.0


def test_only_profiles_that_can_be_asked_for_are_offered(act, tmp_path):
    write(tmp_path, "compare", "1", record("mtp", [run(16, 100.0)]))
    write(tmp_path, "compare", "2", record("gone", [run(16, 200.0)], at="2026-12-01T00:00:00.000Z"))
    with pytest.raises(AnsibleActionFail) as caught:
        act(known=["nomtp", "mtp"])
    assert "no server's speed with profile nomtp is known (mtp is: -e profile=mtp): measure it" in caught.value.message
    # What a server booted last counts, also where the inventory has it no more.
    write(tmp_path, "boots", "1", {"schema": 1, "server": "node1-gpu0", "gpu": "NVIDIA H200", "profile": "gone"})
    assert act(known=["nomtp", "mtp"])["eta"]["tok_s"]["median"] == 200.0


def test_counters_that_were_read_live_are_taken_instead(act, tmp_path):
    write(tmp_path, "compare", "1", record("nomtp", [run(16, 100.0)]))
    figure = {"median": 50.0, "min": 40.0, "max": 60.0, "runs": 6}
    other = {**SERVER, "name": "node2-gpu0", "node": "node2"}
    live = [{"name": "node1-gpu0", "tok_s": figure, "running": 3, "waiting": 0, "detail": None}]
    told = act(servers=[SERVER, other], live=live)
    assert told["eta"]["tok_s"] == figure
    assert told["eta"]["unknown"] == ["node2-gpu0"]
    assert told["servers"][1]["source"] == "its node gave no answer"


def test_an_idle_fleet_is_told_to_have_no_requests(act):
    idle = [{"name": "node1-gpu0", "tok_s": None, "running": 0, "waiting": 0, "detail": "it generated nothing in 60 s"}]
    with pytest.raises(AnsibleActionFail) as caught:
        act(live=idle, servers=[SERVER, {**SERVER, "name": "node2-gpu0"}])
    assert caught.value.message == (
        "no server's counters give a speed (node1-gpu0: it generated nothing in 60 s; node2-gpu0: its node gave no answer):"
        " send it the job's requests and read again, or leave -e live=true out for what was measured"
    )


def test_a_fleet_that_does_not_run_is_told_to_be_started(act):
    gone = [{"name": "node1-gpu0", "tok_s": None, "running": None, "waiting": None, "detail": "connection refused"}]
    with pytest.raises(AnsibleActionFail) as caught:
        act(live=gone)
    assert caught.value.message == (
        "no server's counters give a speed (node1-gpu0: connection refused): start it with deploy.yml, send it the job's"
        " requests and read again, or leave -e live=true out for what was measured"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": None}, "eta.yml needs -e samples=…"),
        ({"output_tokens": None}, "eta.yml needs -e output_tokens=…"),
        ({"done": 2000}, "done is 2000 and samples is 1000"),
        ({"tok_s": -1.0}, "tok_s is -1.0: expected a number above 0"),
        ({"check_only": True, "done": 2000}, "done is 2000 and samples is 1000"),
        ({"check_only": True, "profile": "r9", "known": ["nomtp", "mtp"]}, "profile 'r9' is not known: known are nomtp, mtp"),
        ({"check_only": True, "tok_s": 5.0, "live": []}, "-e tok_s=5.0 gives the fleet's speed and -e live=true reads it"),
    ],
)
def test_bad_input_is_one_sentence(act, change, said):
    with pytest.raises(AnsibleActionFail) as caught:
        act(**change)
    assert said in caught.value.message


def test_a_check_needs_no_speed(act):
    assert act(check_only=True) == {"changed": False}
