#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the servers of a node remember of starts, stops and swaps."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_history
short_description: What was changed on the SGLang servers of a node, by whom and when
description:
  - Reads the histories that M(sglang_server) and M(sglang_swap) write. One call a node. Changes nothing.
  - Of a line or a record that is damaged nothing is told, which is a warning.
options:
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  slugs:
    description: Stems of the servers' files.
    type: list
    elements: str
    required: true
  limit:
    description: The newest entries of each server that are told.
    type: int
    default: 50
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Read what two servers remember
  sglang_history:
    root: /srv/sglang
    slugs: [sglang_gpu0, sglang_gpu1]
"""

RETURN = r"""
entries:
  description:
    - Oldest first, each with C(at) (UTC), C(server), C(what) (V(started), V(stopped), V(swapped), V(reverted), V(kept),
      V(lost), or V(open) of a swap without an end), C(who), C(run), C(before), C(after) and C(why). Of a start, C(before)
      and C(after) are profiles; of a swap, C(profile), C(release), C(model) and C(port), with C(changes), a line for each
      difference.
  returned: always
  type: list
  elements: dict
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_state import Paths, load_swap, read_text, shape_error

UNENDED = "it has no end yet: it goes on now, or was cut, and the next swap.yml takes it up"
ENTRY = {"at": str, "server": str, "what": str}
MORE = {"who": str, "run": str, "why": str, "changes": list}


def entries(module, path, limit):
    """The newest entries of one server; lines that were cut, or are none of ours, are left out with a warning."""
    found, lines = [], (read_text(path) or "").splitlines()
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        known = {key: kind for key, kind in MORE.items() if isinstance(entry, dict) and entry.get(key) is not None}
        if isinstance(entry, dict) and not shape_error(entry, {**ENTRY, **known}):
            found.append(entry)
    if len(found) < len(lines):
        module.warn(f"{path}: {len(lines) - len(found)} of {len(lines)} lines are damaged and not told: look at them there")
    return found[-limit:]


def unended(module, path):
    """The swap of one server that nobody has brought to an end, as an entry, or nothing."""
    swap, damage = load_swap(path)
    if damage:
        module.warn(damage)
    if not swap or swap.get("outcome"):
        return []
    told = {
        **{key: swap.get(key) for key in ("who", "run", "changes")},
        "before": swap.get("from"),
        "after": swap.get("to"),
        "why": UNENDED,
    }
    return [{"at": swap["begun_at"], "server": swap.get("name"), "what": "open", **told}]


def main():
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "slugs": {"type": "list", "elements": "str", "required": True},
            "limit": {"type": "int", "default": 50},
        },
        supports_check_mode=True,
    )
    found = []
    for slug in module.params["slugs"]:
        paths = Paths(module.params["root"], slug)
        path = paths.history
        try:
            found += entries(module, path, module.params["limit"])
            path = paths.swap
            found += unended(module, path)
        except OSError as error:
            module.fail_json(msg=f"{path} can't be read: {error.strerror}: run it as the user that runs the servers")
    module.exit_json(changed=False, entries=sorted(found, key=lambda entry: entry["at"]))


if __name__ == "__main__":
    main()
