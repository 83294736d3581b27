"""HTML pages: one style, no script and no network, whatever text a run contains.

Templates of other folders extend `page_base.html`, fill its blocks `title` and `body`, and import
its macros.
"""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def page_environment(folder: str) -> Environment:
    """A Jinja2 environment with the templates of `grpo_replay/FOLDER` and the base page.

    It escapes every text, and refuses undefined names.
    """
    return Environment(
        loader=ChoiceLoader(
            [PackageLoader("grpo_replay", folder), PackageLoader("grpo_replay", "terminal")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
