"""What holds for the repository as a whole."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted((ROOT / "packages").iterdir())


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no git checkout: {done.stderr.strip()}")
    return done.stdout


def test_the_committed_lock_has_no_addresses() -> None:
    assert not re.findall(r"\w+://\S+", git("show", "HEAD:uv.lock"))


def test_no_big_files() -> None:
    sizes = [line.split(maxsplit=4)[3:] for line in git("ls-tree", "-rl", "HEAD").splitlines()]
    assert [path for size, path in sizes if size.isdigit() and int(size) > 1_000_000] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_is_whole(package: Path) -> None:
    module = package / "src" / package.name.replace("-", "_")
    for path in (module / "py.typed", module / "__init__.py", package / "CHANGELOG.md"):
        assert path.exists()
    assert "__all__" in (module / "__init__.py").read_text()
    assert len((package / "README.md").read_text().splitlines()) > 10
    assert list((package / "tests").glob("test_*.py"))


def test_versions_go_in_lockstep() -> None:
    projects = [tomllib.loads((p / "pyproject.toml").read_text())["project"] for p in PACKAGES]
    minors = {project["version"].rpartition(".")[0] for project in projects}
    assert len(minors) == 1
    major, minor = minors.pop().split(".")
    wanted = f">={major}.{minor},<{major}.{int(minor) + 1}"
    for project in projects:
        ours = [d for d in project["dependencies"] if d.startswith("pp-")]
        assert all(re.sub(r"^[\w\[\]-]+", "", dependency) == wanted for dependency in ours)


def test_private_names_of_torch_have_one_home_per_package() -> None:
    names = r"^\s*(?:from|import) torch[\w.]*\._\w+|import _[a-z]\w*|\btorch\._\w+"
    private = re.compile(names + r"|\._(?:parameters|buffers|modules|apply)\b", re.MULTILINE)
    for package in PACKAGES:
        homes = [p.name for p in (package / "src").rglob("*.py") if private.search(p.read_text())]
        assert homes in ([], ["torch_private.py"]), (package.name, homes)
