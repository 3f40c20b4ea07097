# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting on replays of real boots, and on faults that no recording has: how each wait ends, and in which words."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible.module_utils import sglang_process
from ansible.module_utils.sglang_process import boot_seconds
from ansible.module_utils.sglang_state import write_state
from helpers.replay import recorded_log

LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
time.sleep(60)
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def module(load, monkeypatch):
    made = load("library", "sglang_wait")
    monkeypatch.setattr(made, "POLL_SECONDS", 0.05)
    return made


@pytest.fixture
def wait(module, call):
    """Wait for a boot."""

    def _wait(started, check=False, **more):
        args = {"name": "n-gpu0", "slug": "sglang_gpu0", "root": started.paths.root, "port": started.port, "timeout": 30}
        return call(module, {**args, **more}, check=check)

    return _wait


@pytest.mark.parametrize(
    ("recording", "cap", "kv_tokens"), [("e96_nomtp", 18, 241196), ("e96_mtp_hicache", 4, 365151), ("q27_mtp", 4, 1040851)]
)
def test_a_recorded_boot_becomes_ready(boot, wait, recording, cap, kv_tokens):
    started = boot(recording)
    answer = wait(started)
    assert (answer["rc"], answer["changed"], answer["state"], answer["outcome"]) == (0, False, "ready", "ready")
    assert (answer["cap"], answer["figures"]["kv_tokens"]) == (cap, kv_tokens)
    assert (answer["pid"], answer["log"], answer["profile"]) == (started.process.pid, str(started.log), "nomtp")
    stages = [entry["stage"] for entry in answer["timeline"]]
    assert stages[:4] == ["import", "weights", "state pool", "KV pool"] and stages[-1] == answer["stage"] == "ready"
    assert ("host pools" in stages) == (recording == "e96_mtp_hicache")
    times = [entry["at_s"] for entry in answer["timeline"]]
    assert times == sorted(times) and times[0] == 0.0 and times[-1] <= answer["elapsed"]
    assert list(answer["stage_seconds"]) == stages[:-1]
    assert sum(answer["stage_seconds"].values()) <= answer["elapsed"] + 0.5
    assert started.state["shared_memory"] == []
    assert started.process.poll() is None


@pytest.mark.parametrize(
    ("recording", "outcomes", "cause_id", "stage"),
    [
        ("f_unknown_flag", ["failed"], "unknown_flag", "import"),
        ("f_bad_model", ["failed"], "bad_model_path", "import"),
        ("f_mem_small", ["failed"], "no_state_memory", "weights"),
        ("f_hicache_200", ["failed"], "no_host_memory", "graph capture"),
        ("f_port_used", ["failed"], "port_in_use", "graph capture"),
        ("f_kill_sched_loading", ["died", "failed"], "scheduler_died", "weights"),
    ],
)
def test_a_recorded_failure_is_told_by_its_cause(boot, wait, recording, outcomes, cause_id, stage):
    started = boot(recording)
    answer = wait(started)
    assert (answer["failed"], answer["cause_id"], answer["stage"], answer["state"]) == (True, cause_id, stage, "failed")
    assert answer["outcome"] in outcomes
    assert answer["msg"].startswith(f"n-gpu0 did not become ready: {answer['cause']} (stage {stage}, ")
    assert answer["msg"].endswith(f"{answer['advice']}; log: {started.log}")
    assert answer["elapsed"] < 10
    assert 0 < len(answer["lines"]) <= 20


@pytest.mark.parametrize(
    ("recording", "cause"),
    [
        ("f_kill_sched_serving", "scheduler_0 (pid 6475) died with exit code -9"),
        ("f_kill_detok", "detokenizer (pid 6385) died with exit code -9"),
    ],
)
def test_a_server_that_died_after_it_was_ready_is_told_by_its_aftermath(boot, wait, recording, cause):
    started = boot(recording, speed=1000)
    started.process.wait(10)
    answer = wait(started)
    assert (answer["failed"], answer["outcome"], answer["cause_id"], answer["cause"]) == (True, "died", "child_died", cause)


