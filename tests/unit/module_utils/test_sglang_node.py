# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node has: GPUs by NVML or nvidia-smi, memory, an engine, model folders good and broken."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import types

import pytest
from ansible.module_utils import sglang_node
from ansible.module_utils.sglang_node import GIB, engine, gpus, host_memory, model


# -- models -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    """A model folder with a config; files by name and text or bytes."""

    def _folder(files=None, config='{"model_type": "qwen3"}'):
        path = tmp_path / "model"
        path.mkdir()
        if config is not None:
            (path / "config.json").write_text(config)
        for name, text in (files or {}).items():
            (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _folder


def index(*shards, **more):
    return json.dumps({"weight_map": {f"layer{number}": shard for number, shard in enumerate(shards)}, **more})


def safetensors(sizes, header=None, length=None):
    """A file of tensors by name and bytes, as the format writes it; `header` and `length` may be others."""
    tensors, at = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        tensors[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tensors).encode() if header is None else header
    return struct.pack("<Q", len(text) if length is None else length) + text + b"x" * at


def test_a_folder_that_is_not_there(tmp_path):
    path = f"{tmp_path}/none"
    assert model(path) == {
        "path": path,
        "config": None,
        "weight_bytes": None,
        "draft_bytes": None,
        "weight_source": None,
        "problem": f"there is no model folder {path}: copy the model there, or correct the path in models.yml",
    }
    (tmp_path / "file").write_text("x")
    assert model(f"{tmp_path}/file")["problem"].startswith("there is no model folder")


def test_a_folder_without_a_config(folder):
    path = folder({"model.safetensors": "x"}, config=None)
    assert model(str(path))["problem"] == f"{path} has no config.json: it is not a model folder, or not a whole one"


@pytest.mark.parametrize("config", ["", "{", "no json"])
def test_a_config_that_is_no_json(folder, config):
    path = folder(config=config)
    told = model(str(path))
    assert told["problem"].startswith(f"{path}/config.json can't be read: ")
    assert told["config"] is None


def test_one_weight_file(folder):
    path = folder({"model.safetensors": safetensors({"embed.weight": 100, "norm.weight": 23})})
    assert model(str(path)) == {
        "path": str(path),
        "config": {"model_type": "qwen3"},
        "weight_bytes": 123,
        "draft_bytes": 0,
        "weight_source": "files",
        "problem": None,
    }


def test_other_kinds_of_weight_files_count_when_there_is_no_safetensors(folder):
    path = folder({"a.bin": "x" * 5, "b.bin": "x" * 6, "c.pt": "x"})
    assert (model(str(path))["weight_bytes"], model(str(path))["weight_source"]) == (11, "files")


def test_a_folder_whose_name_is_a_pattern(tmp_path):
    path = tmp_path / "model[1]"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(safetensors({"a": 3}))
    assert model(str(path))["weight_bytes"] == 3


def test_headers_tell_the_size_and_not_the_index(folder):
    files = {"a.safetensors": safetensors({"a": 1}), "b.safetensors": safetensors({"b": 20, "c": 300})}
    path = folder({**files, "model.safetensors.index.json": index(*files, metadata={"total_size": 1000})})
    told = model(str(path))
    assert (told["weight_bytes"], told["weight_source"], told["problem"]) == (321, "index", None)


def test_files_that_the_index_does_not_name_do_not_count(folder):
    files = {"a.safetensors": safetensors({"a": 1}), "b.safetensors": safetensors({"b": 2})}
    more = {"consolidated.safetensors": safetensors({"a": 500})}
    path = folder({**files, **more, "model.safetensors.index.json": index(*files, "a.safetensors")})
    assert model(str(path))["weight_bytes"] == 3


def test_shards_that_are_missing_are_named(folder):
    path = folder({"b.safetensors": "x", "model.safetensors.index.json": index("c.safetensors", "b.safetensors")})
    assert model(str(path))["problem"] == (
        f"{path} lacks c.safetensors, which its index names: copy it (a link counts only if its target is there)"
    )
    (path / "b.safetensors").unlink()
    assert f"{path} lacks b.safetensors and 1 more, which its index names" in model(str(path))["problem"]


def test_a_link_whose_target_is_gone_is_missing(folder):
    path = folder({"model.safetensors.index.json": index("a.safetensors")})
    blob = path.parent / "blob"
    (path / "a.safetensors").symlink_to(blob)
    assert "lacks a.safetensors" in model(str(path))["problem"]
    blob.write_bytes(safetensors({"a": 2}))
    assert (model(str(path))["problem"], model(str(path))["weight_bytes"]) == (None, 2)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 1}', "[]", '{"weight_map": ["a"]}', "null"])
