# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and GPUs in, servers out: names, ports, groups, order, inheritance, and every refusal in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_fleet
import yaml
from ansible.inventory.data import InventoryData
from sglang_fleet import FleetError, InventoryModule

GPU_SERVERS = {
    "plugin": "sglang_fleet",
    "nodes": {
        "a": {"ansible_host": "203.0.113.7", "gpus": [0, 1]},
        "b": {"gpus": [0, 1, 2]},
    },
}


def populate(config):
    plugin = InventoryModule()
    plugin.inventory = InventoryData()
    plugin._populate({"plugin": "sglang_fleet", **config})
    return plugin.inventory


def hosts(inventory, group):
    return [host.name for host in inventory.groups[group].get_hosts()]


def variables(inventory, name):
    return inventory.get_host(name).get_vars()


def test_one_server_a_gpu_in_gpu_major_order_across_nodes():
    inventory = populate(GPU_SERVERS)
    servers = ["a-gpu0", "b-gpu0", "a-gpu1", "b-gpu1", "b-gpu2"]
    assert hosts(inventory, "sglang_servers") == servers
    assert hosts(inventory, "sglang_nodes") == ["a", "b"]
    assert list(inventory.hosts) == ["a", "b", *servers]
    assert [variables(inventory, name)["sglang_port"] for name in servers] == [30000, 30000, 30001, 30001, 30002]
    assert variables(inventory, "b-gpu2")["sglang_gpus"] == [2]
    assert variables(inventory, "b-gpu2")["sglang_node"] == "b"


def test_groups_by_node_and_by_gpu():
    inventory = populate(GPU_SERVERS)
    assert hosts(inventory, "node_a") == ["a-gpu0", "a-gpu1"]
    assert hosts(inventory, "gpu_0") == ["a-gpu0", "b-gpu0"]
    assert hosts(inventory, "gpu_2") == ["b-gpu2"]
    assert hosts(inventory, "sglang_one_a_node") == []


def test_a_group_name_holds_no_dot_or_dash():
    inventory = populate({"nodes": {"n-1.example": {"gpus": [0]}}})
    assert hosts(inventory, "node_n_1_example") == ["n-1.example-gpu0"]


def test_tensor_parallel_is_one_server_named_by_its_first_gpu():
    nodes = {"a": {"servers": [{"gpus": [2, 3], "port": 31000, "profile": "nomtp"}, {"gpus": [1, 0]}]}}
    inventory = populate({"nodes": nodes})
    assert hosts(inventory, "sglang_servers") == ["a-gpu1", "a-gpu2"]
    first, second = variables(inventory, "a-gpu1"), variables(inventory, "a-gpu2")
    assert (first["sglang_gpus"], first["sglang_port"]) == ([1, 0], 30001)
    assert (second["sglang_gpus"], second["sglang_port"], second["sglang_inventory_profile"]) == ([2, 3], 31000, "nomtp")
    assert "sglang_inventory_profile" not in first


def test_cpu_servers_are_numbered():
    inventory = populate({"base_port": 30100, "nodes": {"local": {"servers": [{}, {"model": "other"}]}}})
    assert hosts(inventory, "sglang_servers") == ["local-cpu0", "local-cpu1"]
    assert hosts(inventory, "cpu_1") == ["local-cpu1"]
    assert [variables(inventory, f"local-cpu{n}")["sglang_port"] for n in (0, 1)] == [30100, 30101]
    assert variables(inventory, "local-cpu1")["sglang_gpus"] == []


