# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading a model into the page cache."""

from __future__ import annotations

import pytest


@pytest.fixture
def module(load):
    return load("library", "sglang_page_cache")


def test_every_file_is_read_once(module, call, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 20_000_000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    answer = call(module, {"folder": str(tmp_path)})
    assert (answer["changed"], answer["read_gb"], answer["skipped_because"]) == (False, 0.02, "")
    assert call(module, {"folder": str(tmp_path)}, check=True)["read_gb"] == 0.0


def test_what_does_not_fit_is_not_read(module, call, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x" * 2_000_000)
    monkeypatch.setattr(module, "host_memory", lambda: {"available_gb": 0.001})
    answer = call(module, {"folder": str(tmp_path)})
    assert answer["read_gb"] == 0.0 and "0.0 GB of memory are available" in answer["skipped_because"]


def test_a_folder_that_is_not_there_is_an_error(module, call, tmp_path):
    assert "can't be read into the page cache" in call(module, {"folder": str(tmp_path / "none")})["msg"]
