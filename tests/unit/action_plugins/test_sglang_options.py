# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is typed behind -e and --limit: near misses, wrong types and empty selections are refused."""

from __future__ import annotations

import getpass
import re
import socket
from types import SimpleNamespace

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible.module_utils import sglang_log
from ansible.parsing.dataloader import DataLoader

OPTIONS = {
    "plan": ["refuse", "warn"],
    "profile": "str",
    "replace": "bool",
    "benchmark": "bool",
    "status_json": "path",
    "every": "int",
    "share": "float",
    "done": "count",
    "settle": "counts",
    "tolerance": "amount",
}
GROUPS = {
    "sglang_servers": ["n1-gpu0", "n1-gpu1", "n2-gpu0"],
    "sglang_nodes": ["n1", "n2"],
    "node_n1": ["n1-gpu0", "n1-gpu1"],
    "node_n2": ["n2-gpu0"],
}


@pytest.fixture
def run(load, monkeypatch):
    """Run the action with these extra variables on these hosts."""
    plugin = load("action_plugins", "sglang_options")
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def _run(given=None, hosts=("n1-gpu0",), groups=None, batch=(), options=None):
        monkeypatch.setattr(plugin, "load_extra_vars", lambda loader: given or {})
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args={"options": options or OPTIONS})
        action._loader = DataLoader()
        task_vars = {
            "groups": GROUPS if groups is None else groups,
            "ansible_play_hosts_all": list(hosts),
            "ansible_play_batch": list(batch),
        }
        return action.run(None, task_vars)

    return _run


def refusal(run, *args, **kwargs):
    with pytest.raises(AnsibleActionFail) as caught:
        run(*args, **kwargs)
    return caught.value.message


def test_good_options_pass(run):
    given = {
        "plan": "warn",
        "profile": "mtp",
        "replace": "true",
        "benchmark": False,
        "every": "5",
        "share": 0.5,
        "status_json": "x.json",
        "done": "0",
        "settle": "150,20",
        "tolerance": "0.5",
        "sglang_root": "/x",
    }
    told = run(given)
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{getpass.getuser()}-\d+", told.pop("run"))
    assert told == {"changed": False, "who": f"{getpass.getuser()}@{socket.gethostname()}"}


@pytest.mark.parametrize(
    ("typed", "meant"), [("profil", "profile"), ("profiles", "profile"), ("replaced", "replace"), ("benchmarks", "benchmark")]
)
def test_a_near_miss_is_refused_with_what_was_meant(run, typed, meant):
    assert refusal(run, {typed: "x"}) == f"-e {typed} is not an option of this playbook: did you mean '{meant}'?"


def test_another_word_for_an_option_is_refused_with_what_was_meant(run):
    assert refusal(run, {"output": "x"}, options={"out": "path"}).endswith("did you mean 'out'?")
    assert run({"output": 9}, options={"out": "path", "output_tokens": "int"})["changed"] is False


def test_a_variable_of_a_role_that_is_near_an_option_is_no_misspelling(run):
    assert run({"sglang_server_replace": True}, options={"sglang_router_replace": "bool"})["changed"] is False
    assert "did you mean" in refusal(run, {"sglang_sever_replace": True}, options={"sglang_server_replace": "bool"})


