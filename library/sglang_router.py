#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start and stop the router in front of a fleet, and check beforehand that it could be started."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_router
short_description: Start or stop the router of a fleet
description:
  - Starts SGLang's router (C(smg)) detached from the connection, with a start script that can be run by hand and a log file
    of its own, and remembers it by pid, start time and boot id, as M(sglang_server) does with a server.
  - Starting is idempotent. A router that already runs with the same command line, environment and key is left alone. One
    that runs with others is refused, unless O(replace=true).
  - It comes back when the router listens, or with the router's own sentence when it ended. Servers are given to it with
    M(sglang_router_worker).
  - Stopping sends SIGTERM, after which the router takes no more requests and finishes those in flight. What is left after
    O(stop_timeout) is killed. A stranger is never touched.
options:
  name:
    description: The router's name in messages.
    type: str
    default: router
  slug:
    description: Stem of the router's files on the node.
    type: str
    default: sglang_router
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  state:
    description:
      - V(checked) finds out whether V(started) would go through and changes nothing. It lets the router itself check its
        options by starting it on a port that is taken.
      - V(started) makes sure that the router runs with O(argv) and O(env) and listens.
      - V(stopped) makes sure that nothing of the router is left.
    type: str
    choices: [checked, started, stopped]
    default: started
  argv:
    description: The router's command line, word by word. It holds no key.
    type: list
    elements: str
  env:
    description: What the start script exports.
    type: dict
    default: {}
  script:
    description: Text of the start script. Required for V(checked) and V(started).
    type: str
  script_path:
    description: Where the start script is put.
    type: path
  port:
    description: Port that the router listens on.
    type: int
    required: true
  metrics_port:
    description: Port of the router's metrics. Looked at before a start, as O(port) is.
    type: int
    required: true
  secrets:
    description: The router's key (C(api-key)). Written to a file of mode 0600 that O(argv) names.
    type: dict
    default: {}
  record:
    description: What else to keep in the state file about this start, such as URL and flags. No secrets.
    type: dict
    default: {}
  replace:
    description: Stop a router that runs with other options and start anew, instead of refusing.
    type: bool
    default: false
  start_timeout:
    description: Seconds within which a started router must listen.
    type: int
    default: 30
  stop_timeout:
    description: Seconds that requests in flight get to finish after SIGTERM, before SIGKILL.
    type: int
    default: 60
  because:
    description: Why it is stopped, for the record.
    type: str
    default: ""
  lock_timeout:
    description: Seconds to wait for another run that works on the router.
    type: int
    default: 10
  who:
    description: Who asks, for the lock and the records, such as V(alice@laptop).
    type: str
    default: ansible
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
  platform: {support: full, platforms: linux}
notes:
  - It needs no third-party module, so that a router whose venv was removed can be stopped.
  - An idle router, too, takes five seconds to end after SIGTERM, which is its own doing.
seealso:
  - module: sglang_router_worker
  - module: sglang_router_info
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Start the router
  sglang_router:
    root: /srv/sglang
    argv: [/srv/sglang/router/bin/python, /srv/sglang/router/launch_router.py, --host, 127.0.0.1, --port, "30080"]
    script: "{{ lookup('ansible.builtin.template', 'start.sh.j2') }}"
    script_path: /srv/sglang/scripts/start_sglang_router.sh
    port: 30080
    metrics_port: 30081

- name: Stop it
  sglang_router:
    root: /srv/sglang
    port: 30080
    metrics_port: 30081
    state: stopped
"""

RETURN = r"""
pid:
  description: Process of the running router; null when none runs.
  returned: always
  type: int
identity:
  description: What the process is known by (C(pid), C(start_ticks), C(boot_id), C(sid)).
  returned: for started, outside check mode
  type: dict
log:
  description: The log file of this boot.
  returned: when it was ever started
  type: str
launch_sha256:
  description: Figure of command line, environment and key; equal figures need no restart.
  returned: for checked and started
  type: str
would_change:
  description: Whether V(started) would change anything.
  returned: for checked
  type: bool
running:
  description: Start time and pid of what ran before the task, or null.
  returned: always
  type: dict
killed:
  description: Processes that had to be killed after SIGTERM, as C(pid) and C(command).
  returned: for stopped
  type: list
  elements: dict
elapsed:
  description: Seconds that stopping took.
  returned: for stopped
  type: float
"""

import os
import re
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_log import last_lines, read_startup
from ansible.module_utils.sglang_managed import (
    Managed,
    Refused,
    changed_parts,
    check_port,
    check_root,
    launch,
    run_module,
    script_diff,
    stop,
    write_files,
)
from ansible.module_utils.sglang_process import MARKERS, describe, listeners, members
from ansible.module_utils.sglang_state import read_text, write_state

# How the router says what it does not like: argparse, then its own start.
ARGPARSE = re.compile(r"error: (.+)")
OWN_ERROR = re.compile(r"Error starting router: (?:Configuration error: )?(.+)")
TAKEN = "Failed to bind the HTTP listener"
UNCHECKED = ("--host", "--port", "--prometheus-port", "--secrets")
CHECK_SECONDS = 30


class Router(Managed):
    """The router of the fleet, on the node where it runs."""

    MAIN_PROCESS = "launch_router.py"
    SETTING = "give the router another sglang_router_port"

    def verdict_of_end(self, log):
        said = complaint(read_startup(log))
        return said and {"id": "router", "cause": said, "line": said}

    def ports(self):
        return [self.params["port"], self.params["metrics_port"]]

    def listens(self):
        """Does one of its own processes have the port?"""
        if self.process is None:
            return False
        ours = {stat.pid for stat in members(self.params["root"], self.name, self.process.session)}
        return any(listener.pid in ours for listener in listeners(self.params["port"]))


def complaint(lines):
    """The router's own sentence about what it does not like, or None."""
    for line in lines:
        found = OWN_ERROR.search(line) or ARGPARSE.search(line)
        if found:
            return found.group(1).strip()[:600]
    return None


