"""What the product is broken into: the mutants, each with the tests that must notice it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs once in `file`."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def parsed(block: str) -> Mutant:
    name, head, *lines = block.rstrip("\n").split("\n")
    file, *tests = head.split()
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return Mutant(name, file, old, new, " ".join(f"tests/{each}" if "/" in each else each for each in tests))


TABLE = r"""
# drops an fsync of a published file
client/refitd_client/write/version_folder.py reliability/crash/test_publish_power_loss.py
-durable.sync(shard.fd)  #
+pass  #
# lets the journal commit without a sync
service/refitd/state/journal/database.py reliability/crash/test_journal_power_loss.py
-"synchronous=FULL"
+"synchronous=NORMAL"
# skips the lease of a load
service/refitd/policy/leases.py unit/policy/test_leases.py
-for load in engine.loads:
+for load in engine.loads[:0]:
# resumes an engine whose contents are unknown
service/refitd/policy/observe.py unit/policy/test_observe.py
-                known=False,
-                resume_owed=False,
+                known=True,
+                resume_owed=True,
# believes a repair that was refused
service/refitd/engine/transaction.py unit/engine/test_misbehaving_servers.py
-        if self._target.repairs:
-            return self._tainted(reason)
# compares clocks
service/refitd/policy/goals.py unit/policy/test_target.py
-return max(unfinished or good, key=lambda version: version.order, default=None)
+return max(unfinished or good, key=lambda version: version.created_at, default=None)
# follows a link
client/refitd_client/files/plain_file.py unit/reclaim/test_trash.py
-_AS_FOLDER | (0 if follow else os.O_NOFOLLOW)
+_AS_FOLDER
# calls an engine without a durable intent
service/refitd/update/entry.py reliability/crash/test_update_crash.py
-            await self.store.durable()
-        except JournalError
+            pass
+        except JournalError
# takes an empty listing for an empty root
service/refitd/policy/keep.py unit/policy/test_keep.py unit/reclaim/test_sweep.py
-case Listing() if not listing.found and any(v.state is not VersionState.RETIRED for v in versions):
+case Listing() if len(listing.found) < 0 and any(v.state is not VersionState.RETIRED for v in versions):
# does not ask again after it has retired a version
service/refitd/reclaim/sweep.py unit/reclaim/test_sweep.py
-        await self._books.durable()
-        now = self._verdict_of(record.id, listing)
-        if now is None or now.keep:
-            return version_line(now or verdict, self._seen.weight(record))
+        await self._books.durable()
# does not hold contents against the record
service/refitd/engine/transaction.py unit/engine/test_sglang_verify.py
-if same is False:
+if False:
# loads files that have changed since they were checked
service/refitd/update/reconciler.py unit/update/test_update.py
-if not unchanged or path is None:
+if path is None:
# serves a version that failed validation
service/refitd/catalog/judge.py reliability/simulation/test_simulation.py
-Invalid(code, reason):
-                self.reject(record.id, reason, code, signature=looked)
+Invalid(code, reason):
+                self._move(record.id, VersionState.SEALED, reason)
# offers a slot whose manifest a power cut may bring back
service/refitd/reclaim/slots.py reliability/crash/test_slots_power_loss.py
-        os.unlink(name, dir_fd=folder)
-    sync(folder)
+        os.unlink(name, dir_fd=folder)
# writes into a slot with a second hard link
client/refitd_client/publish/run_folder.py unit/publish/test_publisher_slots.py
-if status.st_nlink != 1:
+if status.st_nlink < 1:
# recycles what an engine out of reach may still read
service/refitd/policy/spare_slots.py unit/policy/test_spare.py
-leases(views, dead_after=float("inf"))
+leases(views)
# deletes a copy that an engine reads
service/refitd/policy/materialize.py unit/policy/test_copies_kept.py
-kinds = _READS if copy.holds is None else _READS | _GOES_THERE
+kinds = _GOES_THERE
# believes a copy that was changed while nobody looked
service/refitd_inside/materialize/materializer.py unit/materialize/test_deltas_served.py
-return found == copy.signature
+return True
# believes a copy whose fingerprints are others
service/refitd_inside/materialize/writing.py unit/materialize/test_copies_disk.py
-if found.get(name) != value:
+if name not in found:
# makes a copy from another that was damaged
service/refitd_inside/materialize/writing.py unit/materialize/test_copies_disk.py
-if known.get(name, digest) != digest:
+if known is None:
# collects the base of a delta that is kept
service/refitd/policy/keep.py unit/policy/test_keep.py
-if base is not None and not (version.state
+if base is None and not (version.state
# forgets an engine's unknown contents at a restart
service/refitd/state/store.py reliability/crash/test_update_crash.py
-            if after is not None:
+            if False:
# takes what is published again for what was collected
service/refitd/policy/admit.py unit/policy/test_admit.py
-if known.state is VersionState.DELETED and seen.there:
+if False:
# calls served what no engine has any more
service/refitd/policy/traffic.py unit/policy/test_served.py
-return not version.state.is_gone
+return True
# takes another writer for a restart
service/refitd/policy/contest.py unit/policy/test_contest.py
-        return Cause.ANOTHER_WRITER
-    # A seed
+        return Cause.RESTARTED
+    # A seed
# fights another writer for ever
service/refitd/policy/contest.py unit/policy/test_contest.py
-engine.trouble.contests > len(WAITS)
+engine.trouble.contests > 10 * len(WAITS)
# loads a vLLM once after a load that failed
service/refitd/engine/vllm/contents.py reliability/simulation/test_found.py
-or not began_torn:
+or True:
# resumes a vLLM after a load that failed
service/refitd/engine/transaction.py unit/engine/test_vllm_adapter.py reliability/simulation/test_simulation.py
-return await self._restored(reason, before)
+return await self._as_before(reason)
# takes the answer of one of a vLLM's ranks for that of all
service/refitd/engine/vllm/contents.py unit/engine/test_misbehaving_servers.py reliability/attack/test_attack_answers.py
-    if answers == [None] * ranks:
+    if answers is not None and None in answers:
# takes a vLLM for untouched whose extension does not know
service/refitd/engine/replies.py unit/engine/test_vllm_extension_answers.py
-            return Unclear(f"the load failed, and what it left
+            return Untouched(f"the load failed, and what it left
# repairs a vLLM as an SGLang after a start
service/refitd/engine/registry.py unit/engine/test_engine_kinds.py
-        if not self._was_reached:
+        if False:
# waits for the answer of a vLLM whose engine has died
service/refitd/engine/vllm/dialect.py unit/engine/test_vllm_watched.py --timeout 20
-            if isinstance(seen, Reply) and seen.status == 503 and not seen.text:
+            if False:
# takes a proxy's word that a vLLM has died
service/refitd/engine/vllm/dialect.py unit/engine/test_vllm_watched.py
- and seen.status == 503 and not seen.text:
+ and seen.status == 503:
# takes one refused connection for a vLLM's end
service/refitd/engine/vllm/dialect.py unit/engine/test_vllm_watched.py
-REFUSALS = 3
+REFUSALS = 1
# loads one of a pair while the other computes
service/refitd/engine/sglang/pair.py unit/engine/test_sglang_unit.py
-        await self._decided.wait()
# lets half a load of a pair count as a refusal
service/refitd/engine/sglang/pair.py unit/engine/test_sglang_unit.py
- or (Outcome.ACK in found and len(found) > 1)
# serves an adapter that the server does not compute with
service/refitd/engine/adapters.py unit/engine/test_sglang_lora_applied.py
-if same := [each for each in others if found[each] == found[adapter]]:
+if same := []:
# writes into a draft model of its own
service/refitd_sglang/plugin.py unit/plugin/test_plugin_update.py
-        return self._draft_is_apart
+        return False
# takes a manifest from an upstream that came once
service/refitd_hosts/follow/puller.py unit/follow/test_puller.py
-        if once != twice:
+        if False:
# serves on a host what the hub has not wanted yet
service/refitd/policy/goals.py reliability/simulation/test_hosts.py
-return [last, *(v for v in versions if v.order < last.order and (v.served_at is not None or v.id in held))]
+return list(versions)
# never tries again on a host what could not be pulled
service/refitd_hosts/follow/follower.py reliability/simulation/test_hosts.py reliability/simulation/test_found.py
-if failure.until > now}
+if failure.times}
# takes files for proved that changed while they were read
service/refitd_plugin/proof/proving.py unit/plugin/test_plugin_proving.py
-elif not source.is_unchanged():
+elif False:
# says of ranks that all are as far as the one that has come furthest
client/refitd_client/sharded/rank_slot.py unit/sharded/test_slot_pieces.py
-tuple(min(numbers[shard::count])
+tuple(max(numbers[shard::count])
# keeps what the ranks of an engine have found wrong in their slices
service/refitd_plugin/update/ranks.py unit/plugin/test_plugin_rank_slices.py
-return Decision(NextStep.RESTORE, fault) if fault else Decision(NextStep.KEEP)
+return Decision(NextStep.KEEP)
# takes a delta for sound whose indices fall between two stretches
client/refitd_client/delta/reader.py unit/delta/test_delta_check.py
-before < after or number in lasts
+before < after or number >= 0
# says that a delta is in order of which a stretch was not looked at
client/refitd_client/delta/reader.py unit/delta/test_delta_check.py
-return self._seen * self.width == self.end - self.begin and all(
+return all(
# has followers of a store serve what a hub has pushed, before the hub wants it
client/refitd_client/bucket/run.py unit/bucket/test_bucket_run.py
-desired=(pointer.desired or pointer.target) if self._steers else None
+desired=pointer.desired if self._steers else None
# keeps in a store what was rolled back from, in place of what could be gone back to
client/refitd_client/bucket/pointer.py unit/bucket/test_pointer.py
-for version in pointer.versions if not version.barred][: max(1, keep)]
+for version in pointer.versions][: max(1, keep)]
"""
MUTANTS = [parsed(block) for block in TABLE.split("\n# ")[1:]]
