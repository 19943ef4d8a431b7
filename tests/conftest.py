import pytest

import helpers  # noqa: F401  (before any test module imports triton: in CPU mode kernels are then interpreted)


@pytest.fixture(scope="module")
def loaded_once():
    """For a module whose tests, and the programs that they run, need loaded zygotes and do not look at the loading."""
    from helpers import child
    from tests import sharing

    with pytest.MonkeyPatch.context() as patched:
        for name, value in sharing.shared().items():
            patched.setenv(name, value)
        yield
    child.close()  # forks of the shared ones end with the module
