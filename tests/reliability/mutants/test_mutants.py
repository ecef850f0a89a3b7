"""Breaks the product in one place at a time, and sees that the tests notice: a promise that no test can lose is none.

Each mutant is a line of the product and what it becomes; the tests that are named must fail on it. They run in a copy.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOT_COUNTED = {0, 2, 3, 4, 5}  # passed, or not run at all: interrupted, internal error, usage, nothing collected


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs once in `file`."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "drops an fsync of a published file",
        "client/refitd_client/write/version_folder.py",
        "durable.sync(shard.fd)  #",
        "pass  #",
        "tests/reliability/crash/test_publish_power_loss.py",
    ),
    Mutant(
        "lets the journal commit without a sync",
        "service/refitd/state/journal/sqlite_file.py",
        '"synchronous=FULL"',
        '"synchronous=NORMAL"',
        "tests/reliability/crash/test_journal_power_loss.py",
    ),
    Mutant(
        "skips the lease of a load",
        "service/refitd/policy/leases.py",
        "for load in engine.loads:",
        "for load in engine.loads[:0]:",
        "tests/unit/policy/test_leases.py",
    ),
    Mutant(
        "resumes an engine whose contents are unknown",
        "service/refitd/policy/observe.py",
        "                known=False,\n                resume_owed=False,\n",
        "                known=True,\n                resume_owed=True,\n",
        "tests/unit/policy/test_observe.py",
    ),
    Mutant(
        "believes a repair that was refused",
        "service/refitd/engine/sglang/adapter.py",
        "        if target.repairs:\n            return _tainted(reason, watch)\n",
        "",
        "tests/unit/engine/test_sglang_adapter.py",
    ),
    Mutant(
        "compares clocks",
        "service/refitd/policy/goals.py",
        "return max(unfinished or good, key=lambda version: version.order, default=None)",
        "return max(unfinished or good, key=lambda version: version.created_at, default=None)",
        "tests/unit/policy/test_target.py",
    ),
    Mutant(
        "follows a link",
        "client/refitd_client/files/plain_file.py",
        "_FOLDER | (0 if follow else os.O_NOFOLLOW)",
        "_FOLDER",
        "tests/unit/reclaim/test_trash.py",
    ),
    Mutant(
        "calls an engine without a durable intent",
        "service/refitd/rollout/entry.py",
        "            await self.store.durable()\n        except JournalError",
        "            pass\n        except JournalError",
        "tests/reliability/crash/test_rollout_crash.py",
    ),
    Mutant(
        "takes an empty listing for an empty root",
        "service/refitd/policy/keep.py",
        "case Listing() if not listing.found:",
        "case Listing() if len(listing.found) < 0:",
        "tests/unit/policy/test_keep.py tests/unit/reclaim/test_sweep.py",
    ),
    Mutant(
        "does not ask again after it has retired a version",
        "service/refitd/reclaim/sweep.py",
        "        await self._writer.durable()\n        now = self._verdict_of(record.id, listing)\n"
        "        if now is None or now.keep:\n"
        "            return version_line(now or verdict, self._seen.weight(record))\n",
        "        await self._writer.durable()\n",
        "tests/unit/reclaim/test_sweep.py",
    ),
    Mutant(
        "does not hold contents against the record",
        "service/refitd/engine/sglang/verify.py",
        "recorded is not None and says.fingerprint != recorded",
        "False",
        "tests/unit/engine/test_sglang_verify.py",
    ),
    Mutant(
        "loads files that have changed since they were checked",
        "service/refitd/rollout/reconciler.py",
        "if not unchanged or path is None:",
        "if path is None:",
        "tests/unit/rollout/test_rollout.py",
    ),
    Mutant(
        "serves a version that failed validation",
        "service/refitd/catalog/judge.py",
        "Invalid(code, reason):\n                self.reject(record.id, reason, code)",
        "Invalid(code, reason):\n                self._move(record.id, VersionState.SEALED, reason)",
        "tests/reliability/simulation/test_simulation.py",
    ),
    Mutant(
        "offers a slot whose manifest a power cut may bring back",
        "service/refitd/reclaim/slots.py",
        "        os.unlink(name, dir_fd=folder)\n    sync(folder)\n",
        "        os.unlink(name, dir_fd=folder)\n",
        "tests/reliability/crash/test_slots_power_loss.py",
    ),
    Mutant(
        "writes into a slot with a second hard link",
        "client/refitd_client/publish/run_folder.py",
        "if status.st_nlink != 1:",
        "if status.st_nlink < 1:",
        "tests/unit/publish/test_publisher_slots.py",
    ),
    Mutant(
        "recycles what an engine out of reach may still read",
        "service/refitd/policy/spare_slots.py",
        'leases(views, dead_after=float("inf"))',
        "leases(views)",
        "tests/unit/policy/test_spare.py",
    ),
    Mutant(
        "patches a copy that an engine reads",
        "service/refitd/policy/materialize.py",
        "reads=tuple(_sentences(held, naming)),",
        "reads=(),",
        "tests/unit/policy/test_copies_readers.py",
    ),
    Mutant(
        "patches a copy that still has its note",
        "service/refitd/materialize/writing.py",
        "        os.unlink(name + NOTE_ENDING, dir_fd=run)\n",
        "        pass\n",
        "tests/reliability/crash/test_copies_power_loss.py",
    ),
    Mutant(
        "believes a copy whose fingerprints are others",
        "service/refitd/materialize/writing.py",
        "if found.get(name) != value:",
        "if name not in found:",
        "tests/unit/materialize/test_copies_disk.py",
    ),
    Mutant(
        "writes a copy from another that was damaged",
        "service/refitd/materialize/writing.py",
        "if proof.digests.get(name, digest) != digest:",
        "if digest is None:",
        "tests/unit/materialize/test_copies_disk.py",
    ),
    Mutant(
        "collects the base of a delta that is kept",
        "service/refitd/policy/needs.py",
        "if base is not None and version.state",
        "if base is None and version.state",
        "tests/unit/policy/test_keep.py",
    ),
    Mutant(
        "forgets an engine's unknown contents at a restart",
        "service/refitd/state/store.py",
        "            self._interrupted(attempt)\n",
        '            self.close_attempt(replace(attempt, outcome="TAINTED"))\n',
        "tests/reliability/crash/test_rollout_crash.py",
    ),
    Mutant(
        "takes what is published again for what was collected",
        "service/refitd/policy/admit.py",
        "if known.state is VersionState.DELETED and seen.there:",
        "if False:",
        "tests/unit/policy/test_admit.py",
    ),
    Mutant(
        "calls served what no engine has any more",
        "service/refitd/policy/served.py",
        "return version.state not in _FILES_GONE",
        "return True",
        "tests/unit/policy/test_served.py",
    ),
    Mutant(
        "takes another writer for a restart",
        "service/refitd/policy/contest.py",
        "        return Cause.ANOTHER_WRITER\n    # A seed",
        "        return Cause.RESTARTED\n    # A seed",
        "tests/unit/policy/test_contest.py",
    ),
    Mutant(
        "fights another writer for ever",
        "service/refitd/policy/contest.py",
        "engine.contests > len(WAITS)",
        "engine.contests > 10 * len(WAITS)",
        "tests/unit/policy/test_contest.py",
    ),
    Mutant(
        "loads a vLLM once after a load that failed",
        "service/refitd/engine/vllm/loads.py",
        "or not began_torn:",
        "or True:",
        "tests/reliability/simulation/test_found.py",
    ),
    Mutant(
        "resumes a vLLM after a load that failed",
        "service/refitd/engine/vllm/adapter.py",
        "return await self._restore(reason, before, watch)",
        "return await self._as_before(reason, target, watch)",
        "tests/unit/engine/test_vllm_adapter.py tests/reliability/simulation/test_simulation.py",
    ),
    Mutant(
        "takes the answer of one of a vLLM's ranks for that of all",
        "service/refitd/engine/vllm/reply.py",
        "    if answers == [None] * ranks:",
        "    if answers is not None and None in answers:",
        "tests/unit/engine/test_vllm_adapter.py tests/reliability/attack/test_attack_answers.py",
    ),
    Mutant(
        "believes a vLLM whose ranks answer earlier calls",
        "service/refitd/engine/vllm/reply.py",
        "all(isinstance(each, list) for each in answers)",
        "True",
        "tests/unit/engine/test_vllm_adapter.py",
    ),
    Mutant(
        "takes a vLLM for untouched whose extension does not know",
        "service/refitd/engine/vllm/reply.py",
        '            return Unclear(f"the load failed, and what it left',
        '            return Untouched(f"the load failed, and what it left',
        "tests/unit/engine/test_vllm_extension_answers.py",
    ),
    Mutant(
        "repairs a vLLM as an SGLang after a start",
        "service/refitd/engine/connect.py",
        "        if not self._was_reached:",
        "        if False:",
        "tests/unit/engine/test_engine_kinds.py",
    ),
    Mutant(
        "waits for the answer of a vLLM whose engine has died",
        "service/refitd/engine/vllm/watched.py",
        "            if isinstance(seen, Reply) and seen.status == 503 and not seen.text:",
        "            if False:",
        "tests/unit/engine/test_vllm_watched.py --timeout 20",
    ),
    Mutant(
        "takes a proxy's word that a vLLM has died",
        "service/refitd/engine/vllm/watched.py",
        " and seen.status == 503 and not seen.text:",
        " and seen.status == 503:",
        "tests/unit/engine/test_vllm_watched.py",
    ),
    Mutant(
        "takes one refused connection for a vLLM's end",
        "service/refitd/engine/vllm/watched.py",
        "REFUSALS = 3",
        "REFUSALS = 1",
        "tests/unit/engine/test_vllm_watched.py",
    ),
    Mutant(
        "loads one of a pair while the other computes",
        "service/refitd/engine/sglang/unit.py",
        "        await self._decided.wait()\n",
        "",
        "tests/unit/engine/test_sglang_unit.py",
    ),
    Mutant(
        "lets half a load of a pair count as a refusal",
        "service/refitd/engine/sglang/unit.py",
        " or (Outcome.ACK in found and len(found) > 1)",
        "",
        "tests/unit/engine/test_sglang_unit.py",
    ),
    Mutant(
        "serves an adapter that the server does not compute with",
        "service/refitd/engine/applied.py",
        "if same := [each for each in others if found[each] == found[adapter]]:",
        "if same := []:",
        "tests/unit/engine/test_sglang_lora_applied.py",
    ),
    Mutant(
        "writes into a draft model of its own",
        "service/refitd_sglang/plugin.py",
        "        return self._draft_is_apart\n",
        "        return False\n",
        "tests/unit/plugin/test_plugin_update.py",
    ),
    Mutant(
        "takes a manifest from an upstream that came once",
        "service/refitd/follow/puller.py",
        "        if once != twice:",
        "        if False:",
        "tests/unit/follow/test_puller.py",
    ),
    Mutant(
        "serves on a host what the hub has not wanted yet",
        "service/refitd/policy/goals.py",
        "    return [last, *(v for v in versions if v.order < last.order and v.served_at is not None)]",
        "    return list(versions)",
        "tests/reliability/simulation/test_hosts.py",
    ),
    Mutant(
        "never tries again on a host what could not be pulled",
        "service/refitd/follow/follower.py",
        "if failure.until > now}",
        "if failure.times}",
        "tests/reliability/simulation/test_hosts.py tests/reliability/simulation/test_found.py",
    ),
    Mutant(
        "believes a stock engine that says it has received all",
        "service/refitd/engine/sglang/group_adapter.py",
        "if (doubt := why_not_proved(ranks, met.expected)) is not None:",
        "if (doubt := why_not_proved(ranks, met.expected)) is not None and not ranks:",
        "tests/unit/engine/test_sglang_group_adapter.py",
    ),
    Mutant(
        "has any process say what a stock engine is to hold",
        "service/refitd/engine/sglang/sender_line.py",
        "if welcome.code != code_of(transfer.name, welcome.expected, secret):",
        "if not welcome.code:",
        "tests/unit/engine/test_sglang_group_adapter.py",
    ),
    Mutant(
        "gives stock engines what is handed over on one host",
        "service/refitd/policy/goals.py",
        "(version.is_sent and engine.stock_receiver is not None)",
        "engine.stock_receiver is not None",
        "tests/unit/policy/test_stock_offers.py",
    ),
    Mutant(
        "sends stock engines what gets no files",
        "client/refitd_client/publish/route.py",
        "if not durable.is_always:",
        "if durable.every == 0:",
        "tests/unit/publish/test_stock_route.py",
    ),
    Mutant(
        "looks at a version that is not right no second time",
        "service/refitd_plugin/proving.py",
        "if fault and reading.ahead:",
        "if False:",
        "tests/reliability/faults/test_faults_early_look.py",
    ),
    Mutant(
        "loads what it has not proved beside what was copied ahead",
        "service/refitd_plugin/loading.py",
        "return not plan.residual and not self.tables(plan, source).moves_of(source).rest",
        "return True",
        "tests/reliability/faults/test_faults_early_look.py",
    ),
    Mutant(
        "copies the next version over one that is to be loaded",
        "service/refitd_plugin/staging.py",
        "if self._lease is not None and self._lease() is not None:",
        "if False:",
        "tests/reliability/faults/test_faults_early_look.py",
    ),
]


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_notice_a_product_that(mutant: Mutant, tmp_path: Path) -> None:
    for part in ("service", "client"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, "the line that it breaks has changed: bring the mutant up to date"
    file.write_text(text.replace(mutant.old, mutant.new))
    path = os.pathsep.join(str(tmp_path / part) for part in ("service", "client"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "REFITD_SIMULATION_STEPS": "4000", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode not in NOT_COUNTED, f"nobody noticed:\n{done.stdout[-2000:]}"
