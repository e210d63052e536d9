"""Options, markers and the seed that every random test starts from."""

from __future__ import annotations

import random
import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("kvcairn", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvcairn")

if "--fallback" in sys.argv:  # before any conftest below imports the package, which is before options are read
    sys.modules["kvcairn._native"] = None  # type: ignore[assignment]  # so that importing it fails

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long stages too")
    parser.addoption("--fallback", action="store_true", help="copy by numpy, as where the native core was not built")
    parser.addoption("--seed", type=int, default=None, help="seed of the random tests; printed on failure")


def pytest_configure(config: pytest.Config) -> None:
    given: int | None = config.getoption("--seed")
    config.stash[_SEED] = random.randrange(1 << 32) if given is None else given


def pytest_report_header(config: pytest.Config) -> str:
    core = ", copies by numpy" if config.getoption("--fallback") else ""
    return f"kvcairn: --seed {config.stash[_SEED]}{core}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="runs with --long")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)
    items.sort(key=lambda item: bool(item.get_closest_marker("slow")) + 2 * bool(item.get_closest_marker("long")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"the random tests repeat with --seed {config.stash[_SEED]}")


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """A number to seed every generator of a random test with; another in each run, printed on failure."""
    return pytestconfig.stash[_SEED]
