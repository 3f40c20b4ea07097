#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_router_spec, which runs on the controller (action_plugins/sglang_router_spec.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_router_spec
short_description: Work out what the router is started with and where it reaches the servers
description:
  - Runs the filter P(sglang_router_spec#filter) on its arguments and fails with one sentence where there is no such start.
  - It runs on the controller. It asks no node and changes nothing.
options:
  node: {description: Name of the node that the router runs on., type: str, required: true}
  nodes: {description: Names of all nodes., type: list, elements: str, required: true}
  host: {description: Address that the router listens on., type: str, required: true}
  port: {description: Port that it listens on., type: int, required: true}
  metrics_port: {description: Port of its metrics., type: int, required: true}
  root: {description: The fleet's folder on its node., type: str, required: true}
  slug: {description: Stem of its files., type: str, required: true}
  venv: {description: Folder of its venv., type: str, required: true}
  key: {description: Whether it has a key., type: bool, required: true}
  defaults: {description: The role's own options by name without dashes., type: dict, required: true}
  args: {description: Options on top of them., type: dict, required: true}
  servers:
    description: The servers, with the keys that P(sglang_router_spec#filter) takes.
    type: list
    elements: dict
    required: true
extends_documentation_fragment: [action_common_attributes, action_common_attributes.conn, action_common_attributes.flow]
attributes:
  action: {support: full}
  async: {support: none}
  become: {support: none}
  bypass_host_loop: {support: none}
  check_mode: {support: full}
  connection: {support: none}
  delegation: {support: none}
  diff_mode: {support: none}
  platform: {support: full, platforms: all}
seealso:
  - plugin: sglang_router_spec
    plugin_type: filter
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Work out what the router is started with
  sglang_router_spec: "{{ request }}"
  register: router
"""

RETURN = r"""
spec:
  description: The router, as P(sglang_router_spec#filter) returns it.
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

OPTIONS = (
    "node", "nodes", "host", "port", "metrics_port", "root", "slug", "venv", "key", "defaults", "args", "servers",
)  # fmt: skip


def main():
    # Nothing is checked here: whatever comes in, one sentence is the answer.
    module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in OPTIONS}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_router_spec ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this"
        " project's folder action_plugins"
    )


if __name__ == "__main__":
    main()
