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
        What runs with other flags is stopped. Of the options only those that name the server count.
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
  stop_timeout:
    description: Seconds that requests in flight get to finish after SIGTERM, before SIGKILL.
    type: int
    default: 60
  because:
    description: Why it is stopped, for the record and M(sglang_server_info), such as the cause of a failed start.
    type: str
    default: ""
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
  returned: for stopped
  type: list
  elements: dict
elapsed:
  description: Seconds that stopping took, until the last process was gone and its GPU memory back.
  returned: for stopped
  type: float
"""

import contextlib
import json
import os
import signal
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_log import failure, last_lines, read_startup
from ansible.module_utils.sglang_node import gpus
from ansible.module_utils.sglang_process import (
    MARKERS,
    alive,
    boot_seconds,
    command,
    describe,
    identity,
    listeners,
    marked,
    members,
    orphans,
    send,
    shared_bytes,
    shared_memory,
    started_unrecorded,
    wait_until,
)
from ansible.module_utils.sglang_state import (
    Busy,
    Paths,
    boot_of,
    launch_sha256,
    link_atomic,
    lock,
    new_log,
    read_state,
    read_text,
    remember,
    utc_now,
    write_atomic,
    write_state,
)

# Asks the engine's own parser, as `python -m sglang.launch_server` would, without loading a model or touching a GPU.
CHECK_FLAGS = r"""
import argparse, json, sys
words = json.load(sys.stdin)
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang", allow_abbrev=False)
ServerArgs.add_cli_args(parser)
parser.parse_args(words)
"""
CHECK_SECONDS = 300
ARGPARSE_ERROR = 2
MAIN_PROCESS = "sglang.launch_server"
EARLY_DEATH_SECONDS = 0.5
KILL_SECONDS = 20
GPU_SECONDS = 30
KEPT_LOGS = 20
# The server gets these of our own environment and nothing else: no SSH_*, no ANSIBLE_*.
PASSED_ENVIRONMENT = ("HOME", "USER", "LOGNAME", "PATH", "TZ")
# Port and host of the flags that are checked: servers that differ in nothing else share one check.
UNCHECKED = {"--port", "--host", "--config"}


class Refused(Exception):
    """Why the state can't be reached, in one sentence, with data for the caller."""

    def __init__(self, sentence, **data):
        super().__init__(sentence)
        self.data = data


