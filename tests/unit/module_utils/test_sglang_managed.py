# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What servers and the router share, where the tests of their modules do not come: a launch that settles, files, ports."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest
from ansible.module_utils import sglang_managed
from ansible.module_utils.sglang_log import read_startup
from ansible.module_utils.sglang_managed import Managed, Refused, check_port, launch, remove_old_logs, stop, write_files
from ansible.module_utils.sglang_process import boot_seconds, marked


class Thing(Managed):
    MAIN_PROCESS = "thing"
    SETTING = "choose another"

    def verdict_of_end(self, log):
        return next(({"id": "x", "cause": line} for line in read_startup(log) if "because" in line), None)


@pytest.fixture
def made(tmp_path):
    """Make a Thing whose script runs this Python; what is left of it is killed."""
    root = str(tmp_path / "fleet")

    def _made(script="import time; time.sleep(60)", **more):
        env = {"SGLANG_FLEET_ROOT": root, "SGLANG_FLEET_SERVER": "thing"}
        exports = "".join(f"export {name}={value}\n" for name, value in env.items())
        thing = Thing(
            {
                "name": "thing", "slug": "thing", "root": root, "port": 1, "argv": [sys.executable], "env": env, "secrets": {},
                "script": f"#!/bin/sh\n{exports}exec {sys.executable} -c '{script}'\n", "who": "alice", "because": "",
                "script_path": f"{root}/scripts/thing.sh", "record": {}, "stop_timeout": 5, **more,
            }
        )  # fmt: skip
        write_files(thing)
        return thing

    yield _made
    for stat in marked(root, "thing"):
        os.kill(stat.pid, signal.SIGKILL)


def test_a_launch_comes_back_when_it_has_settled(made):
    thing, began = made(), boot_seconds()
    log = launch(thing, lambda: boot_seconds() - began > 0.3, 60)
    assert boot_seconds() - began < 30
    assert thing.process.pid == thing.state["identity"]["pid"] and thing.state["profile"] is None
    assert os.path.realpath(thing.paths.newest_log) == log
    stop(thing)
    assert thing.process is None and thing.state["stopped_at"]


def test_a_launch_that_ends_says_why_in_its_own_words(made):
    with pytest.raises(Refused, match="^thing ended at once with exit code 3: it was because of x; whole log: ") as caught:
        launch(made('import sys; print("it was because of x"); sys.exit(3)'), lambda: False, 60)
    assert caught.value.data["cause"] == "died"


def test_every_port_that_it_needs_is_looked_at(made, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        monkeypatch.setattr(Thing, "ports", lambda self: [1, port])
        with pytest.raises(Refused, match=f"^thing: port {port} is taken by pid {os.getpid()} .*: stop it, or choose another$"):
            check_port(made())


def test_the_newest_logs_are_kept(made, monkeypatch):
    monkeypatch.setattr(sglang_managed, "KEPT_LOGS", 2)
    paths = made().paths
    for name in ("1.log", "2.log", "3.log", "other"):
        open(os.path.join(paths.logs, name), "w", encoding="utf-8").close()
    remove_old_logs(paths)
    assert sorted(os.listdir(paths.logs)) == ["2.log", "3.log", "other"]
