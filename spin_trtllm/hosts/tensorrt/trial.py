# SPDX-License-Identifier: Apache-2.0
"""Python code tried in a process of its own: a library that is broken can end the one it is in."""

from __future__ import annotations

import signal
import subprocess
import sys

TIMEOUT_SECONDS = 120


def why_it_fails(code: str, *arguments: str) -> str | None:
    """Run code in a bare Python; why it fails, one line, or None if it does not.

    Args:
        code: reads its arguments from `sys.argv[1:]`.
        arguments: of the code; nothing else is passed on but the environment, and of that nothing
            that is Python's.
    """
    command = [sys.executable, "-IS", "-c", code, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it does not end within {TIMEOUT_SECONDS} s"
    if done.returncode < 0:
        return f"it ends its process by {signal.Signals(-done.returncode).name}"
    if done.returncode > 0:
        last = (done.stderr.splitlines() or ["nothing is said"])[-1]
        return last.partition(": ")[2] or last  # without the exception's class
    return None
