"""Settings of the attacks, and how many inputs they tried."""

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.cli.conftest import exported, finished_run  # noqa: F401  fixtures
from tests.fuzz.strategies import FACTOR, TRIED

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],  # to explain takes longer than all the others
    "print_blob": True,
}
settings.register_profile("test", derandomize=True, **COMMON)
settings.register_profile("fuzz", derandomize=False, **COMMON)
settings.load_profile("fuzz" if FACTOR else "test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in TRIED.items():
        terminalreporter.write_line(f"{name}: {count:,} inputs")
