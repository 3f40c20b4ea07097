#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_launch_spec, which runs on the controller (action_plugins/sglang_launch_spec.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_launch_spec
short_description: Work out what one SGLang server is started with
description:
  - Runs the filter P(sglang_launch_spec#filter) on its arguments and returns the result. What the filter refuses fails
    the task with that one sentence.
  - It runs on the controller. It asks no node and changes nothing.
  - Every warning of the result is shown once in a run of Ansible.
options:
  name:
    description: Name of the server in the inventory.
    type: str
    required: true
  node:
    description: Name of its node.
    type: str
    required: true
  slug:
    description: Stem of its files on the node, such as V(sglang_gpu0).
    type: str
    required: true
  gpus:
    description: Indices of its GPUs. Empty on the CPU. More than one means tensor parallel over them.
    type: list
    elements: int
    required: true
  host:
    description: Address that it listens on.
    type: str
    required: true
  port:
    description: Port that it listens on.
    type: int
    required: true
  root:
    description: The fleet's folder on the node. It begins with C(/).
    type: path
    required: true
  profile:
    description: Name of its profile, one of O(profiles).
    type: str
    required: true
  profiles:
    description: Profiles by name, of the form of C(sglang_profiles).
    type: dict
    required: true
  model:
    description: Name of its model, one of O(models).
    type: str
    required: true
  models:
    description: Models by name, of the form of C(sglang_models).
    type: dict
    required: true
  devices:
    description: Flags and environment by device, of the form of C(sglang_devices).
    type: dict
    required: true
  releases:
    description: Known releases of SGLang and how they spell flags, of the form of C(sglang_releases).
    type: dict
    required: true
  engine:
    description: Where SGLang is on the node and what it is for.
    type: dict
    required: true
    suboptions:
      venv: {description: The engine's venv., type: path, required: true}
      device: {description: "V(cuda), V(cpu) or another of O(devices).", type: str, required: true}
      release: {description: Release that the venv must have. Any when empty., type: str}
      env: {description: Environment in which the venv's Python finds SGLang., type: dict}
  args:
    description: Flags of this server, by name without dashes.
    type: dict
    required: true
  env:
    description: Environment variables of this server.
    type: dict
    required: true
  secrets:
    description: Names of the keys that the server gets. Their values are not given.
    type: list
    elements: str
    required: true
  found:
    description: Result of M(sglang_node_info) on the node. Empty where no node was asked.
    type: dict
    default: {}
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
  - plugin: sglang_launch_spec
    plugin_type: filter
  - module: sglang_server
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Work out what a server is started with
  sglang_launch_spec:
    name: node1-gpu0
    node: node1
    slug: sglang_gpu0
    gpus: [0]
    host: 127.0.0.1
    port: 30000
    root: /srv/sglang
    profile: mtp
    profiles: "{{ sglang_profiles }}"
    model: qwen3.6-27b
    models: "{{ sglang_models }}"
    devices: "{{ sglang_devices }}"
    releases: "{{ sglang_releases }}"
    engine: {venv: /opt/sglang/venv, device: cuda, release: 0.5.17}
    args: {}
    env: {}
    secrets: []
  register: launch

- name: Show its command line
  ansible.builtin.debug:
    msg: "{{ launch['spec']['argv'] | join(' ') }}"
"""

RETURN = r"""
spec:
  description: What the server is started with, as P(sglang_launch_spec#filter) returns it.
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

OPTIONS = (
    "name", "node", "slug", "gpus", "host", "port", "root", "profile", "profiles", "model", "models", "devices", "releases",
    "engine", "args", "env", "secrets", "found",
)  # fmt: skip


def main():
    # Nothing is checked here: whatever comes in, one sentence is the answer.
    module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in OPTIONS}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_launch_spec ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this"
        " project's folder action_plugins"
    )


if __name__ == "__main__":
    main()
