# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Let tests import the project's plugins and modules as Ansible would find them."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).resolve().parents[1]

ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
for folder in ("tests", "library", "action_plugins", "filter_plugins", "inventory_plugins"):
    sys.path.insert(0, str(ROOT / folder))


@pytest.fixture(scope="session")
def replay_venv(tmp_path_factory):
    """A venv whose `sglang` is the replay."""
    from helpers.replay import make_replay_venv

    return make_replay_venv(tmp_path_factory.mktemp("replay") / "venv")
