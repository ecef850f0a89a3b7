"""What pages show can be typed: shell that parses, options and verbs that there are, Python that compiles.

What is run besides is `test_docs_run.py`'s and `test_docs_publishing.py`'s business.
"""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import EXECUTABLE, PAGES, SHELL, Block, blocks_of, lines_of, name_of
from command_lines import faults, options

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHOWN = [block for block in BLOCKS if block.language in EXECUTABLE]
# Programs in sentences that are not refitd's, and why no test runs them.
ELSEWHERE = {
    "curl": "a service that is in trouble is asked; the routes are looked at",
    "docker": "wants Docker; tests/e2e/test_compose_file.py holds the file",
    "journalctl": "wants systemd; tests/e2e/test_deploy_hosts.py holds the unit",
    "jq": "filters a log that the reader has",
    "kubectl": "wants a cluster; tests/e2e/test_deploy_kubernetes.py holds the manifests",
    "pip": "installs packages; the extras are looked at",
    "py-spy": "a tool of the reader's own",
    "python": "starts a server, or SGLang",
    "sbatch": "wants Slurm; tests/e2e/test_deploy_hosts.py runs the job with stand-ins",
    "systemctl": "wants systemd; tests/e2e/test_deploy_hosts.py holds the unit",
}
SGLANGS = {
    "--api-key",
    "--admin-api-key",
    "--disaggregation-decode-enable-offload-kvcache",
    "--enable-lmcache",
    "--attn-dp-size",
    "--disaggregation-mode",
    "--enable-elastic-expert-backup",
    "--enable-paged-experts",
    "--kt-weight-path",
    "--weight-cache-mode",
    "--dp-size",
    "--enable-dp-attention",
    "--enable-dp-attention-local-control-broadcast",
    "--enable-lora",
    "--enable-memory-saver",
    "--enable-unified-cache-external-linker",
    "--hicache-storage-backend",
    "--init-expert-location",
    "--lora-paths",
    "--max-loaded-loras",
    "--max-lora-rank",
    "--radix-cache-backend",
    "--pp-size",
    "--quantization",
    "--sleep-on-idle",
    "--skip-server-warmup",
    "--speculative-draft-model-path",
    "--tokenizer-worker-num",
    "--tp-size",
}
SGLANG_ROUTERS = {"--health-check-endpoint", "--service-discovery", "--worker-urls"}
VLLMS = {
    "--enable-eplb",
    "--enable-scale-out",
    "--enable-sleep-mode",
    "--max-cpu-loras",
    "--max-loras",
    "--worker-extension-cls",
}
SLIMES = {
    "--colocate",
    "--hf-checkpoint",
    "--rollout-external-engine-addrs",
    "--update-weight-disk-keep-files",
    "--update-weight-mode",
    "--update-weight-transport",
}
KNOWN = EXECUTABLE | {"text", "yaml", "json", "mermaid", "{toctree}", "flat", ""}


def of(*languages: str) -> list[object]:
    """The blocks in these languages, each a case."""
    return [pytest.param(block, id=str(block)) for block in SHOWN if block.language in languages]


def test_every_block_says_what_it_is() -> None:
    assert not [f"{block} is '{block.language}'" for block in BLOCKS if block.language not in KNOWN]


def test_no_command_hides_in_a_block_without_a_language() -> None:
    """Four spaces make a block as well, and nobody would try it."""
    indented = re.compile(r"\n\n    (?:\$ |refitd |make |pip |python |docker |kubectl |curl )")
    assert not [name_of(page) for page in PAGES if indented.search(page.read_text())]
    hidden = [str(block) for block in BLOCKS if block.language in {"", "text"} and block.text.startswith("$ ")]
    assert not hidden


@pytest.mark.parametrize("block", of(*SHELL))
def test_the_shell_of_a_page_parses_and_its_commands_are_there(block: Block) -> None:
    lines = list(lines_of(block))
    said = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"{block}: {said.stderr}"
    assert not [f"{block}: {fault}" for line in lines for fault in faults(line)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_a_sentence_are_there_as_well(page: Path) -> None:
    """They are not run: a sentence says what one does, and mostly leaves something out."""
    lines = [line for line in inline_of(page) if program_of(line) in {"refitd", "make", "", *ELSEWHERE}]
    assert not [f"`{line}`: {fault}" for line in lines for fault in faults(line, whole=False)]


def test_no_sentence_shows_a_command_of_a_program_that_nobody_has_thought_of() -> None:
    known = {"refitd", "make", None, "", *ELSEWHERE}
    assert not [
        f"{name_of(page)}: {line}" for page in PAGES for line in inline_of(page) if program_of(line) not in known
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_an_option_in_a_sentence_is_one_of_refitd_s_or_says_here_whose_it_is(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z][\w-]*)", text))
    of_others = SGLANGS | SGLANG_ROUTERS | VLLMS | SLIMES | {"--cpus", "--device"}  # Docker's, and a benchmark's
    assert named <= options() | of_others


def program_of(line: str) -> str | None:
    """The program of what looks like a command: one that is known with a verb, or any with an option."""
    found = re.match(r"(?:[A-Z_]+=\S+ )*([a-z][\w./-]*) (?:--?\w|[a-z][\w-]*(?: |$))", line)
    if found is None or not (found[1] in {"refitd", "make", *ELSEWHERE} or " -" in line):
        return None
    return "" if re.match("(?:tests|deploy)/", found[1]) else found[1]


def inline_of(page: Path) -> list[str]:
    """Code in sentences and tables that has more than one word."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = (line.replace("\\|", "|").replace("…", "X") for line in re.findall(r"`([^`\n]+)`", text))
    return [line for line in found if len(line.split()) > 1]


@pytest.mark.parametrize("block", of("python"))
def test_the_python_of_a_page_compiles_and_takes_names_that_there_are(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    assert not [f"{module} has no {name}" for module, name in imported(tree) if not has(module, name)]


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What is taken from refitd's own modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("refitd"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def has(module: str, name: str) -> bool:
    """Whether a module has a name, by its source: what it imports itself (transformers, torch) takes seconds."""
    found = importlib.util.find_spec(module)
    assert found is not None, f"there is no {module}"
    assert found.origin is not None
    return name in set(names(ast.parse(Path(found.origin).read_text())))


def names(tree: ast.Module) -> Iterator[str]:
    """What a module's own lines define or take in."""
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=taken) | ast.Import(names=taken):
                yield from (alias.asname or alias.name for alias in taken)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.If(
                test=ast.Name(id="TYPE_CHECKING"), body=body
            ):  # what a lazy package imports when it is asked for
                yield from names(ast.Module(body, []))
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case _:
                pass
