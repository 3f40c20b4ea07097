# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starting and stopping real processes: what is left alone, what is refused, and that nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible.module_utils import sglang_managed, sglang_process, sglang_state
from ansible.module_utils.sglang_process import identity, members, read_stat
from ansible.module_utils.sglang_state import Paths, boot_of, lock, read_state, utc_now, write_state
from helpers.swap import begun

LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
time.sleep(60)
"""
IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
KEY = "s3cret-of-the-tests"


@pytest.fixture
def module(load, monkeypatch):
    made = load("library", "sglang_server")
    monkeypatch.setattr(made, "EARLY_DEATH_SECONDS", 0.2)
    return made


class Fleet:
    """One server below a folder of its own: the arguments of the module, and what is there."""

    def __init__(self, root, python, port):
        self.root, self.python, self.port = root, str(python), port
        self.paths = Paths(str(root), "sglang_gpu0")

    def args(self, *flags, env=None, body=None, **more):
        """Arguments for a replay with these flags; `body` is what the script runs instead."""
        argv = [self.python, "-m", "sglang.launch_server", "--model-path", "/m", "--port", str(self.port), *flags]
        env = {
            "SGLANG_FLEET_ROOT": str(self.root),
            "SGLANG_FLEET_SERVER": "n-gpu0",
            "SGLANG_REPLAY_SPEED": "500",
            **(env or {}),
        }
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        line = [flag if isinstance(flag, list) else [flag] for flag in flags]
        return {
            "name": "n-gpu0",
            "slug": "sglang_gpu0",
            "root": str(self.root),
            "state": "started",
            "profile": "nomtp",
            "argv": argv,
            "env": env,
            "script": f"#!/usr/bin/env bash\n{exports}{body or 'exec ' + shlex.join(argv)}\n",
            "script_path": f"{self.root}/scripts/start_sglang_gpu0_nomtp.sh",
            "port": self.port,
            "record": {"release": "0.5.17", "flags": line},
            "who": "alice@laptop",
            **more,
        }

    def ready(self):
        """As module sglang_wait notes it."""
        write_state(self.paths.state, {**self.state, "ready_at": utc_now()})

    def stop_args(self, **more):
        return {
            "name": "n-gpu0", "slug": "sglang_gpu0", "root": str(self.root), "port": self.port, "state": "stopped",
            "who": "bob@desk", **more,
        }  # fmt: skip

    @property
    def state(self):
        return read_state(self.paths.state)

    def pids(self):
        return {found.pid for found in members(str(self.root), "n-gpu0", (self.state.get("identity") or {}).get("sid"))}


@pytest.fixture
def fleet(tmp_path, replay_venv, helpers):
    made = Fleet(tmp_path / "fleet", replay_venv / "bin" / "python", helpers.free_port())
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(made.state.get("temporary") or "", ignore_errors=True)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def body(script):
    return "exec " + shlex.join([sys.executable, "-c", script])


# -- started ----------------------------------------------------------------------------------------------------------
def test_a_start_leaves_a_detached_server_and_a_second_start_leaves_it_alone(module, fleet, call):
    args = fleet.args("--enable-metrics")
    first = call(module, args)
    assert (first["rc"], first["changed"], first["running"]) == (0, True, None)
    pid = first["pid"]
    assert first["identity"] == fleet.state["identity"] == identity(pid)
    assert first["identity"]["sid"] == pid
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == ["/dev/null", first["log"], first["log"]]
    assert os.path.realpath(fleet.paths.newest_log) == first["log"]
    assert (mode(first["log"]), mode(args["script_path"]), mode(fleet.paths.state)) == (0o600, 0o700, 0o600)
    assert Path(args["script_path"]).read_text() == args["script"]
    state = fleet.state
    assert (state["launched_by"], state["profile"], state["launching"]) == ("alice@laptop", "nomtp", False)
    assert (state["argv"], state["launch_sha256"], state["previous"]) == (args["argv"], first["launch_sha256"], None)

    second = call(module, args)
    assert (second["changed"], second["pid"], second["log"]) == (False, pid, first["log"])
    assert second["running"] == {"profile": "nomtp", "launched_at": state["launched_at"], "pid": pid}
    assert fleet.state == state
    checked = call(module, {**args, "state": "checked"})
    assert (checked["changed"], checked["would_change"], checked["pid"]) == (False, False, pid)


def test_the_server_gets_no_environment_of_the_connection(module, fleet, call, monkeypatch):
    for name in ("SSH_CONNECTION", "SSH_AUTH_SOCK", "ANSIBLE_CONFIG", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "of-the-login")
    pid = call(module, fleet.args(body=body("import time; time.sleep(60)")))["pid"]
    environ = dict(entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)
    assert "of-the-login" not in environ.values()
    assert (environ["LC_ALL"], environ["SGLANG_FLEET_SERVER"]) == ("C.UTF-8", "n-gpu0")
    assert os.readlink(f"/proc/{pid}/cwd") == str(fleet.root)


def test_check_mode_tells_a_start_and_creates_nothing(module, fleet, call):
    args = fleet.args()
    answer = call(module, args, check=True, diff=True)
    assert (answer["changed"], answer["pid"]) == (True, None)
    assert (answer["diff"][0]["before"], answer["diff"][0]["after"]) == ("", args["script"])
    assert not fleet.root.exists()


def test_check_mode_without_an_engine_warns_and_goes_on(module, fleet, call, warned):
    fleet.python = "/no/such/python"
    assert call(module, fleet.args(), check=True)["changed"] is True
    assert warned == ["n-gpu0: /no/such/python is not there yet, so the flags were not checked"]


def test_checked_changes_nothing_but_the_cache_of_flag_checks(module, fleet, call):
    answer = call(module, fleet.args(state="checked"))
    assert (answer["changed"], answer["would_change"], answer["rc"]) == (False, True, 0)
    assert os.listdir(fleet.paths.scripts) == os.listdir(fleet.paths.run) == []
    assert [name for name in os.listdir(fleet.paths.cache) if name.endswith(".json")] != []


PINS = """
import mmap, subprocess, sys, time
pool = mmap.mmap(-1, 64 << 20)
pool.write(b"x" * (64 << 20))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("pinned", flush=True)
time.sleep(60)
"""


def test_checked_tells_a_start_and_that_nothing_is_held(module, fleet, call):
    answer = call(module, fleet.args(state="checked"))
    assert (answer["restarts"], answer["holds"]) == (True, {"pids": [], "host_gb": 0.0})


def test_checked_tells_what_the_running_server_holds_and_whether_it_gives_it_back(module, fleet, call, helpers):
    args = fleet.args(body=body(PINS))
    pid = call(module, args)["pid"]
    helpers.until(lambda: "pinned" in Path(fleet.paths.newest_log).read_text())
    kept = call(module, {**args, "state": "checked"})
    assert (kept["would_change"], kept["restarts"]) == (False, False)
    assert kept["holds"] == {"pids": sorted(fleet.pids()), "host_gb": 0.07}
    assert len(kept["holds"]["pids"]) == 2 and pid in kept["holds"]["pids"]
    replaced = call(module, fleet.args("--enable-metrics", body=body(PINS), state="checked", replace=True))
    assert (replaced["would_change"], replaced["restarts"], replaced["holds"]) == (True, True, kept["holds"])
    assert fleet.pids() == set(kept["holds"]["pids"])


def test_checked_tells_that_a_script_alone_restarts_nothing(module, fleet, call):
    args = fleet.args()
    call(module, args)
    answer = call(module, {**args, "script": args["script"] + "# a newer template\n", "state": "checked"})
    assert (answer["would_change"], answer["restarts"]) == (True, False)


def test_checked_tells_what_a_dead_server_has_left(module, fleet, call, helpers):
    args = fleet.args(body=body(PINS))
    pid = call(module, args)["pid"]
    helpers.until(lambda: len(fleet.pids()) == 2)
    os.kill(pid, signal.SIGKILL)
    helpers.until(lambda: pid not in fleet.pids())
    answer = call(module, {**args, "state": "checked"})
    assert (answer["restarts"], answer["holds"]["pids"]) == (True, sorted(fleet.pids()))
    assert len(answer["holds"]["pids"]) == 1


def test_the_engine_is_asked_once_for_its_flags_and_then_for_types_of_its_own_alone(module, fleet, call, tmp_path):
    counter, wrapper = tmp_path / "count", tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\necho x >> {counter}\nexec {fleet.python} "$@"\n')
    wrapper.chmod(0o755)
    fleet.python = str(wrapper)

    def asked(*flags):
        """How often the engine was asked for these flags, and what was said."""
        before = counter.read_text().count("x") if counter.exists() else 0
        answer = call(module, fleet.args(*flags, state="checked"))
        return counter.read_text().count("x") - before, answer.get("cause", "")

    assert asked("--no-such-flag", "1") == (1, "flags")
    assert asked("--no-such-flag", "1") == (0, "flags")
    fleet.port += 1
    assert asked() == asked("--enable-metrics") == (0, "")
    assert asked("--max-running-requests", "many") == asked("--schedule-policy", "best") == (0, "flags")


@pytest.mark.parametrize("state", ["checked", "started"])
def test_a_flag_that_the_engine_does_not_know_is_refused_before_anything_is_made(module, fleet, call, state):
    answer = call(module, fleet.args("--no-such-flag", "1", state=state))
    assert (answer["failed"], answer["cause"]) == (True, "flags")
    assert answer["msg"].startswith("n-gpu0: SGLang 0.5.17 refuses the flags of profile nomtp: ")
    assert "unrecognized arguments: --no-such-flag 1; correct it where it is set" in answer["msg"]
    assert not os.path.exists(fleet.args()["script_path"])
    assert fleet.state == {}


def test_an_abbreviated_flag_is_refused(module, fleet, call):
    assert call(module, fleet.args("--mem-fraction", "0.5", state="checked"))["cause"] == "flags"


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_an_engine_that_does_not_work_is_named(module, fleet, call, python):
    fleet.python = python
    answer = call(module, fleet.args("--chat-template", "x" * 100_000, state="checked"))  # more than a pipe takes
    assert answer["cause"] == "engine"
    assert answer["msg"].startswith(f"n-gpu0: the engine at {python} could not read its own flags")
    assert answer["msg"].endswith("is SGLang installed there whole?")


@pytest.mark.parametrize("needed", ["profile", "argv", "script", "script_path"])
@pytest.mark.parametrize("state", ["checked", "started"])
def test_what_a_start_needs_is_named(module, fleet, call, needed, state):
    args = {**fleet.args(state=state), needed: None}
    answer = call(module, args)
    assert (answer["cause"], answer["msg"]) == ("usage", f"n-gpu0: state {state} needs {needed}")


def test_an_argv_that_runs_no_module_is_refused(module, fleet, call):
    answer = call(module, {**fleet.args(), "argv": ["sglang", "serve"]})
    assert answer["msg"] == "n-gpu0: argv starts with ['sglang', 'serve']: expected PYTHON -m sglang.launch_server"


def test_missing_arguments_fail(module, call):
    assert call(module, {"name": "n-gpu0"})["failed"] is True


def test_another_profile_over_a_running_server_is_refused(module, fleet, call):
    pid = call(module, fleet.args())["pid"]
    answer = call(module, fleet.args("--enable-metrics", profile="mtp"))
    assert (answer["failed"], answer["cause"]) == (True, "running")
    assert answer["msg"].startswith(f"n-gpu0 runs profile nomtp (pid {pid}) and was asked to run mtp: ")
    assert "-e replace=true stops and starts it at once" in answer["msg"]
    assert fleet.state["identity"] == identity(pid)


def test_the_same_profile_with_other_flags_says_which(module, fleet, call):
    call(module, fleet.args("--enable-metrics"))
    answer = call(module, fleet.args("--skip-server-warmup", env={"A": "1"}))
    assert "asked to run nomtp with other --enable-metrics, --skip-server-warmup, A:" in answer["msg"]


def test_a_key_alone_makes_a_difference(module, fleet, call):
    call(module, fleet.args())
    answer = call(module, fleet.args(secrets={"api-key": KEY}))
    assert "nomtp with other engine or keys" in answer["msg"]


def test_replace_stops_and_starts(module, fleet, call):
    first = call(module, fleet.args())
    fleet.ready()
    args = fleet.args("--enable-metrics", replace=True, profile="other", stop_timeout=5)
    foretold = call(module, args, check=True, diff=True)
    assert foretold["changed"] is True
    assert "--enable-metrics\n" in foretold["diff"][1]["after"] and "--enable-metrics\n" not in foretold["diff"][1]["before"]
    assert read_stat(first["pid"]).state not in "ZX"
    second = call(module, args)
    assert second["changed"] is True and second["pid"] != first["pid"]
    assert second["running"]["pid"] == first["pid"]
    assert sglang_process.alive(first["identity"]) is None
    assert fleet.state["previous"]["profile"] == "nomtp"
    assert fleet.state["previous"]["argv"] == fleet.args()["argv"]


def test_what_is_to_be_measured_is_started_anew_also_where_it_runs(module, fleet, call):
    args = fleet.args(body=body("import time; time.sleep(60)"))
    first = call(module, args)
    anew = {**args, "anew": True, "replace": True}
    checked = call(module, {**anew, "state": "checked"})
    assert (checked["would_change"], checked["restarts"], checked["pid"]) == (True, True, first["pid"])
    second = call(module, anew)
    assert second["changed"] and second["pid"] != first["pid"] and second["log"] != first["log"]
    assert identity(second["pid"]) == second["identity"] and fleet.pids() == {second["pid"]}
    assert second["launch_sha256"] == first["launch_sha256"] and fleet.state["previous"] is None


def test_what_ran_is_kept_whole_and_a_restart_of_the_same_forgets_nothing(module, fleet, call):
    call(module, fleet.args(run="r1"))
    fleet.ready()
    args = fleet.args("--enable-metrics", replace=True, profile="other", stop_timeout=5, run="r2")
    assert call(module, args)["rc"] == 0
    kept = fleet.state["previous"]
    assert (kept["profile"], kept["script_text"], kept["port"], kept["host"]) == (
        "nomtp",
        fleet.args()["script"],
        fleet.port,
        "127.0.0.1",
    )
    assert (fleet.state["launched_in"], kept["launched_in"], kept["previous"]) == ("r2", "r1", None)
    os.kill(fleet.state["identity"]["pid"], signal.SIGKILL)
    assert sglang_process.wait_until(lambda: sglang_process.alive(fleet.state["identity"]) is None, 10)
    assert call(module, args)["changed"] is True
    assert fleet.state["previous"] == kept, "it died and was started anew: still nomtp ran before"


def test_what_never_served_is_nothing_to_go_back_to(module, fleet, call):
    good, bad = fleet.args(stop_timeout=5), fleet.args("--enable-metrics", replace=True, profile="bad", stop_timeout=5)
    third = fleet.args("--enable-cache-report", replace=True, profile="third", stop_timeout=5)

    def launched(args, ready=False):
        assert call(module, {**args, "replace": True})["changed"] is True
        if ready:
            fleet.ready()
        return (fleet.state["previous"] or {}).get("profile")

    assert launched(good, ready=True) is None
    assert launched(bad) == "nomtp"
    assert launched(good) is None, "back at nomtp: nothing else ever served"
    assert launched(third, ready=True) == "nomtp", "it served once, if not in its last boot"
    assert launched(bad) == "third"
    assert launched(good, ready=True) == "third"
    assert launched(bad) == "nomtp"
    assert launched(third) == "nomtp"


def test_what_a_cut_swap_brought_is_nothing_to_go_back_to(module, fleet, call):
    call(module, fleet.args())
    write_state(fleet.paths.swap, begun(boot_of(fleet.state), {"api-key": KEY}))
    call(module, fleet.args("--enable-metrics", replace=True, profile="cut", stop_timeout=5, run="r2"))
    assert fleet.state["previous"]["profile"] == "nomtp"
    call(module, fleet.args("--enable-cache-report", replace=True, profile="third", stop_timeout=5, run="r3"))
    assert fleet.state["previous"]["profile"] == "nomtp" and KEY not in Path(fleet.paths.state).read_text()


def test_what_a_swap_kept_is_restored_with_its_keys_and_its_script(module, load, fleet, call):
    swap = load("library", "sglang_swap")
    base = {"name": "n-gpu0", "slug": "sglang_gpu0", "root": str(fleet.root), "run": "r2", "who": "alice@laptop"}
    assert "tells of nothing that ran before" in call(module, fleet.stop_args(state="restored"))["msg"]
    first = call(module, fleet.args(secrets={"api-key": KEY}, run="r1"))
    bad = fleet.args("--enable-metrics", replace=True, stop_timeout=5, run="r2")
    kept = call(
        swap, {**base, "state": "begun", "wanted": {key: bad[key] for key in ("profile", "argv", "env", "port", "record")}}
    )
    assert kept["rc"] == 0, kept
    same = call(module, fleet.stop_args(state="restored", keep_bundle=True))
    assert (same["changed"], same["pid"], same["bundle"]) == (False, first["pid"], None), "nothing was stopped yet"
    assert same["untouched"] is True
    write_state(fleet.paths.state, {**fleet.state, "launched_at": "2026-01-01T00:00:00Z"})
    other = call(module, fleet.stop_args(state="restored"))
    assert (other["changed"], other["untouched"]) == (False, False), "the same flags, and someone else's boot"
    assert call(module, bad)["changed"] is True
    assert Path(bad["script_path"]).read_text() == bad["script"]
    back = call(module, fleet.stop_args(state="restored", stop_timeout=5, keep_bundle=True, because="too slow"))
    assert back["rc"] == 0 and back["changed"] is True and back["untouched"] is False and KEY not in json.dumps(back)
    with tarfile.open(back["bundle"]) as bundle:
        (verdict,) = (bundle.extractfile(name).read() for name in bundle.getnames() if name.endswith("/verdict.txt"))
        (launch,) = (json.load(bundle.extractfile(name)) for name in bundle.getnames() if name.endswith("/launch.json"))
    assert verdict == b"too slow\n" and "--enable-metrics" in launch["argv"], "of what was no good, not of what is put back"
    state = fleet.state
    assert (state["launch_sha256"], state["launched_in"], state["previous"]) == (first["launch_sha256"], "r1", None)
    assert Path(bad["script_path"]).read_text() == fleet.args()["script"]
    assert KEY in Path(fleet.paths.secrets).read_text()
    assert sglang_process.alive(state["identity"])


def test_a_damaged_record_restores_nothing_and_says_what_is_wrong(module, fleet, call):
    call(module, fleet.args())
    write_state(fleet.paths.swap, begun({**boot_of(fleet.state), "argv": "sglang"}))
    refused = call(module, fleet.stop_args(state="restored"))
    assert (
        refused["rc"] == 1 and "sglang_gpu0.swap.json is damaged, in its before, its argv is str: it is taken" in refused["msg"]
    )
    assert sglang_process.alive(fleet.state["identity"])


def test_starts_and_stops_are_remembered_and_those_of_a_swap_are_its_own(module, load, fleet, call):
    call(module, fleet.args(run="r1"))
    call(module, fleet.stop_args(because="tired", stop_timeout=5))
    lines = [json.loads(line) for line in Path(fleet.paths.history).read_text().splitlines()]
    assert [(line["what"], line["who"]) for line in lines] == [("started", "alice@laptop"), ("stopped", "bob@desk")]
    assert (lines[0]["after"], lines[0]["run"], lines[1]["before"], lines[1]["why"]) == ("nomtp", "r1", "nomtp", "tired")
    write_state(fleet.paths.swap, begun(boot_of(fleet.state)))
    call(module, fleet.args(run="r2"))
    call(module, fleet.stop_args(run="r2", stop_timeout=5))
    assert len(Path(fleet.paths.history).read_text().splitlines()) == 2
    call(module, fleet.args(run="r3"))
    call(module, fleet.stop_args(run="r4", stop_timeout=5))
    lines = [json.loads(line) for line in Path(fleet.paths.history).read_text().splitlines()[2:]]
    assert [(line["what"], line["run"]) for line in lines] == [("started", "r3"), ("stopped", "r4")], "no step of that swap"


def test_a_script_that_changed_alone_is_written_without_a_restart(module, fleet, call):
    args = fleet.args()
    pid = call(module, args)["pid"]
    args["script"] = args["script"] + "# a comment\n"
    answer = call(module, args)
    assert (answer["changed"], answer["pid"]) == (True, pid)
    assert Path(args["script_path"]).read_text().endswith("# a comment\n")


@pytest.mark.parametrize("state", ["checked", "started"])
def test_a_stranger_on_the_port_is_named_and_left_alone(module, fleet, call, python, state):
    stranger, _up = python(LISTEN, str(fleet.port))
    answer = call(module, fleet.args(state=state))
    assert (answer["failed"], answer["cause"]) == (True, "port")
    assert answer["msg"].startswith(f"n-gpu0: port {fleet.port} is taken by pid {stranger.pid} ({sys.executable} -c ")
    assert answer["msg"].endswith("which this fleet did not start: stop it, or give the server another port in the inventory")
    assert answer["listeners"][0]["pid"] == stranger.pid
    assert call(module, fleet.stop_args())["changed"] is False
    assert stranger.poll() is None


@pytest.mark.parametrize("state", ["checked", "started"])
def test_a_folder_that_cannot_be_written_is_refused(module, fleet, call, state):
    answer = call(module, {**fleet.args(state=state), "root": "/proc/sglang/fleet"})
    assert (answer["failed"], answer["cause"]) == (True, "root")
    assert answer["msg"].startswith("n-gpu0: the fleet's folder /proc/sglang/fleet can't be written (/proc: ")
    assert answer["msg"].endswith("choose another sglang_root, or give this user the right to write there")


def test_a_file_in_the_place_of_a_folder_is_named(module, fleet, call, tmp_path):
    (tmp_path / "file").write_text("x")
    answer = call(module, {**fleet.args(), "root": str(tmp_path / "file")})
    assert answer["failed"] is True
    assert answer["msg"].startswith("n-gpu0: ")
    assert str(tmp_path / "file") in answer["msg"]


def test_a_folder_that_is_not_named_from_the_root_is_no_endless_search(module, fleet, call, monkeypatch, tmp_path):
    def late(*_):
        raise TimeoutError("it searches for ever")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(2)
    try:
        answer = call(module, {**fleet.args(state="checked"), "root": "no/such/folder"})
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "it searches for ever" not in answer.get("msg", "")


# -- keys -------------------------------------------------------------------------------------------------------------
def test_a_key_is_in_a_file_of_its_user_and_nowhere_else(module, fleet, call):
    config = ["--config", fleet.paths.secrets]
    args = fleet.args(*config, secrets={"api-key": KEY, "admin-api-key": 'a"b: c'})
    answer = call(module, args)
    assert mode(fleet.paths.secrets) == 0o600
    assert Path(fleet.paths.secrets).read_text() == f'admin-api-key: "a\\"b: c"\napi-key: "{KEY}"\n'
    # What the task echoes of its own arguments is Ansible's and hidden by no_log.
    told = {name: value for name, value in answer.items() if name != "invocation"}
    assert KEY not in json.dumps(told)
    assert answer.get("invocation", {}).get("module_args", {}).get("secrets") != {"api-key": KEY, "admin-api-key": 'a"b: c'}
    for path in (fleet.paths.state, args["script_path"], answer["log"], *(f"/proc/{pid}/cmdline" for pid in fleet.pids())):
        assert KEY not in Path(path).read_text()
    assert KEY.encode() not in Path(f"/proc/{answer['pid']}/environ").read_bytes()
    assert call(module, args)["changed"] is False
    call(module, fleet.args(replace=True, stop_timeout=5))
    assert not os.path.exists(fleet.paths.secrets)


@pytest.mark.parametrize("key", ["-dash", "two\nlines", "bell\a", 5, "ключ"])
def test_a_key_that_sglang_cannot_read_is_refused(module, fleet, call, key):
    answer = call(module, fleet.args(secrets={"api-key": key}))
    assert answer["cause"] == "usage"
    assert answer["msg"].startswith("n-gpu0: api-key is not a key that SGLang can read from its configuration")
    assert fleet.state == {}


# -- logs -------------------------------------------------------------------------------------------------------------
def test_each_boot_has_a_log_of_its_own_and_the_newest_a_link(module, fleet, call, helpers):
    logs = []
    for _ in range(3):
        logs.append(call(module, fleet.args())["log"])
        helpers.until(lambda: "REPLAY of" in Path(logs[-1]).read_text())
        assert os.path.realpath(fleet.paths.newest_log) == logs[-1]
        # It is stopped once it has written: on a busy machine its Python takes seconds to get there.
        helpers.until(lambda: "REPLAY of" in Path(logs[-1]).read_text(), seconds=60)
        call(module, fleet.stop_args(stop_timeout=5))
    assert len(set(logs)) == 3


def test_only_the_newest_logs_are_kept(module, fleet, call):
    fleet.paths.make()
    old = [Path(fleet.paths.logs) / f"20200101T0000{number:02}Z.log" for number in range(25)]
    for path in old:
        path.write_text("old")
    log = call(module, fleet.args())["log"]
    kept = sorted(os.listdir(fleet.paths.logs))
    assert len(kept) == 20
    assert kept[-1] == os.path.basename(log)
    assert kept[0] == old[6].name


def test_a_server_that_ends_at_once_is_reported_with_its_cause(module, fleet, call):
    script = "echo 'sglang serve: error: unrecognized arguments: --x' >&2; exit 2"
    answer = call(module, fleet.args(body=script))
    assert (answer["failed"], answer["cause"]) == (True, "died")
    assert answer["msg"] == (
        f"n-gpu0 ended at once with exit code 2: this SGLang does not know --x; whole log: {answer['log']}"
    )
    assert answer["lines"] == ["sglang serve: error: unrecognized arguments: --x"]


def test_a_server_that_ends_at_once_for_no_known_cause_is_reported_with_its_last_line(module, fleet, call):
    answer = call(module, fleet.args(body="echo first; echo 'the last words'; exit 7"))
    assert f"exit code 7: the last words; whole log: {answer['log']}" in answer["msg"]
    silent = call(module, fleet.args(body="exit 3"))
    assert "ended at once with exit code 3: no output; whole log: " in silent["msg"]


# -- stopped ----------------------------------------------------------------------------------------------------------
def test_stopped_twice(module, fleet, call, helpers):
    started = call(module, fleet.args())
    helpers.until(lambda: "ready to roll" in Path(started["log"]).read_text())
    foretold = call(module, fleet.stop_args(), check=True)
    assert (foretold["changed"], foretold["pid"]) == (True, started["pid"])
    assert read_stat(started["pid"]).state not in "ZX"
    answer = call(module, fleet.stop_args(because="a test"))
    assert (answer["changed"], answer["pid"], answer["killed"]) == (True, None, [])
    assert answer["running"]["pid"] == started["pid"]
    assert fleet.pids() == set()
    assert "Draining requests" in Path(started["log"]).read_text()
    state = fleet.state
    assert (state["stopped_by"], state["stopped_because"]) == ("bob@desk", "a test")
    assert state["stopped_at"] >= state["launched_at"]
    again = call(module, fleet.stop_args())
    assert (again["changed"], again["elapsed"], again["pid"]) == (False, 0.0, None)
    assert fleet.state == state


def test_a_stop_where_nothing_ever_was(module, fleet, call):
    answer = call(module, fleet.stop_args())
    assert (answer["rc"], answer["changed"]) == (0, False)
    assert not fleet.root.exists()


def test_a_server_that_ignores_sigterm_is_killed_after_its_time(module, fleet, call, helpers):
    started = call(module, fleet.args(body=body(IGNORES_SIGTERM)))
    helpers.until(lambda: "deaf" in Path(started["log"]).read_text())
    before = time.monotonic()
    answer = call(module, fleet.stop_args(stop_timeout=1))
    assert 1 <= time.monotonic() - before < 8
    assert [killed["pid"] for killed in answer["killed"]] == [started["pid"]]
    assert "SIG_IGN" in answer["killed"][0]["command"]
    assert 1 <= answer["elapsed"] < 8
    assert fleet.pids() == set()


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
print(child.pid, flush=True)
time.sleep(60)
"""


