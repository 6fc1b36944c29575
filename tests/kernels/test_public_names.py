"""The public names of `quire.kernels`."""

import pkgutil

import quire.kernels


def test_no_module_has_the_name_of_an_operator():
    """Importing ``quire.kernels.NAME`` as a module would put it where the function of that name is."""
    modules = {module.name for module in pkgutil.iter_modules(quire.kernels.__path__)}
    assert {"attention", "common", "layers", "pages"} <= modules
    assert not modules & set(quire.kernels.__all__)
