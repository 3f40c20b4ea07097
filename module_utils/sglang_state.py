# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a server's files are on a node, and its state file: what was started, by what identity, with what outcome."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time

SCHEMA = 1
KEPT_OF_BOOT = ("profile", "argv", "env", "launch_sha256", "script", "port", "launched_at", "launched_in", "record")


class Busy(Exception):
    """Another run works on this server; the text says who."""


class Paths:
    """The files of one server below the fleet's folder on the node."""

    def __init__(self, root, slug):
        self.root = root
        self.scripts = os.path.join(root, "scripts")
        self.logs = os.path.join(root, "logs", slug)
        self.newest_log = os.path.join(root, "logs", f"{slug}.log")
        self.run = os.path.join(root, "run")
        self.cache = os.path.join(root, "cache")
        self.state = os.path.join(self.run, f"{slug}.json")
        self.lock = os.path.join(self.run, f"{slug}.lock")
        self.secrets = os.path.join(self.run, f"{slug}.secrets.yml")
        self.swap = os.path.join(self.run, f"{slug}.swap.json")
        self.history = os.path.join(root, "history", f"{slug}.jsonl")
        self.previous_script = os.path.join(self.scripts, f"start_{slug}_previous.sh")

    def make(self):
        """Make the folders that are missing."""
        for folder in (self.scripts, self.logs, self.run, self.cache):
            os.makedirs(folder, mode=0o755, exist_ok=True)


def utc_now():
    """The time for a record: UTC, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_log(paths):
    """The path of a boot's log, which no other boot has: a stale log can't answer for a new start."""
    stem = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for suffix in ["", *(f"-{number}" for number in range(1, 1000))]:
        path = os.path.join(paths.logs, f"{stem}{suffix}.log")
        if not os.path.exists(path):
            return path
    raise OSError(f"{paths.logs} has a thousand logs of this very second: remove some")


def write_atomic(path, text, mode):
    """Write a file so that a reader sees the old or the new one, whole, whatever happens meanwhile."""
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def link_atomic(target, link):
    """Point ``link`` to ``target``, replacing what it pointed to."""
    temporary = f"{link}.{os.getpid()}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(target, temporary)
    os.replace(temporary, link)


def read_text(path):
    """A file's text, or None when there is no such file."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def read_state(path):
    """The state file as a mapping; empty when there is none or it does not parse (it is written whole, or not at all)."""
    text = read_text(path)
    if not text:
        return {}
    try:
        state = json.loads(text)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def write_state(path, state):
    """Write the state file. It holds no key, but a profile's environment may hold what others should not read."""
    write_atomic(path, json.dumps({"schema": SCHEMA, **state}, indent=2, sort_keys=True) + "\n", 0o600)


def launch_sha256(argv, env, secrets):
    """One figure for all that decides how a server runs. Equal figures: no restart needed."""
    told = json.dumps([list(argv), dict(env), secrets], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(told.encode("utf-8")).hexdigest()


def read_secrets(paths):
    """The server's own keys by name, from the file that only its user may read; empty without one."""
    try:
        text = read_text(paths.secrets) or ""
    except OSError:
        return {}
    return {name: json.loads(value) for name, value in (line.split(": ", 1) for line in text.splitlines() if ": " in line)}


def boot_of(state):
    """All that it takes to start again what a state file tells of, by module sglang_server or by hand. No keys.

    ``script_text`` is None where the script is gone. Of what ran before it, one boot is kept along.
    """
    if not state.get("argv"):
        return None
    argv = state["argv"]
    script_text = state.get("script_text")
    if script_text is None:  # started by a release of this project that kept the path alone
        with contextlib.suppress(OSError):
            script_text = read_text(state["script"])
    kept = {key: state.get(key) for key in KEPT_OF_BOOT}
    host = argv[argv.index("--host") + 1] if "--host" in argv[:-1] else "127.0.0.1"
    before = {key: value for key, value in (state.get("previous") or {}).items() if key != "previous"}
    return {**kept, "host": host, "script_text": script_text, "previous": before or None}


def remember(paths, **told):
    """Add a line to the history of a server: who did what when. What can't be written is not worth a failure."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(paths.history), mode=0o755, exist_ok=True)
        descriptor = os.open(paths.history, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({"schema": SCHEMA, "at": utc_now(), **told}, sort_keys=True) + "\n")


@contextlib.contextmanager
def lock(path, who, seconds):
    """Hold a server's lock; Busy, naming the holder, when it stays taken. A dead holder's lock is free by itself."""
    deadline = time.monotonic() + seconds
    with open(path, "a+", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    raise Busy(stream.read().strip() or "unknown") from None
                time.sleep(0.2)
        stream.seek(0)
        stream.truncate()
        stream.write(f"{who}, pid {os.getpid()}, since {utc_now()}\n")
        stream.flush()
        yield
