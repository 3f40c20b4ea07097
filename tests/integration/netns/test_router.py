# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang's real router on one node in front of servers of two, which are replays."""

from __future__ import annotations

import json

import pytest
from helpers.netns import netns_nodes

from ..conftest import ROOT, Fleet

pytestmark = pytest.mark.netns

SECRET = "key of the test"


@pytest.fixture(scope="module")
def nodes():
    with netns_nodes(2) as made:
        yield made


@pytest.fixture
def fleet(nodes, replay_venv, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    return Fleet(
        tmp_path,
        {
            node.name: {
                **{name: value for name, value in node.inventory.items() if name.startswith("ansible_")},
                "gpus": [0],
                "model": "m",
                "env": {"SGLANG_REPLAY_SPEED": "40"},
                "sglang_root": node.root,
                "sglang_engine_venv": str(replay_venv),
            }
            for node in nodes
        },
        {
            "sglang_models": {"m": {"path": str(model), "served_name": "m", "args": {"load-format": "dummy"}}},
            "benchmark": False,
            "plan": "warn",
            "sglang_api_key": SECRET,
            "sglang_router_enabled": True,
            "sglang_router_venv": str(ROOT / ".demo" / "router"),
        },
    )


def ask(node, path, *more):
    """What the router says to a client on its own node."""
    words = ["curl", "-s", "-m", "20", "-H", f"'Authorization: Bearer {SECRET}'", *more, f"http://127.0.0.1:30080{path}"]
    return json.loads(node.run(" ".join(words), timeout=30).stdout)


def test_servers_of_two_nodes_behind_the_router_of_one(nodes, fleet):
    one, two = nodes
    names = [f"{node.name}-gpu0" for node in nodes]
    refused = fleet.run("deploy")
    assert refused.rc != 0
    said = refused.tasks["Work out what the router is started with"][names[0]]["msg"]
    assert said.startswith(f"{names[1]} listens on 127.0.0.1 of {two.name} only, and the router runs on {one.name}: ")
    assert one.run(f"ls {one.root}", check=False).stdout == "", "nothing was touched"

    fleet.options["sglang_host"] = "0.0.0.0"
    deployed = fleet.run("deploy")
    assert deployed.rc == 0, deployed.stdout
    urls = {worker["url"] for worker in ask(one, "/workers")["workers"]}
    assert urls == {"http://127.0.0.1:30000", f"http://{two.address}:30000"}
    body = json.dumps({"text": "The quick", "sampling_params": {"max_new_tokens": 4}})
    for _ in range(4):
        answer = ask(one, "/generate", "-H", "Content-Type:application/json", "-d", f"'{body}'")
        assert answer["meta_info"]["completion_tokens"] == 4

    # Of a node that the limit leaves out: the router is asked all the same.
    stopped = fleet.run("stop", f"--limit {names[1]}")
    assert stopped.rc == 0, stopped.stdout
    assert stopped.tasks["Take the server out of the router"][names[1]]["routable"] == ["http://127.0.0.1:30000"]
    told = fleet.run("stop")
    assert told.rc == 0 and told.tasks["Stop the router"][names[0]]["changed"], told.stdout
    assert "launch_router" not in one.run("ps -eo args").stdout
