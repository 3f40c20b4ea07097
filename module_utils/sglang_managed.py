# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A process that the fleet starts detached, remembers, and stops: an SGLang server, or the router in front of them.

Its files are those of ``sglang_state.Paths``. ``Managed`` finds it, ``launch`` starts its script in a session of its own,
``stop`` ends it and sees that nothing is left, ``run_module`` holds its lock meanwhile and turns a refusal into one sentence.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

from ansible.module_utils.sglang_bundle import write_bundle
from ansible.module_utils.sglang_log import last_lines, matter, read_startup, redact
from ansible.module_utils.sglang_process import (
    MARKERS,
    alive,
    boot_seconds,
    command,
    describe,
    identity,
    listeners,
    living,
    marked,
    members,
    orphans,
    send,
    shared_memory,
    shared_memory_files,
    started_unrecorded,
    unused,
    variable,
    wait_until,
)
from ansible.module_utils.sglang_state import (
    Busy,
    Paths,
    boot_of,
    disk_verdict,
    launch_sha256,
    link_atomic,
    load_state,
    load_swap,
    lock,
    new_log,
    read_secrets,
    read_state,
    read_text,
    remember,
    rewrite_state,
    utc_now,
    write_atomic,
    write_state,
)

KILL_SECONDS = 20
KEPT_LOGS = 20
# Below this a start is not worth beginning: SGLang writes its log, and the fleet its state, on that disk.
ROOM_BYTES = 64 << 20
TEMPORARY = "sglang_fleet_"
# What is started gets these of our own environment and nothing else: no SSH_*, no ANSIBLE_*.
PASSED_ENVIRONMENT = ("HOME", "USER", "LOGNAME", "PATH", "TZ")


class Refused(Exception):
    """Why the state can't be reached, in one sentence, with data for the caller."""

    def __init__(self, sentence, **data):
        super().__init__(sentence)
        self.data = data


class Managed:
    """One process with its children, as this task finds it.

    ``params`` are the module's: ``name``, ``slug``, ``root``, ``port``, ``argv``, ``env``, ``script``, ``script_path``,
    ``secrets``, ``record``, ``who``, ``stop_timeout``, ``because`` and, where there is one, ``profile``.
    """

    MAIN_PROCESS = ""  # what the command line of its main process holds, whoever started it
    SETTING = ""  # what a message tells people to change when the port is taken

    def __init__(self, params):
        self.name = params["name"]
        self.params = params
        self.paths = Paths(params["root"], params["slug"])
        self.state, self.damage = load_state(self.paths.state)
        if self.state.get("launching"):
            found = started_unrecorded(params["root"], self.name)
            self.state["identity"] = identity(found.pid) if found else None
        self.process = alive(self.state.get("identity"))
        self.warnings = [f"{self.name}: {self.damage}"] if self.damage else []
        owner = self.state.get("name")
        if owner and owner != self.name and self.process is not None:
            raise Refused(
                f"{self.paths.state} belongs to {owner}, which runs (pid {self.process.pid}), and not to {self.name}:"
                " give each node a sglang_root of its own, or stop it under its old name",
                cause="owner",
            )
        if params.get("state") == "restored":
            self.params = params = {**params, **self.kept()}
        self.launch_sha256 = launch_sha256(params["argv"] or [], params["env"], params["secrets"])

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
        """Our processes that belong to no running main process: of a start that was cut, or of a leader that died."""
        if self.process is not None:
            return []
        argv = self.state.get("argv") or ["?"]
        known = None if self.state.get("stopped_at") else self.state.get("identity")
        return orphans(self.params["root"], self.name, known, argv[0])

    def by_hand(self):
        """The main process of a start script that someone ran by hand (or whose state file is gone), or None."""
        if self.process is not None:
            return None
        found = marked(self.params["root"], self.name)
        return next((stat for stat in found if self.MAIN_PROCESS in command(stat.pid)), None)

    def strangers(self):
        """Listeners on our ports that are none of our processes."""
        ours = {stat.pid for stat in self.leftovers()}
        if self.process is not None:
            ours |= {stat.pid for stat in members(self.params["root"], self.name, self.process.session)}
        return [listener for port in self.ports() for listener in listeners(port) if listener.pid not in ours]

    def ports(self):
        """Ports that it needs for itself."""
        return [self.params["port"]]

    def result(self, **more):
        """What every exit tells."""
        return {"name": self.name, "pid": self.process.pid if self.process else None, "running": self.running, **more}

    def kept(self):
        """The options of what is to run again for state restored."""
        raise NotImplementedError

    def verdict_of_end(self, log):
        """Why it ended, from its log: ``cause`` and, where there is more to say, ``id``, ``advice``, ``line``. Or None."""

    def released(self, pids):
        """Wait for what processes give back after their end, such as memory of a GPU."""