def test_a_server_that_is_killed_without_a_word(boot, wait, helpers):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    helpers.until(lambda: started.logged("Load weight begin"))
    started.kill()
    answer = wait(started)
    assert (answer["outcome"], answer["stage"]) == ("died", "weights")
    # A kernel that ran out of memory would be the better cause; here it was us.
    assert (answer["cause_id"], answer["kernel"]) == ("died", None)
    assert answer["cause"] == "its main process is gone without a word"


def test_a_server_that_someone_replaced_meanwhile_says_who(boot, wait):
    started = boot(command=SLEEP, log="")
    first = wait(started, slice=0.1)
    newer = {"log": f"{started.paths.logs}/newer.log", "launched_by": "bob@desk", "launched_at": "2026-01-01T00:00:09Z"}
    Path(newer["log"]).write_text("")
    write_state(started.paths.state, {**started.state, **newer})
    answer = wait(started, timeline=first["timeline"], boot=first["log"])
    assert (answer["outcome"], answer["cause_id"]) == ("died", "replaced")
    assert answer["cause"] == "bob@desk started it anew at 2026-01-01T00:00:09Z"


def test_a_server_that_is_replaced_during_a_look_says_who(boot, wait):
    started = boot(command=SLEEP, log="")

    def replace():
        time.sleep(1)
        write_state(started.paths.state, {**started.state, "log": "/newer", "launched_by": "bob@desk", "launched_at": "now"})
        started.kill()

    other = threading.Thread(target=replace)
    other.start()
    answer = wait(started)
    other.join()
    assert (answer["cause_id"], answer["log"]) == ("replaced", str(started.log))
    assert answer["cause"] == "bob@desk started it anew at now"


def test_a_server_that_someone_stopped_meanwhile_says_who(boot, wait):
    started = boot(command=SLEEP, log="")
    first = wait(started, slice=0.1)
    write_state(started.paths.state, {**started.state, "stopping_by": "bob@desk", "stopping_at": "2026-01-01T00:00:00Z"})
    started.kill()
    answer = wait(started, timeline=first["timeline"])
    assert (answer["outcome"], answer["cause_id"]) == ("died", "stopped")
    assert answer["cause"] == "it was stopped by bob@desk at 2026-01-01T00:00:00Z"


def test_the_kernels_word_on_a_kill_is_the_cause(boot, wait, module, tmp_path, monkeypatch):
    started = boot(command=SLEEP, log="[2026-01-01 00:00:00] Load weight begin. avail mem=1.0 GB\n")
    started.kill()
    dmesg = tmp_path / "dmesg"
    dmesg.write_text(f"#!/bin/sh\necho 'Out of memory: Killed process {started.process.pid} (python) total-vm:1kB'\n")
    dmesg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"]) == ("died", "host_out_of_memory")
    assert answer["cause"].startswith("the kernel killed it: Out of memory: Killed process ")


def test_a_start_that_hangs_is_stuck_after_the_limit_of_its_stage(boot, wait):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    answer = wait(started, stage_limits={"weights": 0.5})
    assert (answer["outcome"], answer["cause_id"], answer["stage"]) == ("stuck", "stuck", "weights")
    assert answer["cause"].startswith("no new stage since ") and answer["cause"].endswith(" s in stage weights (limit 0 s)")
    assert "sglang_stage_limits" in answer["advice"]
    assert started.process.poll() is None


def test_limits_may_be_text(boot, wait):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    assert wait(started, stage_limits={"weights": "0.5"})["outcome"] == "stuck"


def test_a_start_that_takes_too_long_altogether(boot, wait):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    answer = wait(started, timeout=1)
    assert (answer["outcome"], answer["cause_id"]) == ("timeout", "timeout")
    assert answer["cause"].endswith("s after its launch (limit 1 s)")


def test_a_log_that_says_ready_is_not_believed_without_a_port(boot, wait):
    started = boot("e96_nomtp", fault="no_http")
    answer = wait(started, stage_limits={"ready": 0.6})
    assert (answer["outcome"], answer["stage"]) == ("stuck", "ready")
    assert answer["cause"].startswith("its log says ready since ")
    assert answer["cause"].endswith(f"but nothing listens on port {started.port}")


