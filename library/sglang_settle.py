#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Watch a server that has just become ready: some faults take a first request, or a minute, to show."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_settle
short_description: Watch a server for a while after it became ready
description:
  - Sends a real generation at once, every O(every) seconds and at the end, and looks between them whether the process
    lives. The first that fails ends the watch and fails the task.
options:
  name:
    description: The server's name, for messages.
    type: str
    required: true
  slug:
    description: Stem of the server's files on the node.
    type: str
    required: true
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  host:
    description: Address that the server listens on.
    type: str
    default: 127.0.0.1
  seconds:
    description: How long to watch. With 0 one generation is all.
    type: int
    default: 0
  every:
    description: Seconds between two generations.
    type: float
    default: 10
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode:
    support: full
    details: Comes back at once.
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
notes:
  - Runs under the engine's own Python, which has C(requests). The port and the key are those that the server runs with.
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Watch it past its second minute
  sglang_settle:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
    seconds: 150
  vars:
    ansible_python_interpreter: /opt/sglang/venv/bin/python
"""

RETURN = r"""
elapsed:
  description: Seconds that it was watched.
  returned: always
  type: float
generations:
  description: Generations that came back.
  returned: always
  type: int
lines:
  description: The last lines of the log.
  returned: when it failed
  type: list
  elements: str
"""

import sys
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_http import MISSING_REQUESTS, Client, Silent, requests
from ansible.module_utils.sglang_log import aftermath, failure, last_lines, read_tail
from ansible.module_utils.sglang_process import alive
from ansible.module_utils.sglang_state import Paths, read_secrets, read_state

POLL_SECONDS = 0.25
GENERATE_SECONDS = 60
# What a dying server writes after it let go of a request.
LAST_WORDS_SECONDS = 8


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "slug": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "seconds": {"type": "int", "default": 0},
            "every": {"type": "float", "default": 10},
        },
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, elapsed=0.0, generations=0)
    if requests is None:
        module.fail_json(msg=f"{params['name']}: " + MISSING_REQUESTS.format(python=sys.executable))
    paths = Paths(params["root"], params["slug"])
    state = read_state(paths.state)
    started = time.monotonic()
    came = 0

    def elapsed():
        return round(time.monotonic() - started, 1)

    def fail(what):
        try:
            lines = read_tail(state["log"])
        except (OSError, KeyError):
            lines = []
        cause = failure(lines) or aftermath(lines)
        because = f": {cause['cause']}" if cause else ""
        module.fail_json(
            msg=f"{params['name']} became ready, and {what} after {elapsed():.0f} s and {came} answers{because};"
            f" log: {state.get('log')}",
            elapsed=elapsed(),
            generations=came,
            lines=last_lines(lines),
        )

    if not state.get("identity"):
        fail("was stopped")
    client = Client(params["host"], state["port"], read_secrets(paths).get("api-key"))
    due = 0.0
    while True:
        if alive(state["identity"]) is None:
            fail("died")
        last = elapsed() >= params["seconds"]
        if elapsed() >= due or last:
            try:
                problem = client.generate(GENERATE_SECONDS)
            except Silent as silent:
                problem = str(silent)
            if problem:
                deadline = time.monotonic() + LAST_WORDS_SECONDS
                while alive(state["identity"]) is not None and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                fail("died" if alive(state["identity"]) is None else f"does not answer ({problem})")
            came, due = came + 1, elapsed() + params["every"]
        if last:
            module.exit_json(changed=False, elapsed=elapsed(), generations=came)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