def check_root(managed):
    """Refuse folders that can't be written, by trying: file systems have more reasons than mode bits."""
    paths = managed.paths
    for folder in dict.fromkeys(map(_existing, (paths.root, paths.scripts, paths.logs, paths.run, paths.cache))):
        _check_folder(managed, folder)
    for path in (paths.state, paths.lock, paths.secrets, managed.params["script_path"]):
        if path and os.path.isdir(path):
            raise Refused(f"{managed.name}: {path} is a folder and the fleet keeps a file there: move it away", cause="root")


def _existing(folder):
    """The folder, or the nearest above it that is there."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder


def _check_folder(managed, folder):
    root = managed.params["root"]
    probe = os.path.join(folder, f".sglang_fleet_{os.getpid()}")
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except NotADirectoryError:
        raise Refused(
            f"{managed.name}: {folder} is a file and the fleet's folder {root} needs a folder there: move it away", cause="root"
        ) from None
    except OSError as error:
        raise Refused(
            f"{managed.name}: the fleet's folder {root} can't be written ({folder}: {error.strerror}):"
            " choose another sglang_root, or give this user the right to write there",
            cause="root",
        ) from None
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < ROOM_BYTES or (found.f_files and not found.f_favail):
        what = f"{free >> 20} MiB" if free < ROOM_BYTES else "no file"
        raise Refused(
            f"{managed.name}: the disk of the fleet's folder {root} has room for {what} and a start needs"
            f" {ROOM_BYTES >> 20} MiB for its log: free space there, or choose another sglang_root",
            cause="disk_full",
        )


def check_port(managed):
    """Refuse a port that a stranger has."""
    strangers = managed.strangers()
    if strangers:
        raise Refused(
            f"{managed.name}: port {strangers[0].port} is taken by {describe(strangers[0])}, which this fleet did not"
            f" start: stop it, or {managed.SETTING}",
            cause="port",
            listeners=[listener._asdict() for listener in strangers],
        )


def changed_parts(managed):
    """What it was started with and is not asked for now: names of flags and variables, or which keys."""
    old, new = ((managed.state.get("record") or {}).get("flags") or [], managed.params["record"].get("flags") or [])
    flags = [line[0] for line in [*old, *new] if line not in old or line not in new]
    old_env, new_env = managed.state.get("env") or {}, managed.params["env"]
    names = [name for name in {**old_env, **new_env} if old_env.get(name) != new_env.get(name)]
    return list(dict.fromkeys(flags + names)) or ["engine or keys"]


def launch_text(argv, env):
    """What decides how it runs, a word a line, for a diff."""
    return "".join(f"{name}={value}\n" for name, value in sorted(env.items())) + "".join(f"{word}\n" for word in argv)


def script_diff(managed):
    """Before and after: the start script, and what runs where something does."""
    params = managed.params
    shown = [
        {
            "before_header": params["script_path"],
            "after_header": params["script_path"],
            "before": read_text(params["script_path"]) or "",
            "after": params["script"],
        }
    ]
    if managed.process is not None and not managed.same():
        shown.append(process_diff(managed, launch_text(params["argv"], params["env"])))
    return shown


def process_diff(managed, after):
    """Before and after of the running process, a word a line."""
    header = f"{managed.name}: process"
    before = launch_text(managed.state.get("argv") or [], managed.state.get("env") or {})
    return {"before_header": header, "after_header": header, "before": before, "after": after}


def write_files(managed):
    """Put the start script and the secrets where they are read. True when the script changed."""
    params = managed.params
    managed.paths.make()
    changed = read_text(params["script_path"]) != params["script"]
    if changed:
        write_atomic(params["script_path"], params["script"], 0o700)
    if params["secrets"]:
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in sorted(params["secrets"].items()))
        if read_text(managed.paths.secrets) != text:
            write_atomic(managed.paths.secrets, text, 0o600)
    elif os.path.exists(managed.paths.secrets):
        os.unlink(managed.paths.secrets)
    return changed


def remove_old_logs(paths):
    """Keep the newest logs; SGLang writes a line a batch and a disk is finite."""
    logs = sorted(name for name in os.listdir(paths.logs) if name.endswith(".log"))
    for name in logs[:-KEPT_LOGS]:
        os.unlink(os.path.join(paths.logs, name))


def previous(managed):
    """What served before with other flags. What died and is started anew, or put back, forgets nothing of it."""
    if "previous" in managed.params:
        return managed.params["previous"]
    if managed.state.get("launch_sha256") == managed.launch_sha256:
        return managed.state.get("previous")
    boot = last_proven(managed)
    return boot.get("previous") if boot and boot.get("launch_sha256") == managed.launch_sha256 else boot


def last_proven(managed):
    """The newest boot that became ready, or None. What never did is nothing to go back to."""
    state, swap = managed.state, open_swap(managed)
    if swap:
        return {key: value for key, value in swap["before"].items() if key != "secrets"}
    return boot_of(state) if state.get("ready_at") or state.get("served") else state.get("previous")


def served(managed):
    """Is what is launched now known to have become ready before, in another boot of this server?"""
    state = managed.state
    if state.get("launch_sha256") == managed.launch_sha256:
        return bool(state.get("ready_at") or state.get("served"))
    return "previous" in managed.params or (state.get("previous") or {}).get("launch_sha256") == managed.launch_sha256


def open_swap(managed):
    """The record of a swap of this server that has no outcome yet; empty without one."""
    swap = load_swap(managed.paths.swap)[0]
    return {} if swap.get("outcome") else swap


def tell(managed, what, **told):
    """Add to the history on the node, unless it is a step of a swap: that tells the history by itself."""
    params = managed.params
    swap = open_swap(managed)
    run = params.get("run") or swap.get("run")
    # What puts back runs under the name of the run that it puts back.
    if not swap or (params["state"] != "restored" and run != swap.get("run")):
        remember(managed.paths, server=managed.name, what=what, who=params["who"], run=params.get("run") or "", **told)


def user():
    """This user's name as torch spells it in the name of its cache, so that kernels that are compiled already are found."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a user id without a name
        return str(os.geteuid())