def test_a_port_that_someone_takes_during_the_start_is_told_before_the_engine_finds_out(boot, wait, python, helpers):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    helpers.until(lambda: started.logged("Load weight begin"))
    assert wait(started, slice=0.3)["state"] == "starting"
    stranger, _up = python(LISTEN, str(started.port))
    before = time.monotonic()
    answer = wait(started)
    assert time.monotonic() - before < 3
    assert (answer["outcome"], answer["cause_id"], answer["stage"]) == ("failed", "port_taken", "weights")
    assert answer["cause"].startswith(f"port {started.port} was taken during the start by pid {stranger.pid} (")
    assert stranger.poll() is None and started.process.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_port_of_another_user_is_told_by_the_user(boot, wait, python, helpers, monkeypatch):
    """What a fleet that is not root sees: the kernel shows the listener's user and not its process."""
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    helpers.until(lambda: started.logged("Load weight begin"))
    python("import os, socket, sys, time; os.setuid(65534)\n" + LISTEN, str(started.port))
    monkeypatch.setattr(sglang_process, "_owner_of_inode", lambda inode: None)
    answer = wait(started)
    assert (answer["cause_id"], answer["outcome"]) == ("port_taken", "failed")
    assert "by a process of another user (uid 65534) on 127.0.0.1" in answer["cause"]


def test_a_server_that_generates_nothing_is_not_ready(boot, wait):
    answer = wait(boot("e96_nomtp", fault="bad_generate"), stage_limits={"ready": 0.6})
    assert answer["outcome"] == "stuck"
    assert "but /generate answered 500: " in answer["cause"]


def test_a_server_with_a_key_is_asked_with_it(boot, wait):
    started = boot("e96_nomtp", argv=["--api-key", "right"])
    assert wait(started, api_key="right")["outcome"] == "ready"
    answer = wait(started, api_key="wrong", stage_limits={"ready": 0.1})
    assert answer["outcome"] == "stuck"
    assert "/generate answered 401" in answer["cause"]


def test_a_running_server_is_ready_whatever_was_logged_while_it_served(boot, wait):
    """A deploy that changes nothing waits too: trouble of last week, long over, is no failed start."""
    started = boot("e96_nomtp")
    assert wait(started)["outcome"] == "ready"
    with open(started.log, "a", encoding="utf-8") as stream:
        stream.write("[2026-01-01 00:00:00] OSError: [Errno 28] No space left on device\n")
    assert wait(started)["outcome"] == "ready"


def test_a_line_of_aftermath_waits_a_moment_for_its_reason(boot, wait, module, monkeypatch):
    monkeypatch.setattr(module, "AFTERMATH_SECONDS", 0.5)
    begun = "[2026-01-01 00:00:00] Load weight begin. avail mem=1.0 GB\n[2026-01-01 00:00:00] Scheduler hit an exception\n"
    started = boot(command=SLEEP, log=begun)
    before = time.monotonic()
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"]) == ("failed", "scheduler_exception")
    assert time.monotonic() - before >= 0.5
    with open(started.log, "a", encoding="utf-8") as stream:
        stream.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 340.00 MiB. GPU 0\n")
    assert wait(started)["cause_id"] == "weights_memory"


def test_an_older_boots_log_does_not_answer(boot, wait, tmp_path):
    started = boot(command=SLEEP, log="")
    (started.log.parent / "older.log").write_text(recorded_log("e96_nomtp"))
    assert wait(started, slice=0.3)["stage"] == "import"


def test_a_slice_comes_back_with_news_and_without(boot, wait):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    first = wait(started, slice=20)
    assert (first["rc"], first["state"], first["stage"]) == (0, "starting", "weights")
    assert [entry["stage"] for entry in first["timeline"]] == ["import", "weights"]
    before = time.monotonic()
    second = wait(started, slice=0.5, timeline=first["timeline"])
    assert 0.5 <= time.monotonic() - before < 5
    assert (second["state"], second["timeline"]) == ("starting", first["timeline"])
    assert second["stage_seconds"]["weights"] > first["stage_seconds"]["weights"]