def test_children_of_a_dead_leader_are_found_and_killed(module, fleet, call, helpers):
    # The child wiped its environment, as SGLang's processes do; its session is all that is left to know it by.
    args = {**fleet.args(body=body(TREE)), "argv": [fleet.python, "-m", "sglang.launch_server", "--model-path", "/m"]}
    started = call(module, args)
    child = int(helpers.until(lambda: Path(started["log"]).read_text().strip()))
    # The state names the interpreter that the children run.
    write_state(fleet.paths.state, {**fleet.state, "argv": [sys.executable, *args["argv"][1:]]})
    os.kill(started["pid"], signal.SIGKILL)
    helpers.until(lambda: sglang_process.alive(started["identity"]) is None)
    assert read_stat(child).state not in "ZX"
    answer = call(module, fleet.stop_args())
    assert answer["changed"] is True
    assert [killed["pid"] for killed in answer["killed"]] == [child]
    assert read_stat(child) is None or read_stat(child).state in "ZX"
    assert call(module, fleet.stop_args())["changed"] is False


def test_a_start_after_a_crash_clears_what_the_crash_left(module, fleet, call, helpers):
    started = call(module, fleet.args(body=body(TREE)))
    child = int(helpers.until(lambda: Path(started["log"]).read_text().strip()))
    write_state(fleet.paths.state, {**fleet.state, "argv": [sys.executable]})
    os.kill(started["pid"], signal.SIGKILL)
    helpers.until(lambda: sglang_process.alive(started["identity"]) is None)
    again = call(module, fleet.args())
    assert (again["rc"], again["changed"]) == (0, True)
    assert read_stat(child) is None or read_stat(child).state in "ZX"


