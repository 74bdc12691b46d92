"""What is checked and how: `uv run nox` runs all of it, `uv run nox -s NAME` one session."""

import re
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"

ROOT = Path(__file__).parent
TWO_WORKERS = ("-n", "2", "--dist", "worksteal")  # much of a test is waiting, for imports and ranks
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
SOURCES = [f"packages/{name}/src" for name in PACKAGES]


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Format and style."""
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Strict types, all packages at once."""
    session.run("mypy", *SOURCES)


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Which package may import which."""
    session.run("lint-imports", "--no-cache")


@nox.session
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's unit tests, on its built wheel and what it declares, nothing else."""
    dist = build_wheels(session)
    module = package.replace("-", "_")
    (wheel,) = dist.glob(f"{module}-*.whl")
    extras = "[plot]" if package == "pp-schedule" else ""
    session.install(
        f"{package}{extras} @ file://{wheel}", "pytest", "pytest-xdist", "--find-links", str(dist),
        "-c", str(constraints(session)),
    )  # fmt: skip
    # Away from the sources, so that what is imported is what was installed.
    with session.chdir(tempfile.mkdtemp()):
        session.run(
            "python", "-m", "pytest", "-q", *TWO_WORKERS, "-c", str(ROOT / "pyproject.toml"), "-p",
            "no:cacheprovider", str(ROOT / "packages" / package / "tests"), *session.posargs,
        )  # fmt: skip


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Several ranks, several packages; parity has a session of its own."""
    session.run(
        "python", "-m", "pytest", "-q", *TWO_WORKERS, "tests_integration", "--durations=10",
        "--ignore=tests_integration/test_parity.py",
        "--ignore=tests_integration/test_architectures.py",
        "--ignore=tests_integration/test_stored.py", *session.posargs,
    )  # fmt: skip


@nox.session(venv_backend="none")
def parity(session: nox.Session) -> None:
    """Pipelined against unsplit: schedules on ranks, architectures and their checkpoints.

    With `-- --all` every architecture of Transformers' mapping instead, and its table in docs.
    """
    tests = ["tests_integration/test_architectures.py", "tests_integration/test_stored.py"]
    if "--all" not in session.posargs:
        session.run(
            "python", "-m", "pytest", "-q", *TWO_WORKERS, "tests_integration/test_parity.py",
            *tests, *session.posargs,
        )  # fmt: skip
        return
    found = tempfile.mkdtemp()
    rest = [argument for argument in session.posargs if argument != "--all"]
    env = {
        "PP_ALL_ARCHITECTURES": "1",
        "PP_ARCHITECTURE_TABLE": found,
        "OMP_NUM_THREADS": "1",  # one core for each of the two workers
    }
    session.run("python", "-m", "pytest", "-q", "-n", "2", *tests, *rest, env=env)
    table = "tests_integration/architecture_table.py"
    session.run("python", table, found, "docs/architectures.md")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Every example in docs and READMEs runs, every link leads somewhere."""
    session.run(
        "python", "-m", "pytest", "-q", *TWO_WORKERS, "docs", "--durations=5", *session.posargs
    )


@nox.session(default=False)
def oldest(session: nox.Session) -> None:
    """Everything that runs, on the oldest torch that is supported."""
    dist = build_wheels(session)
    session.install(
        "torch==2.13.*", "pytest", "pytest-xdist", "--find-links", str(dist),
        *(str(wheel) for wheel in dist.glob("*.whl")),
    )  # fmt: skip
    # Package by package: test files of two packages may have one name.
    for package in PACKAGES:
        session.run("python", "-m", "pytest", "-q", f"packages/{package}/tests")
    session.run("python", "-m", "pytest", "-q", "tests_integration", *session.posargs)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """What only a GPU can show, in under six minutes."""
    session.run("python", "-m", "pytest", "-q", "-m", "gpu", "tests_integration/gpu")


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Figures of this machine; nothing is asserted."""
    session.run("torchrun", "--nproc-per-node=2", "benchmarks/build.py", *session.posargs)
    session.run("python", "benchmarks/load.py", *session.posargs)
    session.run("python", "benchmarks/set_up.py", *session.posargs)
    session.run("torchrun", "--nproc-per-node=2", "benchmarks/recorder.py", *session.posargs)
    session.run("python", "benchmarks/actions.py", *session.posargs)
    session.run("python", "benchmarks/simulator.py", *session.posargs)
    session.run("python", "benchmarks/planner.py", *session.posargs)
    session.run("python", "benchmarks/regret.py", *session.posargs)
    session.run("python", "benchmarks/bufferpool.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def lock(session: nox.Session) -> None:
    """Renew uv.lock and strip it of addresses: only that form is committed."""
    session.run("uv", "lock", *session.posargs, external=True)
    path = ROOT / "uv.lock"
    path.write_text(strip_lock(path.read_text()))


def strip_lock(text: str) -> str:
    """Return a lock file without addresses; uv reads it as preferred versions."""
    text = re.sub(r'registry = "[^"]*"', 'registry = "registry"', text)
    text = re.sub(r"^sdist = \{.*\}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^wheels = \[\n(?:    \{.*\},\n)*\]\n", "", text, flags=re.MULTILINE)
    # What the members ask for stands in their own pyproject.toml.
    metadata = r"^\[package\.metadata(?:\.[\w.-]+)?\]\n(?:(?!\[).*\n)*"
    return re.sub(metadata, "", text, flags=re.MULTILINE)


def build_wheels(session: nox.Session) -> Path:
    """Build the wheels of all packages into a new folder, and return it.

    A new one each time: uv remembers wheels by path and version, and would install those of an
    earlier run.
    """
    dist = Path(tempfile.mkdtemp(prefix="wheels-"))
    session.run("uv", "build", "-q", "--all-packages", "--wheel", "-o", str(dist), external=True)
    return dist


def constraints(session: nox.Session) -> Path:
    """Return a file of the locked versions."""
    path = Path(session.create_tmp()) / "constraints.txt"
    session.run(
        "uv", "export", "-q", "--all-packages", "--all-extras", "--no-hashes",
        "--no-emit-workspace", "--no-emit-project", "-o", str(path), external=True, silent=True,
    )  # fmt: skip
    return path
