#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_eta, which runs on the controller (action_plugins/sglang_eta.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_eta
short_description: Tell when a job of many generations is done
description:
  - Runs the filters P(sglang_speeds#filter), P(sglang_eta#filter) and P(sglang_eta_report#filter) on what is kept on the
    controller of the fleet's speeds, the records of C(compare.yml) and of benchmarks. What they refuse fails the task.
  - A server runs the profile that is asked for, else that of its last boot, else that of the inventory.
  - It runs on the controller. It asks no node and changes nothing.
options:
  servers:
    description:
      - One mapping a server, with C(name), C(node), C(gpus) (how many), C(model), C(profile) (of the inventory) and
        C(asked_profile) (empty where none was asked for).
    type: list
    elements: dict
  folders: {description: Folders of records., type: list, elements: path}
  samples: {description: How many generations the job has. Must be set., type: int}
  output_tokens: {description: How many tokens each of them has. Must be set., type: int}
  done: {description: How many are done., type: int}
  tok_s: {description: Output tokens a second of the whole fleet. It is taken instead of what was measured., type: float}
  live:
    description: What M(sglang_counters) returned, taken instead of what was measured. Not with O(tok_s).
    type: list
    elements: dict
  profile: {description: Name of the profile that was asked for., type: str}
  known: {description: Names of all profiles. Another O(profile) is refused., type: list, elements: str}
  check_only: {description: Refuse a bad job and do nothing else., type: bool}
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
  - plugin: sglang_eta
    plugin_type: filter
  - module: sglang_counters
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Tell when a job is done
  sglang_eta:
    servers: "{{ servers }}"
    folders: [artifacts]
    samples: 902087
    output_tokens: 2500
  register: told

- name: Show it
  ansible.builtin.debug:
    msg: "{{ told['text'] }}"
"""

RETURN = r"""
eta:
  description: Result of filter P(sglang_eta#filter).
  returned: unless C(check_only)
  type: dict
servers:
  description: Result of filter P(sglang_speeds#filter), or the same of what was read live. Empty for a speed that was given.
  returned: unless C(check_only)
  type: list
  elements: dict
text:
  description: Both as text (P(sglang_eta_report#filter)).
  returned: unless C(check_only)
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

OPTIONS = (
    "servers", "folders", "samples", "output_tokens", "done", "tok_s", "live", "profile", "known", "check_only",
)  # fmt: skip


def main():
    # Nothing is checked here: whatever comes in, one sentence is the answer.
    module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in OPTIONS}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_eta ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this project's"
        " folder action_plugins"
    )


if __name__ == "__main__":
    main()