def test_files_of_a_crashed_server_in_shared_memory_are_removed(module, fleet, call, boot, tmp_path):
    path = Path(f"/dev/shm/sglang_test_{os.getpid()}_left")
    path.write_text("x")
    fleet.paths.make()
    gone = {"pid": 2**22 + 1, "start_ticks": 1, "boot_id": sglang_process.boot_id(), "sid": 2**22 + 1}
    launched = {"port": fleet.port, "log": "/no/log", "launched_epoch": 1.0, "launched_boot_seconds": 1.0}
    write_state(fleet.paths.state, {"identity": gone, "shared_memory": [str(path)], "argv": ["/venv/python"], **launched})
    assert call(module, fleet.stop_args(), check=True)["changed"] is True
    assert path.exists()
    assert call(module, fleet.stop_args())["changed"] is True
    assert not path.exists()
    assert call(module, fleet.stop_args())["changed"] is False


def test_a_stop_of_a_server_that_died_writes_down_that_it_was_wanted(module, fleet, call, helpers):
    started = call(module, fleet.args(body=body("import time; time.sleep(60)")))
    os.kill(started["pid"], signal.SIGKILL)
    helpers.until(lambda: sglang_process.alive(started["identity"]) is None)
    assert call(module, fleet.stop_args(because="a test"), check=True)["changed"] is True, "its temporary files are left"
    assert fleet.state["stopped_at"] is None
    assert call(module, fleet.stop_args(because="a test"))["changed"] is True
    assert call(module, fleet.stop_args(because="another"))["changed"] is False
    assert (fleet.state["stopped_by"], fleet.state["stopped_because"]) == ("bob@desk", "a test")
    assert fleet.state["stopped_at"] is not None


