# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each state that a server can be in, told from real processes, logs and answers."""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
from ansible.module_utils.sglang_process import boot_seconds, command, of_session
from ansible.module_utils.sglang_state import write_state

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
time.sleep(60)
"""
WEIGHTS = "[2026-01-01 00:00:00] Load weight begin. avail mem=1.0 GB\n"


@pytest.fixture
def module(load):
    return load("library", "sglang_server_info")


@pytest.fixture
def look(module, call):
    """The entry of one server, by its boot or by folder and port."""

    def _look(boot=None, root=None, port=None, **more):
        server = {"name": "n-gpu0", "slug": "sglang_gpu0", "port": boot.port if boot else port}
        args = {"root": boot.paths.root if boot else str(root), "servers": [server], "timeout": 3, **more}
        answer = call(module, args)
        assert (answer["rc"], answer["changed"]) == (0, False)
        (entry,) = answer["servers"]
        return entry

    return _look


@pytest.fixture
def ready(boot, helpers):
    def _ready(*args, **kwargs):
        started = boot(*args, **kwargs)
        helpers.until(lambda: started.logged("ready to roll"))
        return started

    return _ready


def test_a_server_that_serves(ready, look):
    started = ready("e96_nomtp")
    entry = look(started)
    told = {name: entry[name] for name in ("name", "state", "detail", "stage", "profile", "model", "release", "pid")}
    assert told == {
        "name": "n-gpu0", "state": "ready", "detail": None, "stage": "ready", "profile": "nomtp", "model": "m",
        "release": "0.5.17", "pid": started.process.pid,
    }  # fmt: skip
    assert (entry["running"], entry["waiting"], entry["token_usage"], entry["output_tok_s"]) == (0, 0, 0.0, 0.0)
    assert (entry["cap"], entry["kv_tokens"], entry["accept_length"]) == (18, 241196, None)
    assert 0 <= entry["uptime_s"] < 30
    assert entry["host_rss_gib"] > 0
    assert (entry["log"], entry["launched_at"]) == (str(started.log), "2026-01-01T00:00:00Z")


def test_a_server_with_a_key_is_asked_with_it(ready, look):
    started = ready("e96_nomtp", argv=["--api-key", "k"])
    assert (look(started)["state"], look(started)["cap"]) == ("ready", None)
    with open(started.paths.secrets, "w", encoding="utf-8") as stream:
        stream.write('api-key: "k"\n')
    entry = look(started)
    assert (entry["state"], entry["cap"]) == ("ready", 18)
    assert '"k"' not in json.dumps({name: value for name, value in entry.items() if name != "started_with"})


def test_a_start_under_way(boot, look, helpers):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    helpers.until(lambda: started.logged("Load weight begin"))
    entry = look(started, stage_limits={"weights": 10**12})  # a recording's lines have the times of the recording
    assert (entry["state"], entry["stage"], entry["detail"], entry["running"]) == ("starting", "weights", None, None)


def launched(seconds):
    """What a state file says of a launch so many seconds ago."""
    return {"launched_epoch": time.time() - seconds, "launched_boot_seconds": boot_seconds() - seconds}


@pytest.mark.parametrize("limit", [1, "1"])
def test_a_start_that_hangs(boot, look, limit):
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(time.time() - 60))
    started = boot(command=SLEEP, log=WEIGHTS.replace("[2026-01-01 00:00:00]", stamp), **launched(90))
    assert look(started)["state"] == "starting"
    entry = look(started, stage_limits={"weights": limit})
    assert (entry["state"], entry["stage"]) == ("stuck", "weights")
    assert entry["detail"].startswith("no new stage for 6") and entry["detail"].endswith(" s")


@pytest.mark.parametrize("jump", [-86400, 86400])
def test_a_clock_that_jumped_makes_no_start_stuck(boot, look, jump):
    """The stage began a second ago, by a clock that someone has set by a day since the launch."""
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(time.time() + jump))
    started = boot(command=SLEEP, log=WEIGHTS.replace("[2026-01-01 00:00:00]", stamp), **launched(30))
    assert look(started, stage_limits={"weights": 60})["state"] == "starting"


def test_a_start_that_failed_and_lives_on(boot, look, helpers):
    started = boot("f_port_used", speed=1000)
    helpers.until(lambda: started.logged("address already in use"))
    entry = look(started)
    assert (entry["state"], entry["detail"]) == ("stuck", f"port {started.port} was taken by another process during the start")


def test_a_server_that_does_not_answer(ready, look):
    started = ready("e96_nomtp", fault="health_hang")
    entry = look(started, timeout=0.3)
    assert (entry["state"], entry["detail"]) == ("stuck", "no answer from /health within 0.3 s")
    assert (entry["pid"], entry["stage"]) == (started.process.pid, "ready")


def test_a_server_that_says_ready_and_has_no_port(ready, look):
    entry = look(ready("e96_nomtp", fault="no_http"))
    assert (entry["state"], entry["detail"]) == ("stuck", "connection refused")


@pytest.mark.parametrize(
    ("log", "detail"),
    [
        (
            WEIGHTS + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 340.00 MiB. GPU",
            "the weights do not fit on the GPU: 340.00 MiB more were wanted (stage weights)",
        ),
        (
            WEIGHTS + "Subprocess detokenizer (pid=5) crashed with exit code -9. Trig",
            "detokenizer (pid 5) died with exit code -9 (stage weights)",
        ),
        (WEIGHTS, "its process is gone without a word in its log: kill -9, or the kernel out of memory"),
        ("", "its process is gone without a word in its log: kill -9, or the kernel out of memory"),
    ],
)
def test_a_server_that_died_by_itself(boot, look, log, detail):
    started = boot(command=SLEEP, log=log)
    started.kill()
    entry = look(started)
    assert (entry["state"], entry["detail"], entry["pid"], entry["uptime_s"]) == ("dead", detail, None, None)
    assert entry["profile"] == "nomtp"


def test_a_server_that_died_with_its_log_gone(boot, look):
    started = boot(command=SLEEP)
    started.kill()
    os.unlink(started.log)
    assert look(started)["detail"] == "its process is gone, and so is its log"


def test_a_server_of_before_the_nodes_restart(boot, look):
    started = boot(command=SLEEP)
    known = {**started.state["identity"], "boot_id": "another"}
    write_state(started.paths.state, {**started.state, "identity": known})
    entry = look(started)
    assert (entry["state"], entry["detail"]) == ("dead", "the node was restarted since its launch")


def test_a_start_that_is_being_written_down_is_no_restart_of_the_node(boot, look):
    started = boot(command=SLEEP)
    write_state(started.paths.state, {**started.state, "identity": None, "launching": True})
    entry = look(started)
    assert entry["detail"] != "the node was restarted since its launch"


def test_a_server_that_was_stopped(boot, look, tmp_path, helpers):
    started = boot(command=SLEEP, stopped_at="2026-01-02T00:00:00Z", stopped_because="did not start: why")
    started.kill()
    assert (look(started)["state"], look(started)["detail"]) == ("stopped", "did not start: why")
    never = look(root=tmp_path / "nowhere", port=helpers.free_port())
    assert (never["state"], never["detail"], never["profile"], never["log"]) == ("stopped", None, None, None)


def test_a_stranger_on_the_port(look, python, tmp_path, helpers):
    port = helpers.free_port()
    stranger, _up = python(LISTEN, str(port))
    entry = look(root=tmp_path, port=port)
    assert entry["state"] == "stranger"
    assert entry["detail"].startswith(f"port {port} belongs to pid {stranger.pid} ({sys.executable} -c ")


def test_a_server_started_by_hand_is_shown_as_a_strangers(look, python, tmp_path, helpers):
    """As the start script says of itself."""
    port = helpers.free_port()
    mark = {**os.environ, "SGLANG_FLEET_ROOT": str(tmp_path), "SGLANG_FLEET_SERVER": "n-gpu0"}
    by_hand, _up = python(LISTEN, str(port), "sglang.launch_server", env=mark, start_new_session=False)
    entry = look(root=tmp_path, port=port)
    assert entry["state"] == "stranger"
    assert entry["detail"] == f"runs as pid {by_hand.pid}, started by hand or its state file is gone"


def test_servers_are_told_in_the_order_asked_and_asked_at_once(module, call, ready, boot):
    slow = ready("e96_nomtp", fault="health_hang", name="n-gpu0")
    slow_too = ready("e96_nomtp", fault="health_hang", name="n-gpu1")
    servers = [
        {"name": "n-gpu1", "slug": "sglang_gpu1", "port": slow_too.port},
        {"name": "n-gpu0", "slug": "sglang_gpu0", "port": slow.port},
    ]
    before = time.monotonic()
    answer = call(module, {"root": slow.paths.root, "servers": servers, "timeout": 1})
    assert time.monotonic() - before < 1.9
    assert [(entry["name"], entry["pid"]) for entry in answer["servers"]] == [
        ("n-gpu1", slow_too.process.pid),
        ("n-gpu0", slow.process.pid),
    ]
    assert set(answer["node"]) == {"gpus", "host_memory", "boot_id"}


def test_the_cards_memory_that_a_servers_processes_hold(ready, look, module, monkeypatch):
    started = ready("e96_nomtp")
    used = [{"pid": started.process.pid, "used_gib": 50.0}, {"pid": 1, "used_gib": 9.0}]
    monkeypatch.setattr(module, "gpus", lambda: [{"index": 0, "processes": used}])
    assert look(started)["gpu_memory_gib"] == 50.0


def test_without_requests_process_and_log_still_tell(ready, look, module, monkeypatch):
    monkeypatch.setattr(module, "requests", None)
    entry = look(ready("e96_nomtp"))
    assert (entry["state"], entry["stage"], entry["running"]) == ("ready", "ready", None)
    assert entry["detail"] == "not asked over HTTP: this Python has no module requests"


def test_a_server_whose_child_was_killed_is_told_by_its_log_and_not_asked(ready, look, helpers):
    started = ready("e96_nomtp")
    lost = next(stat for stat in of_session(started.process.pid) if command(stat.pid).startswith("replay::detokenizer"))
    os.kill(lost.pid, 9)
    helpers.until(lambda: started.logged("crashed with exit code"))
    before = time.monotonic()
    entry = look(started)
    assert time.monotonic() - before < 2
    told = f"detokenizer (pid {lost.pid}) died with exit code -9"
    assert (entry["state"], entry["detail"]) in (
        ("stuck", f"{told}: stop.yml, then deploy.yml, each with --limit n-gpu0"),
        ("dead", told),
    )


def test_a_dead_server_is_told_by_the_catalogue_and_not_by_its_start(boot, look):
    log = WEIGHTS + "Exception: an old one\nThe server is fired up and ready to roll!\n" + "served\n" * 50
    started = boot(command=SLEEP, log=log + "Scheduler watchdog timeout (watchdog_timeout=300, soft=False)\nSIGQUIT received")
    started.kill()
    entry = look(started)
    assert (entry["state"], entry["detail"]) == ("dead", "the scheduler did nothing for 300 s")


def test_a_dead_server_that_had_outlived_a_silence_is_not_told_by_it(boot, look):
    silence = "[2026-01-01 00:01:00] Server couldn't get a response from detokenizer for last 20 seconds.\n"
    log = WEIGHTS + "The server is fired up and ready to roll!\n" + silence
    started = boot(command=SLEEP, log=log + "[2026-01-01 00:05:00] Decode batch, #running-req: 1\n")
    started.kill()
    entry = look(started)
    told = "its process is gone without a word in its log: kill -9, or the kernel out of memory"
    assert (entry["state"], entry["detail"]) == ("dead", told)


@pytest.mark.parametrize(
    ("disk", "clause"),
    [
        ({"f_flag": os.ST_RDONLY, "f_bavail": 9}, "; its folder is read-only now, so a stop could not be written down"),
        ({"f_flag": 0, "f_bavail": 0}, "; its disk is full, so a stop may not have been written down"),
        ({"f_flag": 0, "f_bavail": 9}, ""),
    ],
)
def test_a_stop_that_could_not_be_written_down_is_thought_of(boot, look, module, monkeypatch, disk, clause):
    started = boot(command=SLEEP, log=WEIGHTS + "The server is fired up and ready to roll!\nSIGTERM received. signum=None"
                   " frame=None. Draining requests and shutting down...\n")  # fmt: skip
    started.kill()
    monkeypatch.setattr(module.os, "statvfs", lambda path: SimpleNamespace(**disk))
    entry = look(started)
    assert (entry["state"], entry["detail"]) == ("dead", "it was sent SIGTERM, drained and ended" + clause)


@pytest.mark.parametrize("text", ["", "{", "\x00garbage", '{"identity": {"pid": "4"}}', '{"name": 5}', "7"])
def test_a_damaged_state_file_is_told_with_a_way_on(look, tmp_path, helpers, text):
    path = tmp_path / "run" / "sglang_gpu0.json"
    path.parent.mkdir()
    path.write_text(text)
    entry = look(root=tmp_path, port=helpers.free_port())
    assert entry["state"] == "dead"
    assert entry["detail"].startswith(f"{path} is damaged, ") and "deploy.yml starts it anew" in entry["detail"]


def test_a_running_server_with_a_damaged_state_file_is_found_by_its_marks(ready, look):
    started = ready("e96_nomtp")
    with open(started.paths.state, "w", encoding="utf-8") as stream:
        stream.write('{"identity": {"pid"')
    entry = look(started)
    assert (entry["state"], f"runs as pid {started.process.pid}, " in entry["detail"]) == ("stranger", True)
    assert "is damaged, it is no JSON" in entry["detail"] and "stop.yml" in entry["detail"]


def test_a_damaged_file_of_keys_is_no_traceback(ready, look):
    started = ready("e96_nomtp", argv=["--api-key", "k"])
    with open(started.paths.secrets, "wb") as stream:
        stream.write(b'api-key: "k\xff\n: :\n')
    assert look(started)["state"] == "ready"