def test_an_index_that_is_none(folder, text):
    path = folder({"model.safetensors.index.json": text})
    assert model(str(path))["problem"].startswith(f"{path}/model.safetensors.index.json can't be read: ")


TENSORS = {
    "model.embed_tokens.weight": 1,
    "model.layers.0.mlp.weight": 20,
    "model.layers.1.mlp.weight": 300,
    "model.layers.2.eh_proj.weight": 4000,
    "visual.blocks.7.weight": 50000,
    "lm_head.weight": 600000,
}


@pytest.mark.parametrize(
    ("config", "more", "draft"),
    [
        ({"num_hidden_layers": 2}, {}, 4000),
        ({"num_hidden_layers": 3}, {}, 0),
        ({"text_config": {"num_hidden_layers": 2}, "num_hidden_layers": 9}, {}, 4000),
        ({}, {}, 0),
        ({"num_hidden_layers": 2}, {"mtp.fc.weight": 7000000, "mtp.layers.0.mlp.weight": 80000000}, 87004000),
        ({}, {"mtp.fc.weight": 7000000}, 7000000),
        ({"num_hidden_layers": 3}, {"model.mtp_gate.weight": 7000000}, 0),
        ({"num_hidden_layers": 2}, {"model.language_model.layers.12.weight": 7000000}, 7004000),
    ],
)
def test_a_draft_head_is_counted_by_itself(folder, config, more, draft):
    sizes = {**TENSORS, **more}
    told = model(str(folder({"model.safetensors": safetensors(sizes)}, config=json.dumps(config))))
    assert (told["draft_bytes"], told["weight_bytes"], told["problem"]) == (draft, sum(sizes.values()) - draft, None)


def test_a_draft_head_in_a_file_of_its_own_is_found(folder):
    files = {"a.safetensors": safetensors({"model.layers.0.w": 5}), "mtp.safetensors": safetensors({"mtp.fc.w": 7})}
    told = model(str(folder({**files, "model.safetensors.index.json": index(*files)})))
    assert (told["weight_bytes"], told["draft_bytes"]) == (5, 7)


def test_what_is_no_safetensors_has_no_draft_of_its_own(folder):
    told = model(str(folder({"a.bin": "x" * 5})))
    assert (told["weight_bytes"], told["draft_bytes"], told["problem"]) == (5, None, None)


