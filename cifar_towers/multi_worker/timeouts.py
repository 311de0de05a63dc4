"""How long workers wait for each other, in seconds; at the start it is the setting worker_wait_seconds."""

HEARTBEAT_TIMEOUT_SECONDS = 20.0  # a worker that is silent for so long is lost
HEARTBEAT_INTERVAL_SECONDS = 1.0
REPLY_TIMEOUT_SECONDS = 5.0  # for a connected worker to introduce itself, and for the chief to answer
RETRY_SECONDS = 0.2  # between attempts to resolve or reach another worker
EXIT_GRACE_SECONDS = 3.0  # for the main thread to save, close its files and exit after another worker has ended
EXIT_TIMEOUT_SECONDS = 10.0  # for the other workers to exit once one has failed; then the launcher kills them