def test_a_ready_server_that_does_not_answer_yet_says_what_it_waits_for(boot, wait, helpers):
    started = boot("e96_nomtp", fault="no_http")
    helpers.until(lambda: started.logged("ready to roll"))
    answer = wait(started, slice=0.3)
    assert (answer["state"], answer["stage"]) == ("starting", "ready")
    assert answer["waits_for"] == f"nothing listens on port {started.port}"


def test_stages_that_nobody_watched_have_the_times_of_the_log(boot, wait):
    launched = time.time() - 100

    def stamp(seconds):
        return time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(launched + seconds))

    log = f"{stamp(20)} Load weight begin. avail mem=1.0 GB\n{stamp(50)} KV Cache is allocated. #tokens: 5, K size: 1.00 GB\n"
    started = boot(command=SLEEP, log=log, launched_epoch=launched, launched_boot_seconds=boot_seconds() - 100)
    answer = wait(started, slice=0.1)
    assert [entry["stage"] for entry in answer["timeline"]] == ["import", "weights", "KV pool"]
    assert [entry["at_s"] for entry in answer["timeline"]] == pytest.approx([0, 20, 50], abs=1.1)
    assert answer["stage_seconds"]["weights"] == pytest.approx(30, abs=2)
    assert answer["stage_seconds"]["KV pool"] == pytest.approx(50, abs=3)


def test_check_mode_comes_back_at_once(boot, wait):
    answer = wait(boot("", fault="hang:REPLAY"), check=True)
    assert (answer["state"], answer["changed"], answer["timeline"]) == ("starting", False, [])
    assert answer["msg"] == "would wait until n-gpu0 serves"


def test_a_server_that_was_never_started(module, call, tmp_path):
    args = {"name": "n-gpu0", "slug": "sglang_gpu0", "root": str(tmp_path), "port": 1}
    answer = call(module, args)
    assert (answer["failed"], answer["outcome"]) == (True, "absent")
    assert answer["msg"] == f"n-gpu0 was never started below {tmp_path}: run deploy.yml"


def test_an_unknown_stage_is_refused(boot, wait):
    answer = wait(boot(command=SLEEP), stage_limits={"weight": 1})
    assert answer["msg"].startswith("stage_limits names 'weight': stages are import, weights, state pool, ")


def test_a_python_without_requests_is_named(boot, wait, module, monkeypatch):
    monkeypatch.setattr(module, "requests", None)
    answer = wait(boot(command=SLEEP))
    assert answer["failed"] is True
    assert answer["msg"].startswith(f"n-gpu0: Python {sys.executable} has no module requests")


def test_a_wait_without_the_log_goes_on_by_the_process(boot, wait):
    started = boot(command=SLEEP)
    os.unlink(started.log)
    assert wait(started, slice=0.2)["stage"] == "import"
    started.kill()
    assert wait(started)["outcome"] == "died"


# -- a server that says ready and is not -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fault", "cause_id", "cause"),
    [("no_http", "no_http", "nothing listens on port "), ("bad_generate", "generation_broken", "/generate answered 500: ")],
)
def test_a_wrong_answer_that_stays_is_told_within_seconds(boot, wait, helpers, fault, cause_id, cause):
    started = boot("e96_nomtp", fault=fault)
    helpers.until(lambda: started.logged("ready to roll"))
    before = time.monotonic()
    answer = wait(started)
    assert time.monotonic() - before < 3.5
    assert (answer["outcome"], answer["cause_id"], answer["stage"]) == ("failed", cause_id, "ready")
    assert answer["cause"].startswith(f"its log says ready, but {cause}")


def test_another_server_that_answers_on_our_port_is_not_ours(boot, wait, helpers):
    """An older server, say, of another fleet: it answers rightly, and is not the one that was started."""
    older = boot("e96_nomtp", name="n-gpu1")
    helpers.until(lambda: older.logged("ready to roll"))
    started = boot("e96_nomtp", fault="no_http", port=older.port)
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"]) == ("failed", "port_taken")
    assert f"pid {older.process.pid} (" in answer["cause"]


