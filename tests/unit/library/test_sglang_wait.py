# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting on replays of real boots, and on faults that no recording has: how each wait ends, and in which words."""

from __future__ import annotations

import os
import sys
import time

import pytest
from ansible.module_utils.sglang_process import boot_seconds
from ansible.module_utils.sglang_state import write_state
from helpers.replay import recorded_log

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def module(load, monkeypatch):
    made = load("library", "sglang_wait")
    monkeypatch.setattr(made, "POLL_SECONDS", 0.05)
    return made


@pytest.fixture
def wait(module, call):
    """Wait for a boot."""

    def _wait(boot, check=False, **more):
        args = {"name": "n-gpu0", "slug": "sglang_gpu0", "root": boot.paths.root, "port": boot.port, "timeout": 30}
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


def test_a_port_of_someone_else_is_not_believed(boot, wait, python, helpers):
    port = helpers.free_port()
    script = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('up', flush=True); time.sleep(60)"
    stranger, _up = python(script)
    answer = wait(boot("e96_nomtp", fault="no_http", port=port), stage_limits={"ready": 0.6})
    assert answer["outcome"] == "stuck"
    assert f"but port {port} belongs to pid {stranger.pid} (" in answer["cause"]


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
    assert wait(started)["cause_id"] == "gpu_memory"


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
