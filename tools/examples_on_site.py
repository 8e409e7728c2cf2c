"""Hook of the documentation site: copies `examples/` into it, so that links work there as in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[1] / "examples"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the programs and notebooks to the files of the site."""
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix in (".py", ".ipynb"):
            name = path.relative_to(EXAMPLES.parent).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Point links of the pages in docs/ to the copies."""
    return markdown.replace("](../examples/", "](examples/")
