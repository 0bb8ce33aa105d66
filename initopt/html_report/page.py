"""The document of a run as an HTML file. The page's script draws it; nothing of a run is ever markup or code.

A policy in the page names the digests of its own style and script: a browser runs no other, and asks no network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

_SCRIPTS = ("elements", "lanes", "graph", "tables", "page")
"""In this order: the last one draws."""


def named_html(path: Path) -> Path:
    """The path, if a browser would take the file for a page. Raises ValueError otherwise."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{path}: the report is a page: `initopt report --html run.html`")
    return path


def page(document: Mapping[str, Any]) -> bytes:
    """The file: always the same bytes for the same document."""
    files = resources.files(__package__)
    style = (files / "page.css").read_text(encoding="utf-8")
    parts_of_it = "".join((files / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts_of_it}}})();\n'
    told = document["sentence"] or f"No rank reached its {document['goal']}."
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'",
        "title": html.escape(f"initopt: {document['title']}"),
        "sentence": html.escape(told),
        "style": style,
        "data": _inert(json.dumps(document, separators=(",", ":"))),
        "script": script,
    }
    template = (files / "page.html").read_text(encoding="utf-8")
    # In one go: what stands in the data is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template).encode()


def _inert(text: str) -> str:
    """JSON text that can't end the element it stands in, or begin another."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
