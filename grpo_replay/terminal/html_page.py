"""HTML pages from templates in the folders of the modules that fill them."""

from typing import Any


def render_page(template: str, **values: Any) -> str:
    """Render a page. `template` is a file of the package; text is escaped unless the template marks
    it safe. Raises jinja2's UndefinedError for a name that is missing in `values`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("grpo_replay", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
