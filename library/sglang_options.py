#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_options, which runs on the controller (action_plugins/sglang_options.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_options
short_description: Refuse misspelled and mistyped options of a playbook
description:
  - Looks at the variables that were given with C(-e) and at the hosts that C(--limit) selects. It asks no node and
    changes nothing.
  - It fails for a name that is close to an option without being one, and names the option that was meant. Other names
    pass, because C(-e) may set any variable.
  - It fails for an option whose value has another type, is none of its choices, is null or is empty.
  - It fails for an inventory without servers, that is with an empty group C(sglang_servers).
  - It fails when no selected host is a server. A play on localhost alone is not looked at in this way.
options:
  options:
    description:
      - Options by name, each with the name of its type or a list of its choices. Types are V(bool), V(int) (above 0),
        V(count) (0 or more), V(counts) (a list of those), V(amount) (a number of 0 or more), V(float), V(str), V(path),
        V(list) and V(dict). A mapping has the type of each key that the option, a mapping itself, may have.
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
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Check options and inventory
  sglang_options:
    options:
      profile: str
      replace: bool
      out: path
      plan: [refuse, warn]
"""

RETURN = r"""
who:
  description: User and host name of the controller, for locks and records.
  returned: success
  type: str
  sample: alice@laptop
run:
  description: Name of this run, by which records that it leaves in many places are known to belong together.
  returned: success
  type: str
  sample: 20250131T120000Z-alice-4711
"""

from ansible.module_utils.basic import AnsibleModule


def main():
    module = AnsibleModule(argument_spec={"options": {"type": "raw"}}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_options ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this"
        " project's folder action_plugins"
    )


if __name__ == "__main__":
    main()
