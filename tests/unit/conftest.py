# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What unit tests share: module calls without a connection, children that are surely ended, the project's own data."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_process import boot_seconds, identity
from ansible.module_utils.sglang_state import Paths, read_state, write_state
from ansible.module_utils.testing import patch_module_args
from ansible.plugins.loader import filter_loader, init_plugin_loader

ROOT = Path(__file__).resolve().parents[2]

init_plugin_loader()
filter_loader.add_directory(str(ROOT / "filter_plugins"))


@pytest.fixture(scope="session")
def root():
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="session")
def fleet_data():
    """What group_vars/all holds, untemplated: profiles, releases, devices, models."""
    data = {}
    for name in ("profiles", "releases", "devices", "models"):
        data.update(yaml.safe_load((ROOT / "group_vars" / "all" / f"{name}.yml").read_text(encoding="utf-8")))
    return data


def load(folder, name):
    """A module or plugin of the project by its folder: some names are there twice."""
    spec = importlib.util.spec_from_file_location(f"{folder}.{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", name="load")
def load_fixture():
    """Load a module or plugin by folder and name."""
    return load


@pytest.fixture
def call(capsys):
    """Run a module's main() with arguments; what it answers, with `rc` its exit status."""

    def _call(module, args, check=False, diff=False):
        capsys.readouterr()
        internals = {"_ansible_check_mode": check, "_ansible_diff": diff}
        with patch_module_args({**args, **internals}), pytest.raises(SystemExit) as left:
            module.main()
        return {**json.loads(capsys.readouterr().out), "rc": left.value.code or 0}

    return _call


@pytest.fixture
def warned(monkeypatch):
    """What modules warn of, in the order in which they do."""
    said = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda self, text: said.append(text))
    return said


def free_port():
    """A TCP port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=8.0):
    """The first true value of `condition()`; an AssertionError when none comes in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {condition}")


@pytest.fixture
def helpers():
    """free_port and until, for tests that are imported by path and not by package."""

    class Helpers:
        pass

    Helpers.free_port = staticmethod(free_port)
    Helpers.until = staticmethod(until)
    return Helpers


@pytest.fixture
def spawn():
    """Start real processes, each in a session of its own unless told; all of a session is killed at the end."""
    started = []

    def _spawn(argv, **options):
        options = {"start_new_session": True, "stdin": subprocess.DEVNULL, **options}
        process = subprocess.Popen([str(word) for word in argv], **options)
        started.append((process, options["start_new_session"]))
        return process

    yield _spawn
    for process, leads in started:
        with contextlib.suppress(ProcessLookupError):
            if leads:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait(5)


@pytest.fixture
def python(spawn):
    """Start this Python with a script that prints one line when it is set up; the process and that line."""

    def _python(script, *args, **options):
        process = spawn([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True, **options)
        return process, process.stdout.readline().strip()

    return _python


class Boot:
    """One boot of a server as sglang_server leaves it: a process, a log and a state file."""

    def __init__(self, paths, process, log, port):
        self.paths, self.process, self.log, self.port = paths, process, log, port

    @property
    def state(self):
        return read_state(self.paths.state)

    def kill(self):
        """SIGKILL, and not before it is dead: kill() returns while the process still lives."""
        self.process.kill()
        self.process.wait(10)

    def logged(self, phrase):
        return phrase in self.log.read_text(encoding="utf-8", errors="replace")


@pytest.fixture
def boot(spawn, tmp_path, replay_venv):
    """Boot a replay, or any command with a log that is given, and write down its state."""

    def _boot(recording="", fault="", argv=(), log=None, command=None, name="n-gpu0", speed=500, port=None, **state):
        root, slug = str(tmp_path / "fleet"), f"sglang_{name.partition('-')[2]}"
        paths, port = Paths(root, slug), port or free_port()
        paths.make()
        path = Path(paths.logs) / "boot.log"
        path.write_text(log or "", encoding="utf-8")
        python = str(replay_venv / "bin" / "python")
        words = [python, "-m", "sglang.launch_server", "--model-path", "/m", "--port", str(port), *argv]
        environ = {
            **os.environ,
            "SGLANG_FLEET_ROOT": root,
            "SGLANG_FLEET_SERVER": name,
            "SGLANG_REPLAY": recording,
            "SGLANG_REPLAY_SPEED": str(speed),
            "SGLANG_REPLAY_FAULT": fault,
        }
        launched = {"launched_epoch": time.time(), "launched_boot_seconds": boot_seconds()}
        with open(path, "ab") as output:
            process = spawn(command or words, env=environ, stdout=output, stderr=output)
        written = {
            "name": name,
            "identity": identity(process.pid),
            "launching": False,
            "profile": "nomtp",
            "argv": words,
            "env": {},
            "port": port,
            "log": str(path),
            "launched_at": "2026-01-01T00:00:00Z",
            "stopped_at": None,
            "record": {"model": "m", "release": "0.5.17", "flags": [["--a"]], "model_path": "/m", "served_model_name": "m"},
            **launched,
            **state,
        }
        write_state(paths.state, written)
        return Boot(paths, process, path, port)

    return _boot
