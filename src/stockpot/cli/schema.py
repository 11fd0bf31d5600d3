"""`stockpot schema`: the JSON schema of recipes."""

from __future__ import annotations

from stockpot.cli.failures import guarded


@guarded
def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML.

    Examples:

    ```
    stockpot schema > recipe.schema.json
    # then, as the first line of a recipe:
    # yaml-language-server: $schema=recipe.schema.json
    ```
    """
    from stockpot.cli.shell import document
    from stockpot.recipe import json_schema

    document(json_schema())
