# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starting and stopping a process that behaves as the router does: it checks its options, binds two ports, and drains."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest
from ansible.module_utils.sglang_process import command, identity, listeners, marked
from ansible.module_utils.sglang_state import Paths, lock, read_state

# Says what smg 1.13.0 says, in its words and with its exit codes, and listens where it is told to.
STAND_IN = """
import argparse, signal, socket, sys, time
parser = argparse.ArgumentParser(prog="smg")
parser.add_argument("--host"); parser.add_argument("--port", type=int); parser.add_argument("--prometheus-port", type=int)
parser.add_argument("--policy", choices=["cache_aware"]); parser.add_argument("--interval", type=int, default=1)
parser.add_argument("--secrets"); parser.add_argument("--mute", action="store_true"); parser.add_argument("--label")
args = parser.parse_args()
def refuse(sentence):
    print("Error starting router: " + sentence, file=sys.stderr); sys.exit(1)
if args.interval < 1:
    refuse("Configuration error: Invalid value for field 'interval': 0 - Must be >= 1")
if args.mute:
    time.sleep(60)
try:
    server = socket.create_server((args.host, args.port))
except OSError as error:
    refuse(f"Failed to bind the HTTP listener on {args.host}:{args.port}: Address already in use (os error 98)")
metrics = socket.create_server((args.host, args.prometheus_port))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(1)
"""
KEY = "s3cret-of-the-tests"


@pytest.fixture
def module(load):
    return load("library", "sglang_router")


class Router:
    """The arguments of the module for a router below a folder of its own, and what is there."""

    def __init__(self, folder, ports):
        self.root, self.launcher = folder / "fleet", folder / "launch_router.py"
        self.launcher.write_text(STAND_IN)
        self.port, self.metrics = ports
        self.paths = Paths(str(self.root), "sglang_router")

    def args(self, *flags, **more):
        port, metrics = more.pop("port", self.port), more.pop("metrics_port", self.metrics)
        argv = [
            sys.executable, str(self.launcher), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
            *flags,
        ]  # fmt: skip
        env = {"SGLANG_FLEET_ROOT": str(self.root), "SGLANG_FLEET_SERVER": "router"}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        return {
            "root": str(self.root), "argv": argv, "env": env, "port": port, "metrics_port": metrics, "who": "alice@laptop",
            "script": f"#!/usr/bin/env bash\n{exports}exec {shlex.join(argv)}\n",
            "script_path": f"{self.root}/scripts/start_sglang_router.sh",
            "record": {"release": "1.13.0", "flags": [[flag] for flag in flags]}, **more,
        }  # fmt: skip

    def stop_args(self, **more):
        return {"root": str(self.root), "port": self.port, "metrics_port": self.metrics, "state": "stopped", **more}

    @property
    def state(self):
        return read_state(self.paths.state)

    def pids(self):
        return [found.pid for found in marked(str(self.root), "router")]


@pytest.fixture
def router(tmp_path, helpers):
    made = Router(tmp_path, (helpers.free_port(), helpers.free_port()))
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)


def test_a_start_listens_when_it_comes_back_and_a_second_start_leaves_it_alone(module, router, call):
    args = router.args("--policy", "cache_aware")
    first = call(module, args)
    assert (first["rc"], first["changed"], first["running"]) == (0, True, None)
    assert first["identity"] == router.state["identity"] == identity(first["pid"])
    assert [listener.pid for listener in listeners(router.port)] == [first["pid"]]
    assert first["identity"]["sid"] == first["pid"], "a session of its own"
    assert stat.S_IMODE(os.stat(router.paths.state).st_mode) == 0o600
    again = call(module, args)
    assert (again["changed"], again["pid"], again["log"]) == (False, first["pid"], first["log"])
    assert call(module, {**args, "state": "checked"})["would_change"] is False


def test_check_mode_and_checked_touch_nothing(module, router, call):
    checked = call(module, router.args(state="checked"))
    assert (checked["rc"], checked["changed"], checked["would_change"]) == (0, False, True)
    would = call(module, router.args(), check=True, diff=True)
    assert would["changed"] is True and "exec " in would["diff"][0]["after"]
    assert not router.root.exists() and router.pids() == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "nope"], "argument --policy: invalid choice: 'nope' (choose from"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--interval", "0"], "Invalid value for field 'interval': 0 - Must be >= 1"),
    ],
)
def test_options_that_the_router_refuses_are_refused_before_anything_is_touched(module, router, call, flags, said):
    running = call(module, router.args())["pid"]
    for state in ("checked", "started"):
        refused = call(module, router.args(*flags, state=state, replace=True))
        assert refused["rc"] == 1 and refused["cause"] == "flags"
        assert refused["msg"].startswith(f"router: smg 1.13.0 refuses its options: {said}"), refused["msg"]
        assert "\n" not in refused["msg"] and "sglang_router_args" in refused["msg"]
    assert router.pids() == [running]


