"""Build the documentation as a site: the pages of docs/, README, Intro, the sources they link to,
and API pages from docstrings.

    scripts/docs_site FOLDER      writes FOLDER/index.html and the rest; a broken link is an error

The menu is docs/index.md.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FRONT = ("README.md", "Intro.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\((?!\w+://|#)([^)#]+)(#[^)]*)?\)")
PACKAGE = "torchdistpackage"
STYLE = ".md-typeset table:not([class]) :is(td, th) { min-width: 8rem; }\n"
"""On a narrow screen a table scrolls, and its cells stay readable."""


def page_of(file: Path) -> str:
    """Where a file of the project is found in the site, relative to its root."""
    path = file.relative_to(ROOT).as_posix()
    if path == "README.md":
        return "readme.md"
    if path in FRONT:
        return path
    if path.startswith("docs/"):  # pictures too
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def source_page(file: Path) -> str:
    """A file, or the names in a folder, as a page."""
    name = file.relative_to(ROOT)
    if file.is_dir():
        names = sorted(x.name for x in file.iterdir() if not x.name.startswith(("_", ".")))
        return f"# {name}\n\n" + "".join(f"- `{x}`\n" for x in names)
    language = "python" if file.suffix == ".py" else "yaml" if file.suffix == ".yaml" else "bash"
    # a fence that the text cannot hold
    return f"# {name}\n\n``````{language}\n{file.read_text('utf-8')}\n``````\n"


def copy_page(file: Path, pages: Path) -> list[Path]:
    """Write a page with its links turned to the site; the files that it links to."""
    here, linked = page_of(file), []

    def turned(match: re.Match[str]) -> str:
        target = (file.parent / match[1]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]  # left as it is, so that the build refuses it
        linked.append(target)
        up = "../" * here.count("/")
        return f"]({up}{page_of(target)}{match[2] or ''})"

    out = pages / here
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(LINK.sub(turned, file.read_text("utf-8")), "utf-8")
    return linked


def write_pages(pages: Path) -> None:
    todo = [ROOT / "docs" / "index.md", *(ROOT / "docs").glob("*.md"), *(ROOT / x for x in FRONT)]
    done: set[Path] = set()
    while todo:
        file = todo.pop()
        if file in done:
            continue
        done.add(file)
        if file.suffix == ".md":
            todo += copy_page(file, pages)
        elif file.suffix in (".svg", ".png"):
            (pages / page_of(file)).parent.mkdir(exist_ok=True)
            shutil.copy(file, pages / page_of(file))
        else:
            out = pages / page_of(file)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(source_page(file), "utf-8")


def write_api(pages: Path) -> list[str]:
    """A page for each folder that public names come from."""
    from torchdistpackage import NAMES

    folders: dict[str, list[str]] = {}
    for name, place in NAMES.items():
        module, _, attribute = place.partition(":")
        if attribute == name:  # not an earlier name of something
            folders.setdefault(module.partition(".")[0], []).append(f"{module}.{attribute}")
    (pages / "api").mkdir()
    for folder, names in folders.items():
        text = "".join(f"::: {PACKAGE}.{name}\n\n" for name in names)
        (pages / "api" / f"{folder}.md").write_text(f"# {PACKAGE}.{folder}\n\n{text}", "utf-8")
    return sorted(folders)


def menu(api: list[str]) -> list[dict[str, object]]:
    """The headings and links of docs/index.md."""
    entries: list[dict[str, object]] = [{"Home": "index.md"}, {"README": "readme.md"}]
    entries.append({"Tour": "Intro.md"})
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        found = re.findall(r"\[([^]]+)\]\(([^)]+)\)", body)
        places = [(name, page_of((ROOT / "docs" / link).resolve())) for name, link in found]
        pages = [{name[0].upper() + name[1:]: place} for name, place in places]
        entries.append({title: pages})
    entries.append({"API": [{folder: f"api/{folder}.md"} for folder in api]})
    return entries


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        pages = Path(scratch) / "pages"
        pages.mkdir()
        write_pages(pages)
        options = {
            "show_root_heading": True,
            "show_root_full_path": False,
            "heading_level": 2,
            "show_source": False,
            "docstring_style": "google",
            "docstring_options": {"warnings": False},
            "extensions": [str(ROOT / "scripts" / "site_docstrings.py")],
            "separate_signature": True,
            "show_bases": False,
            "merge_init_into_class": True,
        }
        python = {"paths": [str(ROOT)], "options": options}
        settings = {
            "site_name": PACKAGE,
            "docs_dir": str(pages),
            "extra_css": ["site.css"],
            "theme": {"name": "material", "font": False, "features": ["navigation.sections"]},
            "plugins": ["search", {"mkdocstrings": {"handlers": {"python": python}}}],
            "markdown_extensions": ["admonition", "pymdownx.highlight", "pymdownx.superfences"],
            "validation": {
                "links": dict.fromkeys(("not_found", "anchors", "unrecognized_links"), "warn"),
                "nav": {"omitted_files": "ignore"},
            },
            "nav": menu(write_api(pages)),
        }
        (pages / "site.css").write_text(STYLE, "utf-8")
        config = Path(scratch) / "mkdocs.yml"
        config.write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        out = str(Path(sys.argv[1]).resolve())
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
        done = subprocess.run(
            [*command, "-f", str(config), "-d", out],
            env=quiet, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.stderr.write(done.stderr)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
