# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_plan: refuse, warn or tell, and which records it learns from."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail

NAMED = "NVIDIA H200"


@pytest.fixture
def run(load, monkeypatch):
    plugin = load("action_plugins", "sglang_plan")
    warned = []
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(plugin, "display", SimpleNamespace(warning=warned.append))

    def _run(**args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args=args)
        return action.run(None, {})

    _run.warned = warned
    return _run


@pytest.fixture
def server(fleet_data):
    """A server of a node that has so much free memory; `config` and `device` may be others."""

    def _server(host_free_gb=900, name="n-gpu0", device="cuda", gpu_free_gib=94.97, **more):
        args = {"mem-fraction-static": 0.85, "enable-hierarchical-cache": True, "hicache-size": 150}
        spec = {"name": name, "node": "n", "gpus": [0], "args": args, "device": device}
        spec.update(model="m", model_path="/m", release="0.5.17", profile="p")
        stated = {"gpu_free_gib": gpu_free_gib, "host_free_gb": host_free_gb, "gpu": NAMED}
        model = {"path": "/m", "config": fleet_data["sglang_models"]["qwen3.6-27b"]["config"], **more}
        return {"name": name, "spec": spec, "found": {}, "declared": stated, "model": model, "checked": {}}

    return _server


@pytest.mark.parametrize("when_not", ["refuse", "warn", "tell"])
def test_what_fits_is_told(run, server, when_not):
    result = run(servers=[server()], when_not=when_not)
    assert (result["changed"], result["plan"]["fits"], run.warned) == (False, True, [])
    assert result["report"].startswith("On the card, GiB\n")
    assert "n-gpu0" in result["report"]


def test_what_does_not_fit_is_refused_with_every_reason(run, server):
    for args in ({"when_not": "refuse"}, {}):
        with pytest.raises(AnsibleActionFail) as caught:
            run(servers=[server(100), server(100, "n-gpu1", gpu_free_gib=40)], **args)
        message = caught.value.message
        assert message.startswith("the plan does not fit, nothing was touched: n-gpu1: ")
        assert "; n: host pools " in message
        assert message.endswith(": hicache-size 39 on each of its 2 servers fits; -e plan=warn goes on all the same")
        assert run.warned == []


def test_what_does_not_fit_is_a_warning_where_that_is_asked_for(run, server):
    result = run(servers=[server(100)], when_not="warn")
    assert result["plan"]["fits"] is False
    (warning,) = run.warned
    assert warning == f"the plan does not fit: {result['plan']['reasons'][0]}"


def test_what_does_not_fit_is_only_told(run, server):
    result = run(servers=[server(100)], when_not="tell")
    assert (result["plan"]["fits"], run.warned) == (False, [])
    assert f"DOES NOT FIT: {result['plan']['reasons'][0]}" in " ".join(result["report"].split())


def test_another_word_is_refused(run, server):
    with pytest.raises(AnsibleActionFail) as caught:
        run(servers=[server()], when_not="ignore")
    assert caught.value.message == "-e plan is 'ignore': expected refuse, warn"


@pytest.mark.parametrize("when_not", ["refuse", "warn"])
def test_a_server_that_cannot_be_planned_is_a_warning(run, server, when_not):
    unknown = server(config={"architectures": ["NewForCausalLM"]})
    result = run(servers=[unknown, server(name="n-gpu1")], when_not=when_not)
    assert list(result["plan"]["servers"]) == ["n-gpu1"]
    (warning,) = run.warned
    assert warning.startswith("started without a plan: n-gpu0: model class NewForCausalLM")


def test_a_server_that_cannot_be_planned_stands_beside_the_plans_of_others(run, server):
    result = run(servers=[server(config={"architectures": ["NewForCausalLM"]}), server(name="n-gpu1")], when_not="tell")
    assert (list(result["plan"]["servers"]), list(result["plan"]["unplanned"]), run.warned) == (["n-gpu1"], ["n-gpu0"], [])
    assert "NOT PLANNED: n-gpu0: model class NewForCausalLM" in result["report"]


def test_a_server_whose_node_is_badly_stated_is_named_beside_the_plans_of_others(run, server):
    bad = {**server(), "declared": {"gpu_free_gib": "much"}}
    refused = {**server(name="n-gpu2"), "spec": {}, "refused": "its node has another release"}
    result = run(servers=[bad, server(name="n-gpu1"), refused], when_not="tell")
    assert list(result["plan"]["servers"]) == ["n-gpu1"]
    assert result["plan"]["unplanned"] == {
        "n-gpu0": "n-gpu0: sglang_node_memory of n: gpu_free_gib is 'much': expected a number above 0",
        "n-gpu2": "n-gpu2: its node has another release",
    }
    with pytest.raises(AnsibleActionFail, match="sglang_node_memory of n: gpu_free_gib is 'much'"):
        run(servers=[bad])


def test_a_server_on_a_cpu_is_left_out(run, server):
    result = run(servers=[server(device="cpu")])
    assert (result["plan"]["servers"], result["report"]) == ({}, "Nothing to plan: no selected server is for cuda.")


def test_wishes_are_passed_on_and_null_is_none(run, server):
    wished = run(servers=[server()], when_not="tell", want_running=4, want_context=None, allow_lossy=False)
    assert wished["plan"]["servers"]["n-gpu0"]["suggestion"]["plan"]["max_running_requests"] == 4
    plain = run(servers=[server()], when_not="tell", want_running=None, want_context=None, allow_lossy=False)
    assert plain["plan"]["servers"]["n-gpu0"]["suggestion"] is None
    with pytest.raises(AnsibleActionFail, match="want_context goes with want_running"):
        run(servers=[server()], want_context=4096)


# -- records ----------------------------------------------------------------------------------------------------------
def kept(folder, name, text):
    path = folder / "boots" / "n-gpu0"
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{name}.json").write_bytes(text.encode() if isinstance(text, str) else text)


def boot(context, **more):
    named = {"schema": 1, "model": "m", "gpu": NAMED, "release": "0.5.17", "profile": "p"}
    return json.dumps({**named, "context_gib": context, **more})


def test_records_of_earlier_boots_teach(run, server, tmp_path):
    kept(tmp_path, "1", boot(1.0))
    kept(tmp_path, "2", boot(2.0))
    plan = run(servers=[server()], records=str(tmp_path))["plan"]["servers"]["n-gpu0"]
    assert plan["free_source"] == "94.97 free less 1.50 for contexts as in 2 earlier boots"


@pytest.mark.parametrize(
    "text",
    ["", "{", boot(9.0, schema=2), boot(9.0, schema=None), '{"model": "m"', "[]", "null", '"text"', b"\xff\xfe\x00", "17"],
)
def test_a_record_that_cannot_be_read_is_none(run, server, tmp_path, text):
    kept(tmp_path, "1", text)
    kept(tmp_path, "2", boot(1.0))
    (tmp_path / "boots" / "n-gpu0" / "3.json").mkdir()
    plan = run(servers=[server()], records=str(tmp_path))["plan"]["servers"]["n-gpu0"]
    assert plan["free_source"] == "94.97 free less 1.00 for contexts as in 1 earlier boot"


@pytest.mark.parametrize("folder", [None, "", "/no/such/folder"])
def test_without_records_contexts_are_assumed(run, server, folder):
    plan = run(servers=[server()], records=folder)["plan"]["servers"]["n-gpu0"]
    assert plan["free_source"] == "94.97 free less 2.18 assumed for contexts"
