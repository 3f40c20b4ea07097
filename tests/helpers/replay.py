# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A venv whose `sglang` is the replay in tests/replay."""

from __future__ import annotations

import re
import sysconfig
import venv
from pathlib import Path

REPLAY = Path(__file__).resolve().parents[1] / "replay"
RECORDINGS = REPLAY / "recordings"


def make_replay_venv(path) -> Path:
    """Make a venv whose `python -m sglang.launch_server` is the replay; this Python's packages stay importable."""
    path = Path(path)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(path)
    version = sysconfig.get_python_version()
    packages = path / "lib" / f"python{version}" / "site-packages"
    # The replay comes first, so that it hides a real SGLang.
    lines = [str(REPLAY / "site"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (packages / "replay.pth").write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")
    return path


def recorded_log(name) -> str:
    """What the engine wrote in that recording, without the times: text for a log reader, carriage returns included."""
    text = (RECORDINGS / name / "server.tlog").read_bytes().decode()
    return re.sub(r"(?m)^\+ *\d+\.\d+ ", "", text)
