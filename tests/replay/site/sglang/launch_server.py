# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`python -m sglang.launch_server`, replayed."""

from __future__ import annotations

import os
import sys

from sglang_replay.server import main

if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
