# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes of a node: who is who, who is alive, who listens, and how to end what is ours.

A process is known by pid, start time in clock ticks and boot id, never by a name: a pid alone is reused, and SGLang's
children rename themselves. Linux only: all of it is read from /proc.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import time

HALTED_STATES = "Tt"
Stat = collections.namedtuple("Stat", "pid state parent session start_ticks rss_bytes")
Listener = collections.namedtuple("Listener", "address port pid session command uid", defaults=(None,))

MARKERS = ("SGLANG_FLEET_ROOT", "SGLANG_FLEET_SERVER")
DEAD_STATES = "ZX"  # a zombie is dead: PID 1 of a container may not reap it for a long time
LISTEN = "0A"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_NAMES = ("sglang_", "sgl_shm_")
# Those of its files that are one boot's own: nothing that a later boot would want to find.
OWN_MEMORY_NAMES = ("sglang_loads_", "sglang_host_pool_", "sgl_shm_")


def boot_id():
    """Changes with every boot of the machine: a pid from before it means nothing after."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()


def boot_seconds():
    """Seconds since the machine booted, suspended time included: no clock that someone sets can move it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_stat(pid):
    """A process's Stat, or None when there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(
        pid=int(pid),
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def identity(pid):
    """What a process is known by later, or None when it is gone."""
    stat = read_stat(pid)
    if stat is None:
        return None
    return {"pid": stat.pid, "start_ticks": stat.start_ticks, "boot_id": boot_id(), "sid": stat.session}


def alive(known):
    """The Stat of the very process that ``known`` (an identity) names, or None."""
    if not known or known.get("boot_id") != boot_id():
        return None
    stat = read_stat(known["pid"])
    if stat is None or stat.start_ticks != known["start_ticks"] or stat.state in DEAD_STATES:
        return None
    return stat


def living():
    """Stats of all processes that are not dead."""
    stats = (read_stat(name) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None and stat.state not in DEAD_STATES]


def command(pid):
    """A process's command line for a message, or ``?`` when it may not be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = stream.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return "?"
    return " ".join(word for word in words if word) or "?"


def _environment(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:  # another user's, or gone
        return []


def variable(pid, name):
    """A variable of the environment that a process was started with, or None where it has none or may not be read."""
    begin = f"{name}=".encode()
    found = next((entry for entry in _environment(pid) if entry.startswith(begin)), None)
    return None if found is None else os.fsdecode(found[len(begin) :])


def marked(root, server):
    """Stats of living processes whose environment says that they were started for this server."""
    wanted = {f"{name}={value}".encode() for name, value in zip(MARKERS, (root, server))}
    return [stat for stat in living() if wanted.issubset(_environment(stat.pid))]


def members(root, server, session=None):
    """Every living process of a server: marked ones, their descendants, and all of a session that one of them leads.

    The marker alone is not enough: SGLang's scheduler and detokenizer rename themselves, which overwrites the memory
    where the kernel keeps the environment that a process was started with. A session led by someone else is not ours:
    a start script that was run by hand lives in that person's login session.
    """
    everyone = {stat.pid: stat for stat in living()}
    ours = {stat.pid for stat in marked(root, server)}
    led = {everyone[pid].session for pid in ours if pid in everyone and everyone[pid].session == pid} | ({session} - {None})
    ours |= {stat.pid for stat in everyone.values() if stat.session in led}
    children = ours
    while children:
        children = {stat.pid for stat in everyone.values() if stat.parent in children} - ours
        ours |= children
    return [everyone[pid] for pid in sorted(ours) if pid in everyone and pid != os.getpid()]


def of_session(session):
    """Living processes of a session."""
    return [stat for stat in living() if stat.session == session]


def title_of(pid):
    """The title that a process has given itself, or the command that it runs."""
    return command(pid).split(" ")[0]


def halted(known):
    """A clause that names the processes of a server that a signal has halted; "" for none. ``known``: its identity."""
    pids = [stat.pid for stat in of_session(known["sid"]) if stat.state in HALTED_STATES]
    names = {pid: "its main process" if pid == known["pid"] else os.path.basename(title_of(pid)) for pid in pids}
    told = ", ".join(f"{name} (pid {pid})" for pid, name in names.items())
    return f"; halted by a signal (SIGSTOP): {told}; kill -CONT {' '.join(map(str, pids))} lets it go on" if pids else ""


def exit_code(pid):
    """How a process ended that nobody has waited for yet, as Popen has it (-9 for SIGKILL); 0 where that is not told."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else 0


def orphans(root, server, known, python):
    """Living processes of a server whose main process is gone.

    ``known`` is that process's identity and ``python`` the interpreter it ran. Its session's number is trusted while
    nobody else leads it and its members look like SGLang's: after the last of them a pid is free for anyone.
    """
    found = {stat.pid: stat for stat in members(root, server)}
    if known and known.get("boot_id") == boot_id():
        leader = read_stat(known["sid"])
        if leader is None or leader.start_ticks == known["start_ticks"]:
            for stat in living():
                if stat.session == known["sid"] and command(stat.pid).startswith(("sglang::", python)):
                    found[stat.pid] = stat
    return list(found.values())


def started_unrecorded(root, server):
    """The main process of a start that was cut before it was written down: marked, and leader of its session."""
    return next((stat for stat in marked(root, server) if stat.session == stat.pid), None)


def _address(text):
    """An address of /proc/net/tcp: hex, in groups of four bytes, each group in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    packed = b"".join(words)
    return socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed)


