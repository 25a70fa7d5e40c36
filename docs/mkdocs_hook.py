"""A hook of mkdocs: the site has the folders of the project, so that every link works there as it does in the project.

mkdocs takes its pages from one folder, and links that leave it would be broken. So the files that pages link to are
added under the names that they have in the project: pages, pictures, results, scripts, configurations. The page about
the API is made from docstrings.
"""

import re
import runpy
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def linked(page: Path) -> set[Path]:
    """Files of the project that a page links to; a folder counts for its README.md."""
    found = set()
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path = (page.parent / unquote(link)).resolve()
        found.add(path / "README.md" if path.is_dir() else path)
    return {path for path in found if path.is_file() and path.is_relative_to(ROOT)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns README.md, all files that can be reached from it by links, and the page about the API."""
    waiting, seen = {ROOT / "README.md"}, set[Path]()
    while waiting:
        page = waiting.pop()
        seen.add(page)
        if page.suffix == ".md":
            waiting |= linked(page) - seen
    assets = [file for file in files if not file.src_uri.startswith("images/") and not file.is_documentation_page()]
    inside = [file for file in assets if not file.src_uri.endswith(".py")]
    added = [File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, use_directory_urls=False) for path in seen]
    api = runpy.run_path(str(ROOT / "docs" / "api_page.py"))["api_page"]()
    made = File.generated(config, "docs/api.md", content=api)
    return Files([*inside, *added, made])
