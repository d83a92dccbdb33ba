"""Planted bugs: each is a small subclass, and the simulation must find each within some seeds."""

import pytest

from chaos import planted


@pytest.mark.parametrize("bug", planted.BUGS)
def test_planted_bug_is_found(bug):
    assert planted.find(bug) is not None
