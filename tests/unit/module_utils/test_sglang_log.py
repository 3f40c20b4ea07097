# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real logs in, stages, figures and causes out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ansible.module_utils import sglang_log
from ansible.module_utils.sglang_log import (
    aftermath,
    asked,
    cause_of_death,
    failure,
    figures,
    last_lines,
    lines_of,
    matter,
    read_startup,
    read_tail,
    redact,
    stages,
)
from helpers.replay import recorded_log

CPU = Path(__file__).resolve().parents[2] / "data" / "logs" / "cpu-0.5.23"

CPU_READY = ["import", "weights", "KV pool", "warm-up", "ready"]
GPU_READY = ["import", "weights", "state pool", "KV pool", "graph capture", "warm-up", "ready"]
# log: stages, failure, aftermath
EXPECTED = {
    "bad_choice": (["import"], "bad_choice", None),
    "bad_flag": (["import"], "unknown_flag", None),
    "bad_model_path": (["import"], "bad_model_path", "exception"),
    "ctx_too_long": (["import"], "context_too_long", "exception"),
    "empty_model_dir": (["import"], "no_config", "exception"),
    "hic_kernel": (["import", "weights", "KV pool", "host pools"], "needs_gpu", "exception"),
    "hicache_loadback": (["import", "weights", "KV pool", "host pools", "warm-up", "ready"], None, "terminated"),
    "hybrid_qwen3next2": (["import", "weights", "state pool", "KV pool"], "engine_incomplete", "exception"),
    "kill9_detok": (CPU_READY, None, "child_died"),
    "kill9_main": (CPU_READY, None, None),
    "kill9_sched": (CPU_READY, None, "child_died"),
    "mem_fraction_tiny": (["import", "weights"], "no_kv_memory", "exception"),
    "mem_too_many_tokens": (CPU_READY, None, None),
    "mem_ulimit": (["import"], "os_limit", "exception"),
    "no_weights": (["import", "weights"], "no_weights", "exception"),
    "port_in_use": (["import", "weights", "KV pool"], "port_in_use", None),
    "server": (CPU_READY, None, "terminated"),
    "server_short": (CPU_READY, None, None),
    "spec_ngram": (CPU_READY, None, "terminated"),
    "spec_standalone": (["import", "weights", "KV pool"], "needs_gpu", "exception"),
    "e96_mtp_hicache": (
        ["import", "weights", "state pool", "KV pool", "graph capture", "host pools", "warm-up", "ready"], None, "terminated",
    ),
    "e96_nomtp": (GPU_READY, None, "terminated"),
    "q27_mtp": (GPU_READY, None, "terminated"),
    "f_bad_model": (["import"], "bad_model_path", "exception"),
    "f_hicache_200": (["import", "weights", "state pool", "KV pool", "graph capture"], "no_host_memory", "exception"),
    "f_kill_detok": (GPU_READY, None, "child_died"),
    "f_kill_sched_loading": (["import", "weights"], None, "scheduler_died"),
    "f_kill_sched_serving": (GPU_READY, None, "child_died"),
    "f_mem_small": (["import", "weights"], "no_state_memory", "exception"),
    "f_port_used": (["import", "weights", "state pool", "KV pool", "graph capture"], "port_in_use", None),
    "f_unknown_flag": (["import"], "unknown_flag", None),
}  # fmt: skip
CAUSES = {
    "bad_flag": "this SGLang does not know --no-such-flag 1",
    "bad_model_path": "there is no model folder /no/such/model",
    "ctx_too_long": "context-length 999999 is more than the model's 4096",
    "empty_model_dir": "/srv/sglang/model/empty holds no config.json that names a model type",
    "hic_kernel": "this profile needs a CUDA GPU (Torch not compiled with CUDA enabled)",
    "mem_fraction_tiny": "the weights leave no memory for the KV cache at mem-fraction-static 0.0001",
    "no_weights": "the model folder /srv/sglang/model/qwen3 holds no weights",
    "port_in_use": "port 30113 was taken by another process during the start",
    "f_bad_model": "there is no model folder /srv/models/not-there",
    "f_hicache_200": "the host cache asks for 181.56 GB and the node has 119.00 GB free",
    "f_mem_small": "the weights leave no memory for the hybrid model's state cache (-2.97 GiB)",
    "f_port_used": "port 31999 was taken by another process during the start",
}
UNKNOWN = "not a failure known here; its last exception is "
AFTERMATH_CAUSES = {
    "hybrid_qwen3next2": UNKNOWN + "ModuleNotFoundError: No module named 'sgl_kernel.mamba'",
    "kill9_detok": "detokenizer (pid 8978) died with exit code -9",
    "kill9_sched": "scheduler_0 (pid 18648) died with exit code -9",
    "mem_ulimit": UNKNOWN + "RuntimeError: Resource temporarily unavailable",
    "f_kill_detok": "detokenizer (pid 6385) died with exit code -9",
    "f_kill_sched_loading": "the scheduler died during the start (exit code -9)",
    "f_kill_sched_serving": "scheduler_0 (pid 6475) died with exit code -9",
}


