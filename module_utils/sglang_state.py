# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a server's files are on a node, and its state file: what was started, by what identity, with what outcome."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time

SCHEMA = 1
FULL_BYTES = 1 << 20
_HOLDER = re.compile(r".+, pid \d+, since \S+")
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
        self.bundles = os.path.join(root, "bundles", slug)
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


def disk_verdict(folder):
    """Why a folder's disk takes no more, as ``{"id", "cause", "advice"}``; None when it does."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    if found.f_flag & os.ST_RDONLY:
        cause = f"the file system of {folder} has become read-only, so its log can't be written"
        return {"id": "read_only", "cause": cause, "advice": "look at the node's kernel messages (dmesg): a disk failed"}
    free = found.f_bavail * found.f_frsize
    if free < FULL_BYTES or (found.f_files and not found.f_favail):
        cause = f"the disk of {folder} is full ({free >> 10} KiB left), so its log can't be written"
        return {"id": "disk_full", "cause": cause, "advice": "free space there, then deploy again"}
    return None


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
    """A file's text, or None when there is no such file. Bytes that are no text are shown as such."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


# What others rely on in a state file, by name: each may be missing, none may be of another kind.
_WHOLE = (int, float)
SHAPE = {
    "name": str,
    "identity": dict,
    "log": str,
    "argv": list,
    "env": dict,
    "port": int,
    "profile": str,
    "launched_at": str,
    "launched_epoch": _WHOLE,
    "launched_boot_seconds": _WHOLE,
    "record": dict,
    "launch_sha256": str,
    "script": str,
    "script_text": str,
    "previous": dict,
    "timeline": list,
    "shared_memory": list,
}
REQUIRED = ("port", "log", "launched_epoch", "launched_boot_seconds")  # of a server that was launched
IDENTITY = {"pid": int, "start_ticks": int, "boot_id": str, "sid": int}
# What other records hold, always: a boot to go back to, the swap of a server, who holds a lease.
BOOT = {key: SHAPE[key] for key in ("profile", "argv", "env", "port", "record", "launch_sha256", "script", "script_text")}
SWAP = {"run": str, "begun_at": str, "out_epoch": _WHOLE, "from": dict, "to": dict, "before": dict}
LEASE = {"run": str, "who": str, "since": str, "until": str, "until_epoch": int, "pid": int}


def shape_error(record, needs):
    """What a record lacks of ``needs``, each name with its kind, or has of another kind; None when nothing."""
    for key, kind in needs.items():
        if not isinstance(record.get(key), kind):
            return f"its {key} is {'missing' if record.get(key) is None else type(record[key]).__name__}"
    return None


def _boot_error(boot):
    """What in the command line, the environment or the flags of a boot is not what it was written as, or None."""
    argv, env, flags = boot.get("argv"), boot.get("env") or {}, (boot.get("record") or {}).get("flags")
    if argv is not None and not (argv and all(isinstance(word, str) for word in argv)):
        return "its argv is no command line"
    if not all(isinstance(value, str) for value in env.values()):
        return "its env has a value that is no text"
    if flags is not None and not (isinstance(flags, list) and all(flag and isinstance(flag, list) for flag in flags)):
        return "its flags are no list of flags"
    return None


def _misshapen(state):
    """What in a state is not what it was written as, or None."""
    for key, kind in SHAPE.items():
        if state.get(key) is not None and not isinstance(state[key], kind):
            return f"its {key} is {type(state[key]).__name__}"
    lacks = _boot_error(state)
    if lacks:
        return lacks
    lacks = _misshapen(state["previous"]) if state.get("previous") else None
    if lacks:
        return f"in its previous, {lacks}"
    identity = state.get("identity")
    if identity:
        wrong = next((key for key, kind in IDENTITY.items() if not isinstance(identity.get(key), kind)), None)
        missing = next((key for key in REQUIRED if state.get(key) is None), None)
        if wrong or missing:
            return f"its {f'identity has no {wrong}' if wrong else f'{missing} is missing'}"
    return None


def _unreadable(path, error):
    """Why a file of the fleet's can't be read and what to do, in one sentence."""
    if error.errno == errno.EISDIR:
        return f"{path} is a folder and the fleet keeps a file there: move it away"
    if error.errno == errno.ELOOP:
        return f"{path} is a link that leads back to itself and the fleet keeps a file there: move it away"
    if error.errno == errno.ENOTDIR:
        return f"{path} can't be there, since a part of its path is a file and no folder: move that file away"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path} can't be read ({error.strerror}): give this user the right to read it"
    return f"{path} can't be read ({error.strerror}): look at the disk that it is on"


