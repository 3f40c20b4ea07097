# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real processes: who is alive, whose they are, who listens, and that a signal reaches no one else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from ansible.module_utils import sglang_process
from ansible.module_utils.sglang_process import (
    alive,
    command,
    describe,
    identity,
    listeners,
    marked,
    members,
    orphans,
    read_stat,
    send,
    shared_bytes,
    shared_memory,
    started_unrecorded,
    unused,
    variable,
    wait_until,
)

SLEEP = "print('up', flush=True); import time; time.sleep(60)"
# A server: it leads its session and has a child that keeps nothing of the environment, and one that hides in another session.
TREE = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
plain = subprocess.Popen(sleep)
bare = subprocess.Popen(sleep, env={})
away = subprocess.Popen(sleep, env={}, start_new_session=True)
print(plain.pid, bare.pid, away.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def mark(tmp_path):
    """The environment of a server that is started for this test alone."""
    return {**os.environ, "SGLANG_FLEET_ROOT": str(tmp_path), "SGLANG_FLEET_SERVER": "n-gpu0"}


def pids(stats):
    return {stat.pid for stat in stats}


def test_an_identity_names_one_process_for_ever(python, helpers):
    process, _up = python(SLEEP)
    known = identity(process.pid)
    assert known == {
        "pid": process.pid,
        "start_ticks": read_stat(process.pid).start_ticks,
        "boot_id": sglang_process.boot_id(),
        "sid": process.pid,
    }
    assert alive(known).pid == process.pid
    process.kill()
    process.wait()
    assert alive(known) is None
    assert identity(process.pid) is None


def test_another_start_or_boot_with_that_pid_is_not_it(python):
    process, _up = python(SLEEP)
    known = identity(process.pid)
    assert alive({**known, "start_ticks": known["start_ticks"] - 1}) is None
    assert alive({**known, "boot_id": "00000000-0000-0000-0000-000000000000"}) is None
    assert alive(None) is None
    assert alive({}) is None


def test_a_zombie_is_dead(python, helpers):
    process, _up = python(SLEEP)
    known = identity(process.pid)
    process.kill()  # and not waited for
    helpers.until(lambda: read_stat(process.pid).state == "Z")
    assert alive(known) is None
    assert process.pid not in pids(sglang_process.living())


def test_a_name_with_spaces_and_parentheses_is_read(python):
    script = "open('/proc/self/comm', 'w').write('a) R (b c'); " + SLEEP
    process, _up = python(script)
    stat = read_stat(process.pid)
    assert (stat.parent, stat.session) == (os.getpid(), process.pid)
    assert stat.state in "SR"
    assert stat.rss_bytes > 1 << 20


def test_no_such_process():
    assert read_stat(2**22 + 1) is None
    assert command(2**22 + 1) == "?"


def test_a_command_is_one_line(spawn, helpers):
    process = spawn([sys.executable, "-c", "import time; time.sleep(60)", "a b", ""])
    helpers.until(lambda: "sleep(60)" in command(process.pid))
    assert command(process.pid) == f"{sys.executable} -c import time; time.sleep(60) a b"


def test_a_variable_is_that_of_the_process_by_its_whole_name(python, mark):
    process, _up = python(SLEEP, env={**mark, "TMPDIR": "/tmp/a=b", "TMPDIR_2": "/other", "EMPTY": ""})
    assert [variable(process.pid, name) for name in ("TMPDIR", "EMPTY", "TMP")] == ["/tmp/a=b", "", None]
    assert variable(2**31 - 1, "TMPDIR") is None


def test_marked_processes_carry_both_names(python, mark, tmp_path):
    ours, _up = python(SLEEP, env=mark)
    other_server, _up = python(SLEEP, env={**mark, "SGLANG_FLEET_SERVER": "n-gpu00"})
    other_root, _up = python(SLEEP, env={**mark, "SGLANG_FLEET_ROOT": f"{tmp_path}/x"})
    assert pids(marked(str(tmp_path), "n-gpu0")) == {ours.pid}
    assert pids(marked(str(tmp_path), "n-gpu00")) == {other_server.pid}
    assert pids(marked(f"{tmp_path}/x", "n-gpu0")) == {other_root.pid}


def test_members_are_the_tree_and_the_session(python, mark, tmp_path):
    process, children = python(TREE, env=mark)
    plain, bare, away = map(int, children.split())
    try:
        assert pids(marked(str(tmp_path), "n-gpu0")) == {process.pid, plain}
        assert pids(members(str(tmp_path), "n-gpu0")) == {process.pid, plain, bare, away}
        # Without any mark, its session is known by number; what left the session is still a child of it.
        assert pids(members(str(tmp_path), "another", process.pid)) == {process.pid, plain, bare, away}
        assert members(str(tmp_path), "another") == []
    finally:
        os.kill(away, signal.SIGKILL)


def test_a_child_that_wiped_its_environment_is_found_after_its_leader(python, mark, tmp_path, helpers):
    process, children = python(TREE, env=mark)
    plain, bare, away = map(int, children.split())
    known = identity(process.pid)
    try:
        process.kill()
        process.wait()
        assert pids(members(str(tmp_path), "n-gpu0")) == {plain}
        assert pids(orphans(str(tmp_path), "n-gpu0", known, sys.executable)) == {plain, bare}
        # Of a session whose number is all that is known, only processes that look like the engine's are.
        assert pids(orphans(str(tmp_path), "n-gpu0", known, "/opt/other/python")) == {plain}
        elsewhere = {**known, "boot_id": "another"}
        assert pids(orphans(str(tmp_path), "n-gpu0", elsewhere, sys.executable)) == {plain}
    finally:
        os.kill(away, signal.SIGKILL)


def test_a_session_that_someone_else_leads_now_is_not_searched(python, tmp_path):
    process, _up = python(SLEEP)
    reused = {**identity(process.pid), "start_ticks": 1}
    assert orphans(str(tmp_path), "n-gpu0", reused, sys.executable) == []


def test_a_server_started_by_hand_does_not_make_the_persons_session_ours(python, mark, tmp_path):
    """A login shell with a server in the foreground, and another program of that person beside it."""
    script = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
beside = subprocess.Popen(sleep)
mark = {"SGLANG_FLEET_ROOT": sys.argv[1], "SGLANG_FLEET_SERVER": "n-gpu0"}
server = subprocess.Popen(sleep, env={**os.environ, **mark})
print(server.pid, beside.pid, flush=True)
time.sleep(60)
"""
    shell, line = python(script, str(tmp_path))
    server, beside = map(int, line.split())
    ours = pids(members(str(tmp_path), "n-gpu0"))
    assert ours == {server}
    assert beside not in ours and shell.pid not in ours
    assert started_unrecorded(str(tmp_path), "n-gpu0") is None


def test_a_start_that_was_not_written_down_is_recognised(python, mark, tmp_path):
    process, children = python(TREE, env=mark)
    try:
        assert started_unrecorded(str(tmp_path), "n-gpu0").pid == process.pid
    finally:
        os.kill(int(children.split()[2]), signal.SIGKILL)


def test_we_are_never_a_member_ourselves(mark, tmp_path):
    script = (
        "import sys, ansible.module_utils as m; m.__path__.append(sys.argv[1]);"
        "from ansible.module_utils.sglang_process import members, marked;"
        "print(len(marked(sys.argv[2], 'n-gpu0')), len(members(sys.argv[2], 'n-gpu0')))"
    )
    folder = os.path.dirname(sglang_process.__file__)
    ran = subprocess.run(
        [sys.executable, "-c", script, folder, str(tmp_path)], env=mark, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["1", "0"]


LISTEN = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 0), family=family)
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_listener_is_told_with_address_pid_and_command(python, address):
    process, port = python(LISTEN, address)
    if not port:
        pytest.skip(f"nothing can listen on {address} here")
    (found,) = listeners(int(port))
    assert (found.address, found.port, found.pid, found.session) == (address, int(port), process.pid, process.pid)
    assert found.command.startswith(sys.executable) and found.command.endswith(address)
    assert describe(found) == f"pid {process.pid} ({found.command[:160]})"


def test_a_connection_is_no_listener(helpers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert listeners(client.getsockname()[1]) == []
            assert len(listeners(port)) == 1
    assert listeners(helpers.free_port()) == []


def test_a_listener_of_another_user_is_described_without_a_pid():
    stranger = sglang_process.Listener("10.0.0.1", 30000, None, None, "?")
    assert describe(stranger) == "a process of another user on 10.0.0.1"


def test_a_signal_reaches_only_the_process_that_was_meant(python):
    process, _up = python(SLEEP)
    ticks = read_stat(process.pid).start_ticks
    assert send(process.pid, signal.SIGKILL, ticks - 1) is False
    assert process.poll() is None
    assert send(process.pid, signal.SIGTERM, ticks) is True
    assert process.wait(5) == -signal.SIGTERM
    assert send(process.pid, signal.SIGTERM, ticks) is False


def test_a_signal_without_pidfd_still_looks_first(python, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    process, _up = python(SLEEP)
    ticks = read_stat(process.pid).start_ticks
    assert send(process.pid, signal.SIGKILL, ticks + 1) is False
    assert send(process.pid, signal.SIGKILL, ticks) is True
    assert process.wait(5) == -signal.SIGKILL


def test_files_in_shared_memory_are_found_by_who_maps_them(python):
    script = """
import mmap, os, sys, time
for name in sys.argv[1:]:
    path = "/dev/shm/" + name
    with open(path, "w+b") as stream:
        stream.truncate(4096)
        globals()["map_" + name] = mmap.mmap(stream.fileno(), 4096)
os.unlink("/dev/shm/" + sys.argv[3])
print("up", flush=True)
time.sleep(60)
"""
    names = [f"sglang_test_{os.getpid()}", f"other_test_{os.getpid()}", f"sgl_shm_gone_{os.getpid()}"]
    process, _up = python(script, *names)
    try:
        assert shared_memory([process.pid, 2**22 + 1]) == {f"/dev/shm/{names[0]}"}
    finally:
        for name in names[:2]:
            os.unlink(f"/dev/shm/{name}")


def test_waiting_ends_with_the_first_true_value_or_the_time():
    values = iter([0, "", "value", "later"])
    assert wait_until(lambda: next(values), 5, pause=0) == "value"
    started = time.monotonic()
    assert wait_until(lambda: [], 0.2, pause=0.05) == []
    assert 0.2 <= time.monotonic() - started < 2


def test_time_since_the_boot_goes_on():
    before = sglang_process.boot_seconds()
    time.sleep(0.02)
    assert 0.01 < sglang_process.boot_seconds() - before < 5


# -- memory -----------------------------------------------------------------------------------------------------------
def test_shared_memory_counts_when_it_is_in_use_and_private_memory_does_not(python):
    script = """
import mmap, time
shared, unused, private = mmap.mmap(-1, 64 << 20), mmap.mmap(-1, 64 << 20), b"x" * (64 << 20)
shared.write(b"x" * (64 << 20))
print("up", flush=True)
time.sleep(60)
"""
    process, _up = python(script)
    assert 64 << 20 <= shared_bytes(read_stat(process.pid)) < 72 << 20


def test_a_process_that_is_gone_shares_nothing(python):
    process, _up = python(SLEEP)
    stat = read_stat(process.pid)
    process.kill()
    process.wait(5)
    assert shared_bytes(stat) == 0


def test_the_owner_of_a_port_is_found_though_it_opens_and_closes_files_all_the_time(python):
    """A handle that is gone when it is looked at is not its process's end."""
    script = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
for number in range(40):
    keep = [open("/dev/null") for _ in range(5)]
def churn():
    while True:
        open("/dev/null").close()
for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
print(server.getsockname()[1], flush=True)
threading.Event().wait()
"""
    process, port = python(script)
    assert [listeners(int(port))[0].pid for _ in range(50)] == [process.pid] * 50


def test_a_file_that_a_living_process_has_open_or_mapped_is_in_use(python, tmp_path):
    paths = [str(tmp_path / name) for name in ("open", "mapped", "free")]
    script = """
import mmap, sys
for path in sys.argv[1:]:
    open(path, "w").write("x" * 4096)
handle = open(sys.argv[1])
with open(sys.argv[2], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
print("up", flush=True)
input()
"""
    process, _up = python(script, *paths, stdin=subprocess.PIPE)
    assert unused(paths) == {paths[2]}
    process.kill()
    process.wait(10)
    assert unused(paths) == set(paths)
