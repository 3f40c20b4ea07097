# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and their GPUs in, one inventory host per SGLang server out."""

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_fleet
short_description: Turns nodes and their GPUs into one inventory host per SGLang server
description:
  - Reads a YAML file that names the nodes of a fleet and the GPUs of each, and makes one inventory host per server,
    so that C(--limit), C(serial), C(throttle), the recap and C(rescue) work per server.
  - A node becomes a host of group C(sglang_nodes). A server becomes a host of groups C(sglang_servers), C(node_<node>)
    and C(gpu_<index>) (C(cpu_<index>) on a node without GPUs), named C(<node>-gpu<first GPU>) or C(<node>-cpu<index>).
  - A server inherits every variable of its node and carries C(sglang_node), C(sglang_gpus) and C(sglang_port).
  - Servers are emitted GPU by GPU across the nodes, so that a batch of C(serial) spreads over the nodes.
  - A GPU or a port that is given twice on a node, and any unknown key, is refused.
options:
  plugin:
    description: Marks the file as one for this plugin.
    required: true
    choices: [sglang_fleet]
  base_port:
    description:
      - Port of GPU 0 (or of the first CPU server). A server without a port of its own listens on
        O(base_port) + its first GPU's index.
      - A node may have its own.
    type: int
    default: 30000
  vars:
    description: Variables of every node (and, through it, of every server). A node's own win.
    type: dict
    default: {}
  nodes:
    description:
      - Nodes by name. Each is a mapping with C(gpus) (a list of GPU indices, one server each) or C(servers)
        (a list of mappings with C(gpus), C(port), C(profile), C(model), C(args), C(env); more than one GPU means tensor
        parallel over them; on a node without GPUs leave C(gpus) out).
      - C(base_port), C(profile), C(model), C(args) and C(env) of a node are the defaults of its servers.
      - Keys that begin with C(ansible_) or C(sglang_) are variables of the node and of its servers.
    type: dict
    required: true
"""

EXAMPLES = r"""
plugin: sglang_fleet
base_port: 30000
nodes:
  node1:
    ansible_host: 203.0.113.7
    ansible_port: 19248
    gpus: [0, 1, 2, 3]                 # node1-gpu0 … node1-gpu3 on ports 30000 … 30003
  node2:
    ansible_host: 203.0.113.8
    servers:
      - {gpus: [0, 1]}                 # tensor parallel over two GPUs: node2-gpu0 on port 30000
      - {gpus: [2, 3], port: 31000, profile: nomtp}
