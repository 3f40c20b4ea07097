# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Play a recording: write its lines at their times, open the port when it did, end as it ended."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import threading
import time

from sglang.srt.server_args import prepare_server_args

from sglang_replay import process
from sglang_replay.front import Front
from sglang_replay.recording import Recording

SPAWNED = "server_args=ServerArgs("
PORT_OPEN = "Uvicorn running on"
PORT_TAKEN = "address already in use"
READY = "The server is fired up and ready to roll!"
FAULTS = ("", "hang", "no_http", "bad_generate", "health_hang")
# Seconds of the real engine, to be divided by the speed.
IMPORTS = 15.0
DRAIN = 6.0
CRASH_SEEN, CRASH_SETTLE, CRASH_COREDUMP, CRASH_LOADING = 1.0, 5.0, 60.0, 2.5


def main(argv, environ):
    speed = float(environ.get("SGLANG_REPLAY_SPEED") or 10)
    fault, _, phrase = environ.get("SGLANG_REPLAY_FAULT", "").partition(":")
    if fault not in FAULTS:
        raise SystemExit(f"SGLANG_REPLAY_FAULT is {fault!r}, expected one of: {', '.join(FAULTS[1:])}.")
    started = time.monotonic()
    args = parse(argv, speed)
    Replay(Recording.find(environ.get("SGLANG_REPLAY"), args), args, speed, started, fault, phrase).play()


def parse(argv, speed):
    """Refuse a command line like the engine: after its imports, with the usage before the error."""
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal):
            return prepare_server_args(argv)
    except SystemExit:
        write("REPLAY of f_unknown_flag (the command line of 0.5.17), not SGLang\n")
        time.sleep(IMPORTS / speed)
        write(refusal.getvalue())
        raise


def write(text):
    """One write a line, so that lines of several threads do not mix."""
    os.write(2, text.encode())


def log(text):
    write(time.strftime("[%Y-%m-%d %H:%M:%S] ") + text + "\n")


class Replay:
    def __init__(self, recording, args, speed, started, fault, phrase):
        self.recording, self.args, self.speed, self.started = recording, args, speed, started
        self.fault, self.phrase = fault, phrase
        self.children = {}
        self.kill = recording.meta.get("kill")
        self.front = Front(recording, args, fault, log)
        self.stopping = threading.Event()

    def play(self):
        write(f"REPLAY of {self.recording.name} (recorded {self.recording.meta['recorded']}), not SGLang\n")
        for seconds, text in self.recording.lines:
            if self.kill and seconds >= self.kill["at"]:
                self.wait_until(self.kill["at"])
                self.kill_recorded_child()
            self.wait_until(seconds)
            self.play_line(text)
            if READY in text and self.recording.meta["outcome"] == "ready":
                self.stay()
        if self.recording.meta["outcome"] == "hang":
            self.hang()
        self.wait_until(self.recording.meta["exit"]["at"])
        process.leave(self.recording.meta["exit"]["code"], self.children)

    def play_line(self, text):
        text = self.recording.adapt(text, self.args.host, self.args.port)
        if PORT_OPEN in text and self.fault != "no_http":
            self.open_port()
        if PORT_TAKEN in text:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write(text)
        if SPAWNED in text:
            self.children = {name: process.spawn(f"replay::{name}") for name in ("scheduler", "detokenizer")}
        if READY in text:
            self.front.ready.set()
        if self.fault == "hang" and self.phrase in text:
            self.stay()

    def open_port(self):
        try:
            self.front.open()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            address = (self.args.host, self.args.port)
            log(f"ERROR:    [Errno 98] error while attempting to bind on address {address}: address already in use")
            log("INFO:     Waiting for application shutdown.")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.hang()
        signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())

    def wait_until(self, seconds):
        """Sleep up to that moment of the recording, keeping an eye on the children and on SIGTERM."""
        deadline = self.started + seconds / self.speed
        while True:
            left = deadline - time.monotonic()
            self.look()
            if left <= 0:
                return
            time.sleep(min(left, 0.02))

    def stay(self):
        while True:
            self.look()
            time.sleep(0.02)

    def look(self):
        if self.stopping.is_set():
            self.drain()
        dead = process.dead_child(self.children) if not self.kill else None
        if dead:
            self.crash(*dead)

    def hang(self):
        while True:
            time.sleep(3600)

    def drain(self):
        """SIGTERM while serving: finish what runs, then the engine kills its own tree, itself included."""
        self.front.stopping.set()
        log("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        pause = min(max(DRAIN / self.speed, 0.4), 0.8)  # a child that got the signal too needs a moment to die of it
        time.sleep(pause / 2)
        dead = process.dead_child(self.children)
        if dead:  # the signal went to the whole group
            self.crash(*dead)
        while self.front.running:
            log(f"Gracefully exiting... Remaining number of requests {self.front.running}.")
            time.sleep(5.0 / self.speed)
        log("Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].")
        time.sleep(pause / 2)
        self.kill_tree()

    def crash(self, name, pid, code):
        """A child died that the recording did not kill."""
        del self.children[name]
        if not self.front.opened:
            log(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=False, pid={os.getpid()}")
            write(f"RuntimeError: Rank 0 {name} died during initialization (exit code: {code}). ")
            write("If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.\n")
            time.sleep(CRASH_LOADING / self.speed)
            process.leave(1, self.children)
        self.front.crashed.set()
        time.sleep(CRASH_SEEN / self.speed)
        label = "scheduler_0" if name == "scheduler" else name
        log(f"Subprocess {label} (pid={pid}) crashed with exit code {code}. Triggering SIGQUIT for cleanup...")
        log("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        log("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
        time.sleep(CRASH_SETTLE / self.speed)
        if name == "scheduler":
            log("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        else:
            log("Waiting 60.0 seconds for CUDA coredumps before exiting.")
            time.sleep(CRASH_COREDUMP / self.speed)
        self.kill_tree()

    def kill_recorded_child(self):
        process.kill_child(self.children.pop(self.kill["child"]))
        self.front.crashed.set()
        self.kill = {"at": float("inf")}

    def kill_tree(self):
        log(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
        process.leave(-signal.SIGKILL, self.children)