def held(pid):
    return [{"index": 0, "processes": [{"pid": pid, "used_gib": 1.0}]}]


def test_a_stop_waits_until_the_cards_memory_is_back(module, fleet, call, monkeypatch):
    record = {"release": "0.5.17", "device": "cuda", "flags": []}
    pid = call(module, fleet.args(body=body("import time; time.sleep(60)"), record=record))["pid"]
    answers = iter([held(pid), held(pid), held(pid + 1)])
    monkeypatch.setattr(module, "gpus", lambda: next(answers))
    answer = call(module, fleet.stop_args(stop_timeout=5))
    assert (answer["rc"], answer["changed"]) == (0, True)
    assert list(answers) == []


def test_a_card_that_does_not_give_its_memory_back_is_named(module, fleet, call, monkeypatch):
    record = {"release": "0.5.17", "device": "cuda", "flags": []}
    pid = call(module, fleet.args(body=body("import time; time.sleep(60)"), record=record))["pid"]
    monkeypatch.setattr(module, "gpus", lambda: held(pid))
    monkeypatch.setattr(module, "GPU_SECONDS", 0.3)
    answer = call(module, fleet.stop_args(stop_timeout=5))
    assert (answer["failed"], answer["cause"]) == (True, "gpu_memory")
    assert answer["msg"].startswith("n-gpu0: its processes are gone, but its GPU still counts memory for them")
    assert fleet.pids() == set()


