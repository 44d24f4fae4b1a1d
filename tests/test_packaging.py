"""The wheel holds both packages whole, their data, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORLD = "kgshard/data/graphs/world"


def files_of_the_project() -> list[str]:
    """Return what a clone would hold: tracked files, and new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    return sorted(set(names))


def build_wheel(copy: Path, **environment: str) -> Path:
    """Return the wheel of a copy: a stale build/ or egg-info would ship modules that are gone."""
    for name in files_of_the_project():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "wheels")]
    environment = os.environ | {"PYTHONPATH": ""} | environment
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "wheels").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("copy"))) as opened:
        yield opened


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def sources() -> set[str]:
    """Return every module by its name in a wheel."""
    return {
        name.removeprefix("tools/")
        for name in files_of_the_project()
        if name.endswith(".py") and name.startswith(("kgshard/", "tools/kgshard_tools/"))
    }


def test_every_module_is_there_and_no_other(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if name.endswith(".py")} == sources()


def test_every_folder_of_modules_is_a_package() -> None:
    modules = sources()
    assert {f"{Path(name).parent}/__init__.py" for name in modules} <= modules


def test_both_packages_are_typed(wheel: zipfile.ZipFile) -> None:
    assert {"kgshard/py.typed", "kgshard_tools/py.typed"} <= set(wheel.namelist())


def test_the_example_graph_is_there_with_its_licence(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"{WORLD}/{name}" for name in ("train.tsv", "valid.tsv", "test.tsv", "LICENSE.txt")} <= names
    for name in ("train.tsv", "valid.tsv", "test.tsv", "LICENSE.txt"):
        assert wheel.read(f"{WORLD}/{name}") == (ROOT / WORLD / name).read_bytes()
    licences = [name for name in names if ".dist-info/licenses/" in name]
    assert any(name.endswith("world/LICENSE.txt") for name in licences)
    assert any(name.endswith("licenses/LICENSE") for name in licences)


def test_nothing_else_is_installed(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kgshard", "kgshard_tools"}
    assert not [name for name in wheel.namelist() if "test" in Path(name).name and name.endswith(".py")]


def compiled(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith(".so")]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_kernels_are_there(wheel: zipfile.ZipFile) -> None:
    (name,) = compiled(wheel)
    assert name.startswith("kgshard/native/rows.")


def test_who_has_no_compiler_gets_a_wheel_without_kernels(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path, CC="false")) as plain:
        assert compiled(plain) == []
        assert {name for name in plain.namelist() if name.endswith(".py")} == sources()


def test_the_command_is_an_entry_point(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    points = ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["console_scripts"]) == {"kgshard": "kgshard_tools.cli:main"}


def test_metadata_say_what_it_is(wheel: zipfile.ZipFile) -> None:
    said = metadata(wheel)
    assert said["Name"] == "kgshard"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    base = {line.split(";")[0] for line in said.get_all("Requires-Dist", []) if "extra ==" not in line}
    names = {"".join(c for c in line if c.isalnum() or c == "-").rstrip("0123456789") for line in base}
    assert {"torch", "numpy", "safetensors", "faiss-cpu", "click", "pyarrow", "msgspec", "rich"} == names


def test_the_installed_wheel_answers_without_the_source(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import kgshard, kgshard_tools\n"
        "from kgshard.data.sources import bundled_graphs\n"
        "print(kgshard.__file__, kgshard_tools.__file__, bundled_graphs())\n"
        "kgshard.ingest('world', sys.argv[1] + '/data')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [
        f"{tmp_path}/kgshard/__init__.py",
        f"{tmp_path}/kgshard_tools/__init__.py",
        "['world']",
    ]
    assert (tmp_path / "data" / "data.json").is_file()
