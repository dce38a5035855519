"""Each notebook is executed once, for all tests that look at it."""

import pytest

from tests.notebooks.executing import Executed, Executing, executed


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Executing:
    """Gives a notebook's run by its name."""
    done: dict[str, Executed] = {}

    def run(name: str) -> Executed:
        if name not in done:
            done[name] = executed(name, tmp_path_factory.mktemp("notebook"))
        return done[name]

    return run
