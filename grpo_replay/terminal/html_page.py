"""HTML pages from templates that lie beside the module that fills them."""

from typing import Any


def render_page(template: str, **values: Any) -> str:
    """The text of a page. `template` is a file of the package; every text is escaped unless the
    template says otherwise, and a name that `values` lacks is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("grpo_replay", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
