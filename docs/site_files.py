"""The site has the repository's own layout: a relative link holds in both, and the README is the front page."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SHOWN = ("*.md", "docs/**/*.md", "docs/*.png", "docs/*.svg", "docs/*.js", "benchmarks/**/*.md", "benchmarks/**/*.py")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages and what they link to, each at its path in the repository, and the theme's own files."""
    root = Path(config.config_file_path or "").parent
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted(found for pattern in SHOWN for found in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
