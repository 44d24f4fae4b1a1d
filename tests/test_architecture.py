"""Imports point one way, torch stays out of light modules, and files appear whole: read from the source.

Nothing is imported here; the rules hold for what is written, inside functions too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN_LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LIGHT = {
    *("errors", "config", "partition", "vocabulary", "shards", "files", "runs", "seeds"),
    *("known", "launch", "start", "stderr", "api", "machine", "memory", "planning"),
    *("ranking.metrics", "ranking.protocol", "ranking.breakdown", "ranking.excluded"),
    *("training.progress", "training.schedule", "training.metrics_log"),
}
"""Modules of kgshard that never cost torch; so are kgshard.models.*, kgshard.data.* and all tools."""

WRITES_TO_A_TEMPORARY_OF_ITS_CALLER = {
    # merge_shards hands it a path from replacing or replacing_directory.
    ("kgshard_tools.rows", "write_safetensors"),
    # save_checkpoint hands it a path in the temporary folder, and renames that.
    ("kgshard.checkpoint", "_write_tensors"),
    # Removes complete checkpoints of its own run that no pointer names any more.
    ("kgshard.checkpoint", "_point"),
    # The builder hands it a path from replacing.
    ("kgshard_tools.index.faiss_files", "write_index"),
    # Removes files that index.json named before and names no more.
    ("kgshard_tools.index.build", "_remove_unused"),
    # Takes away a run that never came to a checkpoint.
    ("kgshard.start", "_discard"),
    # A lock: its content only says who holds it.
    ("kgshard.start", "locked"),
    ("kgshard.start", "_opened_lock"),
    # Appends lines to metrics.jsonl while training runs; readers take whole lines.
    ("kgshard.training.metrics_log", "_append"),
}
"""The only functions outside kgshard.files that write with no `with replacing(...)` around."""


@dataclass(frozen=True)
class Import:
    """One imported name."""

    module: str
    """`a.b` of `import a.b` and of `from a.b import c`."""
    name: str
    """`c`, or nothing."""
    at_import: bool
    """Whether it happens when the module is imported, and not only when a function is called."""


def imports_of(tree: ast.Module) -> list[Import]:
    """Return everything a module imports, but for type checkers."""
    found = []
    for node, in_function in _walk(tree, in_function=False):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "", not in_function) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [Import(node.module or "", alias.name, not in_function) for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            text = node.args[0]
            if isinstance(text, ast.Constant):
                found.append(Import(str(text.value), "", not in_function))
    return found


def _walk(node: ast.AST, *, in_function: bool) -> Iterator[tuple[ast.AST, bool]]:
    skipped: list[ast.stmt] = []
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        skipped = node.body
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield child, inside
            yield from _walk(child, in_function=inside)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rsplit(".", 1)[-1]


def read_tree() -> dict[str, ast.Module]:
    """Return every module of both packages by its dotted name."""
    modules = {}
    for root, package in ((ROOT, "kgshard"), (ROOT / "tools", "kgshard_tools")):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = ast.parse(path.read_text(), str(path))
    return modules


MODULES = read_tree()


def reached_by_importing(modules: dict[str, ast.Module], start: str) -> set[str]:
    """Return everything that `import start` imports: modules of ours, and others by their full names."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        for known in [".".join(parts[: end + 1]) for end in range(len(parts))]:
            if known in seen:
                continue
            seen.add(known)
            if known in modules:
                for item in imports_of(modules[known]):
                    if item.at_import:
                        waiting += [item.module, *([f"{item.module}.{item.name}"] if item.name else [])]
    return seen