def check_options(module, router):
    """Let the router check its options: it reads and checks all of them before it looks at a port, which is taken here."""
    argv = router.params["argv"]
    if not os.path.exists(argv[0]):
        if module.check_mode:
            module.warn(f"{router.name}: {argv[0]} is not there yet, so the options were not checked")
            return
        raise Refused(
            f"{router.name}: there is no {argv[0]}: `ansible-playbook router.yml` installs the router", cause="engine"
        )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # Metrics are bound first, and the router that is to be replaced has theirs.
        with socket.create_server(("127.0.0.1", 0)) as free:
            metrics = free.getsockname()[1]
        words = [*without(argv, UNCHECKED), "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        words += ["--prometheus-port", str(metrics)]
        # `timeout` because a release that did not stop at a taken port would serve on.
        environment = {name: value for name, value in router.params["env"].items() if name not in MARKERS}
        rc, out, err = module.run_command(["timeout", str(CHECK_SECONDS), *words], environ_update=environment, cwd="/")
    lines = [*out.splitlines(), *err.splitlines()]
    said = complaint(lines)
    if said is not None and TAKEN in said:
        return
    raise Refused(
        f"{router.name}: smg {router.params['record'].get('release') or '(release unknown)'} refuses its options:"
        f" {said or (last_lines(lines, 1) or ['no output'])[0]} (exit code {rc}); correct sglang_router_args",
        cause="flags",
        lines=last_lines(lines),
    )


def without(argv, flags):
    """A command line without these flags and the word after each."""
    words, skip = [], False
    for word in argv:
        if not skip and word not in flags:
            words.append(word)
        skip = not skip and word in flags
    return words


def check_replaceable(router):
    """Refuse to restart a router unasked: its clients would notice."""
    if router.same() or router.params["replace"]:
        return
    by_hand = router.by_hand()
    if by_hand:
        raise Refused(
            f"{router.name} runs as pid {by_hand.pid}, started by hand or its state file is gone: end it, or run router.yml"
            " with -e state=stopped, or with -e replace=true",
            cause="running",
        )
    if router.process is not None:
        raise Refused(
            f"{router.name} runs (pid {router.process.pid}) with other {', '.join(changed_parts(router))} than asked for:"
            " clients would notice a restart, which router.yml -e replace=true does",
            cause="running",
        )


def ensure_started(module, router):
    """State started, or checked when nothing may be done but looking."""
    params = router.params
    for needed in ("argv", "script", "script_path"):
        if not params[needed]:
            raise Refused(f"{router.name}: state {params['state']} needs {needed}", cause="usage")
    check_root(router)
    try:
        check_replaceable(router)
    except Refused as refusal:
        if not module.check_mode:
            raise
        module.warn(f"without --check this is refused: {refusal}")
    check_port(router)
    same = router.same()
    if not same:
        check_options(module, router)
    script_changed = read_text(params["script_path"]) != params["script"]
    cut = same and bool(router.state.get("launching"))  # a start that is still to be written down
    result = router.result(launch_sha256=router.launch_sha256, log=router.state.get("log") if same else None)
    result["changed"] = not same or script_changed or cut
    if module._diff:
        result["diff"] = script_diff(router)
    if params["state"] == "checked":
        return {**result, "changed": False, "would_change": result["changed"], "diff": []}
    if module.check_mode:
        return result
    write_files(router)
    if cut:
        write_state(router.paths.state, {**router.state, "launching": False})
    if not same:
        stop(router)
        result["log"] = launch(router, router.listens, params["start_timeout"])
        if not router.listens():
            others = [listener for listener in listeners(params["port"]) if listener.pid != router.process.pid]
            stop(router)
            raise Refused(
                f"{router.name} did not listen on port {params['port']} within {params['start_timeout']} s and was stopped:"
                f" {f'{describe(others[0])} has the port' if others else 'its log says why'}: {result['log']}",
                cause="timeout",
                log=result["log"],
            )
    result.update(pid=router.process.pid, identity=router.state["identity"])
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "default": "router"},
            "slug": {"type": "str", "default": "sglang_router"},
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["checked", "started", "stopped"], "default": "started"},
            "argv": {"type": "list", "elements": "str"},
            "env": {"type": "dict", "default": {}},
            "script": {"type": "str"},
            "script_path": {"type": "path"},
            "port": {"type": "int", "required": True},
            "metrics_port": {"type": "int", "required": True},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "record": {"type": "dict", "default": {}},
            "replace": {"type": "bool", "default": False},
            "start_timeout": {"type": "int", "default": 30},
            "stop_timeout": {"type": "int", "default": 60},
            "because": {"type": "str", "default": ""},
            "lock_timeout": {"type": "int", "default": 10},
            "who": {"type": "str", "default": "ansible"},
        },
        supports_check_mode=True,
    )
    run_module(module, Router, ensure_started)


if __name__ == "__main__":
    main()
