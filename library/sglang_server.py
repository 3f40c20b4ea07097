#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start and stop one SGLang server, and check beforehand that it could be started."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_server
short_description: Start or stop one SGLang server of a node
description:
  - Starts an SGLang server detached from the connection (a new session, all descriptors redirected), with a start
    script that can be run by hand and a log file of its own, and remembers it by pid, start time and boot id.
  - Starting is idempotent. A server that already runs with the same command line, environment and keys is left alone.
    One that runs with others is refused, unless O(replace=true).
  - Stopping sends SIGTERM to the server's main process alone, so that SGLang drains; what is left after O(stop_timeout)
    is killed, with every process of its session and every process marked as started for it. A stranger is never touched.
  - The module does not wait until the server serves. M(sglang_wait) does.
options:
  name:
    description: The server's name in the inventory, such as V(node1-gpu0). Names the server in every message.
    type: str
    required: true
  slug:
    description: Stem of the server's files on the node, such as V(sglang_gpu0).
    type: str
    required: true
  root:
    description: The fleet's folder on the node.
    type: path
    required: true
  state:
    description:
      - V(checked) finds out whether V(started) would go through and changes nothing but a cache of flag checks.
      - V(started) makes sure that the server runs with O(argv) and O(env).
      - V(stopped) makes sure that nothing of the server is left.
      - V(restored) makes sure that the server runs again what it ran before a swap, as M(sglang_swap) kept it on the node.
        What runs with other flags is stopped. Of the options only those that name the server and say how to stop count.
    type: str
    choices: [checked, started, stopped, restored]
    default: started
  profile:
    description: Name of the profile that O(argv) comes from. Required for V(checked) and V(started).
    type: str
  argv:
    description: The server's command line, word by word, from the engine's python on. It holds no secret.
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
    description: Port that the server will listen on. Looked at before a start, because SGLang itself looks only after one.
    type: int
    required: true
  secrets:
    description:
      - SGLang's keys (C(api-key), C(admin-api-key)). Written to a file of mode 0600 that C(--config) names.
    type: dict
    default: {}
  record:
    description: What else to keep in the state file about this start, such as model, release and URL. No secrets.
    type: dict
    default: {}
  replace:
    description: Stop what runs with other flags and start anew, instead of refusing.
    type: bool
    default: false
  anew:
    description:
      - Restart also what already runs with the same command line, environment and keys, so that a measurement has a boot of its
        own. Every V(started) then changes something.
    type: bool
    default: false
  stop_timeout:
    description:
      - Seconds that requests in flight get to finish after SIGTERM, before SIGKILL. V(0) kills at once, for a start that
        failed and has no requests.
    type: int
    default: 60
  because:
    description: Why it is stopped, for the record and M(sglang_server_info), such as the cause of a failed start.
    type: str
    default: ""
  boot:
    description:
      - Log of the one boot that may be stopped, as it was told by its start. What runs by then with another log is another
        run's and stays. Empty stops whatever runs. For V(stopped).
    type: str
    default: ""
  keep_bundle:
    description:
      - Before anything is stopped, keep a support bundle of this boot below C(<root>/bundles) with the log, the script, the
        command line and environment without secrets, the node, and the kernel's lines on memory. The 10 newest are kept.
    type: bool
    default: false
  lock_timeout:
    description: Seconds to wait for another run that works on this server.
    type: int
    default: 10
  who:
    description: Who asks, for the lock and the records, such as V(alice@laptop).
    type: str
    default: ansible
  run:
    description: Name of the run that asks. What one run changed on many servers is known by it, and undone together.
    type: str
    default: ""
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
  platform: {support: full, platforms: linux}
notes:
  - Run it under the engine's own Python or any other from 3.9 on. It needs no third-party module.
  - Processes of another user, and processes that this project did not start, are named and never signalled.
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Start a server
  sglang_server:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
    profile: nomtp
    argv: [/opt/sglang/venv/bin/python, -m, sglang.launch_server, --model-path, /srv/models/Qwen3.6-27B, --port, "30000"]
    script: "{{ lookup('ansible.builtin.template', 'start.sh.j2') }}"
    script_path: /srv/sglang/scripts/start_sglang_gpu0_nomtp.sh
    port: 30000

- name: Stop it, giving requests two minutes
  sglang_server:
    name: node1-gpu0
    slug: sglang_gpu0
    root: /srv/sglang
    port: 30000
    state: stopped
    stop_timeout: 120
"""

RETURN = r"""
pid:
  description: Main process of the running server; null when none runs.
  returned: always
  type: int
identity:
  description: What the process is known by (C(pid), C(start_ticks), C(boot_id), C(sid)).
  returned: when it runs
  type: dict
log:
  description: The log file of this boot.
  returned: when it was ever started
  type: str
launch_sha256:
  description: Figure of command line, environment and keys; equal figures need no restart.
  returned: for checked and started
  type: str