def test_a_server_inherits_from_node_and_fleet_and_the_nearest_wins():
    config = {
        "base_port": 100,
        "vars": {"ansible_user": "fleet", "sglang_root": "/fleet", "sglang_host": "::"},
        "nodes": {
            "a": {
                "ansible_user": "node",
                "sglang_root": "/node",
                "base_port": 200,
                "profile": "mtp",
                "model": "m",
                "args": {"a": 1},
                "env": {"A": "1"},
                "servers": [{"gpus": [0]}, {"gpus": [1], "profile": "nomtp", "args": {"b": 1}, "env": {}}],
            },
            "b": {"gpus": [0]},
        },
    }
    inventory = populate(config)
    plain, special = variables(inventory, "a-gpu0"), variables(inventory, "a-gpu1")
    assert (plain["ansible_user"], plain["sglang_root"], plain["sglang_host"]) == ("node", "/node", "::")
    told = ("sglang_inventory_profile", "sglang_model", "sglang_server_args", "sglang_server_env", "sglang_port")
    assert [plain[name] for name in told] == ["mtp", "m", {"a": 1}, {"A": "1"}, 200]
    assert [special[name] for name in told] == ["nomtp", "m", {"b": 1}, {}, 201]
    other = variables(inventory, "b-gpu0")
    assert (other["ansible_user"], other["sglang_port"]) == ("fleet", 100)
    assert "sglang_model" not in other
    node = variables(inventory, "a")
    assert (node["ansible_user"], node["sglang_host"]) == ("node", "::")
    assert "sglang_port" not in node and "sglang_model" not in node


def refusal(config):
    with pytest.raises(FleetError) as caught:
        populate(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ({}, "nodes is empty: name at least one node with its gpus"),
        (None, "nodes is empty: name at least one node with its gpus"),
        (["a"], "nodes is ['a']: expected a mapping"),
        ({"a": ["x"]}, "node 'a' is ['x']: expected a mapping"),
        ({"a b": {"gpus": [0]}}, "node 'a b': a node's name holds letters, digits, '.', '_' and '-' only"),
        ({"a:1": {"gpus": [0]}}, "node 'a:1': a node's name holds letters, digits, '.', '_' and '-' only"),
        ({1: {"gpus": [0]}}, "node '1': a node's name holds letters, digits, '.', '_' and '-' only"),
        ({"a": {}}, "node 'a' needs gpus (a list of GPU indices) or servers (a list of mappings): found neither"),
        ({"a": None}, "node 'a' needs gpus (a list of GPU indices) or servers (a list of mappings): found neither"),
        ({"a": {"gpus": [0], "servers": []}}, "node 'a' has both gpus and servers: keep one (gpus is one server a GPU)"),
        ({"a": {"gpus": 0}}, "node 'a': gpus is 0: expected a list of GPU indices such as [0, 1]"),
        ({"a": {"gpus": ["0"]}}, "node 'a': gpus is ['0']: expected a list of GPU indices such as [0, 1]"),
        ({"a": {"gpus": [True]}}, "node 'a': gpus is [True]: expected a list of GPU indices such as [0, 1]"),
        ({"a": {"gpus": [-1]}}, "node 'a': gpus is [-1]: expected a list of GPU indices such as [0, 1]"),
        ({"a": {"gpus": [0, 1, 0]}}, "node 'a': GPU 0 is given twice, both times to a-gpu0"),
        ({"a": {"servers": [{"gpus": [0, 1]}, {"gpus": [2, 1]}]}}, "node 'a': GPU 1 is given twice, to a-gpu0 and to a-gpu2"),
        (
            {"a": {"servers": [{"gpus": [0]}, {"gpus": [1], "port": 30000}]}},
            "node 'a': port 30000 is given twice, to a-gpu0 and to a-gpu1",
        ),
        ({"a": {"servers": ["x"]}}, "node 'a', server 0 is 'x': expected a mapping"),
        ({"a": {"servers": [{"gpu": [0]}]}}, "node 'a', server 0: unknown key 'gpu': did you mean 'gpus'?"),
        (
            {"a": {"servers": [{"zzz": 1}]}},
            "node 'a', server 0: unknown key 'zzz': known are gpus, port, profile, model, args, env",
        ),
        ({"a": {"servers": [{"gpus": [0], "port": "31000"}]}}, "a-gpu0: port '31000' is not a number from 1 to 65535"),
        ({"a": {"servers": [{"gpus": [0], "port": True}]}}, "a-gpu0: port True is not a number from 1 to 65535"),
        ({"a": {"servers": [{"gpus": [0], "port": 0}]}}, "a-gpu0: port 0 is not a number from 1 to 65535"),
        ({"a": {"base_port": 70000, "gpus": [0]}}, "node 'a', base_port: port 70000 is not a number from 1 to 65535"),
        ({"a": {"base_port": 65535, "gpus": [0, 1]}}, "a-gpu1: port 65536 is not a number from 1 to 65535"),
        ({"a.b": {"gpus": [0]}, "a-b": {"gpus": [0]}}, "nodes 'a.b' and 'a-b' would share the group node_a_b: rename one"),
        ({"a": {"gpus": [0]}, "a-gpu0": {"gpus": [0]}}, "server a-gpu0 has the name of a node: rename the node"),
    ],
)
def test_what_is_no_fleet_is_refused_in_one_sentence(nodes, sentence):
    assert refusal({"nodes": nodes}) == sentence


