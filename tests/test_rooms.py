"""The rooms of the house: imports run one way, those inside functions included, and only `cluster` knows ray."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fulltilt"

GROUND = {"words", "user_code", "callables", "presets", "records", "schema", "settings", "knobs", "config", "observe", "shape", "footprint"}
GROUND |= {"folders", "blame", "commits", "interrupts", "hardware"}
SIX = {"data", "rollout", "reward", "algo", "batching", "training"}
BELOW_SIX = GROUND | {"kernels", "model", "parallel", "memory"}
BELOW_LOOP = BELOW_SIX | SIX | {"cluster", "plan"}

# What each room may import besides itself. A new room needs a line here, so that its place is decided and not found out.
MAY_IMPORT: dict[str, set[str]] = {
    "words": set(),
    "user_code": {"words"},
    "callables": {"words", "user_code"},
    "presets": set(),
    "records": {"words"},
    "footprint": set(),
    "blame": set(),
    "commits": set(),
    "interrupts": set(),
    "folders": {"words", "records"},
    "shape": {"words", "records"},
    "hardware": {"words", "records"},
    "schema": {"words", "presets", "records"},
    "settings": {"words", "user_code", "presets", "records", "schema"},
    "knobs": {"words", "records", "schema"},
    "config": {"words", "user_code", "presets", "records", "schema", "settings", "knobs"},
    "observe": {"words", "records", "schema", "knobs", "config", "folders"},
    "kernels": GROUND,
    "model": GROUND | {"kernels"},
    "parallel": GROUND | {"kernels", "model"},
    "memory": GROUND | {"kernels", "model"},
    **dict.fromkeys(SIX, BELOW_SIX),
    "plan": GROUND | {"kernels", "model", "parallel", "memory", "batching.cost"},
    "tune": GROUND | {"kernels", "model", "parallel", "memory", "batching.cost", "batching.schedule", "plan"},
    "cluster": BELOW_SIX | SIX | {"plan"},
    "loop": BELOW_LOOP | {"tune"},
    "compat": GROUND,
    "doctor": GROUND | {"memory.host", "reward.confine", "cluster.keeper", "cluster.ray", "tune"},
    "reference": {"words", "schema", "knobs"},
    "starter": {"words", "records", "schema"},
    "bench": BELOW_LOOP | {"loop"},
    "proofs": BELOW_LOOP | {"loop", "bench", "demo"},
    "demo": BELOW_LOOP | {"loop"},
    "api": BELOW_LOOP | {"loop"},
    "chat": GROUND | {"loop", "api", "training.checkpoint"},
    "cli": BELOW_LOOP | {"api", "chat", "tune", "loop", "compat", "doctor", "reference", "starter", "bench", "proofs", "demo"},
    "__main__": {"cli"},
    "__init__": {"api", "records"},
}


def imports(tree: ast.AST, module: tuple[str, ...]) -> Iterator[str]:
    """Absolute names of all that is imported anywhere in a module; `from a import b` gives a.b, for b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module[: len(module) - node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                yield node.args[0].value


def modules() -> Iterator[tuple[str, Path]]:
    """Each file of the package, with the room it belongs to."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).with_suffix("").parts[0], path


def imported_by(path: Path, text: str | None = None) -> set[str]:
    parts = ("fulltilt", *path.relative_to(SOURCE).with_suffix("").parts)
    return set(imports(ast.parse(text if text is not None else path.read_text(encoding="utf-8")), parts))


def violations(room: str, names: set[str]) -> list[str]:
    wrong = []
    for name in sorted(names):
        top, *inside = name.split(".")
        if top == "ray" and room != "cluster":
            wrong.append("only cluster may import ray")
        if top != "fulltilt" or not inside or inside[0] not in MAY_IMPORT:
            continue
        allowed = MAY_IMPORT[room] | {room}
        if inside[0] not in allowed and ".".join(inside[:2]) not in allowed:
            wrong.append(f"{room} may not import {name}")
    return wrong


def test_every_room_has_its_place() -> None:
    unknown = {room for room, _ in modules()} - MAY_IMPORT.keys()
    assert not unknown, f"say in MAY_IMPORT what {sorted(unknown)} may import"


@pytest.mark.parametrize("path", [path for _, path in modules()], ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    room = path.relative_to(SOURCE).with_suffix("").parts[0]
    assert violations(room, imported_by(path)) == []


def test_the_table_has_no_circle() -> None:
    seen: dict[str, bool] = {}

    def visit(room: str) -> None:
        assert seen.get(room, True), f"{room} can be reached from itself"
        if room in seen:
            return
        seen[room] = False
        for other in MAY_IMPORT[room]:
            visit(other.partition(".")[0])
        seen[room] = True

    for room in MAY_IMPORT:
        visit(room)
    assert all(MAY_IMPORT[room].isdisjoint(SIX) for room in SIX)
    assert {room for room, allowed in MAY_IMPORT.items() if "tune" in allowed} == {"loop", "doctor", "cli"}


@pytest.mark.parametrize(
    ("room", "text", "wrong"),
    [
        ("config", "def f():\n    from fulltilt.algo import build", ["config may not import fulltilt.algo.build"]),
        ("config", "from fulltilt import algo", ["config may not import fulltilt.algo"]),
        ("data/files", "from ..rollout import engine", ["data may not import fulltilt.rollout.engine"]),
        ("training/trainer", "import fulltilt.batching.pack", ["training may not import fulltilt.batching.pack"]),
        ("plan", "from fulltilt.batching.pack import pack", ["plan may not import fulltilt.batching.pack.pack"]),
        ("plan", "from fulltilt.batching.cost import cost", []),
        ("model/load", "import importlib\nimportlib.import_module('fulltilt.data')", ["model may not import fulltilt.data"]),
        ("algo/loss", "import ray.util", ["only cluster may import ray"]),
        ("algo/loss", "from fulltilt.algo import base\nfrom . import build\nfrom fulltilt import __version__", []),
    ],
)
def test_the_walk_sees_what_it_must(room: str, text: str, wrong: list[str]) -> None:
    path = SOURCE / f"{room}.py"
    assert violations(room.partition("/")[0], imported_by(path, text)) == wrong