def log(name):
    path = CPU / f"{name}.log"
    return read_startup(path) if path.exists() else lines_of(recorded_log(name))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_log_tells_its_stages_and_its_cause(name):
    lines = log(name)
    cause, after = failure(lines), aftermath(lines)
    found = ([stage for stage, _line in stages(lines)], cause and cause["id"], after and after["id"])
    assert found == EXPECTED[name]
    if name in CAUSES:
        assert cause["cause"] == CAUSES[name]
        assert cause["line"] in [line[:1000] for line in lines]
    if name in AFTERMATH_CAUSES:
        assert after["cause"] == AFTERMATH_CAUSES[name]


def test_every_log_that_is_kept_is_tested():
    assert {path.stem for path in CPU.glob("*.log")} <= set(EXPECTED)


def test_each_stage_begins_with_its_own_line():
    told = dict(stages(log("e96_mtp_hicache")))
    assert told["import"] is None
    assert "Load weight begin. avail mem=92.79 GB" in told["weights"]
    assert "max_mamba_cache_size: 24" in told["state pool"]
    assert "Allocating" in told["host pools"]
    assert told["ready"].endswith("The server is fired up and ready to roll!")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "e96_mtp_hicache",
            {
                "free_gpu_gib": 92.79, "weights_gib": 51.05, "draft_weights_gib": 5.53, "capped_by_slots": 24,
                "slots_per_request": 5, "state_slots": 24, "state_conv_gib": 0.07, "state_ssm_gib": 3.52,
                "speculative_ssm_gib": 2.81, "speculative_conv_gib": 0.03, "kv_tokens": 365151, "kv_k_gib": 11.14,
                "kv_v_gib": 11.14, "max_total_tokens": 365151, "max_running_requests": 4, "context_len": 262144,
                "available_gib": 7.53, "graphs_gib": 3.1, "host_kv_gb": 15.51, "host_state_gb": 4.62,
            },
        ),
        (
            "e96_nomtp",
            {
                "free_gpu_gib": 92.79, "weights_gib": 51.05, "capped_by_slots": 90, "slots_per_request": 5,
                "state_slots": 90, "state_conv_gib": 0.25, "state_ssm_gib": 12.8, "kv_tokens": 241196, "kv_k_gib": 7.36,
                "kv_v_gib": 7.36, "max_total_tokens": 241196, "max_running_requests": 18, "context_len": 262144,
                "available_gib": 10.8, "graphs_gib": 2.96,
            },
        ),
        (
            "mem_too_many_tokens",
            {
                "free_gpu_gib": 21.47, "weights_gib": 0.0, "kv_tokens": 64424036, "kv_k_gib": 7.68, "kv_v_gib": 7.68,
                "max_total_tokens": 64424036, "max_running_requests": 4096, "context_len": 4096, "available_gib": 1.93,
            },
        ),
        ("f_kill_sched_loading", {"free_gpu_gib": 137.61}),
        ("bad_flag", {}),
    ],
)  # fmt: skip
def test_figures_are_those_of_the_log(name, told):
    assert figures(log(name)) == told


