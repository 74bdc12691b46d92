from collections.abc import Iterator

import pytest
from harness import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes, shared by all tests of the session."""
    pool = RankPool()
    yield pool
    pool.close()
