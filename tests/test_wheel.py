"""The wheel: what is in it, what it asks for, and that it runs without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from holdfast import __version__

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=100)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT))
    [path] = folder.iterdir()
    return path


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    kinds = (".py", ".html", ".css", ".js", ".svg", ".json")
    package = [path for path in source.rglob("*") if path.suffix in kinds or path.name == "py.typed"]
    about = f"holdfast-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    assert {name for name in held if not name.startswith(about)} == {str(path.relative_to(source)) for path in package}
    assert "holdfast/py.typed" in held
    assert f"{about}licenses/LICENSE" in held


def test_it_asks_for_little(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"holdfast-{__version__}.dist-info/METADATA").decode())
    wanted = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(text.partition(">")[0] for text in wanted) == ["msgspec", "torch", "xxhash"]
    assert metadata["Version"] == __version__


def test_it_runs_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    env = {**os.environ, "PYTHONPATH": str(site)}
    look = "import sys, holdfast; print(holdfast.__file__, holdfast.launch.__name__, 'torch' in sys.modules)"
    assert run(sys.executable, "-c", look, env=env, cwd=tmp_path) == f"{site}/holdfast/__init__.py launch False"
    assert run(sys.executable, "-m", "holdfast", "--version", env=env, cwd=tmp_path) == f"holdfast {__version__}"
    assert (site / "bin" / "holdfast").exists()