def edges_at_import(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return which modules of ours each module names when it is imported."""
    edges: dict[str, set[str]] = {}
    for name, tree in modules.items():
        wanted = set()
        for item in imports_of(tree):
            if item.at_import:
                full = f"{item.module}.{item.name}"
                wanted.add(full if full in modules else item.module)
        edges[name] = (wanted & set(modules)) - {name}
    return edges


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(edges[name]):
            cycle = visit(other, [*path, name])
            if cycle:
                return cycle
        done.add(name)
        return []

    for name in sorted(edges):
        cycle = visit(name, [])
        if cycle:
            return cycle
    return []


def is_light(name: str) -> bool:
    parts = name.split(".")
    if parts[0] == "kgshard_tools" or name == "kgshard":
        return True
    return parts[1] in LIGHT or parts[1] in ("models", "data")


def who_imports(package: str) -> set[str]:
    """Return the modules that import `package` or anything below it, wherever in their source."""

    def below(name: str) -> bool:
        return name == package or name.startswith(f"{package}.")

    return {
        name
        for name, tree in MODULES.items()
        for item in imports_of(tree)
        if below(item.module) or below(f"{item.module}.{item.name}")
    }


@pytest.mark.parametrize("name", sorted(filter(is_light, MODULES)))
def test_importing_a_light_module_imports_no_torch(name: str) -> None:
    reached = reached_by_importing(MODULES, name)
    assert not [other for other in reached if other.split(".")[0] == "torch"]


def test_every_light_module_exists() -> None:
    assert {f"kgshard.{name}" for name in LIGHT} <= set(MODULES)


def test_heavy_modules_are_found_heavy() -> None:
    """The negative control: the same walk does reach torch where it is imported."""
    for name in ("kgshard.table", "kgshard.training.tasks", "kgshard.distributed"):
        assert "torch" in reached_by_importing(MODULES, name)


def test_one_module_imports_torch_distributed() -> None:
    assert who_imports("torch.distributed") == {"kgshard.distributed"}


def test_the_core_names_the_tools_in_its_facade_only() -> None:
    facade = {"kgshard", "kgshard.__main__"}
    core = {name for name in who_imports("kgshard_tools") if name.split(".")[0] == "kgshard"}
    assert core <= facade
    for name, tree in MODULES.items():
        if name.split(".")[0] == "kgshard" and name not in facade:
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            assert not [text for text in texts if isinstance(text, str) and text.startswith("kgshard_tools.")]


@pytest.mark.parametrize("package", ["click", "faiss", "rich"])
def test_the_core_imports_neither_click_nor_faiss(package: str) -> None:
    allowed = {"kgshard.training.progress"} if package == "rich" else set()
    core = {name for name in who_imports(package) if name.split(".")[0] == "kgshard"}
    assert core <= allowed


def test_one_module_imports_faiss_and_one_in_a_process_of_its_own() -> None:
    modules = {"kgshard_tools.index.faiss_files", "kgshard_tools.index.foreign_child"}
    assert who_imports("faiss") == modules


def test_click_stays_in_the_command_line() -> None:
    allowed = {name for name in MODULES if name.startswith("kgshard_tools.commands.")}
    assert who_imports("click") <= {"kgshard_tools.cli", *allowed}


def test_pure_maths_knows_no_table_no_rank_no_file() -> None:
    pure = {name for name in MODULES if name.startswith("kgshard.models")}
    for name in pure:
        ours = {other for other in reached_by_importing(MODULES, name) if other.startswith("kgshard.")}
        assert ours <= pure | {"kgshard.errors"} | {f"{one}.{end}" for one, end in _named(ours)}


def _named(ours: set[str]) -> list[tuple[str, str]]:
    """Return names imported from a module, which look like modules below it."""
    return [(m, e) for m, _, e in (name.rpartition(".") for name in ours) if m in MODULES]


def test_no_import_goes_in_a_circle() -> None:
    assert find_cycle(edges_at_import(MODULES)) == []


def unsafe_loads(tree: ast.Module) -> list[str]:
    """Return what could execute or unpickle a file's content."""
    found = [item.module for item in imports_of(tree) if item.module.split(".")[0] in FORBIDDEN_LOADERS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("torch.load", "eval", "exec", "yaml.load"):
                found.append(ast.unparse(node.func))
            for keyword in node.keywords:
                pickled = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not pickled:
                    found.append("allow_pickle")
            if ast.unparse(node.func) in ("np.load", "numpy.load") and "allow_pickle" not in {
                keyword.arg for keyword in node.keywords
            }:
                found.append("np.load without allow_pickle=False")
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_file_is_ever_unpickled_or_executed(name: str) -> None:
    assert unsafe_loads(MODULES[name]) == []


WRITING_CALLS = {
    *("write_bytes", "tofile", "savez", "savez_compressed", "save_file", "savetxt", "write_table"),
    *("copyfile", "copy", "copy2", "copytree", "move", "link", "symlink", "hardlink_to", "symlink_to"),
    *("replace", "rename", "renames", "rmtree", "unlink", "touch", "truncate"),
}


def unguarded_writes(module: str, tree: ast.Module) -> list[str]:
    """Return calls that change files, outside `with replacing(...)` and outside the allow-list."""
    found: list[str] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            if (module, node.name) in WRITES_TO_A_TEMPORARY_OF_ITS_CALLER:
                return
            function = node.name
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(_called(call) in ("replacing", "replacing_directory") for call in calls):
                return
        if isinstance(node, ast.Call) and _writes(node):
            found.append(f"{function}: {ast.unparse(node)}")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def _writes(node: ast.Call) -> bool:
    function = ast.unparse(node.func)
    name = function.rsplit(".", 1)[-1]
    if name in ("open", "fdopen"):
        return function != "os.open" and any(mark in _mode(node) for mark in "wxa+")
    if name == "write_text":  # kgshard.files.write_text is the rule itself; Path.write_text is not.
        return isinstance(node.func, ast.Attribute)
    if name == "rmtree" and ast.unparse(node.args[0]) == "temporary":
        return False  # what fails is taken away again
    if name in ("replace", "copy") and not function.startswith(("os.", "shutil.")):
        return False  # of a text, an array, a dataclass
    return name in WRITING_CALLS or function in ("np.save", "numpy.save", "torch.save", "faiss.write_index")


def _mode(node: ast.Call) -> str:
    texts = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    of_a_path = ast.unparse(node.func).split(".")[0] not in ("open", "io", "gzip", "bz2", "lzma", "os")
    first = 0 if of_a_path else 1
    modes = texts[first : first + 1] if node.args[first:] else texts[len(node.args) :]
    return "".join(str(mode.value) if isinstance(mode, ast.Constant) else "w" for mode in modes)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"kgshard.files"}))
