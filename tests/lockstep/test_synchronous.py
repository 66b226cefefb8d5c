"""Fixed lockstep runs under synchronous scheduling."""

from lockstep.test_lockstep import fixed_runs

test_fixed_runs_equal_upstream = fixed_runs(asynchronous=False, drafts=0)
