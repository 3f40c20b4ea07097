#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_plan, which runs on the controller (action_plugins/sglang_plan.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_plan
short_description: Plan the memory of SGLang servers, and refuse what does not fit
description:
  - Runs the filters P(sglang_plan_request#filter), P(sglang_fleet_plan#filter) and P(sglang_plan_report#filter) on all
    servers at once, because servers of a node share its host memory.
  - It runs on the controller. It asks no node and changes nothing.
  - Servers whose device is not V(cuda) are left out. The memory of a CPU is the host's, and flags bound its KV cache.
options:
  servers:
    description:
      - One mapping a server, with the keys that P(sglang_plan_request#filter) takes.
    type: list
    elements: dict
    default: []
  records:
    description:
      - Folder on the controller whose C(boots/SERVER/TIME.json) are records of earlier boots (M(sglang_record)). One that
        can't be read, or whose C(schema) is another, is left out. Without it nothing is learned.
    type: path
  when_not:
    description:
      - What to do when the plan does not fit.
      - V(refuse) fails the task with the reasons. V(warn) shows each as a warning. With both, a server that can't be planned is
        shown as a warning.
      - V(tell) only returns the plan and the report, which names what can't be planned.
    type: str
    choices: [refuse, warn, tell]
    default: refuse
  want_running:
    description: Requests that shall run at once on each server. The plan then has a suggestion of flags.
    type: int
  want_context:
    description: Tokens, prompt and answer, that each of them shall have room for. Goes with O(want_running).
    type: int
  allow_lossy:
    description: Whether flags that cost accuracy may be suggested.
    type: bool
    default: false
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
  - plugin: sglang_fleet_plan
    plugin_type: filter
  - module: sglang_record
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Refuse a fleet that does not fit
  sglang_plan:
    servers: "{{ servers }}"
    records: artifacts
  run_once: true

- name: Find flags for 16 requests of 8192 tokens
  sglang_plan:
    servers: "{{ servers }}"
    records: artifacts
    when_not: tell
    want_running: 16
    want_context: 8192
  register: planned
  run_once: true

- name: Tell them
  ansible.builtin.debug:
    msg: "{{ planned['report'] }}"
  run_once: true
"""

RETURN = r"""
plan:
  description: The plan of the fleet, as P(sglang_fleet_plan#filter) returns it.
  returned: success
  type: dict
report:
  description: The same as text (P(sglang_plan_report#filter)).
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

OPTIONS = ("servers", "records", "when_not", "want_running", "want_context", "allow_lossy")


def main():
    # Nothing is checked here: whatever comes in, one sentence is the answer.
    module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in OPTIONS}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_plan ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this project's"
        " folder action_plugins"
    )


if __name__ == "__main__":
    main()
