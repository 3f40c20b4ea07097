# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a comparison does on GPUs, on a replay: told by --check, and where a profile dies. A replay is never measured."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml
from helpers.compare import holder
from helpers.swap import begun

from ..conftest import ROOT, Fleet, free_ports

MODELS = yaml.safe_load((ROOT / "group_vars/all/models.yml").read_text())["sglang_models"]


@pytest.fixture(scope="module")
def fleet(replay_venv, tmp_path_factory):
    """A node with two servers of one GPU and one of two."""
    folder = tmp_path_factory.mktemp("compare")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["qwen3.6-27b"]["config"]))
    here = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "servers": [{"gpus": gpus, "port": port} for gpus, port in zip(([0], [1], [2, 3]), free_ports(3))],
        "model": "qwen3.6-27b",
        "sglang_engine_venv": str(replay_venv),
    }
    fleet = Fleet(folder, {"here": here})
    fleet.options = {
        "sglang_root": str(fleet.root),
        "sglang_models": {
            "qwen3.6-27b": {"path": str(model), "served_name": "q", "hybrid": True, "args": {"load-format": "dummy"}},
        },
    }
    return fleet


def told(result):
    task = "Tell what is still to be measured"
    return {host: answer["msg"] for host, answer in result.tasks[task].items()}


def test_one_server_of_each_kind_is_chosen(fleet):
    result = fleet.run("compare", cmdline="--check", profiles=["nomtp", "mtp"], sweep="both")
    assert result.rc == 0, result.stdout
    assert told(result) == {
        name: f"{name}: 6 turns to measure, 0 cells measured before; then it is stopped, as it was"
        for name in ("here-gpu0", "here-gpu2")
    }
    turns = result.tasks["Work out what is still to be measured"]["here-gpu0"]["turns"]
    assert [(turn["profile"], turn["repeat"]) for turn in turns[:3]] == [("nomtp", 1), ("mtp", 1), ("nomtp", 2)]
    assert [load["workload"]["name"] for load in turns[0]["todo"]] == ["short", "long"]
    assert not fleet.artifacts.exists() and not fleet.root.exists()


def test_a_limit_is_taken_at_its_word(fleet):
    asked = {"profiles": "nomtp,mtp", "repeats": 1, "concurrencies": 4}
    result = fleet.run("compare", cmdline="--check --limit here-gpu0,here-gpu1", **asked)
    assert result.rc == 0, result.stdout
    assert sorted(told(result)) == ["here-gpu0", "here-gpu1"]
    turns = result.tasks["Work out what is still to be measured"]["here-gpu0"]["turns"]
    assert [load["concurrencies"] for turn in turns for load in turn["todo"]] == [[4], [4]]


def test_without_profiles_it_is_said_how_they_are_given(fleet):
    result = fleet.run("compare", cmdline="--check")
    assert result.rc != 0
    refusal = result.tasks["Work out what is sent, and refuse what can't be measured"]["here-gpu0"]["msg"]
    assert refusal.startswith(
        'compare.yml needs profiles to compare: add -e \'{"profiles": ["nomtp", "mtp"]}\'; known are nomtp'
    )


def test_a_profile_that_does_not_fit_is_left_to_the_others(fleet):
    huge = {"nomtp": {"args": {"mem-fraction-static": 0.85}}, "huge": {"args": {"mem-fraction-static": 0.5}}}
    asked = {"profiles": ["huge", "nomtp"], "sglang_profiles": huge, "cmdline": "--check --limit here-gpu0"}
    result = fleet.run("compare", **asked)
    assert result.rc == 0, result.stdout
    turns = result.tasks["Work out what is still to be measured"]["here-gpu0"]["turns"]
    assert {turn["profile"] for turn in turns} == {"nomtp"}
    assert "then it is stopped, as it was; huge is left out: the plan does not fit" in told(result)["here-gpu0"]
    alone = fleet.run("compare", **{**asked, "profiles": ["huge"]})
    assert alone.rc != 0
    refusal = alone.tasks["Refuse when no profile can be started"]["here-gpu0"]["msg"]
    assert refusal.startswith("no profile can be started, nothing was touched: the plan does not fit")


def test_a_profile_that_dies_as_it_starts_is_kept_and_told(fleet):
    dying = {"args": {"mem-fraction-static": 0.85}, "env": {"SGLANG_REPLAY": "f_mem_small", "SGLANG_REPLAY_SPEED": "100"}}
    result = fleet.run("compare", cmdline="--limit here-gpu0", profiles=["dying"], repeats=2, sglang_profiles={"dying": dying})
    assert result.rc == 2, result.stdout
    kept = [json.loads(path.read_text()) for path in sorted((fleet.artifacts / "compare/here-gpu0").glob("*.json"))]
    # Tried once of two turns, and what was before is there again: nothing.
    assert [one["kind"] for one in kept] == ["begin", "refused", "end"]
    refused, told = kept[1], result.tasks["Fail for what could not be measured or put back"]["here-gpu0"]["msg"]
    assert (refused["profile"], refused["repeat"], len(refused["launch_sha256"])) == ("dying", 1, 64)
    ready, why = refused["error"].split(": ", 1)
    assert ready == "here-gpu0 did not become ready"
    assert told == f"profile dying did not start on here-gpu0: {why}; here-gpu0 is stopped again, as it was"
    assert kept[2]["put_back"] is True
    assert json.loads((fleet.root / "run/sglang_gpu0.json").read_text())["stopped_at"]
    assert not (fleet.root / "run/sglang_gpu0.compare.lock.json").exists()


def test_a_server_that_a_swap_has_is_refused(fleet):
    swap = fleet.root / "run/sglang_gpu1.swap.json"
    swap.parent.mkdir(parents=True, exist_ok=True)
    swap.write_text(json.dumps(begun(begun_at="noon")))
    asked = {"cmdline": "--check --limit here-gpu1", "profiles": ["nomtp", "mtp"]}
    refused = fleet.run("compare", **asked)
    assert refused.rc != 0
    said = refused.tasks["Refuse a server that a swap has"]["here-gpu1"]["msg"]
    assert said.startswith("here-gpu1 is in a swap to mtp that bob@desk began at noon and that is not over: wait for it")
    swap.write_text(json.dumps(begun(outcome="lost")))
    over = fleet.run("compare", **asked)
    assert over.rc == 0, over.stdout


@pytest.mark.parametrize("playbook", ["compare", "deploy", "swap", "benchmark", "stop"])
def test_a_server_whose_profiles_are_compared_is_left_to_that(fleet, playbook):
    lock = fleet.root / "run/sglang_gpu2.compare.lock.json"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(json.dumps(holder("here-gpu2")))
    options = {"profiles": ["nomtp", "mtp"]} if playbook == "compare" else {}
    result = fleet.run(playbook, cmdline="--limit here-gpu2", **options)
    assert result.rc != 0 and lock.exists()
    assert "bob@desk compares profiles on here-gpu2 since noon" in re.sub(r"\s+", " ", result.stdout)
    assert not (fleet.root / "run/sglang_gpu2.json").exists()
    # Gone by now: nothing is held, and who only looks takes nothing over.
    lock.write_text(json.dumps(holder("here-gpu2", alive=False)))
    if playbook in ("compare", "stop"):
        after = fleet.run(playbook, cmdline="--check --limit here-gpu2", **options)
        assert after.rc == 0 and lock.exists(), after.stdout
    lock.unlink()