def test_one_that_was_ready_before_has_all_the_time_of_its_limit(boot, wait, module, monkeypatch):
    monkeypatch.setattr(module, "WRONG_SECONDS", 0.1)
    started = boot("e96_nomtp", fault="bad_generate", ready_at="2026-01-01T00:00:00Z")
    answer = wait(started, stage_limits={"ready": 1})
    assert (answer["outcome"], answer["was_ready"]) == ("stuck", True)


# -- processes that die ------------------------------------------------------------------------------------------------
def child(started, title, helpers):
    def find():
        return next((stat for stat in sglang_process.of_session(started.process.pid)
                     if sglang_process.command(stat.pid).startswith(title)), None)  # fmt: skip

    return helpers.until(find)


MUTE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from sglang_replay import process
child = process.spawn("sglang::scheduler_TP1")
print("Load weight begin. avail mem=1.0 GB", flush=True)
time.sleep(60)
"""


def test_a_child_that_is_gone_without_a_word_is_noticed_though_the_launcher_waits_for_ever(boot, wait, helpers, root):
    started = boot(command=[sys.executable, "-c", MUTE, str(root / "tests/replay/site")])
    lost = child(started, "sglang::scheduler_TP1", helpers)
    before = []

    def kill():
        time.sleep(1)
        os.kill(lost.pid, 9)
        before.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    answer = wait(started)
    killer.join()
    assert time.monotonic() - before[0] < 3
    assert (answer["outcome"], answer["cause_id"], answer["stage"]) == ("failed", "child_gone", "weights")
    assert answer["cause"] == f"its process sglang::scheduler_TP1 (pid {lost.pid}) is gone without a word"
    assert "dmesg" in answer["advice"]
    assert started.process.poll() is None, "it would wait on"


SPAWNING = """
import subprocess, sys, time
def spawn(body):
    return subprocess.Popen([sys.executable, "-c", f"from multiprocessing.spawn import spawn_main; import time; {body}"])
done, child = spawn("0"), spawn("time.sleep(60)")
print("Load weight begin. avail mem=1.0 GB", flush=True)
time.sleep(60)
"""


def spawned(started):
    def find():
        found = [stat for stat in sglang_process.of_session(started.process.pid) if stat.pid != started.process.pid]
        return found[0] if len(found) == 1 and "time.sleep" in sglang_process.command(found[0].pid) else None

    return find


def test_a_child_that_dies_before_it_has_a_title_is_noticed(boot, wait, helpers):
    """SGLang itself looks after it only once it has loaded."""
    started = boot(command=[sys.executable, "-c", SPAWNING])
    lost = helpers.until(spawned(started))
    first = wait(started, slice=2)
    assert "outcome" not in first, "the other child has ended well"
    assert [seen["pid"] for seen in first["children"]] == [lost.pid]
    os.kill(lost.pid, 9)
    before = time.monotonic()
    answer = wait(started, timeline=first["timeline"], children=first["children"])
    assert time.monotonic() - before < 3
    assert (answer["outcome"], answer["cause_id"]) == ("failed", "child_gone")
    assert answer["cause"] == f"its process of multiprocessing (pid {lost.pid}) is gone without a word"


def test_a_child_that_is_halted_before_it_has_a_title_is_named(boot, wait, helpers):
    started = boot(command=[sys.executable, "-c", SPAWNING])
    halted = helpers.until(spawned(started))
    os.kill(halted.pid, signal.SIGSTOP)
    answer = wait(started, stage_limits={"weights": 1})
    assert answer["outcome"] == "stuck"
    assert "halted by a signal (SIGSTOP): python" in answer["cause"]
    assert f"(pid {halted.pid})" in answer["cause"]


FORKING = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from sglang_replay import process
if process.spawn("sglang::detokenizer") and not os.fork():
    process._set_title("sglang::scheduler")
    print("Load weight begin. avail mem=1.0 GB", flush=True)
    if not os.fork():  # as lscpu does, it has the title of the scheduler that started it
        time.sleep(1)
        os._exit(0)
    time.sleep(60)
time.sleep(60)
"""


def test_what_a_child_starts_and_ends_is_no_child(boot, wait, helpers, root):
    started = boot(command=[sys.executable, "-c", FORKING, str(root / "tests/replay/site")])
    child(started, "sglang::scheduler", helpers)
    answer = wait(started, slice=5)
    assert "outcome" not in answer, answer["cause"]
    assert sorted(seen["title"] for seen in answer["children"]) == ["sglang::detokenizer", "sglang::scheduler"]