def launch(managed, settled, seconds):
    """Start the script in a session of its own and write down what was started. Returns its log.

    Comes back when ``settled()`` is true (``managed.process`` is the new process then), at the latest after ``seconds``;
    a process that ended by then is refused with what its log says.
    """
    params = managed.params
    log = new_log(managed.paths)
    descriptor = os.open(log, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
    environment = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    environment.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    environment["LC_ALL"] = "C.UTF-8"
    # The script exports them too; from here they are there before bash has read a line of it.
    environment.update((marker, params["env"][marker]) for marker in MARKERS if marker in params["env"])
    # SGLang leaves five files a boot where temporary files go. Compiled kernels go there too, and those are to stay.
    environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"torchinductor_{user()}")
    environment["TMPDIR"] = tempfile.mkdtemp(prefix=TEMPORARY)
    written = {
        "name": managed.name,
        "identity": None,
        "launching": True,
        "profile": params.get("profile"),
        "argv": params["argv"],
        "env": params["env"],
        "launch_sha256": managed.launch_sha256,
        "script": params["script_path"],
        "script_text": params["script"],
        "port": params["port"],
        "log": log,
        "launched_at": utc_now(),
        "launched_epoch": time.time(),
        "launched_boot_seconds": boot_seconds(),
        "launched_by": params["who"],
        "launched_in": params.get("run") or "",
        "stopped_at": None,
        "stopping_at": None,
        "ready_at": None,
        "record": params["record"],
        "temporary": environment["TMPDIR"],
        # Files that are no work of this boot, so that what it leaves is known even when nobody watched it.
        "shared_memory_before": sorted(shared_memory_files()),
        "served": served(managed),
        "previous": previous(managed),
    }
    try:
        # Written before and after: a task that is cut between the two leaves a process that the next one recognises.
        write_state(managed.paths.state, written)
        # run_command waits for its child, and this one is not to be waited for. Both are needed: without the redirection
        # the task hangs until it ends, without the session it dies with the connection.
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
    rewrite_state(managed.paths.state, {**written, "identity": known, "launching": False})
    link_atomic(os.path.relpath(log, os.path.dirname(managed.paths.newest_log)), managed.paths.newest_log)
    remove_old_logs(managed.paths)
    before, managed.state = managed.state, read_state(managed.paths.state)
    managed.process = alive(known)
    began = time.monotonic()
    wait_until(lambda: process.poll() is not None or settled(), seconds, pause=0.05)
    if process.poll() is not None:
        lines = read_startup(log)
        verdict = managed.verdict_of_end(log) or disk_verdict(managed.paths.logs) or {}
        raise Refused(
            f"{managed.name} ended at once with exit code {process.returncode}:"
            f" {verdict.get('cause') or (last_lines(lines, 1) or ['no output'])[0]}; whole log: {log}",
            cause="died",
            cause_id=verdict.get("id", "died"),
            advice=verdict.get("advice", "run the start script by hand to see more"),
            stage="import",
            elapsed=round(time.monotonic() - began, 1),
            lines=matter(lines, verdict),
            log=log,
        )
    tell(
        managed,
        "started",
        before=before.get("profile"),
        after=params.get("profile"),
        release=params["record"].get("release"),
    )
    return log