would_change:
  description: Whether V(started) would change anything.
  returned: for checked
  type: bool
restarts:
  description: Whether V(started) would start a process, and stop the one that runs.
  returned: for checked
  type: bool
holds:
  description: What the running server gives back when it stops, its C(pids) and C(host_gb) of pinned host memory.
  returned: for checked
  type: dict
running:
  description: Profile and start time of what ran before the task, or null.
  returned: always
  type: dict
killed:
  description: Processes that had to be killed after SIGTERM, as C(pid) and C(command).
  returned: for stopped, started and restored
  type: list
  elements: dict
bundle:
  description: The support bundle that was kept, on the node; null when none was.
  returned: for stopped and restored
  type: str
untouched:
  description: Whether the very boot that ran before the swap runs still. False also where someone else had started it again.
  returned: for restored
  type: bool
elapsed:
  description: Seconds that stopping took, until the last process was gone and its GPU memory back. 0 where nothing ran.
  returned: for stopped, started and restored
  type: float
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_flags import ASK, BrokenEngine, Engine, WrongFlags
from ansible.module_utils.sglang_log import cause_of_death, last_lines
from ansible.module_utils.sglang_managed import (
    Managed,
    Refused,
    changed_parts,
    check_port,
    check_root,
    keep_bundle,
    launch,
    run_module,
    script_diff,
    stop,
    write_files,
)
from ansible.module_utils.sglang_node import gpus
from ansible.module_utils.sglang_process import MARKERS, members, shared_bytes, wait_until
from ansible.module_utils.sglang_state import load_swap, read_text, write_state

EARLY_DEATH_SECONDS = 0.5
GPU_SECONDS = 30
# Port and host of the flags that are checked: servers that differ in nothing else share one check.
UNCHECKED = {"--port", "--host", "--config"}


class Server(Managed):
    """One server of the node."""

    MAIN_PROCESS = "sglang.launch_server"
    SETTING = "give the server another port in the inventory"

    def verdict_of_end(self, log):
        return cause_of_death(log, self.params["record"].get("release"))[1]

    def kept(self):
        """The options of what ran before a swap, from the record of it on this node."""
        swap, damage = load_swap(self.paths.swap)
        if not swap:
            why = damage or f"{self.paths.swap} tells of nothing that ran before: run deploy.yml"
            raise Refused(f"{self.name}: {why}", cause="usage")
        before = swap["before"]
        return {
            **{key: before[key] for key in ("profile", "argv", "env", "port", "record", "secrets")},
            "script": before["script_text"],
            "script_path": before["script"],
            "previous": before.get("previous"),
            "run": before.get("launched_in") or "",
            "launched_at": before.get("launched_at"),
            "replace": True,
        }

    def released(self, pids):
        wait_for_gpu(self, pids)


def flag_words(argv):
    """The flags of a command line without those that no check needs."""
    words, skip = [], False
    for word in argv[argv.index("-m") + 2 :]:
        if skip:
            skip = False
        elif word in UNCHECKED:
            skip = True
        else:
            words.append(word)
    return words


def check_flags(module, server):
    """Refuse flags that this engine's parser does not take."""
    argv, env = server.params["argv"], server.params["env"]
    if module.check_mode and not os.path.exists(argv[0]):
        module.warn(f"{server.name}: {argv[0]} is not there yet, so the flags were not checked")
        return
    if not module.check_mode:
        server.paths.make()

    def ask(words):
        if not os.path.exists(argv[0]):
            return 127, "", "no such file"
        return module.run_command(
            # Not on its stdin: an engine that ends before it has read that would break the pipe and hide why it ended.
            [argv[0], "-c", ASK, *words],
            # Without the markers: a check is no process of the server.
            environ_update={
                **{name: value for name, value in env.items() if name not in MARKERS},
                **{"CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"},
            },
            cwd="/",
        )

    release = server.params["record"].get("release")
    engine = Engine(argv[0], release, ask, None if module.check_mode else server.paths.cache, server.params["who"])
    try:
        engine.check(flag_words(argv))
    except WrongFlags as wrong:
        raise Refused(
            f"{server.name}: SGLang {release or '(release unknown)'} refuses the flags of"
            f" profile {server.params['profile']}: {str(wrong)[:600]};"
            " correct it where it is set (the profile, or args of its model or server), or spell it for this release in"
            " group_vars/all/releases.yml",
            cause="flags",
        ) from None
    except BrokenEngine as broken:
        raise Refused(
            f"{server.name}: the engine at {argv[0]} could not read its own flags (exit code {broken.rc}):"
            f" {str(broken)[:400]}; is SGLang installed there whole?",
            cause="engine",
            lines=last_lines(broken.lines),
        ) from None


