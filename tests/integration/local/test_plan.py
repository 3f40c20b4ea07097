# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""plan.yml from end to end, for nodes that are not asked, can't be reached, or have a model that nobody knows."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from ..conftest import ROOT, Fleet, free_ports

MODELS = yaml.safe_load((ROOT / "group_vars" / "all" / "models.yml").read_text(encoding="utf-8"))["sglang_models"]
STATED = {"gpu_free_gib": 94.97, "host_free_gb": 400}
TERMINAL, INDENTED = 80, 8


@pytest.fixture
def fleet(tmp_path):
    """A node whose memory is stated, one that refuses connections, and one with a model of an unknown class."""
    (closed,) = free_ports(1)
    unreachable = {"ansible_host": "127.0.0.1", "ansible_port": closed, "ansible_user": "nobody", "ansible_ssh_retries": 0}
    common = {"gpus": [0, 1], "model": "qwen3.6-27b", "sglang_engine_release": "0.5.17"}
    nodes = {
        "stated": {**common, "sglang_node_memory": STATED},
        "away": {**common, **unreachable},
        "strange": {**common, "model": "new", "sglang_node_memory": STATED},
    }
    new = {"path": "/m", "served_name": "new", "config": {"architectures": ["NewForCausalLM"]}}
    return Fleet(tmp_path, nodes, {"sglang_models": {**MODELS, "new": new}, "profile": "mtp_hicache"})


def told(run):
    (said,) = {task["msg"] for task in run.tasks["Tell the plan"].values()}
    return said


def test_what_can_be_planned_is_told_beside_what_cannot(fleet):
    run = fleet.run("plan")
    assert run.rc == 0, run.stdout
    said = told(run)
    flat = " ".join(said.split())
    assert "stated-gpu0 92.79 51.05 5.53" in flat
    assert "DOES NOT FIT" not in flat
    assert (
        "NOT PLANNED: away-gpu0, away-gpu1: away could not be reached: state its memory in the inventory as sglang_node_memory:"
        in flat
    )
    assert "NOT PLANNED: strange-gpu0, strange-gpu1: model class NewForCausalLM" in flat
    assert max(map(len, said.splitlines())) <= TERMINAL - INDENTED


def test_strict_fails_for_what_does_not_fit_and_for_what_cannot_be_planned(fleet):
    fine = fleet.run("plan", "--limit node_stated", strict=True)
    assert fine.rc == 0, fine.stdout
    assert fleet.run("plan", "--limit node_strange", strict=True).rc != 0
    small = {"sglang_node_memory": {**STATED, "host_free_gb": 200}}
    assert fleet.run("plan", "--limit node_stated", **small).rc == 0
    strict = fleet.run("plan", "--limit node_stated", strict=True, **small)
    assert strict.rc != 0
    assert "DOES NOT FIT: stated: host pools" in " ".join(told(strict).split())


def test_the_figure_of_a_reason_and_of_a_suggestion_fit_when_they_are_taken(fleet):
    small = {"sglang_node_memory": {**STATED, "host_free_gb": 200}}
    run = fleet.run("plan", "--limit node_stated", want_running=12, want_context=4096, **small)
    plan = run.tasks["Plan the memory of every server and node"]["stated-gpu0"]["plan"]
    assert plan["fits"] is False
    size = int(plan["reasons"][0].rpartition("hicache-size ")[2].split()[0])
    again = fleet.run("plan", "--limit node_stated", strict=True, sglang_server_args={"hicache-size": size}, **small)
    assert again.rc == 0, again.stdout
    suggestion = plan["servers"]["stated-gpu0"]["suggestion"]
    assert suggestion["possible"] is True
    taken = fleet.run("plan", "--limit node_stated", strict=True, sglang_server_args=suggestion["args"], **small)
    assert taken.rc == 0, taken.stdout
    server = taken.tasks["Plan the memory of every server and node"]["stated-gpu0"]["plan"]["servers"]["stated-gpu1"]
    assert server["max_running_requests"] >= 12 and server["kv_tokens"] >= 12 * 4096


@pytest.fixture
def asked(replay_venv, tmp_path):
    """A node that is asked, with an engine of 0.5.17 that the inventory does not name."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["qwen3.6-27b"]["config"]))
    here = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "gpus": [0, 1],
        "base_port": 41490,
        "model": "q27",
        "sglang_engine_venv": str(replay_venv),
    }
    fleet = Fleet(tmp_path, {"here": here})
    model = {"path": str(model), "served_name": "q", "hybrid": True, "args": {"load-format": "dummy"}}
    fleet.options = {"sglang_root": str(fleet.root), "sglang_models": {"q27": model}, "profile": "mtp"}
    return fleet


def test_the_release_found_on_the_node_decides(asked):
    boot = {
        "schema": 1,
        "model": "q27",
        "gpu": "replay of a 96 GB GPU",
        "release": "0.5.17",
        "profile": "mtp",
        "graphs_gib": 3.1,
    }
    kept = asked.artifacts / "boots" / "here-gpu0"
    kept.mkdir(parents=True)
    (kept / "1.json").write_text(json.dumps({**boot, "context_gib": 2.19, "free_gib": 139.8}))
    run = asked.run("plan")
    assert run.rc == 0, run.stdout
    plan = run.tasks["Plan the memory of every server and node"]["here-gpu0"]["plan"]
    # 0.5.17 holds nothing back for a multimodal cache, as 0.5.23, the newest known, does: and its record is found.
    server = plan["servers"]["here-gpu0"]
    assert server["graphs_gib"] == 3.1 and server["free_source"].endswith("for contexts as in 1 earlier boot")
    assert not asked.root.exists()


def test_a_node_with_another_release_than_stated_is_named_and_the_others_are_planned(asked):
    nodes = yaml.safe_load(asked.inventory.read_text())["nodes"]
    stated = {"gpus": [0], "model": "q27", "sglang_node_memory": {"gpu_free_gib": 94.97, "host_free_gb": 400}}
    asked.write({"here": {**nodes["here"], "sglang_engine_release": "0.5.20"}, "there": stated})
    run = asked.run(
        "plan", sglang_models={"q27": {**asked.options["sglang_models"]["q27"], "config": MODELS["qwen3.6-27b"]["config"]}}
    )
    assert run.rc == 0, run.stdout
    plan = run.tasks["Plan the memory of every server and node"]["here-gpu0"]["plan"]
    assert list(plan["servers"]) == ["there-gpu0"]
    assert plan["unplanned"]["here-gpu0"].startswith("here-gpu0: ")
    assert "0.5.17" in plan["unplanned"]["here-gpu0"]
