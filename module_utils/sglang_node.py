# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node has: GPUs, host memory, an engine, a model. Only read, never changed."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
import struct
import subprocess
import sys

try:
    from importlib import metadata
except ImportError:  # pragma: no cover - Python 3.7
    metadata = None

GIB = 1 << 30
GB = 10**9
MIB = 1 << 20
QUERY_SECONDS = 30
DRIVER = "/proc/driver/nvidia/version"
HEADER_BYTES = 100 << 20  # the format's own limit


def _text(value):
    return value.decode() if isinstance(value, bytes) else value


def _gpus_by_nvml():
    """GPUs by nvidia-ml-py, which SGLang brings along; None where it is not there or finds no driver."""
    try:
        import pynvml  # pylint: disable=import-outside-toplevel
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except pynvml.NVMLError:  # a card that fell off the bus still has a number
                memory, running = None, []
            found.append(
                {
                    "index": index,
                    "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "total_gib": round(memory.total / GIB, 2) if memory else None,
                    "free_gib": round(memory.free / GIB, 2) if memory else None,
                    "processes": [
                        {"pid": process.pid, "used_gib": round((process.usedGpuMemory or 0) / GIB, 2)} for process in running
                    ],
                }
            )
        return found
    finally:
        pynvml.nvmlShutdown()