def test_the_kernels_word_on_a_child_is_the_cause(boot, wait, helpers, root, tmp_path, monkeypatch):
    started = boot(command=[sys.executable, "-c", MUTE, str(root / "tests/replay/site")])
    lost = child(started, "sglang::scheduler_TP1", helpers)
    dmesg = tmp_path / "dmesg"
    dmesg.write_text(f"#!/bin/sh\necho 'Out of memory: Killed process {lost.pid} (sglang::schedul) total-vm:1kB'\n")
    dmesg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    killer = threading.Timer(1, lambda: os.kill(lost.pid, 9))
    killer.start()
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"]) == ("failed", "host_out_of_memory")
    assert answer["kernel"].startswith("Out of memory: Killed process ")


def test_a_child_that_dies_between_two_slices_is_noticed(boot, wait, helpers, root):
    started = boot(command=[sys.executable, "-c", MUTE, str(root / "tests/replay/site")])
    lost = child(started, "sglang::scheduler_TP1", helpers)
    first = wait(started, slice=0.3)
    assert lost.pid in [seen["pid"] for seen in first["children"]]
    os.kill(lost.pid, 9)
    helpers.until(lambda: lost.pid not in [stat.pid for stat in sglang_process.living()])
    answer = wait(started, timeline=first["timeline"], children=first["children"])
    assert (answer["outcome"], answer["cause_id"]) == ("failed", "child_gone")
    assert f"sglang::scheduler_TP1 (pid {lost.pid})" in answer["cause"]


@pytest.mark.parametrize("title", ["replay::scheduler", "replay::detokenizer"])
def test_a_child_killed_while_loading(boot, wait, helpers, title):
    started = boot("e96_nomtp", speed=10, fault="hang:Load weight begin")
    helpers.until(lambda: started.logged("Load weight begin"), 20)
    lost = child(started, title, helpers)
    assert wait(started, slice=0.3)["state"] == "starting"
    os.kill(lost.pid, 9)
    before = time.monotonic()
    answer = wait(started)
    assert time.monotonic() - before < 3
    assert (answer["cause_id"], answer["stage"]) == ("scheduler_died", "weights")
    assert answer["cause"] == f"the {title.partition('::')[2]} died during the start (exit code -9)"


def test_a_child_killed_while_serving_is_told_while_http_hangs(boot, wait, helpers):
    started = boot("e96_nomtp")
    assert wait(started)["outcome"] == "ready"
    os.kill(child(started, "replay::detokenizer", helpers).pid, 9)
    helpers.until(lambda: started.logged("crashed with exit code"))
    before = time.monotonic()
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"], answer["was_ready"]) in (
        ("failed", "child_died", True), ("died", "child_died", True),
    )  # fmt: skip
    assert time.monotonic() - before < 8
    assert "died with exit code -9" in answer["cause"]


def test_a_halted_process_is_named_when_a_start_is_stuck(boot, wait, helpers):
    started = boot("e96_nomtp", fault="hang:Load weight begin")
    helpers.until(lambda: started.logged("Load weight begin"))
    halted = child(started, "replay::scheduler", helpers)
    os.kill(halted.pid, signal.SIGSTOP)
    answer = wait(started, stage_limits={"weights": 0.5})
    named = f"; halted by a signal (SIGSTOP): replay::scheduler (pid {halted.pid}); kill -CONT {halted.pid} lets it go on"
    assert answer["cause"].endswith(named)


def test_a_hang_in_the_warm_up_is_stuck_there(boot, wait, helpers):
    started = boot("e96_nomtp", fault="hang:Uvicorn running on")
    answer = wait(started, stage_limits={"warm-up": 0.5})
    assert (answer["outcome"], answer["stage"]) == ("stuck", "warm-up")