# -- nothing is left ---------------------------------------------------------------------------------------------------
QUICK_FILE = """
import sys, tempfile, time
open(sys.argv[1] + "/sglang_loads_quick.shm", "x").close()
tempfile.NamedTemporaryFile(delete=False)
print(tempfile.gettempdir(), flush=True)
time.sleep(1)
"""
HOLDS = "import sys; f = open(sys.argv[1], 'x'); print('up', flush=True); input()"


def test_files_that_nobody_saw_in_use_are_removed_and_others_are_not(
    module, fleet, call, python, helpers, monkeypatch, tmp_path
):
    """A failed start makes its file in /dev/shm and dies within the moment: no look finds it mapped."""
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(sglang_process, "SHARED_MEMORY", str(memory))
    (memory / "sglang_loads_of_before.shm").write_text("somebody's")
    args = fleet.args(body="exec " + shlex.join([sys.executable, "-c", QUICK_FILE, str(memory)]))
    started = call(module, args)
    temporary = helpers.until(lambda: Path(started["log"]).read_text().strip())
    python(HOLDS, str(memory / "sglang_loads_of_one_that_lives.shm"), stdin=subprocess.PIPE)
    (memory / "sglang_download_lock_0").write_text("of all boots")
    helpers.until(lambda: sglang_process.alive(started["identity"]) is None)
    assert (memory / "sglang_loads_quick.shm").exists() and len(os.listdir(temporary)) == 1
    assert call(module, fleet.stop_args())["changed"] is True
    assert sorted(os.listdir(memory)) == [
        "sglang_download_lock_0", "sglang_loads_of_before.shm", "sglang_loads_of_one_that_lives.shm",
    ]  # fmt: skip
    assert not Path(temporary).exists()


