"""The documentation: no dead link, words for every picture, every public name in the reference and with an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch

import gcnn
from common import plane_groups
from gcnn import GROUPS, Group, Oh, p4, p6, plot
from gcnn.functional import act
from gcnn.models import weights
from test_repository import PAGES, run

ROOT = Path(__file__).parent.parent
INSIDE = {"__main__", "config", "demo", "rebuild"}  # what is for users there: `train.Config`, `gcnn demo`, `convert`
MODULES = [
    module
    for found in pkgutil.iter_modules(gcnn.__path__)
    if found.name not in INSIDE and hasattr(module := importlib.import_module(f"gcnn.{found.name}"), "__all__")
]


class Page(HTMLParser):
    """The links, anchors and pictures of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.pictures: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        self.links += [value for key in ("href", "src") if (value := found.get(key))]
        if tag == "img":
            self.pictures.append(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The site as `make docs` builds it: MkDocs fails where it finds something amiss itself."""
    folder = tmp_path_factory.mktemp("site")
    run = {"cwd": ROOT, "check": True, "env": {**os.environ, "NO_MKDOCS_2_WARNING": "1"}}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, **run)  # type: ignore[call-overload]
    return {path: Page(path) for path in folder.rglob("*.html")}


def test_no_link_of_the_site_is_dead(site: dict[Path, Page]) -> None:
    count = 0
    for path, page in site.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                assert re.fullmatch(r"[\w.-]+\.[a-z]{2,}", parts.netloc), link
                continue
            if parts.scheme:
                assert parts.scheme in ("mailto", "data"), link
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name} links to {link}"
            if parts.fragment and target in site and not parts.fragment.startswith("__"):  # of the theme
                assert unquote(parts.fragment) in site[target].anchors, f"{path.name} links to {link}"
            count += 1
    assert count > 500


def test_every_picture_has_words(site: dict[Path, Page]) -> None:
    pictures = [picture for page in site.values() for picture in page.pictures]
    assert len(pictures) >= 8
    for picture in pictures:
        assert len(picture.get("alt") or "") > 20, picture


def anchors(text: str) -> set[str]:
    """The headings of a Markdown file, as code hosts name them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES])
def test_no_link_of_the_repository_is_dead(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", lambda code: "" if "\n" in code[0] else "code", (ROOT / page).read_text(), flags=re.S)
    for alt, link in re.findall(r"!?\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)", text):
        assert alt.strip(), f"{page}: {link} has no words"
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("http", "https"), link
            assert re.fullmatch(r"[\w.-]+\.[a-z]{2,}", parts.netloc), link
            continue
        target = (ROOT / page).parent / unquote(parts.path) if parts.path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if parts.fragment and not link.startswith("reference.md#gcnn."):  # those are made from docstrings, and tested on the site
            assert parts.fragment in anchors(target.read_text()), f"{page} links to {link}"


# --- what pages say is so ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_code_on_pages_fits_the_page(page: str) -> None:
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M):
        for line in block.splitlines():
            assert len(line) <= (88 if kind == "python" else 120), f"{page}: {line}"


NUMBER = r"\d\S*e[+-]\d+"
SHOWN = [
    pytest.param(code, shown, id=f"{page}-{i}")
    for page in PAGES
    for i, (code, shown) in enumerate(re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / page).read_text(), re.S))
]


@pytest.mark.parametrize(("code", "shown"), SHOWN)
def test_pages_show_what_their_code_prints(code: str, shown: str, tmp_path: Path) -> None:
    """Line breaks aside, word by word; errors that are rounding must be so in both, others agree in size."""
    printed = run("-c", code, cwd=tmp_path)
    words, wanted = (re.sub(NUMBER, "#", text).split() for text in (printed, shown))
    assert words == wanted
    for number, other in zip(re.findall(NUMBER, printed), re.findall(NUMBER, shown), strict=True):
        a, b = float(number), float(other)
        assert max(a, b) < 1e-5 or 1 / 4 < a / b < 4, (number, other)


def test_there_are_pages_that_show_what_code_prints() -> None:
    assert {page for page in PAGES if any(page in str(case.id) for case in SHOWN)} >= {"README.md", "docs/exactness.md"}


def test_the_numbers_that_pretrained_networks_take_are_those_of_their_file() -> None:
    about = weights.read(ROOT / "src/gcnn/models/p4cnn.safetensors")[1]["about"]
    expected = f"{about['mean']:.2f}", f"{about['std']:.2f}"
    assert about["recipe"] == "decay/p4cnn, seed 0"  # which the README says
    for page in ("README.md", "docs/howto.md"):
        found = re.findall(r"\(\w+ - (\d+\.\d+)\) / (\d+\.\d+)", (ROOT / page).read_text())
        assert set(found) == {expected}, page


# --- every public name ---------------------------------------------------------------------------------------------------


def public_names() -> Iterator[tuple[ModuleType, str]]:
    for module in (gcnn, *MODULES):
        for name in module.__all__:
            yield module, name


def test_the_modules_are_those_of_the_reference() -> None:
    listed = re.findall(r"^::: gcnn\.(\w+)", (ROOT / "docs/reference.md").read_text(), re.M)
    assert sorted(listed) == sorted(module.__name__.removeprefix("gcnn.") for module in MODULES)