def _smi(query):
    try:
        answer = subprocess.run(  # pylint: disable=ansible-bad-function
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    # Some drivers say "No devices were found" with exit code 0.
    rows = csv.reader(answer.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == query.count(",") + 1]


def _gib(mib):
    return round(int(mib) * MIB / GIB, 2) if mib.isdigit() else None


def _gpus_by_smi():
    rows = _smi("--query-gpu=index,uuid,name,memory.total,memory.free")
    if rows is None:
        return None
    processes = _smi("--query-compute-apps=gpu_uuid,pid,used_memory") or []
    return [
        {
            "index": int(index),
            "uuid": uuid,
            "name": name,
            "total_gib": _gib(total),
            "free_gib": _gib(free),
            "processes": [
                {"pid": int(pid), "used_gib": round(int(used) * MIB / GIB, 2)}
                for owner, pid, used in processes
                if owner == uuid and used.isdigit()
            ],
        }
        for index, uuid, name, total, free in rows
    ]


def driver():
    """The release of the node's NVIDIA driver, None where there is none."""
    try:
        with open(DRIVER, encoding="utf-8") as stream:
            found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", stream.read())
    except OSError:
        found = None
    if found:
        return found.group(1)
    rows = _smi("--query-gpu=driver_version")
    return rows[0][0] if rows else None


def gpus():
    """The node's GPUs as nvidia-smi numbers them; empty where there are none or no driver."""
    found = _gpus_by_nvml()
    return found if found is not None else (_gpus_by_smi() or [])


def _cgroup_limits():
    """Memory limits of this process's cgroup and of those above it, in bytes."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as stream:
            rows = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return
    for _number, controllers, path in rows:
        if controllers == "":
            base, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        while True:
            try:
                with open(os.path.join(base, path.lstrip("/"), name), encoding="ascii") as stream:
                    text = stream.read().strip()
                if text.isdigit():
                    yield int(text)
            except OSError:
                pass
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def host_memory():
    """Host memory in GB of 1e9 bytes, as SGLang counts it."""
    with open("/proc/meminfo", encoding="ascii") as stream:
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in stream}
    # An unlimited cgroup v1 says so with a figure near 2**63.
    limits = [limit for limit in _cgroup_limits() if limit < fields["MemTotal"]]
    return {
        "total_gb": round(fields["MemTotal"] / GB, 2),
        "available_gb": round(fields["MemAvailable"] / GB, 2),
        "cgroup_limit_gb": round(min(limits) / GB, 2) if limits else None,
    }


def engine():
    """The SGLang installation that this very interpreter belongs to."""

    def version(package):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "release": version("sglang"),
        "torch": version("torch"),
        "requests": version("requests"),
    }


class Unreadable(Exception):
    """A weight file that is none: ``filename`` and why."""

    def __init__(self, filename, error):
        # What is ours to say is a ValueError; another one's words alone (a key, a number) would say nothing.
        super().__init__(str(error) if type(error) is ValueError else f"{type(error).__name__} {error}")
        self.filename = filename


def _tensor_bytes(path):
    """Bytes of each tensor of a safetensors file: its header is a length of eight bytes and JSON."""
    try:
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
            here = 8 + length
        spans = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
        sizes = {name: end - start for name, (start, end) in spans.items()}
        needed, has = here + max((end for _start, end in spans.values()), default=0), os.path.getsize(path)
        if has < needed:
            raise ValueError(f"it is cut short, {has} of {needed} bytes")
        return sizes
    except (ValueError, KeyError, AttributeError, TypeError, struct.error) as error:
        raise Unreadable(path, error) from None


def _is_draft(tensor, layers):
    """Does a tensor belong to the model's own multi-token-prediction head, which SGLang loads as a draft or not at all?"""
    if tensor.startswith("mtp."):
        return True
    # Layers of the language model only: a vision or audio tower numbers its own.
    found = re.match(r"(?:(?:model|language_model|text_model|transformer)\.)*layers\.(\d+)\.", tensor)
    return bool(found) and layers is not None and int(found.group(1)) >= layers


def _weight_files(folder, config):
    """``(bytes without a draft head's, bytes of that, source, missing files)`` of a checkpoint."""
    index = os.path.join(folder, "model.safetensors.index.json")
    shards = None
    if os.path.exists(index):
        with open(index, encoding="utf-8") as stream:
            shards = sorted(set(json.load(stream)["weight_map"].values()))
        missing = [shard for shard in shards if not os.path.exists(os.path.join(folder, shard))]
        if missing:
            return None, None, "index", missing
    files = [os.path.join(folder, shard) for shard in shards or []] or glob.glob(
        os.path.join(glob.escape(folder), "*.safetensors")
    )
    if files:
        text = config.get("text_config") or config
        layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
        sizes = {}
        for path in files:
            sizes.update(_tensor_bytes(path))
        draft = sum(size for tensor, size in sizes.items() if _is_draft(tensor, layers))
        return sum(sizes.values()) - draft, draft, "index" if shards else "files", []
    for pattern in ("*.bin", "*.pt", "*.gguf"):
        files = glob.glob(os.path.join(glob.escape(folder), pattern))
        if files:
            return sum(map(os.path.getsize, files)), None, "files", []
    return None, None, None, []


def model(folder):
    """A model folder: its config, the bytes of its weights, and ``problem``, one sentence when it can't be loaded."""
    found = {"path": folder, "config": None, "weight_bytes": None, "draft_bytes": None, "weight_source": None, "problem": None}
    if not os.path.isdir(folder):
        return {
            **found,
            "problem": f"there is no model folder {folder}: copy the model there, or correct the path in models.yml",
        }
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as stream:
            found["config"] = json.load(stream)
    except FileNotFoundError:
        return {**found, "problem": f"{folder} has no config.json: it is not a model folder, or not a whole one"}
    except (OSError, ValueError) as error:
        return {**found, "problem": f"{folder}/config.json can't be read: {error}"}
    if not isinstance(found["config"], dict):
        return {**found, "config": None, "problem": f"{folder}/config.json holds no mapping: it is not a model's configuration"}
    try:
        found["weight_bytes"], found["draft_bytes"], found["weight_source"], missing = _weight_files(folder, found["config"])
    except Unreadable as error:
        return {**found, "problem": f"{error.filename} can't be read: {error}: copy it again"}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        what = getattr(error, "filename", None) or f"{folder}/model.safetensors.index.json"
        return {**found, "problem": f"{what} can't be read: {type(error).__name__} {error}"}
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        found["problem"] = (
            f"{folder} lacks {missing[0]}{more}, which its index names: copy it (a link counts only if its target is there)"
        )
    return found
