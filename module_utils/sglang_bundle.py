# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A support bundle: what is needed to understand a failed start when the server and its log are long gone. No secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import subprocess
import tarfile
import time

from ansible.module_utils.sglang_node import gpus, host_memory
from ansible.module_utils.sglang_process import boot_id, boot_seconds, command, listeners
from ansible.module_utils.sglang_state import read_text, utc_now

KEPT_BUNDLES = 10
HALF_BYTES = 2 << 20  # of a log, from its beginning and from its end
KERNEL_LINES = 200
KERNEL = re.compile(r"Out of memory|oom-kill|Killed process|oom_reaper|NVRM|Xid|segfault|I/O error|Remounting filesystem")
# Environment whose value is nobody's business, whatever it holds.
PRIVATE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
STARS = "********"


def kernel_lines():
    """What the kernel said of memory, GPUs and disks, newest last; one line that says so where there is nothing to read."""
    try:
        answer = subprocess.run(  # pylint: disable=ansible-bad-function
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"(dmesg could not be run: {error})"]
    if answer.returncode:
        return [f"(dmesg could not be read: {answer.stderr.strip()[:200]})"]
    found = [line for line in answer.stdout.splitlines() if KERNEL.search(line)][-KERNEL_LINES:]
    return found or ["(dmesg has no line on memory, GPUs or disks)"]


def _log(path):
    try:
        with open(path, "rb") as stream:
            head = stream.read(HALF_BYTES)
            stream.seek(0, 2)
            end = stream.tell()
            if end <= 2 * HALF_BYTES:
                stream.seek(len(head))
                return head + stream.read()
            stream.seek(end - HALF_BYTES)
            return head + b"\n[... left out ...]\n" + stream.read()
    except OSError as error:
        return f"the log can't be read: {error.strerror}\n".encode()


def _disk(folder):
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return error.strerror
    return {"free_gb": round(found.f_bavail * found.f_frsize / 1e9, 2), "read_only": bool(found.f_flag & os.ST_RDONLY)}


def parts(state, because, processes):
    """The files of a bundle, by name: bytes each."""
    environment = {name: STARS if PRIVATE.search(name) else value for name, value in (state.get("env") or {}).items()}
    launch = {
        **{key: state.get(key) for key in ("name", "profile", "argv", "port", "launched_at", "launched_by", "record")},
        "env": environment,
    }
    node = {
        "at": utc_now(),
        "boot_id": boot_id(),
        "up_s": round(boot_seconds()),
        "system": " ".join(platform.uname()),
        "python": platform.python_version(),
        "gpus": gpus(),
        "host_memory": host_memory(),
        "disks": {folder: _disk(folder) for folder in (os.path.dirname(state["log"]), "/tmp", "/dev/shm")},
        "listeners": [listener._asdict() for listener in listeners(state["port"])],
        "processes": [{**stat._asdict(), "command": command(stat.pid)[:400]} for stat in processes],
    }
    return {
        "server.log": _log(state["log"]),
        "start.sh": (read_text(state["script"]) or "" if state.get("script") else "").encode(),
        "launch.json": json.dumps(launch, indent=2).encode(),
        "node.json": json.dumps(node, indent=2).encode(),
        "kernel.txt": "".join(f"{line}\n" for line in kernel_lines()).encode(),
        "verdict.txt": f"{because or 'no cause was given'}\n".encode(),
    }


def write_bundle(folder, state, because, processes, secrets):
    """Write a bundle of one boot below ``folder``; its path. Secrets are stars in every file of it. OSError when it can't."""
    stem = os.path.splitext(os.path.basename(state["log"]))[0]
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"{stem}.tar.gz")
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz", compresslevel=3) as bundle:
            for name, data in parts(state, because, processes).items():
                for secret in secrets:
                    for form in {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]}:
                        data = data.replace(form.encode(), STARS.encode())
                entry = tarfile.TarInfo(f"{stem}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                bundle.addfile(entry, io.BytesIO(data))
    except OSError:
        os.unlink(path)
        raise
    for name in sorted(entry for entry in os.listdir(folder) if entry.endswith(".tar.gz"))[:-KEPT_BUNDLES]:
        os.unlink(os.path.join(folder, name))
    return path