@pytest.mark.parametrize("name", ["ansible_user", "sglang_profile", "out", "x"])
def test_another_variable_is_not_ours_to_judge(run, name):
    assert run({name: "value"})["changed"] is False


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"plan": "tell"}, "-e plan is 'tell': expected refuse or warn"),
        ({"plan": True}, "-e plan is True: expected refuse or warn"),
        ({"replace": "maybe"}, "-e replace is 'maybe': expected true or false"),
        ({"replace": ""}, "-e replace is '': expected true or false"),
        ({"profile": ""}, "-e profile is '': expected text"),
        ({"profile": None}, "-e profile is None: expected text"),
        ({"every": "soon"}, "-e every is 'soon': expected a whole number above 0"),
        ({"every": "0"}, "-e every is '0': expected a whole number above 0"),
        ({"done": "-1"}, "-e done is '-1': expected a whole number from 0 on"),
        ({"done": True}, "-e done is True: expected a whole number from 0 on"),
        ({"settle": "x"}, "-e settle is 'x': expected whole numbers from 0 on, as in 150,20"),
        ({"settle": "150,-4"}, "-e settle is '150,-4': expected whole numbers from 0 on, as in 150,20"),
        ({"settle": -4}, "-e settle is -4: expected whole numbers from 0 on, as in 150,20"),
        ({"tolerance": "-5"}, "-e tolerance is '-5': expected a number from 0 on"),
        ({"tolerance": "nan"}, "-e tolerance is 'nan': expected a number from 0 on"),
        ({"tolerance": True}, "-e tolerance is True: expected a number from 0 on"),
        ({"share": "half"}, "-e share is 'half': expected a number"),
        ({"status_json": ""}, "-e status_json is '': expected a path"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(run, given, sentence):
    assert refusal(run, given) == sentence


@pytest.mark.parametrize("groups", [{}, {"sglang_servers": []}])
def test_an_inventory_without_servers_is_refused(run, groups):
    message = refusal(run, groups=groups, hosts=["localhost"])
    assert message.startswith("the inventory has no server (group sglang_servers is empty): give one with -i, such as ")


def test_servers_that_belong_to_no_node_are_not_of_our_inventory_plugin(run):
    groups = {**GROUPS, "sglang_servers": [*GROUPS["sglang_servers"], "stray"]}
    message = refusal(run, groups=groups)
    assert message.startswith(
        "stray is in the group sglang_servers and in no group of a node: make the inventory with the plugin"
    )


def test_a_limit_that_selects_a_node_alone_says_how_to_select_its_servers(run):
    assert refusal(run, hosts=["n1"]) == "--limit selects no server: did you mean node_n1, all servers of that node?"


def test_a_limit_that_selects_neither_names_servers(run):
    assert refusal(run, hosts=["other"]) == "--limit selects no server: servers are n1-gpu0, n1-gpu1, n2-gpu0"


def test_the_group_of_a_node_is_named_as_the_inventory_names_it(run):
    groups = {"sglang_servers": ["n-1.x-gpu0"], "sglang_nodes": ["n-1.x"], "node_n_1_x": ["n-1.x-gpu0"]}
    assert "did you mean node_n_1_x," in refusal(run, groups=groups, hosts=["n-1.x"])


def test_a_play_on_the_controller_needs_no_selection(run):
    assert run(hosts=["localhost"])["changed"] is False


def test_one_selected_server_is_enough(run):
    assert run(hosts=["n1", "n2-gpu0"])["changed"] is False
    assert run(hosts=["n1"], batch=["n2-gpu0"])["changed"] is False


# -- an option that is a mapping --------------------------------------------------------------------------------------
LIMITS = {"limits": {"weights": "amount", "warm-up": "amount"}}


@pytest.mark.parametrize(
    "value, expected",
    [
        ({"weigths": 3}, "-e limits has an unknown key 'weigths': known are weights, warm-up"),
        ({"weights": "x"}, "-e limits has weights: 'x': expected a number from 0 on"),
        ({"weights": -1}, "-e limits has weights: -1: expected a number from 0 on"),
        ({"weights": True}, "-e limits has weights: True: expected a number from 0 on"),
        ({"weights": None}, "-e limits has weights: None: expected a number from 0 on"),
        (30, "-e limits is 30: expected a mapping of weights, warm-up"),
        (None, "-e limits is None: expected a mapping of weights, warm-up"),
    ],
)
def test_a_mapping_is_refused_by_its_keys_and_their_values(run, value, expected):
    assert refusal(run, {"limits": value}, options=LIMITS) == expected


@pytest.mark.parametrize("value", [{}, {"weights": 3}, {"weights": "0.5", "warm-up": 60}])
def test_a_mapping_of_known_keys_passes(run, value):
    run({"limits": value}, options=LIMITS)


def test_the_stages_of_a_start_are_those_of_the_wait(root):
    known = set(sglang_log.STAGE_LIMITS)
    assert set(yaml.safe_load((root / "group_vars/all/main.yml").read_text())["sglang_options"]["sglang_stage_limits"]) == known
    for role in ("server", "status"):
        spec = yaml.safe_load((root / f"roles/sglang_{role}/meta/argument_specs.yml").read_text())["argument_specs"]["main"]
        assert set(spec["options"][f"sglang_{role}_stage_limits"]["options"]) == known