def test_no_time_to_stop_is_a_kill_at_once(module, fleet, call, helpers):
    started = call(module, fleet.args(body=body(IGNORES_SIGTERM)))
    helpers.until(lambda: "deaf" in Path(started["log"]).read_text())
    answer = call(module, fleet.stop_args(stop_timeout=0))
    assert [killed["pid"] for killed in answer["killed"]] == [started["pid"]]
    assert answer["elapsed"] < 2 and fleet.pids() == set()


def test_a_halted_server_can_be_stopped(module, fleet, call, helpers):
    started = call(module, fleet.args())
    helpers.until(lambda: "ready to roll" in Path(started["log"]).read_text())
    os.kill(started["pid"], signal.SIGSTOP)
    answer = call(module, fleet.stop_args(stop_timeout=20))
    assert (answer["rc"], answer["killed"]) == (0, []), "it went on, drained and ended by itself"
    assert fleet.pids() == set()


def test_a_bundle_has_all_and_no_secret(module, fleet, call, helpers):
    script = f"echo \"server_args=ServerArgs(api_key='{KEY}')\"; exec sleep 60"
    env = {"HF_TOKEN": "hf-of-the-test", "PLAIN": f"x{KEY}x"}
    started = call(module, fleet.args(body=script, env=env, secrets={"api-key": KEY}))
    helpers.until(lambda: KEY in Path(started["log"]).read_text())
    answer = call(module, fleet.stop_args(stop_timeout=0, keep_bundle=True, because="it did not start"))
    path = Path(answer["bundle"])
    assert path.parent == fleet.root / "bundles/sglang_gpu0" and mode(path) == 0o600 and mode(path.parent) == 0o700
    with tarfile.open(path) as bundle:
        held = {name.partition("/")[2]: bundle.extractfile(name).read().decode() for name in bundle.getnames()}
    assert set(held) == {"server.log", "start.sh", "launch.json", "node.json", "kernel.txt", "verdict.txt"}
    assert held["verdict.txt"] == "it did not start\n"
    assert "server_args=ServerArgs(api_key='********')" in held["server.log"]
    launch, node = json.loads(held["launch.json"]), json.loads(held["node.json"])
    assert (launch["name"], launch["env"]["HF_TOKEN"], launch["argv"]) == ("n-gpu0", "********", fleet.args()["argv"])
    assert started["pid"] in [process["pid"] for process in node["processes"]]
    assert node["boot_id"] == sglang_process.boot_id() and node["host_memory"]["total_gb"] > 0
    assert not any(secret in text for text in held.values() for secret in (KEY,))
    assert KEY not in Path(started["log"]).read_text(), "a stop takes keys out of the log too"


def test_only_the_boot_that_is_named_is_stopped(module, fleet, call):
    first = call(module, fleet.args())
    newer = call(module, fleet.args("--enable-metrics", replace=True, profile="other", stop_timeout=5))
    told = call(module, fleet.stop_args(boot=first["log"], keep_bundle=True, stop_timeout=0))
    assert (told["changed"], told["pid"], told["bundle"]) == (False, newer["pid"], None)
    assert sglang_process.alive(newer["identity"]) is not None and fleet.state["stopped_at"] is None
    assert call(module, fleet.stop_args(boot=newer["log"], stop_timeout=0))["changed"] is True
    assert sglang_process.alive(newer["identity"]) is None