class Server:
    """One server of the node, as this task finds it."""

    def __init__(self, params):
        self.name = params["name"]
        self.params = params
        self.paths = Paths(params["root"], params["slug"])
        self.state = read_state(self.paths.state)
        if self.state.get("launching"):
            found = started_unrecorded(params["root"], self.name)
            self.state["identity"] = identity(found.pid) if found else None
        self.process = alive(self.state.get("identity"))
        self.warnings = []
        owner = self.state.get("name")
        if owner and owner != self.name and self.process is not None:
            raise Refused(
                f"{self.paths.state} belongs to {owner}, which runs (pid {self.process.pid}), and not to {self.name}:"
                " give each node a sglang_root of its own, or stop it under its old name",
                cause="owner",
            )
        if params["state"] == "restored":
            self.params = params = {**params, **self.kept()}
        self.launch_sha256 = launch_sha256(params["argv"] or [], params["env"], params["secrets"])

    def kept(self):
        """The options of what ran before a swap, from the record of it on this node."""
        before = read_state(self.paths.swap).get("before")
        if not before:
            raise Refused(f"{self.name}: {self.paths.swap} tells of nothing that ran before: run deploy.yml", cause="usage")
        return {
            **{key: before[key] for key in ("profile", "argv", "env", "port", "record", "secrets")},
            "script": before["script_text"],
            "script_path": before["script"],
            "previous": before["previous"],
            "run": before.get("launched_in") or "",
            "replace": True,
        }

    @property
    def running(self):
        """Profile and start of what runs, or None."""
        if self.process is None:
            return None
        return {"profile": self.state.get("profile"), "launched_at": self.state.get("launched_at"), "pid": self.process.pid}

    def same(self):
        """Does what was asked for already run?"""
        return self.process is not None and self.state.get("launch_sha256") == self.launch_sha256

    def leftovers(self):
        """Our processes that belong to no running server: of a start that was cut, or of a leader that died."""
        if self.process is not None:
            return []
        argv = self.state.get("argv") or ["?"]
        known = None if self.state.get("stopped_at") else self.state.get("identity")
        return orphans(self.params["root"], self.name, known, argv[0])

    def by_hand(self):
        """The main process of a start script that someone ran by hand (or whose state file is gone), or None."""
        if self.process is not None:
            return None
        return next((stat for stat in marked(self.params["root"], self.name) if MAIN_PROCESS in command(stat.pid)), None)

    def strangers(self):
        """Listeners on our port that are none of our processes."""
        ours = {stat.pid for stat in self.leftovers()}
        if self.process is not None:
            ours |= {stat.pid for stat in members(self.params["root"], self.name, self.process.session)}
        return [listener for listener in listeners(self.params["port"]) if listener.pid not in ours]

    def result(self, **more):
        """What every exit tells."""
        return {"name": self.name, "pid": self.process.pid if self.process else None, "running": self.running, **more}


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
    """Refuse flags that this engine's parser does not take. Kept by release and flags: a parser takes seconds to import."""
    argv, env = server.params["argv"], server.params["env"]
    if module.check_mode and not os.path.exists(argv[0]):
        module.warn(f"{server.name}: {argv[0]} is not there yet, so the flags were not checked")
        return
    words = flag_words(argv)
    key = launch_sha256([argv[0], str(server.params["record"].get("release")), *words], {}, {})
    verdict = os.path.join(server.paths.cache, f"flags-{key[:32]}.json")
    if os.path.exists(verdict):
        return
    keep = not module.check_mode
    if keep:
        server.paths.make()
    # Servers of a node mostly have the same flags: the first one asks, the others wait for its answer.
    guard = lock(os.path.join(server.paths.cache, "flags.lock"), server.params["who"], CHECK_SECONDS) if keep else None
    try:
        if guard:
            guard.__enter__()
            if os.path.exists(verdict):
                return
        if not os.path.exists(argv[0]):
            rc, err = 127, "no such file"
        else:
            rc, _out, err = module.run_command(
                [argv[0], "-c", CHECK_FLAGS],
                data=json.dumps(words),
                # Without the markers: a check is no process of the server.
                environ_update={
                    **{name: value for name, value in env.items() if name not in MARKERS},
                    **{"CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"},
                },
                cwd="/",
            )
        if rc == ARGPARSE_ERROR:
            sentence = next((line for line in reversed(err.splitlines()) if "error:" in line), err[-400:])
            raise Refused(
                f"{server.name}: SGLang {server.params['record'].get('release') or '(release unknown)'} refuses the flags of"
                f" profile {server.params['profile']}: {sentence.partition('error: ')[2][:600] or sentence};"
                " correct the profile, or spell the flag for this release in group_vars/all/releases.yml",
                cause="flags",
            )
        if rc != 0:
            raise Refused(
                f"{server.name}: the engine at {argv[0]} could not read its own flags (exit code {rc}):"
                f" {(err.strip().splitlines() or ['no output'])[-1][:400]}; is SGLang installed there whole?",
                cause="engine",
                lines=last_lines(err.splitlines()),
            )
        if keep:
            write_atomic(verdict, json.dumps({"flags": words, "checked_at": utc_now()}) + "\n", 0o644)
    finally:
        if guard:
            guard.__exit__(None, None, None)


def check_root(server):
    """Refuse a folder that can't be written, by trying: file systems have more reasons than mode bits."""
    folder = os.path.abspath(server.params["root"])
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    probe = os.path.join(folder, f".sglang_fleet_{os.getpid()}")
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        raise Refused(
            f"{server.name}: the fleet's folder {server.params['root']} can't be written ({folder}: {error.strerror}):"
            " choose another sglang_root, or give this user the right to write there",
            cause="root",
        ) from None


def check_port(server):
    """Refuse a port that a stranger has."""
    strangers = server.strangers()
    if strangers:
        raise Refused(
            f"{server.name}: port {server.params['port']} is taken by {describe(strangers[0])}, which this fleet did not start:"
            " stop it, or give the server another port in the inventory",
            cause="port",
            listeners=[listener._asdict() for listener in strangers],
        )


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


def changed_parts(server):
    """What a running server was started with and is not asked for now: names of flags and variables, or which keys."""
    old, new = ((server.state.get("record") or {}).get("flags") or [], server.params["record"].get("flags") or [])
    flags = [line[0] for line in [*old, *new] if line not in old or line not in new]
    old_env, new_env = server.state.get("env") or {}, server.params["env"]
    names = [name for name in {**old_env, **new_env} if old_env.get(name) != new_env.get(name)]
    return list(dict.fromkeys(flags + names)) or ["engine or keys"]


def launch_text(argv, env):
    """What decides how a server runs, a word a line, for a diff."""
    return "".join(f"{name}={value}\n" for name, value in sorted(env.items())) + "".join(f"{word}\n" for word in argv)


def script_diff(server):
    """Before and after: the start script, and what runs where something does."""
    params = server.params
    shown = [
        {
            "before_header": params["script_path"],
            "after_header": params["script_path"],
            "before": read_text(params["script_path"]) or "",
            "after": params["script"],
        }
    ]
    if server.process is not None and not server.same():
        shown.append(process_diff(server, launch_text(params["argv"], params["env"])))
    return shown


