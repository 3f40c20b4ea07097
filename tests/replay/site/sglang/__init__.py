# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Not SGLang: a replay of logs recorded with SGLang 0.5.17, under the package's name so that start scripts find it."""

__version__ = "0.5.17"
