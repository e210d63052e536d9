"""Checks the size budgets of the source with the syntax tree alone; exits 1 and lists what is over.

A function has at most 60 lines, a class 300 lines, 15 public methods (Cache and Space 20) and 10
attributes, a file 500 lines, an abstract base class 8 abstract members. A broad `except` stands in
transfer/executor.py only, a read of the environment in config.py only, an import of an engine's library
in adapters/, demo/ and testing/ only, and no source file imports kvcairn.testing.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

FUNCTION_LINES = 60
FILE_LINES = 500
CLASS_LINES = 300
PUBLIC_METHODS = 15
PUBLIC_METHODS_OF = {"Cache": 20, "Space": 20}
ATTRIBUTES = 10
PARAMETERS = 8
ABSTRACT_MEMBERS = 8
BROAD_EXCEPT_IN = "transfer/executor.py"
ENVIRONMENT_IN = "config.py"
ENGINE_LIBRARIES = {"torch", "transformers", "vllm", "sglang", "triton", "accelerate", "gguf", "safetensors"}
ENGINE_LIBRARIES_IN = ("adapters/", "demo/", "demo.py", "testing/")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]


def lines_of(node: Function | ast.ClassDef) -> int:
    """Lines from the first decorator to the end."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def functions_of(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def check_function(node: Function) -> Iterator[Finding]:
    if lines_of(node) > FUNCTION_LINES:
        yield node.lineno, f"function {node.name}: {lines_of(node)} lines, at most {FUNCTION_LINES}"
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    count = len([name for name in names if name not in ("self", "cls")])
    if count > PARAMETERS:
        yield node.lineno, f"function {node.name}: {count} parameters, at most {PARAMETERS}"


def check_class(node: ast.ClassDef) -> Iterator[Finding]:
    if lines_of(node) > CLASS_LINES:
        yield node.lineno, f"class {node.name}: {lines_of(node)} lines, at most {CLASS_LINES}"
    methods = [item for item in node.body if isinstance(item, Function)]
    public = {method.name for method in methods if not method.name.startswith("_")}
    most = PUBLIC_METHODS_OF.get(node.name, PUBLIC_METHODS)
    if len(public) > most:
        yield node.lineno, f"class {node.name}: {len(public)} public methods, at most {most}"
    abstract = [method for method in methods if is_abstract(method)]
    if len(abstract) > ABSTRACT_MEMBERS:
        yield node.lineno, f"class {node.name}: {len(abstract)} abstract members, at most {ABSTRACT_MEMBERS}"
    attributes = set().union(*(attributes_set_by(method) for method in methods))
    if len(attributes) > ATTRIBUTES:
        listed = ", ".join(sorted(attributes))
        yield node.lineno, f"class {node.name}: {len(attributes)} attributes, at most {ATTRIBUTES} ({listed})"


def is_abstract(method: Function) -> bool:
    return any("abstract" in ast.unparse(decorator) for decorator in method.decorator_list)


def attributes_set_by(method: Function) -> set[str]:
    """Names assigned on the first parameter of a method, where that is `self`."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(name.name in ("environ", "environb", "getenv") for name in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return []


def check_rules(tree: ast.Module, name: str) -> Iterator[Finding]:
    """The rules about where something may stand; `name` is the file's path inside the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and name != BROAD_EXCEPT_IN:
            yield node.lineno, f"broad except outside {BROAD_EXCEPT_IN}"
        if reads_environment(node) and name != ENVIRONMENT_IN:
            yield getattr(node, "lineno", 1), f"environment read outside {ENVIRONMENT_IN}"
        for module in imported(node):
            line = getattr(node, "lineno", 1)
            if f"{module}.".startswith("kvcairn.testing.") and not name.startswith("testing/"):
                yield line, "kvcairn.testing imported by the product"
            if module.partition(".")[0] in ENGINE_LIBRARIES and not name.startswith(ENGINE_LIBRARIES_IN):
                yield line, f"{module} imported outside adapters and demo"


def check_source(source: str, name: str) -> list[Finding]:
    """All findings of one file as (line, message); `name` is its path inside the package."""
    tree = ast.parse(source)
    findings = list(check_rules(tree, name))
    if (count := len(source.splitlines())) > FILE_LINES:
        findings.append((1, f"file: {count} lines, at most {FILE_LINES}"))
    for node in ast.walk(tree):
        if isinstance(node, Function):
            findings += check_function(node)
        elif isinstance(node, ast.ClassDef):
            findings += check_class(node)
    return sorted(set(findings))


def main(package: Path) -> int:
    lengths: list[int] = []
    found = 0
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        lengths += [lines_of(node) for node in functions_of(ast.parse(source))]
        for line, message in check_source(source, path.relative_to(package).as_posix()):
            print(f"{path}:{line}: {message}")
            found += 1
    median = statistics.median(lengths) if lengths else 0
    print(
        f"budgets: {len(lengths)} functions, median {median:g} lines, longest {max(lengths, default=0)}; {found} over"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent.parent / "src" / "kvcairn"))
