# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module sglang_wait in slices, so that a person sees how a start goes, and a cut connection ends no wait."""

from __future__ import annotations

import time

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# A connection that stays away longer than this is reported as unreachable; the server on the node goes on.
RECONNECT_SECONDS = 180
RECONNECT_PAUSE = 3

# What a server does in a stage, for a person who waits with it.
DOES = {
    "import": "starting Python and reading the model's configuration",
    "weights": "loading weights",
    "state pool": "allocating the state pool",
    "KV pool": "allocating the KV pool",
    "graph capture": "capturing CUDA graphs",
    "host pools": "allocating host memory",
    "warm-up": "answering its own first request",
    "ready": "waiting for a first answer from us",
}

# From the answer of one slice to the options of the next.
CARRIED = {"timeline": "timeline", "children": "children", "boot": "log"}

display = Display()


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_wait``."""

    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        every = int(arguments.get("every", 30))
        name = arguments.get("name", "server")
        result, lost_since, told = {}, None, None
        while True:
            try:
                answer = self._execute_module(
                    module_name="sglang_wait",
                    module_args={
                        **arguments,
                        "slice": every,
                        **{name: result[key] for name, key in CARRIED.items() if key in result},
                    },
                    task_vars=task_vars,
                )
            except AnsibleConnectionFailure as failure:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > RECONNECT_SECONDS:
                    raise
                display.display(f"{name}: connection lost, trying again ({failure.message.strip()[:80]})")
                self._connection.reset()
                time.sleep(RECONNECT_PAUSE)
                continue
            lost_since = None
            if answer.get("failed") or answer.get("state") != "starting" or self._task.check_mode:
                if answer.get("state") == "ready" and told is not None:
                    display.display(progress(name, answer))
                return answer
            result = answer
            display.display(progress(name, answer))
            told = answer


def progress(name, answer):
    """One line of progress: who, how long after the launch, the stage and what it does there, and for how long already."""
    stage, elapsed = answer["stage"], answer["elapsed"]
    text = f"{name}  +{elapsed:.0f}s  {stage}"
    if answer.get("outcome") == "ready":
        return text
    text += f": {answer.get('waits_for') or DOES.get(stage, stage)}"
    inside = elapsed - answer["timeline"][-1]["at_s"]
    return f"{text}, for {inside:.0f}s" if inside >= 1 else text
