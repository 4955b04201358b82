# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/logger.py `logger` (info, warning, warning_once, info_once)."""

from __future__ import annotations

import logging


class Logger:
    """Mirrors tensorrt_llm/logger.py Logger. Keys of *_once calls are remembered."""

    def __init__(self) -> None:
        self._log = logging.getLogger("tensorrt_llm.double")
        self._seen: set[str] = set()

    def info(self, *msg: object) -> None:
        self._log.info(" ".join(map(str, msg)))

    def warning(self, *msg: object) -> None:
        self._log.warning(" ".join(map(str, msg)))

    def warning_once(self, *msg: object, key: str) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.warning(*msg)

    def info_once(self, *msg: object, key: str) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.info(*msg)


logger = Logger()  # tensorrt_llm/logger.py logger
