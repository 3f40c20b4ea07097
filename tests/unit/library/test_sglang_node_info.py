# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module sglang_node_info: one call, all that a node has."""

from __future__ import annotations

from ansible.module_utils.sglang_process import boot_id


def test_a_node_without_gpus(load, call, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    header = b'{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xyz")
    models = [str(tmp_path), "/no/such/model", str(tmp_path)]
    answer = call(load("library", "sglang_node_info"), {"models": models}, check=True)
    assert (answer["rc"], answer["changed"]) == (0, False)
    assert (answer["gpus"], answer["driver"]) == ([], None)
    assert list(answer["models"]) == [str(tmp_path), "/no/such/model"]
    assert answer["models"][str(tmp_path)]["weight_bytes"] == 3
    assert answer["models"]["/no/such/model"]["problem"].startswith("there is no model folder /no/such/model")
    assert answer["boot_id"] == boot_id()
    assert answer["host_memory"]["total_gb"] > answer["host_memory"]["available_gb"] > 0
    assert set(answer["engine"]) == {"python", "python_version", "release", "torch", "requests"}
