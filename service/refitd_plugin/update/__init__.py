"""One update on one rank: a version made ready, loaded by the model's loader or by the plan learned of it, put back.

ranks          what the ranks decide together, pure, and how they report to each other
rank_engine    one rank's part: prepare, decide with the others, write, take back; which service leads the engine
preparing      versions made ready: looked at by `prefetch`, in a process beside the rank, or in this thread; what is
               served, and what it is put back from
receiving      what a trainer sends to this rank over a process group, and which parts it needs
update_source  how a version gets into the model, and what is served then
loading        one load, by the model's loader or by the plan, and the feed that it is given
recorder       watches one load and its copies; `plan` replays them as plain copies ever after
"""
