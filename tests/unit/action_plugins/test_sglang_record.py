# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_record: one file a boot, written once, and no harm where it can't be written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail

READY = {
    "state": "ready", "outcome": "ready", "launched_at": "2026-11-29T16:30:56Z", "elapsed": 61.5, "cap": 4,
    "stage_seconds": {"weights": 41.4}, "figures": {"kv_tokens": 365151, "state_slots": 24},
}  # fmt: skip
PLAN = {"servers": {"n-gpu0": {"kv_tokens": 367751, "mamba_slots": 24, "max_running_requests": 4}}}
PATH = "boots/n-gpu0/20261129T163056Z.json"


@pytest.fixture
def run(load, monkeypatch):
    plugin = load("action_plugins", "sglang_record")
    warned = []
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(plugin, "display", SimpleNamespace(warning=warned.append))

    def _run(**args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args=args)
        return action.run(None, {})

    _run.warned = warned
    return _run


def server(name="n-gpu0", started=True, ready=READY, **more):
    spec = {"name": name, "node": "n", "gpus": [0], "args": {}, "device": "cuda"}
    spec.update(model="m", model_path="/m", release="0.5.17", profile="p")
    return {
        "name": name, "spec": spec, "found": {}, "declared": {}, "model": {}, "checked": {}, "started": started,
        "ready": ready, **more,
    }  # fmt: skip


def test_a_boot_is_kept_under_the_time_of_its_launch(run, tmp_path):
    result = run(servers=[server()], plan=PLAN, folder=str(tmp_path / "artifacts"))
    text = (tmp_path / "artifacts" / PATH).read_text()
    assert [json.loads(text)] == result["records"]
    assert text.endswith("}\n")
    (record,) = result["records"]
    assert (record["server"], record["planned"], record["observed"]["cap"]) == ("n-gpu0", PLAN["servers"]["n-gpu0"], 4)
    assert result["report"].startswith("Planned/observed\n")
    assert "367751/365151" in result["report"]
    assert (result["changed"], run.warned) == (False, [])


def test_a_record_is_never_overwritten(run, tmp_path):
    run(servers=[server()], plan=PLAN, folder=str(tmp_path))
    first = (tmp_path / PATH).read_text()
    again = run(servers=[server(ready={**READY, "cap": 9})], plan=PLAN, folder=str(tmp_path))
    assert again["records"][0]["observed"]["cap"] == 9
    assert (tmp_path / PATH).read_text() == first
    assert run.warned == []
    run(servers=[server(ready={**READY, "launched_at": "2026-11-29T17:00:00Z"})], plan=PLAN, folder=str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "boots/n-gpu0").iterdir()) == [
        "20261129T163056Z.json",
        "20261129T170000Z.json",
    ]


def test_a_server_that_was_only_found_running_is_told_and_not_kept(run, tmp_path):
    result = run(servers=[server(started=False)], plan=PLAN, folder=str(tmp_path))
    assert "367751/365151" in result["report"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ready", [{}, {**READY, "state": "failed"}])
def test_a_server_that_is_not_ready_is_left_out(run, tmp_path, ready):
    result = run(servers=[server(ready=ready), server("n-gpu1")], plan=PLAN, folder=str(tmp_path))
    assert [record["server"] for record in result["records"]] == ["n-gpu1"]
    assert [path.name for path in (tmp_path / "boots").iterdir()] == ["n-gpu1"]


@pytest.mark.parametrize("plan", [{}, None, {"servers": {}}, {"servers": {"another": {"kv_tokens": 1}}}])
def test_without_a_plan_a_boot_is_kept_and_nothing_is_compared(run, tmp_path, plan):
    result = run(servers=[server()], plan=plan, folder=str(tmp_path))
    assert (result["report"], result["records"][0]["compared"]) == ("", [])
    assert (tmp_path / PATH).is_file()


def test_a_folder_that_cannot_be_written_is_a_warning(run, tmp_path):
    (tmp_path / "boots").write_text("a file")
    result = run(servers=[server(), server("n-gpu1")], plan=PLAN, folder=str(tmp_path))
    assert len(result["records"]) == 2
    assert run.warned == [
        f"{name}: the record of its boot was not kept: {tmp_path}/boots/{name}: Not a directory"
        for name in ("n-gpu0", "n-gpu1")
    ]


def test_bad_figures_of_the_inventory_are_one_sentence(run, tmp_path):
    with pytest.raises(AnsibleActionFail) as caught:
        run(servers=[server(declared={"gpu_free_gib": "94"})], folder=str(tmp_path))
    assert caught.value.message == "n-gpu0: sglang_node_memory of n: gpu_free_gib is '94': expected a number above 0"
