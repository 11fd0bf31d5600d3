"""`stockpot doctor`: what is installed and what this machine has, for bug reports."""

from __future__ import annotations

from stockpot.cli.failures import guarded
from stockpot.cli.options import Json

# Extra -> the packages that make it work.
_EXTRAS = {
    "cli": ("typer", "rich", "pydantic", "PyYAML", "jinja2", "matplotlib"),
    "demo": ("scikit-learn",),
    "transformers": ("transformers", "tokenizers"),
    "vision": ("timm", "torchvision", "pillow"),
    "clip": ("open_clip_torch",),
    "tables": ("pyarrow",),
    "tensorboard": ("tensorboard",),
}


@guarded
def doctor(as_json: Json = False) -> None:
    """Describe the environment, for bug reports.

    Examples:

    ```
    stockpot doctor
    stockpot doctor --json > doctor.json
    ```
    """
    from stockpot._version import __version__
    from stockpot.cli.shell import document, say
    from stockpot.report import words
    from stockpot.run.environment import environment, installed

    facts = environment("cuda" if _cuda() else None)
    extras = {extra: {name: installed(name) for name in names} for extra, names in _EXTRAS.items()}
    if as_json:
        document({"stockpot": __version__, **facts, "extras": extras})
        return
    lines = {
        "stockpot": __version__,
        "python": facts["python"],
        "torch": f"{facts['torch']}, {facts['threads']} threads",
        "platform": facts["platform"],
        "processor": f"{facts['cpu']}, {facts['cores']} cores",
        "memory": words.size(facts["memory"]),
        "device": facts["device"],
    }
    for name, text in lines.items():
        say(f"{name:<13}{text}")
    for extra, packages in extras.items():
        missing = [name for name, version in packages.items() if version is None]
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        hint = f"missing {', '.join(missing)}: pip install 'stockpot[{extra}]'" if missing else ""
        say(f"{extra:<13}{'; '.join(part for part in (have, hint) if part)}")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