BROKEN = {
    "empty": b"",
    "short length": b"\x01\x00",
    "text": b"<html>404 Not Found</html>",
    "no JSON": safetensors({}, header=b"{no json"),
    "cut header": safetensors({"a": 3})[:20],
    "no text": safetensors({}, header=b"\xff\xfe"),
    "a list": safetensors({}, header=b"[]"),
    "no offsets": safetensors({}, header=b'{"a": {"dtype": "U8"}}'),
    "no numbers": safetensors({}, header=b'{"a": {"data_offsets": ["a", "b"]}}'),
    "one offset": safetensors({}, header=b'{"a": {"data_offsets": [0]}}'),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_weight_file_with_a_broken_header_is_a_problem(folder, text):
    told = model(str(folder({"a.safetensors": safetensors({"a": 1}), "b.safetensors": text})))
    assert (told["config"], told["weight_bytes"], told["draft_bytes"]) == ({"model_type": "qwen3"}, None, None)
    assert "can't be read: " in told["problem"] and "\n" not in told["problem"]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("broken", ["empty", "no JSON"])
def test_a_weight_file_with_a_broken_header_is_named(folder, broken, indexed):
    files = {"a.safetensors": safetensors({"a": 1}), "b.safetensors": BROKEN[broken]}
    path = folder({**files, **({"model.safetensors.index.json": index(*files)} if indexed else {})})
    assert model(str(path))["problem"].startswith(f"{path}/b.safetensors ")


def test_a_broken_link_for_the_only_weight_file(folder):
    path = folder()
    (path / "model.safetensors").symlink_to(path / "gone")
    problem = model(str(path))["problem"]
    assert "model.safetensors" in problem
    assert "index" not in problem  # there is none


def test_a_folder_without_weights_has_no_size(folder):
    told = model(str(folder({"tokenizer.json": "{}"})))
    assert (told["weight_bytes"], told["weight_source"]) == (None, None)


# -- memory -----------------------------------------------------------------------------------------------------------
def test_host_memory_is_that_of_the_kernel():
    with open("/proc/meminfo", encoding="ascii") as stream:
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e9 for line in stream}
    told = host_memory()
    assert told["total_gb"] == pytest.approx(fields["MemTotal"], abs=0.01)
    assert told["available_gb"] == pytest.approx(fields["MemAvailable"], rel=0.2)
    assert told["cgroup_limit_gb"] is None or 0 < told["cgroup_limit_gb"] < told["total_gb"]


def test_the_lowest_limit_below_the_machines_memory_counts(monkeypatch):
    monkeypatch.setattr(sglang_node, "_cgroup_limits", lambda: iter([2**63 - 4096, 2 * 10**8, 10**8]))
    assert host_memory()["cgroup_limit_gb"] == 0.1
    monkeypatch.setattr(sglang_node, "_cgroup_limits", lambda: iter([2**63 - 4096]))
    assert host_memory()["cgroup_limit_gb"] is None


# -- engine -----------------------------------------------------------------------------------------------------------
def test_the_engine_is_the_one_of_this_python(replay_venv):
    told = engine()
    assert told["python"] == sys.executable
    assert told["python_version"] == ".".join(map(str, sys.version_info[:3]))
    script = (
        "import json, sys, ansible.module_utils as m; m.__path__.append(sys.argv[1]);"
        "from ansible.module_utils.sglang_node import engine; print(json.dumps(engine()))"
    )
    ran = subprocess.run(
        [replay_venv / "bin" / "python", "-c", script, os.path.dirname(sglang_node.__file__)], capture_output=True, check=True
    )
    told = json.loads(ran.stdout)
    assert (told["release"], told["python"]) == ("0.5.17", str(replay_venv / "bin" / "python"))


# -- GPUs -------------------------------------------------------------------------------------------------------------
SMI = """#!/bin/sh
case "$1" in
--query-gpu=index,uuid,name,memory.total,memory.free) {gpus} ;;
--query-gpu=driver_version) echo 580.95.05 ;;
--query-compute-apps=gpu_uuid,pid,used_memory) {apps} ;;
*) exit 2 ;;
esac
"""
TWO = 'printf "0, GPU-a, NVIDIA H200, 143771, 143301\\n1, GPU-b, NVIDIA H200, 143771, 512\\n"'


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that answers so, and no NVML."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def _smi(gpu_answer, apps="true"):
        path = tmp_path / "nvidia-smi"
        path.write_text(SMI.format(gpus=gpu_answer, apps=apps))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return _smi


