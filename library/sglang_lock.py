#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A lock on a node: one file that says who swaps the fleet, or compares profiles on a server, and until when to believe it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_lock
short_description: Take, keep and leave the lock of the fleet or of one server
description:
  - The lock is a file on a node, because controllers are many and nodes are shared. It names the holder and a time until
    which the holder need not be heard of. V(held) takes it or renews it.
  - A holder that is dead does not keep others out. The action plugin of the same name, which playbooks use, tells whether
    the holder is a process of this very controller that is gone; a holder elsewhere is believed until its time is over.
  - A file that is damaged holds nothing, which is a warning.
options:
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  name:
    description:
      - Which lock, the stem of its file. V(swap) is the fleet's. C(<slug>.compare) is a server's, whose profiles are compared.
    type: str
    default: swap
  state:
    description: V(held) takes or renews the lock, V(free) leaves it if it is ours.
    type: str
    choices: [held, free]
    default: held
  holder:
    description:
      - Who we are, C(run), C(who), C(controller), C(boot_id), C(pid_namespace), C(pid) and C(start_ticks). C(doing) tells
        others what it is held for, such as V(compares profiles on node1-gpu0). The first two are to be given; the action
        plugin knows the others.
    type: dict
    default: {}
  silence:
    description: Seconds from now in which we may not be heard of.
    type: int
    default: 600
  take_over:
    description: The C(run) of a holder that is known to be dead, or is to be put aside all the same; V(*) for any.
    type: str
    default: ""
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode:
    support: full
    details: Looks whether the lock is free and does not take it.
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Hold the lock of the fleet
  sglang_lock:
    root: /srv/sglang
    holder: {run: 20250131T120000Z-alice, who: alice@laptop}
    silence: 900
"""

RETURN = r"""
holder:
  description: Who has it after the task, with C(since) and C(until), or null.
  returned: always
  type: dict
taken_over:
  description: The holder that was put aside, or null.
  returned: success
  type: dict
"""

import contextlib
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_state import Busy, load_lease, lock, shape_error, utc_now, write_state

GUARD_SECONDS = 10


def main():
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "name": {"type": "str", "default": "swap"},
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "holder": {"type": "dict", "default": {}},
            "silence": {"type": "int", "default": 600},
            "take_over": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    ours = params["holder"]
    if shape_error(ours, {"run": str, "who": str, "pid": int}) or not (ours["run"] and ours["who"]):
        module.fail_json(msg=f"holder is {ours!r}: expected at least run, who and pid")
    folder = os.path.join(params["root"], "run")
    path = os.path.join(folder, f"{params['name']}.lock.json")
    try:
        if module.check_mode:
            guard = contextlib.nullcontext()
        else:
            os.makedirs(folder, mode=0o755, exist_ok=True)
            guard = lock(os.path.join(folder, f"{params['name']}.lock"), ours["who"], GUARD_SECONDS)
        with guard:
            answer(module, path, ours)
    except Busy as holder:
        module.fail_json(msg=f"the lock {path} can't be looked at: {holder} has it open")
    except OSError as error:
        module.fail_json(msg=f"the lock can't be written: {error.filename or path}: {error.strerror or error}")


def answer(module, path, ours):
    params = module.params
    there, damage = load_lease(path)
    if damage:
        module.warn(damage)
    mine = there.get("run") == ours["run"]
    if params["state"] == "free":
        if mine and not module.check_mode:
            os.unlink(path)
        module.exit_json(changed=False, holder=None if mine else there or None, taken_over=None)
    valid = bool(there) and not mine and time.time() < there["until_epoch"]
    if valid and params["take_over"] not in ("*", there["run"]):
        module.fail_json(msg=f"the lock {path} is held", cause="held", holder=there)
    until = time.time() + params["silence"]
    held = {
        **ours,
        "since": there["since"] if mine else utc_now(),
        "until": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(until)),
        "until_epoch": round(until),
    }
    if not module.check_mode:
        write_state(path, held)
    module.exit_json(changed=False, holder=held, taken_over=there if there and not mine else None)


if __name__ == "__main__":
    main()
