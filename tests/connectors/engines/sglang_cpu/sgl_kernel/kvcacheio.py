"""As the package."""

from sgl_kernel import missing


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