def _owner_of_inode(inode):
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            handles = os.listdir(f"/proc/{name}/fd")
        except OSError:  # gone, or another user's
            continue
        for handle in handles:
            # One that was closed since is no reason to pass over the others of a busy process.
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/fd/{handle}") == f"socket:[{inode}]":
                    return int(name)
    return None


def listeners(port):
    """Who listens on a TCP port of this machine, on whatever address."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as stream:
                rows = [line.split() for line in stream.readlines()[1:]]
        except FileNotFoundError:  # no IPv6
            continue
        for row in rows:
            address, _, hex_port = row[1].rpartition(":")
            if row[3] == LISTEN and int(hex_port, 16) == port:
                pid = _owner_of_inode(row[9])
                stat = read_stat(pid) if pid else None
                session, words = stat.session if stat else None, command(pid) if pid else "?"
                found.append(Listener(_address(address), port, pid, session, words, int(row[7])))
    return found


def is_stranger(listener, ours):
    """Is a listener none of the processes ``ours`` (pids)? Of another user's the kernel tells the user, not the process."""
    if listener.pid is None:
        return listener.uid is not None and listener.uid != os.geteuid()
    return listener.pid not in ours


def describe(listener):
    """A listener for a message."""
    if listener.pid is None:
        return f"a process of another user{'' if listener.uid is None else f' (uid {listener.uid})'} on {listener.address}"
    return f"pid {listener.pid} ({listener.command[:160]})"


def shared_bytes(stat):
    """Shared memory that is resident in a process: SGLang's host pools are pinned there."""
    try:
        with open(f"/proc/{stat.pid}/status", encoding="ascii", errors="replace") as stream:
            fields = dict(line.split(":", 1) for line in stream if ":" in line)
        return int(fields["RssShmem"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def shared_memory(pids):
    """Files in /dev/shm that these processes have mapped: SGLang leaves some behind, even after a clean stop."""
    files = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as stream:
                for line in stream:
                    path = line.rstrip("\n").partition("/dev/shm/")[2]
                    if path.startswith(SHARED_MEMORY_NAMES) and not path.endswith(" (deleted)"):
                        files.add("/dev/shm/" + path)
        except OSError:
            continue
    return files


def shared_memory_files():
    """Files in /dev/shm that SGLang makes for one boot, of this user, whosever server they are of."""
    found = set()
    for name in os.listdir(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else []:
        path = os.path.join(SHARED_MEMORY, name)
        try:
            if name.startswith(OWN_MEMORY_NAMES) and os.lstat(path).st_uid == os.geteuid():
                found.add(path)
        except OSError:  # gone meanwhile
            continue
    return found


def unused(paths):
    """Those of some files that no living process has open or mapped."""
    free = set(paths)
    for stat in living() if free else []:
        used, handles = set(), []
        # What can't be read is gone, or another user's, and the files are this user's own.
        with contextlib.suppress(OSError), open(f"/proc/{stat.pid}/maps", encoding="utf-8", errors="replace") as stream:
            used = {line.rstrip("\n").partition(" /")[2] for line in stream}
        with contextlib.suppress(OSError):
            handles = os.listdir(f"/proc/{stat.pid}/fd")
        for handle in handles:
            with contextlib.suppress(OSError):
                used.add(os.readlink(f"/proc/{stat.pid}/fd/{handle}")[1:])
        free -= {f"/{path}" for path in used}
    return free


def send(pid, number, start_ticks):
    """Signal one process, if it is still the one that was meant. False when it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # Python before 3.9, a kernel before 5.3: a look and a signal, a moment apart
        handle = None
    try:
        stat = read_stat(pid)
        if stat is None or stat.start_ticks != start_ticks:
            return False
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def wait_until(condition, seconds, pause=0.1):
    """The first true value of ``condition()``, or its last one when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value or time.monotonic() >= deadline:
            return value
        time.sleep(pause)
