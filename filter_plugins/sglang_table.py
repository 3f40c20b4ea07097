# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows as a table that fits a terminal."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError, AnsibleTypeError

try:
    from tabulate import tabulate
except ImportError:
    tabulate = None

NOTHING = "-"


def table(rows, headers):
    """A plain-text table of ``rows`` (lists as long as ``headers``); None and the empty text are a dash."""
    if tabulate is None:
        raise AnsibleFilterError("tables need the Python package tabulate: pip install -r requirements.txt")
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise AnsibleTypeError(f"sglang_table needs a list of lists, got {type(rows).__name__}")
    for row in rows:
        if len(row) != len(headers):
            raise AnsibleFilterError(f"sglang_table got a row of {len(row)} cells under {len(headers)} headers: {row!r}")
    cells = [[NOTHING if cell is None or cell == "" else str(cell) for cell in row] for row in rows]
    numeric = [
        all(cell == NOTHING or cell.replace(".", "", 1).replace(",", "").isdigit() for cell in column) for column in zip(*cells)
    ]
    align = ["right" if number else "left" for number in numeric] or None
    return tabulate(cells, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"sglang_table": table}