def test_gpus_by_nvidia_smi(smi):
    smi(TWO, 'printf "GPU-b, 4242, 140000\\nGPU-b, 4243, [N/A]\\nGPU-x, 1, 5\\n"')
    assert gpus() == [
        {"index": 0, "uuid": "GPU-a", "name": "NVIDIA H200", "total_gib": 140.4, "free_gib": 139.94, "processes": []},
        {
            "index": 1,
            "uuid": "GPU-b",
            "name": "NVIDIA H200",
            "total_gib": 140.4,
            "free_gib": 0.5,
            "processes": [{"pid": 4242, "used_gib": 136.72}],
        },
    ]


@pytest.mark.parametrize("kind", ["x86_64 Kernel Module ", "Open Kernel Module for x86_64 "])
def test_the_driver_is_told_by_the_kernel(tmp_path, monkeypatch, kind):
    (tmp_path / "version").write_text(
        f"NVRM version: NVIDIA UNIX {kind} 580.95.05  Release Build  (dvs)\nGCC version: 12.3.0\n"
    )
    monkeypatch.setattr(sglang_node, "DRIVER", str(tmp_path / "version"))
    assert sglang_node.driver() == "580.95.05"


def test_the_driver_is_told_by_nvidia_smi_where_the_kernel_does_not(smi, monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_node, "DRIVER", str(tmp_path / "none"))
    smi(TWO)
    assert sglang_node.driver() == "580.95.05"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert sglang_node.driver() is None


def test_gpus_without_their_processes(smi):
    smi(TWO, "exit 1")
    assert [(gpu["index"], gpu["processes"]) for gpu in gpus()] == [(0, []), (1, [])]


@pytest.mark.parametrize(
    "answer",
    [
        "exit 9",
        'echo "NVIDIA-SMI has failed because it could not communicate"; exit 9',
        "true",
        'echo "No devices were found"',
    ],
)
def test_a_driver_that_fails_shows_no_gpu(smi, answer):
    smi(answer)
    assert gpus() == []


def test_memory_that_nvidia_smi_does_not_tell(smi):
    """Cards that share the host's memory answer [N/A]: the GPU is there all the same."""
    smi('printf "0, GPU-a, NVIDIA GB10, [N/A], [N/A]\\n"')
    assert [(gpu["index"], gpu["total_gib"]) for gpu in gpus()] == [(0, None)]


def test_no_nvidia_smi_shows_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []


class NvmlError(Exception):
    pass


def nvml(**overrides):
    """A pynvml of two GPUs, as old releases tell them (bytes) and new ones (text)."""
    named = types.SimpleNamespace
    module = types.ModuleType("pynvml")
    calls = []
    told = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: named(total=96 * GIB, free=(handle + 1) * GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            named(pid=7, usedGpuMemory=GIB),
            named(pid=8, usedGpuMemory=None),
        ],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode() if handle else "GPU-0",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA X" if handle else "NVIDIA X",
        **overrides,
    }
    for name, value in told.items():
        setattr(module, name, value)
    module.calls = calls
    return module


def test_gpus_by_nvml(monkeypatch):
    module = nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    processes = [{"pid": 7, "used_gib": 1.0}, {"pid": 8, "used_gib": 0.0}]
    assert gpus() == [
        {"index": 0, "uuid": "GPU-0", "name": "NVIDIA X", "total_gib": 96.0, "free_gib": 1.0, "processes": processes},
        {"index": 1, "uuid": "GPU-1", "name": "NVIDIA X", "total_gib": 96.0, "free_gib": 2.0, "processes": processes},
    ]
    assert module.calls == ["init", "shutdown"]


def refuse(*_):
    raise NvmlError("not there")


def test_nvml_without_a_driver_asks_nvidia_smi(smi, monkeypatch):
    smi(TWO)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    assert [gpu["uuid"] for gpu in gpus()] == ["GPU-a", "GPU-b"]


def test_nvml_that_does_not_tell_processes(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetComputeRunningProcesses=refuse))
    assert [gpu["processes"] for gpu in gpus()] == [[], []]
