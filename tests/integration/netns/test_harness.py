# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes are separate machines as far as Ansible can tell, and nothing of them stays behind."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from helpers.netns import inventory, netns_nodes
from helpers.runner import run_playbook

pytestmark = pytest.mark.netns

PING = """
- name: Reach every node
  hosts: all
  gather_facts: false
  tasks:
    - name: Ping
      ansible.builtin.ping:
    - name: Leave a process behind
      ansible.builtin.shell: setsid sleep 600 </dev/null >/dev/null 2>&1 &
      changed_when: true
      when: leave | default(false)
"""


@pytest.fixture(scope="module")
def nodes():
    with netns_nodes(2) as made:
        yield made


@pytest.fixture
def play(tmp_path, nodes):
    (tmp_path / "ping.yml").write_text(PING)
    (tmp_path / "ansible.cfg").write_text("[defaults]\nforks = 4\n")

    def _play(pipelining=True, **extravars):
        environ = {"ANSIBLE_PIPELINING": pipelining}
        return run_playbook(tmp_path, "ping.yml", inventory(nodes), extravars=extravars, envvars=environ, timeout=30)

    return _play


@pytest.mark.parametrize("pipelining", [True, False])
def test_ansible_reaches_every_node_and_leaves_a_process_there(nodes, play, pipelining):
    result = play(pipelining, leave=True)
    assert (result.status, result.rc) == ("successful", 0), result.stdout
    assert {host: answer["ping"] for host, answer in result.tasks["Ping"].items()} == {"node1": "pong", "node2": "pong"}
    assert [result.changed(node.name) for node in nodes] == [1, 1]
    for node in nodes:
        assert "sleep 600" in node.run("ps -eo args").stdout
        node.run("kill $(pidof sleep)")


def test_a_node_has_its_own_processes_files_and_ports(nodes):
    one, two = nodes
    one.run("mkdir -p /srv/sglang && touch /srv/sglang/mine && touch /run/mine /dev/shm/mine")
    assert two.run("ls /srv /run/mine /dev/shm", check=False).stdout.split() == ["/dev/shm:", "/srv:"]
    assert not Path("/srv/sglang/mine").exists() and not Path("/run/mine").exists()
    assert one.run("cat /proc/1/comm").stdout == "sshd\n"
    assert one.run("ip -4 -o address show eth0").stdout.split()[3] == f"{one.address}/24"
    serve = "setsid python3 -m http.server 30000 </dev/null >/dev/null 2>&1 & sleep 0.5; pidof python3"
    for node in nodes:
        node.run(f"cd /srv; {serve}")
    one.run("kill $(pidof python3)")
    two.run("kill $(pidof python3)")


def test_a_cut_node_is_unreachable_within_seconds_and_comes_back(nodes, play):
    one, two = nodes
    two.cut()
    started = time.monotonic()
    result = play()
    elapsed = time.monotonic() - started
    assert (result.unreachable(two.name), result.unreachable(one.name)) == (1, 0), result.stdout
    assert elapsed < 10
    two.restore()
    assert ping_over_ssh(two) == "pong"


def ping_over_ssh(node):
    variables = node.inventory
    argv = ["ssh", "-i", variables["ansible_ssh_private_key_file"], *variables["ansible_ssh_common_args"].split()]
    argv += [f"root@{node.address}", "echo pong"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def test_nothing_stays_behind():
    with netns_nodes(2) as made:
        for node in made:
            node.run("setsid sleep 600 </dev/null >/dev/null 2>&1 &")
        pids = [pid for node in made for pid in node.pids()]
        names = [name for node in made for name in (node.netns, node.link)] + [made[0].netns.partition("-")[0]]
        folder = made[0].folder
    assert len(pids) >= 4
    assert [pid for pid in pids if running(pid)] == []
    left = subprocess.run("ip netns list; ip -o link", shell=True, capture_output=True, text=True, check=True).stdout
    assert [name for name in names if name in left] == []
    assert not folder.exists()


def running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_the_machine_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr("helpers.netns._which", lambda tool: None)
    with pytest.raises(Exception, match="apt-get install curl iproute2 openssh-client openssh-server procps"), netns_nodes(1):
        pass


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Exception, match="need root"), netns_nodes(1):
        pass