def test_every_public_name_is_in_the_reference(site: dict[Path, Page]) -> None:
    (path,) = (path for path in site if path.name == "reference.html")
    text, missing = path.read_text(), []
    for module, name in public_names():
        homes = {module.__name__, "gcnn.groups"} if module is not gcnn else {"gcnn.groups", "gcnn.convert"}
        anchored = any(f"{home}.{name}" in site[path].anchors for home in homes)
        listed = not callable(getattr(module, name)) and f"<code>{name}</code>" in text  # groups in a table, dictionaries
        if not anchored and not listed:
            missing.append(f"{module.__name__}.{name}")
    assert not missing, f"{len(missing)} public names are not in docs/reference.md: {', '.join(missing)}"


def used(code: str, module: ModuleType | None = None) -> Iterator[Any]:
    """The objects of this package that a piece of code uses, by their names; in a doctest, with those of its module."""
    known: dict[str, Any] = dict(vars(module)) if module else {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gcnn":
            home = importlib.import_module(node.module or "")
            known |= {a.asname or a.name: getattr(home, a.name) for a in node.names if hasattr(home, a.name)}
        elif isinstance(node, ast.Import):
            known |= {a.asname or a.name: importlib.import_module(a.name) for a in node.names if a.name.startswith("gcnn")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in known:
            yield known[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            if isinstance(owner, ModuleType) and hasattr(owner, node.attr):
                yield getattr(owner, node.attr)


def examples() -> Iterator[tuple[str, ModuleType | None]]:
    """Every piece of code that the tests run for readers: pages, examples, notebooks, doctests."""
    for page in PAGES:
        yield from ((block, None) for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S))
    for path in (ROOT / "examples").glob("*.py"):
        yield path.read_text(), None
    for path in (ROOT / "src/gcnn").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        if ">>> " not in path.read_text() or "import triton" in path.read_text():
            continue
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder().find(module, name):
            yield "\n".join(example.source for example in test.examples), module


def test_every_public_name_has_an_example_that_runs() -> None:
    shown = [item for code, module in examples() for item in used(code, module)]
    missing = []
    for module, name in public_names():
        item = getattr(module, name)
        if any(item is other for other in shown):
            continue
        if inspect.isclass(item) and ">>> " in (inspect.getdoc(item) or ""):
            continue
        missing.append(f"{module.__name__}.{name}")
    assert not missing, f"{len(missing)} public names have no example that runs: {', '.join(missing)}"


# --- the pictures ---------------------------------------------------------------------------------------------------------


def figures() -> Any:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs/figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_of_the_pages_are_what_the_code_draws() -> None:
    drawn = figures().pictures()
    kept = {path for pattern in ("*.svg", "groups/*") for path in (ROOT / "docs").glob(pattern)}
    assert kept - {ROOT / "docs/fourier.svg"} == set(drawn)  # that one is made of records, by benchmarks/tables.py
    for path, picture in drawn.items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name}: draw it again, python docs/figures.py"
        assert len(picture) < (400_000 if path.name == "turning.svg" else 10_000)


@plane_groups
def test_the_letter_of_a_picture_turns_as_images_do(group: Group) -> None:
    """By another road: where `act` takes the brightest cell of a map, the picture takes the point of the page."""
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 5, 6] = 1  # row 1, column 2 from the middle
    for s in range(group.order):
        row, column = (int(i) - 4 for i in act(group, s, x)[0, 0].nonzero()[0])
        point, moved = ((c, r) if group.fills_box else (c + r / 2, 0.75**0.5 * r) for r, c in ((1, 2), (row, column)))
        assert np.allclose(figures().on_paper(group, s) @ point, moved)


@plane_groups
def test_every_plane_group_has_its_picture(group: Group) -> None:
    text = (ROOT / "docs/groups.md").read_text()
    elements = f"{group.order} element{'s' if group.order > 1 else ''}"
    assert re.search(
        rf"^### {group.name}: .*, {elements}\n\n!\[{group.name}: [^\]]+\]\(groups/{group.name}.svg\)\n\n\*[^*]+\*\n", text, re.M
    )


def test_an_animation_is_for_turns_of_the_square_lattice() -> None:
    for group in (GROUPS["p1"], p6):
        with pytest.raises(ValueError, match=f"a group with turns on the square lattice, got {group.name}"):
            plot.animation(group, plot.example(p4)[0], plot.example(group))
    with pytest.raises(ValueError, match=r"expected an image \(H, W\), got \(4, 25, 25\)"):
        plot.animation(p4, plot.example(p4), plot.example(p4))
    with pytest.raises(ValueError, match="expected a plane group"):
        plot.animation(Oh, plot.example(p4)[0], plot.example(p4))


def test_the_reference_lists_public_names_alone(site: dict[Path, Page]) -> None:
    (path,) = (path for path in site if path.name == "reference.html")
    for parts in (anchor.split(".") for anchor in site[path].anchors):
        if parts[0] == "gcnn" and len(parts) == 3:
            assert parts[2] in importlib.import_module(".".join(parts[:2])).__all__, parts
