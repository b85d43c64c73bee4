"""What the tests of checkpoints share."""

from __future__ import annotations

import pytest

from tests.support import recipes
from tests.support.checkpoints import COMM


@pytest.fixture
def adapter():
    made = recipes.linear().adapter
    made.setup(COMM)
    return made
