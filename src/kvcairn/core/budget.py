"""Keeps what a tier has written today in the tier's own folder, so that a restart does not give the budget anew."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from kvcairn.policy.admission import DayBudget
from kvcairn.tiers.base import BUDGET_NAME

logger = logging.getLogger(__name__)


class BudgetFile:
    """The file of one tier. Any thread; blocks for a small write."""

    def __init__(self, folder: Path) -> None:
        """Live in that folder, which exists."""
        self._path = folder / BUDGET_NAME
        self._guard = threading.Lock()

    def load(self, budget: DayBudget) -> None:
        """Take up what an earlier run has spent; nothing where the file is missing or damaged."""
        try:
            kept = json.loads(self._path.read_text())
            budget.day, budget.used_bytes = int(kept["day"]), int(kept["bytes"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s cannot be read, so today's writes count from 0: %s", self._path, error)

    def save(self, budget: DayBudget) -> None:
        """Replace the file. What cannot be saved is said in the log, and counts on in this process."""
        with self._guard:
            draft = self._path.with_name(self._path.name + ".new")
            try:
                draft.touch(mode=0o600)
                draft.write_text(json.dumps({"day": budget.day, "bytes": budget.used_bytes}))
                draft.replace(self._path)
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._path, error)
