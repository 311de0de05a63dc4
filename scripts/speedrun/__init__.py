"""A recipe timed over seeds, against the peak rate of this machine and beside the steps of other frameworks."""
