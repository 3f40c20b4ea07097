# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The replay does what the recorded engine did: stages in order, a port that opens late, health, deaths."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.replay import RECORDINGS, recorded_log

STAGES = (
    "REPLAY of ",
    "server_args=ServerArgs(",
    "Load weight begin.",
    "Load weight end.",
    "KV Cache is allocated.",
    "Memory pool end.",
    "Capture target prefill CUDA graph end.",
    "max_total_num_tokens=",
    "Uvicorn running on http://127.0.0.1:",
    "The server is fired up and ready to roll!",
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Replay:
    """One replay as a process of its own, with its log and its clock."""

    def __init__(self, python, log, recording="", *flags, speed=200, fault="", port=None):
        self.port = port or free_port()
        self.log = log
        environ = {"SGLANG_REPLAY": recording, "SGLANG_REPLAY_SPEED": str(speed), "SGLANG_REPLAY_FAULT": fault}
        argv = [python, "-m", "sglang.launch_server", "--model-path", "/m", "--port", str(self.port), *flags]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                argv,
                env=os.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def text(self):
        return self.log.read_bytes().decode()

    def wait_for(self, condition, seconds=8.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.01)
        raise AssertionError(f"Waited {seconds} s. The log ends in: {self.text()[-600:]}")

    def wait_logged(self, phrase):
        self.wait_for(lambda: phrase in self.text())

    def http(self, path, body=None, timeout=3.0, key=None):
        """Status and body; 0 where nobody listens, -1 where nobody answers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body and json.dumps(body).encode())
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except TimeoutError:
            return -1, ""
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    def children(self):
        """pid -> title, from the kernel."""
        found = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        return found

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)


@pytest.fixture
def start(replay_venv, tmp_path):
    running = []

    def _start(*args, **kwargs):
        replay = Replay(replay_venv / "bin" / "python", tmp_path / f"{len(running)}.log", *args, **kwargs)
        running.append(replay)
        return replay

    yield _start
    for replay in running:
        replay.close()


def test_the_venv_says_the_recorded_release(replay_venv):
    script = "import importlib.metadata as m, requests; print(m.version('sglang'))"
    answer = subprocess.run([replay_venv / "bin" / "python", "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "0.5.17"


def test_a_boot_goes_through_its_stages_and_says_it_is_a_replay(start):
    replay = start("e96_nomtp", "--served-model-name", "tiny", "--enable-metrics")
    seen = []
    while "ready to roll" not in replay.text():
        status = replay.http("/health")[0]
        if not seen or seen[-1] != status:
            seen.append(status)
        assert replay.process.poll() is None
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    # In this order; a busy machine may miss one between two looks.
    assert seen == [status for status in (0, 503, 200) if status in seen]

    text = replay.text()
    places = [text.find(stage) for stage in STAGES]
    assert places == sorted(places) and places[0] == 0
    assert f"http://127.0.0.1:{replay.port} " in text and f"port={replay.port}," in text
    assert "\rCapturing num tokens" in text

    info = json.loads(replay.http("/server_info")[1])
    assert info["replay"] is True
    assert (info["port"], info["served_model_name"], info["version"]) == (replay.port, "tiny", "0.5.17")
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 18
    assert json.loads(replay.http("/v1/loads")[1])["loads"][0]["max_running_requests"] == 18
    assert json.loads(replay.http("/v1/models")[1])["data"][0]["id"] == "tiny"
    assert replay.http("/metrics")[1].startswith("# REPLAY of e96_nomtp")
    assert replay.http("/ready")[0] == 404
    answer = json.loads(replay.http("/generate", {"text": "a b", "sampling_params": {"max_new_tokens": 3}})[1])
    assert answer["text"] == "replay replay replay " and answer["meta_info"]["completion_tokens"] == 3
    assert json.loads(replay.http("/v1/chat/completions", {"max_tokens": 2})[1])["usage"]["completion_tokens"] == 2
    assert sorted(replay.children().values()) == ["replay::detokenizer", "replay::scheduler"]


def test_health_is_503_from_the_open_port_to_the_end_of_the_warm_up(start):
    replay = start("q27_mtp", speed=50)
    assert replay.http("/health")[0] == 0
    replay.wait_for(lambda: replay.http("/health")[0] == 503)
    assert "ready to roll" not in replay.text()
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    assert "ready to roll" in replay.text()


@pytest.mark.parametrize(
    ("flags", "running"),
    [((), 18), (("--speculative-algorithm", "EAGLE"), 4), (("--enable-hierarchical-cache",), 4)],
)
def test_without_a_name_the_flags_choose_the_recording(start, flags, running):
    replay = start("", *flags, speed=500)
    replay.wait_logged(f"max_running_requests={running},")
    assert ("Allocating kv hierarchical" in replay.text()) == ("--enable-hierarchical-cache" in flags)


def test_sigterm_drains_then_kills_its_own_tree(start):
    replay = start("e96_nomtp", speed=500)
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    children = replay.children()
    replay.process.terminate()
    assert replay.process.wait(10) == -signal.SIGKILL
    assert "Gracefully exiting... Remaining number of requests 0." in replay.text()
    replay.wait_for(lambda: not any(alive(pid) for pid in children))  # kill() comes back before they are dead
    assert replay.http("/health")[0] == 0


def test_sigterm_to_the_group_breaks_the_drain(start):
    replay = start("e96_nomtp", speed=500)
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    os.killpg(replay.process.pid, signal.SIGTERM)
    assert replay.process.wait(10) == -signal.SIGKILL
    assert "Subprocess scheduler_0" in replay.text()
    assert "Gracefully exiting" not in replay.text()


def test_a_running_request_is_drained(start):
    replay = start("e96_nomtp", speed=500)
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    answers = []
    client = threading.Thread(target=lambda: answers.append(replay.http("/generate", {"text": "a", "replay_seconds": 0.5})))
    client.start()
    replay.wait_for(lambda: json.loads(replay.http("/v1/loads")[1])["loads"][0]["num_running_reqs"] == 1)
    replay.process.terminate()
    replay.wait_for(lambda: replay.http("/health")[0] == 503)
    assert replay.process.wait(10) == -signal.SIGKILL
    client.join(5)
    assert answers[0][0] == 200
    assert "Remaining number of requests 1" in replay.text()


def test_sigterm_while_loading_ends_it_at_once_and_silently(start):
    replay = start("e96_nomtp", speed=60)
    replay.wait_logged("Load weight begin.")
    replay.process.terminate()
    assert replay.process.wait(10) == -signal.SIGTERM
    assert "SIGTERM" not in replay.text()


@pytest.mark.parametrize(
    ("recording", "code", "phrase"),
    [
        ("f_unknown_flag", 2, "sglang serve: error: unrecognized arguments: --no-such-flag 1"),
        ("f_bad_model", 1, "OSError: Repo id must be in the form"),
        ("f_mem_small", -9, "Not enough GPU memory for hybrid (mamba/linear-attention) state cache"),
        ("f_hicache_200", -9, "ValueError: Not enough host memory available."),
        ("f_kill_sched_loading", 1, "Rank 0 scheduler died during initialization (exit code: -9)"),
        ("f_kill_sched_serving", -9, "No live scheduler processes found"),
        ("f_kill_detok", -9, "Waiting 60.0 seconds for CUDA coredumps before exiting."),
    ],
)
def test_a_recorded_failure_ends_as_it_did(start, recording, code, phrase):
    replay = start(recording, speed=300)
    assert replay.process.wait(8) == code
    assert phrase in replay.text()
    assert replay.text().startswith(f"REPLAY of {recording} ")


def test_a_dead_detokenizer_leaves_the_port_open_and_useless(start):
    replay = start("f_kill_detok", speed=80)
    replay.wait_logged("Waiting 60.0 seconds")
    assert replay.http("/health", timeout=0.3)[0] == -1
    assert replay.process.poll() is None
    assert list(replay.children().values()) == ["replay::scheduler"]


def test_a_child_killed_by_the_test_brings_the_server_down(start):
    replay = start("e96_nomtp", speed=500)
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    scheduler = next(pid for pid, title in replay.children().items() if title == "replay::scheduler")
    os.kill(scheduler, signal.SIGKILL)
    assert replay.process.wait(10) == -signal.SIGKILL
    assert f"Subprocess scheduler_0 (pid={scheduler}) crashed with exit code -9." in replay.text()


def test_a_taken_port_hangs_and_ignores_sigterm(start):
    recorded = start("f_port_used", speed=500)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        replay = start("e96_nomtp", speed=500, port=holder.getsockname()[1])
        for hung in (recorded, replay):
            hung.wait_logged("Waiting for application shutdown.")
            assert f"('127.0.0.1', {hung.port}): address already in use" in hung.text()
            hung.process.terminate()
        time.sleep(0.3)
        assert recorded.process.poll() is None and replay.process.poll() is None


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--no-such-flag", "1"), "sglang serve: error: unrecognized arguments: --no-such-flag 1"),
        (("--load-format", "nosuch"), "sglang serve: error: argument --load-format: invalid choice: 'nosuch'"),
        (("--tp-size", "two"), "error: argument --tp-size/--tensor-parallel-size: invalid int value: 'two'"),
    ],
)
def test_a_bad_command_line_is_refused_in_the_engines_words(start, flags, error):
    replay = start("e96_nomtp", *flags, speed=500)
    assert replay.process.wait(10) == 2
    assert "usage: sglang serve [-h] --model-path" in replay.text()
    assert error in replay.text().splitlines()[-1]


def test_the_flags_of_the_recordings_are_known(replay_venv):
    """The engine took these command lines, so the replay's parser must."""
    lines = [
        json.loads(path.read_text())["argv"]
        for path in RECORDINGS.glob("*/recording.json")
        if path.parent.name != "f_unknown_flag"
    ]
    script = (
        "import json, sys; from sglang.srt.server_args import prepare_server_args;"
        "[prepare_server_args(argv) for argv in json.load(sys.stdin)]"
    )
    subprocess.run([replay_venv / "bin" / "python", "-c", script], input=json.dumps(lines), text=True, check=True)


def test_a_key_from_a_config_file_is_needed(start, tmp_path):
    config = tmp_path / "secret.yml"
    config.write_text("api-key: 'sesame'\n")
    replay = start("e96_nomtp", "--config", str(config), speed=500)
    replay.wait_for(lambda: replay.http("/health")[0] == 200)
    assert replay.http("/server_info")[0] == 401
    assert replay.http("/server_info", key="sesame")[0] == 200


def test_faults(start):
    stuck = start("e96_nomtp", speed=500, fault="hang:Load weight begin")
    mute = start("e96_nomtp", speed=500, fault="no_http")
    bad = start("e96_nomtp", speed=500, fault="bad_generate")
    deaf = start("e96_nomtp", speed=500, fault="health_hang")
    for replay in (mute, bad, deaf):
        replay.wait_logged("ready to roll")
    assert mute.http("/health")[0] == 0
    assert (bad.http("/health")[0], bad.http("/generate", {"text": "a"})[0]) == (200, 500)
    assert deaf.http("/health", timeout=0.3)[0] == -1
    assert deaf.http("/v1/models")[0] == 200
    assert "Load weight begin." in stuck.text().splitlines()[-1]
    assert stuck.process.poll() is None


def test_an_unknown_recording_is_refused_with_the_known_ones(start):
    replay = start("nosuch")
    assert replay.process.wait(10) == 1
    assert "e96_nomtp" in replay.text()


def test_recordings_kept_their_carriage_returns():
    assert "\rCapturing num tokens" in recorded_log("e96_nomtp")
    assert "+" not in recorded_log("e96_nomtp")[:1]


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