"""

import difflib
import re
import sys

from ansible.plugins.inventory import BaseFileInventoryPlugin
from ansible.utils.display import Display

TOP_KEYS = ("plugin", "base_port", "vars", "nodes")
# What a server may say of itself, and the inventory variable it becomes.
SERVER_VARIABLES = {
    "profile": "sglang_inventory_profile",
    "model": "sglang_model",
    "args": "sglang_server_args",
    "env": "sglang_server_env",
}
SERVER_KEYS = ("gpus", "port", *SERVER_VARIABLES)
NODE_KEYS = ("gpus", "servers", "base_port", *SERVER_VARIABLES)
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
LOWEST_PORT = 1
HIGHEST_PORT = 65535
PARSER_ERROR = 4  # ansible-playbook's own exit code for input that it cannot parse


class FleetError(ValueError):
    """What is wrong with the fleet file, in one sentence."""


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _check_keys(where, mapping, known, prefixes=()):
    for key in mapping:
        if key in known or (isinstance(key, str) and key.startswith(prefixes)):
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        kinds = [*known, *([f"variables that begin with {' or '.join(prefixes)}"] if prefixes else [])]
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(kinds)}"
        raise FleetError(f"{where}: unknown key '{key}': {hint}")


def _mapping(where, value):
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FleetError(f"{where} is {value!r}: expected a mapping")
    return value


def _port(where, value):
    if not _is_int(value) or not LOWEST_PORT <= value <= HIGHEST_PORT:
        raise FleetError(f"{where}: port {value!r} is not a number from {LOWEST_PORT} to {HIGHEST_PORT}")
    return int(value)


def _gpus(where, value):
    if not isinstance(value, list) or not all(_is_int(gpu) and gpu >= 0 for gpu in value):
        raise FleetError(f"{where}: gpus is {value!r}: expected a list of GPU indices such as [0, 1]")
    return [int(gpu) for gpu in value]


def _server_entries(where, node):
    """The servers of a node as mappings with at least ``gpus``."""
    if "gpus" in node and "servers" in node:
        raise FleetError(f"{where} has both gpus and servers: keep one (gpus is one server a GPU)")
    if "gpus" in node:
        return [{"gpus": [gpu]} for gpu in _gpus(where, node["gpus"])]
    servers = node.get("servers")
    if servers is not None and not isinstance(servers, list):
        raise FleetError(f"{where}: servers is {servers!r}: expected a list of mappings such as [{{gpus: [0]}}]")
    if servers is None:
        raise FleetError(f"{where} needs gpus (a list of GPU indices) or servers (a list of mappings): found neither")
    entries = []
    for number, server in enumerate(servers):
        here = f"{where}, server {number}"
        server = _mapping(here, server)
        _check_keys(here, server, SERVER_KEYS)
        entries.append({**server, "gpus": _gpus(here, server.get("gpus", []))})
    return entries


def fleet_servers(name, node, base_port, common):
    """The variables of a node and, in order, its servers.

    Returns ``(node_variables, [{"name", "slot", "kind", "variables"}, …])``: slot is the first GPU, or the number of
    the CPU server, by which servers are interleaved across nodes; kind is ``gpu`` or ``cpu``.
    """
    where = f"node '{name}'"
    if not isinstance(name, str) or not NODE_NAME.match(name):
        raise FleetError(f"{where}: a node's name holds letters, digits, '.', '_' and '-' only")
    node = _mapping(where, node)
    prefixes = ("ansible_", "sglang_")
    _check_keys(where, node, NODE_KEYS, prefixes)
    variables = {**common, **{key: value for key, value in node.items() if key.startswith(prefixes)}}
    base_port = _port(f"{where}, base_port", node.get("base_port", base_port))
    servers, gpu_owner, port_owner = [], {}, {}
    for number, entry in enumerate(_server_entries(where, node)):
        kind = "gpu" if entry["gpus"] else "cpu"
        slot = entry["gpus"][0] if entry["gpus"] else number
        server = f"{name}-{kind}{slot}"
        port = _port(server, entry.get("port", base_port + slot))
        for gpu in entry["gpus"]:
            if gpu in gpu_owner:
                both = f"to {gpu_owner[gpu]} and to {server}" if gpu_owner[gpu] != server else f"both times to {server}"
                raise FleetError(f"{where}: GPU {gpu} is given twice, {both}")
            gpu_owner[gpu] = server
        if port in port_owner:
            raise FleetError(f"{where}: port {port} is given twice, to {port_owner[port]} and to {server}")
        port_owner[port] = server
        own = {key: entry.get(key, node.get(key)) for key in SERVER_VARIABLES}
        servers.append(
            {
                "name": server,
                "slot": slot,
                "kind": kind,
                "variables": {
                    **variables,
                    **{SERVER_VARIABLES[key]: value for key, value in own.items() if value is not None},
                    "sglang_node": name,
                    "sglang_gpus": entry["gpus"],
                    "sglang_port": port,
                },
            }
        )
    return variables, servers


def _group(prefix, name):
    return f"{prefix}_{re.sub(r'[^A-Za-z0-9_]', '_', str(name))}"


class InventoryModule(BaseFileInventoryPlugin):
    """Loaded for files that begin with ``plugin: sglang_fleet``."""

    NAME = "sglang_fleet"
    # The file is the user's own, like any YAML inventory: templates in it (a vaulted password, say) are meant.
    trusted_by_default = True

    def verify_file(self, path):
        return super().verify_file(path) and path.endswith((".yml", ".yaml"))

    def parse(self, inventory, loader, path, cache=True):
        super().parse(inventory, loader, path, cache)
        try:
            self._populate(self._read_config_data(path))
        except FleetError as error:
            # A parser error would make Ansible try the file as every other kind of inventory and print what each of
            # them thinks of it. The file says whose it is, so this sentence is the only one that helps.
            Display().error(f"{path}: {error}", wrap_text=False)
            sys.exit(PARSER_ERROR)

    def _populate(self, config):
        _check_keys("the fleet file", config, TOP_KEYS)
        nodes = _mapping("nodes", config.get("nodes"))
        if not nodes:
            raise FleetError("nodes is empty: name at least one node with its gpus")
        common = _mapping("vars", config.get("vars"))
        _check_keys("vars", common, (), ("ansible_", "sglang_"))
        # The last two are filled by the playbooks; named here so that Ansible does not warn of an unknown group.
        for group in ("sglang_nodes", "sglang_servers", "sglang_one_a_node", "sglang_compared"):
            self.inventory.add_group(group)
        servers, groups = [], {}
        for order, (name, node) in enumerate(nodes.items()):
            variables, its_servers = fleet_servers(name, node, config.get("base_port", 30000), common)
            group = _group("node", name)
            if group in groups:
                raise FleetError(f"nodes '{groups[group]}' and '{name}' would share the group {group}: rename one")
            groups[group] = name
            self._add_host(name, variables, ["sglang_nodes"])
            servers += [(server["slot"], order, group, server) for server in its_servers]
        for slot, _order, group, server in sorted(servers, key=lambda entry: entry[:2]):
            if server["name"] in nodes:
                raise FleetError(f"server {server['name']} has the name of a node: rename the node")
            self._add_host(server["name"], server["variables"], ["sglang_servers", group, _group(server["kind"], slot)])

    def _add_host(self, name, variables, groups):
        self.inventory.add_host(name)
        for group in groups:
            self.inventory.add_group(group)
            self.inventory.add_child(group, name)
        for key, value in variables.items():
            self.inventory.set_variable(name, key, value)