def process_diff(server, after):
    """Before and after of the running process, a word a line."""
    header = f"{server.name}: process"
    before = launch_text(server.state.get("argv") or [], server.state.get("env") or {})
    return {"before_header": header, "after_header": header, "before": before, "after": after}


def write_files(server):
    """Put the start script and the secrets where the server reads them. True when the script changed."""
    params = server.params
    server.paths.make()
    changed = read_text(params["script_path"]) != params["script"]
    if changed:
        write_atomic(params["script_path"], params["script"], 0o700)
    if params["secrets"]:
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in sorted(params["secrets"].items()))
        if read_text(server.paths.secrets) != text:
            write_atomic(server.paths.secrets, text, 0o600)
    elif os.path.exists(server.paths.secrets):
        os.unlink(server.paths.secrets)
    return changed


def remove_old_logs(paths):
    """Keep the newest logs of a server; SGLang writes a line a batch and a disk is finite."""
    logs = sorted(name for name in os.listdir(paths.logs) if name.endswith(".log"))
    for name in logs[:-KEPT_LOGS]:
        os.unlink(os.path.join(paths.logs, name))


def previous(server):
    """What ran before with other flags. A server that died and is started anew, or put back, forgets nothing of it."""
    if "previous" in server.params:
        return server.params["previous"]
    if server.state.get("launch_sha256") == server.launch_sha256:
        return server.state.get("previous")
    return boot_of(server.state)


def swapping(server):
    """Is a swap of this server under way? It tells the history of this server by itself."""
    swap = read_state(server.paths.swap)
    return bool(swap) and not swap.get("outcome")


