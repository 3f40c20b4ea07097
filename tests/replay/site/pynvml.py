# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Four GPUs of a replay, for what asks nvidia-ml-py: names and sizes only, no process ever holds any of it."""

from __future__ import annotations

from types import SimpleNamespace

COUNT = 4
TOTAL = 97887 << 20  # a 96 GB card
FREE = 97250 << 20  # idle, as the recordings e96_* had it


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return COUNT


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetMemoryInfo(_handle):
    return SimpleNamespace(total=TOTAL, free=FREE, used=TOTAL - FREE)


def nvmlDeviceGetUUID(handle):
    return f"GPU-replay-{handle}"


def nvmlDeviceGetName(_handle):
    return "replay of a 96 GB GPU"


def nvmlDeviceGetComputeRunningProcesses(_handle):
    return []