@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("server", {"kv_tokens": 8192, "max_running_requests": 2048, "context_len": 4096, "available_gib": 20.99}),
        ("spec_ngram", {"max_running_requests": 48, "available_gib": 19.84}),
        ("hybrid_qwen3next2", {"state_slots": 538990, "state_conv_gib": 1.16, "state_ssm_gib": 6.17}),
        ("hicache_loadback", {"kv_tokens": 1024, "host_kv_gb": 0.0}),
        ("q27_mtp", {"kv_tokens": 1040851, "kv_k_gib": 31.76, "draft_weights_gib": 5.53, "max_running_requests": 4}),
    ],
)
def test_figures_of_other_releases_and_devices(name, some):
    told = figures(log(name))
    assert {key: told.get(key) for key in some} == some


def test_a_log_cut_anywhere_tells_the_stages_up_to_there():
    """A reader comes at any moment: no cut invents a stage, a figure that is not whole, or a failure."""
    text = recorded_log("e96_nomtp")
    whole, all_figures = [stage for stage, _line in stages(lines_of(text))], figures(lines_of(text))
    for cut in range(0, len(text), 997):
        lines = lines_of(text[:cut])
        seen = [stage for stage, _line in stages(lines)]
        assert seen == whole[: len(seen)]
        assert failure(lines) is None
        told = figures(lines_of(text[:cut].rpartition("\n")[0]))
        assert {name: all_figures[name] for name in told} == told


def test_updates_of_a_progress_bar_are_lines_and_never_last():
    text = "Loading\rCapturing:   0%|   | 0/3\rCapturing: 100%|███| 3/3\nafter\n"
    lines = lines_of(text)
    assert lines == ["Loading", "Capturing:   0%|   | 0/3", "Capturing: 100%|███| 3/3", "after"]
    assert last_lines(lines) == ["Loading", "after"]
    assert any("\r" in line for line in recorded_log("e96_nomtp").split("\n"))
    assert not any("%|" in line for line in last_lines(log("e96_nomtp"), 1000))


def test_last_lines_are_few_and_short():
    lines = [f"{number} " + "x" * 1000 for number in range(50)]
    assert len(last_lines(lines)) == 20
    assert [line[:3] for line in last_lines(lines, 2)] == ["48 ", "49 "]
    assert max(map(len, last_lines(lines))) == 400


def test_colour_is_taken_off():
    lines = lines_of("\x1b[32m[2026-01-01 00:00:00] Load weight begin.\x1b[0m avail mem=1.50 GB\n\x1b[0m\n")
    assert lines == ["[2026-01-01 00:00:00] Load weight begin. avail mem=1.50 GB"]
    assert figures(lines) == {"free_gpu_gib": 1.5}


def test_an_empty_log_is_a_start_that_imports(tmp_path):
    path = tmp_path / "empty.log"
    path.write_bytes(b"")
    lines = read_startup(path)
    assert lines == read_tail(path) == []
    assert stages(lines) == [("import", None)]
    assert (figures(lines), failure(lines), aftermath(lines)) == ({}, None, None)


def test_bytes_that_are_no_text_do_no_harm(tmp_path):
    path = tmp_path / "binary.log"
    path.write_bytes(b"\xff\xfe\x00garbage\n[2026-01-01 00:00:00] Load weight begin. avail mem=2.0 GB\xc3")
    assert [stage for stage, _line in stages(read_startup(path))] == ["import", "weights"]
    assert figures(read_tail(path)) == {"free_gpu_gib": 2.0}


def test_the_tail_is_the_end_and_the_startup_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_log, "STARTUP_BYTES", 20)
    monkeypatch.setattr(sglang_log, "TAIL_BYTES", 20)
    path = tmp_path / "long.log"
    path.write_text("first line\n" + "x" * 100 + "\nlast line\n")
    assert read_startup(path) == ["first line", "x" * 9]
    assert read_tail(path)[-1] == "last line"
    assert "first line" not in read_tail(path)