def test_only_the_newest_bundles_are_kept_and_none_is_no_harm(module, fleet, call, monkeypatch):
    assert call(module, fleet.stop_args(keep_bundle=True))["bundle"] is None
    folder = fleet.root / "bundles/sglang_gpu0"
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"20200101T0000{number:02}Z.tar.gz").write_text("old")
    call(module, fleet.args())
    kept = call(module, fleet.stop_args(keep_bundle=True, stop_timeout=0))["bundle"]
    assert len(os.listdir(folder)) == 10 and os.path.basename(kept) in os.listdir(folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sglang_managed, "write_bundle", full)
    call(module, fleet.args())
    answer = call(module, fleet.stop_args(keep_bundle=True, stop_timeout=0))
    assert (answer["rc"], answer["bundle"]) == (0, None)
    assert fleet.pids() == set()


# -- disks, state files, identities ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("disk", "room"),
    [({"f_bavail": 5 << 8, "f_favail": 9}, "room for 5 MiB"), ({"f_bavail": 1 << 20, "f_favail": 0}, "no file")],
)
def test_a_full_disk_is_refused_before_anything_is_touched(module, fleet, call, monkeypatch, disk, room):
    found = SimpleNamespace(f_frsize=4096, f_files=10, f_flag=0, **disk)
    monkeypatch.setattr(module.os, "statvfs", lambda path: found)
    answer = call(module, fleet.args(state="checked"))
    assert (answer["failed"], answer["cause"]) == (True, "disk_full")
    assert room in answer["msg"] and "free space there, or choose another sglang_root" in answer["msg"]
    assert fleet.state == {}


@pytest.mark.parametrize("state", ["checked", "started"])
@pytest.mark.parametrize("place", ["logs", "logs/sglang_gpu0", "run", "scripts"])
def test_a_place_that_takes_no_file_is_named(module, fleet, call, place, state):
    path = fleet.root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file, where a folder is wanted")
    answer = call(module, fleet.args(state=state))
    assert (answer["failed"], answer["cause"]) == (True, "root")
    assert answer["msg"].startswith(f"n-gpu0: {path} is a file ") and answer["msg"].endswith("a folder there: move it away")
    assert fleet.pids() == set()


DAMAGE = '{"identity": {"pid": 47'


def test_a_damaged_state_file_is_told_and_a_deploy_goes_on(module, fleet, call, monkeypatch, warned):
    fleet.paths.make()
    monkeypatch.setattr(sglang_managed.tempfile, "tempdir", str(fleet.root))
    Path(fleet.paths.state).write_text(DAMAGE)
    assert call(module, fleet.args())["changed"] is True
    assert len(warned) == 1 and warned[0].startswith(f"n-gpu0: {fleet.paths.state} is damaged, it is no JSON")
    assert fleet.state["identity"]["pid"] in fleet.pids()


@pytest.mark.parametrize("state", ["checked", "started"])
@pytest.mark.parametrize("name", ["state", "lock", "secrets"])
def test_a_folder_where_the_fleet_keeps_a_file_is_told_before_anything_starts(module, fleet, call, state, name):
    fleet.paths.make()
    folder = getattr(fleet.paths, name)
    os.mkdir(folder)
    answer = call(module, fleet.args(state=state))
    assert answer["cause"] == "root"
    assert answer["msg"] == f"n-gpu0: {folder} is a folder and the fleet keeps a file there: move it away"
    assert fleet.pids() == set()


def test_a_server_whose_state_file_was_damaged_is_not_started_twice_and_can_be_stopped(module, fleet, call, helpers, warned):
    started = call(module, fleet.args())
    helpers.until(lambda: "ready to roll" in Path(started["log"]).read_text())
    Path(fleet.paths.state).write_text(DAMAGE)
    refused = call(module, fleet.args())
    assert refused["cause"] == "running" and f"runs as pid {started['pid']}, " in refused["msg"]
    stopped = call(module, fleet.stop_args(stop_timeout=20))
    assert (stopped["rc"], stopped["changed"], stopped["killed"]) == (0, True, [])
    assert fleet.pids() == set() and fleet.state["stopped_by"] == "bob@desk"
    assert len(warned) == 2
    assert call(module, fleet.stop_args())["changed"] is False and len(warned) == 2


PRINTS_ITS_KEY = f"""
import time
print("server_args=ServerArgs(api_key='{KEY}')", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("text", ["", DAMAGE, '{"schema": 99}'])
def test_a_stop_with_a_damaged_state_leaves_no_key_and_no_folder(module, fleet, call, helpers, warned, text):
    started = call(module, fleet.args(secrets={"api-key": KEY}, body=body(PRINTS_ITS_KEY)))
    helpers.until(lambda: KEY in Path(started["log"]).read_text())
    temporary = fleet.state["temporary"]
    Path(temporary, "left").write_text("")
    Path(fleet.paths.state).write_text(text)
    assert call(module, fleet.stop_args(stop_timeout=5))["changed"] is True
    assert fleet.pids() == set()
    assert f"api_key='{'*' * len(KEY)}'" in Path(started["log"]).read_text()
    assert not os.path.exists(temporary)
    assert len(warned) == 1 and warned[0].startswith(f"n-gpu0: {fleet.paths.state} is ")


def test_a_dead_server_with_a_damaged_state_leaves_no_key_and_its_folder_is_told(
    module, fleet, call, helpers, monkeypatch, warned, tmp_path
):
    monkeypatch.setattr(sglang_managed.tempfile, "tempdir", str(tmp_path))
    started = call(module, fleet.args(secrets={"api-key": KEY}, body=body(PRINTS_ITS_KEY)))
    helpers.until(lambda: KEY in Path(started["log"]).read_text())
    temporary = fleet.state["temporary"]
    os.kill(started["pid"], signal.SIGKILL)
    helpers.until(lambda: not fleet.pids())
    Path(fleet.paths.state).write_text("")
    assert call(module, fleet.stop_args())["changed"] is True
    assert KEY not in Path(started["log"]).read_text()
    assert os.path.isdir(temporary)
    assert len(warned) == 2 and f"such as {temporary}, and remove them" in warned[1]


def test_a_folder_that_is_not_the_fleets_is_never_removed(module, fleet, call, monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_managed.tempfile, "tempdir", str(tmp_path))
    theirs, link = tmp_path / "theirs", tmp_path / "sglang_fleet_link"
    theirs.mkdir()
    link.symlink_to(theirs)
    for place in (theirs, link):
        call(module, fleet.args(env={"TMPDIR": str(place)}, body=f"export TMPDIR={place}\nexec sleep 60"))
        Path(fleet.paths.state).write_text("")
        assert call(module, fleet.stop_args(stop_timeout=5))["changed"] is True
        assert theirs.is_dir() and link.is_symlink()


def test_a_stop_on_a_full_disk_is_written_down(module, fleet, call, monkeypatch, warned):
    call(module, fleet.args())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sglang_state, "write_atomic", full)
    assert call(module, fleet.stop_args(stop_timeout=20, because="it did not become ready"))["changed"] is True
    assert (warned, fleet.state["stopped_by"], fleet.state["stopped_because"]) == ([], "bob@desk", "it did not become ready")


@pytest.mark.parametrize("other", [{"boot_id": "of before the restart"}, {"start_ticks": 1}])
def test_a_pid_of_another_boot_or_of_another_process_is_never_touched(module, fleet, call, spawn, other):
    """After a restart of the node, and after a pid was given anew: the process there now is a stranger's."""
    stranger = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    args = fleet.args()
    fleet.paths.make()
    written = {"name": "n-gpu0", "port": fleet.port, "log": "/no/log", "launched_epoch": 1.0, "launched_boot_seconds": 1.0}
    identity_then = {**identity(stranger.pid), **other}
    launched = {"argv": [sys.executable], "launch_sha256": "0" * 64, "identity": identity_then}
    write_state(fleet.paths.state, {**written, **launched})
    assert call(module, fleet.stop_args())["changed"] is False
    write_state(fleet.paths.state, {**written, **launched})
    assert call(module, args)["changed"] is True
    assert stranger.poll() is None
    assert fleet.state["identity"]["pid"] != stranger.pid


