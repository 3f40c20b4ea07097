#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the servers of a node generate right now, by their own counters."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_counters
short_description: Output tokens a second of running SGLang servers, by their own counters
description:
  - Reads C(sglang:realtime_tokens_total) of C(/metrics), as far as it counts decoding, at the ends of equal slices of
    O(seconds). Servers are read at the same time. It sends no request and changes nothing.
  - SGLang counts in steps of some dozen tokens of each request. Slices of ten seconds make that unimportant.
  - A server whose counter can't be read has a reason and no figure. That does not fail the module.
options:
  servers:
    description: The servers to read.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {description: Name in the inventory., type: str, required: true}
      host: {description: Address that it listens on., type: str, default: 127.0.0.1}
      port: {description: Port that it listens on., type: int, required: true}
  seconds:
    description: How long to read.
    type: int
    default: 60
  slices:
    description: In how many slices. Their range is the spread.
    type: int
    default: 6
  timeout:
    description: Seconds that one answer may take.
    type: float
    default: 6
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
notes:
  - Runs under the engine's own Python, which has C(requests). The server must run with C(--enable-metrics).
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Read a server for a minute
  sglang_counters:
    servers:
      - {name: node1-gpu0, port: 30000}
  vars:
    ansible_python_interpreter: /opt/sglang/venv/bin/python
  register: counters
"""

RETURN = r"""
servers:
  description:
    - One entry a server, in the order asked, with C(name), C(tok_s) (C(median), C(min), C(max) of the slices and C(runs), how
      many they are; null where it is not known), C(running) and C(waiting) (requests at the end), and C(detail), why it is
      not known.
  returned: always
  type: list
  elements: dict
seconds:
  description: How long it was read.
  returned: always
  type: float
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_http import MISSING_REQUESTS, Client, Silent, metric, requests

COUNTER = "sglang:realtime_tokens_total"


def read(client, timeout):
    """``(moment, tokens decoded since the start, text of /metrics)``; ValueError says why there is none."""
    try:
        text = client.text("/metrics", timeout)
    except Silent as silent:
        raise ValueError(str(silent)) from None
    moment = time.monotonic()
    if text is None:
        raise ValueError("it has no /metrics: add enable-metrics to its profile")
    if metric(text, "sglang:num_running_reqs") is None:
        raise ValueError("its /metrics has no sglang:num_running_reqs: is it SGLang, with enable-metrics?")
    # Until the first token was decoded the counter is not there.
    return moment, metric(text, COUNTER, mode="decode") or 0.0, text


def watch(server, seconds, slices, timeout):
    """One server's entry."""
    client = Client(server["host"], server["port"])
    entry = {"name": server["name"], "tok_s": None, "running": None, "waiting": None, "detail": None}
    begun = time.monotonic()
    try:
        moment, tokens, text = read(client, timeout)
        speeds = []
        for number in range(1, slices + 1):
            time.sleep(max(0.0, begun + seconds * number / slices - time.monotonic()))
            now, more, text = read(client, timeout)
            if more < tokens:
                raise ValueError("it was restarted while it was read")
            speeds.append((more - tokens) / (now - moment))
            moment, tokens = now, more
    except ValueError as why:
        return {**entry, "detail": str(why)}
    entry.update(running=int(metric(text, "sglang:num_running_reqs")), waiting=int(metric(text, "sglang:num_queue_reqs") or 0))
    middle = statistics.median(speeds)
    if middle <= 0:
        return {**entry, "detail": f"it generated nothing in {seconds} s ({entry['running']} requests running)"}
    figures = {"median": middle, "min": min(speeds), "max": max(speeds)}
    return {**entry, "tok_s": {**{name: round(value, 3) for name, value in figures.items()}, "runs": slices}}


def main():
    module = AnsibleModule(
        argument_spec={
            "servers": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "host": {"type": "str", "default": "127.0.0.1"},
                    "port": {"type": "int", "required": True},
                },
            },
            "seconds": {"type": "int", "default": 60},
            "slices": {"type": "int", "default": 6},
            "timeout": {"type": "float", "default": 6},
        },
        supports_check_mode=True,
    )
    if requests is None:
        module.fail_json(msg=MISSING_REQUESTS.format(python=sys.executable))
    for name in ("seconds", "slices"):
        if module.params[name] < 1:
            module.fail_json(msg=f"{name} is {module.params[name]}: it must be at least 1")
    servers, begun = module.params["servers"], time.monotonic()
    how = [module.params[name] for name in ("seconds", "slices", "timeout")]
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        entries = list(pool.map(lambda server: watch(server, *how), servers))
    module.exit_json(changed=False, servers=entries, seconds=round(time.monotonic() - begun, 1))


if __name__ == "__main__":
    main()
