# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Say in JSON what a venv for the CPU engine is, and what keeps this machine from making one.

    python probe_cpu.py VENV SHA256 NEEDED_GB

Read from standard input by the Python that would make the venv.
"""

import json
import os
import sys

MARKER = ".sglang_fleet.json"
INSTALLING = ".sglang_fleet_installing"
LEAST_PYTHON = (3, 11)


def runs(python, version):
    """True when the venv's Python starts and is still the version that it was made with."""
    import subprocess

    script = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    try:
        answer = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.strip() == version


def state_of(venv, sha256, version):
    """One of absent, foreign, interrupted, outdated and current."""
    if not os.path.lexists(venv):
        return "absent"
    if not os.path.isdir(venv):
        return "foreign"
    entries = os.listdir(venv)
    if not entries:
        return "absent"
    if INSTALLING in entries:
        return "interrupted"
    if MARKER not in entries:
        return "foreign"
    try:
        with open(os.path.join(venv, MARKER), encoding="utf-8") as file:
            marker = json.load(file)
    except (OSError, ValueError):
        return "interrupted"
    if marker.get("python") != version or not runs(os.path.join(venv, "bin", "python"), version):
        return "interrupted"
    return "current" if marker.get("sha256") == sha256 else "outdated"


def free_gb_at(path):
    """Free space where `path` is or would be."""
    import shutil

    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free / 1e9


def problem_with(venv, state, needed_gb):
    """Why the venv can't be made here, in one sentence; empty when it can."""
    from importlib.util import find_spec

    if state == "foreign":
        return (
            f"{venv} holds something that this role did not install: name an empty or a new folder with "
            "sglang_engine_venv, or remove it."
        )
    if state in ("absent", "interrupted") and not (find_spec("venv") and find_spec("ensurepip")):
        return (
            f"{sys.executable} can't make a venv with pip, its module ensurepip is missing: install it "
            "(`apt-get install python3-venv` on Debian and Ubuntu), or name another Python with sglang_engine_python."
        )
    if state == "absent" and free_gb_at(venv) < needed_gb:
        return (
            f"{venv} has {free_gb_at(venv):.1f} GB free, SGLang for the CPU needs {needed_gb:.1f} GB: make room, "
            "or name a folder elsewhere with sglang_engine_venv."
        )
    return ""


def main():
    if sys.version_info[:2] < LEAST_PYTHON:
        sys.exit(f"it is {sys.version_info[0]}.{sys.version_info[1]}")
    venv, sha256, needed_gb = os.path.abspath(os.path.expanduser(sys.argv[1])), sys.argv[2], float(sys.argv[3])
    version = ".".join(str(number) for number in sys.version_info[:2])
    state = state_of(venv, sha256, version)
    facts = {
        "state": state,
        "problem": "" if state == "current" else problem_with(venv, state, needed_gb),
        "python": version,
        "site_packages": os.path.join(venv, "lib", "python" + version, "site-packages"),
    }
    print(json.dumps(facts))


main()
