"""A hook of mkdocs (mkdocs.yml): the pages of the repository's root become pages of the site, and
a code block without its end stops the build.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File in the root, and its page in the site. A README.md would replace index.md."""


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=_within_the_site(text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    # An even number of fences that open and close in turn.
    fences = re.findall(r"^```(\S*)", markdown, re.MULTILINE)
    if any(fences[1::2]) or len(fences) % 2:
        raise PluginError(f"{page.file.src_path}: a code block has no end")
    return _within_the_site(markdown)


def _within_the_site(text: str) -> str:
    """The text with links to pages of the root as links within the site."""
    for name, page in PAGES.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(name)}", f"]({page}", text)
    return text