def test_a_router_that_is_not_installed(module, router, call):
    missing = router.args()
    missing["argv"][0] = "/nowhere/python"
    refused = call(module, missing)
    assert refused["cause"] == "engine" and "router.yml" in refused["msg"]
    assert call(module, missing, check=True)["changed"] is True


def test_other_options_over_a_running_router_are_refused_unless_asked_for(module, router, call):
    first = call(module, router.args())["pid"]
    refused = call(module, router.args("--label", "x"))
    assert refused["cause"] == "running"
    for word in (f"pid {first}", "--label", "-e replace=true"):
        assert word in refused["msg"]
    replaced = call(module, router.args("--label", "x", replace=True))
    assert (replaced["rc"], replaced["changed"], replaced["running"]["pid"]) == (0, True, first)
    assert router.pids() == [replaced["pid"]] != [first]


@pytest.mark.parametrize("which", ["port", "metrics_port"])
def test_a_stranger_on_a_port_is_named_and_left_alone(module, router, call, which):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        refused = call(module, router.args(**{which: port}))
        assert refused["cause"] == "port"
        assert refused["msg"].startswith(f"router: port {port} is taken by pid {os.getpid()}")
        assert "sglang_router_port" in refused["msg"]
        assert stranger.fileno() >= 0
    assert router.pids() == []


def test_a_router_that_never_listens_is_stopped(module, router, call, monkeypatch):
    monkeypatch.setattr(module, "check_options", lambda *_: None)
    refused = call(module, router.args("--mute", start_timeout=1, stop_timeout=1))
    assert refused["cause"] == "timeout" and f"did not listen on port {router.port} within 1 s" in refused["msg"]
    assert router.pids() == []


def test_a_router_that_ends_at_once_says_why(module, router, call, monkeypatch):
    monkeypatch.setattr(module, "check_options", lambda *_: None)
    refused = call(module, router.args("--interval", "0"))
    assert refused["cause"] == "died" and "exit code 1: Invalid value for field 'interval'" in refused["msg"]


def test_the_key_is_in_a_file_and_nowhere_else(module, router, call):
    answer = call(module, router.args("--secrets", router.paths.secrets, secrets={"api-key": KEY}))
    assert answer["rc"] == 0
    assert Path(router.paths.secrets).read_text() == f'api-key: "{KEY}"\n'
    assert stat.S_IMODE(os.stat(router.paths.secrets).st_mode) == 0o600
    assert KEY not in str(answer) + command(answer["pid"]) + Path(router.paths.state).read_text()


def test_a_stop_leaves_nothing_and_a_second_one_changes_nothing(module, router, call):
    call(module, router.args())
    stopped = call(module, router.stop_args(because="maintenance"))
    assert (stopped["rc"], stopped["changed"], stopped["killed"], stopped["pid"]) == (0, True, [], None)
    assert router.pids() == [] and listeners(router.port) == []
    assert router.state["stopped_because"] == "maintenance"
    assert call(module, router.stop_args())["changed"] is False


def test_a_router_that_was_killed_is_started_anew(module, router, call, helpers):
    first = call(module, router.args())["pid"]
    os.kill(first, signal.SIGKILL)
    helpers.until(lambda: router.pids() == [])
    second = call(module, router.args())
    assert (second["rc"], second["changed"]) == (0, True) and second["pid"] != first


def test_one_that_was_started_by_hand_is_named(module, router, call, spawn, helpers):
    args = router.args()
    spawn(args["argv"], env={**os.environ, **args["env"]})
    helpers.until(lambda: listeners(router.port))
    refused = call(module, args)
    assert refused["cause"] == "running" and "started by hand" in refused["msg"]
    assert call(module, router.stop_args())["changed"] is True
    assert router.pids() == []


def test_another_run_is_waited_for_and_named(module, router, call):
    router.paths.make()
    with lock(router.paths.lock, "bob@desk", 1):
        refused = call(module, router.args(lock_timeout=0))
    assert refused["cause"] == "locked" and "router is being worked on by bob@desk" in refused["msg"]


@pytest.mark.parametrize("needed", ["argv", "script", "script_path"])
def test_a_start_needs_what_it_starts(module, router, call, needed):
    refused = call(module, {**router.args(), needed: None})
    assert refused["cause"] == "usage" and needed in refused["msg"]
