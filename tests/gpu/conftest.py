"""The CUDA library, for all tests on a GPU."""

import pytest

from nf4linear import native


@pytest.fixture(scope="module")
def library():
    """On a machine with a GPU the CUDA library must be there: a missing one is a failure, not a skip."""
    found = native.library("cuda")
    assert found, found.why
    return found