def kill(processes):
    """SIGKILL to processes that are ours."""
    for stat in processes:
        send(stat.pid, signal.SIGKILL, stat.start_ticks)


def stop(managed):
    """Bring it down and see that nothing of it is left. Returns what had to be killed."""
    params = managed.params
    root, name = params["root"], params["name"]
    session = managed.process.session if managed.process else None
    ours = members(root, name, session) if managed.process else managed.leftovers()
    files = shared_memory(stat.pid for stat in ours) | set(managed.state.get("shared_memory") or [])
    folders = temporary_folders(managed, ours)

    def left():
        return members(root, name, session) if session else managed.leftovers()

    by_hand = managed.by_hand()
    note(managed, stopping_at=utc_now(), stopping_by=params["who"])
    main = identity(managed.process.pid) if managed.process else identity(by_hand.pid) if by_hand else None
    if main is not None and params["stop_timeout"] > 0:
        # To the main process alone: to the whole group it looks like a crash of the children and nothing is drained.
        send(main["pid"], signal.SIGTERM, main["start_ticks"])
        # A halted process heeds nothing until it goes on.
        send(main["pid"], signal.SIGCONT, main["start_ticks"])
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
    managed.released({stat.pid for stat in ours})
    remove_files(managed, files, folders)
    note_stopped(managed)
    managed.process = None
    return killed


def is_temporary(path):
    """Is this a folder as the fleet makes one for a boot's temporary files, of this user?"""
    if not os.path.isabs(path) or not os.path.basename(path).startswith(TEMPORARY):
        return False
    return os.path.isdir(path) and not os.path.islink(path) and os.stat(path).st_uid == os.geteuid()


def temporary_folders(managed, ours):
    """Where this boot's temporary files are: its state tells, or else the environment of its processes while they live."""
    if managed.state.get("temporary"):
        return {managed.state["temporary"]}
    folders = {folder for folder in (variable(process.pid, "TMPDIR") for process in ours) if is_temporary(folder or "")}
    if managed.damage and not folders:
        pattern = os.path.join(tempfile.gettempdir(), f"{TEMPORARY}*")
        used = {variable(process.pid, "TMPDIR") for process in living()}
        unknown = [path for path in sorted(glob.glob(pattern)) if path not in used and is_temporary(path)]
        if unknown:
            managed.warnings.append(
                f"{managed.name}: its damaged state does not tell which folder of temporary files was its own, so none was"
                f" removed: look at those that no process has, such as {unknown[0]}, and remove them"
            )
    return folders


def own_logs(managed):
    """Logs in which this boot's keys may be: its own, or all that are kept where the state does not tell which it is."""
    if managed.state.get("log"):
        return [managed.state["log"]]
    return glob.glob(os.path.join(glob.escape(managed.paths.logs), "*.log"))


def remove_files(managed, files, folders):
    """Remove what SGLang leaves: files in /dev/shm, temporary files, and its keys in the log.

    A process that dies soon after it made a file is seen with it by nobody. So a file that was not there before the launch,
    and that no living process has open now, is this boot's too, or that of another boot that is as dead.
    """
    if managed.state.get("shared_memory_before") is not None:
        files = files | (shared_memory_files() - set(managed.state["shared_memory_before"]))
    for path in unused(files):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    for folder in filter(is_temporary, folders):
        shutil.rmtree(folder, ignore_errors=True)
    for log in own_logs(managed):
        with contextlib.suppress(OSError):
            redact(log, read_secrets(managed.paths).values())


