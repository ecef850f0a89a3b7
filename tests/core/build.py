"""`build.py FOLDER`: the tree without its rings, as a project that can be built; prints how many lines it has.

The rings stand in pyproject.toml, in `[tool.refitd.rings]`. What git ignores is not copied.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

TREE = Path(__file__).parents[2]
BESIDE = ("LICENSE", "README.md", "pyproject.toml")


def ring_paths() -> tuple[str, ...]:
    """Return the files and folders that are no part of the core."""
    rings = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["refitd"]["rings"]
    return tuple(path for paths in rings.values() for path in paths)


def core_files() -> list[str]:
    """Return the product's files in the core."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "client", "service"]
    listed = subprocess.run(words, cwd=TREE, capture_output=True, text=True, check=True).stdout.split()
    outside = ring_paths()
    missing = [path for path in outside if not (TREE / path).exists()]
    if missing:
        raise SystemExit(f"[tool.refitd.rings] names what is not there: {', '.join(missing)}")
    listed = [file for file in listed if (TREE / file).exists()]
    return [file for file in listed if not any(file == path or file.startswith(f"{path}/") for path in outside)]


def core_project(text: str) -> str:
    """Return pyproject.toml without the rings: their packages are not built, and register nothing."""
    for path in ring_paths():
        module = path.partition("/")[2].removesuffix(".py").replace("/", ".")
        text = text.replace(f'"{path}",', "").replace(f'"{path}"', "")
        text = re.sub(rf'^[\w-]+ = "{re.escape(module)}[.:].*\n', "", text, flags=re.MULTILINE)
    return text


def main(folder: Path) -> None:
    files = core_files()
    for file in (*files, *BESIDE):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TREE / file, target)
    (folder / "pyproject.toml").write_text(core_project((TREE / "pyproject.toml").read_text()))
    lines = sum((TREE / file).read_text().count("\n") for file in files if file.endswith(".py"))
    print(f"the core has {lines:,} lines of Python in {sum(file.endswith('.py') for file in files)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
