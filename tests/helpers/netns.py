# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes for tests: network namespaces on a bridge of their own, each with a real sshd.

A node has its own address (so port 30000 is free on every node), its own process table, and its own /srv, /run and
/dev/shm; the rest of the file system is the machine's. Its sshd is the init of its process namespace: killing that one
process kills whatever a test left running there.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = "/srv/sglang"
PREFIX = "sgf"
TOOLS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "curl": "curl",
    "pgrep": "procps",
}
BOOT = """
set -e
mount --bind {folder}/srv /srv
mount --bind {folder}/shadow /etc/shadow
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir /run/sshd
exec {sshd} -D -E {folder}/sshd.log -f {folder}/sshd_config
"""
SSHD_CONFIG = """
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {keys}/key.pub
PidFile none
UsePAM no
UseDNS no
StrictModes no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""
_counter = itertools.count()


class HarnessError(Exception):
    """The nodes cannot be made here; the text says what to do about it."""


@dataclass
class Node:
    name: str
    address: str
    folder: Path
    netns: str
    link: str
    port: int = 22
    root: str = ROOT
    inventory: dict = field(default_factory=dict)
    process: subprocess.Popen | None = None
    init: int = 0

    def run(self, command, timeout=10, check=True):
        """Run a shell command line, or a list, inside the node."""
        line = command if isinstance(command, str) else shlex.join(command)
        argv = ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "--", "sh", "-c", line]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=check, stdin=subprocess.DEVNULL)

    def cut(self):
        """Take the node off the network; what runs on it goes on."""
        _ip("link", "set", self.link, "down")

    def restore(self):
        _ip("link", "set", self.link, "up")
        _wait(lambda: _listens(self.address, self.port), 5, f"{self.name} does not answer on {self.address} again")

    def pids(self):
        """What runs in the node's network namespace, as the machine's process ids."""
        return [int(pid) for pid in _ip("netns", "pids", self.netns).split()]

    def kill(self):
        """Kill the node with everything on it, as a power cut would."""
        for pid in (self.init, self.process.pid if self.process else 0):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        if self.process:
            self.process.wait(5)


@contextlib.contextmanager
def netns_nodes(count):
    """Bring up nodes node1 … nodeN and take every trace of them away afterwards."""
    _require()
    tag = f"{PREFIX}{os.getpid()}{_letters(next(_counter))}"
    with tempfile.TemporaryDirectory(prefix=f"{tag}-") as folder, contextlib.ExitStack() as undo:
        network = _bridge(tag, undo)
        keys = _keys(Path(folder))
        undo.callback(_close_masters, keys / "cp")
        nodes = [_node(tag, network, keys, number, undo) for number in range(1, count + 1)]
        for node in nodes:
            _wait(lambda node=node: _listens(node.address, node.port), 10, f"sshd of {node.name} does not listen", node)
            node.init = _child(node.process.pid)
        yield nodes


def inventory(nodes):
    """The nodes as an inventory that ansible-runner takes."""
    return {"all": {"hosts": {node.name: node.inventory for node in nodes}}}


def _require():
    if os.geteuid() != 0:
        raise HarnessError(
            "Network namespaces need root, and this is another user: "
            "run these tests with sudo, or leave tests/integration/netns out."
        )
    missing = sorted({package for tool, package in TOOLS.items() if not _which(tool)})
    if missing:
        raise HarnessError(f"Nodes need {', '.join(TOOLS)}, and some are missing: run `apt-get install {' '.join(missing)}`.")


def _bridge(tag, undo):
    """Make the bridge on a /24 of 10.213.0.0/16 that nobody uses; returns the network without its last number."""
    _sweep()
    with open(Path(tempfile.gettempdir()) / f"{PREFIX}-networks.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = set(re.findall(r"10\.213\.(\d+)\.", _ip("-4", "-o", "address")))
        third = next(number for number in range(256) if str(number) not in taken)
        _ip("link", "add", tag, "type", "bridge")
        undo.callback(_ip, "link", "delete", tag)
        _ip("address", "add", f"10.213.{third}.254/24", "dev", tag)
    _ip("link", "set", tag, "up")
    return f"10.213.{third}"


def _keys(folder):
    keys = folder / "keys"
    (keys / "cp").mkdir(parents=True)
    _keygen(keys / "key")
    return keys


def _node(tag, network, keys, number, undo):
    name = f"node{number}"
    folder = keys.parent / name
    (folder / "srv").mkdir(parents=True)
    node = Node(name, f"{network}.{number}", folder, netns=f"{tag}-{name}", link=f"{tag}v{number}")
    node.inventory = _inventory_vars(node, keys)
    undo.callback(_remove, node)
    _ip("netns", "add", node.netns)
    _ip("link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.netns)
    _ip("link", "set", node.link, "master", tag, "up")
    _ip("-n", node.netns, "address", "add", f"{node.address}/24", "dev", "eth0")
    for link in ("eth0", "lo"):
        _ip("-n", node.netns, "link", "set", link, "up")

    _keygen(folder / "host_key")
    # A root account locked in /etc/shadow (a usual CI machine) is refused by sshd, even with a key.
    shadow = Path("/etc/shadow").read_text(encoding="utf-8")
    (folder / "shadow").write_text(re.sub(r"(?m)^root:!+\*?", "root:*", shadow), encoding="utf-8")
    (folder / "shadow").chmod(0o600)
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(address=node.address, folder=folder, keys=keys), encoding="utf-8")
    boot = BOOT.format(folder=folder, sshd=_which("sshd"))
    isolate = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount"]
    argv = ["ip", "netns", "exec", node.netns, *isolate, "sh", "-c", boot]
    with open(folder / "boot.log", "wb") as output:
        node.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    return node


def _inventory_vars(node, keys):
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    options = {
        "UserKnownHostsFile": keys / "known_hosts",
        "StrictHostKeyChecking": "no",
        "IdentitiesOnly": "yes",
        "LogLevel": "ERROR",
    }
    # A node that was cut off must be missed within seconds, also by a connection that is already open.
    options |= {"ConnectTimeout": 3, "ServerAliveInterval": 1, "ServerAliveCountMax": 2}
    return {
        "ansible_host": node.address,
        "ansible_port": node.port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(keys / "key"),
        "ansible_ssh_common_args": " ".join(f"-o {name}={value}" for name, value in options.items()),
        # Ansible's own ConnectTimeout stands before the one in the arguments, and ssh takes the first.
        "ansible_ssh_timeout": 3,
        "ansible_control_path_dir": str(keys / "cp"),
        "ansible_python_interpreter": python,
        "ansible_remote_tmp": "/srv/.ansible/tmp",
        "ansible_async_dir": "/srv/.ansible/async",
    }


def _remove(node):
    node.kill()
    with contextlib.suppress(subprocess.CalledProcessError):
        _wait(lambda: not node.pids(), 5, f"Processes of {node.name} outlived it")
    # Deleting the namespace deletes eth0 and with it the bridge's end of the cable.
    _ip("netns", "delete", node.netns, check=False)
    _ip("link", "delete", node.link, check=False)


def _sweep():
    """Remove what a harness left whose Python was killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if _orphan(name):
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            _ip("netns", "delete", name, check=False)
    for name in re.findall(rf"^\d+: ({PREFIX}\d+[a-z]+)[:@]", _ip("-o", "link", "show", "type", "bridge"), re.M):
        if _orphan(name):
            _ip("link", "delete", name, check=False)
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if _orphan(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _orphan(name):
    owner = re.match(rf"{PREFIX}(\d+)[a-z]", name)
    return bool(owner) and not os.path.exists(f"/proc/{owner[1]}")


def _close_masters(folder):
    """End the ssh masters that Ansible keeps open to the nodes."""
    for control in folder.iterdir():
        subprocess.run(
            ["ssh", "-o", f"ControlPath={control}", "-O", "exit", "node"], capture_output=True, timeout=5, check=False
        )


def _wait(condition, seconds, what, node=None):
    deadline = time.monotonic() + seconds
    while not condition():
        ended = node is not None and node.process.poll() is not None
        if ended or time.monotonic() > deadline:
            evidence = "".join(path.read_text() for path in node.folder.glob("*.log")) if node else ""
            raise HarnessError(f"{what} {'and its process ended' if ended else f'after {seconds} s'}. {evidence}".strip())
        time.sleep(0.02)


def _listens(address, port):
    try:
        with socket.create_connection((address, port), timeout=0.5):
            return True
    except OSError:
        return False


def _child(pid):
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()[0])


def _keygen(path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL)


def _ip(*args, check=True):
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise HarnessError(f"`ip {' '.join(args)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _which(tool):
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _letters(number):
    """a, b, … z, ba, bb: a link's name holds 15 characters, and a digit would run into the process id."""
    text = ""
    while True:
        number, rest = divmod(number, 26)
        text = chr(ord("a") + rest) + text
        if not number:
            return text