def left_files(managed):
    """Files of a process that is gone, that a stop would remove."""
    known = [*(managed.state.get("shared_memory") or []), managed.state.get("temporary") or ""]
    return [path for path in known if path and os.path.exists(path)] if managed.process is None else []


def keep_bundle(managed):
    """Write a support bundle of the newest boot; its path, or None when there was none or no room for it."""
    state = managed.state
    if not state.get("log") or not state.get("port"):
        return None
    ours = members(managed.params["root"], managed.name, managed.process.session) if managed.process else managed.leftovers()
    try:
        secrets = read_secrets(managed.paths).values()
        return write_bundle(managed.paths.bundles, state, managed.params["because"], ours, secrets)
    except OSError as error:
        managed.warnings.append(f"{managed.name}: no support bundle could be kept: {error.strerror or error}")
        return None


def note_stopped(managed):
    """Write down that it was stopped, by whom and why."""
    params = managed.params
    if managed.damage:
        managed.state = {"name": managed.name, "stopped_at": utc_now(), "stopped_by": params["who"]}
        with contextlib.suppress(OSError):
            rewrite_state(managed.paths.state, managed.state)
    elif not managed.state.get("stopped_at"):
        note(managed, stopped_at=utc_now(), stopped_by=params["who"], stopped_because=params["because"], shared_memory=[])
        # A start over what died, or a replacement, tells of itself.
        if params.get("state") == "stopped" and managed.state:
            tell(managed, "stopped", before=managed.state.get("profile"), why=params["because"])


def note(managed, **told):
    """Add to the state file, if there is one. A disk that takes nothing more must not keep anything from being stopped."""
    if not managed.state.get("identity"):
        return
    managed.state.update(told)
    try:
        rewrite_state(managed.paths.state, managed.state)
    except OSError as error:
        managed.warnings.append(f"{managed.name}: {managed.paths.state} could not be written: {error.strerror}")


def ensure_stopped(module, managed):
    """State stopped."""
    boot = managed.params.get("boot")
    if boot and not managed.damage and managed.state.get("log") != boot:
        return managed.result(changed=False, killed=[], elapsed=0.0, bundle=None, log=managed.state.get("log"))
    needed = managed.process is not None or bool(managed.leftovers()) or bool(left_files(managed))
    result = managed.result(changed=needed or bool(managed.damage), killed=[], elapsed=0.0, bundle=None)
    result["log"] = managed.state.get("log")
    if module._diff:
        result["diff"] = [process_diff(managed, "")] if needed else []
    if module.check_mode:
        return result
    if managed.params.get("keep_bundle"):
        result["bundle"] = keep_bundle(managed)
    # A damaged state hides what its server left, be it dead or alive.
    if needed or managed.damage:
        started = time.monotonic()
        result["killed"] = stop(managed)
        result["elapsed"] = round(time.monotonic() - started, 1)
        result["pid"] = None
    else:
        note_stopped(managed)
    return result


@contextlib.contextmanager
def guarded(module, paths):
    """Hold the lock. Where the disk takes no lock file (full, read-only), a stop goes on without."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(paths.lock, module.params["who"], module.params["lock_timeout"]))
        except OSError as error:
            if module.params["state"] != "stopped":
                raise
            module.warn(f"{module.params['name']}: stopped without a lock: {paths.lock}: {error.strerror}")
        yield


def reach(module, kind, ensure_started):
    """Reach the state, and pass on what was noticed on the way."""
    managed = kind(module.params)
    try:
        return (ensure_stopped if module.params["state"] == "stopped" else ensure_started)(module, managed)
    finally:
        for warning in managed.warnings:
            module.warn(warning)


def run_module(module, kind, ensure_started):
    """Bring ``kind(module.params)`` to the state asked for, under its lock where something may change."""
    paths = Paths(module.params["root"], module.params["slug"])
    read_only = module.check_mode or module.params["state"] == "checked" or not os.path.isdir(paths.run)
    try:
        if read_only and not (module.params["state"] in ("started", "restored") and not module.check_mode):
            module.exit_json(**reach(module, kind, ensure_started))
        if module.params["state"] != "stopped":
            check_root(kind(module.params))
            paths.make()
        with guarded(module, paths):
            module.exit_json(**reach(module, kind, ensure_started))
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
