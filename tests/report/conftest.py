"""A cache and a browser for the tests of this folder."""

import pytest

from tests.browser import quit_browser


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory):
    """Keep the line statistics of runs out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFM_BLOCKS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="package")
def one_browser():
    """Stop the browser after the last test that opened a page in it."""
    yield
    quit_browser()