def test_servers_that_are_no_list_are_named_as_found():
    message = refusal({"nodes": {"a": {"servers": {"gpus": [0]}}}})
    assert "{'gpus': [0]}" in message
    assert "found neither" not in message


def test_an_unknown_key_of_the_file_or_of_vars_is_refused():
    assert refusal({"node": {}, **GPU_SERVERS}) == "the fleet file: unknown key 'node': did you mean 'nodes'?"
    message = refusal({**GPU_SERVERS, "vars": {"user": "x"}})
    assert message.startswith("vars: unknown key 'user': ")
    assert message.endswith("variables that begin with ansible_ or sglang_")
    assert "known are ," not in message


def test_a_misspelled_key_of_a_node_is_refused_with_the_right_one():
    message = refusal({"nodes": {"a": {"gpu": [0]}}})
    assert message.startswith("node 'a': unknown key 'gpu': did you mean 'gpus'?")
    assert "?," not in message


def test_a_gpu_given_twice_to_one_server_is_refused():
    message = refusal({"nodes": {"a": {"servers": [{"gpus": [0, 0]}]}}})
    assert message.startswith("node 'a': GPU 0 is given twice")


@pytest.mark.parametrize(("name", "taken"), [("fleet.yml", True), ("fleet.yaml", True), ("fleet.ini", False), ("fleet", False)])
def test_only_yaml_files_are_looked_at(tmp_path, name, taken):
    path = tmp_path / name
    path.write_text("plugin: sglang_fleet\n")
    assert bool(InventoryModule().verify_file(str(path))) is taken


@pytest.fixture
def inventory_command(root, tmp_path):
    """ansible-inventory on a fleet file, with the project's own settings."""

    def _run(content, *args):
        path = tmp_path / "fleet.yml"
        path.write_text(yaml.safe_dump({"plugin": "sglang_fleet", **content}, sort_keys=False))
        binary = Path(sys.executable).parent / "ansible-inventory"
        environ = {
            **os.environ,
            "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_HOME": str(tmp_path),
        }
        ran = subprocess.run(
            [binary, "-i", str(path), *args], cwd=root, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        return ran, str(path)

    return _run


def test_a_refusal_is_the_only_sentence_and_the_exit_code_is_4(inventory_command):
    ran, path = inventory_command({"nodes": {"a": {"gpus": [0, 0]}}}, "--list")
    assert ran.returncode == sglang_fleet.PARSER_ERROR == 4
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == [f"[ERROR]: {path}: node 'a': GPU 0 is given twice, both times to a-gpu0"]


def test_a_good_file_through_ansible(inventory_command):
    ran, _path = inventory_command(GPU_SERVERS, "--graph", "sglang_servers")
    assert ran.returncode == 0
    assert [line.strip(" |-") for line in ran.stdout.splitlines()[1:]] == ["a-gpu0", "b-gpu0", "a-gpu1", "b-gpu1", "b-gpu2"]
    assert ran.stderr == ""