def launch(server):
    """Start the script in a session of its own and write down what was started."""
    params = server.params
    log = new_log(server.paths)
    environment = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    environment.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    environment["LC_ALL"] = "C.UTF-8"
    written = {
        "name": server.name,
        "identity": None,
        "launching": True,
        "profile": params["profile"],
        "argv": params["argv"],
        "env": params["env"],
        "launch_sha256": server.launch_sha256,
        "script": params["script_path"],
        "script_text": params["script"],
        "port": params["port"],
        "log": log,
        "launched_at": utc_now(),
        "launched_epoch": time.time(),
        "launched_boot_seconds": boot_seconds(),
        "launched_by": params["who"],
        "launched_in": params["run"],
        "stopped_at": None,
        "stopping_at": None,
        "ready_at": None,
        "record": params["record"],
        "previous": previous(server),
    }
    descriptor = os.open(log, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        # Written before and after: a task that is cut between the two leaves a process that the next one recognises.
        write_state(server.paths.state, written)
        # run_command waits for its child, and a server is not to be waited for. Both are needed: without the redirection
        # the task hangs until the server ends, without the session the server dies with the connection.
        process = subprocess.Popen(  # pylint: disable=ansible-bad-function
            [params["script_path"]],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            cwd=params["root"],
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(descriptor)
    known = identity(process.pid)
    write_state(server.paths.state, {**written, "identity": known, "launching": False})
    link_atomic(os.path.relpath(log, os.path.dirname(server.paths.newest_log)), server.paths.newest_log)
    remove_old_logs(server.paths)
    time.sleep(EARLY_DEATH_SECONDS)
    if process.poll() is not None:
        lines = read_startup(log)
        verdict = failure(lines) or {}
        raise Refused(
            f"{server.name} ended at once with exit code {process.returncode}:"
            f" {verdict.get('cause') or (last_lines(lines, 1) or ['no output'])[0]}; whole log: {log}",
            cause="died",
            lines=last_lines(lines),
            log=log,
        )
    before, server.state = server.state, read_state(server.paths.state)
    server.process = alive(known)
    if not swapping(server):
        told = {"before": before.get("profile"), "after": params["profile"], "release": params["record"].get("release")}
        remember(server.paths, server=server.name, what="started", who=params["who"], run=params["run"], **told)
    return log


def kill(processes):
    """SIGKILL to processes that are ours."""
    for stat in processes:
        send(stat.pid, signal.SIGKILL, stat.start_ticks)


def stop(server):
    """Bring the server down and see that nothing of it is left. Returns what had to be killed."""
    params = server.params
    root, name = params["root"], params["name"]
    session = server.process.session if server.process else None
    ours = members(root, name, session) if server.process else server.leftovers()
    files = shared_memory(stat.pid for stat in ours) | set(server.state.get("shared_memory") or [])

    def left():
        return members(root, name, session) if session else server.leftovers()

    by_hand = server.by_hand()
    note(server, stopping_at=utc_now(), stopping_by=params["who"])
    main = identity(server.process.pid) if server.process else identity(by_hand.pid) if by_hand else None
    if main is not None:
        # To the main process alone: to the whole group it looks like a crash of the children and nothing is drained.
        send(main["pid"], signal.SIGTERM, main["start_ticks"])
        wait_until(lambda: alive(main) is None, params["stop_timeout"])
        # The main process ends its children itself, a moment after or before its own end.
        wait_until(lambda: not left(), 2)
    killed = [{"pid": stat.pid, "command": command(stat.pid)[:200]} for stat in left()]
    kill(left())

    def gone():
        kill(left())
        return not left()

    if not wait_until(gone, KILL_SECONDS):
        raise Refused(
            f"{name}: {len(left())} of its processes outlive SIGKILL by {KILL_SECONDS} s, first pid {left()[0].pid}"
            f" ({command(left()[0].pid)[:120]}), state {left()[0].state}: a driver or a file system holds them",
            cause="unkillable",
        )
    wait_for_gpu(server, {stat.pid for stat in ours})
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    note_stopped(server)
    server.process = None
    return killed


def note_stopped(server):
    """Write down that the server was stopped, by whom and why."""
    if not server.state.get("stopped_at"):
        params = server.params
        note(server, stopped_at=utc_now(), stopped_by=params["who"], stopped_because=params["because"], shared_memory=[])
        # A start over what died, or a replacement, tells of itself.
        if params["state"] == "stopped" and server.state and not swapping(server):
            told = {"before": server.state.get("profile"), "why": params["because"]}
            remember(server.paths, server=server.name, what="stopped", who=params["who"], run=params["run"], **told)


def note(server, **told):
    """Add to the state file, if there is one. A disk that takes nothing more must not keep a server from being stopped."""
    if not server.state.get("identity"):
        return
    server.state.update(told)
    try:
        write_state(server.paths.state, server.state)
    except OSError as error:
        server.warnings.append(f"{server.name}: {server.paths.state} could not be written: {error.strerror}")


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
    same = server.same()
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
    if not same:
        stop(server)  # of a server that died or was never recorded, what is left
        result["log"] = launch(server)
    result.update(pid=server.process.pid, identity=server.state["identity"])
    return result


def ensure_stopped(module, server):
    """State stopped."""
    files = [path for path in server.state.get("shared_memory") or [] if os.path.exists(path)]
    needed = server.process is not None or bool(server.leftovers()) or bool(files)
    result = server.result(changed=needed, killed=[], elapsed=0.0, log=server.state.get("log"))
    if module._diff:
        result["diff"] = [process_diff(server, "")] if needed else []
    if module.check_mode:
        return result
    if not needed:
        note_stopped(server)
        return result
    started = time.monotonic()
    result["killed"] = stop(server)
    result["elapsed"] = round(time.monotonic() - started, 1)
    result["pid"] = None
    for warning in server.warnings:
        module.warn(warning)
    return result


@contextlib.contextmanager
def guarded(module, paths):
    """Hold the server's lock. Where the disk takes no lock file (full, read-only), a stop goes on without."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(paths.lock, module.params["who"], module.params["lock_timeout"]))
        except OSError as error:
            if module.params["state"] != "stopped":
                raise
            module.warn(f"{module.params['name']}: stopped without a lock: {paths.lock}: {error.strerror}")
        yield


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
            "stop_timeout": {"type": "int", "default": 60},
            "because": {"type": "str", "default": ""},
            "lock_timeout": {"type": "int", "default": 10},
            "who": {"type": "str", "default": "ansible"},
            "run": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    act = ensure_stopped if module.params["state"] == "stopped" else ensure_started
    paths = Paths(module.params["root"], module.params["slug"])
    read_only = module.check_mode or module.params["state"] == "checked" or not os.path.isdir(paths.run)
    try:
        if read_only and not (module.params["state"] in ("started", "restored") and not module.check_mode):
            module.exit_json(**act(module, Server(module.params)))
        if module.params["state"] != "stopped":
            check_root(Server(module.params))
            paths.make()
        with guarded(module, paths):
            module.exit_json(**act(module, Server(module.params)))
    except Busy as holder:
        module.fail_json(
            msg=f"{module.params['name']} is being worked on by {holder}: wait for it, or look at what it does",
            cause="locked",
        )
    except Refused as refusal:
        module.fail_json(msg=str(refusal), **refusal.data)
    except OSError as error:
        module.fail_json(
            msg=(
                f"{module.params['name']}: {error.filename or module.params['root']}: {error.strerror or error}:"
                " free space there, or give this user the right to write"
            ),
            cause="os",
        )


if __name__ == "__main__":
    main()