def test_a_zombie_of_ours_is_dead_and_a_start_goes_on(module, fleet, call):
    zombie = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    fleet.paths.make()
    written = {"name": "n-gpu0", "port": fleet.port, "log": "/no/log", "launched_epoch": 1.0, "launched_boot_seconds": 1.0}
    write_state(fleet.paths.state, {**written, "identity": identity(zombie.pid), "argv": [sys.executable]})
    try:
        assert call(module, fleet.args())["changed"] is True
    finally:
        zombie.wait()


def test_a_start_is_marked_before_its_script_runs_a_line(module, fleet, call):
    """The marks find a start that was cut before it was written down, however early."""
    pid = call(module, {**fleet.args(), "script": "#!/bin/sh\nsleep 60\n"})["pid"]
    assert pid in [found.pid for found in sglang_process.marked(str(fleet.root), "n-gpu0")]


# -- by hand, cut, locked ---------------------------------------------------------------------------------------------
def test_a_server_started_by_hand_is_not_started_over_and_can_be_stopped(module, fleet, call, python):
    mark = {**os.environ, "SGLANG_FLEET_ROOT": str(fleet.root), "SGLANG_FLEET_SERVER": "n-gpu0"}
    by_hand, _up = python(LISTEN, str(fleet.port), "sglang.launch_server", env=mark, start_new_session=False)
    answer = call(module, fleet.args())
    assert (answer["failed"], answer["cause"]) == (True, "running")
    assert answer["msg"].startswith(f"n-gpu0 runs as pid {by_hand.pid}, started by hand or its state file is gone: ")
    assert by_hand.poll() is None
    stopped = call(module, fleet.stop_args(stop_timeout=5))
    assert (stopped["rc"], stopped["changed"]) == (0, True)
    assert by_hand.wait(5) == -signal.SIGTERM
    assert call(module, fleet.stop_args())["changed"] is False


def test_a_server_started_by_hand_is_not_killed_before_it_listens(module, fleet, call, spawn):
    mark = {**os.environ, "SGLANG_FLEET_ROOT": str(fleet.root), "SGLANG_FLEET_SERVER": "n-gpu0"}
    by_hand = spawn(
        [sys.executable, "-c", "import time; time.sleep(60)", "sglang.launch_server"], env=mark, start_new_session=False
    )
    answer = call(module, fleet.args())
    assert (answer["failed"], answer["cause"]) == (True, "running")
    assert by_hand.poll() is None


def test_a_running_server_of_another_name_in_the_same_folder_is_left_alone(module, fleet, call):
    assert call(module, fleet.args())["changed"] is True
    pid = fleet.state["identity"]["pid"]
    for arguments in (fleet.args(name="m-gpu0"), fleet.stop_args(name="m-gpu0")):
        answer = call(module, arguments)
        assert (answer["failed"], answer["cause"]) == (True, "owner")
        assert "belongs to n-gpu0" in answer["msg"] and "sglang_root" in answer["msg"]
    assert fleet.state["identity"]["pid"] == pid and fleet.state["stopped_at"] is None


def test_replace_ends_a_server_that_was_started_by_hand(module, fleet, call, python):
    mark = {**os.environ, "SGLANG_FLEET_ROOT": str(fleet.root), "SGLANG_FLEET_SERVER": "n-gpu0"}
    by_hand, _up = python(LISTEN, str(fleet.port), "sglang.launch_server", env=mark, start_new_session=False)
    answer = call(module, fleet.args(replace=True, stop_timeout=5))
    assert (answer["rc"], answer["changed"]) == (0, True)
    assert by_hand.wait(5) == -signal.SIGTERM
    assert fleet.state["identity"]["pid"] == answer["pid"] != by_hand.pid


def test_a_start_that_was_cut_before_it_was_written_down_is_taken_over(module, fleet, call):
    args = fleet.args()
    started = call(module, args)
    write_state(fleet.paths.state, {**fleet.state, "identity": None, "launching": True})
    again = call(module, args)
    assert (again["changed"], again["pid"]) == (False, started["pid"])
    # What follows reads the state file: it must name the process that was found.
    assert fleet.state["identity"] == started["identity"]


def test_a_server_that_another_run_works_on_is_left_to_it(module, fleet, call):
    fleet.paths.make()
    with lock(fleet.paths.lock, "carol@desk", 0):
        for args in (fleet.args(lock_timeout=0), fleet.stop_args(lock_timeout=0)):
            answer = call(module, args)
            assert (answer["failed"], answer["cause"]) == (True, "locked")
            assert answer["msg"].startswith(f"n-gpu0 is being worked on by carol@desk, pid {os.getpid()}, since 20")
    assert fleet.state == {}
    assert call(module, fleet.args(lock_timeout=0))["rc"] == 0


def test_a_port_in_use_by_the_running_server_itself_is_no_stranger(module, fleet, call, helpers):
    args = fleet.args()
    pid = call(module, args)["pid"]

    def answers():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", fleet.port)) == 0

    helpers.until(answers)
    assert call(module, args)["pid"] == pid