def test_the_time_of_a_line():
    told = sglang_log.stamp_seconds("[2026-11-29 13:28:08 TP0] Load weight begin.")
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told)) == "2026-11-29 13:28:08"
    assert sglang_log.stamp_seconds("no time here [2026-11-29 13:28:08]") is None


def test_every_stage_has_a_limit():
    assert sglang_log.STAGE_NAMES == [
        "import", "weights", "state pool", "KV pool", "graph capture", "host pools", "warm-up", "ready",
    ]  # fmt: skip
    assert set(sglang_log.STAGE_LIMITS) == set(sglang_log.STAGE_NAMES)


def test_the_first_specific_line_wins_over_what_follows():
    lines = ["Scheduler hit an exception", "ValueError: Not enough memory. Please try to increase --mem-fraction-static",
             "error: unrecognized arguments: --x"]  # fmt: skip
    assert failure(lines)["id"] == "no_kv_memory"


def test_the_last_exception_tells_more_than_a_child_that_failed():
    lines = ["[2026-01-01 00:00:00] Scheduler hit an exception: Traceback", "KeyError: 'first'", "my.mod.OddError: second"]
    assert aftermath(lines)["cause"] == UNKNOWN + "my.mod.OddError: second"
    assert aftermath(lines[:1])["id"] == "scheduler_exception"
    assert aftermath(["Received sigquit from a child process. It usually means"])["id"] == "child_failed"
    assert aftermath(["all is well"]) is None


def test_a_second_set_of_weights_of_the_same_size_is_not_a_draft():
    end = "Load weight end. elapsed=1.0 s, type=Qwen, avail mem=1.0 GB, mem usage={} GB."
    assert figures([end.format(5.0), end.format(5.0)]) == {"weights_gib": 5.0}
    assert figures([end.format(5.0), end.format(0.5)]) == {"weights_gib": 5.0, "draft_weights_gib": 0.5}


def test_an_unknown_death_says_so_and_shows_its_last_exception():
    lines = ["KeyError: 'first'", "[2026-01-01 00:00:00] Scheduler hit an exception: Traceback", "my.OddError: second"]
    verdict = aftermath(lines)
    assert (verdict["id"], verdict["cause"]) == ("exception", UNKNOWN + "my.OddError: second")
    assert "docs/faults.md" in verdict["advice"]
    old = ["ValueError: of last week", *["served"] * 100]
    assert aftermath(old) is None, "a server that was killed has not died of a bad request of last week"


def test_lines_that_matter_end_with_the_one_that_names_the_cause():
    shown = matter(log("no_weights"), failure(log("no_weights")))
    assert shown[-1].startswith("RuntimeError: Cannot find any model weights") and 1 < len(shown) <= 12
    assert matter(log("bad_flag"), failure(log("bad_flag")))[-1].endswith("unrecognized arguments: --no-such-flag 1")
    assert not any(line.startswith(("usage", "  [--")) for line in matter(log("bad_flag"), None))
    assert matter(log("server"), None)[-1] == last_lines(log("server"), 1)[0]
    assert matter([], None) == []


def test_of_a_traceback_only_the_innermost_frame_matters():
    shown = matter(log("no_weights"), failure(log("no_weights")))
    frames = [line for line in shown if line.startswith("  File ")]
    assert len(frames) == 1 and frames[0].endswith("in _prepare_weights") and shown[-2] == frames[0]
    assert any("Load weight begin" in line for line in shown), "what came before it is in sight again"


def test_what_was_asked_for_is_read_from_the_engines_own_line():
    assert asked(log("f_hicache_200")) == {"fraction": 0.92, "hicache_gb": 200}
    assert asked(log("server")) == {}