def check_replaceable(server):
    """Refuse to put a profile over a running one unasked."""
    if server.same() or server.params["replace"]:
        return
    if server.process is None:
        by_hand = server.by_hand()
        if by_hand:
            raise Refused(
                f"{server.name} runs as pid {by_hand.pid}, started by hand or its state file is gone: end it, or run stop.yml"
                " for this server, or -e replace=true",
                cause="running",
            )
        return
    before, after = server.state.get("profile"), server.params["profile"]
    same_profile = f"{before} with other {', '.join(changed_parts(server))}"
    raise Refused(
        f"{server.name} runs profile {before} (pid {server.process.pid}) and was asked to run"
        f" {after if before != after else same_profile}: swap.yml changes it server by server and goes back by itself;"
        " -e replace=true stops and starts it at once",
        cause="running",
    )


def wait_for_gpu(server, pids):
    """Wait until the driver no longer counts memory for processes that are gone: it takes its time after their end."""
    if (server.state.get("record") or {}).get("device") != "cuda":
        return

    def free():
        return not any(used["pid"] in pids for gpu in gpus() for used in gpu["processes"])

    if not wait_until(free, GPU_SECONDS, pause=0.5):
        raise Refused(
            f"{server.name}: its processes are gone, but its GPU still counts memory for them after {GPU_SECONDS} s:"
            " look at nvidia-smi and at the driver's messages (dmesg) before the next start",
            cause="gpu_memory",
        )


def holds(server):
    """What a running server will give back when it stops: its processes, for the driver's list, and shared host memory."""
    ours = members(server.params["root"], server.name, server.process.session) if server.process else server.leftovers()
    return {"pids": [stat.pid for stat in ours], "host_gb": round(max(map(shared_bytes, ours), default=0) / 1e9, 2)}


def ensure_started(module, server):
    """State started, or checked when nothing may be done but looking."""
    params = server.params
    for needed in ("profile", "argv", "script", "script_path"):
        if not params[needed]:
            raise Refused(f"{server.name}: state {params['state']} needs {needed}", cause="usage")
    if "-m" not in params["argv"]:
        raise Refused(
            f"{server.name}: argv starts with {params['argv'][:3]}: expected PYTHON -m sglang.launch_server", cause="usage"
        )
    for key, value in params["secrets"].items():
        if not isinstance(value, str) or value.startswith("-") or not value.isprintable() or not value.isascii():
            raise Refused(
                f"{server.name}: {key} is not a key that SGLang can read from its configuration: it must be text that does"
                " not begin with '-', without control characters",
                cause="usage",
            )
    check_root(server)
    try:
        check_replaceable(server)
    except Refused as refusal:
        if not module.check_mode:
            raise
        module.warn(f"without --check this is refused: {refusal}")
    check_port(server)
    same = server.same() and not params["anew"]
    script_changed = read_text(params["script_path"]) != params["script"]
    if not same:
        check_flags(module, server)
    result = server.result(launch_sha256=server.launch_sha256, log=server.state.get("log") if same else None)
    result["changed"] = not same or script_changed
    if module._diff:
        result["diff"] = script_diff(server)
    if module.check_mode or params["state"] == "checked":
        if params["state"] == "checked":
            cut = bool(server.state.get("launching"))  # a start that is still to be written down
            result.update(changed=False, would_change=not same or script_changed or cut, diff=[], restarts=not same)
            result["holds"] = holds(server)
        return result
    write_files(server)
    if same and server.state.get("launching"):
        write_state(server.paths.state, {**server.state, "launching": False})
    if params["state"] == "restored":
        # Of the boot that was no good; where it was never begun there is none to tell of.
        result["untouched"] = same and server.state.get("launched_at") == params["launched_at"]
        failed = not same and server.state.get("launch_sha256") != server.launch_sha256
        result["bundle"] = keep_bundle(server) if failed and params["keep_bundle"] else None
    result.update(killed=[], elapsed=0.0)
    if not same:
        began = time.monotonic()
        result["killed"] = stop(server)  # of a server that died or was never recorded, what is left
        result["elapsed"] = round(time.monotonic() - began, 1)
        result["log"] = launch(server, lambda: False, EARLY_DEATH_SECONDS)
    result.update(pid=server.process.pid, identity=server.state["identity"])
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "slug": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["checked", "started", "stopped", "restored"], "default": "started"},
            "profile": {"type": "str"},
            "argv": {"type": "list", "elements": "str"},
            "env": {"type": "dict", "default": {}},
            "script": {"type": "str"},
            "script_path": {"type": "path"},
            "port": {"type": "int", "required": True},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "record": {"type": "dict", "default": {}},
            "replace": {"type": "bool", "default": False},
            "anew": {"type": "bool", "default": False},
            "stop_timeout": {"type": "int", "default": 60},
            "because": {"type": "str", "default": ""},
            "boot": {"type": "str", "default": ""},
            "keep_bundle": {"type": "bool", "default": False},
            "lock_timeout": {"type": "int", "default": 10},
            "who": {"type": "str", "default": "ansible"},
            "run": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    run_module(module, Server, ensure_started)


if __name__ == "__main__":
    main()
