# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a comparison would do on GPUs, told by --check on a replay: nothing is started, so there is nothing to measure."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from ..conftest import ROOT, Fleet

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
        "servers": [{"gpus": [0]}, {"gpus": [1]}, {"gpus": [2, 3]}],
        "base_port": 41480,
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
    result = fleet.run("compare", cmdline="--check --limit here-gpu0,here-gpu1", profiles="nomtp,mtp", repeats=1)
    assert result.rc == 0, result.stdout
    assert sorted(told(result)) == ["here-gpu0", "here-gpu1"]


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
