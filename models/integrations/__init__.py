"""Bridges to other systems; each module needs a package of its own and says which."""

from importlib import metadata


def require(package: str, *versions: str) -> None:
    """Require a package in one of some versions, such as "0.33", without importing it.

    Raises:
        ImportError: it is missing, or has another version.
    """
    supported = " or ".join(versions)
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"needs {package} {supported}: pip install 'quire-attention[{package}]'"
        ) from error
    if not found.startswith(tuple(f"{version}." for version in versions)):
        raise ImportError(f"{package}: expected {supported}, got {found}")
