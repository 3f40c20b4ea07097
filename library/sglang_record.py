#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_record, which runs on the controller (action_plugins/sglang_record.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_record
short_description: Keep what the boots of SGLang servers showed beside their plans
description:
  - Runs the filters P(sglang_boot_record#filter) and P(sglang_boots_report#filter) on every server that is ready. Others
    are left out.
  - A record is written for each of them that this run has started, to C(boots/SERVER/TIME.json) below O(folder). TIME is that
    of the launch. A record that is there already is never overwritten.
  - It runs on the controller and changes no server. A folder that can't be written is a warning.
options:
  servers:
    description:
      - One mapping a server, with the keys that P(sglang_boot_record#filter) takes, and C(name) and C(started), whether this
        run has started it.
    type: list
    elements: dict
    required: true
  plan:
    description: The plan of the fleet, as P(sglang_fleet_plan#filter) returns it. Without it nothing is compared.
    type: dict
    default: {}
  folder:
    description: Folder on the controller. It is made where it is missing.
    type: path
    required: true
extends_documentation_fragment: [action_common_attributes, action_common_attributes.conn, action_common_attributes.flow]
attributes:
  action: {support: full}
  async: {support: none}
  become: {support: none}
  bypass_host_loop: {support: none}
  check_mode: {support: none}
  connection: {support: none}
  delegation: {support: none}
  diff_mode: {support: none}
  platform: {support: full, platforms: all}
seealso:
  - plugin: sglang_boot_record
    plugin_type: filter
  - module: sglang_plan
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Keep what each boot showed
  sglang_record:
    servers: "{{ servers }}"
    plan: "{{ planned['plan'] }}"
    folder: artifacts
  register: boots
  run_once: true

- name: Tell how good the plan was
  ansible.builtin.debug:
    msg: "{{ boots['report'] }}"
  run_once: true
"""

RETURN = r"""
records:
  description: The record of each server that is ready, as P(sglang_boot_record#filter) returns it.
  returned: success
  type: list
  elements: dict
report:
  description: The same as text (P(sglang_boots_report#filter)). Empty when no boot had a plan.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

OPTIONS = ("servers", "plan", "folder")


def main():
    # Nothing is checked here: whatever comes in, one sentence is the answer.
    module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in OPTIONS})
    module.fail_json(
        msg="sglang_record ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this project's"
        " folder action_plugins"
    )


if __name__ == "__main__":
    main()