def _load(path, misshapen, absent):
    """``(record, damage)`` of a JSON file of ours: ``misshapen`` finds what is wrong in it, ``absent`` is what to do then."""
    try:
        text = read_text(path)
    except OSError as error:
        return {}, _unreadable(path, error)
    if text is None:
        return {}, None
    try:
        record, schema = json.loads(text), SCHEMA
        if not isinstance(record, dict):
            problem = f"it holds {type(record).__name__}"
        else:
            schema = record.get("schema", SCHEMA)
            problem = misshapen(record) if schema == SCHEMA else None
    except ValueError as error:
        schema = SCHEMA
        problem = f"it is empty or cut short ({error})" if not text.strip() else f"it is no JSON ({error})"
    if schema != SCHEMA:
        what = f"is of another release of this project (found schema {json.dumps(schema)[:40]}, expected {SCHEMA})"
    elif problem:
        what = f"is damaged, {problem}"
    else:
        return record, None
    return {}, f"{path} {what}: it is taken as absent; {absent}"


def load_state(path):
    """``(state, damage)``: the state file as a mapping, and one sentence when the file is there and is none.

    It is written whole or not at all, so damage is a disk's, an editor's or a stranger's work. A damaged one tells nothing,
    nor does one of another schema: the state is empty then, and what runs is found by its marks.
    """
    advice = "if its server runs, stop.yml finds and stops it by its marks, and deploy.yml starts it anew, with a new file"
    return _load(path, _misshapen, advice)


def load_swap(path):
    """``(swap, damage)`` of the record of a server's last swap, as `load_state`."""

    def misshapen(swap):
        lacks = shape_error(swap, SWAP)
        if lacks:
            return lacks
        lacks = shape_error(swap["before"], {**BOOT, "secrets": dict}) or _misshapen(swap["before"])
        return f"in its before, {lacks}" if lacks else None

    advice = (
        "status.yml tells what its server runs, history.yml what was changed before, and the next swap of it writes it anew"
    )
    return _load(path, misshapen, advice)


def load_lease(path):
    """``(lease, damage)`` of the file that says who holds a fleet or a server, as `load_state`."""
    return _load(path, lambda lease: shape_error(lease, LEASE), "see that nobody else changes the same servers now")


def read_state(path):
    """The state file as a mapping; empty when there is none or it is damaged (``load_state`` says how)."""
    return load_state(path)[0]


def read_secrets(paths):
    """The keys that a server was started with, by name, from the file that only its user may read; empty without one."""
    keys = {}
    try:
        for line in (read_text(paths.secrets) or "").splitlines():
            name, colon, value = line.partition(": ")
            if colon:
                keys[name] = json.loads(value)
    except (OSError, ValueError):
        pass  # damaged or another user's: asked without a key, the server says so itself
    return {name: value for name, value in keys.items() if isinstance(value, str)}


def write_state(path, state):
    """Write the state file. It holds no key, but a profile's environment may hold what others should not read."""
    write_atomic(path, json.dumps({"schema": SCHEMA, **state}, indent=2, sort_keys=True) + "\n", 0o600)


def rewrite_state(path, state):
    """Write the state file; on a full disk over the old one, in the room that it has, by leaving out its indentation.

    For an outcome that is lost otherwise: a reader at that very moment may see a part, which ``load_state`` tells.
    """
    try:
        write_state(path, state)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = json.dumps({"schema": SCHEMA, **state}, separators=(",", ":"), sort_keys=True).encode()
        with open(path, "rb+", buffering=0) as stream:
            before = stream.read()
            if len(text) >= len(before):
                raise
            after = text.ljust(len(before) - 1) + b"\n"
            try:
                # A file system that copies what it writes over may have no room for this either.
                if os.pwrite(stream.fileno(), after, 0) != len(after):
                    raise error
                os.fsync(stream.fileno())
            except OSError:
                os.pwrite(stream.fileno(), before, 0)
                raise error from None


def launch_sha256(argv, env, secrets):
    """One figure for all that decides how a server runs. Equal figures: no restart needed."""
    told = json.dumps([list(argv), dict(env), secrets], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(told.encode("utf-8")).hexdigest()


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
            script_text = read_text(state.get("script") or "")
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


def _holder(path, text):
    """Who holds a lock, from the text of its file."""
    if not text or _HOLDER.fullmatch(text):
        return text or "unknown"
    return f"an unnamed process (its lock file {path} is damaged, it holds {text[:40]!r}; fuser {path} shows the process)"


@contextlib.contextmanager
def lock(path, who, seconds):
    """Hold a server's lock; Busy, naming the holder, when it stays taken. A dead holder's lock is free by itself.

    The lock is the kernel's and the text only tells who holds it: a damaged text locks nothing and frees nothing.
    """
    deadline = time.monotonic() + seconds
    with open(path, "a+", encoding="utf-8", errors="replace") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    raise Busy(_holder(path, stream.read().strip())) from None
                time.sleep(0.2)
        stream.seek(0)
        stream.truncate()
        stream.write(f"{who}, pid {os.getpid()}, since {utc_now()}\n")
        stream.flush()
        yield