def test_files_appear_whole_or_not_at_all(name: str) -> None:
    assert unguarded_writes(name, MODULES[name]) == []


def test_the_allow_list_names_what_is_there() -> None:
    functions = {
        (name, node.name)
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert functions >= WRITES_TO_A_TEMPORARY_OF_ITS_CALLER


BREAKS = {
    "open(path, 'w')": 1,
    "open(path, mode='wb')": 1,
    "path.open('xb')": 1,
    "path.open('a')": 1,
    "path.open(mode='r+b')": 1,
    "path.open(mode)": 1,
    "path.write_text('x')": 1,
    "path.write_bytes(b'x')": 1,
    "np.save(path, array)": 1,
    "shutil.copyfile(a, b)": 1,
    "os.replace(a, b)": 1,
    "path.open()": 0,
    "path.open('rb')": 0,
    "gzip.open(path, 'wt')": 1,
    "gzip.open(path)": 0,
    "open(path)": 0,
    "open(path, encoding='utf-8')": 0,
    "write_text(path, 'x')": 0,
    "shutil.rmtree(temporary)": 0,
    "shutil.rmtree(folder)": 1,
    "label.replace('a', 'b')": 0,
    "with replacing(path) as temporary:\n    temporary.write_bytes(b'x')": 0,
    "def save(path):\n    path.write_bytes(b'x')": 1,
}


@pytest.mark.parametrize("source", BREAKS)
def test_writes_are_recognised(source: str) -> None:
    assert len(unguarded_writes("m", ast.parse(source))) == BREAKS[source]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import torch", [Import("torch", "", True)]),
        ("def f():\n    from torch import nn", [Import("torch", "nn", False)]),
        ("if TYPE_CHECKING:\n    import torch", []),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", [Import("torch", "", True)]),
        ("try:\n    import torch\nexcept ImportError:\n    pass", [Import("torch", "", True)]),
        ("import_module('torch')", [Import("torch", "", True)]),
        ("class A:\n    import torch", [Import("torch", "", True)]),
    ],
)
def test_imports_are_recognised(source: str, wanted: list[Import]) -> None:
    assert [item for item in imports_of(ast.parse(source)) if item.module == "torch"] == wanted


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "np.load(f)",
        "np.load(allow_pickle=True)",
    ],
)
def test_unsafe_loads_are_recognised(source: str) -> None:
    assert unsafe_loads(ast.parse(source))


def test_a_circle_is_recognised() -> None:
    sources = {"a": "import b", "b": "from c import x", "c": "import a", "d": "import a"}
    edges = edges_at_import({name: ast.parse(text) for name, text in sources.items()})
    assert sorted(find_cycle(edges)) == ["a", "b", "c"]
    sources["c"] = "def late():\n    import a"
    edges = edges_at_import({name: ast.parse(text) for name, text in sources.items()})
    assert find_cycle(edges) == []


def test_heaviness_is_passed_on() -> None:
    sources = {"p": "import torch", "p.light": "", "q": "from p import light", "r": "import os"}
    modules = {name: ast.parse(text) for name, text in sources.items()}
    assert "torch" in reached_by_importing(modules, "q")
    assert "torch" in reached_by_importing(modules, "p.light")
    assert "torch" not in reached_by_importing(modules, "r")
