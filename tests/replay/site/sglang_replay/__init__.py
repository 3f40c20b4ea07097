# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for an SGLang server: it replays a recorded log at a chosen speed and answers the endpoints.

Environment:
  SGLANG_REPLAY        folder or name of a recording; without it, the one whose speculation and host cache fit the flags
  SGLANG_REPLAY_SPEED  how many times faster than recorded; 10 without it
  SGLANG_REPLAY_FAULT  one of
                         hang:PHRASE    write nothing more after the first line with PHRASE, and stay
                         no_http        say ready, but never open the port
                         bad_generate   answer 500 to every generation
                         health_hang    take the connection and never answer /health
"""
