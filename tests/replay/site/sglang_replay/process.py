# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine's two children as they look from outside: a title, the parent's group and session, a death."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def spawn(title):
    """Fork a child that sleeps under that title and dies with its parent. To be called before any thread runs."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _set_title(title)
        while os.getppid() == parent:
            signal.pause()
    finally:
        os._exit(0)


def dead_child(children):
    """(name, pid, exit code) of a child that died, or None."""
    for name, pid in children.items():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return name, pid, os.waitstatus_to_exitcode(status)
    return None


def kill_child(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def leave(code, children):
    """End like the engine: with that code, or by that signal where it is negative; the children first."""
    for pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _set_title(title):
    """Overwrite the memory that `ps` reads the arguments from."""
    with open("/proc/self/stat", encoding="utf-8") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(title.encode()[: end - start].ljust(end - start, b"\0"))
    with open("/proc/self/comm", "w", encoding="utf-8") as comm:
        comm.write(title)
