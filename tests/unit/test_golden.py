# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The start scripts of every profile on every GPU, byte by byte. `UPDATE_GOLDEN=1 pytest …` writes them anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
BIN = Path(sys.executable).parent
# Folder below GOLDEN: inventory, profile, node, and what the inventory takes from where it lies.
CASES = {
    "nomtp": ("four_gpus", "nomtp", "node1", []),
    "mtp": ("four_gpus", "mtp", "node1", []),
    "mtp_hicache": ("four_gpus", "mtp_hicache", "node1", []),
    "local": ("local", "nomtp", "local", ["-e", "sglang_root=/srv/sglang"]),
}
SCRIPTS = [
    *(f"{profile}/start_sglang_gpu{gpu}_{profile}.sh" for profile in ("nomtp", "mtp", "mtp_hicache") for gpu in range(4)),
    *(f"local/start_sglang_cpu{number}_nomtp.sh" for number in range(2)),
]


@pytest.mark.parametrize("case", CASES)
def test_rendered_scripts_are_those_that_are_kept(root, tmp_path, case):
    inventory, profile, node, more = CASES[case]
    environ = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_HOME": str(tmp_path / "home"),
    }
    argv = [BIN / "ansible-playbook", "render.yml", "-i", f"inventory/{inventory}.yml", "-e", f"profile={profile}"]
    ran = subprocess.run(
        [*argv, "-e", f"out={tmp_path / 'out'}", *more], cwd=root, env=environ, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rendered = {path.name: path for path in (tmp_path / "out" / node).iterdir()}
    assert sorted(f"{case}/{name}" for name in rendered) == sorted(name for name in SCRIPTS if name.startswith(f"{case}/"))
    if os.environ.get("UPDATE_GOLDEN"):
        shutil.rmtree(GOLDEN / case, ignore_errors=True)
        (GOLDEN / case).mkdir(parents=True)
        for name, path in rendered.items():
            shutil.copy(path, GOLDEN / case / name)
    for name, path in rendered.items():
        assert path.read_bytes() == (GOLDEN / case / name).read_bytes()
        assert path.stat().st_mode & 0o777 == 0o755


def test_no_script_is_kept_that_nothing_renders():
    assert sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*")) == sorted(SCRIPTS)


def test_kept_scripts_are_good_bash():
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is not there: pip install -r requirements-dev.txt"
    paths = [GOLDEN / name for name in SCRIPTS]
    for path in paths:
        ran = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
    ran = subprocess.run([shellcheck, *paths], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_a_kept_script_runs_what_it_says(tmp_path):
    """The script under bash, with a python that shows what it is started with."""
    script = (GOLDEN / "mtp_hicache" / "start_sglang_gpu3_mtp_hicache.sh").read_text(encoding="utf-8")
    show = tmp_path / "python"
    show.write_text('#!/bin/sh\nprintf "%s\\n" "$CUDA_VISIBLE_DEVICES" "$SGLANG_FLEET_SERVER" "$@"\n')
    show.chmod(0o755)
    script = script.replace("/opt/sglang/venv/bin/python", str(show))
    ran = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    words = ran.stdout.splitlines()
    assert words[:4] == ["3", "node1-gpu3", "-m", "sglang.launch_server"]
    assert words[words.index("--port") + 1] == "30003"
    assert words[words.index("--hicache-size") + 1] == "150"
    assert words.count("--enable-hierarchical-cache") == 1
