#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until a server has no request left, or its time is over."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_drain
short_description: Wait until an SGLang server has no request left
description:
  - Polls the server's own counters of running and waiting requests until both are zero twice in a row, or until O(timeout).
  - It takes no traffic away. Whoever sends requests has to stop first, such as a router that the server was taken out of.
  - A server that does not run, or that does not answer, is drained.
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
  timeout:
    description: Seconds after which to come back with what is left.
    type: int
    default: 300
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
- name: Let requests finish, for two minutes at most
  sglang_drain:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
    timeout: 120
  vars:
    ansible_python_interpreter: /opt/sglang/venv/bin/python
"""

RETURN = r"""
drained:
  description: Whether no request is left.
  returned: always
  type: bool
left:
  description: Requests that run or wait, at the last look. Null when the server could not be asked.
  returned: always
  type: int
elapsed:
  description: Seconds that it took.
  returned: always
  type: float
detail:
  description: What is worth a line, such as that the server does not answer; empty when all is well.
  returned: always
  type: str
"""

import sys
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_http import MISSING_REQUESTS, Client, Silent, loads, requests
from ansible.module_utils.sglang_process import alive
from ansible.module_utils.sglang_state import Paths, read_secrets, read_state

POLL_SECONDS = 0.25
ASK_SECONDS = 5
SILENT_SECONDS = 15  # a busy server answers late, a dead one never


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "slug": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    params = module.params
    paths = Paths(params["root"], params["slug"])
    state = read_state(paths.state)
    started = time.monotonic()

    def leave(drained, left, detail=""):
        elapsed = round(time.monotonic() - started, 1)
        module.exit_json(changed=False, drained=drained, left=left, elapsed=elapsed, detail=detail)

    if module.check_mode:
        leave(True, 0)
    if alive(state.get("identity")) is None:
        leave(True, 0, "it did not run when its turn came")
    if requests is None:
        module.fail_json(msg=f"{params['name']}: " + MISSING_REQUESTS.format(python=sys.executable))
    client = Client(params["host"], state["port"], read_secrets(paths).get("api-key"))
    silent_since, idle, left = None, 0, None
    while True:
        if alive(state["identity"]) is None:
            leave(True, 0, "it ended by itself")
        try:
            counters = loads(client, ASK_SECONDS)
            silent_since = None
            if counters is None:
                leave(True, None, "this release has no /v1/loads: SGLang's own drain at SIGTERM has to do")
            left = counters["running"] + counters["waiting"]
            # Twice: a request that is being tokenised is in neither count.
            idle = idle + 1 if left == 0 else 0
            if idle >= 2:
                leave(True, 0)
        except Silent as silent:
            idle, silent_since = 0, silent_since or time.monotonic()
            if time.monotonic() - silent_since > SILENT_SECONDS:
                leave(False, left, f"it does not answer: {silent}")
        if time.monotonic() - started > params["timeout"]:
            leave(False, left, f"{left} requests left after {params['timeout']} s: they get the time that a stop gives them")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