# -- machine and files -------------------------------------------------------------------------------------------------
def test_a_start_of_before_the_nodes_restart_is_told_as_that(boot, wait):
    started = boot(command=SLEEP, log="[2026-01-01 00:00:00] Load weight begin. avail mem=1.0 GB\n")
    write_state(started.paths.state, {**started.state, "identity": {**started.state["identity"], "boot_id": "before"}})
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"]) == ("died", "rebooted")
    assert answer["cause"] == "the node was restarted since its launch"


def test_a_pid_that_another_process_has_now_is_not_ours(boot, wait):
    started = boot(command=SLEEP, log="")
    known = started.state["identity"]
    write_state(started.paths.state, {**started.state, "identity": {**known, "start_ticks": known["start_ticks"] - 100}})
    assert wait(started)["outcome"] == "died"
    assert started.process.poll() is None


def test_a_zombie_is_dead(boot, wait):
    started = boot(command=SLEEP, log="")
    started.process.kill()
    os.waitid(os.P_PID, started.process.pid, os.WEXITED | os.WNOWAIT)
    assert sglang_process.read_stat(started.process.pid).state == "Z"
    assert wait(started)["outcome"] == "died"


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_a_clock_that_jumps_moves_no_limit(boot, wait, jump):
    """The log is stamped by the wall's clock, which someone sets by hours during the start."""
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(time.time() + jump))
    started = boot(command=SLEEP, log=f"{stamp} Load weight begin. avail mem=1.0 GB\n")
    answer = wait(started, slice=0.5, stage_limits={"weights": 300})
    assert (answer["state"], answer["stage"]) == ("starting", "weights")
    assert 0 <= answer["elapsed"] < 30 and all(0 <= spent < 30 for spent in answer["stage_seconds"].values())


def statvfs(**more):
    fields = {"f_flag": 0, "f_bavail": 1 << 20, "f_frsize": 4096, "f_files": 100, "f_favail": 50, **more}
    return lambda path: SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("disk", "cause_id", "cause"),
    [
        ({"f_bavail": 0}, "disk_full", "is full (0 KiB left), so its log can't be written"),
        ({"f_favail": 0}, "disk_full", "is full ("),
        ({"f_flag": os.ST_RDONLY}, "read_only", "has become read-only, so its log can't be written"),
    ],
)
def test_a_disk_that_takes_no_more_is_the_cause(boot, wait, monkeypatch, disk, cause_id, cause):
    started = boot(command=SLEEP, log="")
    monkeypatch.setattr(os, "statvfs", statvfs(**disk))
    answer = wait(started)
    assert (answer["outcome"], answer["cause_id"]) == ("failed", cause_id)
    assert cause in answer["cause"] and str(started.log.parent) in answer["cause"]


@pytest.mark.parametrize("text", ["", '{"identity": {"pi', "\x00\x01", '{"identity": 5}', "[]", '{"identity": {"pid": 1}}'])
def test_a_damaged_state_file_is_a_sentence_with_a_way_on(boot, wait, text):
    started = boot(command=SLEEP)
    Path(started.paths.state).write_text(text)
    answer = wait(started)
    assert answer["failed"] is True and answer["outcome"] == "absent"
    assert answer["msg"].startswith(f"n-gpu0: {started.paths.state} is damaged, ")
    assert "stop.yml" in answer["msg"] and "deploy.yml" in answer["msg"]


def test_a_key_that_the_engine_logs_is_stars_before_anyone_reads_it(boot, wait):
    key = "planted-key-of-the-test"
    text = f"server_args=ServerArgs(api_key='{key}', x=1)\nLoad weight begin. avail mem=1.0 GB\nRuntimeError: {key}\n"
    started = boot(command=SLEEP, log=text)
    Path(started.paths.secrets).write_text(f'api-key: "{key}"\n')
    answer = wait(started, slice=0.2)
    assert key not in started.log.read_text() and "x=1" in started.log.read_text()
    started.kill()
    answer = wait(started)
    assert answer["cause"].endswith("RuntimeError: " + "*" * len(key)) and key not in json.dumps(answer)


def test_what_a_server_got_less_of_is_told(boot, wait):
    answer = wait(boot("e96_mtp_hicache"))
    assert answer["reductions"] == [
        "the host cache holds 236666 tokens, less than the GPU's 365151: it adds little, raise hicache-size"
    ]
