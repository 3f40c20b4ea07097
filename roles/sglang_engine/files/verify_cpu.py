# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Import what a server and a benchmark import, and say in JSON which releases answered.

Read from standard input by the venv's Python after an install. What is imported here is also compiled, so the first
server starts as fast as the next; pip is told to compile nothing, which would take longer and fill 250 MB more.
"""

import json
import warnings
from importlib import import_module

warnings.simplefilter("ignore")

MODULES = (
    "requests",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.bench_serving",
)

for module in MODULES:
    import_module(module)

torch = import_module("torch")
print(json.dumps({"sglang": import_module("sglang").__version__, "torch": torch.__version__, "cuda": torch.version.cuda}))