def test_the_cause_of_a_death_while_serving_is_not_the_trouble_of_the_start(tmp_path):
    path = tmp_path / "s.log"
    path.write_text(
        "OSError: [Errno 28] No space left on device\nThe server is fired up and ready to roll!\n"
        "Subprocess scheduler_0 (pid=7) crashed with exit code -11. Triggering SIGQUIT for cleanup...\n"
    )
    stage, verdict = cause_of_death(path)
    assert (stage, verdict["id"], verdict["cause"]) == ("ready", "child_died", "scheduler_0 (pid 7) died with exit code -11")
    assert "segmentation fault" in verdict["advice"] and verdict["advice"].endswith("; then stop.yml and deploy.yml")
    path.write_text("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n")
    assert cause_of_death(path)[1]["advice"].endswith("; then deploy again")
    path.write_text("Load weight begin. avail mem=1.0 GB\n")
    assert cause_of_death(path) == ("weights", None)


READY_LINE = "[2026-01-01 00:00:00] The server is fired up and ready to roll!"
SILENT = "[2026-01-01 00:01:00] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
BAD = "OSError: [Errno 28] No space left on device"
POST = '[2026-01-01 00:02:00] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'
HEALTH = '[2026-01-01 00:02:00] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK'
BATCH = "[2026-01-01 00:02:00 TP0] Decode batch, #running-req: 1"
SOON = "[2026-01-01 00:01:03 TP1] Decode batch, #running-req: 1"
CRASH = "[2026-01-01 00:03:00] Subprocess detokenizer (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
TERM = "[2026-01-01 00:01:00] SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
HIT = "[2026-01-01 00:01:00] Scheduler hit an exception: Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("lines", "cause_id"),
    [
        ([SILENT], "detokenizer_silent"),
        ([SILENT, HEALTH], None),
        ([SILENT, BATCH], None),
        ([SILENT, BATCH.replace("Decode", "Prefill")], None),
        ([SILENT, HEALTH.replace("200 OK", "503 Service Unavailable")], "detokenizer_silent"),
        ([SILENT, POST], "detokenizer_silent"),
        ([SILENT, SOON], "detokenizer_silent"),
        ([SILENT, BATCH, SILENT.replace("00:01", "00:04")], "detokenizer_silent"),
        ([SILENT, BATCH, CRASH], "child_died"),
        ([SILENT, CRASH, BATCH.replace("00:02", "00:04")], "child_died"),
        ([SILENT.replace("00:01", "00:00"), BAD, HEALTH], None),
        ([SILENT.replace("00:01", "00:00"), BAD, HEALTH, CRASH], "child_died"),
        ([HEALTH, BAD], "disk_full"),
        ([SOON, "ValueError: somebody's bad request", HEALTH], None),
        ([TERM, BATCH], "terminated"),
        ([HIT, FAULT, BATCH], "gpu_fault"),
    ],
)
def test_what_a_server_outlived_is_no_cause_of_its_death(tmp_path, lines, cause_id):
    path = tmp_path / "s.log"
    path.write_text("\n".join([READY_LINE, *lines, ""]))
    stage, verdict = cause_of_death(path)
    assert (stage, verdict and verdict["id"]) == ("ready", cause_id)


KEY = "it's-a-\\key"


@pytest.mark.parametrize("form", ["api_key={key!r}, admin", "{{'api_key': {key!r}, 'a': 1}}"])
@pytest.mark.parametrize("key", [KEY, "k"])
def test_a_key_in_a_log_becomes_stars_and_nothing_else_moves(tmp_path, form, key):
    path = tmp_path / "s.log"
    text = f"kicks off\n{form.format(key=key)}\nkept: all of it\n"
    path.write_text(text)
    with open(path, "a") as writer:
        assert redact(path, [key, ""]) == 1
        writer.write("more\n")
    told = path.read_text()
    assert repr(key)[1:-1] not in told.splitlines()[1].replace("api_key", "")
    assert (told[:9], told[len(text) - 16 :]) == ("kicks off", "kept: all of it\nmore\n")
    assert redact(path, [key]) == 0
