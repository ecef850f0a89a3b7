"""How long a call to an engine's server may take, in seconds."""

PROBE_SECONDS = 5.0
CALL_SECONDS = 30.0  # pause, resume, flush, label: seconds at most on a server that works
CHECK_SECONDS = 120.0  # to hash all tensors
TRIAL_SECONDS = 60.0
